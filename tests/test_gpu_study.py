"""The study for one GPU, before there is one: what its points can tell, what it brings home, and when it ends."""

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import tarfile
import time
from functools import partial

import numpy as np
import pytest
from scipy import stats

from energynn import cli, config, files, studies
from energynn.cluster import local
from energynn.config import replace
from energynn.files import REPOSITORY
from energynn.launch import start
from energynn.measure import machine
from tests.analysis import one_gpu
from tests.analysis.one_gpu import Gpu
from tests.conftest import minimal_record

GRID = studies.gpu_grid()
ANCHOR = config.to_dict(GRID[0])
# Of the anchor's recipe on the device: they differ in sizes and pace only.
RECIPE = {
    name: ANCHOR[name]
    for name in ("workload", "preset", "image_loading", "precision", "channels_last", "fused_optimizer")
}
ON_DEVICE = [run for run in GRID if RECIPE.items() <= config.to_dict(run).items()]


def rates_per_s(runs, t0_s=0.008, t1_s=0.0007):
    """Samples and updates a second of an imagined GPU, whose step takes t0 + t1 LBS, or as long as the pace says."""
    passes_s = np.array([run.accumulation_steps * (t0_s + t1_s * run.local_batch_size) for run in runs])
    steps_s = np.maximum(passes_s, [run.step_period_s for run in runs])
    return np.array([run.global_batch_size for run in runs]) / steps_s, 1 / steps_s


def fits(runs, random, b_J=0.1, c_J=2.0, a_W=120.0, noise=0.01):
    """What a fit of power = a + b samples/s + c updates/s + drift gives for b and c, and half their 95 % intervals.

    As in notebook 45, weights are 1 / P^2. Noise is in proportion to power, and without weights the interval of c held
    the truth in 91 % of the worlds without b: the run with most updates decides c alone, and there draws the most.
    """
    samples, updates = rates_per_s(runs)
    place = np.linspace(0, 1, len(runs))
    truth_W = a_W + b_J * samples + c_J * updates + 10 * place
    power_W = truth_W * (1 + random.normal(0, noise, len(runs)))
    columns = np.column_stack([np.ones(len(runs)), samples, updates, place])
    weighted, one = columns / power_W[:, None], np.ones(len(runs))
    inverse = np.linalg.pinv(weighted.T @ weighted)
    found = inverse @ weighted.T @ one
    sd = np.sqrt(((one - weighted @ found) ** 2).sum() / (len(runs) - 4))
    return found[1:3], stats.t.ppf(0.975, len(runs) - 4) * sd * np.sqrt(np.diag(inverse))[1:3]


def assert_runs_tell_samples_from_updates(runs, widest_W):
    runs = [run for run in runs if run.accumulation_steps == 1]  # whose updates are passes, too, as in notebook 45
    assert len(runs) >= 6, "as notebook 45 asks for"
    random, (samples, updates) = np.random.default_rng(0), rates_per_s(runs)
    for truth in ((0.1, 2.0), (0.1, 0.0), (0.0, 2.0), (0.0, 0.0)):
        hits = np.zeros(2)
        for _ in range(500):
            found, half = fits(runs, random, *truth)
            hits += np.abs(found - truth) <= half
            assert (half * [np.ptp(samples), np.ptp(updates)]).max() < widest_W, "over the range of these runs"
        assert (hits >= 465).all(), (truth, hits)  # 95 % are expected; 90 of 100 is what is asked for


def test_the_grid_tells_samples_from_updates():
    assert len(ON_DEVICE) == 15
    assert_runs_tell_samples_from_updates(ON_DEVICE, widest_W=12)


def test_an_lbs_sweep_alone_cannot_tell_them():
    sweep = [run for run in ON_DEVICE if not run.step_period_s and run.accumulation_steps == 1]
    samples, updates = rates_per_s(sweep)
    assert np.corrcoef(samples, updates)[0, 1] < -0.999999
    samples, updates = rates_per_s(ON_DEVICE)
    assert abs(np.corrcoef(samples, updates)[0, 1]) < 0.7


