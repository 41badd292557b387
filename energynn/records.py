"""The record of a run: what stands in it, how it is derived from the raw files, and how it is checked."""

from __future__ import annotations

import datetime
import errno
import json
import math
import os
import re
import signal
import stat
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Container, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path

from energynn import config as configuration
from energynn.files import PACKAGE, REPOSITORY, force, is_locked, lock, sha256, utc_now, whole, write_json
from energynn.launchers import WITHOUT_PERUN
from energynn.measure import energy
from energynn.measure.accounting import WORTH_A_PROCESS_B, account
from energynn.measure.perun_adapter import read_guarded, read_hdf5
from energynn.measure.samples import events_of_kind, events_of_segments, files_named, read_hosts, segments
from energynn.reading import LARGEST_B, json_table, one_fault, require_file

SCHEMA = "energynn-record/2"
FEWEST_SAMPLES = 60  # MLPerf's power rules ask for as many before a result counts as measured
LEAST_COVERAGE = 0.99
MOST_DOUBTFUL = 0.01  # share of the energy that may be missing or false
# Version of the intervals. Records of other versions keep theirs; all else in them is derived again.
ACCOUNTING = 3

_FIELDS = tomllib.loads((PACKAGE / "record_fields.toml").read_text())
FIELDS = {name: (facts.get("unit", ""), facts["meaning"]) for name, facts in _FIELDS.items()}  # (unit, meaning)
KINDS = {name: facts.get("kind") for name, facts in _FIELDS.items()}
ALWAYS = tuple(name for name, facts in _FIELDS.items() if facts.get("required"))
FROM_INTENT = tuple(name for name, facts in _FIELDS.items() if facts.get("intent"))
# In run.json, or given at the end.
NOT_DERIVED = {*FROM_INTENT, "schema", "accounting", "status", "status_reason", "ended_at", "files", "record_sha256"}
NO_RAW_FILES = ("record.json", "notebook.ipynb")  # the notebook is a view of the run
OF_RUNS = {"run.json", "record.json"}  # a folder with one of them is that of a run
COUNTS = ("samples_trained", "samples_evaluated", "optimizer_steps", "forward_backward_passes", "memory_gpu_peak_B")
OF_AN_EVENT = ("event", "t_mono_ns", "t_wall_ns", "rank")  # fields of every event
NO_TRAINING = ("command", "perun import")  # workloads without a trainer
LAUNCHER_DIED = "the launcher died"  # how the reason of a recovered run begins
STATUSES = ("finished", "failed", "killed", "interrupted")


def derive(run_dir: Path, intent: dict, by_segment: dict[Path, list[dict]] | None = None, known: Iterable = ()) -> dict:
    """Everything in a record that follows from the raw files: times, counts, energies, metrics, phases.

    Works on the remains of a dead run too: what cannot be known is absent. ``by_segment``: the ``events_of_segments``,
    where somebody has read them already. ``known``: perun's files that were read before.
    """
    by_segment = by_segment or events_of_segments(run_dir)
    events = list(chain.from_iterable(by_segment.values()))
    result: dict = {"history": _history(events), "metrics": {}, **account(run_dir, by_segment)}
    if result["phases"]:
        result["phase_spread"] = _phase_spread(result["phases"])
    late_s = 0.0
    for of_start in by_segment.values():
        ends = events_of_kind(of_start, "training_end")
        late_s += max((end.get("late_s", end.get("unsure_s", 0.0)) for end in ends), default=0.0)
    if late_s and "training_time_s" in result:
        result["flags"].append(f"for {late_s:.{1 if late_s < 1 else 0}f} s nobody saw whether the command had ended")
        share = late_s / max(late_s, result["training_time_s"])
        result["doubtful_share"] = max(share, result.get("doubtful_share", 0.0))
    result |= _samples(events) | _counts(events, result["history"]) | _outcome(list(by_segment.values()))
    by_perun, flags = _by_perun(run_dir, by_segment, intent.get("perun_run"), known)
    result |= by_perun
    result["flags"] += flags
    if "nodes" in result:
        result["sockets"] = result["nodes"] * intent["machine"]["sockets"]
    if "training_time_s" in result:
        result["device_hours_training"] = intent["devices"] * result["training_time_s"] / energy.SECOND_PER_HOUR
    if "perun_time_s" in result:
        result["device_hours_perun"] = intent["devices"] * result["perun_time_s"] / energy.SECOND_PER_HOUR
    return result


