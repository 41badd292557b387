"""All run records as one xarray.Dataset with dimension ``run``, in the units of the record and in kWh and h."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pandas as pd
import xarray as xr

from energynn import config as run_config
from energynn import records
from energynn.measure.energy import JOULE_PER_KWH, SECOND_PER_HOUR
from energynn.reading import json_table, one_fault

COMPONENTS = ("gpu", "cpu", "ram", "total")

# Quantities of a record that become variables; units and meanings stand in records.FIELDS.
QUANTITIES = [
    name for name, kind in records.KIND_OF.items() if kind == "number" and name != "devices"
]
CPU_MODEL = ["cpu_model_idle_W_per_core", "cpu_model_full_W_per_core", "cpu_model_cores"]
METRICS = ["top1_error", "z500_rmse_m", "persistence_m", "lead_time_h"]
# What can be selected by; the rest of the configuration enters ``recipe``.
CONFIG_NUMBERS = ["devices", "local_batch_size", "global_batch_size", "epochs", "seed", "repeat"]
CONFIG_TEXTS = ["stage", "dataset", "preset"]
RECORD_TEXTS = ["run_id", "workload", "system", "device_kind", "device_name"]
LABELS = [*RECORD_TEXTS, *CONFIG_TEXTS, "recipe", "recipe_at_any_pace", "loader", "run_dir"]
PROVENANCES = [f"energy_{component}_provenance" for component in COMPONENTS]
TEXTS = [*LABELS, *PROVENANCES, "started_at", "machine_cpu", "cpu_model"]
VARIED = [  # within a recipe
    "devices",
    "local_batch_size",
    "global_batch_size",
    "accumulation_steps",
    "repeat",
    "initial_run",
    "training_samples",
    "validation_samples",
]


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
    rows, metrics, excluded, seen = [], [], [], {}
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
                raise ValueError("; ".join(record["invalid_reasons"]))
            other = seen.setdefault(row["run_id"], run_dir)
            if other != run_dir:
                raise ValueError(f"run_id is the same as of {other}; keep one of the two")
            metrics.append(_metrics(record["metrics"], row["stage"]))
            rows.append(row)
    return _dataset(rows, metrics, excluded)


def _row(record: dict, run_dir: Path) -> dict:
    """Flatten one record."""
    config = record["config"]
    loader = _loader(config)
    pace = ["step_period_s"]
    if loader == "device":
        pace.append("epochs")  # they only make a run on one batch longer
    row = {
        "run_dir": str(run_dir),
        "loader": loader,
        "recipe": _recipe(record, VARIED),
        "recipe_at_any_pace": _recipe(record, VARIED + pace),
        "machine_cpu": record["machine"].get("cpu"),
    }
    models = [sensor["model"] for sensor in record["sensors"] if sensor.get("model")]
    for model in models:
        row["cpu_model"] = model["name"]
        row |= {f"cpu_model_{name}": value for name, value in model.items() if name != "name"}
    for component in COMPONENTS:  # records of earlier versions have a statistical interval instead
        row[f"energy_{component}_bound_J"] = record.get(f"energy_{component}_statistical_J")
    row |= {name: config[name] for name in CONFIG_NUMBERS}
    row |= {name: config.get(name) for name in CONFIG_TEXTS}
    return row | {name: record[name] for name in (*TEXTS, *QUANTITIES) if name in record}


def _metrics(metrics: dict, stage: str) -> dict[str, float]:
    """Name also the Z500 RMSE at the lead time that a stage is trained for.

    That is the shortest of pre-training, and the longest of fine-tuning.
    """
    values = {name: float(value) for name, value in metrics.items()}
    leads_h = sorted(int(h) for h in re.findall(r"z500_rmse_(\d+)h_m\b", " ".join(values)))
    if leads_h:
        lead_h = leads_h[-1 if stage == "finetune" else 0]
        values["lead_time_h"] = lead_h
        values["z500_rmse_m"] = values[f"z500_rmse_{lead_h}h_m"]
        values["persistence_m"] = values.get(f"z500_rmse_{lead_h}h_persistence_m", math.nan)
    return values


def _loader(config: dict) -> str:
    """Name what gives the batches, as "pil-4"; "device" where one batch stays on the device."""
    loading = config.get("image_loading", "states")
    if loading == "device" or config.get("states_on_device"):
        return "device"
    return f"{loading}-{config.get('loader_workers', 0)}"


def _recipe(record: dict, varied: list[str]) -> str:
    """Compute a short digest of all of a configuration but what ``varied`` names."""
    kept = {name: value for name, value in record["config"].items() if name not in varied}
    return run_config.digest({"config": kept, "data": record.get("data_digest", "")})[:8]


def _dataset(rows: list[dict], metrics: list[dict], excluded: list[str]) -> xr.Dataset:
    metrics = pd.DataFrame(metrics, range(len(rows)))
    names = dict.fromkeys([*QUANTITIES, *CPU_MODEL, *METRICS, *metrics])
    table = pd.DataFrame(rows).join(metrics).reindex(columns=[*TEXTS, *CONFIG_NUMBERS, *names])
    table[TEXTS] = table[TEXTS].astype(object).fillna("")
    kinds = dict.fromkeys(names, float) | dict.fromkeys(CONFIG_NUMBERS, int)
    runs = xr.Dataset.from_dataframe(table.astype(kinds).rename_axis("run"))
    runs = runs.drop_vars("run").set_coords([*LABELS, *CONFIG_NUMBERS])
    for name in names:
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
    for ending, unit in (("_m2_s2", "m2 s-2"), ("_m", "m"), ("_s", "s"), ("_K", "K"), ("_h", "h")):
        if name.endswith(ending):
            return unit
    return "1"


def scaling_series(table: pd.DataFrame) -> pd.DataFrame:
    """Select the runs of one table of ``load`` into scaling series: one row per series and run.

    Runs belong to one series if they share recipe, system and device, either the local or the
    global batch size, and either the data set's size or its size per device, on at least two device
    counts; one run can be in several. Adds the columns ``series``, the label, ``constant``, a
    column's name, and ``data``, "fixed" or "scaled".
    """
    alike = ["workload", "stage", "dataset", "system", "device_name", "recipe", "seed"]
    samples = table["dataset_samples"].fillna(0)
    sizes = {"fixed": samples, "scaled": samples // table["devices"]}  # shares are rounded down
    seed = (", seed " + table["seed"].astype(str)).where(table["seed"] > 0, "")
    parts = []
    for constant, label in (("local_batch_size", "LBS"), ("global_batch_size", "GBS")):
        for data, size in sizes.items():
            counts = table.groupby([*alike, constant, size])["devices"].transform("nunique")
            kind = ", scaled data" if data == "scaled" else ""
            series = f"constant {label} = " + table[constant].astype(str) + kind + seed
            part = table.assign(series=series, constant=constant, data=data)
            parts.append(part[counts > 1])
    return pd.concat(parts, ignore_index=True)


def phases(runs: xr.Dataset) -> pd.DataFrame:
    """Tabulate the records' ``energy_phases``: time and energy of each phase of each rank."""
    columns = ["run_id", "rank", "device", "phase", "time_s"]
    rows = []
    for run_id, run_dir in zip(runs["run_id"].values, runs["run_dir"].values, strict=True):
        record = json_table(Path(run_dir) / "record.json")
        rows += [{"run_id": run_id, **entry} for entry in record.get("energy_phases", [])]
    return pd.DataFrame(rows, columns=[*columns, *(f"energy_{c}_J" for c in COMPONENTS[:3])])
