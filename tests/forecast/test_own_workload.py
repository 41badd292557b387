"""A workload that the package does not know takes the same path: all that is needed of it, its
configuration tells.
"""

from functools import partial

import numpy as np
import pytest
from msgspec.structs import replace

from energynn.experiment import config, systems
from energynn.forecast import (
    fits,
    model,
    next_run,
    plan,
    power_limit,
    predict,
    runs,
    wording,
)
from tests.conftest import record_of
from tests.forecast import worlds
from tests.forecast.conftest import foretold, grid, holds, study_run
from tests.processes import refused

MODULE = """
from energynn.experiment.config import Epoch, RunConfig

class Config(RunConfig, frozen=True, kw_only=True):
    workload: str = "words"
    dataset: str = "books"
    local_batch_size: int = 8
    global_batch_size: int = 8
    epochs: int = 3
    learning_rate: float = 0.1
    sentences: int = 100_000

    def epoch(self):
        sizes = {"training_samples": self.sentences, "validation_samples": 1000}
        return Epoch(**sizes, gradient_bytes=500_000_000)
"""
TRUTH = worlds.CLUSTER | dict(tau=2e-2, t_start=2.0, fill=1.0, t_update=5e-3)
TRUTH |= dict(efficiency=0.8, kappa=0.1, host=400.0, fed=300.0, idle=80.0, image_J=2.0)
SYSTEM = """scheduler = "slurm"
gpu = "A100"
devices_per_node = 8
nodes = 4
link_GB_per_s = 12.5
gpu_link_GB_per_s = 450
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "words.py").write_text(MODULE)
    (tmp_path / "mine.toml").write_text(SYSTEM)
    monkeypatch.syspath_prepend(str(tmp_path))
    return systems.read_site(str(tmp_path / "mine.toml"))


def test_own_workload_and_own_system(own, tmp_path):
    sizes = [
        (1, 8, 2000),
        (1, 16, 50_000),
        (2, 8, 50_000),
        (4, 16, 20_000),
        (8, 8, 20_000),
        (8, 16, 100_000),
    ]
    configs = [
        config.make("words", devices=n, local_batch_size=size, sentences=all)
        for n, size, all in sizes
    ]
    asked = [config.make("words", devices=32, local_batch_size=8)]
    seen = worlds.taken("words", own, configs, TRUTH)
    fits.write_fit(tmp_path / "fit.json", fits.fit_runs(seen))
    more = replace(own, nodes=8)
    refused("with another nodes", fits.read, tmp_path / "fit.json", "words", more)
    fit = fits.read(tmp_path / "fit.json", "words", own)
    assert "fill" not in fit.names  # without workers nothing is fetched ahead
    truth = worlds.taken("words", own, asked, TRUTH)
    hours, (row,) = truth.time_s[0] / 3600, predict.forecasts(fit, asked)
    assert holds(row["time_h"], hours)
    assert row["energy_kWh"]["value"] == pytest.approx(
        hours * truth.power_W[0] * 32 / 1000, rel=0.1
    )
    assert row["energy_ram_kWh"]["value"] is None
    assert "nodes beyond 1: nothing measured" in " ".join(row["outside"])
    found = plan.make_plan(fit, grid(fit), {})
    assert max(run.devices for run in found.runs) == 32
    assert [*found.choices] == ["most frugal", "fastest", "balanced"]


def test_what_one_gpu_does_is_counted_as_the_trainers_do(published):
    """ResNet50 on 16 GPUs, the whole of ImageNet, by hand."""
    run = partial(study_run, local_batch_size=256)
    work = published.work_of([run(devices=16)])
    assert (
        work["nodes"],
        work["devices_of_node"],
        work["is_full"],
        work["passes"],
    ) == (4, 4, 1, 3)
    assert (
        work["trained"] == 1_281_167 // 16
        and work["evaluated"] == 1_281_167 // 16 + 50_000 // 16
    )
    assert work["updates"] == 312 and work["filled"] == 512
    assert work["allreduce_s"] == pytest.approx(2 * 15 / 16 * 25_557_032 * 4 / 25e9)
    alone = published.work_of([run(devices=2)])
    assert alone["is_full"] == 0 and alone["allreduce_s"] == pytest.approx(
        25_557_032 * 4 / 300e9
    )
    lasting = dict(persistent_workers=True, loader_workers=8)
    work = published.work_of([run(devices=16, **lasting)])
    assert work["passes"] == pytest.approx(0.03) and work["workers"] == 8


def test_the_equations_by_hand(published):
    """One configuration of R4, on a full node, term by term as the module's text has them."""
    samples = dict(training_samples=20_018, validation_samples=781)
    work = published.work_of([study_run(devices=4, **samples)])
    values = TRUTH | dict(
        tau=1e-3, evaluation=1 / 3, kappa_storage=0.5, kappa_nodes=0.5
    )
    times = model.times_by_cause_s(values, work)
    images = 5004 + (5004 + 195) / 3
    expected = dict(
        images=images * 1e-3,
        starts=6.0,
        fill=512e-3 * 1.1,
        updates=19 * 5e-3,
        contention=images * 1e-4,
    )
    expected["allreduce"] = 19 * 1.5 * 25_557_032 * 4 / 300e9 / 0.8
    assert {name: float(of[0]) / 100 for name, of in times.items()} == pytest.approx(
        expected
    )
    total = sum(expected.values())
    working = 1 - (expected["starts"] + expected["fill"]) / total
    _, power_W, _ = model.predict_times_and_powers(values, work)
    assert power_W[0] == pytest.approx(100 + 80 + 220 * working + 2 * 5004 / total)