def _history(events: list[dict]) -> list[dict]:
    """One entry for each epoch. An epoch that was made again from an older checkpoint counts as it went last."""
    epochs = {}
    for event in events_of_kind(events, "epoch"):
        epochs[event["epoch"]] = {name: event[name] for name in event if name not in OF_AN_EVENT}
    return list(epochs.values())


def _phase_spread(phases: list[dict]) -> dict[str, dict]:
    """Least, mean and greatest time of the ranks in each phase."""
    spread = {}
    for phase in [name for name in phases[0] if name != "rank"]:
        times_s = [rank[phase] for rank in phases]
        spread[phase] = {"min": min(times_s), "mean": sum(times_s) / len(times_s), "max": max(times_s)}
    return spread


def _samples(events: list[dict]) -> dict:
    """Size of the training set, and how many images were broken."""
    found = {}
    starts, broken = events_of_kind(events, "training_start"), events_of_kind(events, "bad_images")
    if starts and "dataset_samples" in starts[0]:
        found["dataset_samples"] = starts[0]["dataset_samples"]
    if broken:
        found["images_skipped"] = sum(event["images_skipped"] for event in broken)
    return found


def _counts(events: list[dict], history: list[dict]) -> dict:
    """Samples, steps and passes as the ranks last told them: at the end, or after the last epoch of a dead run."""
    told = events_of_kind(events, "training_end") or history
    return {name: told[-1][name] for name in COUNTS if name in told[-1]} if told else {}


def _outcome(by_segment: list[list[dict]]) -> dict:
    """Metrics of a training that ended; of a measured command its exit status, the highest of its hosts."""
    ends = events_of_kind(chain.from_iterable(by_segment), "training_end")
    if not ends:
        return {}
    outcome = {"metrics": ends[0].get("metrics", {})}
    if "exit_status" in ends[0]:
        statuses = [shell_status(end["exit_status"]) for end in events_of_kind(by_segment[-1], "training_end")]
        outcome["exit_status"] = max(statuses, default=128 + signal.SIGKILL)
    return outcome


def _by_perun(run_dir: Path, folders: Iterable, perun_run: str | None, known: Iterable) -> tuple[dict, list[str]]:
    """What perun's files tell, all segments added up, and a flag for each file that cannot be read."""
    sums: dict = {}
    flags = []
    for path in [path for folder in folders for path in files_named(folder / "perun", "", ".hdf5")]:
        read = read_hdf5 if str(path.relative_to(run_dir)) in known else read_guarded
        try:
            values = read(path, perun_run)
        except ValueError:  # perun was killed while it wrote; our own samples do not depend on it
            flags.append(f"{path.relative_to(run_dir)}: cannot be read, perun was cut off while it wrote")
            continue
        for name, value in values.items():
            sums[name] = sums.get(name, 0) + value
    # perun adds up readings that are no numbers, too; there is no energy then.
    return {name: total for name, total in sums.items() if math.isfinite(total)}, flags


def shell_status(status: int) -> int:
    """An exit status as a shell tells it: 128 + the number of the signal that ended the process."""
    return status if status >= 0 else 128 - status


def reasons_against(record: dict, run_dir: Path) -> list[str]:
    """Why a run may not be used as evidence; empty for a valid one."""
    reasons = []
    if record["status"] != "finished":
        reasons.append(f"the run is {record['status']}")
    if "energy_total_J" not in record:
        reasons.append("no component has an energy")
    if record.get("samples_in_training", 0) < FEWEST_SAMPLES:
        reasons.append(f"{record.get('samples_in_training', 0)} power samples in the training, {FEWEST_SAMPLES} needed")
    if record.get("coverage", 0.0) < LEAST_COVERAGE:
        reasons.append(f"samples cover {record.get('coverage', 0.0):.1%} of the training, {LEAST_COVERAGE:.0%} needed")
    if record.get("doubtful_share", 0.0) > MOST_DOUBTFUL:
        reasons.append(f"{record['doubtful_share']:.0%} of the energy may be missing or false; the flags say why")
    if not record.get("job", {}).get("is_exclusive", True):
        reasons.append("other jobs could use its nodes, whose energy is that of all; give sbatch --exclusive")
    if record["workload"] in NO_TRAINING:
        return reasons
    if "perun_time_s" not in record and record.get("launcher") not in WITHOUT_PERUN:
        reasons.append("perun's HDF5 is missing or cannot be read")
    for name, value in record["metrics"].items():
        if not (_is_number(value) and math.isfinite(value)):
            reasons.append(f"metric {name} is not a number")
    batch = record["config"]["global_batch_size"]
    if record.get("samples_trained") != record.get("optimizer_steps", -1) * batch:
        reasons.append("samples_trained is not optimizer_steps x devices x local batch size")
    return reasons