def test_points_are_as_a_gpu_needs_them():
    for runs in (studies.gpu(), GRID):
        names = [config.run_id(run) for run in runs]
        assert len(set(names)) == len(names)
        anchors = [
            place
            for place, run in enumerate(runs)
            if {**config.to_dict(runs[0]), "repeat": 0} == {**config.to_dict(run), "repeat": 0}
        ]
        assert (
            anchors[0] == 0
            and len(anchors) >= 2
            and [runs[place].repeat for place in anchors] == list(range(len(anchors)))
        )
        assert [run.preset for run in runs] != sorted(run.preset for run in runs), "interleaved"
        for run in runs:
            assert run.idle_ready_s >= 5
            if run.workload == "fourcastnet":
                assert run.stays_on_device
            else:
                assert run.warmup_start <= 1e-3, "one batch again and again diverges at 0.1"
                assert (
                    run.training_samples % run.global_batch_size == run.validation_samples % run.local_batch_size == 0
                )
    assert len({run.local_batch_size for run in ON_DEVICE if not run.step_period_s}) >= 5
    assert {run.sampling_period_s for run in ON_DEVICE} == {0.02, 0.2}, "what sampling costs"
    (compiled,) = [run for run in GRID if run.compile]
    assert compiled.preset == "fast" and replace(compiled, compile=False) in GRID, "the same run without"


def test_a_loader_that_keeps_up_with_the_gpu_leaves_a_window_that_is_long_enough():
    """One core read 400 of these images a second, so that four workers do: the GPU's rate makes the window."""
    loaded = [run for run in GRID if run.workload == "resnet50" and not run.stays_on_device]
    assert {(run.preset, run.loader_workers) for run in loaded} == {("paper", 4), ("paper", 12), ("fast", 12)}
    for run in loaded:
        assert run.training_samples / studies.IMAGES_PER_S[run.preset][run.local_batch_size] > 19, run


def test_a_loan_that_ends_early_leaves_out_what_no_statement_and_no_plane_needs():
    last, points = studies.LAST_GPU_POINTS, studies.GPU_POINTS + studies.MORE_GPU_POINTS
    assert len(last) == 12 and all(points.count(point) == 1 for point in last)
    for run in GRID[-len(last) :]:
        assert sum(point.items() <= config.to_dict(run).items() for point in last) == 1, run


def made_in_a_loan(study, calls_min, overhead_s, folder, monkeypatch):
    """The runs that these calls make, by what a run may take beside its training; no call may last too long."""

    def seconds(run, number):
        rates = studies.STATES_PER_S if run.workload == "fourcastnet" else studies.IMAGES_PER_S[run.preset]
        rate = rates[run.preset if run.workload == "fourcastnet" else run.local_batch_size]
        epoch = run.epoch().training_samples
        epoch_s = max(epoch / rate, epoch / run.global_batch_size * run.step_period_s)
        return overhead_s + run.epochs * epoch_s + (60 if run.compile else 0)

    def is_done(run, runs_dir):
        return (local._folder(run, runs_dir) / "run.json").exists()

    pretend(monkeypatch, seconds)
    monkeypatch.setattr(local, "_is_done", is_done)
    for minutes in calls_min:
        begun = local.time.monotonic()
        local.run_study(study, folder, minutes=minutes, warm_up=True)
        assert local.time.monotonic() - begun < 60 * minutes + 5
    return [run for run in study if is_done(run, folder)]


def assert_every_statement_is_decided(made, runs_dir, undecided):
    """By the ledger, on records of these runs by a GPU where all are right, and by one where nothing has an effect."""
    without = Gpu(sample_J=0.0, update_J=0.0, wave=0.04, ripple=0.9, image_GB=0.06)
    for system, gpu in (("right", Gpu(image_GB=0.09)), ("without", without)):
        one_gpu.write_grid(runs_dir, gpu, runs=[replace(run, system=system) for run in made], samples=True)
    found = one_gpu.judged(runs_dir, one_gpu.STATEMENTS)
    for name in set(one_gpu.STATEMENTS) - undecided:
        assert found[name]["right H100"]["verdict"] == "supported", name
        assert found[name]["without H100"]["verdict"] in ("contradicted", "inconclusive"), name