def test_a_run_made_to_wait_does_so_between_its_steps(published):
    """Six steps of 67 ms, begun every 3 s, as the trainers' session does: five waits."""
    sizes = dict(devices=1, local_batch_size=64, training_samples=6 * 64, epochs=1)
    run = study_run(step_period_s=3.0, **sizes)
    times = model.times_by_cause_s(worlds.CLUSTER, published.work_of([run]))
    assert times["waiting"] == pytest.approx(5 * (3 - 0.067))


def weights(network):
    return sum(weight.numel() for weight in network.parameters())


def test_weights_of_a_forecast_are_those_of_the_networks():
    torchvision = pytest.importorskip("torchvision")
    from energynn.train.afno import AFNO

    assert config.RESNET50_WEIGHTS == weights(torchvision.models.resnet50())
    small = config.make("fourcastnet", patch_size=4, embed_dim=32, depth=2)
    network = AFNO((24, 48), 4, channels=3, embed_dim=32, depth=2)
    assert small.weights(24, 48, channels=3) == weights(network)
    assert (
        config.make("fourcastnet", preset="paper").epoch().gradient_bytes
        == 4 * 74_690_304
    )
    years = dict(training_years="1979-1980,1990", validation_years="2016")
    epoch = config.make("fourcastnet", preset="paper", **years).epoch()
    assert (epoch.training_samples, epoch.validation_samples) == (3 * 1460, 1460)


def measured(samples, devices, time_s, also=(), **more):
    """The part of a measured command's record that a forecast reads; also: what else was told."""
    told = dict(command="train.py", training_samples=samples, devices=devices)
    told.update(also)
    record = dict(workload="command", system="measured", name="mine", config=told)
    record |= dict(devices=devices, device_kind="gpu", device_name="GPU")
    record |= dict(
        machine={"gpus": [{}] * 4, "cores": 8}, training_time_s=float(time_s)
    )
    record |= dict(mean_power_total_W=300.0 * devices)
    record |= dict(energy_total_provenance="measured") | more
    return record_of(**record)


def two(also=(), **more):
    """Of 20,000 and 80,000 samples in 21 and 81 s on one device."""
    return [measured(n, 1, 1 + n / 1e3, also, **more) for n in (20_000, 80_000)]


def mine(*found, system="local"):
    """The runs of that command."""
    return runs.own_runs(found, "mine", systems.read_site(str(system)))


def fit_to(*found, **more):
    return fits.fit_runs(mine(*found, **more))


