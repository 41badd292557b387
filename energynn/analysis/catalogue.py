"""One row for all that was published or measured: the points of notebooks/90_explore.ipynb."""

from pathlib import Path

import pandas as pd

from energynn.analysis import observations, results
from energynn.measure import machine

# Texts and numbers of a point that people read, in the order in which they are shown.
RUN_COLUMNS = [
    "run",
    "name",
    "command",
    "series",
    "origin",
    "provenance",
    "stands_in",
    "workload",
    "stage",
    "system",
    "hardware",
    "energy",
    "repeats",
]
NUMBER_COLUMNS = [
    "devices",
    "local_batch_size",
    "global_batch_size",
    "training_time_h",
    "gpu_hours",
    "power_W",
    "top1_error_percent",
    "z500_rmse_m",
    "samples_per_gpu_hour",
    "passes_per_gpu_hour",
    "mean_power_gpu_W",
]
TEXT_COLUMNS = [*RUN_COLUMNS, "run_dir", "all_series", "kind"]
QUANTITY_COLUMNS = [*NUMBER_COLUMNS, "energy_total_kWh", "low_kWh", "high_kWh"]
ORIGIN_NAMES = {"command": "measured command", "imported": "imported from perun"}
SMALL_kWh = 0.1  # less is told in Wh


def tabulate_points(runs_dir: str | Path = "runs") -> pd.DataFrame:
    """Take each published run, own run, measured command and imported perun file once.

    ``all_series`` joins the series of a run by "|", ``stands_in`` is the place of a published
    energy, ``repeats`` tells number, mean and scatter of the runs of one configuration and name.
    ``low_kWh`` and ``high_kWh`` lie one standard deviation beside that mean. ``is_mine``: own, and
    not committed by git; these come last, so that they are drawn on top. Unknown texts are "",
    numbers have six digits. Records left out stand with the reason in ``attrs["excluded"]``.
    """
    table = _rows_of_trainings(runs_dir)
    others = observations.runs_without_training(runs_dir)
    if len(others):
        others["kind"] = others["origin"].map(ORIGIN_NAMES)
        table = pd.concat([table, others], ignore_index=True)
    is_own = table["origin"] != "published"
    table = table.copy().assign(  # in one piece
        power_W=1000 * table["energy_per_gpu_hour_kW"],
        stands_in=table["energy_total_kWh_place"],
        energy=table["energy_total_kWh"].map(energy_text, na_action="ignore"),
        is_mine=is_own & ~_is_committed(table),
        **_scatter_of_repeats(table),
    )
    table = table.sort_values("is_mine", kind="stable")
    table = table.reindex(columns=[*TEXT_COLUMNS, *QUANTITY_COLUMNS, "is_mine"])
    table[TEXT_COLUMNS] = table[TEXT_COLUMNS].astype(object).fillna("").astype(str)
    numbers = table[QUANTITY_COLUMNS].astype(float)
    table[QUANTITY_COLUMNS] = numbers.map(lambda number: float(f"{number:.6g}"))
    table.attrs["excluded"] = others.attrs["excluded"]
    return table


def energy_text(kWh: float) -> str:
    """Write an energy as people read it."""
    return f"{1000 * kWh:.3g} Wh" if kWh < SMALL_kWh else f"{kWh:.4g} kWh"


def _rows_of_trainings(runs_dir: str | Path) -> pd.DataFrame:
    """Take each row of ``observations.load`` once, under the name that a person gave the run."""
    table = observations.load(runs_dir)
    series = table.groupby(["origin", "run"])["series"].agg("|".join)
    runs = observations.distinct_runs(table)
    runs = runs.join(series.rename("all_series"), on=["origin", "run"])
    given = results.load_records(runs_dir).set_index("run")["name"]
    return runs.assign(
        series=runs["name"],
        name=runs["run"].map(given),
        kind=observations.training_names(runs),
    )


def _is_committed(runs: pd.DataFrame) -> pd.Series:
    files = machine.call_git("ls-files", "runs").splitlines()
    committed = {Path(file).parent.name for file in files}
    folders = runs["run_dir"].fillna("").map(lambda text: Path(text).name)
    return folders.isin(committed)


def _scatter_of_repeats(runs: pd.DataFrame) -> dict[str, pd.Series]:
    """Tell the scatter of runs of one configuration and name; published values are means."""
    alike = runs.columns.intersection(["command", "name", *observations.RUN_FACTS])
    groups = runs.groupby([*alike], dropna=False)["energy_total_kWh"]
    mean_kWh = groups.transform("mean")
    std_kWh = groups.transform("std").fillna(runs["energy_total_kWh_std"])
    count = groups.transform("size").mask(
        runs["origin"] == "published", runs["repeats"]
    )
    words = count.map("{:.0f}: ".format) + mean_kWh.map(energy_text)
    words += (100 * std_kWh / mean_kWh).map(" +- {:.2g} %".format)
    return {
        "repeats": words.where(std_kWh.notna(), ""),
        "low_kWh": mean_kWh - std_kWh,
        "high_kWh": mean_kWh + std_kWh,
    }
