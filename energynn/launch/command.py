"""`energynn measure -- COMMAND`: any command, measured as our own trainers are, alone or as one rank of many.

A sampler process of our own reads the sensors. Under mpirun, srun or torchrun every rank starts its own `energynn
measure`, the first rank of each host starts the sampler there, and rank 0 writes the record. Alone, the command may run
under perun instead, with our sampler in perun's sampler process: perun's number then stands beside ours.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import select
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from energynn import records
from energynn.files import default_runs_dir, force, is_locked, lock, utc_now, write_json
from energynn.launchers import rank_and_size
from energynn.measure import energy, machine, perun_adapter
from energynn.measure.sampler_process import intent_of, start_sampler, until
from energynn.measure.samples import Events, Silence, events_of_kind, has_begun, limit_s, read_events, segments
from energynn.processes import adopt_orphans, below, end_below, end_with_parent, keep
from energynn.reading import json_table

ALIVE = ".alive"  # locked by rank 0 as long as it lives
IDLE_S = 1.0  # before and after the command
LOOK_S = 0.2  # the longest that the end of the command is waited for at a time
SURE_S, MOST_LATE_S = 0.2, 1.0  # by which that end may be known too late without a word, and at all
PERUN_PERIOD_S = 1.0  # as in the paper
PASSED_ON = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def measure(
    command: list[str], out: Path | None, period_s: float, quiet: bool, perun: bool = False
) -> tuple[dict | None, int]:
    """Run a command and measure it; return its record (rank 0 only) and the exit status to pass on.

    A folder that holds an earlier start of the command gets a further segment; energies add up. ``quiet``: what the
    command prints goes to standard error. ``perun``: under perun, which takes some seconds more; where MPI's ranks
    belong to the command it cannot. Raises ValueError with the remedy before the command is started.
    """
    launched = rank_and_size()
    rank, size = launched or (0, 1)
    stopped: list[int] = []
    children: list[subprocess.Popen] = []
    _pass_signals_on(children, stopped)
    run_dir, folder, _held = _prepare(command, out, period_s, rank, size)
    stdout = sys.stderr if quiet else None
    with_perun = perun and not launched
    if with_perun and not all(importlib.util.find_spec(name) for name in ("perun", "mpi4py")):
        raise ValueError("perun: it or mpi4py is not installed: pip install perun mpi4py, or measure without")
    if rank == 0:
        print(f"energynn measures {IDLE_S:.0f} s of idle power, then: {shlex.join(command)}", file=sys.stderr)
        print(f"  in another shell:\n    energynn status --watch {_short(run_dir)}", file=sys.stderr, flush=True)
    if with_perun:
        gpus = [gpu["index"] for gpu in machine.gpus()]
        perun_adapter.write_configuration(folder / "perun.ini", PERUN_PERIOD_S, on_gpu=True, gpus=gpus)
        perun = perun_adapter.command(Path(__file__).with_name("under_perun.py"), folder, folder / "perun.ini")
        # Hold a Ctrl-C back: in this process until perun runs, in perun until ``run_under_perun`` handles it.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        variables = perun_adapter.environment(folder, dict(os.environ))
        as_child = partial(_be_child, partial(end_with_parent, os.getpid(), signal.SIGTERM))
        children.append(subprocess.Popen(perun, env=variables, stdout=stdout, preexec_fn=as_child))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        for number in stopped:  # they came before there was a process to pass them on to
            children[0].send_signal(number)
        _wait(children[0], folder)
        _require_folder(run_dir)
        if not read_events(folder) and not stopped:
            print("energynn: perun does not start (see above); our own sampler measures alone", file=sys.stderr)
            for begun in folder.glob("samples-*.jsonl"):
                begun.unlink(missing_ok=True)  # of perun's sampler, before there was anything to measure
            with_perun = False
    if not with_perun:
        stop_sampler = start_sampler(folder, size, stopped)
        _run(command, folder, rank, children, stopped, stdout)
        stop_sampler()
    _require_folder(run_dir)
    status, reason, exit_status = _outcome(folder, rank, stopped)
    if rank > 0:
        return None, exit_status
    if size > 1:
        status, reason = _outcome_of_all(folder, size, stopped, (status, reason))
    return records.build(run_dir, status, reason), exit_status


def _short(path: Path) -> str:
    """As a person in this folder would type it."""
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


def _require_folder(run_dir: Path) -> None:
    if not (run_dir / "run.json").exists():  # perun makes the folder anew
        raise ValueError(f"out: {run_dir} was deleted while the command ran; its energy and exit status are lost")


def _prepare(command, out, period_s, rank, size) -> tuple[Path, Path, list]:
    """The run's folder, with run.json in it, the folder of this start's raw files, and locks for as long as we live."""
    if not command:
        raise ValueError("measure: no command; write it after --, as in: energynn measure -- python train.py")
    if shutil.which(command[0]) is None:
        raise ValueError(f"measure: {command[0]!r} is no command that can be run here; check its name and path")
    if not 0.01 <= period_s <= 60:
        raise ValueError(f"period: must be 0.01 to 60 seconds, got {period_s}")
    if size > 1 and out is None:
        raise ValueError("out: give --out DIR, one folder that all ranks see, where mpirun or srun starts many")
    name = f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{os.getpid()}-{Path(command[0]).name}"
    run_dir = (out or default_runs_dir() / "measured" / name).absolute()
    if run_dir.name.startswith("."):
        raise ValueError(f"out: {run_dir.name} begins with a dot, and hidden runs are never found; choose another name")
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        found = run_dir.iterdir() if rank == 0 else ()  # hundreds of ranks do not list what hundreds have written
        others = [path.name for path in found if not path.name.startswith(".")]
    except OSError as error:
        raise ValueError(f"out: cannot write to {run_dir} ({error.strerror}); choose a folder you own") from error
    if rank > 0:
        # The folder of this start is the one that rank 0 holds; those of earlier starts are held by nobody.
        until(lambda: is_locked(segments(run_dir)[-1] / ALIVE), f"rank 0 in {run_dir}; is --out on a shared disk?")
        return run_dir, segments(run_dir)[-1], []
    if "run.json" not in others:
        if others:
            raise ValueError(f"out: {run_dir} holds other files ({others[0]}); choose a new or an empty folder")
        write_json(run_dir / "run.json", _intent(run_dir, command, period_s, size))
    try:
        intent = json_table(run_dir / "run.json")
        workload, known = intent["workload"], intent["config"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"out: {run_dir / 'run.json'} is none of ours; choose another folder") from error
    if workload != "command":
        raise ValueError(f"out: {run_dir} holds a run of {workload}; choose another folder")
    if known != {"command": shlex.join(command), "sampling_period_s": period_s}:
        raise ValueError(f"out: {run_dir} holds another command or period ({known}); choose another folder")
    alive = records.hold(run_dir)
    return run_dir, *_open_segment(run_dir, alive)


def _open_segment(run_dir: Path, alive) -> tuple[Path, list]:
    """A new folder for this start, locked from its first instant, so that the other ranks know it from older ones."""
    begun = ("events-rank", "samples-")  # a start may have been killed before its first event
    if not any(path.name.startswith(begun) for path in run_dir.iterdir()):
        return run_dir, [alive, lock(run_dir / ALIVE, wait=True)]
    folder = run_dir / f"segment-{len(segments(run_dir)) + 1}"
    made = run_dir / f".{folder.name}"
    made.mkdir(exist_ok=True)
    held = lock(made / ALIVE, wait=True)
    made.rename(folder)
    return folder, [alive, held]


def _intent(run_dir: Path, command: list[str], period_s: float, size: int) -> dict:
    described = machine.describe_machine()
    gpus = described["gpus"]
    model = machine.CPU_MODEL
    if (default_runs_dir() / "local" / "system.toml").exists():
        model = machine.load(default_runs_dir(), "local", described)["cpu_model"]
    return {
        "run_id": run_dir.name,
        "workload": "command",
        "system": "measured",
        "started_at": utc_now(),
        "config": {"command": shlex.join(command), "sampling_period_s": period_s},
        "devices": size if size > 1 else max(1, len(gpus)),
        "cpu_model": model,
        **machine.facts_of_run(described, on_gpu=bool(gpus)),
    }


# ------------------------------------------------------------------------------------------------------- the command


def run_under_perun(folder: str) -> None:
    """Run the command of the run in this folder; perun's process calls this."""
    folder = Path(folder)
    intent = intent_of(folder)
    children: list[subprocess.Popen] = []
    stopped: list[int] = []
    _pass_signals_on(children, stopped)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    with contextlib.ExitStack() as stack:
        if not has_begun(folder, os.uname().nodename):
            print("energynn: perun's sampler did not start (see above); ours runs alone", file=sys.stderr, flush=True)
            stack.callback(start_sampler(folder, 1, stopped))
        _run(shlex.split(intent["config"]["command"]), folder, 0, children, stopped, None)