def build(run_dir: Path, status: str, reason: str, ended_at: str | None = None) -> dict:
    """Derive the record of a run whose processes have ended, and write it to record.json."""
    intent = read_intent(run_dir)
    record = {
        "schema": SCHEMA,
        "accounting": ACCOUNTING,
        **{name: intent[name] for name in FROM_INTENT if name in intent},
        "status": status,
        "status_reason": reason,
        "ended_at": ended_at or utc_now(),
        **derive(run_dir, intent),
    }
    record["invalid_reasons"] = reasons_against(record, run_dir)
    record["valid"] = not record["invalid_reasons"]
    record["files"] = hash_files(run_dir)
    for name in record["files"]:
        force(run_dir / name)  # a record never promises what the disk has not got
    record = {name: record[name] for name in FIELDS if name in record}
    record["record_sha256"] = configuration.digest(record)
    write_json(run_dir / "record.json", record)
    return record


def hash_files(run_dir: Path, others: Container[str] = ()) -> dict:
    """Size and SHA-256 of a run's raw files, and of the others where they exist, by their path within the run."""
    below = len(os.path.join(run_dir, ""))
    paths = [os.path.join(folder, name) for folder, _, files in os.walk(run_dir) for name in files]
    paths.sort(key=lambda path: path.split("/"))  # folder by folder
    sizes_B = {path: _size_B(path) for path in paths if _is_raw(path[below:]) or path[below:] in others}
    sizes_B = {path: size_B for path, size_B in sizes_B.items() if size_B is not None}
    if sum(sizes_B.values()) < WORTH_A_PROCESS_B:
        digests = [sha256(path) for path in sizes_B]
    else:  # a thread that computes a digest does not keep the others from it
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
            digests = list(threads.map(sha256, sizes_B))
    found = zip(sizes_B.items(), digests, strict=True)
    return {path[below:]: {"bytes": size_B, "sha256": digest} for (path, size_B), digest in found}


def _size_B(path: str) -> int | None:
    """Size of a regular file; None of a pipe, or a link that leads nowhere."""
    try:
        found = os.stat(path)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            raise
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def _is_raw(path: str) -> bool:
    """Whether a file belongs to what the record is derived from; ``path`` is relative to the run."""
    parts = path.split("/")
    if parts[-1] in NO_RAW_FILES or any(part.startswith(".") for part in parts):
        return False
    of_batch_job = parts[0] == "job"  # its log goes on after the record
    of_checkpoint = parts[-2:-1] == ["checkpoint"]  # of use until the training has ended
    return not (of_batch_job or of_checkpoint)


def _was_raw(path: str) -> bool:
    """Whether a file is one of those in hidden folders, as JupyterLab's, that earlier versions took for raw ones."""
    *folders, name = path.split("/")
    hidden = [folder for folder in folders if folder.startswith(".")]
    return bool(hidden) and ".." not in folders and not name.startswith(".")


# ---------------------------------------------------------------------------------------------- reading and checking


def run_dirs(runs_dir: Path) -> list[Path]:
    """Folders of all runs below a folder, or the folder itself if it is one; superseded runs included."""
    return _folders_with(OF_RUNS, _walk(runs_dir))


def _walk(runs_dir: Path) -> Iterator[tuple[str, list, list]]:
    """``os.walk`` without hidden folders below: what lies in them is not whole, as while it is imported or merged."""
    for found in os.walk(runs_dir):
        found[1][:] = [name for name in found[1] if not name.startswith(".")]
        yield found


