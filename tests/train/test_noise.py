"""The gradient noise scale against its closed form, and what our hook does to the gradients: nothing, or rounding."""

from pathlib import Path

import numpy as np
import pytest
import torch

from energynn import config as configuration
from energynn.train import gradients
from energynn.train.distributed import World
from tests.ranks import start_ranks

SIZE, STEPS, LOCAL = 40, 300, 4  # as in rank_noise.py
NORM2 = SIZE * 0.1**2
VARIANCE = float((np.linspace(0.2, 1.0, SIZE) ** 2).sum())


def result(folder: Path, ranks: int, mode: str) -> dict:
    done = start_ranks(ranks, Path(__file__).with_name("rank_noise.py"), folder / f"{mode}.npz", mode)
    assert done.returncode == 0, done.stdout
    return dict(np.load(folder / f"{mode}.npz"))


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """Three ranks: a third is no power of two, so that another order of operations would show in the last bits."""
    folder = tmp_path_factory.mktemp("three")
    modes = {"torch": 3, "noise": 3, "bfloat16": 3, "accumulation": 1}
    return {mode: result(folder, ranks, mode) for mode, ranks in modes.items()}


def test_estimates_are_exact_for_the_expected_norms():
    few, many = NORM2 + VARIANCE / 4, NORM2 + VARIANCE / 12
    found = gradients.noise_scale(few, many, 4, 12)
    assert found["gradient_norm2"] == pytest.approx(NORM2) and found["gradient_variance"] == pytest.approx(VARIANCE)
    assert found["gradient_noise_scale_samples"] == pytest.approx(VARIANCE / NORM2)




@pytest.mark.parametrize("mode", ["noise", "accumulation"])
def test_the_known_mean_and_covariance_are_found(three, mode):
    """From three ranks, and from one rank whose gradients of three local batches add up."""
    found = {name: float(value) for name, value in three[mode].items() if name != "gradients"}
    # Over 300 steps the estimates scatter by about two per cent (variance) and six (norm).
    assert found["gradient_variance"] == pytest.approx(VARIANCE, rel=0.08)
    assert found["gradient_norm2"] == pytest.approx(NORM2, rel=0.25)
    assert found["gradient_noise_scale_samples"] == pytest.approx(VARIANCE / NORM2, rel=0.25)


def test_looking_at_norms_leaves_every_bit_of_the_gradients(three):
    assert np.array_equal(three["noise"]["gradients"], three["torch"]["gradients"])


def test_compressed_gradients_are_rounded(three):
    plain, rounded = three["torch"]["gradients"], three["bfloat16"]["gradients"]
    off = np.abs(rounded - plain) / np.abs(plain).max()
    assert 0 < off.max() < 3 * 2**-8


AFNO = dict(patch_size=6, embed_dim=32, depth=1, num_blocks=4, devices=2, epochs=2, save_weights=True)


def test_a_training_has_the_same_bits_with_it_and_tells_it_each_epoch(tmp_path, train):
    plain = train(tmp_path / "plain", "fourcastnet", **AFNO)
    looking = train(tmp_path / "looking", "fourcastnet", gradient_noise_steps=3, **AFNO)
    assert (plain.status, looking.status) == (0, 0), plain.output + looking.output
    assert plain.losses == looking.losses
    digests = [[e["sha256"] for e in run.events() if e["event"] == "weights_saved"] for run in (plain, looking)]
    assert digests[0] == digests[1]
    epochs = [event for event in looking.events() if event["event"] == "epoch"]
    assert len(epochs) == 2 and all(event["gradient_variance"] > 0 for event in epochs)
    assert epochs[-1]["gradient_norm2"] == looking.events()[-2]["metrics"]["gradient_norm2"]
    assert not [event for event in plain.events() if "gradient_norm2" in event]




def test_one_device_and_a_workload_that_keeps_its_gradients_are_refused():
    with pytest.raises(ValueError, match="gradient_noise_steps: needs several devices"):
        configuration.make("resnet50", gradient_noise_steps=1)
    world = World(0, 1, 0, torch.device("cpu"), "")
    alone = gradients.Gradients(configuration.make("resnet50", gradient_compression="bfloat16"), world)
    with pytest.raises(ValueError, match="resnet50 has neither; call session.gradients.share"):
        alone.require_shared()
