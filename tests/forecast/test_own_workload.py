"""A workload that the package does not know takes the same path: all that is needed of it, its configuration tells."""

import numpy as np
import pytest

from energynn import config
from energynn.cluster import systems
from energynn.forecast import calibration, model, plan, predict, runs
from energynn.forecast.calibrate import Observations
from energynn.forecast.model import READINGS
from energynn.forecast.runs import Runs

MODULE = """
from dataclasses import dataclass
from energynn.config import Epoch, RunConfig, parameter

@dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    workload: str = "words"
    dataset: str = "books"
    local_batch_size: int = 8
    global_batch_size: int = 8
    epochs: int = 3
    learning_rate: float = 0.1
    sentences: int = parameter(100_000, least=1)

    def epoch(self):
        return Epoch(training_samples=self.sentences, validation_samples=1000, gradient_bytes=500_000_000)
"""
TRUTH = dict(tau=2e-2, t_start=2.0, fill=1.0, t_update=5e-3, efficiency=0.8, kappa=0.1, kappa_storage=0.0)
TRUTH |= dict(host=400.0, fed=300.0, idle=80.0, image_J=2.0)
SYSTEM = """scheduler = "slurm"
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
    return systems.site(str(tmp_path / "mine.toml"))


def test_own_workload_and_own_system(own, tmp_path):
    sizes = [(1, 8, 2000), (1, 16, 50_000), (2, 8, 50_000), (4, 16, 20_000), (8, 8, 20_000), (8, 16, 100_000)]
    configs = [config.make("words", devices=n, local_batch_size=size, sentences=all) for n, size, all in sizes]
    asked = [config.make("words", devices=32, local_batch_size=8)]
    time_s, power_W = model.predict(TRUTH, runs.works(own, configs + asked, (0, 0), 0), READINGS["loader-bound"])
    seen = Observations(runs.works(own, configs, (0, 0), 0), time_s[:-1], power_W[:-1], ("",) * len(configs))
    made = calibration.make(Runs("words", own, configs, seen, (0, 0), "measured", {"cpu": 300.0}, []))
    assert "fill" not in made.fit.priors  # without workers nothing is fetched ahead
    calibration.write(tmp_path / "fit.json", made, {})
    made = calibration.for_workload(tmp_path / "fit.json", "words", "mine")
    (row,) = predict.rows(made, asked)
    assert row["time_h"]["low"] < time_s[-1] / 3600 < row["time_h"]["high"]
    energy_kWh = time_s[-1] * power_W[-1] * 32 / 3.6e6
    assert row["energy_kWh"]["value"] == pytest.approx(energy_kWh, rel=0.1)
    assert row["energy_cpu_kWh"]["value"] == pytest.approx(row["time_h"]["value"] * 4 * 0.3)  # as measured on nodes
    assert row["energy_ram_kWh"]["value"] is None
    assert "no calibrated run had several nodes" in " ".join(row["outside"])
    run = plan.base_run(made, {})
    found = plan.make(made, run, *plan.grid(made, run, None), {})
    assert found.work.devices.max() == 32 and set(found.choices) == {"fastest", "most frugal", "balanced"}
    with pytest.raises(ValueError, match="devices: 64 asked, mine has 32"):
        plan.grid(made, run, (1, 64))


def test_what_one_gpu_does_is_counted_as_the_trainers_do(a100):
    """ResNet50 on 16 GPUs, the whole of ImageNet, by hand."""
    run = config.make("resnet50", preset="paper", devices=16, local_batch_size=256)
    work = runs.work(a100, run, (0, 0), 4)
    assert (work.nodes, work.devices_of_node, work.is_full, work.passes) == (4, 4, 1, 3)
    assert work.trained == 1_281_167 // 16 and work.evaluated == 1_281_167 // 16 + 50_000 // 16
    assert work.updates == 312 and work.filled == 512
    assert work.allreduce_s == pytest.approx(2 * 15 / 16 * 25_557_032 * 4 / 25e9)
    alone = runs.work(a100, config.make("resnet50", preset="paper", devices=2, local_batch_size=256), (0, 0), 4)
    assert alone.is_full == 0 and alone.allreduce_s == pytest.approx(25_557_032 * 4 / 300e9)
    lasting = config.make("resnet50", preset="paper", devices=16, persistent_workers=True, loader_workers=8)
    work = runs.work(a100, lasting, (0, 0), 4)
    assert work.passes == pytest.approx(0.03) and work.workers == 2 and work.filled == pytest.approx(512 * 7 / 3)


def test_the_equations_by_hand(a100):
    """One configuration of R4, on a full node, term by term as the module's text has them."""
    run = config.make("resnet50", preset="paper", devices=4, training_samples=20_018, validation_samples=781)
    work = runs.work(a100, run, (0, 0), 4)
    values = TRUTH | dict(tau=1e-3, kappa_storage=0.5)
    times = model.times_s(values, work, READINGS["GPU-bound"])
    images = 5004 + (5004 + 195) / 3
    expected = dict(images=images * 1e-3, starts=6.0, fill=512e-3 * 1.1, updates=19 * 5e-3, contention=images * 1e-4)
    expected["allreduce"] = 19 * 1.5 * 25_557_032 * 4 / 300e9 / 0.8
    assert {name: float(of[0]) / 100 for name, of in times.items()} == pytest.approx(expected)
    total = sum(expected.values())
    waiting = (expected["starts"] + expected["fill"]) / total
    watts = {name: float(of[0]) for name, of in model.powers_W(values, work, times).items()}
    assert watts == pytest.approx(dict(host=100, fed=300 * (1 - waiting), idle=80 * waiting, images=2 * 5004 / total))


def test_weights_of_fourcastnet_are_those_of_its_network():
    pytest.importorskip("torch")
    from energynn.models.afno import AFNO

    small = config.make("fourcastnet", patch_size=4, embed_dim=32, depth=2)
    network = AFNO((24, 48), 4, in_chans=3, out_chans=3, embed_dim=32, depth=2)
    assert small.weights(3, 24, 48) == sum(weight.numel() for weight in network.parameters())
    assert config.make("fourcastnet", preset="paper").epoch().gradient_bytes == 4 * 74_690_304
    years = dict(training_years="1979-1980,1990", validation_years="2016")
    epoch = config.make("fourcastnet", preset="paper", **years).epoch()
    assert (epoch.training_samples, epoch.validation_samples) == (3 * 1460, 1460)


def test_resnet50_has_the_weights_that_the_forecast_counts():
    pytest.importorskip("torchvision")
    import torchvision

    network = torchvision.models.resnet50()
    assert config.RESNET50_WEIGHTS == sum(weight.numel() for weight in network.parameters())


def test_several_numbers_of_devices_at_once_are_as_one_by_one(a100):
    run = config.make("resnet50", preset="paper")
    devices, sizes = np.array([1, 4, 64]), np.array([256, 32, 16])
    together = runs.work(a100, run, (0, 0), 4, devices=devices, local_batch_size=sizes)
    for index, (n, size) in enumerate(zip(devices.tolist(), sizes.tolist(), strict=True)):
        alone = runs.work(a100, config.make("resnet50", preset="paper", devices=n, local_batch_size=size), (0, 0), 4)
        for name, value in vars(alone).items():
            assert getattr(together, name)[index] == value[0], name
