"""`energynn measure -- COMMAND`: any command, measured as our own trainers are.

Under mpirun, srun or torchrun every rank starts its own `energynn measure`, the first rank of each
host starts the sampler there, and rank 0 writes the record.
"""

import contextlib
import os
import shlex
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import TextIO

from energynn import records
from energynn.host import processes, texts
from energynn.host.files import (
    default_runs_dir,
    is_locked,
    lock,
    remove_matching,
    require_writable_path,
    write_json,
)
from energynn.host.launchers import own_launcher, rank_and_size
from energynn.launch import supervise
from energynn.measure import devices, energy, machine
from energynn.measure.account import IDLE_WINDOWS
from energynn.measure.sampler_process import READY_LIMIT_S, start_sampler, wait_until
from energynn.measure.samples import (
    Events,
    events_of_kind,
    read_events,
    segment_dirs,
)
from energynn.measure.window import SIZE_FILE

IDLE_BASELINE_S = 1.0  # before and after the command
FILES_BEFORE_START_PATTERN = r"run\.json|samples-.*|\.(start|ranks-.*|sampler-.*)"
SHORTEST_PERIOD_S = 0.01  # a period that sensors can be read with
LEFTOVER_GRACE_S = 8.0  # for a checkpoint of what the command has left behind
CANNOT_START_EXIT_STATUS = 126  # as shells say it


def measure_command(
    command: list[str],
    out: Path | None,
    quiet: bool,
    gpus: bool,
    labels: dict,
    told: dict,
) -> tuple[records.Record | None, int]:
    """Run a command and measure it; return its record (rank 0 only) and the status to pass on.

    A folder that holds an earlier start of the command gets a further segment; energies add up.
    ``quiet``: what the command prints goes to standard error. ``gpus``: whether it uses GPUs, where
    there are any. ``labels``: as ``records.check_labels`` gives them. ``told``: the sampling
    period, and parameters of the training that a person knows. Raises ValueError with the remedy
    before the command is started.
    """
    rank, size = rank_and_size()
    children = []
    ear = supervise.start_ear(shlex.join(command))
    stopped = supervise.forward_signals(children, ear)
    run_dir = _choose_run_folder(command, out, rank, size)
    if rank == 0:
        described = machine.describe_machine()
        devices_here = max(1, len(described["gpus"] if gpus else []))
        intent = supervise.start_facts(run_dir, machine.system_file(), described, gpus)
        intent |= labels | {
            "workload": "command",
            "system": "measured",
            "config": {"command": shlex.join(command)} | told,
            "devices": told.get("devices", size if size > 1 else devices_here),
        }
        # arguments and folders may have any bytes
        intent = texts.map_texts(intent, texts.escape_non_text_bytes)
        _held = _begin_segment(run_dir, intent)
        _print(
            f"energynn measures {IDLE_BASELINE_S:.0f} s of idle power, then: "
            f"{intent['config']['command']}\n"
            "  all that this machine draws counts"
        )
        if size > 1:
            _print(f"  as rank 0 of {size} ({own_launcher()}); all of them have to end")
    else:
        wait_until(
            lambda: is_locked(run_dir / "run.json"),
            f"rank 0 in {run_dir}; is --out on a shared disk?",
        )
    folder = segment_dirs(run_dir)[-1]
    stop_sampler, sampler = _start_sampler(folder, size, stopped)
    try:
        events = Events(folder, rank)
        visible = devices.visible_gpus(records.read_intent(run_dir))
        events.mark("rank_start", **visible)
        stdout = sys.stderr if quiet else None
        exit_status, word, reason = _run_command(
            command, folder, events, children, stopped, ear, stdout
        )
        stop_sampler()
        _tell_of_leftovers(folder, events, sampler)
        events.mark("rank_end", status=word, reason=reason)
        passed_on = records.shell_exit_status(exit_status)
        if rank > 0:
            return None, passed_on
        return records.save_record(run_dir, *_verdict(folder, size, stopped)), passed_on
    except Exception as error:  # whatever it is, the command has its own status
        _print(supervise.missing_record_text(run_dir, error))
        return None, records.shell_exit_status(children[0].wait()) if children else 1


