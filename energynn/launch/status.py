"""Tell what has become of every run, from its folder and from one question to Slurm; and what one
draws, has used and has left to do while it goes on, from any shell.

A run's record decides, then the queue, then the last start of its job.
"""

import math
import shlex
import shutil
import time
from collections import Counter
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from energynn import records
from energynn.experiment import config, studies
from energynn.host import texts
from energynn.host.files import write_json
from energynn.host.progress import energy_text, print_lines
from energynn.host.reading import join_faults
from energynn.launch import slurm
from energynn.measure import kernel
from energynn.measure.samples import (
    event_ns,
    events_of_kind,
    last_sample_time_ns,
    list_samples_files,
    read_events,
    read_samples_header,
    segment_dirs,
)
from energynn.measure.stream import read_sensor_streams

RUNNING_JOB_STATES = ("RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED")
UNFINISHED_RUN_STATES = ("queued", "running", "unknown")
BAD_RUN_STATES = ("failed", "not valid")
TABLE_HEADER = [
    "started UTC",
    "run",
    "what",
    "n",
    "batch",
    "error",
    "energy",
    "state",
    "notes",
]
POLL_PERIOD_S = 2.0  # between two looks at a run
SETUP_FAULT_TEXT = "energynn: failed: "  # in a job's log, before a line of its set-up
MIN_TABLE_WIDTH = 100  # of the table, where the terminal has no more
# what a run without a record has of it
UNKNOWN_RUN_FACTS = {
    "started_at": "",
    "name": "",
    "workload": "",
    "devices": None,
    "config": {},
    "metrics": {},
    "training_time_s": None,
    "energy_total_J": None,
    "system": "",
    "energy_total_provenance": "",
}


class JobSubmission(msgspec.Struct):
    """What `energynn submit` writes beside a run.

    job_id: ARRAY_TASK.
    """

    submitted_at: str = ""
    job_id: Annotated[str, Meta(pattern=r"^([1-9]\d{0,9}_\d{1,9})?\Z")] = ""


class JobStart(msgspec.Struct):
    """What a job writes beside its run when it starts, and when it ends."""

    started_at: str = ""
    submission: str = ""
    checkpoint: str = ""
    exit_status: int = 0
    outcome: str = ""
    ended_at: str = ""


def read_submission(folder: Path) -> JobSubmission:
    """Read how a run was submitted; empty if it was not."""
    return _read_job_file(folder / "job" / "submission.json", JobSubmission)


def write_job_file(folder: Path, name: str, told: JobSubmission | JobStart) -> None:
    """Write beside a run, as "submission" or "start-1", what its job is told or tells."""
    write_json(folder / "job" / f"{name}.json", msgspec.to_builtins(told))


def read_starts(folder: Path) -> list[JobStart]:
    """Read the starts of a run's job, the newest last."""
    numbers = range(1, 1 + len(list(folder.glob("job/start-*.json"))))
    return [
        _read_job_file(folder / "job" / f"start-{number}.json", JobStart)
        for number in numbers
    ]


