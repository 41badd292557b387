"""Real runs: two ranks under mpirun and perun, and what happens when something is killed."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from functools import partial
from pathlib import Path

import psutil
import pytest

from energynn import records
from energynn.data import manifests
from energynn.experiment import config
from energynn.host import files, launchers
from energynn.host.files import REPOSITORY, write_json
from energynn.launch import local, start, supervise
from energynn.measure import kernel, machine, samples
from energynn.measure.samples import read_events
from tests import powercap
from tests.processes import (
    ENERGYNN,
    answer,
    can_be_executed,
    energynn,
    processes_of,
    refused,
    wait_until,
    wait_until_gone,
    write_program,
)
from tests.run_files import last_sample_ns, newest_start, text_of

TINY = dict(
    workload="fourcastnet", embed_dim=32, depth=1, epochs=30, sampling_period_s=0.02
)
# Paced: what they test happens while they last, and other tests get the cores meanwhile.
LONGER = TINY | dict(devices=2, epochs=40, step_period_s=0.04)
ENDLESS = TINY | dict(devices=2, epochs=10_000, step_period_s=0.04)
PIPES = dict(
    stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=REPOSITORY
)

# What a process of Python does for a run that is made, and has a folder.
IMPORTS = """
import os, pathlib, sys
from energynn.experiment import config
from energynn.host import launchers
from energynn.launch import start, supervise
"""
RUN = "start.make_run(made, runs_dir)"
SUPERVISE = """
run_dir = pathlib.Path(runs_dir) / 'local' / config.run_id(made)
run_dir.mkdir(parents=True)
start.begin_run(start.prepare_intent(made, run_dir), run_dir)
supervise.supervise_run(run_dir, os.getppid())
"""


def papermill(runs_dir, parameters, **options):
    notebook = REPOSITORY / "notebooks" / "run_training.ipynb"
    given = json.dumps({**parameters, "runs_dir": str(runs_dir)})
    words = [notebook, Path(runs_dir).parent / "out.ipynb", "--parameters_yaml", given]
    words = ["papermill", "--no-progress-bar", "--log-output", *map(str, words)]
    return subprocess.Popen([sys.executable, "-m", *words], **PIPES, **options)


def started_by(launcher, program=RUN):
    """The program with a launcher of the ranks."""
    return f"launchers.find_launcher = lambda devices: {launcher!r}\n{program}"


def python_words(runs_dir, parameters, program=RUN):
    begin = f"runs_dir = {str(runs_dir)!r}\nmade = config.make(**{parameters!r})\n"
    return [sys.executable, "-c", IMPORTS + begin + program]


def python(runs_dir, parameters, program=RUN, **options):
    words = python_words(runs_dir, parameters, program)
    return subprocess.Popen(words, **PIPES, **options)


def only_run(runs_dir):
    (run_dir,) = (path.parent for path in Path(runs_dir).glob("local/*/run.json"))
    return run_dir


def record_of(runs_dir):
    return records.read_record_if_any(only_run(runs_dir))


def begun(runs_dir, number=1, ranks=2):
    """Tell whether all ranks of the newest of so many segments train."""
    newest = newest_start(runs_dir, ranks)
    return newest and len(samples.segment_dirs(only_run(runs_dir))) == number


def process_of(runs_dir, module):
    """The process of a run that has a module of ours in its command line."""
    each = processes_of(runs_dir)
    return next(one for one in each if module in " ".join(one.cmdline()))


def rank_of(runs_dir, rank):
    events = read_events(samples.segment_dirs(only_run(runs_dir))[-1])
    starts = samples.events_of_kind(events, "rank_start")
    return next(psutil.Process(each["pid"]) for each in starts if each["rank"] == rank)


def victim(runs_dir, who, started):
    if who == "caller":
        return psutil.Process(started.pid)
    if who == "rank 1":
        return rank_of(runs_dir, 1)
    supervisor = process_of(runs_dir, "energynn.launch.supervise")
    return supervisor if who == "supervisor" else supervisor.children()[0]


@pytest.mark.slow
def test_papermill_makes_a_valid_run_with_energies_of_phases_and_ranks(tmp_path):
    runs_dir, watts = tmp_path / "runs", 200.0
    environment = os.environ | {"ENERGYNN_POWERCAP": str(tmp_path / "powercap")}
    lines, live = [], []
    # it wraps in 5 s
    with powercap.constant_power(tmp_path / "powercap", watts, range_uJ=10**9):
        # beside other tests a second of idling can have too few readings
        parameters = LONGER | dict(idle_baseline_s=4)
        started = papermill(runs_dir, parameters, env=environment)
        for line in started.stdout:
            lines.append(line)
            if not list(runs_dir.glob("local/*/record.json")):
                live.append(line)
    assert started.wait() == 0, "".join(lines)
    assert "s left" in "".join(live), "progress is to be seen while it trains"
    made = only_run(runs_dir)
    record = records.read_record_if_any(made)
    assert record.valid, record.invalid_reasons
    assert record.devices == 2 and record.samples_in_training >= 60
    assert 0 < record.cpu_time_s < 3 * record.training_time_s
    assert record.cpu_time_others_s >= 0
    assert list(made.glob("perun/*.hdf5")) and records.check(made) == []
    parts = record.energy_phases
    names = {"data_loading", "forward", "backward", "optimizer", "evaluation", "idle"}
    assert {part["phase"] for part in parts} >= names
    assert {part["rank"] for part in parts} == {0, 1, None}
    total_J = sum(part["energy_cpu_J"] for part in parts)
    assert total_J == pytest.approx(record.energy_cpu_J, rel=1e-3)
    training_J = watts * record.training_time_s
    assert record.energy_cpu_J == pytest.approx(training_J, rel=0.01)
    assert record.energy_cpu_provenance == "simulated"
    of_perun_J = record.energy_perun_cpu_J
    assert of_perun_J == pytest.approx(watts * record.perun_time_s, rel=0.1)
    assert record.energy_perun_total_J == of_perun_J
    assert 0 < record.idle_power_cpu_before_W
    lines = (made / "log.txt").read_text().splitlines()
    assert all(line.startswith(("[0] ", "[1] ")) for line in lines), (
        "labelled by mpirun, whole"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "who, number, status, words",
    [
        (
            "caller",
            signal.SIGKILL,
            "interrupted",
            "the process that started the run ended",
        ),
        ("caller", signal.SIGINT, "interrupted", "stopped by SIGINT"),
        ("mpirun", signal.SIGKILL, "killed", "begins anew, without a checkpoint"),
        ("supervisor", signal.SIGKILL, "killed", "the launcher died"),
        ("supervisor", signal.SIGHUP, "interrupted", "SIGHUP"),
    ],
)
def test_whoever_is_killed_nothing_is_left_and_a_record_says_it(
    tmp_path, who, number, status, words
):
    runs_dir = tmp_path / "runs"
    started = python(runs_dir, ENDLESS)
    wait_until(lambda: begun(runs_dir), what="for the training to begin")
    time.sleep(1.5)
    for process in processes_of(runs_dir):  # MPI's shared memory has no name any more
        maps = Path(f"/proc/{process.pid}/maps").read_text()
        assert not re.search(r"/dev/shm/mpich_shm_\w+$", maps, re.MULTILINE)
    killed_at = time.monotonic_ns()
    victim(runs_dir, who, started).send_signal(number)
    wait_until_gone(runs_dir, 20)
    started.communicate(timeout=20)
    assert started.returncode != 0
    records.recover(runs_dir)
    record = record_of(runs_dir)
    assert record.status == status and words in record.status_reason
    assert not record.valid and records.check(runs_dir) == []
    last_ns = last_sample_ns(only_run(runs_dir))
    assert last_ns > killed_at - 0.3e9, "samples were lost"
    assert record.energy_cpu_J > 0


def role(process, started, ranks):
    """Name what a process of a run is, by what it is seen to do."""
    words = " ".join(process.cmdline())
    if process.pid == started.pid:
        return "caller"
    if "energynn.launch.supervise" in words:
        return "supervisor"
    if process.pid in ranks:
        return "rank"
    if any("samples-" in file.path for file in process.open_files()):
        return "sampler"
    if process.ppid() in ranks:
        return "loader worker"
    parent = role(process.parent(), started, ranks)
    return {"supervisor": "launcher", "launcher": "proxy"}[parent]


@pytest.mark.slow
@pytest.mark.parametrize("loader_workers", [0, 2])
def test_a_run_has_the_processes_that_the_page_names(tmp_path, loader_workers):
    page = text_of("docs/architecture.md")
    table = page.partition("A run has these processes")[2].partition("\n\n|")[2]
    lines = table.partition("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip() for cell in line.split("|")] for line in lines]
    numbers = {
        "1": 1,
        "1 a host": 1,
        "1 a device": 2,
        "`loader_workers` a device": 2 * loader_workers,
    }
    named = Counter({name: numbers[number] for _, name, number, *_ in cells})
    options = dict(loader_workers=loader_workers, persistent_workers=loader_workers > 0)
    started = python(tmp_path, ENDLESS | options)
    wait_until(lambda: begun(tmp_path), what="for the training to begin")
    # loader workers come with the first batch
    of_rank_0 = only_run(tmp_path) / "events-rank0.jsonl"
    wait_until(lambda: '"epoch"' in of_rank_0.read_text(), what="for an epoch's end")
    ranks = [rank_of(tmp_path, rank).pid for rank in (0, 1)]
    below = psutil.Process(started.pid).children(recursive=True)
    found = [role(one, started, ranks) for one in [psutil.Process(started.pid), *below]]
    process_of(tmp_path, "energynn.launch.supervise").terminate()
    started.communicate(timeout=60)
    assert Counter(found) == +named
    assert loader_workers or "seven with two ranks" in page and len(found) == 7


@pytest.mark.slow
def test_a_ctrl_c_while_perun_waits_for_its_sampler_ends_the_run(tmp_path):
    """Python used to join perun's sampler, which heard no signal, for ever."""
    started = python(tmp_path / "runs", ENDLESS)

    def has_forked():
        ranks = [one for one in processes_of(tmp_path) if "monitor" in one.cmdline()]
        return [one for one in ranks if one.parent().cmdline() == one.cmdline()]

    wait_until(has_forked, what="for perun to fork its sampler")
    has_forked()[0].parent().send_signal(signal.SIGINT)
    output = started.communicate(timeout=60)[0]
    assert started.returncode == 1, output
    wait_until_gone(tmp_path)
    assert record_of(tmp_path / "runs").status in ("failed", "killed")


