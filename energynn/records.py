"""The record of a run: what stands in it, how it is derived from the raw files, and how it is checked."""

from __future__ import annotations

import datetime
import fcntl
import json
import math
import signal
import time
import tomllib
from pathlib import Path

from energynn import config as configuration
from energynn.files import PACKAGE, REPOSITORY, lock, sha256, utc_now, whole, write_json
from energynn.launchers import WITHOUT_PERUN
from energynn.measure import energy
from energynn.measure.accounting import account
from energynn.measure.perun_adapter import read_hdf5
from energynn.measure.samples import read_events, read_hosts, read_phases, segments

SCHEMA = "energynn-record/2"
FEWEST_SAMPLES = 60  # MLPerf's power rules ask for as many before a result counts as measured
LEAST_COVERAGE = 0.99

_FIELDS = tomllib.loads((PACKAGE / "record_fields.toml").read_text())
FIELDS = {name: (facts.get("unit", ""), facts["meaning"]) for name, facts in _FIELDS.items()}  # (unit, meaning)
ALWAYS = tuple(name for name, facts in _FIELDS.items() if facts.get("required"))
FROM_INTENT = tuple(name for name, facts in _FIELDS.items() if facts.get("intent"))
NO_TRAINING = ("command", "perun import")  # workloads without a trainer
STATUSES = ("finished", "failed", "killed", "interrupted")


def derive(run_dir: Path, intent: dict) -> dict:
    """Everything in a record that follows from the raw files: times, counts, energies, metrics, phases.

    Works on the remains of a dead run too: what cannot be known is absent.
    """
    events = [event for folder in segments(run_dir) for event in read_events(folder)]
    of_kind = lambda kind: [event for event in events if event["event"] == kind]  # noqa: E731
    result: dict = {
        # An epoch may stand in two segments, where an older checkpoint was taken: the last one counts.
        "history": list({event["epoch"]: _fields(event) for event in of_kind("epoch")}.values()),
        "metrics": {}, "phases": _phases(run_dir), **account(run_dir),
    }  # fmt: skip
    if result["phases"]:
        by_phase = {name: [rank[name] for rank in result["phases"]] for name in result["phases"][0] if name != "rank"}
        result["phase_spread"] = {
            name: {"min": min(values), "mean": sum(values) / len(values), "max": max(values)}
            for name, values in by_phase.items()
        }
    if "nodes" in result:
        result["sockets"] = result["nodes"] * intent["machine"]["sockets"]
    starts, ends = of_kind("training_start"), of_kind("training_end")
    counts = ("samples_trained", "samples_evaluated", "optimizer_steps", "forward_backward_passes")
    for last in (ends or result["history"])[-1:]:
        result |= {name: last[name] for name in counts if name in last}
    if ends:
        result["metrics"] = ends[0].get("metrics", {})
        if "exit_status" in ends[0]:
            last = [end for end in read_events(segments(run_dir)[-1]) if end["event"] == "training_end"]
            codes = [shell_status(end["exit_status"]) for end in last]
            result["exit_status"] = max(codes, default=128 + signal.SIGKILL)
    if bad := of_kind("bad_images"):
        result["images_skipped"] = sum(event["images_skipped"] for event in bad)
    if starts and "dataset_samples" in starts[0]:
        result["dataset_samples"] = starts[0]["dataset_samples"]
    if "training_time_s" in result:
        result["device_hours_training"] = intent["devices"] * result["training_time_s"] / energy.SECOND_PER_HOUR
    by_perun = []
    for path in [path for folder in segments(run_dir) for path in sorted(folder.glob("perun/*.hdf5"))]:
        try:
            by_perun.append(read_hdf5(path, intent.get("perun_run")))
        except ValueError:  # perun was killed while it wrote; our own samples do not depend on it
            result["flags"].append(f"{path.relative_to(run_dir)}: cannot be read, perun was cut off while it wrote")
    for name in dict.fromkeys(name for found in by_perun for name in found):
        total = sum(found.get(name, 0.0) for found in by_perun)
        if math.isfinite(total):  # perun has added a reading that is no number; then it has no energy
            result[name] = total
    if by_perun:
        result["device_hours_perun"] = intent["devices"] * result["perun_time_s"] / energy.SECOND_PER_HOUR
    return result


def shell_status(status: int) -> int:
    """An exit status as a shell tells it: 128 + the number of the signal that ended the process."""
    return status if status >= 0 else 128 - status


def _fields(event: dict) -> dict:
    return {name: value for name, value in event.items() if name not in ("event", "t_mono_ns", "t_wall_ns", "rank")}