def _read_job_file(path: Path, kind: type):
    """Decode a JSON file, or return an empty ``kind``; raises ValueError for ill-typed values."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        return kind()
    except ValueError as error:
        remedy = f"see by `squeue --me` that its job is over, then `rm {shlex.quote(str(path))}`"
        raise ValueError(f"{path}: is spoilt ({error}); {remedy}") from error


def find_run_folders(runs_dir: Path, names: list[str]) -> list[Path]:
    """List the folders of runs that were submitted or started: of systems, studies, single runs,
    or all.
    """
    known = records.list_known_runs(runs_dir)
    folders = known.values()
    # the first two are those of own runs, also where none is
    systems = {"local", "measured"} | {path.parent.name for path in folders}
    wanted = []
    for name in names:
        # a run may have the name of a study, too
        wanted += records.select_runs_of_name(name, known)
        if name in systems:
            wanted += runs_dir.glob(f"{name}/*")
        elif name in studies.STUDIES | studies.STUDY_GROUPS or name.endswith(".py"):
            for system in systems:
                runs = studies.list_runs_of_studies([name], system)
                wanted += [config.folder(run, runs_dir) for run in runs]
        else:
            wanted += records.find_runs_of_name(name, runs_dir)
    wanted = {path.resolve() for path in wanted}
    return [path for path in folders if path.resolve() in wanted or not names]


def describe_runs(folders: list[Path]) -> tuple[list[dict], list[str]]:
    """Return one entry for each run, and notes for the reader."""
    queue = None
    rows = []
    notes = []
    has_jobs = any((folder / "job").exists() for folder in folders)
    with join_faults("the queue is unknown, the rest is from the runs' files", notes):
        queue = slurm.read_queue(has_jobs)
    for folder in folders:
        with join_faults(f"{folder.name}: its files cannot be read", notes):
            rows.append(_describe_run(folder, queue))
    return rows, notes


def _describe_run(folder: Path, queue: dict[str, slurm.QueuedJob] | None) -> dict:
    """Describe one run; ``queue`` is None where Slurm does not answer."""
    record = None
    if (folder / "record.json").exists():
        record = records.read_record(folder)
    submission = read_submission(folder)
    starts = [
        start
        for start in read_starts(folder)
        if start.submission == submission.submitted_at
    ]
    last = [JobStart(), *starts][-1]
    if record and record.ended_at > last.ended_at > "":
        last = JobStart()  # a person went on with it, without a job
    state, reason = _state_of_run(folder, submission, record, last, queue)
    ends = [start.outcome for start in starts if start.outcome.startswith("failed")]
    if ends and state in UNFINISHED_RUN_STATES:
        reason = "; ".join(filter(None, [reason, f"a start before {ends[-1]}"]))
    is_over = record and state not in UNFINISHED_RUN_STATES
    facts = UNKNOWN_RUN_FACTS | msgspec.to_builtins(
        record or records.read_intent_if_any(folder)
    )
    facts["system"] = facts["system"] or folder.parent.name
    row = {name: facts[name] for name in UNKNOWN_RUN_FACTS} | {
        "run_id": folder.name,
        "state": state,
        "reason": reason,
        "since": facts["started_at"] or submission.submitted_at,
        "starts": max(1, len(record.segments if is_over else segment_dirs(folder))),
        "others": records.work_of_others(record) if record else "",
        "job": submission.job_id,
    }
    return texts.map_texts(row, texts.escape_controls)


def _state_of_run(
    folder: Path,
    submission: JobSubmission,
    record: records.Record | None,
    last: JobStart,
    queue,
) -> tuple[str, str]:
    """Return the state of a run and the reason for it."""
    if record and record.valid:
        return "finished", ""
    job = (queue or {}).get(submission.job_id)
    if job and job.state not in RUNNING_JOB_STATES:
        return "queued", job.reason.replace("None", "")
    if job or records.is_run_locked(folder):
        return "running", records.progress_text(folder)
    reason = records.reason_of_record(record)
    status = record.status if record else ""
    if status == "finished":
        return "not valid", reason
    if queue is None and submission.job_id and not last.outcome:
        return "unknown", ""
    if last.outcome == "asked to stop" or not last.outcome and status == "interrupted":
        return "stopped", reason or last.outcome
    if record or last.outcome:
        return "failed", last.outcome.removeprefix("failed: ") or reason
    if job_id := submission.job_id:
        log = kernel.read_text(folder / "job" / "log.txt")
        _, failed, line = log.rpartition(SETUP_FAULT_TEXT)
        if failed and "\n" not in line:  # of the set-up, before the job could start
            return "failed", f"its set-up, {line}; job/log.txt says more"
        said = f"its job is gone; `sacct -j {job_id}` and job/log.txt say more"
        return "stopped", said
    if (folder / "run.json").exists():
        return "failed", "its launcher died; `energynn check --recover` says more"
    return "not submitted", ""


def status_text(rows: list[dict], notes: list[str], failed: bool = False) -> str:
    """Write the table that people read, the newest run first, as wide as the terminal.

    ``failed``: with the whole reasons, as a single run has them.
    """
    rows = sorted(rows, key=lambda row: row["since"], reverse=True)
    cells = [TABLE_HEADER]
    cells += [_cells_of_row(row, rows[at:]) for at, row in enumerate(rows, start=1)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [" ".join(map(str.ljust, line, widths)).rstrip() for line in cells]
    width, _ = shutil.get_terminal_size((0, 0))  # 0: into a file or pipe
    if width and not failed and len(rows) > 1:
        lines = [line[: max(MIN_TABLE_WIDTH, width)] for line in lines]
    counts = Counter(row["state"] for row in rows)
    states = ", ".join(f"{number} {state}" for state, number in sorted(counts.items()))
    total = energy_text(sum(row["energy_total_J"] or 0 for row in rows))
    lines.append(f"runs: {len(rows)}; {states or 'none'}; {total}")
    return "\n".join([*lines, *(f"energynn: {note}" for note in notes)])


def _cells_of_row(row: dict, older: list[dict]) -> list[str]:
    """Describe a run in the columns of TABLE_HEADER; the last says what differs from the newest of
    the older runs of its workload.
    """
    config = row["config"]
    errors = [
        f"{name.split('_')[0]} {error:.3g}"
        for name, error in row["metrics"].items()
        if isinstance(error, float)
    ]
    energy_J = row["energy_total_J"] or 0
    provenance = row["energy_total_provenance"]
    energy = f"{energy_text(energy_J)} {provenance}"
    earlier = [each["config"] for each in older if each["workload"] == row["workload"]]
    starts = f"{row['starts']} starts" if row["starts"] > 1 else ""
    differs = records.differing_settings_text(config, earlier[:1])
    job = row["job"] and f"job {row['job']}"
    parts = [row["reason"], starts, differs, job, row["others"]]
    what = config.get("command", row["workload"])
    return [
        row["since"][5:16].replace("T", " "),
        (row["name"] or row["run_id"][-14:])[:20],
        " ".join(Path(word).name for word in what.split())[:16],
        str(row["devices"] or ""),
        str(records.global_batch_size(config, row["devices"]) or ""),
        "".join(errors[:1]),
        energy if energy_J else "",
        row["state"],
        "; ".join(filter(None, parts)),
    ]


# ---------------------------------------------------------------------------- a run that goes on


def device_status_text(run_dir: Path) -> str:
    """Say what each device draws, and has used in the training of the newest segment."""
    folder = segment_dirs(run_dir)[-1]
    events = read_events(folder)
    starts = event_ns(events, "training_start", "host")
    ends = event_ns(events, "training_end", "host")
    status = "training" if starts else "starting"
    if ends:
        status = "ending"
    if (run_dir / "record.json").exists():
        status = records.read_record(run_dir).status
    lines = [f"{run_dir.name}: {status}"]
    together = np.zeros(2)
    for path in list_samples_files(folder):
        header = read_samples_header(path)
        if header is None:
            continue
        host = header.host
        now_s = last_sample_time_ns(path) / 1e9
        begin_s = starts.get(host, math.inf) / 1e9
        end_s = ends.get(host, math.inf) / 1e9
        asked_s = [begin_s, end_s, now_s - 1.0, now_s]
        for one in read_sensor_streams(path, header, {}, asked_s)[0]:
            if not one.sensor.primary:
                continue
            # beyond the last reading the energy stays the same
            begin_J, end_J, before_J, now_J = one.at(asked_s)
            used = np.array([now_J - before_J, end_J - begin_J])
            together += used
            lines.append(
                _device_line(f"{host}:{one.sensor.id}", used, one.sensor.provenance)
            )
    lines.append(_device_line("together", together))
    told = events_of_kind(events, "progress")[-1:]
    return "\n".join([*lines, *(f"  {event['told']}" for event in told)])


def _device_line(name: str, used: np.ndarray, provenance: str = "") -> str:
    power_W, energy_J = used
    return f"  {name:28}{power_W:10.1f} W {energy_J:14.1f} J  {provenance}".rstrip()


def follow_run(run_dir: Path) -> None:
    """Print a look every two seconds until the run has ended, however that was."""
    while True:
        with join_faults(run_dir):
            print_lines(device_status_text(run_dir))
        if (run_dir / "run.json").exists() and not records.is_run_locked(run_dir):
            print_lines(status_text(*describe_runs([run_dir])))
            return
        time.sleep(POLL_PERIOD_S)
