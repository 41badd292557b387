"""What a batch job does with one run: execute its notebook, and see that the run goes on until it is finished.

``python -m energynn.cluster.job RUN_DIR`` takes the place of the batch shell, so that Slurm's signals reach it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from energynn import config as configuration
from energynn import files, records
from energynn.cluster import local, slurm, status
from energynn.config import RunConfig
from energynn.data import stage_in
from energynn.launchers import CAN_GO_ON
from energynn.measure import machine
from energynn.measure.samples import segments
from energynn.processes import end_with_parent

MOST_FAILURES = 3  # in a row, without a new checkpoint in between; to meet the time limit so soon is one too
CANCELLED = 128 + signal.SIGTERM


def main(run_dir: Path) -> int:
    """One start of the job of a run; its exit status, CAN_GO_ON if it has to be started again."""
    if not _is_ours(run_dir):
        print(f"energynn: {run_dir.name}: another submission makes this run; this job ends", flush=True)
        return 0
    config = configuration.from_dict(json.loads((run_dir / "job" / "parameters.json").read_text()))
    starts = [json.loads(path.read_text()) for path in status.starts(run_dir)]
    checkpoint = max((path.stem for path in run_dir.glob("checkpoint/*.sha256")), default="")
    submitted = status.submission(run_dir)
    failures = _failures_in_a_row(starts, submitted["submitted_at"], checkpoint)
    now = {
        "started_at": files.utc_now(),
        "submission": submitted["submitted_at"],  # what one call of submit is known by
        "checkpoint": checkpoint,
        "host": os.uname().nodename,
        "pid": os.getpid(),
        "failures_before": failures,
        **{name: value for name, value in submitted.items() if name == "minutes"},
        **machine.job_of_process(),
    }
    print(f"energynn: {now['started_at']} {run_dir.name}: start {len(starts) + 1} on {now['host']}", flush=True)
    files.write_json(run_dir / "job" / f"start-{len(starts) + 1}.json", now)
    if failures >= MOST_FAILURES:
        remedy = "`energynn submit` tries again"
        return _end(run_dir, now, 1, f"failed: {failures} starts in a row came to no new checkpoint; {remedy}")
    signals = _signals_heard()
    with _staged_in(run_dir, signals) as problem:
        exit_status, last_line = (1, problem) if problem else _execute(config, run_dir, signals)
    record = {} if problem else records.read(run_dir) or {}
    if record.get("valid"):
        return _end(run_dir, now, 0, "finished")
    reason = record.get("status_reason") or "; ".join(record.get("invalid_reasons", [])) or last_line
    for number in signals:
        print(f"energynn: {run_dir.name}: was sent {signal.Signals(number).name}", flush=True)
    if signal.SIGUSR1 in signals:
        _end(run_dir, now, CAN_GO_ON, "asked to stop")
        return _go_on(run_dir)
    if signal.SIGTERM in signals:  # cancelled or preempted; Slurm knows which, and whether to queue it again
        return _end(run_dir, now, CANCELLED, "asked to stop")
    if record.get("status") == "finished":  # but not valid; the same would happen again
        return _end(run_dir, now, 1, f"failed: not valid: {reason}")
    if failures + 1 >= MOST_FAILURES:
        return _end(run_dir, now, 1, f"failed: {MOST_FAILURES} starts in a row failed, the last with: {reason}")
    _end(run_dir, now, exit_status or 1, f"failed: {reason}")
    return _go_on(run_dir)


def _is_ours(run_dir: Path) -> bool:
    """Whether this job is the one that makes the run; where sbatch has not told its number, it tells so itself."""
    submitted = status.submission(run_dir)
    if os.environ.get(status.SUBMISSION, submitted["submitted_at"]) != submitted["submitted_at"]:
        return False
    if (job := slurm.this_task()) and not submitted.get("job_id"):
        files.write_json(run_dir / "job" / "submission.json", submitted | {"job_id": job})
    return True


def _failures_in_a_row(starts: list[dict], submission: str, checkpoint: str) -> int:
    """How many of the last starts of a submission failed at the same checkpoint; one without an outcome has failed."""
    failures = 0
    for start in reversed([start for start in starts if start["submission"] == submission]):
        if start["checkpoint"] != checkpoint or start.get("exit_status") == CANCELLED:
            break
        failures += 1
    return failures


def _signals_heard() -> list[int]:
    """A list to which every signal is added that asks the job to stop, from now on."""
    signals: list[int] = []
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda number, _frame: signals.append(number))
    return signals


@contextlib.contextmanager
def _staged_in(run_dir: Path, signals: list[int]) -> Iterator[str]:
    """Data that are given as a tar file, on every node's own storage while the run needs them, in a folder of this job.

    Yields what went wrong, or nothing. Only what the run reads is unpacked; that is measured by itself, and ends when
    the job is asked to stop.
    """
    stage = status.submission(run_dir).get("stage_in")
    if not stage:
        yield ""
        return
    number = os.environ.get("SLURM_JOB_ID", os.getpid())
    there = f"{os.path.expandvars(stage['to'])}/energynn-{number}"
    nodes = os.environ.get("SLURM_NNODES")
    each = ["srun", "--export=ALL", f"--ntasks={nodes}", "--ntasks-per-node=1"] if nodes else []
    out = run_dir / "job" / f"stage-in-{number}-{os.environ.get('SLURM_RESTART_COUNT', 0)}"
    measured = [sys.executable, "-m", "energynn.cli", "measure", "--out", str(out), "--"]
    unpack = [sys.executable, "-m", "energynn.data.stage_in", str(run_dir / "job" / "parameters.json")]
    try:
        with open(f"{out}.txt", "w+") as told:
            command = [*each, *measured, *unpack, stage["archive"], there]
            end_with_us = partial(end_with_parent, os.getpid())
            unpacking = subprocess.Popen(command, stdout=told, stderr=told, preexec_fn=end_with_us)
            while unpacking.poll() is None:
                if signals:
                    unpacking.terminate()
                time.sleep(0.2)
            lines = Path(told.name).read_text(errors="replace").splitlines()
        print("\n".join(lines), flush=True)
        os.environ[stage["variable"]] = there
        problem = f"the data were not unpacked from {stage['archive']} to {there}"
        problem = next((line for line in lines if line.startswith(stage_in.FAILED)), problem)
        yield problem if unpacking.returncode else ""
    finally:
        subprocess.run([*each, "rm", "-rf", there], check=False)


def _execute(config: RunConfig, run_dir: Path, signals: list[int]) -> tuple[int, str]:
    """Execute the run's notebook; returns its exit status and its last line."""
    ended = threading.Event()
    threading.Thread(target=_pass_on, args=(run_dir, signals, ended), daemon=True).start()
    exit_status, last_line = local.execute(config, run_dir.parent.parent, run_dir)
    while records.is_running(run_dir):  # papermill may have been killed before the run's supervisor has ended
        time.sleep(0.1)
    ended.set()
    return exit_status, last_line


