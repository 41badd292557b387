"""The record of a run: its fields, how it is derived from the raw files, and how it is checked."""

import math
import re
import shlex
import signal
import time
from collections import Counter
from collections.abc import Collection
from contextlib import suppress
from itertools import chain, pairwise, product
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from msgspec import Meta, Struct, convert, to_builtins

from energynn.experiment import config as configuration
from energynn.host import texts
from energynn.host.files import (
    hash_file,
    is_locked,
    lock,
    sync_to_disk,
    utc_time_text,
    write_json,
)
from energynn.host.launchers import LAUNCHERS_WITHOUT_PERUN
from energynn.host.progress import accuracy_text, energy_text
from energynn.host.reading import join_faults, read_checksums, read_json
from energynn.measure import energy, machine
from energynn.measure.account import SegmentAccount, account_for_run
from energynn.measure.perun_adapter import read_perun_results
from energynn.measure.samples import (
    EVENT_FIELDS,
    events_of_kind,
    read_events_of_segments,
)

# of the earlier one no number is derived again
RECORD_SCHEMA_VERSION = "energynn-record/3"
# MLPerf's power rules ask for as many before a result counts as measured
MIN_POWER_SAMPLES = 60
MIN_OTHERS_SHARE = 0.1  # of the busy CPU time; what is less is not told
MIN_OTHERS_CORES = 0.1  # busy cores of a host; likewise

UTC_TIME_PATTERN = r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z\Z"
# of a record's fields, those that the files of the run do not tell
FIELDS_NOT_DERIVED = (
    "schema",
    "status",
    "status_reason",
    "ended_at",
    "files",
    "record_sha256",
)
# Files and folders of a run that the record is not derived from: the notebook is a view of the run,
# the log of a batch job grows after the record, checkpoints are of use until the training ends.
FILES_WITHOUT_RAW_DATA = {"record.json", "notebook.ipynb", "job", "checkpoint"}
COUNT_FIELDS = (
    "samples_trained",
    "samples_evaluated",
    "optimizer_steps",
    "forward_backward_passes",
    "dataset_samples",
    "memory_gpu_peak_B",
)
# of a run, as a person gives it: no path, and no option
RUN_NAME_PATTERN = r"(?!last$)[A-Za-z0-9_][A-Za-z0-9_.-]{0,79}"
WORKLOADS_WITHOUT_TRAINING = ("command", "perun import")  # workloads without a trainer
START_LOCK = ".start"  # held from before there is a run.json to the end of the run


# None: not known
OptionalNumber: TypeAlias = float | None
OptionalCount: TypeAlias = int | None


class RunIntent(Struct, kw_only=True, omit_defaults=True):
    """What is known of a run before it begins; record_fields.toml says what each field means."""

    run_id: str
    was: dict = {}
    name: str = ""
    note: str = ""
    workload: str
    system: str
    started_at: str
    config: dict
    config_digest: str = ""
    data_digest: str = ""
    device_kind: str = ""
    device_name: str = ""
    devices: int
    launcher: str = ""
    thresholds: dict[str, float] = {}
    left_out: list[str] = []
    method: str = ""
    versions: dict = {}
    machine: dict
    job: dict = {}
    git_commit: str = ""
    git_dirty: bool | None = None


class ToldSizes(Struct):
    """Of a configuration what tables ask for, whoever wrote it."""

    command: str = ""
    local_batch_size: OptionalCount = None
    global_batch_size: OptionalCount = None
    epochs: OptionalCount = None