def _phases(run_dir: Path) -> list[dict]:
    """Seconds of each rank in each phase, all segments added up."""
    ranks: dict[int, dict] = {}
    for folder in segments(run_dir):
        for rank, (kinds, begin_ns, end_ns, names) in sorted(read_phases(folder).items()):
            entry = ranks.setdefault(rank, {"rank": rank})
            for index, name in enumerate(names):
                spent_s = float((end_ns - begin_ns)[kinds == index].sum()) / 1e9
                entry[f"{name}_s"] = entry.get(f"{name}_s", 0.0) + spent_s
    return list(ranks.values())


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
    if record["workload"] in NO_TRAINING:
        return reasons
    if "perun_time_s" not in record and record.get("launcher") not in WITHOUT_PERUN:
        reasons.append("perun's HDF5 is missing or cannot be read")
    lost = [name for name in record["metrics"] if not _is_finite(record["metrics"][name])]
    reasons += [f"metric {name} is not a number" for name in lost]
    batch = record["config"]["global_batch_size"]
    if record.get("samples_trained") != record.get("optimizer_steps", -1) * batch:
        reasons.append("samples_trained is not optimizer_steps x devices x local batch size")
    return reasons


def build(run_dir: Path, status: str, reason: str, ended_at: str | None = None) -> dict:
    """Derive the record of a run whose processes have ended, and write it to record.json."""
    intent = json.loads((run_dir / "run.json").read_text())
    record = {"schema": SCHEMA, **{name: intent[name] for name in FROM_INTENT if name in intent}, "status": status,
              "status_reason": reason, "ended_at": ended_at or utc_now(), **derive(run_dir, intent)}  # fmt: skip
    record["invalid_reasons"] = reasons_against(record, run_dir)
    record["valid"] = not record["invalid_reasons"]
    record["files"] = hash_files(run_dir)
    record = {name: record[name] for name in FIELDS if name in record}
    record["record_sha256"] = configuration.digest(record)
    write_json(run_dir / "record.json", record)
    return record


def hash_files(run_dir: Path) -> dict:
    """Size and SHA-256 of a run's raw files; the notebook is a view of the run, not part of it."""
    return {
        str(path.relative_to(run_dir)): {"bytes": path.stat().st_size, "sha256": sha256(path)}
        for path in sorted(run_dir.rglob("*"))
        if path.is_file()
        and path.name not in ("record.json", "notebook.ipynb")
        and not path.name.startswith(".")
        and path.relative_to(run_dir).parts[0] != "job"  # of the batch job, whose log goes on after the record
        and path.parent.name != "checkpoint"  # of use only until the training has ended
    }


# ---------------------------------------------------------------------------------------------- reading and checking


def run_dirs(runs_dir: Path) -> list[Path]:
    """Folders of all runs below a folder, or the folder itself if it is one; superseded runs included."""
    return sorted({path.parent for name in ("run.json", "record.json") for path in runs_dir.rglob(name)})


def read(run_dir: Path) -> dict | None:
    """The record of a run, or None if it has none or it cannot be read."""
    try:
        return json.loads((run_dir / "record.json").read_text())
    except (OSError, ValueError):
        return None


def hold(run_dir: Path):
    """Say that this process will write the run's record: keep what this returns, a locked run.json, as long as it may.

    Raises ValueError where another process has said so.
    """
    for _ in range(20):  # somebody may just be asking whether the run goes on
        if file := lock(run_dir / "run.json"):
            return file
        time.sleep(0.05)
    raise ValueError(f"{run_dir.name}: this run goes on already; watch it with `energynn watch {run_dir}`")


def is_running(run_dir: Path) -> bool:
    """Whether somebody holds this run, and will write its record."""
    try:
        with open(run_dir / "run.json") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    except OSError:
        return False


def check(runs_dir: Path) -> list[str]:
    """One line for every fault in the records below a folder: schema, checksums, and every number derived again."""
    faults = []
    for folder in run_dirs(runs_dir):
        name = folder.name
        if not (folder / "record.json").exists():
            if not is_running(folder):
                remedy = f"`energynn check --recover {runs_dir}` writes one"
                faults.append(f"{name}: no record.json; the launcher died. {remedy}")
            continue
        try:
            faults += [f"{name}: {fault}" for fault in check_record(folder)]
        except (ValueError, KeyError, TypeError, OSError) as error:
            faults.append(f"{name}: cannot be checked: {type(error).__name__}: {error}")
    for sums in sorted(runs_dir.rglob("SHA256SUMS")):
        for line in sums.read_text().splitlines():
            digest, _, name = line.partition("  ")
            path = sums.parent / name
            if not path.is_file():
                faults.append(f"{sums.parent.name}: {name}: missing")
            elif sha256(path) != digest:
                faults.append(f"{sums.parent.name}: {name}: differs from its SHA-256 in {sums.name}")
    return faults