def _run(command: list[str], folder: Path, rank: int, children: list, stopped: list[int], stdout) -> None:
    """Idle, command, idle, with their marks; whatever happens to the command, its end is written."""
    host = os.uname().nodename
    events = Events(folder, rank)
    mark = events.mark
    mark("rank_start", rank=rank, host=host, pid=os.getpid())
    mark("idle_start", when="before")
    until = time.monotonic() + IDLE_S
    while time.monotonic() < until and not stopped:
        time.sleep(0.02)
    mark("idle_end", when="before")
    if stopped:
        mark("rank_end", status="failed", exit_status=-stopped[0])
        return
    adopt_orphans()
    others = below()
    mark("training_start")
    # a power cut costs no energy of what was begun, and a slow disk does not hide the end from us
    forcing = threading.Thread(target=force, args=(folder / f"events-rank{rank}.jsonl",), daemon=True)
    try:
        status, ended_ns, late_s = _to_its_end(command, children, stopped, stdout, forcing)
        if status < 0:  # it may be the keeper that was killed
            end_below(below(others), others)
    except (OSError, subprocess.SubprocessError) as error:  # the second where there can be no process more
        print(f"energynn: {command[0]}: {getattr(error, 'strerror', error)}", file=sys.stderr, flush=True)
        status, ended_ns, late_s = 126, time.monotonic_ns(), 0.0
    late = {"late_s": late_s} if late_s > MOST_LATE_S else {}
    unsure = {"unsure_s": late_s} if SURE_S < late_s <= MOST_LATE_S else {}
    ago_ns = time.monotonic_ns() - ended_ns  # its keeper may have had to end what it left behind
    then = {"t_mono_ns": ended_ns, "t_wall_ns": time.time_ns() - ago_ns}
    mark("training_end", exit_status=status, **then, **late, **unsure)
    if rank == 0:
        print(f"  it has ended; {IDLE_S:.0f} s of idle power, then the record", file=sys.stderr, flush=True)
    events.be_idle("after", IDLE_S)
    mark("rank_end", status="failed" if status or late else "finished", exit_status=status, **late)


