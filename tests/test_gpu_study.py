"""The study for one GPU: what its points can tell, what a loan makes, what it brings home."""

import json
import subprocess
import tarfile

import numpy as np
import pytest

from energynn.experiment import config, studies
from energynn.host import files
from energynn.launch import local, start
from energynn.measure import machine
from tests.analysis.one_gpu import gpu_grid
from tests.conftest import minimal_record
from tests.processes import answer

GRID = gpu_grid()
RUNS = [config.make(seed=seed) for seed in range(5)]


def recipe(run):
    return config.recipe(config.asdict(run), ["step_period_s"])


def correlation_of_rates(runs):
    """How far samples and updates a second go together, if a step takes 8 ms and 0.7 ms a sample,
    or its pace.
    """
    sizes = np.array([run.local_batch_size for run in runs])
    steps_s = np.maximum(0.008 + 0.0007 * sizes, [run.step_period_s for run in runs])
    return abs(np.corrcoef(sizes / steps_s, 1 / steps_s)[0, 1])


@pytest.mark.parametrize("study, anchors", [(studies.gpu, 2), (gpu_grid, 3)])
def test_points_are_as_a_gpu_needs_them(study, anchors):
    runs = study()
    repeats = [run.repeat for run in runs if config.replace(run, repeat=0) == runs[0]]
    assert repeats == list(range(anchors)), "the first run is repeated to show drift"
    for run in runs:
        assert run.idle_ready_s >= 5
        assert run.workload == "resnet50" or run.stays_on_device
        if run.workload == "resnet50":
            assert run.training_samples % run.global_batch_size == 0
    assert len({config.run_id(run) for run in runs}) == len(set(runs)) == len(runs)


@pytest.fixture
def clock(monkeypatch):
    """Runs of which only the time is true: ``clock(seconds)`` returns the list of those made."""
    now, made = [0.0], []

    def execute(parameters, run_dir):
        run = config.config_from_dict(parameters)
        made.append(run)
        now[0] += clock.seconds(run, len(made))
        run_dir.mkdir(parents=True, exist_ok=True)
        return 0, ""

    def clock(seconds):
        clock.seconds = seconds
        made.clear()
        return made

    monkeypatch.setattr(local, "execute", execute)
    monkeypatch.setattr(local.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(start, "prepare_intent", lambda *_: {})
    return clock


@pytest.mark.parametrize(
    "study, calls_min, overhead_s, least_runs",
    [
        (GRID, (6.5, 9, 7), 12, 24),
        (GRID, (6.5, 9, 7), 17.6, 24),
        (studies.gpu(), (9,), 20, 11),
    ],
)
def test_a_loan_makes_all_anchors_and_tells_samples_from_updates(
    tmp_path, clock, monkeypatch, study, calls_min, overhead_s, least_runs
):
    """By what the machine may need beside the training; no call of docs/gpu.md lasts too long."""

    def seconds(run, _number):
        is_states = run.workload == "fourcastnet"
        rates = studies.STATES_PER_S if is_states else studies.IMAGES_PER_S[run.preset]
        samples = run.epoch().training_samples
        samples_per_s = rates[run.preset if is_states else run.local_batch_size]
        paced_s = samples / run.global_batch_size * run.step_period_s
        epoch_s = max(samples / samples_per_s, paced_s)
        return overhead_s + run.epochs * epoch_s + (60 if run.compile else 0)

    made = []

    def has_valid_record(folder):
        return folder.name in map(config.run_id, made)

    monkeypatch.setattr(local.records, "has_valid_record", has_valid_record)
    for minutes in calls_min:
        begun, of_call = local.time.monotonic(), clock(seconds)
        local.make_missing_runs(study, tmp_path, minutes=minutes, warm_up=True)
        assert local.time.monotonic() - begun < 60 * minutes + 5
        made += of_call
    assert made.pop(0) == made[0], "to warm up"
    anchors = [run for run in study if config.replace(run, repeat=0) == study[0]]
    assert set(anchors) <= set(made) and len(made) >= least_runs
    # that differ from the anchor in scale and pace only
    alike = [run for run in made if recipe(run) == recipe(GRID[0])]
    assert correlation_of_rates(alike) < 0.75


def test_a_cold_first_run_leaves_out_no_others(tmp_path, clock):
    made = clock(lambda run, number: 200 if number == 1 else 20)
    left_out = local.make_missing_runs(
        RUNS, tmp_path, minutes=(200 + 4 * 20 + 10) / 60, warm_up=True
    )
    assert made == [RUNS[0], *RUNS[:4]]
    assert left_out == [f"{config.run_id(RUNS[4])}: left out for lack of time"]


def test_the_archive_is_there_whatever_happens_and_has_no_checkpoints(tmp_path):
    """A checkpoint may have a gigabyte, and a lent machine gives back 16 MiB."""
    folder = tmp_path / "build" / "gpu-runs" / "local" / "run"
    (folder / "checkpoint").mkdir(parents=True)
    for name in ("run.json", "checkpoint/000000001.pt"):
        (folder / name).touch()
    words = f"make -f {files.REPOSITORY}/Makefile gpu-study GPU_PYTHON=false OUT=out"
    assert subprocess.run(words.split(), cwd=tmp_path).returncode == 2
    names = tarfile.open(tmp_path / "out" / "gpu-study.tar.gz").getnames()
    assert "./local/run/run.json" in names and "checkpoint" not in str(names)


def test_valid_records_are_counted_and_the_exit_status_tells_of_failures(
    tmp_path, clock, monkeypatch
):
    first, second = studies.kick_the_tires("local")
    outcomes = {
        first: dict(status="finished", valid=True),
        second: dict(status="failed"),
    }
    outcomes[second] |= {"status_reason": "no network"}

    def execute(parameters, run_dir):
        run = config.config_from_dict(parameters)
        run_dir.mkdir(parents=True, exist_ok=True)
        files.write_json(run_dir / "record.json", minimal_record(**outcomes[run]))
        return int(run == second), ""

    monkeypatch.setattr(local, "execute", execute)
    words = f"study run kick-the-tires --runs-dir {tmp_path}/runs"
    said = answer(words, status=1)
    assert "1 of 2 runs have a valid record" in said and "no network" in said
    outcomes[second] = dict(status="finished", valid=True)
    monkeypatch.setattr(local, "execute", lambda *words: (execute(*words), (0, ""))[1])
    assert "2 of 2 runs" in answer(words)


def test_two_kinds_of_gpu_never_have_one_name(monkeypatch):
    names = set()
    for gpu in ("NVIDIA H100 80GB HBM3", "NVIDIA H200"):
        monkeypatch.setattr(machine, "list_gpus", lambda name=gpu: [{"name": name}])
        names |= {studies.gpu_system(), studies.gpu()[0].system}
    assert names == {"gpu-h100-80gb-hbm3", "gpu-h200"}


def test_the_commit_travels_where_git_is_not(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "COMMIT", tmp_path / "commit")
    state = machine.git_state()
    machine.COMMIT.write_text(json.dumps(state))
    monkeypatch.setattr(machine, "call_git", lambda *words: "")
    assert machine.git_state() == state and len(state[0]) == 40