def test_measured_commands_are_forecast_and_planned(monkeypatch):
    """Worlds of a start, a cost of each sample and full nodes; three runs tell of longer ones."""
    site, held = systems.read_site("local"), []
    for seed in range(40):
        chance = np.random.default_rng(seed)
        start_s, sample_s = np.exp(
            chance.uniform(np.log([1, 1e-4]), np.log([20, 1e-2]))
        )
        full = 1 + 0.05 * np.exp(chance.standard_normal())

        def took_s(samples, devices, of=(start_s, sample_s, full)):
            slower = of[2] if devices == 4 else 1
            return of[0] + of[1] * slower * samples / devices

        made = [(20_000, 1), (80_000, 1), (160_000, 4)]
        found = [
            measured(*of, took_s(*of) * np.exp(0.015 * chance.standard_normal()))
            for of in made
        ]
        fit = fit_to(*found)
        for devices in (2, 4):
            row = foretold(fit, training_samples=10**6, devices=devices)
            held.append(holds(row["time_h"], took_s(10**6, devices) / 3600))
    assert np.mean(held) >= 0.9
    assert row["workload"] == "mine" and row["energy_kWh"]["value"] > 0
    monkeypatch.setattr(runs, "valid_records", lambda *_: found)
    rows, each = predict.compare_held_out_runs(None, site)
    assert rows[0]["workload"] == "mine" and each.empty
    found = plan.make_plan(fit, grid(fit), {})
    text = wording.plan_text(found)
    assert {run.devices for run in found.runs} == {1, 2, 3, 4}
    assert "batch" not in text.split("\n\n")[0]  # it is not known
    assert "what an all-reduce takes is not known" in text


NETWORK = {"gradient_bytes": 16_800_000}
BATCH = {"local_batch_size": 32}


def on_cores(told, seen, system="local"):
    """The fit to two runs of a command on one core of four."""
    here = dict(device_kind="cpu core", machine={"gpus": [], "cores": 4}, metrics=seen)
    told = {"local_batch_size": 32} | told
    return fit_to(*two(told, **here), system=system)


@pytest.mark.parametrize(
    "told, seen, missing",
    [
        (NETWORK, {}, ""),
        ({}, NETWORK, ""),
        ({}, {}, "--weights"),
        (NETWORK | {"local_batch_size": None}, {}, "--local-batch-size"),
    ],
)
def test_a_plan_goes_beyond_what_ran_where_the_exchange_is_known(told, seen, missing):
    """By --weights, or by window(model=...), with the local batch; the remedies that are told."""
    most = 1 if missing else 4
    fit = on_cores(told, seen)
    asked = grid(fit)
    assert {run.devices for run in asked} == set(range(1, most + 1))
    row = foretold(fit, devices=2)
    share = row["time_share_percent"]["allreduce"]["value"]
    assert (share > 1) == (most > 1)
    text = wording.plan_text(plan.make_plan(fit, asked, {}))
    assert ("on no more devices than ran: " in text) == (most == 1)
    for words in ("--weights", "--local-batch-size", "link_GB_per_s"):
        assert (words in str(row["outside"])) == (words in text) == (words == missing)


def test_a_command_starts_once_whatever_its_epochs():
    """A start of 20 s; 4 and 16 s of samples in four epochs, then 400 s in a hundred."""
    sizes = {"epochs": 4, "local_batch_size": 16}
    found = [measured(n, 1, 20 + n * 4 / 1e4, sizes) for n in (10_000, 40_000)]
    row = foretold(fit_to(*found), epochs=100)
    assert row["time_h"]["value"] == pytest.approx(420 / 3600, rel=0.03)
    assert "epochs beyond 4: nothing measured" in row["outside"]


def test_a_further_epoch_of_a_command_costs_what_runs_tell_of_it():
    """A start of 5 s, and 20 s more for each epoch behind the first."""

    def took_s(samples, epochs):
        return 5 + 20 * (epochs - 1) + 1e-3 * samples * epochs

    found = [
        measured(n, 1, took_s(n, epochs), BATCH | {"epochs": epochs})
        for n, epochs in ((10_000, 2), (40_000, 2), (20_000, 5))
    ]
    row = foretold(fit_to(*found), training_samples=400_000, epochs=3)
    assert row["time_h"]["value"] == pytest.approx(took_s(400_000, 3) / 3600, rel=0.05)


