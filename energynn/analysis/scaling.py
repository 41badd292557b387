"""Plots of scaling: published and own runs over the fitted model's curves.

``of_model``: rows of ``modelled.load`` of one quantity; ``channels``: color and shape.
"""

import altair as alt
import pandas as pd

from energynn.analysis import numbers, observations, regression, theme


def over_devices(
    rows: pd.DataFrame,
    quantity: str,
    y_title: str,
    of_model: pd.DataFrame,
    channels: dict,
    extra_limits=(),
    **chart,
) -> alt.LayerChart:
    """Draw a quantity over devices, with one standard deviation to each side."""
    bounds = observations.bounds(rows, quantity)
    are_gpus = (rows["device_kind"] == "gpu").all()
    x = alt.X("devices:Q", title="GPUs" if are_gpus else "devices")
    x = theme.log_axis(x, [*rows["devices"], *of_model["devices"]], base=2.0)
    ends = [*bounds["low"], *bounds["high"], *of_model["low"], *of_model["high"]]
    y = theme.log_axis(alt.Y("value:Q", title=y_title), [*ends, *extra_limits])
    points = theme.with_error_bars(alt.Chart(bounds, **chart), x, y, **channels)
    curves = theme.model_curves(of_model, x, y, channels["color"])
    return alt.layer(*curves, points)


def speed_up(
    rows: pd.DataFrame, of_model: pd.DataFrame, channels: dict, **chart
) -> alt.LayerChart:
    """Draw the speed-up against the ratio of GPUs to the base run, and the ideal line."""
    rows = observations.bounds(rows.query("devices > base_devices"), "speed_up")
    rows = rows.assign(ratio=rows["devices"] / rows["base_devices"])
    of_model = of_model.rename(columns={"value": "speed_up"})
    of_model["ratio"] = of_model["devices"] / of_model["base_devices"]
    of_model = of_model.query("ratio >= 1")
    ends = [1.0, max([*rows["ratio"], *of_model["ratio"]])]
    x, y = alt.X("ratio:Q", title="GPUs over the base's"), alt.Y("speed_up:Q")
    x = theme.log_axis(x, ends, base=2.0, padding=6)
    y = theme.log_axis(y.title("speed-up"), [*rows["speed_up"], *ends], 2.0, padding=6)
    points = alt.Chart(rows, **chart).mark_point(filled=True).encode(x, y, **channels)
    curves = theme.model_curves(of_model, x, y, channels["color"])
    ideal = alt.Chart(pd.DataFrame({"ratio": ends, "speed_up": ends})).encode(x, y)
    ideal = ideal.mark_line(color=theme.GREY, strokeWidth=1.3)
    return alt.layer(ideal, *curves, points)


def against_hours(
    rows: pd.DataFrame, of_model: pd.DataFrame, unit: str, channels: dict, **chart
) -> alt.LayerChart:
    """Draw energies in kWh or Wh over GPU hours; ``of_model`` has powers in kW.

    Energies in kWh have a line through the origin for each series with at least three runs on 4 or
    more GPUs.
    """
    over = observations.bounds(rows, f"energy_total_{unit}")
    ends = of_model[["value", "low", "high"]].mul(of_model["gpu_hours"], axis="index")
    of_model = of_model.assign(**ends)
    title = "GPU hours (h)" if unit == "kWh" else "device hours (h)"
    hours = [*over["gpu_hours"], *of_model["gpu_hours"]]
    x = theme.log_axis(alt.X("gpu_hours:Q", title=title), hours)
    energies = [*over["value"], *ends["low"], *ends["high"]]
    y = theme.log_axis(alt.Y("value:Q", title=f"energy ({unit})"), energies)
    points = alt.Chart(over, **chart).mark_point(filled=True).encode(x, y, **channels)
    layers = theme.model_curves(of_model, x, y, channels["color"])
    is_fitted = rows["provenance"].isin(["published", "measured"])
    is_fitted &= (rows["devices"] >= 4) & (unit == "kWh")
    known = rows[is_fitted].dropna(subset="energy_total_kWh")
    for (_, _, name), series in known.groupby(["origin", "system", "name"]):
        if len(series) > 2:
            line = regression.fit("energy_total_kWh ~ 0 + gpu_hours", series).line()
            layers.append(
                alt.Chart(line.assign(name=name))
                .mark_line(strokeWidth=1.4)
                .encode(x, channels["color"], y="mean:Q")
            )
    return alt.layer(*layers, points)


def own_summary(runs: pd.DataFrame, workload: str) -> dict:
    """Count the own runs in series, and add up their energies: a row of a notebook's numbers."""
    own = runs.query("origin == 'own' and workload == @workload and series != ''")
    energy_kWh = observations.distinct(own)["energy_total_kWh"]
    return {
        "runs": own["run"].nunique(),
        "energy_Wh": 1000 * energy_kWh.sum() if len(own) else None,
        "provenance": numbers.weakest(own["provenance"]),
        "source": ", ".join(sorted(set(own["run"]))) or "no own run",
        "holds_for": "origin == 'own', in a series",
    }
