"""Tabulate run records: one row per run, in the units of the record and in kWh and h."""

import re
from collections.abc import Collection
from pathlib import Path

import msgspec
import pandas as pd

from energynn import records
from energynn.experiment import config as run_config
from energynn.host.reading import join_faults
from energynn.measure.energy import COMPONENTS, JOULE_PER_KWH, SECOND_PER_HOUR

# Quantities of a record that become columns; record_fields.toml has units and meanings.
RECORD_QUANTITIES = [
    field.name
    for field in msgspec.structs.fields(records.Record)
    if field.type in (int, records.OptionalCount, records.OptionalNumber)
]
SIZE_COLUMNS = ["devices", "local_batch_size", "global_batch_size", "epochs", "seed"]
COMPONENT_PROVENANCES = [f"energy_{component}_provenance" for component in COMPONENTS]
# What was run, in words.
DESCRIPTION_COLUMNS = [
    "name",
    "workload",
    "stage",
    "dataset",
    "system",
    "device_kind",
    "device_name",
    "recipe",
    "preset",
    "loader",
]
TEXT_COLUMNS = [
    *DESCRIPTION_COLUMNS,
    "run_id",
    "started_at",
    *COMPONENT_PROVENANCES,
    "energy_total_provenance",
    "command",
    "recipe_at_any_pace",
    "run_dir",
    "config",
]
TABLE_COLUMNS = [
    *TEXT_COLUMNS,
    *SIZE_COLUMNS,
    "repeat",
    *RECORD_QUANTITIES,
]
METRIC_COLUMNS = ["top1_error", "z500_rmse_m", "persistence_m", "lead_time_h"]


def load_records(runs_dir: str | Path, trained: bool = True) -> pd.DataFrame:
    """Load the valid records of all systems under ``runs_dir`` into one table.

    Texts say what was run; ``recipe`` is equal where ``config.recipe`` and the data are,
    ``recipe_at_any_pace`` also for those at another rate of steps; ``loader`` says what gives the
    batches; ``config`` has all parameters. Numbers are the quantities of the record, final metrics
    under their own names, and kWh and h. NaN: absent from the record. ``trained``: runs of a
    trainer; else measured commands and imported ones. Records left out stand with the reason in
    ``attrs["excluded"]``.
    """
    rows = {}
    loaded = {}
    excluded = []
    first = {}
    for run_dir in records.list_current_runs(Path(runs_dir)):
        if not (run_dir / "record.json").exists():
            continue
        with join_faults(run_dir, excluded):
            record = records.read_record(run_dir)
            if trained == (record.workload in records.WORKLOADS_WITHOUT_TRAINING):
                continue
            if not record.valid:
                raise ValueError("; ".join(record.invalid_reasons))
            row = _selected_row(record, run_dir)
            if first.setdefault(record.run_id, run_dir) != run_dir:
                row["run_id"] = str(run_dir.relative_to(runs_dir))  # somebody else's
            rows[run_dir] = row
            loaded[run_dir] = record
    for copy, other in records.find_copies(loaded).items():
        del rows[copy]
        excluded.append(
            f"{copy}: samples are the same as of {other}; keep one of the two"
        )
    table = _typed_table([*rows.values()])
    table.attrs["excluded"] = excluded
    return table


def row_of_record(record: records.Record) -> dict:
    """Flatten a record: what its configuration tells, its fields, and what follows from these."""
    follows = {
        "recipe": recipe_digest(record),
        "why": records.reason_of_record(record),
        "starts": max(1, len(record.segments)),
        "global_batch_size": records.global_batch_size(record.config, record.devices),
    }
    return record.config | msgspec.to_builtins(record) | follows


def _selected_row(record: records.Record, run_dir: Path) -> dict:
    """Select what figures need of a record."""
    config = record.config
    loading = config.get("image_loading", "states")
    pace = ["step_period_s"]
    loader = f"{loading}-{config.get('loader_workers', 0)}"
    if loading == "device" or config.get("states_on_device"):
        # one batch stays on the device
        loader = "device"
        pace.append("epochs")  # they only make a run on one batch longer
    row = {
        "run_dir": str(run_dir),
        "loader": loader,
        "recipe_at_any_pace": recipe_digest(record, pace),
    }
    known = row_of_record(record)
    # a measured command has them from the person
    known.setdefault("dataset_samples", config.get("training_samples"))
    # a metric of one of these names is no energy of ours
    row |= {name: known.get(name) for name in TABLE_COLUMNS if name not in row}
    metrics = {
        name: float(value)
        for name, value in record.metrics.items()
        if value is not None  # a command told of no number, as where its loss diverged
    }
    leads = re.findall(r"z500_rmse_(\d+)h_m\b", " ".join(metrics))
    if leads_h := sorted(map(int, leads)):
        # that a stage is trained for: the shortest of pre-training, the longest of fine-tuning
        lead_h = leads_h[-1 if config.get("stage") == "finetune" else 0]
        metrics |= {
            "z500_rmse_m": metrics[f"z500_rmse_{lead_h}h_m"],
            "persistence_m": metrics.get(f"z500_rmse_{lead_h}h_persistence_m"),
            "lead_time_h": lead_h,
        }
    return metrics | row


