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
from energynn.host.launchers import RESUMABLE_STATUS
from energynn.host.progress import print_lines
from energynn.host.reading import read_json
from energynn.launch import local, slurm, status, supervise
from energynn.measure.samples import segment_dirs

MAX_FAILURES = 3  # in a row, without a new checkpoint in between
CANCELLED_EXIT_STATUS = 128 + signal.SIGTERM


def main(run_dir: Path) -> int:
    """Start the run's notebook once, and wait for its record.

    Returns the exit status, RESUMABLE_STATUS to be queued again.
    """
    if records.is_run_locked(run_dir):
        print_lines(f"energynn: {run_dir.name}: another job makes it")
        return 1
    name = f"start-{1 + len(status.read_starts(run_dir))}"
    start = status.JobStart(
        files.utc_time_text(),
        status.read_submission(run_dir).submitted_at,
        files.newest_checkpoint_name(run_dir),
    )
    status.write_job_file(run_dir, name, start)
    signals = supervise.forward_signals()
    ended = threading.Event()
    threading.Thread(
        target=_request_stop_of_ranks, args=(run_dir, signals, ended), daemon=True
    ).start()
    _, last_line = local.execute(
        read_json(run_dir / "job" / "parameters.json"), run_dir
    )
    ended.set()
    start.exit_status, start.outcome = _judge_end_of_start(
        run_dir, start, signals, last_line
    )
    start.ended_at = files.utc_time_text()
    status.write_job_file(run_dir, name, start)
    print_lines(f"energynn: {run_dir.name}: {start.outcome}")
    if start.exit_status == RESUMABLE_STATUS and slurm.current_array_task():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        try:
            slurm.requeue_task(slurm.current_array_task())
        except ValueError as error:
            print_lines(
                f"energynn: {run_dir.name}: not queued again ({error}); "
                "`energynn submit` goes on from its checkpoint"
            )
    return start.exit_status


def _judge_end_of_start(
    run_dir: Path,
    start: status.JobStart,
    signals: list[int],
    last_line: str,
) -> tuple[int, str]:
    """Decide how a start has ended: exit status and outcome in words; RESUMABLE_STATUS: to start
    again.
    """
    record = records.read_record_if_any(run_dir)
    if record and record.valid:
        return 0, "finished"
    if record and record.ended_at < start.started_at:
        record = None  # of another start: this one was refused
    reason = records.reason_of_record(record) or last_line
    if signal.SIGTERM in signals:
        # cancelled or preempted; Slurm knows whether to queue it again
        return CANCELLED_EXIT_STATUS, "asked to stop"
    if record and record.status == "finished":  # the same would happen again
        return 1, f"failed: not valid: {reason}"
    # the starts of this submission from the newest checkpoint, but those cancelled
    here = start.submission, files.newest_checkpoint_name(run_dir)
    failures = sum(
        (each.submission, each.checkpoint) == here
        and each.exit_status != CANCELLED_EXIT_STATUS
        for each in status.read_starts(run_dir)
    )
    out_of_time = signal.SIGUSR1 in signals
    if failures >= MAX_FAILURES:
        remedy = "; give a longer --time, or default_hours" if out_of_time else ""
        return 1, (
            f"failed: {MAX_FAILURES} starts in a row came to no new checkpoint, the last with: "
            f"{reason}{remedy}"
        )
    if out_of_time:
        return RESUMABLE_STATUS, "asked to stop"
    return RESUMABLE_STATUS, f"failed: {reason}"


def _request_stop_of_ranks(
    run_dir: Path,
    signals: list[int],
    ended: threading.Event,
) -> None:
    """Ask the ranks to stop by the file that they look for; a segment may only be beginning."""
    while not ended.wait(0.2):
        if signals and (run_dir / "run.json").exists():
            (segment_dirs(run_dir)[-1] / ".stop").touch()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