def _to_its_end(command, children, stopped, stdout, forcing) -> tuple[int, int, float]:
    """Start a command and wait; returns its status, the monotonic time of its end in ns, and how late that may be in s.

    Its keeper and we look for the end, and either may be stopped: the earlier time counts. forcing: a thread to start
    afterwards, as a process that has threads had better not fork.
    """
    hidden = (perun_adapter.RUN_DIR_VARIABLE, *perun_adapter.SET_BY_PERUN)
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    reader, writer = os.pipe()
    as_child = partial(_be_child, partial(keep, os.getpid(), writer))
    started_s = time.monotonic()
    with open(reader, "rb", buffering=0) as told, open(writer, "wb", buffering=0) as ours:
        # close_fds: MPI's launchers hand open files to their ranks
        child = subprocess.Popen(command, env=environment, stdout=stdout, preexec_fn=as_child, close_fds=False)
        ours.close()
        children.append(child)
        for number in stopped:  # they came before there was a process to pass them on to
            child.send_signal(number)
        forcing.start()
        alive_s, seen_ns = _wait_for_end(told, started_s)
        status = child.wait()
        ended_ns = min(seen_ns, int.from_bytes(told.read(8), "little") or seen_ns)
    return status, ended_ns, max(0.0, ended_ns / 1e9 - alive_s - LOOK_S)