class Record(RunIntent, kw_only=True):
    """What is known of a run at its end; what is not has its default, and is not in the file."""

    schema: Literal["energynn-record/2", "energynn-record/3"]
    status: Literal["finished", "failed", "killed", "interrupted"]
    status_reason: str
    valid: bool
    invalid_reasons: list[str]
    ended_at: Annotated[str, Meta(pattern=UTC_TIME_PATTERN)]
    nodes: OptionalCount = None
    sockets: OptionalCount = None
    dataset_samples: OptionalCount = None
    samples_trained: OptionalCount = None
    samples_evaluated: OptionalCount = None
    images_skipped: OptionalCount = None
    optimizer_steps: OptionalCount = None
    forward_backward_passes: OptionalCount = None
    memory_gpu_peak_B: OptionalCount = None
    power_limit_gpu_W: OptionalNumber = None
    power_limit_gpu_end_W: OptionalNumber = None
    training_time_s: OptionalNumber = None
    cpu_time_s: OptionalNumber = None
    cpu_time_others_s: OptionalNumber = None
    perun_time_s: OptionalNumber = None
    device_hours_training: OptionalNumber = None
    device_hours_perun: OptionalNumber = None
    energy_gpu_J: OptionalNumber = None
    energy_cpu_J: OptionalNumber = None
    energy_ram_J: OptionalNumber = None
    energy_total_J: OptionalNumber = None
    energy_gpu_provenance: str = ""
    energy_cpu_provenance: str = ""
    energy_ram_provenance: str = ""
    energy_total_provenance: str = ""
    energy_gpu_bound_J: OptionalNumber = None
    energy_cpu_bound_J: OptionalNumber = None
    energy_ram_bound_J: OptionalNumber = None
    energy_total_bound_J: OptionalNumber = None
    energy_gpu_systematic_J: OptionalNumber = None
    energy_cpu_systematic_J: OptionalNumber = None
    energy_ram_systematic_J: OptionalNumber = None
    energy_total_systematic_J: OptionalNumber = None
    idle_power_gpu_before_W: OptionalNumber = None
    idle_power_cpu_before_W: OptionalNumber = None
    idle_power_ram_before_W: OptionalNumber = None
    idle_power_gpu_after_W: OptionalNumber = None
    idle_power_cpu_after_W: OptionalNumber = None
    idle_power_ram_after_W: OptionalNumber = None
    idle_power_gpu_ready_W: OptionalNumber = None
    idle_power_cpu_ready_W: OptionalNumber = None
    idle_power_ram_ready_W: OptionalNumber = None
    energy_phases: list[dict] = []
    energy_perun_gpu_J: OptionalNumber = None
    energy_perun_cpu_J: OptionalNumber = None
    energy_perun_ram_J: OptionalNumber = None
    energy_perun_total_J: OptionalNumber = None
    mean_power_gpu_W: OptionalNumber = None
    mean_power_cpu_W: OptionalNumber = None
    mean_power_ram_W: OptionalNumber = None
    mean_power_total_W: OptionalNumber = None
    sampling_period_s: OptionalNumber = None
    samples_in_training: int = 0
    coverage: OptionalNumber = None
    doubts: list[str] = []
    flags: list[str] = []
    sensors: list[energy.SensorEnergy]
    metrics: dict[str, str | bool | int | float | None]
    history: list[dict]
    segments: list[SegmentAccount]
    exit_status: OptionalCount = None
    files: dict[str, dict]
    record_sha256: str = ""


# --------------------------------------------------------------------------------------- deriving


