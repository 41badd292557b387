"""`energynn measure -- COMMAND`: any command, measured as our own trainers are, alone or as one rank of many.

Alone, the command runs under perun, with our sampler in perun's sampler process. Under mpirun, srun or torchrun every
rank starts its own `energynn measure`, and MPI belongs to the command: there the first rank of each host starts a
sampler process of our own, and rank 0 writes the record.
"""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from energynn import records
from energynn.cluster import systems
from energynn.measure import perun_adapter
from energynn.measure.perun_adapter import die_with_parent
from energynn.measure.samples import SILENCE_S, Events, Silence, read_events, segments

IDLE_S = 1.0  # before and after the command
PERUN_PERIOD_S = 1.0  # as in the paper
READY_S = 60.0  # for the first sample; Python starts slowly from a cluster's file system
PASSED_ON = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
# rank and size as MPICH and Slurm's pmi2, Open MPI, torchrun and srun tell them
WORLDS = (("PMI_RANK", "PMI_SIZE"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), ("RANK", "WORLD_SIZE"),
          ("SLURM_PROCID", "SLURM_NTASKS"))  # fmt: skip


def world() -> tuple[int, int, bool]:
    """Rank and size of the world that this process was started in, and whether a launcher started it at all."""
    for rank, size in WORLDS:
        if rank == "SLURM_PROCID" and "SLURM_STEP_ID" not in os.environ:
            continue  # the batch script itself, which is one process whatever the number of tasks
        if rank in os.environ and size in os.environ:
            return int(os.environ[rank]), int(os.environ[size]), True
    return 0, 1, False


def measure(command: list[str], out: Path | None, period_s: float, quiet: bool) -> tuple[dict | None, int]:
    """Run a command and measure it; return its record (rank 0 only) and the exit status to pass on.

    A folder that holds an earlier start of the command gets a further segment; energies add up. ``quiet``: what the
    command prints goes to standard error. Raises ValueError with the remedy before the command is started.
    """
    rank, size, launched = world()
    run_dir, folder = _prepare(command, out, period_s, rank, size, launched)
    with_perun = not launched and all(importlib.util.find_spec(name) for name in ("perun", "mpi4py"))
    stopped: list[int] = []
    children: list[subprocess.Popen] = []
    _pass_signals_on(children, stopped)
    stdout = sys.stderr if quiet else None
    if with_perun:
        perun_adapter.write_configuration(folder / "perun.ini", folder, PERUN_PERIOD_S, on_gpu=True)
        perun = perun_adapter.command(Path(__file__).with_name("__main__.py"), folder, folder / "perun.ini")
        children.append(subprocess.Popen(perun, env=perun_adapter.environment(folder, dict(os.environ)), stdout=stdout,
                                         preexec_fn=die_with_parent))  # fmt: skip
        _wait(children[0], folder)
    else:
        stop_sampler = _start_sampler(folder, size)
        _run(command, folder, rank, children, stdout)
        stop_sampler()
    status, reason, exit_status = _outcome(folder, rank, stopped)
    if rank > 0:
        return None, exit_status
    if size > 1:
        status, reason = _outcome_of_all(folder, size)
    return records.build(run_dir, status, reason), exit_status


def _prepare(command, out, period_s, rank, size, launched) -> tuple[Path, Path]:
    """The run's folder, with run.json in it, and the folder of this start's raw files."""
    if not command:
        raise ValueError("measure: no command; write it after --, as in: energynn measure -- python train.py")
    if shutil.which(command[0]) is None:
        raise ValueError(f"measure: {command[0]!r} is no command that can be run here; check its name and path")
    if not 0.01 <= period_s <= 60:
        raise ValueError(f"period: must be 0.01 to 60 seconds, got {period_s}")
    if launched and size > 1 and out is None:
        raise ValueError("out: give --out DIR, one folder that all ranks see, where mpirun or srun starts many")
    name = f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{os.getpid()}-{Path(command[0]).name}"
    run_dir = (out or Path("runs") / "measured" / name).absolute()
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"out: cannot write to {run_dir} ({error.strerror}); choose a folder you own") from error
    if rank == 0 and not (run_dir / "run.json").exists():
        records.write_json(run_dir / "run.json", _intent(run_dir, command, period_s, size))
    _until(lambda: (run_dir / "run.json").exists(), f"{run_dir / 'run.json'} from rank 0; is --out on a shared disk?")
    intent = json.loads((run_dir / "run.json").read_text())
    if intent["workload"] != "command":
        raise ValueError(f"out: {run_dir} holds a run of {intent['workload']}; choose another folder")
    given = {"command": shlex.join(command), "sampling_period_s": period_s}
    if size == 1 and intent["config"] != given:
        raise ValueError(f"out: {run_dir} holds another command or period ({intent['config']}); choose another folder")
    parts = segments(run_dir)
    begun = lambda part: (part / f"events-rank{rank}.jsonl").exists()  # noqa: E731
    folder = next((part for part in parts if not begun(part)), run_dir / f"segment-{len(parts) + 1}")
    folder.mkdir(exist_ok=True)
    return run_dir, folder


