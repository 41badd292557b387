"""Real runs: two ranks under mpirun and perun, started by papermill, and what happens when something is killed."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest

from energynn import cli, config, files, launchers, records
from energynn.cluster import local
from energynn.data import manifests
from energynn.files import REPOSITORY
from energynn.launch import start, supervise
from energynn.measure import perun_adapter, samples
from energynn.measure.samples import read_events, read_samples
from energynn.measure.sensors import Sensor
from energynn.processes import lives
from tests import powercap
from tests.processes import processes_of, wait_until

TINY = dict(workload="fourcastnet", embed_dim=32, depth=1, epochs=30, sampling_period_s=0.02)
# Paced: what they test happens while they last, and other tests get the cores meanwhile.
LONGER = TINY | dict(devices=2, epochs=40, step_period_s=0.04)
ENDLESS = TINY | dict(devices=2, epochs=10_000, step_period_s=0.04)


def papermill(runs_dir, parameters):
    command = [
        sys.executable,
        "-m",
        "papermill",
        "--no-progress-bar",
        "--log-level",
        "WARNING",
        "--cwd",
        str(REPOSITORY),
        str(REPOSITORY / "notebooks" / "run_training.ipynb"),
        str(Path(runs_dir).parent / "out.ipynb"),
        "--parameters_yaml",
        json.dumps({**parameters, "runs_dir": str(runs_dir)}),
    ]
    # ipykernel captures no file descriptors if it sees pytest's variable; a person's kernel does.
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)


def python_run(runs_dir, parameters, **options):
    program = "from energynn import config\nfrom energynn.launch import start\n"
    program += f"start.run(config.make(**{parameters!r}), {str(runs_dir)!r})"
    return subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=REPOSITORY,
        **options,
    )


def only_run(runs_dir):
    (run_dir,) = (path.parent for path in Path(runs_dir).glob("local/*/run.json"))
    return run_dir


def training_has_begun(runs_dir):
    texts = [path.read_text() for path in Path(runs_dir).glob("local/*/events-rank*.jsonl")]
    return len(texts) == 2 and all("training_start" in text for text in texts)


def victim(runs_dir, who, started):
    """The process to kill: the papermill, kernel, supervisor, mpirun, a rank, or perun's sampler."""
    if who == "papermill":
        return psutil.Process(started.pid)
    everything = processes_of(runs_dir)
    supervisor = next(p for p in everything if "energynn.launch.supervise" in p.cmdline())
    mpirun = next(p for p in supervisor.children() if "mpirun" in p.name() or "mpiexec" in " ".join(p.cmdline()))
    by_event = {
        event["rank"]: psutil.Process(event["pid"])
        for event in read_events(only_run(runs_dir))
        if event["event"] == "rank_start"
    }
    header = (next(only_run(runs_dir).glob("samples-*.jsonl"))).read_text().splitlines()[0]
    return {
        "kernel": supervisor.parent,
        "supervisor": lambda: supervisor,
        "mpirun": lambda: mpirun,
        "rank 0": lambda: by_event[0],
        "rank 1": lambda: by_event[1],
        "sampler": lambda: psutil.Process(json.loads(header)["pid"]),
    }[who]()


PARENT_ENDED = "the process that started the run ended"


