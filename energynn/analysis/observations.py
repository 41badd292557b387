"""Published and own runs in one long table with common names and units: one row per run and
quantity.
"""

import re
from pathlib import Path

import numpy as np
import pandas as pd

from energynn.analysis import published, results
from energynn.analysis.results import COMPONENT_PROVENANCES
from energynn.experiment import config
from energynn.experiment.published_values import ASSUMED_SAMPLES, SERIES
from energynn.measure.energy import COMPONENTS

# how people read workloads and stages
FULL_NAMES = {
    "resnet50": "ResNet50",
    "fourcastnet": "FourCastNet",
    "pretrain": "pre-training",
    "finetune": "fine-tuning",
}
ENERGY_QUANTITIES = [f"energy_{component}_kWh" for component in ("total", *COMPONENTS)]
# Quantities of both origins.
QUANTITIES = [
    *ENERGY_QUANTITIES,
    "gpu_hours",
    "training_time_h",
    "top1_error_percent",
    "z500_rmse_m",
    "lead_time_h",
    "persistence_m",
    "samples_per_gpu_hour",
    "passes_per_gpu_hour",
    "sockets_per_gpu",
    "power_per_gpu_W",
    "mean_power_cpu_socket_W",
    "energy_per_gpu_hour_kW",
    "energy_per_dataset_sample_Wh",
    "speed_up",
    "share_cpu_percent",
    "share_ram_percent",
]
# What was run.
RUN_FACTS = [
    "origin",
    "series",
    *results.DESCRIPTION_COLUMNS,
    "data",
    "hardware",
    "base_devices",
    *results.SIZE_COLUMNS,
    "dataset_samples",
]
# around a model's name: its maker, form and memory
AROUND_MODEL_PATTERN = (
    r"\b(NVIDIA|AMD|Intel|Instinct|GeForce|Tesla|Generation|PCIe|NVL|SXM\d?|OAM|HBM\w+|\d*GB)\b"
    r"|\(R\)|-"
)
ENERGY_PART_PATTERN = re.compile("(?:energy|mean_power)_(gpu|cpu|ram)_")
# Published quantities that follow from others, whose spread they have.
DERIVED_SOURCES = {
    "energy_per_gpu_hour_kW": ["energy_total_kWh", "gpu_hours"],
    "energy_per_dataset_sample_Wh": ["energy_total_kWh"],
    "samples_per_gpu_hour": ["gpu_hours"],
    "passes_per_gpu_hour": ["gpu_hours"],
    "training_time_h": ["gpu_hours"],
}


def load(runs_dir: str | Path) -> pd.DataFrame:
    """Make a table of published and own runs, one row per run and series.

    Columns: ``origin`` ("published" or "own") and what else was run (``RUN_FACTS``), ``repeats``,
    ``run``, ``run_dir``, ``provenance`` of the total energy, and the ``QUANTITIES``: energies in
    kWh, times in h, powers per GPU or per CPU socket in W; NaN where a run does not have one.
    ``<quantity>_std`` is over the repeats of a published mean (divisor repeats - 1), ``_half`` half
    a unit of the last printed digit, ``_place`` where it was published.

    ``series`` is the study's (R1 to F5, runs/published/series.toml) where a run belongs to one,
    else a name made of what is constant, else ""; ``name`` is its label, ``given_name`` the run's.
    Own energies and hours are perun's, as published ones, where all was measured. ``speed_up``
    relates to the mean training time of a series on ``base_devices``. Records left out stand with
    the reason in ``attrs["excluded"]``.
    """
    runs = results.load_records(runs_dir)
    study = published_runs()
    own = _own_runs(runs)
    shared = [*study, *RUN_FACTS, *COMPONENT_PROVENANCES, "run_dir", "given_name"]
    own = own[own.columns.intersection(shared)]
    table = pd.concat([study, own], ignore_index=True).copy()
    table.attrs["excluded"] = runs.attrs["excluded"]
    return table


def means_of_configurations(table: pd.DataFrame) -> pd.DataFrame:
    """Reduce the rows of ``load`` to one per configuration and series: means over own repeats.

    Published rows are means already.
    """
    reduced = mean_of_repeats(
        table[table["origin"] == "own"],
        [*RUN_FACTS, "provenance", *COMPONENT_PROVENANCES],
        QUANTITIES,
    )
    reduced["run"] = reduced["run"].str.join(", ")
    reduced = reduced.sort_values(["series", "devices"], kind="stable")
    return pd.concat(
        [table[table["origin"] == "published"], reduced], ignore_index=True
    ).copy()  # in one piece