@pytest.mark.parametrize("overhead_s", [12, 15, 17.6])
def test_all_anchors_are_made_in_half_an_hour_and_no_call_lasts_too_long(tmp_path, monkeypatch, overhead_s):
    """The calls of docs/gpu.md: what they make decides every statement, and both networks have a plane."""
    made = made_in_a_loan(GRID, (6.5, 9, 7), overhead_s, tmp_path / "made", monkeypatch)
    assert [run.repeat for run in made if replace(run, repeat=0) == GRID[0]] == [0, 1, 2]
    assert {run.accumulation_steps for run in made} == {1, 8} and len(made) >= 24
    assert_runs_tell_samples_from_updates([run for run in made if run in ON_DEVICE], widest_W=16)
    states = [run for run in made if run.workload == "fourcastnet" and run.preset == "paper"]
    samples, updates = rates_per_s(states, t0_s=0.02, t1_s=0.15)
    assert len(states) >= 6 and abs(np.corrcoef(samples, updates)[0, 1]) < 0.98, "as notebook 45 asks for"
    assert_every_statement_is_decided(made, tmp_path / "runs", undecided=set())


def test_nine_minutes_decide_all_but_the_memory_of_fourcastnet(tmp_path, monkeypatch):
    """Also where a slow machine makes eleven of the twelve runs."""
    made = made_in_a_loan(studies.gpu(), (9,), 20, tmp_path / "made", monkeypatch)
    assert len(made) == 11 and len(studies.gpu()) == 12
    assert_runs_tell_samples_from_updates([run for run in made if run in ON_DEVICE], widest_W=45)
    assert_every_statement_is_decided(made, tmp_path / "runs", undecided={"lbs-limit-fcn"})


def test_the_memory_that_is_needed_is_said():
    """The paper's recipe keeps 44 GB at a local batch size of 512."""
    places = [studies.gpu.__doc__, studies.gpu_grid.__doc__, (REPOSITORY / "docs/gpu.md").read_text()]
    assert all("80 GB" in " ".join(words.split()) for words in places)


@pytest.mark.parametrize("study", [studies.gpu, studies.gpu_grid])
def test_a_dry_run_has_as_many_points(study):
    small = study(dry_run=True)
    assert len({config.run_id(run) for run in small}) == len(study()) and {run.device for run in small} == {"cpu"}


def test_two_kinds_of_gpu_never_have_one_name(monkeypatch):
    names = set()
    for gpu in ("NVIDIA H100 80GB HBM3", "NVIDIA H200"):
        monkeypatch.setattr(machine, "gpus", lambda name=gpu: [{"name": name}])
        names |= {run.system for run in studies.gpu()}
        start._refuse_a_slip(REPOSITORY / "build" / studies.gpu()[0].system)
    assert names == {"gpu-h100-80gb-hbm3", "gpu-h200"}


def test_the_commit_travels_where_git_is_not(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "COMMIT", tmp_path / "build" / "commit")
    state = machine.git_state()
    machine.write_commit()
    monkeypatch.setattr(machine, "git", lambda *words: "")
    assert machine.git_state() == state and len(state[0]) == 40
    machine.COMMIT.unlink()
    assert machine.git_state() == ("", False)


def test_commands_work_where_the_package_is_not_installed(monkeypatch, capsys):
    """As with PYTHONPATH=. on a machine that is lent: no package has metadata."""
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: 1 / 0)
    assert cli.main(["study", "list"]) == 0 and "gpu-grid" in capsys.readouterr().out