def _tell_of_leftovers(folder: Path, events: Events, sampler: int) -> None:
    """Name what the commands of this host have left running, once: the rank that had the sampler,
    and so has waited for the others.
    """
    left = [
        f"{each.info['name']} ({each.pid})" for each in processes.list_marked(folder)
    ]
    if sampler and left:
        events.mark("outlived", processes=left)
        _print(f"energynn: {records.leftover_processes_text(left)}")


def _start_sampler(folder: Path, size: int, stopped: list[int]):
    """Start this host's sampler; what is refused, as another measured run began, leaves no run."""
    try:
        return start_sampler(folder, size, stopped, supervise.lock_host)
    except ValueError:
        if size == 1:
            remove_matching(folder, FILES_BEFORE_START_PATTERN)
        raise


def _print(text: str) -> None:
    with contextlib.suppress(OSError):  # nobody has to read it
        print(text, file=sys.stderr, flush=True)


def _choose_run_folder(
    command: list[str],
    out: Path | None,
    rank: int,
    size: int,
) -> Path:
    """Say where the run will be; raises ValueError with the remedy for what cannot work."""
    if shutil.which(command[0]) is None:
        raise ValueError(
            f"measure: {command[0]!r} is no command here; check its name and path; a script: "
            "`sh FILE`; what a shell does: `sh -c 'LINE'`; variables: `env NAME=VALUE COMMAND`"
        )
    if size > 1 and out is None:
        raise ValueError(
            f"out: {own_launcher()}: give --out DIR, one folder that all ranks see, or "
            f"{own_launcher().remedy()}"
        )
    if rank == 0:
        supervise.lock_host().close()
    moment = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    name = f"{moment}-{os.getpid()}-{Path(command[0]).name}"
    return (out or default_runs_dir() / "measured" / name).absolute()


def _begin_segment(run_dir: Path, intent: dict) -> list[TextIO]:
    """Write run.json, or begin a further segment of the same command; return its locks."""
    is_new = not any(run_dir.glob("[!.]*"))
    before = intent if is_new else records.read_intent_if_any(run_dir)
    was = before.get("config", {})
    now = intent["config"]
    if others := [name for name in now | was if now.get(name) != was.get(name)]:
        raise ValueError(
            f"out: {run_dir} holds other files, or a run of other {', '.join(others)}; "
            "choose a new or an empty folder"
        )
    require_writable_path(run_dir / "run.json")
    run_dir.mkdir(parents=True, exist_ok=True)
    starts = records.lock_run_file(run_dir, records.START_LOCK)
    if is_new:
        write_json(run_dir / "run.json", intent)
    else:
        supervise.make_segment_folder(run_dir)
    # last: the other ranks wait for this
    return [starts, records.lock_run_file(run_dir)]


# ------------------------------------------------------------------------------------ the command


def _run_command(
    command: list[str],
    folder: Path,
    events: Events,
    children,
    stopped,
    ear,
    stdout,
) -> tuple[int, str, str]:
    """Run the command between two idle times; returns its exit status, which is minus the number
    of a signal that ended it, a word for it, and why it is not 0.
    """
    events.be_idle("before", IDLE_BASELINE_S)
    events.mark("training_start")
    try:
        child = supervise.start_process(
            command,
            folder,
            os.environ,
            signal.SIGTERM,
            stdout=stdout,
            close_fds=False,  # MPI's launchers hand open files to their ranks
        )
    except OSError as error:
        events.mark("training_end", exit_status=CANNOT_START_EXIT_STATUS)
        return (
            CANNOT_START_EXIT_STATUS,
            "failed",
            f"the command cannot be started: {error.strerror}; of a script see the first line",
        )
    children.append(child)
    for number in stopped:  # they came before there was a process to pass them on to
        with contextlib.suppress(OSError):
            child.send_signal(number)
    status = child.wait()
    size_B = sum(int(each.suffix[1:]) for each in folder.glob(f"{SIZE_FILE}.*"))
    metrics = {SIZE_FILE: size_B} if size_B else {}
    events.mark("training_end", exit_status=status, metrics=metrics)
    if status < 0 or stopped:
        # what a shell has left behind has not heard that it is to end
        if ear.poll() is None:
            processes.ask_marked_to_end(folder)
        processes.end_marked(folder, LEFTOVER_GRACE_S)
    events.be_idle("after", IDLE_BASELINE_S)
    if status < 0:
        return status, "killed", f"the command was ended by signal {-status}"
    if status > 0:
        return status, "failed", f"the command ended with status {status}"
    return status, "finished", ""