def _folders_with(names: set[str], walked: Iterable[tuple[str, list, list]]) -> list[Path]:
    """Those folders of ``os.walk`` that hold a file of one of these names."""
    return sorted(Path(folder) for folder, _, files in walked if names & set(files))


def read(run_dir: Path) -> dict | None:
    """The record of a run, or None if it has none or it cannot be read."""
    try:
        record = read_record(run_dir)
    except (OSError, ValueError):
        return None
    return record if all(name in record for name in ALWAYS) else None


def is_made(run_dir: Path) -> bool:
    """Whether a run has a valid record."""
    return bool((read(run_dir) or {}).get("valid"))


def read_all(runs_dir: Path) -> list[dict]:
    """The records below a folder that can be read, each once."""
    found = filter(None, map(read, run_dirs(Path(runs_dir))))
    return list({record["record_sha256"]: record for record in found}.values())


def read_record(run_dir: Path) -> dict:
    """The record of a run, whole or not. Raises ValueError where a field is of another kind than it should be."""
    record = json_table(run_dir / "record.json")
    require_kinds("record.json", record)
    return record


def read_intent(run_dir: Path) -> dict:
    """What run.json tells of a run. Raises ValueError where a field is missing or of another kind than it should be."""
    intent = json_table(run_dir / "run.json")
    missing = [name for name in ALWAYS if name in FROM_INTENT and name not in intent]
    if missing:
        raise ValueError(f"run.json: fields missing {missing}")
    require_kinds("run.json", intent)
    return intent


def require_kinds(file: str, values: dict) -> None:
    """Raise ValueError for the first known field whose value is of another kind than the data dictionary has it."""
    for name, value in values.items():
        if name in FIELDS and not is_of_kind(value, kind(name)):
            raise ValueError(f"{file}: {name} must be of the kind {kind(name)}, is {shorten(value)}")


def kind(name: str) -> str:
    """What the values of a field are: number, text, flag, table, tables or texts."""
    has_unit = FIELDS[name][0] not in ("", "UTC", "SHA-256")
    return KINDS[name] or ("number" if has_unit else "text")


def is_of_kind(value, kind: str) -> bool:
    if kind == "number":
        return _is_number(value) and abs(value) <= sys.float_info.max  # math.isfinite fails for larger integers
    if kind in ("tables", "texts"):
        member = dict if kind == "tables" else str
        return isinstance(value, list) and all(isinstance(each, member) for each in value)
    return isinstance(value, {"text": str, "flag": bool, "table": dict, "any": object}[kind])


def hold(run_dir: Path):
    """Say that this process will write the run's record: keep what this returns, a locked run.json, as long as it may.

    Raises ValueError where another process has said so.
    """
    for _ in range(20):  # somebody may just be asking whether the run goes on
        if file := lock(run_dir / "run.json"):
            return file
        time.sleep(0.05)
    raise ValueError(f"{run_dir.name}: this run goes on already; watch it with `energynn status --watch {run_dir}`")


def is_running(run_dir: Path) -> bool:
    """Whether somebody holds this run, and will write its record."""
    return is_locked(run_dir / "run.json", by_one=True)


def check(runs_dir: Path) -> list[str]:
    """One line for every fault in the records below a folder: schema, checksums, and every number derived again."""
    return check_and_count(runs_dir)[0]


def check_and_count(runs_dir: Path) -> tuple[list[str], Counter]:
    """The faults, and how many records are "readable", "valid" as evidence, or "simulated"."""
    faults, counts, first = [], Counter(), {}
    for folder in run_dirs(runs_dir):
        if not (folder / "record.json").exists():
            if not is_running(folder):
                remedy = f"`energynn check --recover {runs_dir}` writes one"
                faults.append(f"{folder.name}: no record.json; the launcher died. {remedy}")
            continue
        if record := read(folder):
            is_simulated = record.get("launcher") == "simulated"  # by `energynn forecast simulate`
            counts.update(["readable", "simulated"] if is_simulated else ["readable"] + ["valid"] * record["valid"])
            if (other := first.setdefault(record["record_sha256"], folder)) != folder:
                faults.append(f"{folder.name}: {folder} is a copy of {other}; keep one of the two")
        with one_fault(f"{folder.name}: cannot be checked", faults):
            faults += [f"{folder.name}: {fault}" for fault in check_record(folder, record)]
    for folder in _folders_with({"SHA256SUMS"}, _walk(runs_dir)):
        with one_fault(f"{folder.name}: cannot be checked", faults):
            faults += [f"{folder.name}: {fault}" for fault in check_sums(folder / "SHA256SUMS", folder)]
    return faults, counts