def test_a_system_is_described_by_what_a_forecast_reads(tmp_path):
    """Of a machine of one's own too, instead of what this one has."""
    path = tmp_path / "ws8.toml"
    read = partial(systems.read_site, str(path))
    path.write_text("devices_per_node = 8\nlink_GB_per_s = 25\n")
    assert predict.max_devices_of_site(read()) == 256
    path.write_text("devices_per_node = 1\nnodes = 256\n")
    assert predict.max_devices_of_site(read()) == 64
    path.write_text('scheduler = "local"\ndevices_per_node = 8\n')
    fit = on_cores(NETWORK, {}, path)
    assert grid(fit)[-1].devices == 8
    path.write_text("nodes = 8\n")
    refused("devices_per_node: is missing; say", read)
    path.write_text('scheduler = "none"\n')
    refused("scheduler: write one of slurm, local", read)


def test_runs_of_two_networks_are_no_fit():
    plain, told = measured(20_000, 1, 10.0), measured(20_000, 1, 10.0, NETWORK)
    refused("several recipes .*gradient_bytes 16800000.* by param", mine, plain, told)
    seen = replace(plain, metrics=NETWORK | {"loss": 0.1})
    assert [run.repeats for run in mine(told, seen).taken] == [2]


@pytest.mark.parametrize("cpu_W, idle_W", [(0, 0), (200, 0), (0, 60)])
def test_eight_gpus_of_a_light_host_are_forecast_from_one(cpu_W, idle_W, tmp_path):
    """One GPU drew 300 W, its host 9 W, each GPU beside it what it draws idle; the file knows no
    power, or that of another host.
    """
    plain = dict(component="gpu", device="", kind="energy", provenance="measured")
    gpus = [{"id": f"gpu_{number}"} | plain for number in range(8)]
    beside = dict(sensors=gpus, idle_power_gpu_before_W=8.0 * idle_W)
    path, found = tmp_path / "ws8.toml", []
    link = "gpu_link_GB_per_s = 300"
    path.write_text(f"devices_per_node = 8\nnodes = 1\n{link}\ncpu_W = {cpu_W}\n")
    for samples, size, time_s in (
        (400, 16, 4),
        (800, 16, 7),
        (1600, 16, 13),
        (1600, 8, 15),
    ):
        facts = {} | beside
        gpu_W = 300.0 + 7 * idle_W
        for part, power_W in {"gpu": gpu_W, "cpu": 9.0, "total": gpu_W + 9}.items():
            facts[f"mean_power_{part}_W"] = power_W
            facts[f"energy_{part}_J"] = power_W * time_s
            facts[f"energy_{part}_provenance"] = "measured"
        told = NETWORK | {"local_batch_size": size}
        found.append(measured(samples, 1, time_s, told, **facts))
    fit = fit_to(*found, system=path)
    row = foretold(fit, training_samples=100_000, epochs=10, devices=8)
    told, truth_kWh = row["energy_kWh"], 0.30113 * row["gpu_hours"]["value"]
    assert holds(told, truth_kWh)
    assert told["value"] == pytest.approx(truth_kWh, rel=0.1)
    of_gpus = row["energy_gpu_kWh"]["value"] / told["value"]
    assert of_gpus == pytest.approx(0.3 / 0.30113, rel=0.01), "whatever a file says"
    unknown = replace(found[0], idle_power_gpu_before_W=None)
    assert np.isnan(mine(unknown, system=path).taken[0].power_W)


