"""`energynn status`: what has become of every run, from the run folders and from one question to the scheduler."""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from pathlib import Path

from energynn.cluster import background, slurm

EXECUTORS = {"slurm": slurm, "local": background}
NOISE = ("slurmstepd:", "srun:")
GONE = "its job is gone; nothing was recorded"


def rows(folders: list[Path]) -> tuple[list[dict], list[str]]:
    """One entry for each run, and what is to be said beside them."""
    submissions = {folder: submission(folder) for folder in folders}
    states, notes = {}, []
    for scheduler in sorted({given["scheduler"] for given in submissions.values() if given}):
        try:
            states |= EXECUTORS[scheduler].queue()
        except ValueError as error:
            notes.append(f"the queue is unknown, the rest is from the runs' files: {error}")
            states = None
            break
    found = [_row(folder, submissions[folder], states) for folder in folders]
    lost = {row["job"]: row for row in found if row.get("reason") == GONE}
    if lost:  # asked once for all of them
        said = slurm.last_words(list(lost))
        for job, row in lost.items():
            row["reason"] = f"its job {job} is gone ({said.get(job, 'nobody remembers it')}); nothing was recorded"
    return found, notes


def main(options) -> int:
    """`energynn status`."""
    while True:
        found, notes = rows(folders(options.runs_dir.absolute(), options.studies))
        shown = json.dumps({"runs": found, "notes": notes}, indent=1) if options.json else text(found, notes)
        print(("\x1b[H\x1b[J" if options.watch and sys.stdout.isatty() else "") + shown, flush=True)
        if not options.watch or all(row["state"] not in ("queued", "running") for row in found):
            return 0
        time.sleep(options.watch)


def folders(runs_dir: Path, names: list[str]) -> list[Path]:
    """Folders of the runs of studies, or of single runs, that were submitted or started; without names all."""
    found = [
        path for path in sorted(runs_dir.glob("*/*")) if path.parent.name != "superseded" and path.is_dir()
        and ((path / "run.json").exists() or (path / "job").exists())
    ]  # fmt: skip
    if not names:
        return found
    single = {path.name: path for path in found if path.name in names}
    wanted = []
    if studies_named := [name for name in names if name not in single]:
        from energynn import config, studies

        for system in sorted({path.parent.name for path in found} or {"local"}):
            runs = [run for study in studies.find(studies_named, system).values() for run in study]
            wanted += [runs_dir / system / config.run_id(run) for run in runs]
    known = set(found)
    return [*single.values(), *(path for path in dict.fromkeys(wanted) if path in known)]


def _row(folder: Path, submission: dict, states: dict | None) -> dict:
    row = {"run_id": folder.name, "system": folder.parent.name, "state": "not submitted", "folder": str(folder)}
    if submission:
        row |= {"job": submission.get("job_id", ""), "studies": submission["studies"],
                "system_file": submission["system_file"]}  # fmt: skip
    record, job = _read(folder / "record.json"), (states or {}).get(row.get("job"))
    if record.get("valid"):
        joules = record.get("energy_total_J")
        row |= {"state": "finished", "time_s": record["training_time_s"], "starts": len(record["segments"]),
                "energy_kWh": joules and joules / 3.6e6}  # fmt: skip
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
        waits_for = f" on {submission['after']}" if job[1].startswith("Dependency") and submission["after"] else ""
        row |= {"state": "queued", "reason": f"{job[1]}{waits_for}{goes_on}"}
    elif (submission and states is None and "ended_at" not in last) or (not submission and _holds(folder)):
        row["state"] = "running" if last or not submission else "queued"
    elif last.get("exit_status") == os.EX_TEMPFAIL and states is None:
        row["state"] = "queued"
    elif (folder / "job" / "cancelled").exists():
        row |= {"state": "cancelled", "reason": last.get("outcome", "before it began")}
    elif record or submission:
        said = last.get("outcome", "").removeprefix("failed: ") or _why(record)
        stopped = record.get("status") == "interrupted" or last.get("outcome") == "asked to stop"
        row |= {"state": "stopped" if stopped else "failed", "reason": said, "log": _log_line(folder)}
    elif (folder / "run.json").exists():
        row |= {"state": "failed", "reason": "its launcher died; `energynn check --recover` says more"}
    return row


def _why(record: dict) -> str:
    return record.get("status_reason") or "not valid: " + "; ".join(record["invalid_reasons"]) if record else GONE


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


def submission(folder: Path) -> dict:
    """What `energynn submit` wrote beside a run; empty if it was not submitted."""
    return _read(folder / "job" / "submission.json")


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
        rate, watts, kWh = number("samples_per_s", ".1f"), number("power_W", ".0f"), number("energy_kWh", ".4g")
        line = f"{row['run_id']:64} {row['state']:13} {epoch:>8} {rate:>8} {watts:>8} {kWh:>9} {left:>8}  {said}"
        lines.append(line.rstrip())
    counts = Counter(row["state"] for row in found)
    total = sum(row.get("energy_kWh") or 0.0 for row in found)
    states = ", ".join(f"{n} {state}" for state, n in sorted(counts.items()))
    lines.append(f"{len(found)} runs: {states}; {total:.4g} kWh")
    return "\n".join(lines + [f"energynn: {note}" for note in notes])


def duration(seconds: float) -> str:
    """As 3:20:00 h, or 12 s."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{int(seconds // 3600)}:{int(seconds % 3600 // 60):02}:{int(seconds % 60):02}"