def _wait_for_end(told, alive_s: float) -> tuple[float, int]:
    """Wait for a command of which a keeper tells; returns a monotonic time in s when it lived, and its end in ns.

    alive_s: such a time from before.
    """
    ends = select.poll()
    ends.register(told)
    command = int.from_bytes(told.read(8), "little")
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError, AttributeError):  # an old kernel; or it has ended, and its keeper tells when
            ends.register(stack.enter_context(open(os.pidfd_open(command), "rb", buffering=0)))
        looked_s = time.monotonic()
        while not ends.poll(0):
            alive_s = looked_s
            ends.poll(1000 * LOOK_S)
            looked_s = time.monotonic()
        return alive_s, time.monotonic_ns()


def _pass_signals_on(children: list[subprocess.Popen], stopped: list[int]) -> None:
    """Note signals, and pass all but a Ctrl-C on to the command, which hears that one from the terminal.

    A signal that was ignored before, as SIGHUP under nohup, is still ignored.
    """

    def take(number: int, _frame) -> None:
        stopped.append(number)
        if number != signal.SIGINT:
            for child in children:
                child.send_signal(number)

    for number in (signal.SIGINT, *PASSED_ON):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, take)


def _be_child(tie: Callable) -> None:
    """What a child does first: it has the signals that it would have without us, and must not outlive us."""
    for number in (signal.SIGINT, *PASSED_ON):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    tie()


def _wait(perun: subprocess.Popen, folder: Path) -> None:
    """Wait for perun. One whose sampler is dead would never end: it is killed, unless the command still runs."""
    silence, said = Silence(folder), False
    while perun.poll() is None:
        if silent := silence() or silence.notice():
            events = {event["event"] for event in read_events(folder)}
            goes_on = "training_start" in events and "rank_end" not in events
            if not said:
                without = "; the command goes on without" if goes_on else ""
                print(f"energynn: {silent}{without}", file=sys.stderr, flush=True)
                said = True
            if not goes_on:
                perun.kill()
        time.sleep(0.05)


def _outcome(folder: Path, rank: int, stopped: list[int]) -> tuple[str, str, int]:
    """Status, reason and exit status of one rank's command."""
    events = read_events(folder, rank)
    ends = events_of_kind(events, "training_end")
    if not events_of_kind(events, "training_start"):
        if stopped:
            reason = f"stopped by {_signal_name(stopped[0])} before the command was started"
            return "interrupted", reason, 128 + stopped[0]
        return "failed", "the sampler did not start, so the command was not", 2
    if not ends:
        return "killed", "the measurement was killed before the command ended", 128 + (stopped or [signal.SIGKILL])[0]
    status, reason = ends[0]["exit_status"], _against(ends[0])
    if not reason or "late_s" in ends[0]:
        return "failed" if reason else "finished", reason, records.shell_status(status)
    kind = "failed"
    if status < 0:
        kind, reason = "killed", f"the command was ended by {_signal_name(-status)}"
    return "interrupted" if stopped else kind, reason, records.shell_status(status)


def _against(end: dict) -> str:
    """What is not good about the end of a rank's command, in words; "" of a good one."""
    if late_s := end.get("late_s"):
        return f"the measurement stood still for {late_s:.0f} s, in which the command ended: its time is not known"
    return f"the command ended with status {end['exit_status']}" if end["exit_status"] else ""


def _signal_name(number: int) -> str:
    """A signal's name; real-time signals have none."""
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"