@pytest.mark.parametrize("sizes", [NETWORK | BATCH, BATCH, {}])
def test_what_ran_on_several_gpus_is_fitted_though_nobody_told_of_their_link(sizes):
    """An exchange of 30 ms between two GPUs, in steps of 66 ms."""

    def took_s(samples, devices):
        share = samples / devices
        return 5 + 2e-3 * share + share / 32 * (2e-3 + 0.06 * (1 - 1 / devices))

    found = [
        measured(n, devices, took_s(n, devices), sizes)
        for n, devices in ((20_000, 1), (80_000, 1), (40_000, 2))
    ]
    row = foretold(fit_to(*found), training_samples=10**6, devices=2)
    assert row["time_h"]["value"] == pytest.approx(took_s(10**6, 2) / 3600, rel=0.03)
    few = fit_to(*found[:2])
    asked = [config.replace(few.runs.longest_run, devices=2)]
    advice = next_run.advise_next_run(few, asked)
    assert "next run: 2 device(s)" in advice["in_words"]
    elsewhere = fit_to(*found, system="horeka-a100")
    assert "these runs are of GPU" in str(foretold(elsewhere, devices=2))
    spread = replace(found[2], nodes=2, valid=True)
    assert "on 2 nodes, not 1" in runs._reason_to_leave_out(spread, elsewhere.runs.site)


def test_a_plan_has_the_local_batches_that_ran():
    sizes = {24: 21.0, 48: 20.0}
    found = [
        measured(20_000, 1, s, NETWORK | {"local_batch_size": n})
        for n, s in sizes.items()
    ]
    asked = grid(fit_to(*found))
    assert {run.local_batch_size for run in asked} == {24, 32, 48}


def test_a_command_without_samples_is_told_what_it_lacks():
    record = measured(1, 1, 10.0)
    mixed = [record, measured(2, 1, 20.0, device_name="another")]
    refused("several recipes or devices", mine, *mixed)
    estimated = measured(2, 1, 20.0, energy_total_provenance="estimated")
    seen = mine(record, estimated)
    fit = fits.fit_runs(seen.subset(np.array([False, True])))
    assert not fit.has_power
    asked = grid(fit)
    factors = predict.conversion_factors(None, 0.3, 2.0, 1.0)
    assert predict.forecasts(fit, asked, factors=factors)[0]["price"]["value"] is None
    for limits, priced in (({"energy_kWh": 1.0}, []), ({}, factors)):
        unknown = partial(plan.make_plan, factors=priced)
        refused("energies are not known", unknown, fit, asked, limits)
    of_core = measured(1, 1, 10.0, device_kind="cpu core")
    for system in ("horeka-a100", "gpu-h200"):
        refused(f"{system} has GPUs", mine, of_core, system=system)


def test_where_the_cpus_are_estimated_the_gpus_alone_are_forecast():
    """As on a rented GPU: its meter was read, and the estimate of its host is odd."""
    powers_W = dict(mean_power_gpu_W=250.0, mean_power_total_W=900.0)
    powers_W |= dict(
        energy_total_provenance="estimated", energy_gpu_provenance="measured"
    )
    found = two(**powers_W)
    fit = fit_to(*found)
    asked = [plan.base_run(fit, {"training_samples": 10**6})]
    (row,), (less,) = (predict.forecasts(fit, asked, share) for share in (1.0, 0.6))
    kWh = row["energy_kWh"]["value"]
    assert kWh == pytest.approx(0.25 * row["gpu_hours"]["value"], rel=0.05)
    assert less["energy_kWh"]["value"] / kWh == power_limit.limit_factors(0.6)[1, 0]
    assert row["provenance"].endswith("2 measured runs, energies of the GPUs alone")
    found[0] = replace(found[0], energy_gpu_provenance="estimated")
    assert not mine(*found).scope


@pytest.mark.parametrize("again_s, said", [(44.1, True), (22.0, False)])
def test_repeats_that_differ_are_not_averaged_without_a_word(again_s, said):
    fit = fit_to(*two(), measured(20_000, 1, again_s))
    words = "runs of one configuration differ by up to 110%: the machine was busy"
    assert (words in wording.fit_text(fit)) == said
    draws_more = measured(20_000, 1, 21.0, mean_power_total_W=700.0)
    fit = fit_to(*two(), draws_more)
    assert "differ by up to 133%" in wording.fit_text(fit)


def test_two_numbers_of_epochs_tell_a_start_from_samples():
    made = [measured(900, 1, 10 + 40 * n, BATCH | {"epochs": n}) for n in (2, 4)]
    fit = fits.fit_usable_runs(mine(*made))
    asked = foretold(fit, training_samples=900, epochs=90)
    assert holds(asked["time_h"], (10 + 90 * 40) / 3600)


