"""Energy against GPU hours, of published and own runs over a model's curves."""

import altair as alt
import pandas as pd

from energynn.analysis import observations, regression, theme


def against_hours(
    rows: pd.DataFrame, of_model: pd.DataFrame, unit: str, channels: dict, **chart
) -> alt.LayerChart:
    """Draw energies in kWh or Wh over GPU hours; ``of_model`` has powers in kW.

    Energies in kWh have a line through the origin for each series with three runs on full nodes.
    ``channels``: color and shape.
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