@pytest.mark.slow
@pytest.mark.parametrize(
    "who, number, status, words",
    [
        ("papermill", signal.SIGKILL, "interrupted", PARENT_ENDED),
        ("mpirun", signal.SIGKILL, "killed", "mpirun with status -9"),
        ("rank 1", signal.SIGKILL, ("killed", "failed"), "rank"),
        ("supervisor", signal.SIGKILL, "killed", "the launcher died"),
        ("supervisor", signal.SIGTERM, "interrupted", "SIGTERM"),
        ("supervisor", signal.SIGHUP, "interrupted", "SIGHUP"),
        pytest.param("papermill", signal.SIGTERM, "interrupted", PARENT_ENDED, marks=pytest.mark.nightly),
        pytest.param("kernel", signal.SIGKILL, "interrupted", PARENT_ENDED, marks=pytest.mark.nightly),
        pytest.param("rank 0", signal.SIGKILL, ("killed", "failed"), "rank", marks=pytest.mark.nightly),
    ],
)
def test_whoever_is_killed_nothing_is_left_and_a_record_says_what_happened(tmp_path, who, number, status, words):
    runs_dir = tmp_path / "runs"
    start = papermill if who in ("papermill", "kernel") else python_run
    started = start(runs_dir, ENDLESS)
    wait_until(lambda: training_has_begun(runs_dir), what="for the training to begin")
    time.sleep(1.5)
    killed_at = time.time_ns()
    victim(runs_dir, who, started).send_signal(number)
    wait_until(lambda: not processes_of(runs_dir), timeout_s=5, what=f"for {processes_of(runs_dir)} to end")
    started.communicate(timeout=20)
    assert started.returncode != 0
    run_dir = only_run(runs_dir)
    records.recover(runs_dir)
    record = records.read(run_dir)
    assert record["status"] in status and words in record["status_reason"]
    assert not record["valid"] and records.check(runs_dir) == []
    samples = read_samples(next(run_dir.glob("samples-*.jsonl")))
    assert samples.wall_ns[-1] > killed_at - 0.3e9, "samples were lost"
    assert record["energy_cpu_J"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "number, silent", [(signal.SIGKILL, "the sampler is dead"), (signal.SIGSTOP, "no sample for 12 s")]
)
def test_a_dead_or_silent_sampler_ends_the_run_with_a_checkpoint_and_a_reason(tmp_path, number, silent, monkeypatch):
    monkeypatch.setenv("ENERGYNN_SILENCE_LIMIT_S", "12")
    runs_dir = tmp_path / "runs"
    started = python_run(runs_dir, ENDLESS | {"checkpoint_period_s": 3600})
    wait_until(lambda: training_has_begun(runs_dir))
    time.sleep(1.5)
    sampler = victim(runs_dir, "sampler", started)
    sampler.send_signal(number)
    if number == signal.SIGSTOP:  # a silence that begins is a reason for a checkpoint, not for an end
        wait_until(lambda: list(only_run(runs_dir).glob("checkpoint/*.sha256")), 30, "for a checkpoint")
        assert started.poll() is None and not (only_run(runs_dir) / "record.json").exists()
    output = started.communicate(timeout=90)[0]
    record = records.read(only_run(runs_dir))
    assert record["status"] == "interrupted" and silent in record["status_reason"], output
    assert "checkpoint after" in record["status_reason"] and list(only_run(runs_dir).glob("checkpoint/*.sha256"))
    assert not processes_of(runs_dir)


