"""What guards a run and a measured command alike: alone on its host, heard, and nothing left."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from functools import partial
from pathlib import Path

from energynn import processes, records
from energynn.files import utc_now
from energynn.measure import machine
from energynn.measure.samples import events_of_kind, read_events, segments

HOST_LOCK = "ENERGYNN_HOST_LOCK"  # another name for this host, for tests
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def take_host() -> socket.socket:
    """Take what the one measured run of this host holds; ValueError while another one goes on.

    It is a name without a file: it is free when its process ends. A batch job waits a minute for
    the end of the one before.
    """
    until_s = time.monotonic() + (60 if "SLURM_JOB_ID" in os.environ else 0)
    name = os.environ.get(HOST_LOCK, os.uname().nodename)
    held = socket.socket(socket.AF_UNIX)
    while True:
        try:
            held.bind(f"\0energynn-measured-run-on-{name}")
            return held
        except OSError as error:
            if time.monotonic() > until_s:
                held.close()
                raise ValueError(
                    "another measured run has this machine; `pgrep -af energynn` shows it; "
                    "one at a time; in a batch job give sbatch --exclusive"
                ) from error
        time.sleep(1)


def facts(
    run_dir: Path,
    system: dict,
    described: dict,
    on_gpu: bool,
    uses_gpus: bool,
) -> dict:
    """Return what run.json tells of the place and the time of a run or a measured command."""
    return {
        "run_id": run_dir.name,
        "started_at": utc_now(),
        **system,
        "uses_gpus": uses_gpus,
        "job": machine.batch_job(),
        "device_kind": "gpu" if on_gpu else "cpu core",
        "device_name": described["gpus"][0]["name"] if on_gpu else described["cpu"],
        "versions": machine.versions(),
        "machine": described,
    }


def verdict(
    folder: Path,
    size: int,
    stop_reason: str,
    by: str = "",
) -> tuple[str, str]:
    """Return status and reason of a run, from the last event of each of ``size`` ranks.

    ``by``: what is known of a rank that ended without a word. The exit status of mpirun proves
    nothing: perun's is 0 after a SIGTERM.
    """
    events = read_events(folder)
    ends = events_of_kind(events, "rank_end")
    bad = [end for end in ends if end["status"] not in ("finished", "interrupted")]
    heard = [end["reason"] for end in ends if end["status"] == "interrupted"]
    silent = sorted(set(range(size)) - {end["rank"] for end in ends})
    if not bad and not silent:
        if not heard:
            return "finished", ""
        return (
            "interrupted",
            f"{stop_reason or 'asked to stop'}; {heard[0]}; it can go on",
        )
    if stop_reason:
        return "interrupted", f"{stop_reason}; {records.how_far(events)}"
    if bad:
        first = min(bad, key=lambda end: end["t_wall_ns"])
        return first["status"], f"rank {first['rank']}: {first['reason']}"
    ranks = ", ".join(map(str, silent))
    return "killed", f"rank {ranks} ended without a word{by}; {records.how_far(events)}"


def next_segment(run_dir: Path) -> Path:
    """Make the folder of a further start of a run; the record of those before is not of it."""
    (run_dir / "record.json").unlink(missing_ok=True)
    folder = run_dir / f"segment-{len(segments(run_dir)) + 1}"
    folder.mkdir()
    return folder


def hear_signals(children: list[subprocess.Popen] | None = None) -> list[int]:
    """Note the numbers of signals in the list that is returned, and pass them on to children.

    They hear a Ctrl-C from the terminal. What was ignored before, as SIGHUP under nohup, still is.
    """
    stopped: list[int] = []

    def note(number: int, _frame) -> None:
        stopped.append(number)
        if number != signal.SIGINT:
            for child in children or []:
                child.send_signal(number)

    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, note)
    return stopped


def start(words: list[str], folder: Path, environment: dict, ends_by: int, **pipes):
    """Start a process that ends with this one, by a signal, and bears the mark of a folder."""
    as_child = partial(processes.end_with_parent, os.getpid(), ends_by)
    marked = environment | {processes.MARK_VARIABLE: str(folder)}
    return subprocess.Popen(words, env=marked, preexec_fn=as_child, **pipes)


def no_record(run_dir: Path, error: Exception) -> str:
    """Say that the record of a run could not be written, and what to do."""
    remedy = f"mend that, then `energynn check --recover {run_dir.parent}`"
    why = getattr(error, "strerror", None) or error
    return f"energynn: {run_dir.name}: no record written ({why}); {remedy}"


def stop_reason(stopped: list[int]) -> str:
    """Say which signal came first; "" where none came."""
    return f"stopped by {signal.Signals(stopped[0]).name}" if stopped else ""