def derive(run_dir: Path, trusted: Collection[str] = (), **given) -> Record:
    """Derive times, counts, energies, metrics, phases and validity of a run from its raw files.

    Works on the remains of a dead run too: what cannot be known is absent. given: fields that the
    files do not tell. trusted: files of perun that were read before, which HDF5 can be expected to
    read to the end.
    """
    intent = read_intent(run_dir)
    by_segment = read_events_of_segments(run_dir)
    events = list(chain.from_iterable(by_segment.values()))
    history = _join_epochs(events)
    result = {
        name: intent[name] for name in RunIntent.__struct_fields__ if name in intent
    }
    result |= given | account_for_run(by_segment, intent.get("thresholds", {}))
    starts = events_of_kind(events, "training_start") or [{}]
    ends = events_of_kind(events, "training_end") or [{}]
    is_command = "command" in intent["config"]
    of_rank_0 = [end for end in ends if not end.get("rank")]
    result["history"] = history
    result["metrics"] = (of_rank_0 or [{}])[-1].get("metrics", {})
    last_epoch = history[-1] if history else {}
    if is_command:  # what it reached
        reached = {name: last_epoch[name] for name in last_epoch if name != "epoch"}
        result["metrics"] = result["metrics"] | reached
        last_epoch = {}  # which counts nothing
    result["valid"] = False  # until the reasons are known
    result["invalid_reasons"] = []
    # at the end, or after the last epoch of a dead run
    known = starts[0] | (ends[-1] or last_epoch)
    result |= {name: known[name] for name in COUNT_FIELDS if name in known}
    if broken := events_of_kind(events, "bad_images"):
        result["images_skipped"] = sum(event["images_skipped"] for event in broken)
    if "exit_status" in ends[0]:
        # of a measured command, the highest of its hosts
        last = events_of_kind(list(by_segment.values())[-1], "training_end")
        statuses = [shell_exit_status(end["exit_status"]) for end in last]
        result["exit_status"] = max(statuses, default=128 + signal.SIGKILL)
    sensors = result["sensors"]
    gpus = [one.notes for one in sensors if one.primary and one.component == "gpu"]
    for when in ("", "_end"):
        limits_W = [notes.get(f"limit{when}_W") for notes in gpus]
        if any(limits_W):
            result[f"power_limit_gpu{when}_W"] = min(filter(None, limits_W))
    for of_start in by_segment.values():
        _judge_start(result, of_start)
    for event in events_of_kind(events, "outlived"):
        result["flags"].append(leftover_processes_text(event["processes"]))
    _add_perun_results(result, run_dir, intent.get("perun_run"), trusted)
    if "nodes" in result:
        result["sockets"] = result["nodes"] * intent["machine"]["sockets"]
    for name in ("training", "perun"):
        if f"{name}_time_s" in result:
            hours = result[f"{name}_time_s"] / energy.SECOND_PER_HOUR
            result[f"device_hours_{name}"] = intent["devices"] * hours
    plain = to_builtins(result, enc_hook=float)  # of numpy's numbers
    record = convert(texts.map_texts(plain, texts.escape_non_text_bytes), Record)
    record.invalid_reasons = reasons_not_valid(record)
    record.valid = not record.invalid_reasons
    return record


def _judge_start(result: dict, events: list[dict]) -> None:
    """Add what one start lacks of its ranks, or tells twice."""
    sizes = [one.get("world_size", 0) for one in events_of_kind(events, "rank_start")]
    # as of a node that died before its disk had them
    lost = max(sizes, default=0) - len(sizes)
    if lost > 0 and events_of_kind(events, "training_start"):
        result["doubts"].append(
            energy.refusal(
                "D", f"{lost} ranks of a start left no events: their energy is missing"
            )
        )
    # a training and its validation may tell of the same epoch, by other names
    names = [
        (one["epoch"], name)
        for one in events_of_kind(events, "epoch")
        for name in one.keys() - {*EVENT_FIELDS, "epoch"}
    ]
    if len({*names}) < len(names):
        result["flags"].append(
            "epochs were told more than once in one start, the last counts; measure each "
            "training by a command of its own"
        )


def _join_epochs(events: list[dict]) -> list[dict]:
    """Join what was told of each epoch; one that was repeated from a checkpoint counts once."""
    epochs: dict[float, dict] = {}
    for event in events_of_kind(events, "epoch"):
        told = {name: event[name] for name in event if name not in EVENT_FIELDS}
        epochs[event["epoch"]] = epochs.get(event["epoch"], {}) | told
    return list(epochs.values())


def _add_perun_results(result: dict, run_dir: Path, run: str | None, trusted) -> None:
    """Add up what perun's files say, and flag each file that cannot be read."""
    sums: Counter[str] = Counter()
    for path in sorted(run_dir.rglob("perun/*.hdf5")):
        name = str(path.relative_to(run_dir))
        try:
            values = read_perun_results(path, run, name in trusted)
        except ValueError:  # our own samples do not depend on it
            result["flags"].append(
                f"{name}: cannot be read, perun was cut off while it wrote"
            )
            continue
        sums.update(values)
    # perun adds up readings that are no numbers, too; there is no energy then.
    result |= {name: total for name, total in sums.items() if math.isfinite(total)}