def _intent(run_dir: Path, command: list[str], period_s: float, size: int) -> dict:
    machine = systems.describe_machine()
    described = Path("runs") / "local" / "system.toml"
    model = systems.load(Path("runs"), "local")["cpu_model"] if described.exists() else systems.CPU_MODEL
    return {
        "run_id": run_dir.name, "workload": "command", "system": "measured", "started_at": records.utc_now(),
        "boot_id": machine["boot_id"], "config": {"command": shlex.join(command), "sampling_period_s": period_s},
        "device_kind": "gpu" if machine["gpus"] else "cpu core",
        "device_name": machine["gpus"][0]["name"] if machine["gpus"] else machine["cpu"],
        "devices": size if size > 1 else max(1, len(machine["gpus"])),
        "cpu_model": model, "versions": systems.versions(), "machine": machine,
    }  # fmt: skip


# ------------------------------------------------------------------------------------------------------- the command


def run_under_perun(folder: str) -> None:
    """What perun's process does: run the command of the run in this folder."""
    folder = Path(folder)
    intent = perun_adapter.intent_of(folder)
    children: list[subprocess.Popen] = []
    _pass_signals_on(children, [])
    stop_sampler = lambda: None  # noqa: E731
    if not (folder / f"samples-{os.uname().nodename}.jsonl").exists():
        print("energynn: perun's sampler did not start (see above); ours runs alone", file=sys.stderr, flush=True)
        stop_sampler = _start_sampler(folder, 1)
    _run(shlex.split(intent["config"]["command"]), folder, 0, children, None)
    stop_sampler()


def _run(command: list[str], folder: Path, rank: int, children: list, stdout) -> None:
    """Idle, command, idle, with their marks; whatever happens to the command, its end is written."""
    host = os.uname().nodename
    mark = Events(folder, rank).mark
    mark("rank_start", rank=rank, host=host, pid=os.getpid())
    mark("idle_start", when="before")
    time.sleep(IDLE_S)
    mark("idle_end", when="before")
    mark("training_start")
    try:
        hidden = (perun_adapter.RUN_DIR_VARIABLE, *perun_adapter.SET_BY_PERUN)
        environment = {name: value for name, value in os.environ.items() if name not in hidden}
        child = subprocess.Popen(
            command, env=environment, stdout=stdout, preexec_fn=_prepare_child, close_fds=False
        )  # MPI's launchers hand open files to their ranks
        children.append(child)
        status = child.wait()
    except OSError as error:
        print(f"energynn: {command[0]}: {error.strerror}", file=sys.stderr, flush=True)
        status = 126
    mark("training_end", exit_status=status)
    mark("idle_start", when="after")
    time.sleep(IDLE_S)
    mark("idle_end", when="after")
    mark("rank_end", status="finished" if status == 0 else "failed", exit_status=status)


def _pass_signals_on(children: list[subprocess.Popen], stopped: list[int]) -> None:
    """A Ctrl-C reaches the command from the terminal, and the command decides; other signals are passed on."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in PASSED_ON:
        signal.signal(number, lambda n, _: (stopped.append(n), [child.send_signal(n) for child in children]))


def _prepare_child() -> None:
    """The command is as it would be without us, but it does not outlive the measurement of it."""
    for number in (signal.SIGINT, *PASSED_ON):
        signal.signal(number, signal.SIG_DFL)
    die_with_parent(signal.SIGTERM)


def _wait(perun: subprocess.Popen, folder: Path) -> None:
    """Wait for perun; without a sampler it would wait for itself, so its end is made once the command has ended."""
    silence, said = Silence(), False
    while perun.poll() is None:
        if silence(folder) > SILENCE_S:
            if not said:
                print(f"energynn: no sample for {SILENCE_S:.0f} s, the sampler is dead; the command goes on without",
                      file=sys.stderr, flush=True)  # fmt: skip
                said = True
            if any(event["event"] == "rank_end" for event in read_events(folder)):
                perun.kill()
        time.sleep(0.05)


def _outcome(folder: Path, rank: int, stopped: list[int]) -> tuple[str, str, int]:
    """Status, reason and exit status of one rank's command."""
    events = [event for event in read_events(folder) if event["rank"] == rank]
    ends = [event for event in events if event["event"] == "training_end"]
    if not any(event["event"] == "training_start" for event in events):
        return "failed", "the sampler did not start, so the command was not", 2
    if not ends:
        return "killed", "the measurement was killed before the command ended", 128 + (stopped or [signal.SIGKILL])[0]
    status = ends[0]["exit_status"]
    if status < 0:
        kind = "interrupted" if stopped else "killed"
        return kind, f"the command was ended by {signal.Signals(-status).name}", 128 - status
    return ("finished", "", 0) if status == 0 else ("failed", f"the command ended with status {status}", status)