def recipe_digest(record: records.Record, left_out: Collection[str] = ()) -> str:
    """Compute a short digest of a run's recipe and data, without what ``left_out`` names."""
    kept = run_config.recipe(record.config, left_out)
    return run_config.json_digest({"config": kept, "data": record.data_digest})[:8]


def _typed_table(rows: list[dict]) -> pd.DataFrame:
    table = pd.DataFrame(rows)
    table = table.reindex(
        columns=dict.fromkeys([*TABLE_COLUMNS, *METRIC_COLUMNS, *table])
    )
    numbers = table.columns.difference(TEXT_COLUMNS)
    table[TEXT_COLUMNS] = table[TEXT_COLUMNS].astype(object).fillna("")
    table[numbers] = table[numbers].astype(float)
    # commands have none
    table = table.astype(dict.fromkeys([*SIZE_COLUMNS, "repeat"], int), errors="ignore")
    energies_J = table.filter(regex=r"^energy_(perun_)?(gpu|cpu|ram|total)_J$")
    energies_kWh = (
        energies_J.rename(columns=lambda name: f"{name[:-1]}kWh") / JOULE_PER_KWH
    )
    # one piece, before more is put in: pandas warns of many
    others = table.columns.difference(energies_kWh.columns, sort=False)
    table = table[others].join(energies_kWh).copy()
    return table.assign(
        run=table["run_id"],
        given_name=table["name"],
        provenance=table["energy_total_provenance"],
        training_time_h=table["training_time_s"] / SECOND_PER_HOUR,
        sockets_per_gpu=table["sockets"] / table["devices"],
    )


def select_scaling_series(table: pd.DataFrame) -> pd.DataFrame:
    """Select the runs of one table of ``load_records`` into scaling series: one row per series and
    run.

    Runs belong to one series if they share recipe, system and device, either the local or the
    global batch size, and either the data set's size or its size per device, on at least two device
    counts; one run can be in several. Adds the columns ``series``, the label, ``constant``, a
    column's name, and ``data``, "fixed" or "scaled". Of series that would have one label, each says
    what the others have not.
    """
    training = ["workload", "stage", "dataset"]
    alike = [*training, "system", "device_name", "recipe", "seed"]
    samples = table["dataset_samples"].fillna(0)
    # shares are rounded down
    sizes = {"fixed": samples, "scaled": samples // table["devices"]}
    seed = (", seed " + table["seed"].astype(str)).where(table["seed"] > 0, "")
    parts = []
    for constant, label in (("local_batch_size", "LBS"), ("global_batch_size", "GBS")):
        for data, size in sizes.items():
            counts = table.groupby([*alike, constant, size])["devices"].transform(
                "nunique"
            )
            kind = ", scaled data" if data == "scaled" else ""
            series = f"constant {label} = " + table[constant].astype(str) + kind + seed
            about = dict(series=series, constant=constant, data=data, size=size)
            parts.append(table.assign(**about)[counts > 1])
    selected = pd.concat(parts, ignore_index=True)
    for _, rows in selected.groupby([*training, "series"]):
        of_series = rows.groupby([*alike, "size"], sort=False)
        if of_series.ngroups > 1:
            words = _differences_in_words(of_series.head(1))
            labels = rows["series"] + ", " + of_series.ngroup().map(words)
            selected.loc[rows.index, "series"] = labels
    return selected


def _differences_in_words(runs: pd.DataFrame) -> pd.Series:
    """Say what each run has and not all others, of where it ran, its data and its recipe."""
    facts = [
        {"on": f"{run.system}, {run.device_name}", "samples": int(run.size)}
        | run_config.recipe(run.config)
        for run in runs.itertuples()
    ]
    return pd.Series(
        [
            # the same settings may stand for other data
            records.differing_settings_text(one, facts) or f"recipe {digest}"
            for one, digest in zip(facts, runs["recipe"], strict=True)
        ]
    )


def tabulate_phases(runs: pd.DataFrame) -> pd.DataFrame:
    """Tabulate the records' ``energy_phases``: time and energy of each phase of each rank."""
    rows = []
    for run_dir in runs["run_dir"]:
        record = records.read_record(Path(run_dir))
        rows += [{"run_id": record.run_id} | entry for entry in record.energy_phases]
    energies = [f"energy_{component}_J" for component in COMPONENTS]
    return pd.DataFrame(
        rows, columns=["run_id", "rank", "device", "phase", "time_s", *energies]
    )