def leftover_processes_text(left: list[str]) -> str:
    """Say which processes a measured command left behind."""
    return f"still running after the command, and not measured then: {', '.join(left)}"


def shell_exit_status(status: int) -> int:
    """Return an exit status as a shell does: 128 + the signal that ended the process."""
    return status if status >= 0 else 128 - status


def reasons_not_valid(record: Record) -> list[str]:
    """Say why a run may not be used as evidence; empty for a valid one."""
    reasons = []
    if record.status != "finished":
        reasons.append(f"the run is {record.status}")
    if record.energy_total_J is None:
        reasons.append("no component has an energy")
    samples = record.samples_in_training
    if samples < MIN_POWER_SAMPLES:
        reasons.append(
            f"{samples} power samples in the training, {MIN_POWER_SAMPLES} needed"
        )
    reasons += record.doubts
    if not record.job.get("is_exclusive", True):
        reasons.append("other jobs could use its nodes; give sbatch --exclusive")
    if record.workload in WORKLOADS_WITHOUT_TRAINING:
        return reasons
    if record.perun_time_s is None and record.launcher not in LAUNCHERS_WITHOUT_PERUN:
        reasons.append("perun's HDF5 is missing or cannot be read")
    for name, value in record.metrics.items():
        if not (isinstance(value, int | float) and math.isfinite(value)):
            reasons.append(f"metric {name} is not a number")
    batch = record.config["global_batch_size"]
    if (
        record.status == "finished"
        and record.samples_trained != (record.optimizer_steps or -1) * batch
    ):
        reasons.append(
            "samples_trained is not optimizer_steps x devices x local batch size"
        )
    return reasons


def save_record(run_dir: Path, status: str, reason: str) -> Record:
    """Derive the record of a run whose processes have ended, and write it to record.json."""
    record = derive(
        run_dir,
        schema=RECORD_SCHEMA_VERSION,
        status=status,
        status_reason=reason,
        ended_at=utc_time_text(),
        files=hash_raw_files(run_dir),
    )
    for name in record.files:
        # a record never promises what the disk has not got
        sync_to_disk(run_dir / name)
    record.record_sha256 = configuration.json_digest(to_builtins(record))
    write_json(run_dir / "record.json", to_builtins(record))
    return record


def hash_raw_files(run_dir: Path) -> dict[str, dict]:
    """Return size and SHA-256 of a run's raw files, by their path within the run."""
    files = {}
    for path in sorted(run_dir.rglob("*")):
        name = path.relative_to(run_dir)
        if (
            path.is_file()
            and not _is_hidden_file(name)
            and not FILES_WITHOUT_RAW_DATA & set(name.parts)
        ):
            files[texts.escape_non_text_bytes(str(name))] = {
                "bytes": path.stat().st_size,
                "sha256": hash_file(path),
            }
    return files