def mean_of_repeats(
    runs: pd.DataFrame, alike: list[str], numbers: list[str]
) -> pd.DataFrame:
    """Reduce runs that are ``alike`` to one row: means of ``numbers``, and the list of ``run``.

    ``_std`` is the standard deviation over ``repeats`` runs (divisor repeats - 1), NaN for a single
    run: its scatter is unknown, not zero.
    """
    groups = runs.groupby(alike, dropna=False, sort=False)
    return pd.concat(
        [
            groups[numbers].mean(),
            groups[numbers].std().add_suffix("_std"),
            groups["run"].agg(list),
            groups.size().rename("repeats"),
        ],
        axis=1,
    ).reset_index()


def std_bounds(rows: pd.DataFrame, quantity: str) -> pd.DataFrame:
    """Select the rows that have a quantity: ``value``, ``low`` and ``high``, one std to each side.

    ``provenance`` is then the quantity's. Where the scatter is unknown, all three are equal.
    """
    known = rows.dropna(subset=quantity)
    value = known[quantity]
    spread = known.get(f"{quantity}_std", 0.0 * value).fillna(0.0)
    return known.assign(
        value=value,
        low=value - spread,
        high=value + spread,
        provenance=provenance_of_quantity(quantity, known),
    )


def distinct_runs(rows: pd.DataFrame) -> pd.DataFrame:
    """Take each run once, whatever series it belongs to: its first row."""
    return rows.drop_duplicates(["origin", "run"])


def provenance_of_quantity(quantity: str, runs: pd.DataFrame) -> pd.Series:
    """Tell how good a quantity is: a part of the energy may be better known than the total.

    Times and metrics of a run whose energy is estimated are measured.
    """
    of_energy = runs["provenance"]
    part = ENERGY_PART_PATTERN.match(quantity)
    if part and f"energy_{part[1]}_provenance" in runs:
        of_energy = runs[f"energy_{part[1]}_provenance"].fillna(of_energy)
    if quantity.startswith(("energy_", "mean_power_", "share_", "power_")):
        return of_energy
    return of_energy.replace("estimated", "measured")


def published_runs(name: str = "values") -> pd.DataFrame:
    """Make the published rows of ``load``, or ("derived") those that follow from them."""
    runs = published.tabulate_runs(name)
    runs = runs.reindex(columns=runs.columns.union(QUANTITIES, sort=False))
    hours = runs["gpu_hours"]
    runs["training_time_h"] = (hours / runs["devices"]).fillna(runs["training_time_h"])
    assumed = runs["dataset"].map(ASSUMED_SAMPLES)
    runs["dataset_samples"] = runs["dataset_samples"].fillna(assumed)
    # A node has four GPUs and two sockets, and counts in full (section 3.1).
    runs["sockets_per_gpu"] = 2 * np.ceil(runs["devices"] / 4) / runs["devices"]
    runs["samples_per_gpu_hour"] = runs["dataset_samples"] * runs["epochs"] / hours
    runs["passes_per_gpu_hour"] = (
        runs["samples_per_gpu_hour"] / runs["local_batch_size"]
    )
    runs = runs.assign(
        origin="published",
        recipe="published",
        system="HoreKa",
        device_kind="gpu",
        seed=0,
    )
    runs = _add_derived_quantities(runs)
    for quantity, sources in DERIVED_SOURCES.items():  # as if errors were independent
        relative = [runs[f"{source}_std"] / runs[source] for source in sources]
        runs[f"{quantity}_std"] = runs[quantity] * np.sqrt(
            sum(ratio**2 for ratio in relative)
        )
    runs = runs.assign(series=runs["series"].str.split()).explode("series")
    about = pd.DataFrame(SERIES).T
    name = runs["series"] + ": " + runs["series"].map(about["label"])
    runs["name"] = name.fillna(runs["series"])
    runs["data"] = runs["series"].map(about["data"]).fillna("fixed")
    return _add_speed_up(runs, ["series", "device_name"])


def training_names(runs: pd.DataFrame) -> pd.Series:
    """Name what was trained, for people: "FourCastNet pre-training"."""
    words = runs[["workload", "stage"]].replace(FULL_NAMES)
    return (words["workload"] + " " + words["stage"]).str.strip()


def hardware_names(runs: pd.DataFrame) -> pd.Series:
    """Name the model of each GPU as people do, "H100" or "RTX 4090", else the kind of device."""
    models = runs["device_name"].str.replace(AROUND_MODEL_PATTERN, " ", regex=True)
    models = models.str.split().str.join(" ")
    return models.where(runs["device_kind"] == "gpu", runs["device_kind"])