def test_a_start_of_each_device_is_no_limit_of_a_storage(tmp_path):
    """3 s of it, and 80 s of samples, on up to eight GPUs of a box."""
    path = tmp_path / "ws8.toml"
    path.write_text("devices_per_node = 8\ngpu_link_GB_per_s = 300\n")
    sizes = NETWORK | BATCH
    made = [measured(80_000, n, 10 + 3 * n + 80 / n, sizes) for n in (1, 2, 4, 8)]
    asked = foretold(fit_to(*made, system=path), training_samples=8 * 10**6, devices=8)
    assert asked["time_h"]["value"] == pytest.approx((34 + 1000) / 3600, rel=0.1)


def test_epochs_beyond_those_that_ran_open_the_interval_upward():
    """Each epoch of the truth has a validation of 10 s, of which runs of one epoch tell nothing."""
    sizes = 20_000, 40_000, 80_000
    made = [measured(n, 1, 5 + n / 1e3 + 10, {"epochs": 1}) for n in sizes]
    fit = fit_to(*made)
    asked = foretold(fit, training_samples=60_000, epochs=90)
    same = foretold(fit, training_samples=60_000, epochs=1)
    assert holds(asked["time_h"], (5 + 90 * 70) / 3600)
    above = [row["time_h"]["high"] / row["time_h"]["value"] for row in (asked, same)]
    below = [row["time_h"]["low"] / row["time_h"]["value"] for row in (asked, same)]
    assert above[0] > 1.05 * above[1] and below[0] == pytest.approx(below[1], rel=0.05)


def test_epochs_fewer_than_ran_open_the_interval_downward():
    sizes = 20_000, 40_000, 80_000
    made = [measured(n, 1, 5 + 10 * (n / 1e3 + 10), {"epochs": 10}) for n in sizes]
    asked = foretold(fit_to(*made), training_samples=20_000, epochs=1)
    assert holds(asked["time_h"], (5 + 30) / 3600)


def half_width(scatter, repeats):
    """Of the hours of one device, where each of three configurations ran so often."""
    chance, found = np.random.default_rng(1), []
    for samples in (20_000, 80_000, 160_000):
        for _ in range(repeats):
            error = np.exp(scatter * chance.standard_normal())
            found.append(measured(samples, 1, (5 + samples / 1e3) * error))
    row = foretold(fit_to(*found), training_samples=10**6)["time_h"]
    return (row["high"] - row["low"]) / 2 / row["value"]


def test_repeats_tell_how_far_runs_scatter():
    assert half_width(0.01, 4) < 0.8 * half_width(0.01, 1), (
        "and narrow what scatters less"
    )
    assert half_width(0.1, 4) > 1.3 * half_width(0.01, 4)


@pytest.mark.parametrize(
    "several, is_limit", [((2, 8), False), ((2, 8, 8), False), ((2, 4, 8), True)]
)
def test_a_limit_within_a_node_is_that_of_two_numbers_of_devices(several, is_limit):
    """A loader feeds 3 devices: 8 alone may have been disturbed, also when made again."""
    made = [(20_000, 1), (80_000, 1), *((80_000, devices) for devices in several)]
    found = [
        measured(n, devices, 5 + n / 1e3 / min(devices, 3), machine=dict(gpus=[{}] * 8))
        for n, devices in made
    ]
    fit = fit_to(*found)
    assert ("storage" in fit.entered) == is_limit
    told = foretold(fit, training_samples=10**6, devices=7)["time_h"]
    is_right = told["value"] == pytest.approx((5 + 1e3 / 3) / 3600, rel=0.05)
    assert is_right == is_limit


def test_jobs_that_see_their_own_gpus_only_are_of_one_node():
    found = [
        measured(n, devices, 5 + n / 1e3 / devices, machine=dict(gpus=[{}] * devices))
        for n, devices in ((20_000, 1), (80_000, 1), (160_000, 4))
    ]
    assert mine(*found).site.devices_per_node == 4