def check_record(run_dir: Path) -> list[str]:
    """Faults of one record; empty if it is whole and every number follows from the raw files beside it."""
    try:
        record = json.loads((run_dir / "record.json").read_text())
    except ValueError as error:
        return [f"record.json is not JSON: {error}"]
    missing = [name for name in ALWAYS if name not in record]
    unknown = [name for name in record if name not in FIELDS]
    if missing or unknown:
        return [f"record.json: fields missing {missing}, unknown {unknown}"]
    faults = []
    if record["record_sha256"] != configuration.digest({k: v for k, v in record.items() if k != "record_sha256"}):
        faults.append("record.json was changed after it was written (record_sha256 differs)")
    present = hash_files(run_dir)
    for name, facts in record["files"].items():
        if name not in present:
            faults.append(f"{name}: missing")
        elif present[name] != facts:
            faults.append(f"{name}: differs from its SHA-256 in the record")
    faults += [f"{name}: not in the record's list of files" for name in present if name not in record["files"]]
    if record["schema"] != SCHEMA:
        faults.append(f"schema {record['schema']!r} is not {SCHEMA}")
    if record["status"] not in STATUSES:
        faults.append(f"status {record['status']!r} is not one of {', '.join(STATUSES)}")
    intent = json.loads((run_dir / "run.json").read_text())
    faults += [f"{name}: differs from run.json" for name in FROM_INTENT if record.get(name) != intent.get(name)]
    if "config_digest" in record and record["config_digest"] != configuration.digest(record["config"]):
        faults.append("config_digest: not the digest of config")
    derived = derive(run_dir, intent)
    derived["invalid_reasons"] = reasons_against(record | derived, run_dir)
    derived["valid"] = not derived["invalid_reasons"]
    given = set(FROM_INTENT) | {"schema", "status", "status_reason", "ended_at", "files", "record_sha256"}
    for name in FIELDS:
        if name not in given and not same(record.get(name), derived.get(name)):
            faults.append(f"{name}: is {shorten(record.get(name))}, the raw files give {shorten(derived.get(name))}")
    if "energy_total_J" in record and record.get("device_hours_training"):
        per_device_hour_W = record["energy_total_J"] / energy.SECOND_PER_HOUR / record["device_hours_training"]
        parts_W = sum(record.get(f"mean_power_{c}_W", 0.0) for c in energy.COMPONENTS) / record["devices"]
        if not same(per_device_hour_W, parts_W):
            faults.append(f"energy per device hour {per_device_hour_W} W is not the sum of mean powers {parts_W} W")
    return faults


def same(a, b) -> bool:
    """Equal up to the rounding of another machine's sums."""
    if isinstance(a, bool) or isinstance(b, bool) or not (isinstance(a, (int, float)) and isinstance(b, (int, float))):
        if isinstance(a, dict) and isinstance(b, dict):
            return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
        if isinstance(a, list) and isinstance(b, list):
            return len(a) == len(b) and all(map(same, a, b))
        return a == b
    return math.isclose(a, b, rel_tol=1e-9)


def shorten(value) -> str:
    text = "absent" if value is None else json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _is_finite(value) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def recover(runs_dir: Path) -> list[str]:
    """Write records for runs whose launcher died; returns one line for each. Runs that still go on are left alone."""
    lines = []
    for folder in run_dirs(runs_dir):
        if (folder / "record.json").exists() or is_running(folder):
            continue
        (folder / ".reserve").unlink(missing_ok=True)  # what its launcher kept back for a full disk
        events = [event for part in segments(folder) for event in read_events(part)]
        wall = [event["t_wall_ns"] for event in events]
        for host in [host for part in segments(folder) for host in read_hosts(part)]:
            wall += [int(t) for t in host.wall_ns[-1:]]
        last = datetime.datetime.fromtimestamp(max(wall) / 1e9, datetime.UTC).isoformat() if wall else None
        reason = "the launcher died before it could write a record; " + how_far(events)
        try:
            record = build(folder, "killed", reason, ended_at=last or utc_now())
        except (ValueError, KeyError, TypeError) as error:  # one folder that cannot be read must not cost the others
            lines.append(f"{folder.name}: cannot be recovered: {error}")
            continue
        lines.append(f"{folder.name}: recovered as {record['status']}: {reason}")
    return lines


def how_far(events: list[dict]) -> str:
    """In words, what the ranks had reached."""
    epochs = [event for event in events if event["event"] == "epoch"]
    if epochs:
        return f"{epochs[-1]['epoch']} of {epochs[-1]['epochs']} epochs were done"
    if any(event["event"] == "training_start" for event in events):
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
