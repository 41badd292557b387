"""`energynn status`: what has become of every run, from the run folders and from one question to the scheduler."""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import re
import sys
import textwrap
import time
from collections import Counter
from itertools import groupby
from pathlib import Path

from energynn import records
from energynn.cluster import slurm
from energynn.files import write_json
from energynn.launchers import CAN_GO_ON
from energynn.measure.energy import JOULE_PER_KWH
from energynn.progress import energy_words, entry
from energynn.reading import json_or_nothing, one_fault

SET_UP_FAILED = "energynn: failed: "
NOISE = ("slurmstepd:", "srun:")
GONE = "its job is gone; nothing was recorded"
# Of what kind the values are that others write beside a run: how it was submitted, and the live view.
SUBMITTED = dict.fromkeys(("job_id", "scheduler", "system_file", "user", "after", "submitted_at", "comment"), "text")
SUBMITTED |= {"studies": "texts", "options": "texts", "task": "number"}
NUMBERED = r"[1-9]\d{0,9}_\d+"  # what Slurm calls a run's job; one bad name fails the whole question
PROGRESS = ("epoch", "epochs", "samples_per_s", "power_W", "time_left_s")
LIVE = dict.fromkeys((*PROGRESS, "energy_J", "energy_before_J"), "number")
SUBMISSION = "ENERGYNN_SUBMISSION"  # tells a job which call of `energynn submit` has made it


def rows(folders: list[Path]) -> tuple[list[dict], list[str]]:
    """One entry for each run, and what is to be said beside them."""
    submissions = {folder: submission(folder) for folder in folders}
    notes = []
    with contextlib.suppress(ValueError):  # Slurm does not answer, as is said below
        confirm(submissions)
    try:
        queue = slurm.queue(each.get("job_id", "") for each in submissions.values())
    except ValueError as error:
        notes.append(f"the queue is unknown, the rest is from the runs' files: {error}")
        queue = None
    rows = [_row_or_fault(folder, submissions[folder], queue) for folder in folders]
    firsts: dict[str, dict] = {}
    for row in rows:
        digest = row.get("record_sha256")
        if digest and (first := firsts.setdefault(digest, row)) is not row:
            row["copy_of"] = f"{first['system']}/{first['run_id']}"
    lost = {row["job"]: row for row in rows if row.get("reason") == GONE and row["job"]}
    last_words = slurm.last_words(list(lost)) if lost else {}
    for job, row in lost.items():
        state = last_words.get(job, "nobody remembers it")
        row["reason"] = f"its job {job} is gone ({state}); nothing was recorded"
    return rows, notes


def confirm(submissions: dict[Path, dict]) -> None:
    """Find the jobs of those submissions by folder that were not answered; raises ValueError without an answer."""
    for folder, submitted in submissions.items():
        is_open = {"comment", "task"} <= submitted.keys() and "job_id" not in submitted
        if is_open and is_ours(submitted) and (number := slurm.number_of(submitted["comment"])):
            submitted["job_id"] = f"{number}_{submitted['task']}"
            write_json(folder / "job" / "submission.json", submitted)


def main(options) -> int:
    """`energynn status`."""
    while True:
        runs, notes = rows(folders(options.runs_dir.absolute(), options.studies))
        runs = newest_first(runs)
        shown = json.dumps({"runs": runs, "notes": notes}, indent=1) if options.json else text(runs, notes)
        if options.watch and sys.stdout.isatty():
            print("\x1b[H\x1b[J", end="")  # clear the screen
        print(shown, flush=True)
        if not options.watch or not any(map(goes_on, runs)):
            return 0
        time.sleep(options.watch)


def goes_on(row: dict) -> bool:
    """Whether a run may still come further without anybody's help."""
    is_stuck = str(row.get("reason", "")).startswith("DependencyNeverSatisfied")
    return row["state"] in ("queued", "running", "suspended") and not is_stuck


def newest_first(rows: list[dict]) -> list[dict]:
    """The systems in the order of their newest run, so that one's own stand before what came with the project."""
    newest: dict[str, str] = {}
    for row in rows:
        newest[row["system"]] = max(newest.get(row["system"], ""), str(row.get("since", "")))
    return sorted(rows, key=lambda row: newest[row["system"]], reverse=True)


def folders(runs_dir: Path, names: list[str]) -> list[Path]:
    """Folders of the runs of studies, or of single runs, that were submitted or started; without names all."""
    known = [path for path in sorted(runs_dir.glob("*/*")) if is_run(path)]
    if not names:
        return known
    single = {path.name: path for path in known if path.name in names}
    wanted = []
    if studies_named := [name for name in names if name not in single]:
        from energynn import config, studies

        for system in sorted({path.parent.name for path in known} or {"local"}):
            for study in studies.find(studies_named, system.partition("@")[0]).values():
                wanted += [runs_dir / system / config.run_id(run) for run in study]
    made = set(known)
    return [*single.values(), *(path for path in dict.fromkeys(wanted) if path in made)]