def _outcome_of_all(folder: Path, size: int, stopped: list[int], own: tuple[str, str]) -> tuple[str, str]:
    """Status and reason of all ranks, after waiting for those that still have to write their end.

    Of a measurement that was stopped, rank 0's ``own`` end counts, unless that was good and another rank's was not.
    """
    status, reason = _first_bad_end(folder, size, 0.0 if stopped else limit_s("ready_limit_s"))
    if not stopped or own[0] == status == "finished":
        return status, reason
    return own if own[0] != "finished" else ("interrupted", f"stopped by {_signal_name(stopped[0])}; {reason}")


def _first_bad_end(folder: Path, size: int, patience_s: float) -> tuple[str, str]:
    """``patience_s``: with ranks that have not even begun."""
    until = time.monotonic() + patience_s
    while True:
        while any(map(is_locked, folder.glob(".ranks-*"))):
            time.sleep(0.5)
        events = read_events(folder)
        ended = {event["rank"]: event for event in events_of_kind(events, "rank_end")}
        if len(ended) == size:
            break
        if len({event["rank"] for event in events}) == size or time.monotonic() > until:
            missing = ", ".join(str(rank) for rank in range(size) if rank not in ended)
            return "killed", f"rank {missing} ended without a word"
        time.sleep(0.5)
    bad = [event for event in ended.values() if _against(event)]
    if not bad:
        return "finished", ""
    first = min(bad, key=lambda event: event["t_wall_ns"])
    return "failed", f"rank {first['rank']}: {_against(first)}"


# ----------------------------------------------------------------------------------------------------------- for people


def report(record: dict) -> str:
    """The energies of a record, one line per component, with provenance and uncertainty."""
    status = f"{record['status']}, {record['status_reason']}" if record["status_reason"] else record["status"]
    what = f"energynn: {record['config'].get('command', record['run_id'])}: {status}"
    lines = [textwrap.fill(what, 79, subsequent_indent="  ")]
    lines.append(f"  {record.get('training_time_s', 0.0):.2f} s, {record.get('samples_in_training', 0)} samples")
    for component in (*energy.COMPONENTS, "total"):
        if record.get(f"energy_{component}_J") is not None:
            lines += _energy_lines(record, component)
    absent = [part.upper() for part in energy.COMPONENTS if record.get(f"energy_{part}_J") is None]
    lines += [f"  {', '.join(absent)} absent: no sensor"] if absent else []
    if "energy_perun_total_J" in record:
        lines.append(f"  perun's method: {record['energy_perun_total_J']:.2f} J over {record['perun_time_s']:.2f} s")
    if len(record["segments"]) > 1:
        lines += [_segment_line(number, segment) for number, segment in enumerate(record["segments"], start=1)]
    words = [f"flag: {flag}" for flag in record["flags"]]
    if not record["valid"]:
        words.append(f"NOT valid as evidence: {'; '.join(record['invalid_reasons'])}")
    lines += [textwrap.fill(text, 79, initial_indent="  ", subsequent_indent="    ") for text in words]
    return "\n".join(lines)


def _energy_lines(record: dict, component: str) -> list[str]:
    joules, watts = record[f"energy_{component}_J"], record[f"mean_power_{component}_W"]
    provenance = record[f"energy_{component}_provenance"]
    statistical_J, systematic_J = (record[f"energy_{component}_{kind}_J"] for kind in ("statistical", "systematic"))
    net_J = record.get(f"energy_net_{component}_J")
    is_seen = net_J is not None and abs(net_J) > statistical_J  # a short command hides in the noise of the idle power
    lines = [
        f"  {component.upper():6}{joules:12.2f} J  {provenance:9} +- {statistical_J:.2f} J (95 %) "
        f"+- {systematic_J:.2f} J (sensor), {watts:.1f} W"
    ]
    return [*lines, f"  {'':6}{net_J:12.2f} J  without idle power"] if is_seen else lines


def _segment_line(number: int, segment: dict) -> str:
    joules, gap_s = segment["energy_total_J"], segment["gap_before_s"]
    used = "no energy" if joules is None else f"{joules:.2f} J"
    gap = "" if gap_s is None else f", {gap_s:.1f} s after the one before"
    return f"  segment {number}: {segment['training_time_s']:.2f} s, {used}{gap}"