def check_sums(sums: Path, folder: Path) -> list[str]:
    """Faults of the files below a folder that a list of checksums names."""
    faults = []
    for name, digest in _read_sums(sums).items():
        path = folder / name
        if not path.is_file():
            faults.append(f"{name}: missing")
        elif sha256(path) != digest:
            faults.append(f"{name}: differs from its SHA-256 in {sums.name}")
    return faults


def _read_sums(sums: Path) -> dict[str, str]:
    """File name -> SHA-256 of a list as sha256sum writes it. Raises ValueError for anything else."""
    require_file(sums, 16 * LARGEST_B)
    digests = {}
    for line in sums.read_text(errors="replace").splitlines():
        digest, separator, name = line.partition("  ")
        if not separator or not re.fullmatch("[0-9a-f]{64}", digest):
            raise ValueError(f"{sums}: is no list of SHA-256 as sha256sum writes it")
        digests[name] = digest
    return digests


def check_record(run_dir: Path, record: dict | None = None) -> list[str]:
    """Faults of one record; empty if it is whole and every number follows from the raw files beside it.

    ``record``: where somebody has read it already.
    """
    try:
        record, intent = record or read_record(run_dir), read_intent(run_dir)
    except ValueError as error:
        return [str(error)]
    missing = [name for name in ALWAYS if name not in record]
    unknown = [name for name in record if name not in FIELDS]
    if missing or unknown:
        return [f"record.json: fields missing {missing}, unknown {shorten(unknown)}"]
    faults = []
    without_digest = {name: value for name, value in record.items() if name != "record_sha256"}
    if record["record_sha256"] != configuration.digest(without_digest):
        faults.append("record.json was changed after it was written (record_sha256 differs)")
    faults += (of_files := _check_files(record, run_dir))
    if record["schema"] != SCHEMA:
        faults.append(f"schema {record['schema']!r} is not {SCHEMA}")
    if record["status"] not in STATUSES:
        faults.append(f"status {record['status']!r} is not one of {', '.join(STATUSES)}")
    faults += [f"{name}: differs from run.json" for name in FROM_INTENT if record.get(name) != intent.get(name)]
    if "config_digest" in record and record["config_digest"] != configuration.digest(record["config"]):
        faults.append("config_digest: not the digest of config")
    by_segment = events_of_segments(run_dir)
    of_perun = [name for name in record["files"] if name.endswith(".hdf5")]
    if any(f"{name}: {CHANGED}" in of_files for name in of_perun):
        return [*faults, "its numbers were not derived again: HDF5 may find no end in a damaged file of perun"]
    # Of what could not be read a flag says so.
    known = set(of_perun) - {flag.partition(": ")[0] for flag in record["flags"]}
    return faults + _check_numbers(record, run_dir, derive(run_dir, intent, by_segment, known))


CHANGED = "differs from its SHA-256 in the record"


def _check_files(record: dict, run_dir: Path) -> list[str]:
    """Raw files that differ from the record's list of files."""
    may_be_gone = {name for name in record["files"] if _was_raw(name)}
    present, faults = hash_files(run_dir, may_be_gone), []
    for name, facts in record["files"].items():
        if name not in present:
            faults += [] if name in may_be_gone else [f"{name}: missing"]
        elif present[name] != facts:
            faults.append(f"{name}: {CHANGED}")
    return faults + [f"{name}: not in the record's list of files" for name in present if name not in record["files"]]


