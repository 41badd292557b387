"""Watch over the ranks of one run, and see that it ends in a record, however it ends.

``python -m energynn.launch.supervise RUN_DIR PARENT MPIRUN FLAVOUR`` starts the ranks, relays their lines and writes
the record. MPIRUN and FLAVOUR are empty where no mpirun starts the ranks.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from functools import partial
from pathlib import Path

import energynn
from energynn import launchers, processes, records
from energynn.launchers import AFTER_A_LOSS, SRUN_VARIABLE
from energynn.measure import energy, perun_adapter
from energynn.measure.samples import Silence, events_of_kind, read_events, segments

RESERVE_B = 256 * 2**10  # kept back while a run goes on, so that its record can be written on a full disk
AFTERWARDS_S = 30.0  # in which ranks fail that have waited too long, as they find when they run again, or lost one
DELETED = "its folder was deleted while it ran"
DELETED_LOOK_S = 5.0
CHECKPOINT_S = 30.0  # for the ranks' checkpoint when the run is asked to stop
END_TOGETHER_S = 1.0  # between the end of a sampler and that of the ranks, if a lost rank ended both
# How a process is started whose lines are read. A Ctrl-C for a notebook reaches it only through who has started it.
APART = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
APART |= {"text": True, "errors": "replace", "start_new_session": True}
HOST_LOCK = "ENERGYNN_HOST_LOCK"  # another name for this host, for tests
# What torch prints for a rank that NCCL fails for want of another, before it ends the process by SIGABRT.
# It names the rank as "[Rank 1]" or, of a process group, as "[PG ID 0 PG GUID 0(default_pg) Rank 1]".
NCCL_LOST = re.compile(r"\bRank (\d+)\].*?(Watchdog caught collective operation timeout|NCCL error: [^,]+)")
TRAIN_SCRIPT = Path(energynn.__file__).parent / "train" / "__main__.py"


def supervise(run_dir: Path, parent: int, mpirun: str, flavour: str) -> int:
    """Start the ranks, relay their lines, and write the record; ends them if the parent process ends or asks to."""
    stop_reasons: list[str] = []

    def stop(number: int, _frame) -> None:
        stop_reasons.append(f"stopped by {signal.Signals(number).name}")

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):  # the last: Slurm's warning
        signal.signal(number, stop)
    processes.adopt_orphans()
    held = records.hold(run_dir)
    while (_alone := alone_on_host()) is None and not stop_reasons and os.getppid() == parent:
        time.sleep(0.2)
    reserve = run_dir / ".reserve"
    reserve.write_bytes(b"\0" * RESERVE_B)

    intent = json.loads((run_dir / "run.json").read_text())
    folder = segments(run_dir)[-1]
    last_words: list[str] = []
    exit_status = -1
    _look_for(parent, stop_reasons)
    if not stop_reasons:
        command = ranks_command(folder, intent, mpirun, flavour)
        exit_status = _run_ranks(folder, command, intent, parent, stop_reasons, last_words, held)
    reserve.unlink(missing_ok=True)
    if _is_deleted(held):
        return 1  # who started us says so
    status, reason = verdict(folder, intent, exit_status, stop_reasons, last_words)
    try:
        record = records.build(run_dir, status, reason)
    except OSError as error:
        remedy = f"free some space, then `energynn check --recover {run_dir.parent.parent}`"
        print(f"energynn: {run_dir.name}: no record written ({error.strerror}); {remedy}", flush=True)
        return 1
    with contextlib.suppress(BrokenPipeError):  # who started us may be dead
        print(summary(record), flush=True)
    return {"finished": 0, "interrupted": launchers.CAN_GO_ON}.get(status, 1)


def _run_ranks(
    folder: Path, command: list[str], intent: dict, parent: int, stop_reasons: list[str], last_words: list[str], held
) -> int:
    """Run the ranks until all have ended, or have to; returns the exit status of what started them.

    ``held`` is the open run.json: where it has no name any more, there is no folder to write to.
    """
    environment = rank_environment(folder, intent)
    end_with_us = partial(processes.end_with_parent, os.getpid())
    ranks = subprocess.Popen(command, env=environment, preexec_fn=end_with_us, **APART)
    relay = threading.Thread(target=_relay, args=(ranks.stdout, folder / "log.txt", last_words), daemon=True)
    relay.start()
    silence, looked = Silence(folder), time.monotonic()
    while ranks.poll() is None and not stop_reasons:
        _look_for(parent, stop_reasons)
        if (silent := silence()) and not _ends(ranks) and not _one_has_failed(folder):
            stop_reasons.append(silent)
        if time.monotonic() - looked > DELETED_LOOK_S:
            looked = time.monotonic()
            stop_reasons += [DELETED] if _is_deleted(held) else []
        time.sleep(0.05)
    # In a batch job Slurm's signal reaches papermill, too: the parent may be gone, and the ranks still have time.
    if stop_reasons and DELETED not in stop_reasons and (os.getppid() == parent or SRUN_VARIABLE in os.environ):
        _wait_for_checkpoint(ranks, folder)
    processes.end_below([ranks.pid] if ranks.poll() is None else [])
    ranks.wait()
    relay.join(timeout=1.0)
    return ranks.returncode


def _ends(ranks: subprocess.Popen) -> bool:
    """Whether the ranks are ending by themselves: a launcher that lost one takes the sampler along first."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        ranks.wait(END_TOGETHER_S)
    return ranks.poll() is not None