def is_run(path: Path) -> bool:
    """Whether a folder is that of a run that was submitted or has begun."""
    if path.parent.name == "superseded" or path.name.startswith(".") or not path.is_dir():
        return False
    return (path / "run.json").exists() or (path / "job").exists()


def _row_or_fault(folder: Path, submission: dict, queue: dict | None) -> dict:
    """The entry of one run; where its files cannot be read that is its reason, and the others are not concerned."""
    try:
        with one_fault("its files cannot be read"):
            return _row(folder, submission, queue)
    except ValueError as error:
        row = {"run_id": folder.name, "system": folder.parent.name, "state": "failed", "folder": str(folder)}
        return row | {"reason": str(error)}


def _row(folder: Path, submission: dict, queue: dict | None) -> dict:
    """The entry of one run; ``queue`` is None where the scheduler does not answer."""
    row = {"run_id": folder.name, "system": folder.parent.name, "state": "not submitted", "folder": str(folder)}
    if submission:
        row["job"] = submission.get("job_id", "")
        row |= {name: submission[name] for name in ("studies", "system_file")}
        row |= {} if is_ours(submission) else {"user": submission["user"]}
    record = records.read_record(folder) if (folder / "record.json").exists() else {}
    row["record_sha256"] = record.get("record_sha256", "")
    began = record or json_or_nothing(folder / "run.json")
    row["since"] = began.get("started_at") or submission.get("submitted_at", "")
    if record.get("workload") in records.NO_TRAINING:
        config = record.get("config", {})
        row["what"] = f"{record['workload']}: {config.get('command') or config.get('source', '')}"
    if record and not record["valid"] and _is_done(record):
        row["reason"] = _why(record)
    if record and (record["valid"] or _is_done(record)):
        row |= {"state": "finished", "time_s": record["training_time_s"], "starts": len(record["segments"])}
        joules = record.get("energy_total_J")
        row["provenance"] = record.get("energy_total_provenance", "")
        return row | {"energy_kWh": joules and joules / JOULE_PER_KWH}
    live = _of_kinds(folder / ".state.json", LIVE)
    row |= {name: live[name] for name in PROGRESS if name in live}
    if {"energy_J", "energy_before_J"} <= live.keys():
        row["energy_kWh"] = (live["energy_J"] + live["energy_before_J"]) / JOULE_PER_KWH
    paths = starts(folder)
    row["starts"] = len(paths)
    last_start = json_or_nothing(paths[-1]) if paths else {}
    if last_start.get("submission") != submission.get("submitted_at"):
        last_start = {}
    return row | _state(folder, submission, record, last_start, queue)


def _is_done(record: dict) -> bool:
    """Whether nothing is left to do: a measured command has ended, even where too short to be evidence."""
    return record["status"] == "finished" and record["workload"] in records.NO_TRAINING


def _state(folder: Path, submission: dict, record: dict, last_start: dict, queue: dict | None) -> dict:
    """State and reason of a run without a valid record."""
    scheduler_is_silent = queue is None
    job_state, job_reason = (queue or {}).get(submission.get("job_id"), ("", ""))
    outcome = last_start.get("outcome", "")
    if job_state in ("RUNNING", "COMPLETING", "CONFIGURING"):
        return {"state": "running"}
    if job_state == "SUSPENDED":
        return {"state": "suspended"}
    if job_state:
        job_reason = job_reason.replace("None", "")
        waits_for = f" on {submission['after']}" if job_reason.startswith("Dependency") and submission["after"] else ""
        goes_on = f", goes on: {outcome}" if outcome else ""
        return {"state": "queued", "reason": f"{job_reason}{waits_for}{goes_on}".removeprefix(", ")}
    if records.is_running(folder) and not submission:
        return {"state": "running"}
    if (folder / "job" / "cancelled").exists():
        return {"state": "cancelled", "reason": outcome or "before it began"}
    if submission and scheduler_is_silent and "ended_at" not in last_start:
        return {"state": "running" if last_start else "queued"}
    if scheduler_is_silent and last_start.get("exit_status") == CAN_GO_ON:
        return {"state": "queued"}
    if not record and not outcome and not is_ours(submission):
        reason = f"{submission['user']}'s job has ended, or is hidden from you"
        return {"state": "unknown", "reason": reason, "log": _log_line(folder)}
    if record or submission:
        stopped = record.get("status") == "interrupted" or outcome == "asked to stop"
        reason = outcome.removeprefix("failed: ") or _why(record)
        return {"state": "stopped" if stopped else "failed", "reason": reason, "log": _log_line(folder)}
    if (folder / "run.json").exists():
        return {"state": "failed", "reason": "its launcher died; `energynn check --recover` says more"}
    return {}