@pytest.mark.slow
@pytest.mark.parametrize(
    "how, launcher, words",
    [
        ("exit", "mpirun", "rank 0: 0"),
        ("raise", "mpirun", "rank 0: a fault of its own"),
        (
            "memory",
            "torchrun",
            "is too much here, choose a smaller one: CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0",
        ),
    ],
)
def test_one_rank_that_ends_on_its_own_ends_the_run_and_keeps_the_samples(tmp_path, how, launcher, words):
    """sys.exit(0) makes perun hang for a minute and lose its data; an exception leaves the other ranks waiting."""
    runs_dir = tmp_path / "runs"
    program = textwrap.dedent(f"""
        import os, pathlib
        from energynn import config, launchers
        from energynn.launch import start, supervise
        if {launcher!r} == "torchrun":
            start.find_launcher = lambda devices: launchers.Launcher("torchrun")
        supervise.TRAIN_SCRIPT = pathlib.Path({str(REPOSITORY / "tests" / "broken_rank.py")!r})
        made = config.make(**{ENDLESS!r})
        run_dir = pathlib.Path({str(runs_dir)!r}) / "local" / config.run_id(made)
        intent = start.intend(made, run_dir)
        start.preflight(intent)
        start.begin(intent)
        launcher = intent.launcher
        raise SystemExit(supervise.supervise(run_dir, os.getppid(), launcher.mpirun, launcher.flavour))
    """)
    started = subprocess.Popen(
        [sys.executable, "-c", program],
        env=os.environ | {"HOW_IT_ENDS": how},
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    output = started.communicate(timeout=300)[0]
    ended_at = time.time_ns()
    assert started.returncode == 1 and not processes_of(runs_dir), output
    record = records.read(only_run(runs_dir))
    assert record["status"] == "failed" and words in record["status_reason"], record["status_reason"]
    assert record["energy_cpu_J"] > 0 and record["history"][-1]["epoch"] == 40 and records.check(runs_dir) == []
    samples = read_samples(next(only_run(runs_dir).glob("samples-*.jsonl")))
    assert samples.wall_ns[-1] > ended_at - 6e9
    lines = (only_run(runs_dir) / "log.txt").read_text().splitlines()
    # What MPI and torchrun say themselves comes after; on a busy machine MPI may come to say nothing.
    of_launcher = [number for number, line in enumerate(lines) if re.match(r"Abort\(1\)|[EW]\d{4} |===", line)]
    assert [line for line in lines[: (of_launcher + [len(lines)])[0]] if not line.startswith(("0: ", "1: "))] == []
    of_steps = [line for line in lines if " in step " in line]
    assert all(re.fullmatch(r"(\d): rank \1 in step \d+ of epoch \d+", line) for line in of_steps)
    assert {line[0] for line in of_steps} == {"0", "1"} and "\n0: energynn: rank 0: " in "\n".join(lines)


@pytest.mark.parametrize("status, reasons", [("failed", []), ("finished", ["the sampler is dead"])])
def test_a_sampler_that_ends_with_a_failed_rank_is_no_reason(tmp_path, monkeypatch, status, reasons):
    """torchrun takes some seconds to end the other ranks; a run that lost its sampler would be made again."""
    monkeypatch.setattr(supervise, "Silence", lambda folder: lambda: "the sampler is dead")
    monkeypatch.setattr(supervise, "END_TOGETHER_S", 0.05)
    monkeypatch.setattr(supervise, "rank_environment", lambda *_: dict(os.environ))
    monkeypatch.setattr(supervise.processes, "end_below", lambda asked: [os.kill(rank, 9) for rank in asked])
    samples.Events(tmp_path, 0).mark("rank_end", rank=0, status=status, reason="out of memory")
    stop_reasons = []
    with open(tmp_path / "run.json", "w") as held:
        ended = supervise._run_ranks(tmp_path, ["sleep", "1.5"], {}, os.getppid(), stop_reasons, [], held)
    assert stop_reasons == reasons and ended == (-signal.SIGKILL if reasons else 0)


@pytest.mark.slow
def test_a_stopped_run_goes_on_in_further_segments(tmp_path):
    """Stopped or killed, then started again by the same command: nothing is lost, and energies of all starts add up."""
    runs_dir = tmp_path / "runs"
    parameters = TINY | dict(devices=2, epochs=100, checkpoint_period_s=0.5)
    words = [word for name, value in parameters.items() for word in ("-p", name, str(value))]
    command = [sys.executable, "-m", "energynn.cli", "run", "--runs-dir", str(runs_dir), *words]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=REPOSITORY)
    ends = (("supervisor", signal.SIGTERM, 75), ("rank 1", signal.SIGKILL, 1), ("supervisor", signal.SIGTERM, 75))
    energies_J = []

    def begun(number: int) -> bool:
        folders = [folder for path in runs_dir.glob("local/*/run.json") for folder in samples.segments(path.parent)]
        starts = [event for event in read_events(folders[-1]) if event["event"] == "training_start"] if folders else []
        return len(folders) == number and len(starts) == 2

    for number, (who, how, status) in enumerate(ends, start=1):
        started = subprocess.Popen(command, **pipes)
        wait_until(lambda number=number: begun(number))
        time.sleep(1)
        run_dir = only_run(runs_dir)
        folder = samples.segments(run_dir)[-1]
        ranks = {event["rank"]: event["pid"] for event in read_events(folder) if event["event"] == "rank_start"}
        supervisor = next(one for one in processes_of(runs_dir) if "energynn.launch.supervise" in one.cmdline())
        (psutil.Process(ranks[1]) if who == "rank 1" else supervisor).send_signal(how)
        output = started.communicate(timeout=300)[0]
        stopped = records.read(run_dir)
        assert started.returncode == status, output
        assert (stopped["status"] == "interrupted" and "it can go on" in stopped["status_reason"]) == (status == 75)
        assert list(run_dir.glob("checkpoint/*.sha256")), "no checkpoint is lost"
        assert how == signal.SIGKILL or list(folder.glob("perun/*.hdf5")), "perun's data are kept, too"
        assert len(stopped["segments"]) == number and (number == 1 or "goes on after " in output)
        energies_J.append(stopped["energy_cpu_J"])
    done = subprocess.run(command, timeout=300, **pipes)
    assert done.returncode == 0 and "goes on after " in done.stdout, done.stdout
    record = records.read(run_dir)
    assert record["status"] == "finished" and record["valid"] and records.check(runs_dir) == [], record[
        "invalid_reasons"
    ]
    for phases in record["phases"]:  # of both segments
        in_phases_s = sum(seconds for name, seconds in phases.items() if name != "rank")
        assert 0.7 * record["training_time_s"] < in_phases_s <= record["training_time_s"] and phases["checkpoint_s"] > 0
    assert len(record["segments"]) == 4 and all(part["gap_before_s"] > 1 for part in record["segments"][1:])
    assert all(part["training_time_s"] > 1 and part["energy_total_J"] > 0 for part in record["segments"])
    energies_J.append(record["energy_cpu_J"])
    assert energies_J[0] > 0 and energies_J == sorted(energies_J)
    assert record["energy_total_J"] == pytest.approx(sum(part["energy_total_J"] for part in record["segments"]))
    assert [entry["epoch"] for entry in record["history"]] == list(range(1, 101))
    assert not (run_dir / "checkpoint").exists() and (run_dir / "record-after-segment-3.json").exists()