def _one_has_failed(folder: Path) -> bool:
    """Whether a rank has told why it failed: its launcher ends the others, for which torchrun takes some seconds."""
    ends = events_of_kind(read_events(folder), "rank_end")
    told_s = [end["t_wall_ns"] / 1e9 for end in ends if end["status"] == "failed"]
    return bool(told_s) and abs(time.time() - max(told_s)) < AFTERWARDS_S


def _is_deleted(held) -> bool:
    """Whether an open file has no name any more; some file systems count no names, so its place is looked at, too."""
    place = os.readlink(f"/proc/self/fd/{held.fileno()}")
    return os.fstat(held.fileno()).st_nlink == 0 and not os.path.exists(place)


def _look_for(parent: int, stop_reasons: list[str]) -> None:
    if os.getppid() != parent:
        stop_reasons.append("the process that started the run ended")


def _wait_for_checkpoint(ranks: subprocess.Popen, folder: Path) -> None:
    """Ask the ranks for a checkpoint, through a file that every launcher's ranks can see, and let them end."""
    if events_of_kind(read_events(folder), "training_start"):
        (folder / "stop").touch()
        deadline = time.monotonic() + CHECKPOINT_S
        while ranks.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)


def ranks_command(run_dir: Path, intent: dict, mpirun: str, flavour: str) -> list[str]:
    """mpirun or srun with one rank per device, each under perun; or torchrun, or the one rank alone, without."""
    devices = intent["devices"]
    if intent["launcher"] == "alone":
        return [sys.executable, str(TRAIN_SCRIPT), str(run_dir)]
    if intent["launcher"] == "torchrun":
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={devices}"]
        return [*torchrun, str(TRAIN_SCRIPT), str(run_dir)]
    on_gpu = intent["device_kind"] == "gpu"
    gpus = [gpu["index"] for gpu in intent["machine"]["gpus"]][:devices] if on_gpu else []
    period_s = intent["config"]["perun_sampling_period_s"]
    perun_adapter.write_configuration(run_dir / "perun.ini", period_s, on_gpu, gpus)
    ranks = perun_adapter.command(TRAIN_SCRIPT, run_dir, run_dir / "perun.ini", launchers.python_of_ranks())
    if SRUN_VARIABLE in os.environ:
        options = shlex.split(os.environ[SRUN_VARIABLE])
        fixed = ["srun", "--export=ALL", "--kill-on-bad-exit=1", "--label", f"--ntasks={devices}"]
        return [*fixed, *options, *ranks]
    if not mpirun:  # a run that mpirun began, and that goes on where it is missing
        mpirun, flavour = launchers.find_mpi()
    return [*launchers.mpi_start(mpirun, flavour, devices), *ranks]


def rank_environment(run_dir: Path, intent: dict) -> dict[str, str]:
    """Environment of the ranks: threads, and the GPUs that they use.

    GPUs that the run does not use are hidden from it, so that their energy is not counted either.
    """
    threads = str(intent["config"]["threads_per_device"])
    used = []
    if intent["device_kind"] == "gpu":
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").replace(" ", "")
        numbers = [str(gpu["index"]) for gpu in intent["machine"]["gpus"]]
        used = (visible.split(",") if visible else numbers)[: intent["devices"]]
    return perun_adapter.environment(run_dir, launchers.mpi_environment()) | {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "OPENBLAS_NUM_THREADS": threads,
        "CUDA_VISIBLE_DEVICES": ",".join(used),
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # CUDA's numbers are then NVML's
        "PYTHONUNBUFFERED": "1",
        launchers.LABELS_VARIABLE: "1" if intent["devices"] > 1 and SRUN_VARIABLE not in os.environ else "",
        processes.STARTER_VARIABLE: processes.name_of_this_process(),
        "PYTHONFAULTHANDLER": "1",
    }


