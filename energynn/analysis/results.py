"""All run records as one xarray.Dataset with dimension ``run``, in the units of the record and in kWh, h and kW."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pandas as pd
import xarray as xr

from energynn import config as run_config
from energynn import records
from energynn.measure import energy
from energynn.measure.energy import JOULE_PER_KWH, SECOND_PER_HOUR
from energynn.reading import json_table, one_fault

COMPONENTS = ("gpu", "cpu", "ram", "total")

# Quantities of a record that become variables; units and meanings stand in the data dictionary, records.FIELDS.
# An absent one becomes NaN, never 0.
QUANTITIES = ("nodes", "sockets", "dataset_samples", "samples_trained", "samples_evaluated", "optimizer_steps")
QUANTITIES += ("forward_backward_passes", "memory_gpu_peak_B", "training_time_s", "perun_time_s")
QUANTITIES += ("device_hours_training", "device_hours_perun")
QUANTITIES += tuple(f"energy_{c}_J" for c in COMPONENTS)
QUANTITIES += (*(f"energy_perun_{c}_J" for c in COMPONENTS), "energy_perun_reported_J")
QUANTITIES += tuple(f"energy_{c}_statistical_J" for c in COMPONENTS)
QUANTITIES += tuple(f"energy_{c}_systematic_J" for c in COMPONENTS)
QUANTITIES += tuple(f"mean_power_{c}_W" for c in COMPONENTS)
QUANTITIES += ("perun_samples", "sampling_period_s", "samples_in_training", "coverage")
METRICS = ("top1_error", "validation_loss")  # always there; others, named with lead times, where records have them
TEXTS = ("status", "started_at", "boot_id", "git_commit", *(f"energy_{c}_provenance" for c in COMPONENTS))
# What of the configuration can be selected by; the rest stands in the record and enters ``recipe``.
CONFIG_NUMBERS = ("devices", "local_batch_size", "global_batch_size", "epochs", "seed", "repeat")
LABELS = ("run_id", "workload", "stage", "dataset", "system", "device_kind", "device_name", "recipe")
LABELS += ("recipe_at_any_pace", "preset", "loader", "run_dir")
# What may vary within a recipe.
VARIED = ("devices", "local_batch_size", "global_batch_size", "accumulation_steps", "repeat", "initial_run")
VARIED += ("training_samples", "validation_samples")
REQUIRED = ("run_id", "workload", "system", "devices", "training_time_s", "device_hours_training", "config", "valid")
CPU_MODEL = ("idle_W_per_core", "full_W_per_core", "cores")


def load(runs_dir: str | Path = "runs", only_valid: bool = True, only_the_studys: bool = False) -> xr.Dataset:
    """Load the records of all systems under ``runs_dir`` into one Dataset with dimension ``run``.

    Coordinates say what was run (run_id, workload, stage, system, device_kind, devices, local_batch_size ...);
    ``recipe`` is equal for runs that differ in devices, batch sizes and repeat only, ``recipe_at_any_pace`` also for
    those at another rate of steps; ``loader`` says what gives the batches. Data variables are the quantities of the
    record with ``units`` in their attributes, provenances as texts, final metrics under their own names, and the
    derived kWh, h and kW. NaN: absent from the record. ``only_the_studys`` leaves out workloads of one's own, which
    belong to none of its series. Records that were left out stand with the reason in ``attrs["excluded"]``. No records
    at all give an empty Dataset with the same variables.
    """
    rows, excluded, seen = [], [], {}
    for path in sorted(Path(runs_dir).glob("*/*/record.json")):
        with one_fault(path.parent, excluded):
            record = json_table(path)
            if record.get("workload") in records.NO_TRAINING:
                continue
            row = _row(record, path)
            if only_the_studys and row["workload"] not in run_config.CONFIGS:
                raise ValueError(f"workload {row['workload']!r} belongs to no series that is known here")
            _check_files(record, path.parent)
            if only_valid and not row.pop("valid"):
                raise ValueError(row["invalid_reasons"] or "marked as not valid, without a reason")
            digest = record.get("record_sha256", path)
            if other := seen.get(digest):
                raise ValueError(f"is a copy of {other}; keep one of the two")
            if other := seen.get(row["run_id"]):
                raise ValueError(f"run_id is the same as of {other}; rename one of the two systems")
            seen |= dict.fromkeys((row["run_id"], digest), path.parent)
            rows.append(row)
    return _dataset(pd.DataFrame(rows), excluded)


def _row(record: dict, path: Path) -> dict:
    """Flatten one record; ValueError says in one line why it cannot be used."""
    if record.get("schema") != records.SCHEMA:
        raise ValueError(f"schema is {record.get('schema')!r}, not {records.SCHEMA!r}")
    missing = [name for name in REQUIRED if name not in record]
    missing += [f"config.{name}" for name in CONFIG_NUMBERS if name not in record.get("config", {})]
    if missing:
        raise ValueError(f"fields are missing: {', '.join(missing)}")
    records.require_kinds("record.json", {name: record[name] for name in record if name not in QUANTITIES})
    unknown = [name for name in record if name not in records.FIELDS]
    if unknown:
        raise ValueError(f"fields are not known: {', '.join(unknown)}; units stand in names, and energies are in J")
    configuration = record["config"]
    names = (*TEXTS, "run_id", "workload", "system", "device_kind", "device_name")
    row = {name: record.get(name, "") for name in names}
    row |= {name: int(_number(f"config.{name}", configuration[name])) for name in CONFIG_NUMBERS}
    row |= {"stage": configuration.get("stage", ""), "dataset": configuration.get("dataset", "")}
    row |= {"recipe": _recipe(record), "recipe_at_any_pace": _recipe(record, _at_any_pace(configuration))}
    row |= {"preset": configuration.get("preset", ""), "loader": _loader(configuration), "run_dir": str(path.parent)}
    row |= {"valid": bool(record["valid"]), "invalid_reasons": "; ".join(record.get("invalid_reasons", []))}
    row |= {name: _number(name, record[name]) for name in QUANTITIES if name in record}
    row |= {name: _number(name, value) for name, value in record.get("metrics", {}).items()}
    _check_consistency(row)
    machine = record.get("machine", {})
    row |= {"machine_cpu": machine.get("cpu", ""), "machine_hostname": machine.get("hostname", "")}
    model = next((sensor["model"] for sensor in record.get("sensors", []) if sensor.get("model")), {})
    row |= {"cpu_model": model.get("name", "")}
    row |= {f"cpu_model_{name}": model[name] for name in CPU_MODEL if name in model}
    return row


def _number(name: str, value) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{name} is not a finite number: {value!r}")
    if value < 0 and name in QUANTITIES:
        raise ValueError(f"{name} is negative: {value!r}")
    return float(value)


def _check_consistency(row: dict) -> None:
    """ValueError where numbers of one record contradict each other, as mixed units and lost samples make them do."""
    parts_J = [row[f"energy_{c}_J"] for c in COMPONENTS[:3] if f"energy_{c}_J" in row]
    total_J, time_s = row.get("energy_total_J", 0.0), row["training_time_s"]
    if not math.isclose(sum(parts_J), total_J, rel_tol=1e-6):
        raise ValueError(f"energies are in mixed units: energy_total_J is {total_J:g}, its parts are {sum(parts_J):g}")
    by_power_J = row.get("mean_power_total_W", 0.0) * time_s
    if "mean_power_total_W" in row and not math.isclose(by_power_J, total_J, rel_tol=1e-6):
        raise ValueError(f"units are mixed: mean power x training time is {by_power_J:g} J, the energy {total_J:g} J")
    if not math.isclose(row["device_hours_training"] * SECOND_PER_HOUR, row["devices"] * time_s, rel_tol=1e-6):
        raise ValueError("units are mixed: device_hours_training is not devices x training_time_s")
    sampled_s = row.get("samples_in_training", math.inf) * row.get("sampling_period_s", 1.0)
    if row["valid"] and (sampled_s < 0.5 * time_s or row.get("coverage", 1.0) < records.LEAST_COVERAGE):
        raise ValueError(f"its trace is shorter than the run: about {sampled_s:.3g} s of samples for {time_s:.3g} s")


def _check_files(record: dict, run_dir: Path) -> None:
    """ValueError for a raw file that was cut or changed in size; one that is not there is no fault of the record."""
    for name, facts in record.get("files", {}).items():
        path = run_dir / name
        if path.is_file() and path.stat().st_size != facts["bytes"]:
            raise ValueError(f"{name} has {path.stat().st_size} of {facts['bytes']} bytes: its trace is not the run's")


def _loader(configuration: dict) -> str:
    """What gives the batches: the way of loading and its workers, as "pil-4"; "device" where one batch stays there."""
    loading = configuration.get("image_loading", "states")
    if loading == "device" or configuration.get("states_on_device"):
        return "device"
    return f"{loading}-{configuration.get('loader_workers', 0)}"


def _at_any_pace(configuration: dict) -> tuple[str, ...]:
    """What may vary where power is asked for; where one batch stays on the device, epochs only make a run longer."""
    return VARIED + (("step_period_s", "epochs") if _loader(configuration) == "device" else ("step_period_s",))


def _recipe(record: dict, varied: tuple[str, ...] = VARIED) -> str:
    """Short digest of what is equal in a scaling series: all but what ``varied`` names."""
    kept = {name: value for name, value in record["config"].items() if name not in varied}
    return run_config.digest({"config": kept, "data": record.get("data_digest", "")})[:8]


def _dataset(rows: pd.DataFrame, excluded: list[str]) -> xr.Dataset:
    model = {f"cpu_model_{name}" for name in CPU_MODEL}
    others = {"valid", "invalid_reasons", "machine_cpu", "machine_hostname", "cpu_model"}
    known = {*QUANTITIES, *TEXTS, *LABELS, *CONFIG_NUMBERS, *model, *others}
    metrics = sorted({*METRICS, *rows.columns} - known)

    def texts(name: str) -> tuple:
        return ("run", np.array(rows[name] if name in rows else [], dtype=object))

    def numbers(name: str, unit: str, long_name: str) -> tuple:
        values = rows[name].to_numpy(float) if name in rows else np.full(len(rows), np.nan)
        return ("run", values, {"units": unit, "long_name": long_name})

    coordinates = {name: texts(name) for name in LABELS}
    coordinates |= {name: ("run", np.array(rows[name] if name in rows else [], dtype=int)) for name in CONFIG_NUMBERS}
    variables = {name: texts(name) for name in (*TEXTS, "machine_cpu", "machine_hostname", "cpu_model")}
    variables |= {name: numbers(name, records.FIELDS[name][0] or "1", records.FIELDS[name][1]) for name in QUANTITIES}
    variables |= {name: numbers(name, metric_unit(name), f"final value of {name}") for name in metrics}
    variables |= {name: numbers(name, "1" if name.endswith("cores") else "W", "CPU model") for name in sorted(model)}
    return _with_derived(xr.Dataset(variables, coordinates, {"excluded": excluded}))


def _with_derived(runs: xr.Dataset) -> xr.Dataset:
    """Add energies in kWh, times in h, and energy per device hour in kW."""
    for method in ("energy", "energy_perun"):
        for component in COMPONENTS:
            joules = runs[f"{method}_{component}_J"]
            kWh = (joules / JOULE_PER_KWH).assign_attrs(joules.attrs, units="kWh")
            runs[f"{method}_{component}_kWh"] = kWh
    hours = runs["training_time_s"] / SECOND_PER_HOUR
    runs["training_time_h"] = hours.assign_attrs(units="h", long_name="duration of the training")
    for name, method, window in (("", "energy", "training"), ("_perun", "energy_perun", "perun")):
        power = runs[f"{method}_total_kWh"] / runs[f"device_hours_{window}"]
        power = power.assign_attrs(units="kW", long_name="total energy per device hour")
        runs[f"energy{name}_per_device_hour_kW"] = power
    return runs


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

    Runs belong to one series if they share recipe, system and device, either the local or the global batch size, and
    either the data set's size or its size per device, on at least two device counts; one run can be in several (n = 1
    usually is). Adds the columns ``series``, the label, ``constant``, a column's name, ``data``, "fixed" or "scaled",
    and ``base_devices``, the smallest device count of the series, to which speed-up relates.
    """
    alike = ["workload", "stage", "dataset", "system", "device_name", "recipe"]
    samples = table["dataset_samples"].fillna(0)
    sizes = {"fixed": samples, "scaled": samples // table["devices"]}  # floor(N n / n_max) / n, hence //
    parts = []
    for constant, label in (("local_batch_size", "constant LBS"), ("global_batch_size", "constant GBS")):
        for data, size in sizes.items():
            for key, rows in table.groupby([*alike, constant, size]):
                if rows["devices"].nunique() < 2:
                    continue
                series = f"{label} = {key[-2]}" if data == "fixed" else f"{label} = {key[-2]}, scaled data"
                base = rows["devices"].min()
                parts.append(rows.assign(series=series, constant=constant, data=data, base_devices=base))
    if not parts:
        return table.iloc[:0].assign(series="", constant="", data="", base_devices=0)
    return pd.concat(parts, ignore_index=True)


def phases(runs: xr.Dataset) -> pd.DataFrame:
    """Time and energy of each phase of each rank: the records' ``energy_phases``, one row each, with its ``run_id``."""
    rows = []
    for run_id, run_dir in zip(runs["run_id"].values, runs["run_dir"].values, strict=True):
        rows += [
            {"run_id": run_id, **entry} for entry in json_table(Path(run_dir) / "record.json").get("energy_phases", [])
        ]
    columns = ["run_id", "rank", "device", "phase", "time_s", *(f"energy_{c}_J" for c in COMPONENTS[:3])]
    return pd.DataFrame(rows, columns=columns)


def power_traces(runs: xr.Dataset, period_s: float = 0.5) -> xr.Dataset:
    """Power of every sensor during the training, from the raw samples of the runs given.

    Returns ``power_W`` (run, device, time): the mean over steps of ``period_s``, time in s from the start of the
    training to the middle of the step, NaN where a run has no such sensor or had ended; ``run_id`` (run).
    The steps are longer where one of the runs is so long that its samples are thinned. Runs whose samples cannot be
    read are left out, and stand with the reason in ``attrs["excluded"]``.
    """
    by_place, excluded = {}, []
    for place, run_dir in enumerate(runs["run_dir"].values):
        with one_fault(run_dir, excluded):
            by_place[place] = energy.power_trace(Path(run_dir), period_s)
    traces, kept = list(by_place.values()), runs.isel(run=list(by_place))
    steps_s = [np.diff(t_s[:2]).max(initial=period_s) for trace in traces for t_s, _ in trace.values()]
    if max(steps_s, default=0.0) > period_s:  # one is of a long run, and thinned
        return power_traces(runs, max(steps_s))
    ends_s = kept["training_time_s"].values
    devices = sorted({device for trace in traces for device in trace})
    steps = int(np.ceil(max(ends_s, default=0.0) / period_s))
    power_W = np.full((len(traces), len(devices), steps), np.nan)
    for i, (trace, end_s) in enumerate(zip(traces, ends_s, strict=True)):
        for device, (t_s, watts) in trace.items():
            inside = (t_s > 0) & (t_s < end_s)
            power_W[i, devices.index(device), np.floor(t_s[inside] / period_s).astype(int)] = watts[inside]
    return xr.Dataset(
        {"power_W": (("run", "device", "time"), power_W, {"units": "W", "long_name": "mean power of a time step"})},
        {
            "run_id": ("run", kept["run_id"].values),
            "device": np.array(devices, dtype=object),
            "time": ("time", (np.arange(steps) + 0.5) * period_s, {"units": "s"}),
        },
        {"excluded": excluded},
    )