def _check_numbers(record: dict, run_dir: Path, derived: dict) -> list[str]:
    """Fields that differ from what the raw files give, and energies that contradict each other."""
    faults = []
    derived["invalid_reasons"] = reasons_against(record | derived, run_dir)
    derived["valid"] = not derived["invalid_reasons"]
    if record.get("accounting", 1) != ACCOUNTING:
        derived = with_intervals_of(record, derived)
    for name in FIELDS:
        if name not in NOT_DERIVED and not same(record.get(name), derived.get(name)):
            faults.append(f"{name}: is {shorten(record.get(name))}, the raw files give {shorten(derived.get(name))}")
    if "energy_total_J" in record and record.get("device_hours_training"):
        per_device_hour_W = record["energy_total_J"] / energy.SECOND_PER_HOUR / record["device_hours_training"]
        powers_W = [record.get(f"mean_power_{component}_W", 0.0) for component in energy.COMPONENTS]
        parts_W = sum(powers_W) / record["devices"]
        if not same(per_device_hour_W, parts_W):
            faults.append(f"energy per device hour {per_device_hour_W} W is not the sum of mean powers {parts_W} W")
    return faults


def with_intervals_of(record, derived):
    """What was derived, with the intervals of the record, which is of another version of the accounting."""
    if isinstance(record, dict) and isinstance(derived, dict):
        theirs = {name: record[name] for name in derived if name.endswith("statistical_J") and name in record}
        return {name: with_intervals_of(record.get(name), value) for name, value in derived.items()} | theirs
    if isinstance(record, list) and isinstance(derived, list) and len(record) == len(derived):
        return list(map(with_intervals_of, record, derived))
    return derived


def same(a, b) -> bool:
    """Equal up to the rounding of another machine's sums."""
    if a == b:
        return True
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    if _is_number(a) and _is_number(b):
        return math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-12)  # of a difference of sums nothing but rounding may stay
    return False


def _is_number(value) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def shorten(value) -> str:
    text = "absent" if value is None else json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def recover(runs_dir: Path) -> list[str]:
    """Write records for runs whose launcher died; returns one line for each. Runs that still go on are left alone."""
    dead = (folder for folder in run_dirs(runs_dir) if not (folder / "record.json").exists() and not is_running(folder))
    return list(map(recover_one, dead))  # asked one by one: a run may begin meanwhile


def recover_one(folder: Path) -> str:
    """Write the record of a run whose launcher died; returns one line, also where that cannot be done."""
    (folder / ".reserve").unlink(missing_ok=True)  # what its launcher kept back for a full disk
    try:
        with one_fault(f"{folder.name}: cannot be recovered"):
            events = list(chain.from_iterable(events_of_segments(folder).values()))
            reason = f"{LAUNCHER_DIED} before it could write a record; {how_far(events)}"
            record = build(folder, "killed", reason, _last_sign_of_life(folder, events))
    except ValueError as error:  # one folder that cannot be read must not cost the others
        return str(error)
    return f"{folder.name}: recovered as {record['status']}: {reason}"


def _last_sign_of_life(run_dir: Path, events: list[dict]) -> str | None:
    """Time of the last event or sample of a run, in UTC; None if there is neither."""
    instants_ns = [event["t_wall_ns"] for event in events]
    for host in [host for folder in segments(run_dir) for host in read_hosts(folder, thinned=True)]:
        instants_ns += [int(instant) for instant in host.wall_ns[-1:]]
    if not instants_ns:
        return None
    return datetime.datetime.fromtimestamp(max(instants_ns) / 1e9, datetime.UTC).isoformat()


def how_far(events: list[dict]) -> str:
    """In words, what the ranks had reached."""
    epochs = events_of_kind(events, "epoch")
    if epochs:
        return f"{epochs[-1]['epoch']} of {epochs[-1]['epochs']} epochs were done"
    if events_of_kind(events, "training_start"):
        return "it was in its first epoch"
    return "the training had not begun"


def table_of_fields() -> str:
    """The table in runs/README.md: a line for each field of a record."""
    rows = [f"| `{name}` | {unit} | {meaning} |" for name, (unit, meaning) in FIELDS.items()]
    return "\n".join(["| field | unit | meaning |", "|---|---|---|", *rows]) + "\n"


def write_table_of_fields(path: Path = REPOSITORY / "runs" / "README.md") -> None:
    """Put the table of fields in place of the one that the file has."""
    before, heading, _ = path.read_text().partition("| field |")
    if not heading:
        raise ValueError(f"{path}: has no table that begins with `| field |`")
    with whole(path) as file:
        file.write((before + table_of_fields()).encode())


if __name__ == "__main__":
    write_table_of_fields()