def _outcome_of_all(folder: Path, size: int) -> tuple[str, str]:
    """The first bad end among all ranks, after waiting for those that still have to write theirs."""
    ended: dict[int, dict] = {}

    def all_ended() -> bool:
        ended.update({e["rank"]: e for e in read_events(folder) if e["event"] == "rank_end"})
        return len(ended) == size

    try:
        _until(all_ended, "")
    except ValueError:
        missing = ", ".join(str(rank) for rank in range(size) if rank not in ended)
        return "killed", f"rank {missing} ended without a word"
    bad = [event for event in ended.values() if event["exit_status"] != 0]
    if not bad:
        return "finished", ""
    first = min(bad, key=lambda event: event["t_wall_ns"])
    return "failed", f"rank {first['rank']}: the command ended with status {first['exit_status']}"


def _until(condition, what: str) -> None:
    deadline = time.monotonic() + READY_S
    while not condition():
        if time.monotonic() > deadline:
            raise ValueError(f"waited {READY_S:.0f} s for {what}")
        time.sleep(0.02)


# ------------------------------------------------------------------------------------ a sampler without perun's process


def _start_sampler(folder: Path, size: int):
    """Start this host's sampler, or wait for it if another rank of the host has; returns what stops it."""
    host = os.uname().nodename
    lock = open(folder / f".sampler-{host}", "w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        path = folder / f"samples-{host}.jsonl"
        _until(lambda: path.exists() and '"v"' in path.read_text(), f"the first sample in {path}")
        return lock.close
    sampler = subprocess.Popen(
        [sys.executable, "-c", f"from energynn.measure import command; command.sample({str(folder)!r})"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, preexec_fn=die_with_parent,
        # A launcher may show each rank its own GPU only; this process samples for all ranks of the host.
        env={name: value for name, value in os.environ.items() if size == 1 or name != "CUDA_VISIBLE_DEVICES"},
    )  # fmt: skip
    if sampler.stdout.readline() != b"ready\n":
        raise ValueError("the sampler does not start; see its lines above, and `energynn doctor`")

    def stop() -> None:
        sampler.stdin.close()
        sampler.wait()
        lock.close()

    return stop


def sample(folder: str) -> None:
    """The sampler process: sample this host until the parent closes the pipe or dies."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sampler = perun_adapter.make_sampler(Path(folder))
    sampler.start()
    print("ready", flush=True)
    sys.stdin.read()
    sampler.stop()


# ----------------------------------------------------------------------------------------------------------- for people


def report(record: dict) -> str:
    """The energies of a record, one line per component, with provenance and uncertainty."""
    lines = [f"energynn: {record['config'].get('command', record['run_id'])}: {record['status']}"
             f"{', ' + record['status_reason'] if record['status_reason'] else ''}, "
             f"{record.get('training_time_s', 0.0):.2f} s, {record.get('samples_in_training', 0)} samples"]  # fmt: skip
    for component in ("gpu", "cpu", "ram", "total"):
        joules = record.get(f"energy_{component}_J")
        if joules is None:
            if component != "total":
                lines.append(f"  {component.upper():6}{'absent: no sensor':>12}")
            continue
        net_J = record.get(f"energy_net_{component}_J")
        value = {name: record[f"energy_{component}_{name}"] for name in ("statistical_J", "systematic_J", "provenance")}
        watts = record[f"mean_power_{component}_W"]
        lines.append(
            f"  {component.upper():6}{joules:12.2f} J  {value['provenance']:9} +- {value['statistical_J']:.2f} J "
            f"(statistical, 95 %) +- {value['systematic_J']:.2f} J (sensor), {watts:.1f} W"
            f"{f', without idle power {net_J:.2f} J' if net_J is not None else ''}"
        )
    if "energy_perun_total_J" in record:
        lines.append(f"  perun's method: {record['energy_perun_total_J']:.2f} J over {record['perun_time_s']:.2f} s")
    elif record["workload"] == "command":
        lines.append("  perun's method: no number (perun did not run, ended early, or found no sensor)")
    for segment, entry in enumerate(record["segments"] if len(record["segments"]) > 1 else [], start=1):
        joules, gap_s = entry["energy_total_J"], entry["gap_before_s"]
        lines.append(f"  segment {segment}: {entry['training_time_s']:.2f} s, "
                     f"{'no energy' if joules is None else f'{joules:.2f} J'}"
                     f"{'' if gap_s is None else f', {gap_s:.1f} s after the one before'}")  # fmt: skip
    lines += [f"  flag: {flag}" for flag in record["flags"]]
    return "\n".join(lines)