HANGS = {
    "before its first event": ("import time; time.sleep(600)", "interrupted"),
    "after its last event": (
        "import sys, time; from energynn.measure.samples import Events; "
        "Events(sys.argv[1], 0).mark('rank_end', status='finished'); time.sleep(600)",
        "finished",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("program, status", HANGS.values(), ids=HANGS)
def test_a_rank_that_hangs_is_ended(tmp_path, program, status):
    changes = "supervise.POLL_PERIOD_S, supervise.MAX_SILENCE_S = 0.2, 5.0\n"
    changes += f"words = [sys.executable, '-c', {program!r}]\n"
    changes += (
        "supervise.ranks_command = lambda folder, intent: [*words, str(folder)]\n"
    )
    started = python(tmp_path, TINY, changes + SUPERVISE)
    output = started.communicate(timeout=60)[0]
    assert not processes_of(tmp_path), output
    assert record_of(tmp_path).status == status, output


@pytest.mark.slow
def test_a_sampler_that_died_is_a_gap_and_the_run_is_not_valid(tmp_path):
    given = LONGER | {"devices": 1, "epochs": 15}
    started = python(tmp_path, given, started_by("alone"))
    wait_until(lambda: begun(tmp_path, ranks=1))
    time.sleep(1)
    process_of(tmp_path, "energynn.measure.sampler_process").kill()
    output = started.communicate(timeout=120)[0]
    record = record_of(tmp_path)
    assert record.status == "finished" and not record.valid, output
    assert record.coverage < 0.9 and not processes_of(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "how, launcher, words",
    [
        ("exit", "mpirun", "rank 0: 0"),
        (
            "memory",
            "torchrun",
            "choose a smaller local_batch_size: CUDA out of memory.",
        ),
    ],
)
def test_one_rank_that_ends_on_its_own_ends_the_run_and_keeps_the_samples(
    tmp_path, how, launcher, words
):
    """sys.exit(0) would make perun hang for a minute and lose its data."""
    script = REPOSITORY / "tests" / "broken_rank.py"
    program = f"supervise.TRAIN_SCRIPT = {str(script)!r}\n{SUPERVISE}"
    program = started_by(launcher, program)
    environment = os.environ | {"HOW_IT_ENDS": how}
    started = python(tmp_path, ENDLESS, program, env=environment)
    output = started.communicate(timeout=300)[0]
    ended_at = time.monotonic_ns()
    assert not processes_of(tmp_path), output
    record = record_of(tmp_path)
    assert record.status == "failed" and words in record.status_reason
    assert record.energy_cpu_J > 0 and record.history[-1]["epoch"] == 4
    assert last_sample_ns(only_run(tmp_path)) > ended_at - 6e9
    assert records.check(tmp_path) == []


@pytest.mark.slow
def test_a_stopped_run_goes_on_in_further_segments(tmp_path):
    """Stopped or killed, then started again by the same command: energies of all starts add up."""
    runs_dir = tmp_path / "runs"
    parameters = LONGER | dict(checkpoint_period_s=0.5)
    words = [f"{name}={value}" for name, value in parameters.items()]
    command = [*ENERGYNN, "run", "--runs-dir", str(runs_dir), *words]
    stops = [("supervisor", signal.SIGTERM, 75), ("rank 1", signal.SIGKILL, 1)]
    stops.append(("caller", signal.SIGTERM, 75))
    energies_J = [0.0]
    for number, (who, how, status) in enumerate([*stops, (None, None, 0)], start=1):
        started = subprocess.Popen(command, **PIPES)
        if who:
            wait_until(lambda number=number: begun(runs_dir, number))
            time.sleep(1)
            victim(runs_dir, who, started).send_signal(how)
        output = started.communicate(timeout=300)[0]
        record = record_of(runs_dir)
        assert started.returncode == status, output
        assert ("it can go on" in record.status_reason) == (status == 75)
        assert ("goes on after " in output) == (number > 1)
        assert len(record.segments) == number
        assert record.energy_cpu_J > energies_J[-1]
        energies_J.append(record.energy_cpu_J)
        kept = list(only_run(runs_dir).glob("checkpoint/*.sha256"))
        assert bool(kept) == bool(who), "no checkpoint is lost, and none is left"
        assert list(only_run(runs_dir).glob("perun/*.hdf5")), "perun's data are kept"
    assert record.valid and records.check(runs_dir) == [], record.invalid_reasons
    starts_ns = [part.start_wall_ns for part in record.segments]
    assert starts_ns == sorted(starts_ns)
    assert [entry["epoch"] for entry in record.history] == list(range(1, 41))
    assert not (only_run(runs_dir) / "checkpoint").exists()


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["mpirun", "torchrun"])
def test_a_run_that_failed_by_a_timeout_goes_on_with_a_longer_one(tmp_path, launcher):
    """The other rank waits for one that is stopped, until the timeout of a collective."""
    runs_dir = tmp_path / "runs"
    program = started_by(launcher)
    given = LONGER | dict(checkpoint_period_s=0.3, collective_timeout_s=3)
    started = python(runs_dir, given, program)
    wait_until(lambda: list(runs_dir.glob("local/*/checkpoint/*.sha256")))
    rank_of(runs_dir, 1).send_signal(signal.SIGSTOP)
    output = started.communicate(timeout=300)[0]
    failed = record_of(runs_dir)
    assert failed.status == "failed" and "lost" in failed.status_reason, output
    assert "GLHF" not in failed.status_reason  # gloo's words
    assert "goes on from its checkpoint" in failed.status_reason
    assert failed.config["collective_timeout_s"] == 3
    started = python(runs_dir, given | dict(collective_timeout_s=60), program)
    output = started.communicate(timeout=300)[0]
    record = record_of(runs_dir)
    assert record.valid and "goes on after " in output, output
    assert record.run_id == failed.run_id and len(record.segments) == 2
    assert record.config["collective_timeout_s"] == 60
    events = read_events(samples.segment_dirs(only_run(runs_dir))[-1])
    starts = samples.events_of_kind(events, "training_start")
    assert all(start["samples_done"] > 0 for start in starts)
    assert records.check(runs_dir) == []


def test_several_devices_of_a_batch_job_need_perun(monkeypatch):
    there = {"torch": "somewhere"}
    monkeypatch.setattr(launchers.importlib.util, "find_spec", there.get)
    assert launchers.find_launcher(2) == "torchrun"
    monkeypatch.setenv(launchers.SRUN_VARIABLE, "")
    refused("no perun found", launchers.find_launcher, 2)
    there.clear()
    refused("no torch found", launchers.find_launcher, 1)


TWO_POINTS = """
from energynn.experiment import config

def study(system):
    shared = dict(device="cpu", idle_ready_s=0.5, system=system, epochs=1)
    images = dict(image_size=32, image_loading="device", dataset="photographs_large")
    images |= dict(local_batch_size=9, training_samples=144, validation_samples=9)
    states = dict(dataset="era5_ensemble", patch_size=6, embed_dim=32, depth=1, num_blocks=4)
    yield config.make("resnet50", preset="paper", **shared | images)
    states |= dict(epochs=60, states_on_device=True, devices=2)
    yield config.make("fourcastnet", **shared | states)
"""


@pytest.mark.nightly
def test_a_study_is_made_where_little_but_torch_is_installed(tmp_path):
    """As on a GPU server that is lent for minutes: no perun, no MPI, nothing of the analysis."""
    for dataset in ("photographs", "photographs_large"):
        manifests.verify(dataset)
    missing = ["perun", "mpi4py", "papermill", "ipykernel", "altair", "pandas"]
    missing += ["statsmodels", "skimage", "sklearn", "h5py", "xarray"]
    (tmp_path / "sitecustomize.py").write_text(
        "from importlib.machinery import PathFinder as Finder\nfind = Finder.find_spec\n"
        f"missing = lambda name: name.partition('.')[0] in {missing!r}\n"
        "Finder.find_spec = lambda name, *more, **named: "
        "None if missing(name) else find(name, *more, **named)\n"
    )
    path = os.pathsep.join([str(tmp_path), str(REPOSITORY)])
    (tmp_path / "two.py").write_text(TWO_POINTS)
    words = f"study run {tmp_path}/two.py --runs-dir {tmp_path}/runs"
    done = energynn(words, env=os.environ | {"PYTHONPATH": path})
    said = done.stdout[-3000:] + done.stderr[-3000:]
    made = {record.launcher: record for record in records.read_all(tmp_path / "runs")}
    assert done.returncode == 0 and made.keys() == {"alone", "torchrun"}, said
    assert all(record.valid for record in made.values()), said
    assert records.check(tmp_path / "runs") == []
    several = made["torchrun"]
    assert {part["rank"] for part in several.energy_phases} == {0, 1, None}
    assert several.idle_power_cpu_after_W > 0 and len(several.sensors) == 1


@pytest.mark.slow
def test_a_disk_that_fills_up_ends_the_run_in_a_clear_line(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = f"mount -t tmpfs -o size=24m none {disk}".split()
    if not can_be_executed(*mount):
        pytest.skip("needs the right to mount a small tmpfs")
    try:
        started = python(disk / "runs", ENDLESS)
        wait_until(lambda: begun(disk / "runs"))
        with open(disk / "filler", "wb", buffering=0) as filler, pytest.raises(OSError):
            while True:
                filler.write(b"\0" * 4096)
        output = started.communicate(timeout=300)[0]
        assert started.returncode != 0 and "No space left on device" in output
        assert not processes_of(disk / "runs")
        (disk / "filler").unlink()
        records.recover(disk / "runs")
        record = record_of(disk / "runs")
        assert record.status in ("failed", "killed") and record.energy_cpu_J > 0
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


# ------------------------------------------------------------------------- before anything starts


def test_a_rank_without_a_word_is_named_and_not_who_misses_it(tmp_path):
    def ends(rank, reason):
        events = samples.Events(tmp_path, rank)
        events.mark("rank_start", rank=rank, host=f"n{rank}")
        events.mark("rank_end", rank=rank, status="failed", reason=reason)

    ends(0, f"{launchers.LOST_RANK_TEXT} (closed by peer)")
    ends(2, "stopped by SIGTERM")
    samples.Events(tmp_path, 1).mark("rank_start", rank=1, host="n1")
    status, reason = supervise.status_and_reason(tmp_path, 3, "", ", srun with 137")
    assert status == "failed"
    words = "rank 1 on n1 ended without a word, srun with 137; rank 0: "
    assert reason.startswith(words)
    more = tmp_path / "mpirun"
    more.mkdir()
    for rank in (0, 1):
        samples.Events(more, rank).mark(
            "rank_start", rank=rank, host="n1", pid=10 + rank
        )
    (more / "log.txt").write_text("=   PID 11 RUNNING AT n1\n")
    assert "rank 1 on n1 ended" in supervise.status_and_reason(more, 2, "", "")[1]
    samples.Events(more, 0).mark("training_end", rank=0)
    for rank, reason in ((1, "later"), (0, "first, with the sampler")):
        end = {"rank": rank, "status": "failed", "reason": reason}
        samples.Events(more, rank).mark("rank_end", **end)
    assert supervise.status_and_reason(more, 2, "", "")[1].startswith("rank 0: first")
    ends(1, "loss is nan")
    failed = "failed", "rank 1: loss is nan"
    assert supervise.status_and_reason(tmp_path, 3, "", "") == failed


def prepared(run_dir, **parameters):
    return start.prepare_intent(config.make("fourcastnet", **parameters), run_dir)


def test_one_measured_run_at_a_time_on_a_host_whoever_makes_it(
    tmp_path, monkeypatch, signals
):
    mine = tmp_path / "mine" / "local" / "run"
    run = tmp_path / "run"
    words = f"measure --out {run} -- true"
    taken = "another measured run has this machine"
    with supervise.lock_host():
        refused(taken, prepared, mine)
        assert taken in answer(words, status=2) and not run.exists()
    assert not start.list_warnings(prepared(mine))
    described, locks = machine.describe_machine(), []

    def begin_another():
        locks.append(supervise.lock_host())
        return described

    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(machine, "describe_machine", begin_another)
        assert taken in answer(words, status=2) and not run.exists()
    locks[0].close()
    run.mkdir()
    with files.lock(run / records.START_LOCK):
        assert "is running" in answer(words, status=2)


def test_a_study_waits_for_the_measured_run_of_somebody_else(tmp_path, monkeypatch):
    ends = [(0, ""), (2, "ValueError: another measured run has this machine; pgrep")]
    monkeypatch.setattr(local, "execute", lambda *_: ends.pop())
    monkeypatch.setattr(start, "prepare_intent", lambda *_: {})
    runs = [config.make("fourcastnet")]
    others = supervise.lock_host()
    with monkeypatch.context() as patient:
        patient.setattr(local, "PATIENCE_WITH_OTHERS_S", 0.5)
        refused("another measured run", local.make_missing_runs, runs, tmp_path)
    timer = threading.Timer(1.0, others.close)
    timer.start()
    assert local.make_missing_runs(runs, tmp_path) == [] and not ends
    timer.join()


@pytest.mark.parametrize("name", ["", "a-machine" * 50, "with/slash and ä"])
def test_a_host_is_one_across_network_namespaces(tmp_path, monkeypatch, name):
    monkeypatch.setenv(supervise.HOST_LOCK_VARIABLE, name and f"{name}{tmp_path}")
    (tmp_path / "boot_id").write_text(f"{tmp_path}\n")
    monkeypatch.setattr(kernel, "BOOT_ID_FILE", tmp_path / "boot_id")
    locks = tmp_path / "locks"
    locks.mkdir()
    monkeypatch.setattr(supervise, "LOCK_FOLDER", locks)
    with supervise.lock_host():
        (path,) = locks.iterdir()
        assert path.stat().st_mode & 0o777 == 0o444  # of every user
        # the name of another network namespace is free
        monkeypatch.setattr(supervise.socket.socket, "bind", lambda *_: None)
        refused("another measured run has this machine", supervise.lock_host)
    supervise.lock_host().close()
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    supervise.lock_host().close()
    assert not (tmp_path / "elsewhere").exists()


def test_what_cannot_work_is_said_before_anything_starts(tmp_path):
    (tmp_path / "file").write_text("")
    run_dir = tmp_path / "local" / "run"
    with pytest.raises(OSError, match="Not a directory"):
        prepared(tmp_path / "file" / "runs" / "local" / "run")
    refused("runs_dir: is empty", start.make_run, config.make(), "")
    intent = prepared(run_dir) | {"started_at": "earlier"}
    run_dir.mkdir()
    start.begin_run(intent, run_dir)
    assert intent["data_root"] == "data_manifests/era5_ensemble"
    (run_dir / "checkpoint").mkdir()
    # without its checksum: killed while it was written
    (run_dir / "checkpoint" / "5.pt").touch()
    start.begin_run(intent, run_dir)
    assert not list(run_dir.glob("segment-*"))
    assert list(tmp_path.glob("local/superseded/run.*/checkpoint/5.pt"))
    many = prepared(run_dir, devices=64)
    assert "64 devices" in start.list_warnings(many)[0]
    checksum = run_dir / "checkpoint/5.sha256"
    checksum.parent.mkdir()
    checksum.touch()
    start.begin_run(many, run_dir)  # goes on, where its job and GPUs may be others
    assert records.read_intent(run_dir) == many | {"started_at": intent["started_at"]}
    start.begin_run(many | {"git_commit": "another"}, run_dir)
    kept = records.read_intent(run_dir)
    assert kept["git_commit"] == intent["git_commit"] and kept["git_dirty"]
    other = many | {"device_name": "another"}
    refused(
        "began on .*, here is another; go on there", start.begin_run, other, run_dir
    )


def test_weights_to_begin_with_are_there_and_were_not_trained_on_the_test(tmp_path):
    tuned = dict(dataset="era5", stage="finetune", initial_run="first")
    run = partial(config.make, "fourcastnet", **tuned)
    start.require_initial_run(config.make("fourcastnet"), tmp_path)
    refused("has no weights.pt", start.require_initial_run, run(), tmp_path)
    (tmp_path / "first" / "job").mkdir(parents=True)
    (tmp_path / "first" / "weights.pt").touch()
    trained = {"dataset": "era5", "training_years": "1979-2015"}
    write_json(tmp_path / "first" / "job" / "parameters.json", trained)
    start.require_initial_run(run(), tmp_path)
    tested = run(training_years="1980", test_years="2015")
    refused("was trained on 1979-2015", start.require_initial_run, tested, tmp_path)


def test_a_run_sees_and_counts_only_the_gpus_that_it_uses(tmp_path, monkeypatch):
    gpu, seen = {"name": "a GPU", "driver": "1", "limit_W": 400.0}, [0, 1, 2, 3]
    monkeypatch.setattr(
        start.machine, "list_gpus", lambda: [gpu | {"index": number} for number in seen]
    )
    run_dir = tmp_path / "local" / "run"
    run_dir.mkdir(parents=True)

    def variables(**parameters):
        intent = prepared(run_dir, **parameters)
        supervise.ranks_command(run_dir, intent)
        environment = supervise.rank_environment(intent)
        return environment["CUDA_VISIBLE_DEVICES"], (run_dir / "perun.ini").read_text()

    visible, perun = variables(devices=2)
    assert visible == "0,1" and "CUDA:(?!(0|1)_)" in perun
    assert "exclude_backends = \n" in perun
    assert variables(devices=4)[0] == "0,1,2,3"
    visible, perun = variables(devices=2, device="cpu")
    assert visible == "" and "exclude_backends = nvml amdsmi" in perun
    seen[:] = [2, 3, 0, 1]  # as CUDA_VISIBLE_DEVICES puts them
    assert variables(devices=2)[0] == "2,3"
    refused("this machine or job has 4; ask for fewer", variables, devices=5)


def test_a_run_started_twice_in_an_instant_goes_on_once(tmp_path, monkeypatch):
    """The second one finds it locked before it has moved or written anything, and waits a while."""
    made = config.make("fourcastnet")
    run_dir = tmp_path / "local" / config.run_id(made)
    run_dir.mkdir(parents=True)
    (run_dir / "run.json").write_text("of the first")
    monkeypatch.setattr(start, "START_WAIT_S", 0.1)
    held = files.lock(run_dir / records.START_LOCK)
    refused("is running", start.make_run, made, tmp_path)
    assert (run_dir / "run.json").read_text() == "of the first"
    monkeypatch.setattr(start, "START_WAIT_S", 60)
    monkeypatch.setattr(records, "has_valid_record", lambda _: held.closed)
    threading.Timer(0.5, held.close).start()
    assert start.make_run(made, tmp_path) == run_dir


def test_an_attempt_whose_launcher_was_killed_has_a_record_before_it_is_moved_aside(
    run_dir,
):
    start.begin_run({}, run_dir)
    (moved,) = run_dir.parent.glob(f"superseded/{run_dir.name}.*")
    record = records.read_record_if_any(moved)
    assert record.status == "killed" and record.energy_cpu_J > 0
    assert records.check(moved.parent) == []


def test_a_machine_without_mpi_is_told_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(launchers.sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    refused("no MPI found: mpirun is not on PATH", launchers.find_mpirun)
    write_program(tmp_path / "mpirun", "echo HYDRA")
    write_program(tmp_path / "python", "echo cannot load MPI library >&2; exit 1")
    refused("no MPI library found by mpi4py .*cannot load MPI", launchers.find_mpirun)