def verdict(
    folder: Path, intent: dict, exit_status: int, stop_reasons: list[str], last_words: list[str]
) -> tuple[str, str]:
    """Status and reason of a run, from the last event of each rank.

    The exit status of mpirun proves nothing: perun's is 0 after a SIGTERM. ``last_words`` are what ranks printed as
    their end. They count only where no rank could write why it failed, as on a full disk.
    """
    events = read_events(folder)
    ends = events_of_kind(events, "rank_end")
    failures = [event for event in ends if event["status"] != "finished"]
    silent = set(range(intent["devices"])) - {event["rank"] for event in ends}
    if not failures and not silent:
        return "finished", ""
    if not silent and all(event["status"] == "interrupted" for event in failures):
        asked = [event["reason"] for event in events_of_kind(events, "stop_asked")] + ["asked to stop"]
        asked = (stop_reasons + asked)[0]
        return "interrupted", f"{asked}; {failures[0]['reason']}; it can go on"
    if stop_reasons:
        return "interrupted", f"{stop_reasons[0]}; {records.how_far(events)}"
    ranks = ", ".join(str(rank) for rank in sorted(silent))
    without_a_word = f"rank {ranks} ended without a word, {intent['launcher']} with status {exit_status}"
    if failures:
        first = min(failures, key=lambda event: event["t_wall_ns"])
        reason = f"rank {first['rank']}: {first['reason']}"
        return "failed", f"{reason}; {without_a_word}" if silent else reason
    if last_words:
        return "failed", last_words[-1]
    return "killed", f"{without_a_word}; {records.how_far(events)}"


def summary(record: dict) -> str:
    """The run in two short lines; its metrics were told by the ranks."""
    if record["status"] != "finished":
        return f"energynn: {record['run_id']}: {record['status']}: {record['status_reason']}"
    energies = []
    for part in energy.COMPONENTS:
        if f"energy_{part}_J" in record:
            energies.append(f"{part} {record[f'energy_{part}_J']:.0f} J ({record[f'energy_{part}_provenance']})")
    parts = [f"{record['training_time_s']:.1f} s", *(energies or ["no energy"])]
    parts.append(f"{record.get('samples_in_training', 0)} power samples")
    doubts = "" if record["valid"] else f"\n  NOT VALID: {'; '.join(record['invalid_reasons'])}"
    return f"energynn: {record['run_id']}\n  {', '.join(parts)}{doubts}"


def _relay(lines, log_path: Path, last_words: list[str]) -> None:
    """Pass the ranks' lines on and keep them; a full disk costs the log, not the run."""
    with open(log_path, "w", buffering=1) as log:
        for line in lines:
            print(line, end="", flush=True)
            if words := _last_words(line):
                last_words.append(words)
            with contextlib.suppress(OSError):
                log.write(line)


def _last_words(line: str) -> str:
    """Why a rank ends, where this line of the log says so, with or without srun's label; NCCL ends it by a signal."""
    line = re.sub(r"^ *\d+: ", "", line)
    if line.startswith(launchers.LAST_WORDS):
        return line.removeprefix("energynn: ").strip()
    of_nccl = NCCL_LOST.search(line)
    return f"rank {of_nccl[1]}: another rank is lost ({of_nccl[2].strip()}); {AFTER_A_LOSS}" if of_nccl else ""


def alone_on_host() -> socket.socket | None:
    """What the one measured run of this host holds, whoever makes it, and wherever its records lie.

    None while another one goes on. It is a name without a file: it is free when its process ends.
    """
    name = os.environ.get(HOST_LOCK, os.uname().nodename)
    held = socket.socket(socket.AF_UNIX)
    try:
        held.bind(f"\0energynn-measured-run-on-{name}")
    except OSError:
        held.close()
        return None
    return held


if __name__ == "__main__":
    try:
        sys.exit(supervise(Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]))
    except Exception:  # who started us may be dead, and nobody hear what went wrong
        if not (Path(sys.argv[1]) / "record.json").exists():  # which holds the log's SHA-256
            with open(Path(sys.argv[1]) / "log.txt", "a") as log:
                traceback.print_exc(file=log)
        raise