def pretend(monkeypatch, seconds):
    """Runs of which only the time is true; returns the list of those made."""
    clock, made = [0.0], []

    def execute(run, run_dir, _most_s):
        made.append(run)
        clock[0] += seconds(run, len(made))
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / "run.json").write_text("{}")
        return 0, ""

    monkeypatch.setattr(local, "command", lambda run, _runs_dir: run)
    monkeypatch.setattr(local, "execute", execute)
    monkeypatch.setattr(local.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(start, "preflight", lambda *more: [])
    return made


def test_a_cold_first_run_and_a_slow_recipe_leave_out_no_others(tmp_path, monkeypatch):
    made = pretend(monkeypatch, lambda run, number: 200 if number == 1 else 60 if run.workload == "fourcastnet" else 20)
    run = partial(config.make, device="cpu")
    runs = [
        run("resnet50"),
        run("resnet50", seed=1),
        run("fourcastnet"),
        run("resnet50", seed=2),
        run("fourcastnet", seed=1),
    ]
    failed = local.run_study(
        runs + [run("resnet50", seed=3)], tmp_path, minutes=(200 + 4 * 20 + 60 + 10) / 60, warm_up=True
    )
    assert [(run.workload, run.seed) for run in made] == [
        *(("resnet50", 0), ("resnet50", 0), ("resnet50", 1), ("fourcastnet", 0), ("resnet50", 2), ("resnet50", 3))
    ]
    assert failed == [f"{config.run_id(runs[-1])}: left out for lack of time"]
    made = pretend(monkeypatch, lambda run, number: 200 if number == 1 else 20)
    warm = [run("resnet50", seed=seed) for seed in range(6)]
    assert local.run_study(warm, tmp_path / "no-warm-up", minutes=410 / 60) == [] and len(made) == 6
    pretend(monkeypatch, lambda run, number: 90 if run.compile else 20)
    compiled = [*warm[:2], run("resnet50", compile=True), *warm[2:4]]
    assert local.run_study(compiled, tmp_path / "compiled", minutes=170 / 60) == []


def test_each_machine_is_warmed_up_whatever_records_it_was_given(tmp_path, monkeypatch):
    """A machine that was given back in between is another one, and gets the records from the archive."""
    runs, mark, archive = [config.make(seed=seed) for seed in range(5)], tmp_path / local.WARM, tmp_path / "all.tar.gz"
    made = pretend(monkeypatch, lambda run, number: 1)
    monkeypatch.setattr(local, "_is_done", lambda run, _dir: run in made)

    def made_by_a_call():
        before = len(made)
        local.run_study(runs[: max(run.seed for run in [*made, runs[0]]) + 2], tmp_path, archive=archive, warm_up=True)
        assert not any(local.WARM in name for name in tarfile.open(archive).getnames())
        return [run.seed for run in made[before:]]

    assert made_by_a_call() == [0, 0, 1]
    assert made_by_a_call() == [2]
    mark.unlink()  # as where only the archive was unpacked
    assert made_by_a_call() == [0, 3]
    os.utime(mark, (0, 0))  # it has cooled down since
    assert made_by_a_call() == [0, 4]
    mark.unlink()
    local.run_study([*runs, config.make(seed=5)], tmp_path)
    assert not mark.exists(), "who asks for no warm machine finds no file of ours beside the records"


def test_a_run_that_hangs_is_ended_and_comes_last_in_the_next_call(tmp_path, monkeypatch):
    hangs = tmp_path / "hangs"
    hangs.write_text("#!/bin/sh\nexec sleep 600\n")
    hangs.chmod(0o755)
    runs = [config.make(seed=seed) for seed in range(3)]
    folder = local._folder(runs[0], tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", str(hangs))
        begun = time.monotonic()
        status, words = local.execute(local.command(runs[0], tmp_path), folder, 0.3)
    assert status and words.startswith("ended after 0 s, as one that hangs") and time.monotonic() - begun < 20
    (folder / "run.json").touch()  # as its supervisor does
    made = pretend(monkeypatch, lambda run, number: 1)
    local.run_study(runs, tmp_path)
    assert made == [*runs[1:], runs[0]]


def test_what_was_begun_comes_last_with_all_that_starts_from_it(tmp_path, monkeypatch):
    runs = [config.make("fourcastnet", save_weights=True)]
    for _ in range(2):
        tuning = dict(stage="finetune", initial_run=config.run_id(runs[-1]), save_weights=True)
        runs.append(config.make("fourcastnet", **tuning))
    runs.append(config.make("fourcastnet", seed=1))
    folder = tmp_path / "local" / config.run_id(runs[0])
    folder.mkdir(parents=True)
    (folder / "run.json").touch()
    made = pretend(monkeypatch, lambda run, number: 1)
    assert local.run_study(runs, tmp_path) == [] and made == [runs[3], *runs[:3]]


def test_the_archive_is_there_whatever_happens(tmp_path, monkeypatch):
    archive, runs = tmp_path / "out" / "all.tar.gz", [config.make(seed=seed) for seed in range(3)]
    study = partial(local.run_study, runs, tmp_path / "runs", archive=archive)
    monkeypatch.setattr(start, "intend", lambda *more: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        study()
    assert tarfile.open(archive).getnames() == []
    monkeypatch.setattr(start, "intend", lambda *more: None)
    made, packed = pretend(monkeypatch, lambda run, number: 1.0 if number < 3 else 1 / 0), []
    keep = local.pack
    monkeypatch.setattr(local, "pack", lambda *more: [keep(*more), packed.append(tarfile.open(archive).getnames())])
    with pytest.raises(ZeroDivisionError):
        study()
    folders = [name for name in packed[-1] if name.endswith("run.json")]
    assert len(made) == 3 and len(folders) == 2 and len(packed) == 3, "after each run, and at the end"


def test_an_archive_has_no_checkpoints(tmp_path):
    """That of one run of FourCastNet is as large as a gigabyte; a lent machine gives back 16 MiB."""
    run, archive = config.make(), tmp_path / "all.tar.gz"
    folder = local._folder(run, tmp_path)
    (folder / "checkpoint").mkdir(parents=True)
    for name in ("run.json", "samples-host.jsonl", "checkpoint/000000000001.pt"):
        (folder / name).write_text("{}")
    local.pack([run], tmp_path, archive)
    packed = [name.rpartition("/")[2] for name in tarfile.open(archive).getnames()]
    assert sorted(packed) == sorted([folder.name, "run.json", "samples-host.jsonl"])


@pytest.mark.parametrize(
    "words, expected",
    [
        ([], "study run gpu --minutes 9 --warm-up --run-minutes 4 --archive build/"),
        (
            ["GPU_MINUTES=32", "GPU_CALL_MINUTES=9", "OUT=/x"],
            "study run gpu-grid --minutes 9 --warm-up --run-minutes 4 --archive /x/",
        ),
    ],
)
def test_the_makefile_knows_both_lengths(words, expected):
    done = subprocess.run(["make", "-n", "gpu-study", *words], cwd=REPOSITORY, capture_output=True, text=True)
    assert expected in " ".join(done.stdout.replace("\\", "").split()), done.stdout + done.stderr


@pytest.mark.parametrize(
    "reasons, tried",
    [
        (["no network"] * 5, 3),
        (["no network", "no network", "out of memory", "no network", "no network"], 5),
        (["", "no network", "no network", "no network", "no network"], 5),
    ],
)
def test_where_the_first_runs_fail_alike_no_time_is_lost_with_the_others(tmp_path, monkeypatch, reasons, tried):
    for name in ("intend", "preflight"):
        monkeypatch.setattr(start, name, lambda *more: None)
    told = iter(reasons)

    def execute(*_):
        reason = next(told)
        return (1, reason) if reason else (0, "")

    monkeypatch.setattr(local, "execute", execute)
    failed = local.run_study([config.make(seed=seed) for seed in range(5)], tmp_path)
    assert len(reasons) - len(list(told)) == tried
    assert (failed[-1] == "the other runs: left out, because the first 3 failed alike") == (tried == 3)


def test_a_run_that_finished_but_is_not_valid_counts_as_none(tmp_path, monkeypatch, capsys):
    """A failed run and one that was left out count as none, either; the exit status tells of these two alone."""
    for name in ("intend", "preflight"):
        monkeypatch.setattr(start, name, lambda *more: None)
    runs, doubt = studies.kick_the_tires(), "12 power samples in the training, 60 needed"
    outcomes = [{"status": "finished", "valid": True}, {"status": "finished", "invalid_reasons": [doubt]}]

    def execute(_command, run_dir, _most_s):
        record = outcomes.pop(0)
        run_dir.mkdir(parents=True, exist_ok=True)
        files.write_json(run_dir / "record.json", minimal_record(**record))
        return int(record["status"] != "finished"), ""

    monkeypatch.setattr(local, "execute", execute)
    words = ["study", "run", "kick-the-tires", "--runs-dir", str(tmp_path / "runs")]
    assert cli.main(words) == 0 and not outcomes
    last = capsys.readouterr().out.splitlines()[-2:]
    assert last[0].startswith("1 of 2 runs have a valid record in ")
    assert last[1] == f"{config.run_id(runs[1])}: not valid: {doubt}"
    outcomes = [{"status": "failed", "status_reason": "no network"}]
    assert cli.main(words) == 1
    last = capsys.readouterr().out.splitlines()[-2:]
    assert last[0].startswith("1 of 2 ") and last[1] == f"{config.run_id(runs[1])}: failed: no network"