def _pass_on(run_dir: Path, signals: list[int], ended: threading.Event) -> None:
    """Once asked to stop, tell the ranks by the file that they look for; the segment may only just be beginning."""
    while not ended.wait(0.2):
        if signals and (run_dir / "run.json").exists():
            (segments(run_dir)[-1] / "stop").touch()


def _end(run_dir: Path, start: dict, exit_status: int, outcome: str) -> int:
    """Write how a start of the job has ended; returns its exit status."""
    end = {"ended_at": files.utc_now(), "exit_status": exit_status, "outcome": outcome}
    files.write_json(status.starts(run_dir)[-1], start | end)
    print(f"energynn: {run_dir.name}: {outcome}", flush=True)
    return exit_status


def _go_on(run_dir: Path) -> int:
    """Queue this job again; where the site forbids that, a new one that takes its place."""
    if not (job := slurm.this_task()):  # an own script, which may start it again
        return CAN_GO_ON
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        new = slurm.queue_again(str(run_dir / "job" / "job.sh"))
    except ValueError as error:
        print(f"energynn: {run_dir.name}: cannot be queued again: {error}", flush=True)
        return 1
    if new == job:
        return CAN_GO_ON
    files.write_json(run_dir / "job" / "submission.json", status.submission(run_dir) | {"job_id": new})
    status.wait_instead(run_dir.parent, {run_dir.name: new})
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