def runs_without_training(runs_dir: str | Path) -> pd.DataFrame:
    """Tabulate measured commands and imported perun files with the columns of ``load`` they have.

    ``origin`` is "command" or "imported", ``name`` what a person gave, else the command. Records
    left out stand in ``attrs["excluded"]``.
    """
    table = results.load_records(runs_dir, trained=False)
    name = table["name"].where(table["name"] != "", table["command"])
    name = name.where(name != "", table["run_id"])
    hours = table["device_hours_training"]
    table = table.assign(
        origin=table["workload"].replace("perun import", "imported"),
        series="",
        name=name,
        gpu_hours=hours.where(hours > 0),
    )
    return _add_derived_quantities(table)


def _own_runs(runs: pd.DataFrame) -> pd.DataFrame:
    table = runs.dropna(subset=["training_time_s"])
    # Published energies are perun's; own ones are taken in the same way where all is measured.
    by_perun = (table["energy_total_provenance"] == "measured") & table[
        "energy_perun_total_kWh"
    ].notna()
    for name in ENERGY_QUANTITIES:
        table[name] = table[name.replace("energy_", "energy_perun_")].where(
            by_perun, table[name]
        )
    table["origin"] = "own"
    table["repeats"] = 1
    table["gpu_hours"] = table["device_hours_perun"].where(
        by_perun, table["device_hours_training"]
    )
    table["top1_error_percent"] = 100 * table["top1_error"]
    table["samples_per_gpu_hour"] = (
        table["samples_trained"] / table["device_hours_training"]
    )
    table["passes_per_gpu_hour"] = (
        table["forward_backward_passes"] / table["training_time_h"]
    )
    table = _add_derived_quantities(table)
    selected = results.select_scaling_series(table)
    is_ours = selected["workload"].isin(config.CONFIGS)
    stage = selected["stage"].replace(FULL_NAMES).where(is_ours, selected["workload"])
    name = (stage + ", " + selected["series"]).str.removeprefix(", ")
    selected["series"] = selected["name"] = name
    for name, conditions in SERIES.items():
        selected.loc[_is_in_series(selected, conditions), ["series", "name"]] = (
            name,
            f"{name}: {conditions['label']}",
        )
    alone = table[~table["run"].isin(selected["run"])]
    alone = alone.assign(series="", name="no series", data="")
    selected = _add_speed_up(selected, ["system", "device_name", "recipe", "name"])
    return pd.concat([selected, alone], ignore_index=True)


def _is_in_series(runs: pd.DataFrame, conditions: dict) -> pd.Series:
    """Select the runs of scaling series that meet the conditions of one of the study's."""
    constant = (
        "local_batch_size" if "local_batch_size" in conditions else "global_batch_size"
    )
    wanted = {"stage": "", "constant": constant} | conditions
    names = ["workload", "stage", "dataset", "data", "epochs", "constant", constant]
    is_same = (runs[names] == [wanted[name] for name in names]).all(axis=1)
    shares = runs["devices"].where(runs["data"] == "scaled", 1)
    whole = conditions.get("samples", ASSUMED_SAMPLES.get(conditions["dataset"]))
    # shares are rounded
    is_near = (runs["dataset_samples"] / shares / whole - 1).abs() < 0.01
    return is_same & is_near & runs["device_name"].str.contains(conditions["hardware"])


def _add_derived_quantities(table: pd.DataFrame) -> pd.DataFrame:
    """Add what follows from energies and times of a run."""
    energy_kWh = table["energy_total_kWh"]
    hours = table["gpu_hours"]
    table["hardware"] = hardware_names(table)
    table["energy_per_gpu_hour_kW"] = energy_kWh / hours
    table["energy_per_dataset_sample_Wh"] = 1000 * energy_kWh / table["dataset_samples"]
    table["power_per_gpu_W"] = 1000 * table["energy_gpu_kWh"] / hours
    table["mean_power_cpu_socket_W"] = (
        1000 * table["energy_cpu_kWh"] / hours / table["sockets_per_gpu"]
    )
    for part in ("cpu", "ram"):
        if f"share_{part}_percent" not in table:  # the study printed its own
            table[f"share_{part}_percent"] = (
                100 * table[f"energy_{part}_kWh"] / energy_kWh
            )
    return table


def _add_speed_up(table: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    """Add the fewest devices within each of the groups ``by``, and the speed-up over them."""
    groups = [table[name] for name in by]
    hours = table["training_time_h"]
    devices = table["devices"]
    base = devices.where(hours.notna()).groupby(groups).transform("min")
    base_hours = hours.where(devices == base).groupby(groups).transform("mean")
    return table.assign(base_devices=base, speed_up=base_hours / hours)
