"""All run records as one xarray.Dataset with dimension ``run``, in the units of the record and in kWh and h."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pandas as pd
import xarray as xr

from energynn import config as run_config
from energynn import records
from energynn.measure.energy import JOULE_PER_KWH, SECOND_PER_HOUR
from energynn.reading import json_table, one_fault

COMPONENTS = ("gpu", "cpu", "ram", "total")

# Quantities of a record that become variables; units and meanings stand in records.FIELDS.
QUANTITIES = tuple(
    name for name, kind in records.KIND_OF.items() if kind == "number" and name != "devices"
)
CPU_MODEL = ("cpu_model_idle_W_per_core", "cpu_model_full_W_per_core", "cpu_model_cores")
METRICS = (
    "top1_error",
    "validation_loss",
)  # others, named with lead times, where records have them
# What can be selected by; the rest of the configuration enters ``recipe``.
CONFIG_NUMBERS = ("devices", "local_batch_size", "global_batch_size", "epochs", "seed", "repeat")
LABELS = (
    "run_id",
    "workload",
    "stage",
    "dataset",
    "system",
    "device_kind",
    "device_name",
    "recipe",
    "recipe_at_any_pace",
    "preset",
    "loader",
    "run_dir",
)
TEXTS = (
    "status",
    "started_at",
    "git_commit",
    *(f"energy_{c}_provenance" for c in COMPONENTS),
    "machine_cpu",
    "cpu_model",
)
VARIED = (  # within a recipe
    "devices",
    "local_batch_size",
    "global_batch_size",
    "accumulation_steps",
    "repeat",
    "initial_run",
    "training_samples",
    "validation_samples",
)


def load(
    runs_dir: str | Path = "runs", only_valid: bool = True, only_the_studys: bool = False
) -> xr.Dataset:
    """Load the records of all systems under ``runs_dir`` into one Dataset with dimension ``run``.

    Coordinates say what was run (run_id, workload, stage, system, device_kind, devices ...);
    ``recipe`` is equal for runs that differ in devices, batch sizes and repeat only,
    ``recipe_at_any_pace`` also for those at another rate of steps; ``loader`` says what gives the
    batches. Data variables are the quantities of the record with ``units`` in their attributes,
    provenances as texts, final metrics under their own names, and kWh and h. NaN: absent from the
    record. ``only_the_studys`` leaves out workloads of one's own. Records that were left out stand
    with the reason in ``attrs["excluded"]``.
    """
    rows, excluded, seen = [], [], {}
    for path in sorted(Path(runs_dir).glob("*/*/record.json")):
        run_dir = path.parent
        with one_fault(run_dir, excluded):
            record = records.read_record(run_dir)
            if record["workload"] in records.NO_TRAINING:
                continue
            row = _row(record, run_dir)
            if only_the_studys and row["workload"] not in run_config.CONFIGS:
                raise ValueError(f"workload {row['workload']!r} belongs to no series")
            if only_valid and not record["valid"]:
                reasons = record.get("invalid_reasons", [])
                raise ValueError("; ".join(reasons) or "marked as not valid, without a reason")
            other = seen.setdefault(row["run_id"], run_dir)
            if other != run_dir:
                raise ValueError(f"run_id is the same as of {other}; keep one of the two")
            rows.append(row)
    return _dataset(rows, excluded)


def _row(record: dict, run_dir: Path) -> dict:
    """Flatten one record; ValueError says in one line why it cannot be used."""
    config = record["config"]
    row = {name: record.get(name, "") for name in (*LABELS, *TEXTS)}
    row |= {name: config.get(name, "") for name in ("stage", "dataset", "preset")}
    row |= {name: int(_number(name, config[name])) for name in CONFIG_NUMBERS}
    row["loader"] = _loader(config)
    row["run_dir"] = str(run_dir)
    row["recipe"] = _recipe(record, VARIED)
    row["recipe_at_any_pace"] = _recipe(record, _varied_with_pace(config))
    row["machine_cpu"] = record.get("machine", {}).get("cpu", "")
    for sensor in record.get("sensors", []):
        model = sensor.get("model") or {}
        if model:
            row["cpu_model"] = model.get("name", "")
            row |= {name: model.get(name.removeprefix("cpu_model_")) for name in CPU_MODEL}
    for component in COMPONENTS:  # records of earlier versions have a statistical interval instead
        statistical_J = record.get(f"energy_{component}_statistical_J", np.nan)
        row[f"energy_{component}_bound_J"] = statistical_J
    row |= {name: _number(name, record[name]) for name in QUANTITIES if name in record}
    return row | {name: _number(name, value) for name, value in record.get("metrics", {}).items()}


def _number(name: str, value) -> float:
    may_be_negative = name not in QUANTITIES or name.startswith("energy_net_")  # noise of idling
    if not isinstance(value, int | float) or (value < 0 and not may_be_negative):
        raise ValueError(f"{name} is no number that it can be: {value!r}")
    return float(value)


def _loader(config: dict) -> str:
    """Name what gives the batches, as "pil-4"; "device" where one batch stays on the device."""
    loading = config.get("image_loading", "states")
    if loading == "device" or config.get("states_on_device"):
        return "device"
    return f"{loading}-{config.get('loader_workers', 0)}"


def _varied_with_pace(config: dict) -> tuple[str, ...]:
    """Name what may vary where power is asked for: epochs only make a run on one batch longer."""
    pace = ("step_period_s", "epochs") if _loader(config) == "device" else ("step_period_s",)
    return VARIED + pace


def _recipe(record: dict, varied: tuple[str, ...]) -> str:
    """Compute a short digest of all of a configuration but what ``varied`` names."""
    kept = {name: value for name, value in record["config"].items() if name not in varied}
    return run_config.digest({"config": kept, "data": record.get("data_digest", "")})[:8]


def _dataset(rows: list[dict], excluded: list[str]) -> xr.Dataset:
    table = pd.DataFrame(rows)
    whole = (*LABELS, *TEXTS, *CONFIG_NUMBERS)
    known = dict.fromkeys((*whole, *QUANTITIES, *METRICS, *CPU_MODEL))
    table = table.reindex(columns=[*known, *table.columns.difference([*known])])
    numbers = dict.fromkeys(table.columns.difference(whole), float)
    kinds = dict.fromkeys((*LABELS, *TEXTS), object) | dict.fromkeys(CONFIG_NUMBERS, int)
    runs = xr.Dataset.from_dataframe(table.astype(numbers | kinds).rename_axis("run"))
    runs = runs.drop_vars("run").set_coords([*LABELS, *CONFIG_NUMBERS])
    for name in numbers:
        unit, meaning = records.FIELDS.get(name, (metric_unit(name), f"final value of {name}"))
        runs[name].attrs = {"units": unit or "1", "long_name": meaning}
    for method in ("energy", "energy_perun"):
        for component in COMPONENTS:
            kWh = runs[f"{method}_{component}_J"] / JOULE_PER_KWH
            runs[f"{method}_{component}_kWh"] = kWh.assign_attrs(units="kWh")
    hours = runs["training_time_s"] / SECOND_PER_HOUR
    runs["training_time_h"] = hours.assign_attrs(units="h")
    return runs.assign_attrs(excluded=excluded)


def metric_unit(name: str) -> str:
    """Unit of a final metric, which stands at the end of its name; errors and losses have none."""
    for ending, unit in (("_m2_s2", "m2 s-2"), ("_m", "m"), ("_s", "s"), ("_K", "K")):
        if name.endswith(ending):
            return unit
    return "1"


def lead_time_h(metric: str) -> int:
    """Lead time in hours that stands in a forecast metric's name, as in ``z500_rmse_12h_m``."""
    return int(re.search(r"_(\d+)h", metric).group(1))