@pytest.mark.slow
def test_papermill_makes_a_run_once_and_shows_its_progress_live(tmp_path):
    runs_dir = tmp_path / "runs"
    started = papermill(runs_dir, LONGER)
    output, live = "", False
    for line in started.stdout:
        output += line
        live = live or ("s left" in line and not list(runs_dir.glob("local/*/record.json")))
    assert started.wait() == 0, output
    assert live, "the trainer's progress was not to be seen while it trained"
    run_dir = only_run(runs_dir)
    record = records.read(run_dir)
    assert record["valid"] and record["devices"] == 2 and record["samples_in_training"] >= 60
    assert list(run_dir.glob("perun/*.hdf5")) and records.check(runs_dir) == []
    parts = record["energy_phases"]
    assert {part["phase"] for part in parts} >= {
        "data_loading",
        "forward",
        "backward",
        "optimizer",
        "evaluation",
        "idle",
    }
    assert {part["rank"] for part in parts} == {0, 1, None}
    assert sum(part["energy_cpu_J"] for part in parts) == pytest.approx(record["energy_cpu_J"], rel=1e-3)
    assert abs(parts[-1]["energy_cpu_J"]) < 0.02 * record["energy_cpu_J"] and parts[-1]["phase"] == "unattributed"
    assert record["idle_power_cpu_before_W"] > 0 and record["energy_net_cpu_J"] < record["energy_cpu_J"]
    assert record["overhead"][0]["thread_cpu_s"] > 0
    assert cli.main(["check", str(run_dir)]) == 0
    shown = json.loads((runs_dir.parent / "out.ipynb").read_text())["cells"]
    texts = [str(output.get("data", {}).get("text/plain", "")) for cell in shown for output in cell.get("outputs", [])]
    assert any("J per sample" in text for text in texts), "the live view in the notebook"
    before = (run_dir / "record.json").stat().st_mtime_ns
    again = papermill(runs_dir, LONGER)
    assert again.wait() == 0 and (run_dir / "record.json").stat().st_mtime_ns == before


