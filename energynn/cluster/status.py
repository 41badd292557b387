"""`energynn status`: what has become of every run, from the run folders and from one question to the scheduler."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from energynn.cluster import local, slurm
from energynn.launch import CAN_GO_ON

EXECUTORS = {"slurm": slurm, "local": local}
NOISE = ("slurmstepd:", "srun:")


def rows(runs_dir: Path, wanted: list[Path] | None = None) -> tuple[list[dict], list[str]]:
    """One entry for each run, and what is to be said beside them; ``wanted``: the folders of a study's runs, else all."""
    folders = wanted if wanted is not None else [
        path for path in sorted(runs_dir.glob("*/*")) if path.parent.name != "superseded" and path.is_dir()
        and ((path / "run.json").exists() or (path / "job").exists())
    ]  # fmt: skip
    submissions = {folder: _read(folder / "job" / "submission.json") for folder in folders}
    states, notes = {}, []
    for scheduler in sorted({given["scheduler"] for given in submissions.values() if given}):
        try:
            states |= EXECUTORS[scheduler].queue()
        except ValueError as error:
            notes.append(f"the queue is unknown, the rest is from the runs' files: {error}")
            states = None
            break
    return [_row(folder, submissions[folder], states) for folder in folders], notes


def _row(folder: Path, submission: dict, states: dict | None) -> dict:
    row = {"run_id": folder.name, "system": folder.parent.name, "state": "not submitted", "folder": str(folder)}
    if submission:
        row |= {"job": submission.get("job_id", ""), "studies": submission["studies"]}
    record, job = _read(folder / "record.json"), (states or {}).get(row.get("job"))
    if record.get("valid"):
        joules = record.get("energy_total_J")
        row |= {"state": "finished", "time_s": record.get("training_time_s"), "provenance": record.get("energy_total_provenance"),
                "energy_kWh": joules / 3.6e6 if joules is not None else None, "starts": len(record.get("segments", []))}  # fmt: skip
        return row
    live = _read(folder / ".state.json")
    row |= {name: live[name] for name in ("epoch", "epochs", "samples_per_s", "power_W", "time_left_s") if name in live}
    if "energy_J" in live:
        row["energy_kWh"] = (live["energy_J"] + live["energy_before_J"]) / 3.6e6
    starts = sorted(folder.glob("job/start-*.json"), key=lambda path: int(path.stem[6:]))
    row["starts"], last = len(starts), _read(starts[-1]) if starts else {}
    last = last if last.get("submission") == submission.get("submitted_at") else {}
    if job and job[0] in ("RUNNING", "COMPLETING", "CONFIGURING"):
        row["state"] = "running"
    elif job:
        goes_on = f", goes on: {last['outcome']}" if last.get("outcome") else ""
        row |= {"state": "queued", "reason": f"{job[1]}{goes_on}"}
    elif (submission and states is None and "ended_at" not in last) or (not submission and _holds(folder)):
        row["state"] = "running" if last or not submission else "queued"
    elif last.get("exit_status") == CAN_GO_ON and states is None:
        row["state"] = "queued"
    elif (folder / "job" / "cancelled").exists():
        row |= {"state": "cancelled", "reason": last.get("outcome", "before it began")}
    elif record or submission:
        said = last.get("outcome", "").removeprefix("failed: ") or _why(folder, record, row.get("job", ""))
        stopped = record.get("status") == "interrupted" or last.get("outcome") == "asked to stop"
        row |= {"state": "stopped" if stopped else "failed", "reason": said, "log": _log_line(folder)}
    elif (folder / "run.json").exists():
        row |= {"state": "failed", "reason": "its launcher died; `energynn check --recover` says more"}
    return row


def _why(folder: Path, record: dict, job: str) -> str:
    if record:
        return record["status_reason"] or "not valid: " + "; ".join(record["invalid_reasons"])
    try:
        said = slurm.last_words(job) if "_" in job else ""
    except ValueError:
        said = ""
    return f"its job {job} is gone ({said or 'Slurm does not remember it'}); nothing was recorded"


def _holds(folder: Path) -> bool:
    from energynn import records

    return records.is_running(folder)


def _log_line(folder: Path) -> str:
    """The last line of the job's log that says something."""
    try:
        text = (folder / "job" / "log.txt").read_bytes()[-4000:].decode(errors="replace")
    except OSError:
        return ""
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith(NOISE)]
    return lines[-1] if lines else ""


def _read(path: Path) -> dict:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return {}


def text(found: list[dict], notes: list[str]) -> str:
    """The table for a person."""
    lines = [f"{'run':64} {'state':13} {'epoch':>8} {'rate/s':>8} {'W':>8} {'kWh':>9} {'left':>8}  job and reason"]
    for row in found:
        epoch = f"{row['epoch']}/{row['epochs']}" if "epoch" in row else ""
        left = duration(row["time_left_s"]) if row["state"] == "running" and "time_left_s" in row else ""
        if row["state"] == "finished" and row["time_s"]:
            left = f"in {duration(row['time_s'])}"
        number = lambda name, form: format(row[name], form) if row.get(name) is not None else ""  # noqa: B023, E731
        said = "; ".join(str(row[name]) for name in ("job", "reason", "log") if row.get(name))
        lines.append(f"{row['run_id']:64} {row['state']:13} {epoch:>8} {number('samples_per_s', '.1f'):>8} "
                     f"{number('power_W', '.0f'):>8} {number('energy_kWh', '.4g'):>9} {left:>8}  {said}".rstrip())  # fmt: skip
    counts = Counter(row["state"] for row in found)
    total = sum(row.get("energy_kWh") or 0.0 for row in found)
    lines.append(
        f"{len(found)} runs: {', '.join(f'{n} {state}' for state, n in sorted(counts.items()))}; {total:.4g} kWh"
    )
    return "\n".join(lines + [f"energynn: {note}" for note in notes])


def duration(seconds: float) -> str:
    """As 3:20:00 h, or 12 s."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{int(seconds // 3600)}:{int(seconds % 3600 // 60):02}:{int(seconds % 60):02}"
