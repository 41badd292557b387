"""Plots of scaling: published and own runs over the fitted model's curves."""

from dataclasses import dataclass
from functools import cached_property

import altair as alt
import numpy as np
import pandas as pd

from energynn.analysis import numbers, observations, regression, theme


@dataclass
class ScalingPanels:
    """Draw the panels of one figure, which share colours and shapes.

    rows: of ``observations.means_of_configurations``. model: rows of ``modelled.load_forecasts``
    whose curves are drawn. size: width and height of a panel in px. columns: of the legend.
    """

    rows: pd.DataFrame
    model: pd.DataFrame
    size: dict[str, int]
    columns: int = 3

    @cached_property
    def channels(self) -> dict:
        return {
            "color": theme.series_colour(self.rows, self.columns),
            "shape": theme.provenance_shape(self.rows, title="value is", timed=True),
        }

    def over_devices(
        self, quantity: str, y_title: str, title: str, extra_limits=()
    ) -> alt.LayerChart:
        """Draw a quantity over devices, with one standard deviation to each side."""
        rows = self.rows
        of_model = self._model_of(quantity)
        bounds = observations.std_bounds(rows, quantity)
        are_gpus = (rows["device_kind"] == "gpu").all()
        x = alt.X("devices:Q", title="GPUs" if are_gpus else "devices")
        x = theme.log_axis(x, [*rows["devices"], *of_model["devices"]], base=2.0)
        return self._panel(bounds, of_model, x, y_title, title, extra_limits)

    def speed_up(self, title: str) -> alt.LayerChart:
        """Draw the speed-up against the ratio of GPUs to the base run, and the ideal line."""
        rows = self.rows.query("devices > base_devices")
        rows = observations.std_bounds(rows, "speed_up")
        of_model = self._model_of("speed_up").query("devices >= base_devices")
        rows, of_model = (
            part.assign(ratio=part["devices"] / part["base_devices"])
            for part in (rows, of_model)
        )
        ends = [1.0, max([*rows["ratio"], *of_model["ratio"]])]
        x = alt.X("ratio:Q", title="GPUs over the base's")
        x = theme.log_axis(x, ends, base=2.0, padding=6)
        ideal = alt.Chart(pd.DataFrame({"ratio": ends})).encode(x, y="ratio:Q")
        ideal = ideal.mark_line(color=theme.GREY_COLOUR, strokeWidth=1.3)
        return self._panel(
            rows, of_model, x, "speed-up", title, ends, [ideal], base=2.0
        )

    def against_hours(self, title: str, unit: str = "kWh") -> alt.LayerChart:
        """Draw energies in kWh or Wh over GPU hours, with one standard deviation to each side.

        Energies in kWh have a line through the origin for each series with at least three runs on
        4 or more GPUs.
        """
        over = observations.std_bounds(self.rows, f"energy_total_{unit}")
        of_model = self._model_of("energy_per_gpu_hour_kW")
        ends = of_model[["value", "low", "high"]].mul(
            of_model["gpu_hours"], axis="index"
        )
        of_model = of_model.assign(**ends)
        x_title = "GPU hours (h)" if unit == "kWh" else "device hours (h)"
        hours = [*over["gpu_hours"], *of_model["gpu_hours"]]
        x = theme.log_axis(alt.X("gpu_hours:Q", title=x_title), hours)
        lines = self._lines_through_origin(x) if unit == "kWh" else []
        return self._panel(over, of_model, x, f"energy ({unit})", title, between=lines)

    def _panel(
        self, rows, of_model, x, y_title, title, extra_limits=(), between=(), base=10.0
    ) -> alt.LayerChart:
        """Draw the model's curves, what stands between, and points with their bars."""
        ends = [*rows["low"], *rows["high"], *of_model["low"], *of_model["high"]]
        y = alt.Y("value:Q", title=y_title)
        y = theme.log_axis(y, [*ends, *extra_limits], base=base)
        points = theme.draw_points_with_error_bars(
            alt.Chart(rows, title=title, **self.size), x, y, **self.channels
        )
        curves = theme.draw_model_curves(of_model, x, y, self.channels["color"])
        return alt.layer(*curves, *between, points)

    def _lines_through_origin(self, x: alt.X) -> list[alt.Chart]:
        is_fitted = self.rows["provenance"].isin(["published", "measured"])
        known = self.rows[is_fitted].query("devices >= 4")
        known = known.dropna(subset="energy_total_kWh")
        lines = []
        for (_, _, name), series in known.groupby(["origin", "system", "name"]):
            if len(series) > 2:
                fit = regression.fit("energy_total_kWh ~ 0 + gpu_hours", series)
                hours = series["gpu_hours"]
                along = np.geomspace(hours.min(), hours.max(), 20)
                line = fit.predict(pd.DataFrame({"gpu_hours": along}))
                line = alt.Chart(line.assign(name=name)).mark_line(strokeWidth=1.4)
                lines.append(line.encode(x, self.channels["color"], y="mean:Q"))
        return lines

    def _model_of(self, quantity: str) -> pd.DataFrame:
        return self.model[self.model["quantity"] == quantity]


def summarize_own_runs(runs: pd.DataFrame, workload: str) -> dict:
    """Count the own runs in series, and add up their energies: a row of a notebook's numbers."""
    own = runs.query("origin == 'own' and workload == @workload and series != ''")
    energy_kWh = observations.distinct_runs(own)["energy_total_kWh"]
    return {
        "runs": own["run"].nunique(),
        "energy_Wh": 1000 * energy_kWh.sum() if len(own) else None,
        "provenance": numbers.weakest_provenance(own["provenance"]),
        "source": ", ".join(sorted(set(own["run"]))) or "no own run",
        "holds_for": "origin == 'own', in a series",
    }