def _why(record: dict) -> str:
    if not record:
        return GONE
    return record.get("status_reason") or "not valid: " + "; ".join(record["invalid_reasons"])


def _log_line(folder: Path) -> str:
    """The last line of the job's log that says something."""
    try:
        with (folder / "job" / "log.txt").open("rb") as file:
            file.seek(max(file.seek(0, os.SEEK_END) - 4000, 0))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith(NOISE)]
    last = 2 if lines and lines[-1].startswith(SET_UP_FAILED) else 1  # what the line of set-up said stands before
    return "; ".join(lines[-last:])


def wait_instead(system_dir: Path, new_jobs: dict[str, str]) -> None:
    """Let the queued runs of a system that wait for one of these runs wait for its new job."""
    for path in system_dir.glob("*/job/submission.json"):
        waiting = submission(path.parent.parent)
        if waiting.get("after") in new_jobs and waiting.get("job_id") and path.parent.parent.name not in new_jobs:
            with contextlib.suppress(ValueError, KeyError):  # it has left the queue, or does not say which one
                slurm.depend(waiting["job_id"], new_jobs[waiting["after"]])


def starts(folder: Path) -> list[Path]:
    """The files of the starts of a run's job, the newest last."""
    return sorted(folder.glob("job/start-*.json"), key=lambda path: int(path.stem.removeprefix("start-")))


def submission(folder: Path) -> dict:
    """What `energynn submit` wrote beside a run, but for ill-typed values; empty if it was not submitted."""
    submitted = _of_kinds(folder / "job" / "submission.json", SUBMITTED)
    if not re.fullmatch(NUMBERED, submitted.get("job_id", ""), re.ASCII):
        submitted.pop("job_id", None)
    return submitted


def _of_kinds(path: Path, kinds: dict[str, str]) -> dict:
    """The values of a JSON file, without those of another kind than they should be."""
    values = json_or_nothing(path)
    return {name: value for name, value in values.items() if records.is_of_kind(value, kinds.get(name, "any"))}


def is_ours(submission: dict) -> bool:
    """Whether the user who asks has submitted it; what says nothing of that is everybody's."""
    me = getpass.getuser()
    return submission.get("user", me) == me


def text(rows: list[dict], notes: list[str]) -> str:
    """What a person reads, on 80 columns: runs by system, each with what is known of it below."""
    lines = []
    for system, of_system in groupby(rows, key=lambda row: row["system"]):
        lines += [f"{system}:", *(entry(row["state"], row["run_id"], _words(row)) for row in of_system)]
    counts = Counter(row["state"] for row in rows)
    total = energy_words(1000 * sum(row.get("energy_kWh") or 0.0 for row in rows if "copy_of" not in row))
    states = ", ".join(f"{n} {state}" for state, n in sorted(counts.items()))
    lines.append(f"{len(rows)} runs: {states}; {total}")
    return "\n".join(lines + [textwrap.fill(f"energynn: {note}", 79) for note in notes])


def _words(row: dict) -> str:
    parts = [f"is a copy of {row['copy_of']}; keep one of the two"] if "copy_of" in row else []
    parts += [f"{row['user']}'s"] if "user" in row else []
    parts += [row["what"]] if "what" in row else []
    live = [f"epoch {row['epoch']}/{row['epochs']}"] if {"epoch", "epochs"} <= row.keys() else []
    live += [f"{row['samples_per_s']:.1f} samples/s"] if row.get("samples_per_s") is not None else []
    live += [f"{row['power_W']:.0f} W"] if row.get("power_W") is not None else []
    if row.get("energy_kWh") is not None:
        live.append(" ".join([energy_words(1000 * row["energy_kWh"]), row.get("provenance", "")]).strip())
    if row["state"] == "running" and "time_left_s" in row:
        live.append(f"{duration(row['time_left_s'])} left")
    elif row["state"] == "finished" and row["time_s"]:
        live.append(f"in {duration(row['time_s'])}")
    parts += [", ".join(live)] if live else []
    parts += [f"job {row['job']}"] if row.get("job") else []
    parts += [str(row["reason"])] if row.get("reason") else []
    if (log := row.get("log")) and row["reason"] not in log and log not in row["reason"]:
        parts.append(log)  # it often ends with the reason itself
    return "; ".join(parts)


def duration(seconds: float) -> str:
    """As 3:20:00 h, or 12 s."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{int(seconds // 3600)}:{int(seconds % 3600 // 60):02}:{int(seconds % 60):02}"