def scaling_series(table: pd.DataFrame) -> pd.DataFrame:
    """Select the runs of one table of ``load`` into scaling series: one row per series and run.

    Runs belong to one series if they share recipe, system and device, either the local or the
    global batch size, and either the data set's size or its size per device, on at least two device
    counts; one run can be in several. Adds the columns ``series``, the label, ``constant``, a
    column's name, ``data``, "fixed" or "scaled", and ``base_devices``, the fewest of the series.
    """
    alike = ["workload", "stage", "dataset", "system", "device_name", "recipe", "seed"]
    samples = table["dataset_samples"].fillna(0)
    per_device = samples // table["devices"]  # shares are rounded down
    parts = [table.iloc[:0].assign(series="", constant="", data="", base_devices=0)]
    for constant, label in (("local_batch_size", "LBS"), ("global_batch_size", "GBS")):
        for data, size in (("fixed", samples), ("scaled", per_device)):
            for key, rows in table.groupby([*alike, constant, size]):
                if rows["devices"].nunique() < 2:
                    continue
                *_, seed, batch, _ = key
                series = f"constant {label} = {batch}"
                series += ", scaled data" if data == "scaled" else ""
                series += f", seed {seed}" if seed else ""
                base = rows["devices"].min()
                about = {"series": series, "constant": constant, "data": data}
                parts.append(rows.assign(**about, base_devices=base))
    return pd.concat(parts, ignore_index=True)


def phases(runs: xr.Dataset) -> pd.DataFrame:
    """Tabulate the records' ``energy_phases``: time and energy of each phase of each rank."""
    columns = ["run_id", "rank", "device", "phase", "time_s"]
    rows = []
    for run_id, run_dir in zip(runs["run_id"].values, runs["run_dir"].values, strict=True):
        record = json_table(Path(run_dir) / "record.json")
        rows += [{"run_id": run_id, **entry} for entry in record.get("energy_phases", [])]
    return pd.DataFrame(rows, columns=[*columns, *(f"energy_{c}_J" for c in COMPONENTS[:3])])