def _is_hidden_file(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


# ------------------------------------------------------------------------------ reading, checking


def list_run_folders(runs_dir: Path) -> list[Path]:
    """Find the folders of all runs below a folder, or itself if it is one; superseded ones too."""
    # rglob follows no links
    folders = {
        path.parent
        for name, above in product(("run.json", "record.json"), ("**", "*/*"))
        for path in runs_dir.glob(f"{above}/{name}")
    }
    return sorted(
        each for each in folders if not _is_hidden_file(each.relative_to(runs_dir))
    )


def list_current_runs(runs_dir: Path) -> list[Path]:
    """Find the folders of all runs below a folder, without those that have begun anew."""
    folders = list_run_folders(runs_dir)
    return [each for each in folders if each.parent.name != "superseded"]


def check_labels(name: str, note: str) -> dict:
    """Return what a person calls a run, for run.json; raises ValueError for no fit name."""
    if name and not re.fullmatch(RUN_NAME_PATTERN, name):
        raise ValueError(
            f"name: {name!r} is none; take letters, digits, - _ . only, and not 'last'; "
            "--note takes any text"
        )
    return {key: text for key, text in (("name", name), ("note", note)) if text}


def list_known_runs(runs_dir: Path) -> dict[str, Path]:
    """Return the folder of each run that was submitted or started, the oldest first, by a line of
    its start, system, run_id and name.
    """
    called = {}
    submitted = (path.parent for path in runs_dir.glob("*/*/job"))
    for folder in dict.fromkeys([*list_current_runs(runs_dir), *submitted]):
        facts = {"started_at": "", "name": ""} | read_intent_if_any(folder)
        place = folder.relative_to(runs_dir)
        called[f"{facts['started_at']} {place} {facts['name']}"] = folder
    return dict(sorted(called.items()))


def find_run(run: str | Path, runs_dir: Path) -> Path:
    """Find a run's folder: by itself, by its run_id, name or a part of them, or as "last".

    Raises ValueError where that is no run, or more than one.
    """
    if (Path(run) / "run.json").is_file():
        return Path(run)
    called = list_known_runs(runs_dir)
    is_whole = rf"[ /]{re.escape(str(run))}( |$)"
    matches = [line for line in called if re.search(is_whole, line)]
    matches = matches or [line for line in called if str(run) in line]
    if run == "last":
        matches = [*called][-1:]
    if len(matches) != 1:
        which = "; ".join(matches[:5])
        raise ValueError(
            f"run: {str(run)!r} means {len(matches)} runs in {runs_dir}; give one: "
            f"{which or '`energynn status` lists them, `energynn study list` studies'}"
        )
    return called[matches[0]]


def find_runs_of_name(run: str | Path, runs_dir: Path) -> list[Path]:
    """Find the folders of all runs of one name; else what ``find_run`` does."""
    named = select_runs_of_name(run, list_known_runs(runs_dir))
    return named or [find_run(run, runs_dir)]


def select_runs_of_name(run: str | Path, known: dict[str, Path]) -> list[Path]:
    """Select, of what ``list_known_runs`` gives, the folders of all runs of one name."""
    return [folder for line, folder in known.items() if line.endswith(f" {run}")]


def read_intent_if_any(run_dir: Path) -> dict:
    """Read run.json, or before the first start of a batch job what it was submitted with; empty
    where neither can be read.
    """
    facts: dict = {}
    with suppress(Exception):  # whatever ill-typed files raise
        facts |= read_json(run_dir / "job" / "parameters.json")
        facts["config"] = {
            name: value for name, value in facts.items() if name not in ("name", "note")
        }
    with suppress(Exception):
        facts |= read_intent(run_dir)
    return facts


def list_settings(config: dict) -> list[str]:
    """List what was set, in words: parameters but those of scale, or the arguments of a command."""
    if "command" in config:
        return re.findall(r"(?:-\S*[ =](?!-))?(?:'[^']*'|\S+)", config["command"])
    scale = configuration.ScaleFields.__struct_fields__
    kept = configuration.add_missing_parameters(config).items()
    return [f"{name} {value}" for name, value in kept if name not in scale]


def global_batch_size(config: dict, devices: int | None) -> int | None:
    """Tell the samples of an update; of a command by what a person told of it."""
    local = config.get("local_batch_size")
    return config.get("global_batch_size", local and local * (devices or 1))


def differing_settings_text(config: dict, others: list[dict]) -> str:
    """Say which settings of a run not all others have."""
    mine = list_settings(config)
    shared = set(mine).intersection(*map(list_settings, others))
    return "; ".join(each for each in mine if each not in shared)


def read_record(run_dir: Path) -> Record:
    """Read a record. Raises ValueError where there is none, and for a field of another type."""
    path = run_dir / "record.json"
    if run_dir.is_dir() and not path.exists():
        raise ValueError(
            f"{run_dir.name}: has no record yet; `energynn status` says how far it is, and "
            "`energynn check --recover` ends one that has died"
        )
    values = read_json(path)
    with join_faults("record.json"):
        convert(values.get("config"), ToldSizes)
        return convert(values, Record)


def read_intent(run_dir: Path) -> dict:
    """Read run.json. Raises ValueError where a field is missing or of another type."""
    values = read_json(run_dir / "run.json")
    with join_faults("run.json"):
        convert(values, RunIntent)
    return values


def read_record_if_any(run_dir: Path) -> Record | None:
    """Read the record of a run; None if it has none or it cannot be read."""
    with suppress(OSError, ValueError):
        return read_record(run_dir)
    return None


def reason_of_record(record: Record | None) -> str:
    """Say why a run did not finish, or is not valid; empty for a valid one, and for none."""
    if record is None:
        return ""
    return record.status_reason or "; ".join(record.invalid_reasons)


def has_valid_record(run_dir: Path) -> bool:
    """Tell whether a run has a valid record, of a run that somebody made."""
    record = read_record_if_any(run_dir)
    return bool(record and is_valid_evidence(record))


def is_valid_evidence(record: Record) -> bool:
    """Tell whether a record is valid, and not simulated."""
    return record.valid and record.launcher != "simulated"


def read_all(runs_dir: Path) -> list[Record]:
    """Read the records below a folder that can be read; of copies of a run the first alone."""
    by_folder = read_records_by_folder(runs_dir)
    again = find_copies(by_folder)
    return [record for folder, record in by_folder.items() if folder not in again]


def read_records_by_folder(runs_dir: Path) -> dict[Path, Record]:
    """Read the records below a folder that can be read, by the folder of each."""
    return {
        folder: record
        for folder in list_run_folders(runs_dir)
        if (record := read_record_if_any(folder))
    }


def find_copies(by_folder: dict[Path, Record]) -> dict[Path, Path]:
    """Return the folder of each run that is a copy of one before, and that one's."""
    first: dict[str, Path] = {}
    again = {}
    for folder, record in by_folder.items():
        for mark in record_fingerprints(record):
            if (other := first.setdefault(mark, folder)) != folder:
                again[folder] = other
    return again


def record_fingerprints(record: Record) -> set[str]:
    """Return what no two runs share, whatever they are called: files of samples, and time with
    energy.
    """
    # of runs that were killed before they had a sample, the files are empty alike
    marks = {
        f"{about}"
        for name, about in record.files.items()
        if "samples-" in name and about.get("bytes")
    }
    took = record.training_time_s, record.energy_total_J
    if record.launcher == "simulated" or not marks:
        return set()
    return marks | {"{:.9g} s, {:.9g} J".format(*took)} if all(took) else marks


def remarks_on_record(record: Record, run_dir: Path) -> list[str]:
    """Say by what thresholds of its own a record was judged, what it leaves out, and remedies."""
    own = record.thresholds
    lines = [
        f"judged by {name} = {own[name]}, usual is {usual}"
        for name, usual in energy.THRESHOLDS.items()
        if own.get(name, usual) != usual
    ]
    lines += [f"left out by system.toml: {name}" for name in record.left_out]
    if len(record.segments) > 1:
        lines.append(f"{len(record.segments)} starts, which add up")
    aside = run_dir.parent / "superseded"
    if before := len(list(aside.glob(f"{record.run_id}.[0-9]*"))):
        lines.append(f"begun anew: {before} before, in {aside}, do not count")
    if "command" in record.config and record.job.get("nnodes", "1") not in (
        "1",
        str(record.nodes),
    ):
        lines.append(
            f"of the {record.job['nnodes']} nodes of its job {record.nodes} counts; `srun energynn "
            "measure --out DIR -- ...` counts all"
        )
    lines += filter(None, [work_of_others(record)])
    used = [sensor.notes for sensor in record.sensors if sensor.primary]
    ways = {notes["measured_by"] for notes in used if "measured_by" in notes}
    lines += [f"CPU: estimated; to have it measured, {way}" for way in sorted(ways)]
    # of a run that was copied elsewhere, one's own
    is_at_home = run_dir.parent.name == record.system
    runs_dir = run_dir.parent.parent if is_at_home else None
    path = machine.system_file(runs_dir, record.system)
    # what perun has measured cannot be measured again
    doubts = record.doubts if record.system != "imported" else []
    return lines + machine.system_file_remedy(doubts, path)


def summary_text(record: Record) -> str:
    """Say what a run took, how sure that is, in which time, and how well it learned."""
    parts = []
    if energy_J := record.energy_total_J:
        # a record of before has a statistical interval in place of the bound
        wrong_J = record.energy_total_bound_J or 0.0
        wrong_J += record.energy_total_systematic_J or 0.0
        parts.append(energy_text(energy_J))
        told = [one.get("epoch", math.nan) for one in record.history]
        is_each = all(after - before == 1 for before, after in pairwise(told))
        epochs = len(told) if is_each else 0
        if record.status == "finished" and epochs < 2:
            epochs = record.config.get("epochs") or epochs
        if "command" in record.config and epochs > 1:
            parts.append(
                f"{energy_text(energy_J / epochs)} an epoch with start and end"
            )
        parts.append(record.energy_total_provenance)
        parts.append(accuracy_text(energy_J, wrong_J))
        gpu_J = record.energy_gpu_J
        if gpu_J is not None and record.energy_gpu_provenance == "measured":
            if record.energy_total_provenance != "measured":
                parts.append(f"{energy_text(gpu_J)} of it measured (GPU)")
    parts.append(f"in {record.training_time_s or 0.0:.3g} s")
    metrics = [
        (name, value)
        for name, value in record.metrics.items()
        if isinstance(value, float)
    ]
    if metrics:
        name, value = metrics[0]
        is_share = name == "top1_error" and value <= 1
        share = f"{1 - value:.0%} classified right"
        parts.append(share if is_share else f"{name} {value:.4g}")
    return ", ".join(parts)


def ways_of_energy_text(record: Record) -> str:
    """Say which components an energy is the sum of, and how each was found."""
    ways = {
        name: getattr(record, f"energy_{name}_provenance") for name in energy.COMPONENTS
    }
    return ", ".join(f"{name.upper()} {ways[name]}" for name in ways if ways[name])


def work_of_others(record: Record) -> str:
    """Say which part of the busy CPU time was not the run's; "" where that is little."""
    if record.cpu_time_s is None and record.segments[1:]:
        return "how busy others were is not known of all starts"
    own_s = record.cpu_time_s or 0.0
    others_s = record.cpu_time_others_s or 0.0
    time_s = record.training_time_s or 0.0
    part = others_s / (own_s + others_s or 1)
    least_s = MIN_OTHERS_CORES * time_s * (record.nodes or 1)
    # beyond 1: what has left the run took its time along
    if not MIN_OTHERS_SHARE <= part <= 1 or others_s < least_s:
        return ""
    return f"others used {part:.0%} of the busy CPU time; what they drew is counted"


def lock_run_file(run_dir: Path, name: str = "run.json"):
    """Lock a file of a run: this process will write its record. Keep what this returns.

    Raises ValueError where another process has locked it.
    """
    for _ in range(20):  # somebody may just be asking whether the run is running
        if file := lock(run_dir / name):
            return file
        time.sleep(0.05)
    raise ValueError(
        f"{run_dir.name}: is running; look at it with `energynn status --watch {run_dir}`"
    )


def is_run_locked(run_dir: Path) -> bool:
    """Tell whether a process holds this run, or starts it, and will write its record."""
    return any(is_locked(run_dir / name) for name in ("run.json", START_LOCK))


def check(runs_dir: Path) -> list[str]:
    """Say every fault in the records and the published values below a folder, a line each."""
    faults: list[str] = []
    for path in runs_dir.rglob("SHA256SUMS"):
        with join_faults("published", faults):
            for name, digest in read_checksums(path).items():
                file = path.parent / name
                if not file.is_file() or hash_file(file) != digest:
                    faults.append(
                        f"{file}: differs from SHA256SUMS; `git checkout {path.parent}` "
                        "restores it"
                    )
    for folder in list_run_folders(runs_dir):
        name = folder.name
        if is_abandoned_run(folder):
            faults.append(
                f"{name}: no record.json; the launcher died. "
                f"`energynn check --recover {shlex.quote(str(runs_dir))}` writes one"
            )
        elif (folder / "record.json").exists():
            with join_faults(f"{name}: record.json cannot be checked", faults):
                faults += [f"{name}: {fault}" for fault in check_record(folder)]
    for copy, other in find_copies(read_records_by_folder(runs_dir)).items():
        faults.append(f"{copy}: has the samples of {other}; keep one of the two")
    return faults


def check_record(run_dir: Path) -> list[str]:
    """Derive every number of a record again from the raw files, and say what differs."""
    record = read_record(run_dir)
    faults = []
    content = read_json(run_dir / "record.json")
    if content.pop("record_sha256", "") != configuration.json_digest(content):
        faults.append(
            "record.json was changed after it was written (record_sha256 differs)"
        )
    files = record.files
    present = hash_raw_files(run_dir)
    damaged = [
        f"{name}: differs from the record's list of files"
        for name in files | present
        if present.get(name) != files.get(name)
    ]
    if damaged:
        return [*faults, *damaged, "its numbers were not derived again"]
    if record.schema != RECORD_SCHEMA_VERSION:
        return faults
    unread = {flag.partition(": ")[0] for flag in record.flags}
    given = {name: getattr(record, name) for name in FIELDS_NOT_DERIVED}
    again = derive(run_dir, record.files.keys() - unread, **given)
    told = to_builtins(record)
    derived = to_builtins(again)
    if record.workload != record.config.get("workload", record.workload):
        faults.append("config.workload: is another than workload")
    if record.status == "finished" and record.status_reason:
        faults.append("status_reason: a finished run needs none")
    for name in told | derived:
        old = told.get(name)
        new = derived.get(name)
        if not are_equal_values(old, new):
            faults.append(f"{name}: is {old!r:.80}, the raw files give {new!r:.80}")
    return faults


def are_equal_values(a, b) -> bool:
    """Compare up to the rounding of another machine's sums."""
    match a, b:
        case dict(), dict():
            return a.keys() == b.keys() and all(
                are_equal_values(a[key], b[key]) for key in a
            )
        case list(), list():
            return len(a) == len(b) and all(map(are_equal_values, a, b))
        case float(), float():
            return math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-12)
    return a == b


