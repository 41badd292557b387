"""Make one run in a batch job, and queue the job again until the run is finished.

``python -m energynn.launch.job RUN_DIR`` takes the place of the batch shell, so that Slurm's
signals reach it (energynn/launch/job.sh).
"""

import signal
import sys
import threading
from pathlib import Path

from energynn import records
from energynn.host import files
from energynn.host.launchers import CAN_GO_ON
from energynn.host.progress import tell
from energynn.host.reading import json_table
from energynn.launch import local, slurm, status, supervise
from energynn.measure.samples import segments

MAX_FAILURES = 3  # in a row, without a new checkpoint in between
CANCELLED = 128 + signal.SIGTERM


def main(run_dir: Path) -> int:
    """Start the run's notebook once, and wait for its record.

    Returns the exit status, CAN_GO_ON to be queued again.
    """
    if records.is_running(run_dir):
        tell(f"energynn: {run_dir.name}: another job makes it")
        return 1
    name = f"start-{1 + len(status.read_starts(run_dir))}"
    start = status.Start(
        files.utc_now(),
        status.read_submission(run_dir).submitted_at,
        _newest_checkpoint(run_dir),
    )
    status.write(run_dir, name, start)
    signals = supervise.hear_signals()
    ended = threading.Event()
    threading.Thread(
        target=_pass_on, args=(run_dir, signals, ended), daemon=True
    ).start()
    _, last_line = local.execute(
        json_table(run_dir / "job" / "parameters.json"), run_dir
    )
    ended.set()
    start.exit_status, start.outcome = _judge(run_dir, start, signals, last_line)
    start.ended_at = files.utc_now()
    status.write(run_dir, name, start)
    tell(f"energynn: {run_dir.name}: {start.outcome}")
    if start.exit_status == CAN_GO_ON and slurm.this_task():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        try:
            slurm.queue_again(slurm.this_task())
        except ValueError as error:
            tell(
                f"energynn: {run_dir.name}: not queued again ({error}); "
                "`energynn submit` goes on from its checkpoint"
            )
    return start.exit_status


def _judge(
    run_dir: Path,
    start: status.Start,
    signals: list[int],
    last_line: str,
) -> tuple[int, str]:
    """Decide how a start has ended: exit status and outcome in words; CAN_GO_ON: to start again."""
    record = records.read(run_dir)
    if record and record.valid:
        return 0, "finished"
    if record and record.ended_at < start.started_at:
        record = None  # of another start: this one was refused
    reason = records.reason(record) or last_line
    if signal.SIGTERM in signals:
        # cancelled or preempted; Slurm knows whether to queue it again
        return CANCELLED, "asked to stop"
    if record and record.status == "finished":  # the same would happen again
        return 1, f"failed: not valid: {reason}"
    # the starts of this submission from the newest checkpoint, but those cancelled
    here = start.submission, _newest_checkpoint(run_dir)
    failures = sum(
        (each.submission, each.checkpoint) == here and each.exit_status != CANCELLED
        for each in status.read_starts(run_dir)
    )
    if failures >= MAX_FAILURES:
        return 1, (
            f"failed: {MAX_FAILURES} starts in a row came to no new checkpoint, "
            f"the last with: {reason}"
        )
    if signal.SIGUSR1 in signals:
        return CAN_GO_ON, "asked to stop"
    return CAN_GO_ON, f"failed: {reason}"


def _newest_checkpoint(run_dir: Path) -> str:
    marks = files.checkpoint_folder(run_dir).glob("*.sha256")
    return max((path.stem for path in marks), default="")


def _pass_on(
    run_dir: Path,
    signals: list[int],
    ended: threading.Event,
) -> None:
    """Ask the ranks to stop by the file that they look for; a segment may only be beginning."""
    while not ended.wait(0.2):
        if signals and (run_dir / "run.json").exists():
            (segments(run_dir)[-1] / ".stop").touch()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