def _verdict(
    folder: Path,
    size: int,
    stopped: list[int],
) -> tuple[str, str]:
    """Wait for the ends of all ranks; return status and reason of the whole."""
    quiet_s = 0.0
    patience_s = 0.0 if stopped else READY_LIMIT_S
    while (
        len(events_of_kind(read_events(folder), "rank_end")) < size
        and quiet_s <= patience_s
    ):
        time.sleep(0.5)
        quiet_s = 0.0 if None in map(lock, folder.glob(".ranks-*")) else quiet_s + 0.5
    by = f" (there are {size} by {own_launcher()})" if size > 1 else ""
    return supervise.status_and_reason(
        folder, size, supervise.first_signal_text(stopped), by
    )


# ------------------------------------------------------------------------------------- for people


def report_text(record: records.Record, run_dir: Path, details: bool = False) -> str:
    """Tell what a run took: in one sentence; with ``details`` also a line for each component."""
    name = record.config.get("command", record.run_id)
    status = ", ".join(filter(None, [record.status, record.status_reason]))
    lines = [f"energynn: {name}: {status}", f"  {records.summary_text(record)}"]
    if not record.valid:
        lines.append(f"  NOT valid as evidence: {'; '.join(record.invalid_reasons)}")
    remarks = records.remarks_on_record(record, run_dir)
    samples = record.samples_in_training
    if record.status == "finished" and 0 < samples < records.MIN_POWER_SAMPLES:
        enough = 1.3 * records.MIN_POWER_SAMPLES
        words = f"run it {enough / samples:.2g} times as long"
        if record.training_time_s > enough * SHORTEST_PERIOD_S:
            words += (
                ", or, where its sensors are faster, with --period (sampling_period_s) "
                f"{SHORTEST_PERIOD_S}"
            )
        remarks.append(words)
    lines += [f"  {line}" for line in remarks]
    if details:
        lines += [
            _energy_of_component_text(record, component)
            for component in [*energy.COMPONENTS, "total"]
            if getattr(record, f"energy_{component}_J") is not None
        ]
        lines += [
            f"    start {one.segment}, {one.host} {one.id}: {one.energy_J:.2f} J {one.provenance}"
            for one in record.sensors
            if one.primary and one.energy_J is not None
        ]
        lines += _idle_power_lines(record)
        lines.append(f"  {samples} power samples")
        # null stands for nan
        lines += [
            f"  {name}: {float('nan') if value is None else value:.6g}"
            for name, value in record.metrics.items()
        ]
        lines += [f"  flag: {flag}" for flag in record.flags]
    about = record.name, record.note, f"record: {run_dir}"
    lines += [f"  {text}" for text in about if text]
    return "\n".join(map(texts.escape_controls, lines))


def _idle_power_lines(record: records.Record) -> list[str]:
    """Tell what each component drew while nothing ran, a line for each time."""
    lines = []
    for when in IDLE_WINDOWS:
        known = [
            f"{component.upper()} {power_W:.1f} W"
            for component in energy.COMPONENTS
            if (power_W := getattr(record, f"idle_power_{component}_{when}_W"))
            is not None
        ]
        if known:
            lines.append(f"  idle, {when}: {', '.join(known)}")
    return lines


def _energy_of_component_text(record: records.Record, component: str) -> str:
    name = f"energy_{component}"
    bound_J = getattr(record, f"{name}_bound_J") or 0.0  # a record of before has none
    provenance = getattr(record, f"{name}_provenance")
    energy_J = getattr(record, f"{name}_J")
    systematic_J = getattr(record, f"{name}_systematic_J")
    power_W = getattr(record, f"mean_power_{component}_W")
    return (
        f"  {component.upper():6}{energy_J:12.2f} J  {provenance:9} +- {bound_J:.2f} J "
        f"+- {systematic_J:.2f} J (sensor), {power_W:.1f} W"
    )