# ------------------------------------------------------------------------------------- recovering


def recover(runs_dir: Path) -> list[str]:
    """Write records for runs whose launcher died; returns a line for each."""
    return [
        recover_record(folder)
        for folder in list_run_folders(runs_dir)
        if is_abandoned_run(folder)
    ]


def is_abandoned_run(run_dir: Path) -> bool:
    """Tell whether a run has no record, and no process that will write it."""
    # in this order: its end unlocks it when the record is there
    return not is_run_locked(run_dir) and not (run_dir / "record.json").exists()


def recover_record(folder: Path) -> str:
    """Write the record of a run whose launcher died; returns a line, also where it cannot be."""
    lines: list[str] = []
    # one folder that cannot be read must not cost the others
    with join_faults(
        f"{folder.name}: cannot be recovered, mend this or move it elsewhere", lines
    ):
        _held = lock_run_file(folder)  # nobody starts it meanwhile
        reason = (
            f"the launcher died before it could write a record; {progress_text(folder)}"
        )
        save_record(folder, "killed", reason)
        lines.append(f"{folder.name}: recovered as killed: {reason}")
    return lines[0]


def progress_text(run_dir: Path) -> str:
    """Say what the ranks had reached, in all starts."""
    events = chain.from_iterable(read_events_of_segments(run_dir).values())
    epochs = events_of_kind(events, "epoch")
    if not epochs:
        return "no epoch reported"
    last = epochs[-1]
    if "epochs" in last:
        return f"{last['epoch']} of {last['epochs']} epochs done"
    return f"epoch {last['epoch']:g} done"  # of a command: nobody told of how many