@pytest.mark.parametrize(
    "parameters, words",
    [
        (dict(lerning_rate=0.1), "ValueError: lerning_rate: not a parameter"),
        (dict(local_batch_size=0), "ValueError: local_batch_size: must be at least 1"),
        (dict(local_batch_size="many"), "ValueError: local_batch_size: must be a whole number"),
    ],
)
def test_papermill_refuses_bad_parameters_in_one_line(tmp_path, parameters, words):
    started = papermill(tmp_path / "runs", parameters)
    output = started.communicate()[0].strip().splitlines()
    assert started.returncode != 0
    assert output[-1].startswith(words)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "name, value",
    [
        ("lerning_rate", "0.1"),
        ("local_batch_size", "0"),
        ("local_batch_size", "1.5"),
        ("devices", "two"),
        ("workload", "alexnet"),
        ("dataset", "era6"),
    ],
)
def test_the_command_line_refuses_bad_parameters_with_status_2(tmp_path, capsys, name, value):
    assert cli.main(["run", "-p", name, value, "--runs-dir", str(tmp_path / "runs")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("energynn: ") and error.count("\n") == 1 and name in error
    assert not (tmp_path / "runs").exists()


def test_a_study_that_cannot_start_says_so_once(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert cli.main(["study", "run", "smoke", "--runs-dir", str(tmp_path / "file" / "runs")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_one_measured_run_at_a_time_on_a_host_whoever_makes_it_and_wherever(tmp_path, monkeypatch):
    intent = start.intend(config.make("fourcastnet"), tmp_path / "mine" / "local" / "run")
    held = supervise.alone_on_host()
    with pytest.raises(ValueError, match="another measured run goes on"):
        start.preflight(intent)
    monkeypatch.setenv("SLURM_JOB_ID", "5")
    assert any("this one waits; --exclusive" in warning for warning in start.preflight(intent))
    held.close()
    monkeypatch.delenv("SLURM_JOB_ID")
    assert not start.preflight(intent)


def test_what_cannot_work_is_said_before_anything_starts(tmp_path, monkeypatch):
    made = config.make("fourcastnet")
    (tmp_path / "file").write_text("")
    run_dir = tmp_path / "local" / "run"
    with pytest.raises(ValueError, match="cannot write"):
        start.intend(made, tmp_path / "file" / "runs" / "local" / "run")
    with pytest.raises(ValueError, match="make that run first"):
        start.preflight(start.intend(config.make("fourcastnet", stage="finetune", initial_run="none"), run_dir))
    with pytest.raises(ValueError, match="no manifest"):
        start.intend(config.make("fourcastnet", dataset="era6"), run_dir)
    start.begin(start.intend(made, run_dir))  # where the data lay is known, and no part of the run's identity
    intent = json.loads((run_dir / "run.json").read_text())
    assert intent["data_root"] == "data_manifests/era5_ensemble" and "data_root" not in intent["config"]
    (run_dir / "checkpoint").mkdir()
    (run_dir / "checkpoint" / "5.pt").touch()  # without its checksum: the run was killed while it was written
    start.begin(start.intend(made, run_dir))
    assert not list(run_dir.glob("segment-*")) and list(tmp_path.glob("local/superseded/run.1/checkpoint/5.pt"))
    many = start.preflight(start.intend(config.make("fourcastnet", devices=64), run_dir))
    assert "64 devices" in many[0]
    monkeypatch.setattr(start, "LEAST_FREE_B", 2**60)
    with pytest.raises(ValueError, match="MiB free"):
        start.intend(made, run_dir)


def test_a_run_sees_and_counts_only_the_gpus_that_it_uses(tmp_path, monkeypatch):
    four = [{"index": index, "name": "a GPU", "driver": "1", "power_limit_W": 400.0} for index in range(4)]
    monkeypatch.setattr(start.machine, "gpus", lambda: four)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def environment(**parameters):
        run_dir = tmp_path / "local" / f"run{len(list(tmp_path.glob('local/run*')))}"
        start.begin(start.intend(config.make("fourcastnet", **parameters), run_dir))
        intent = json.loads((run_dir / "run.json").read_text())
        supervise.ranks_command(run_dir, intent, "mpirun", "mpich")
        return intent, supervise.rank_environment(run_dir, intent), (run_dir / "perun.ini").read_text()

    intent, variables, perun = environment(devices=2)
    assert intent["device_kind"] == "gpu" and intent["device_name"] == "a GPU"
    assert variables["CUDA_VISIBLE_DEVICES"] == "0,1" and "exclude_backends = \n" in perun
    assert "CUDA:(?!(0|1)_)" in perun and variables["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert start.preflight(start.intend(config.make("fourcastnet", devices=4), tmp_path / "local" / "run")) == []
    intent, variables, perun = environment(devices=2, device="cpu")
    assert intent["device_kind"] == "cpu core" and variables["CUDA_VISIBLE_DEVICES"] == ""
    assert "exclude_backends = nvml amdsmi" in perun
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-c,GPU-d,GPU-a")
    assert environment(devices=2)[1]["CUDA_VISIBLE_DEVICES"] == "GPU-c,GPU-d"
    with pytest.raises(ValueError, match="this machine or job has 4; ask for fewer"):
        start.preflight(start.intend(config.make("fourcastnet", devices=5), tmp_path / "local" / "run"))
    monkeypatch.setattr(start.machine, "gpus", lambda: [])
    with pytest.raises(ValueError, match="this machine or job has 0"):
        start.preflight(start.intend(config.make("fourcastnet", device="gpu"), tmp_path / "local" / "run"))


@pytest.mark.slow
def test_without_perun_ranks_are_started_by_torchrun_and_measured_by_our_own_sampler(tmp_path):
    """A machine with a torch of its own and little else, as a GPU server may be."""
    program = (
        "import importlib.util, os, sys; find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *more: None if name == 'perun' else find(name, *more)\n"
        "from energynn import config, launchers\nfrom energynn.launch import start\n"
        f"start.run(config.make(**{TINY!r}), {str(tmp_path / 'alone')!r})\n"
        f"start.run(config.make(devices=2, **{TINY!r}), {str(tmp_path / 'torchrun')!r})\n"
        f"os.environ[launchers.SRUN_VARIABLE] = ''\n"  # in a batch job ranks may be on several nodes
        f"try:\n    start.run(config.make(devices=2), {str(tmp_path / 'job')!r})\n"
        "except ValueError as error:\n    print('refused:', error)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=REPOSITORY)
    for launcher, ranks in (("alone", 1), ("torchrun", 2)):
        record = records.read(only_run(tmp_path / launcher))
        assert record["valid"] and record["launcher"] == launcher, done.stdout + done.stderr
        assert len(record["phases"]) == ranks and len({entry["id"] for entry in record["sensors"]}) == 1
        assert record["idle_power_cpu_after_W"] > 0 and records.check(tmp_path / launcher) == []
        lines = (only_run(tmp_path / launcher) / "log.txt").read_text().splitlines()
        assert len(lines) > 2 and {line.startswith("0: ") for line in lines} == {ranks > 1}, lines
    assert "warning: perun or MPI is missing" in done.stdout and "refused: no perun found" in done.stdout


SOME_POINTS = """
import sys
from energynn import cli, studies
kinds = {}
for point in studies.GPU_POINTS:
    kinds[point["workload"], point["preset"]] = point
studies.GPU_POINTS = list(kinds.values())
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "start_it, runs",
    [(["-c", SOME_POINTS], 6), pytest.param(["-m", "energynn.cli"], 12, marks=pytest.mark.nightly)],
    ids=["a point of each kind", "whole"],
)
def test_the_gpu_study_runs_dry_where_little_but_torch_is_installed(tmp_path, start_it, runs):
    """As on a GPU server that is lent for minutes: no perun, no MPI, no papermill, nothing of the analysis."""
    for dataset in ("photographs", "photographs_large"):
        manifests.verify(dataset)
    missing = ("perun", "mpi4py", "papermill", "ipykernel", "altair", "pandas", "statsmodels", "skimage", "sklearn")
    missing += ("h5py", "xarray", "psutil")
    (tmp_path / "sitecustomize.py").write_text(
        "from importlib.machinery import PathFinder as Finder\nfind = Finder.find_spec\n"
        f"missing = lambda name: name.partition('.')[0] in {missing!r}\n"
        "Finder.find_spec = lambda name, *more, **named: None if missing(name) else find(name, *more, **named)\n"
    )
    path = os.pathsep.join([str(tmp_path), str(REPOSITORY)])
    words = [sys.executable, *start_it, "study", "run", "gpu", "--dry-run"]
    words += ["--runs-dir", str(tmp_path / "runs"), "--archive", str(tmp_path / "all.tar.gz")]
    done = subprocess.run(words, capture_output=True, text=True, cwd=REPOSITORY, env=os.environ | {"PYTHONPATH": path})
    found = [records.read(path.parent) for path in (tmp_path / "runs").rglob("record.json")]
    assert done.returncode == 0 and len(found) == runs and all(record["valid"] for record in found), done.stdout[-3000:]
    assert {(record["workload"], record["config"]["preset"]) for record in found} == {
        (workload, preset) for workload in ("resnet50", "fourcastnet") for preset in ("paper", "fast")
    }
    assert any(record["config"]["loader_workers"] for record in found), "none reads files"
    assert all(record["idle_power_cpu_ready_W"] > 0 and record["samples_in_training"] >= 60 for record in found)
    assert (tmp_path / "all.tar.gz").stat().st_size < 16 * 2**20
    with tarfile.open(tmp_path / "all.tar.gz") as packed:
        packed.extractall(tmp_path / "home", filter="data")
    assert records.check(tmp_path / "home") == [] and len(records.run_dirs(tmp_path / "home")) == runs


def test_a_study_stops_in_time_and_says_what_it_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(local, "execute", lambda *more: (0, ""))
    monkeypatch.setattr(start, "preflight", lambda *more: [])
    runs = [config.make("fourcastnet", seed=seed) for seed in range(3)]
    assert local.run_study(runs, tmp_path, minutes=-1) == [
        f"{config.run_id(run)}: left out for lack of time" for run in runs
    ]


def test_a_machine_without_mpi_is_told_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(launchers.sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="no MPI found: mpirun is not on PATH"):
        launchers.find_mpi()
    (tmp_path / "mpirun").write_text("#!/bin/sh\necho HYDRA\n")
    (tmp_path / "python").write_text("#!/bin/sh\necho 'RuntimeError: cannot load MPI library' >&2; exit 1\n")
    for name in ("mpirun", "python"):
        (tmp_path / name).chmod(0o755)
    with pytest.raises(ValueError, match="no MPI library found by mpi4py .*cannot load MPI library"):
        launchers.find_mpi()


def test_a_run_started_twice_in_an_instant_goes_on_once(tmp_path):
    """The second one finds it locked before it has moved or written anything."""
    made = config.make("fourcastnet")
    run_dir = tmp_path / "local" / config.run_id(made)
    run_dir.mkdir(parents=True)
    (run_dir / "run.json").write_text("of the first")
    first = files.lock(run_dir / start.START_LOCK)
    with pytest.raises(ValueError, match="this run goes on already"):
        start.run(made, tmp_path)
    first.close()
    assert (run_dir / "run.json").read_text() == "of the first" and not (tmp_path / "local" / "superseded").exists()


def test_an_attempt_whose_launcher_was_killed_has_a_record_before_it_is_moved_aside(run_dir):
    made = config.make("resnet50", devices=2, local_batch_size=16)
    moved = run_dir.parent / "superseded" / f"{run_dir.name}.1"
    start.begin(start.intend(made, run_dir))
    assert records.read(moved)["status"] == "killed" and records.read(moved)["energy_cpu_J"] > 0
    assert records.check(moved.parent) == []


def test_a_file_system_that_counts_no_names_has_deleted_nothing(tmp_path, monkeypatch):
    def is_deleted(held):
        with monkeypatch.context() as patched:
            patched.setattr(supervise.os, "fstat", lambda number: SimpleNamespace(st_nlink=0))
            return supervise._is_deleted(held)

    (tmp_path / "run.json").touch()
    with open(tmp_path / "run.json") as held:
        assert not is_deleted(held)
        (tmp_path / "run.json").unlink()
        assert is_deleted(held)


def test_a_folder_that_is_deleted_meanwhile_is_one_line_and_leaves_nothing(run_dir):
    """The supervisor alone, with ranks that do nothing."""
    program = textwrap.dedent(f"""
        import os, pathlib
        from energynn.launch import supervise
        supervise.ranks_command = lambda *_: ["sleep", "1000"]
        print("begins", flush=True)
        raise SystemExit(supervise.supervise(pathlib.Path({str(run_dir)!r}), os.getppid(), "", ""))
    """)
    intent = json.loads((run_dir / "run.json").read_text())
    (run_dir / "run.json").write_text(json.dumps(intent | {"launcher": "alone"}))
    started = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    sleeping = []
    wait_until(
        lambda: sleeping or sleeping.extend(psutil.Process(started.pid).children()) or started.poll() is not None
    )
    shutil.rmtree(run_dir)
    try:
        output, _ = started.communicate(timeout=60)
    finally:
        started.kill()
    assert (started.returncode, output) == (1, "begins\n")
    assert not lives(sleeping[0].pid) and not run_dir.exists()


@pytest.mark.slow
def test_who_starts_a_run_whose_folder_is_deleted_says_so(tmp_path):
    started = python_run(tmp_path / "runs", ENDLESS)
    wait_until(lambda: training_has_begun(tmp_path / "runs"))
    shutil.rmtree(only_run(tmp_path / "runs"))
    output = started.communicate(timeout=60)[0]
    assert started.returncode != 0 and output.splitlines()[-1].endswith(
        "deleted while it ran; nothing of it is recorded"
    )
    assert "energynn/train" not in output, "a rank's traceback"
    wait_until(lambda: not processes_of(tmp_path), 5)


@pytest.mark.slow
def test_perun_and_we_agree_on_a_fake_powercap_tree(tmp_path):
    import h5py

    watts = 200.0
    runs_dir = tmp_path / "runs"
    writer = powercap.constant_power(tmp_path / "powercap", watts, range_uJ=10**9)  # wraps around every 5 s
    try:
        started = python_run(
            runs_dir,
            TINY | dict(devices=2, epochs=40),
            env=os.environ | {perun_adapter.POWERCAP_VARIABLE: str(tmp_path / "powercap")},
        )
        output = started.communicate(timeout=300)[0]
    finally:
        writer.kill()
        writer.wait()
    assert started.returncode == 0, output
    run_dir = only_run(runs_dir)
    record = records.read(run_dir)
    assert record["energy_cpu_provenance"] == record["energy_total_provenance"] == "simulated"
    assert record["energy_cpu_J"] == pytest.approx(watts * record["training_time_s"], rel=0.01)
    assert record["energy_perun_total_J"] == pytest.approx(record["energy_perun_reported_J"], rel=1e-4)
    assert record["energy_perun_cpu_J"] == pytest.approx(watts * record["perun_time_s"], rel=0.1)
    # The very same readings, one by one: what perun stored is what our file noted as perun took it.
    noted = [line["perun"] for line in read_samples(next(run_dir.glob("samples-*.jsonl"))).perun]
    (name,) = [key for key in noted[0] if key.endswith("cpu_0_package-0")]
    with h5py.File(next(run_dir.glob("perun/*.hdf5"))) as file:
        found = []
        file.visititems(
            lambda path, item: found.append(item[:]) if path.endswith("package-0/raw_data/alt_values") else None
        )
    assert np.array_equal(found[0], [values[name] for values in noted]) and len(noted) > 10


@pytest.mark.slow
def test_a_disk_that_fills_up_ends_the_run_in_a_clear_line_and_a_record(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if (
        shutil.which("mount") is None
        or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "none", str(disk)], capture_output=True).returncode
    ):
        pytest.skip("needs the right to mount a small tmpfs")
    try:
        started = python_run(disk / "runs", ENDLESS)
        wait_until(lambda: training_has_begun(disk / "runs"))
        with open(disk / "filler", "wb", buffering=0) as filler, pytest.raises(OSError):
            while True:
                filler.write(b"\0" * 4096)
        output = started.communicate(timeout=300)[0]
        assert started.returncode != 0 and "No space left on device" in output
        record = records.read(only_run(disk / "runs"))
        assert record["status"] == "failed" and "No space left on device" in record["status_reason"]
        assert not processes_of(disk / "runs")
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_sensor_descriptions_fit_into_json():
    sensor = Sensor("s", "cpu", "0", "energy", "simulated", lambda: 0)
    assert "read" not in json.loads(json.dumps(sensor.describe()))
