"""Both trainers on an imagined GPU: no tensor is left on the CPU, and the same is computed."""

import numpy as np
import pytest

from energynn import records
from energynn.experiment.config import PRESETS
from energynn.host.files import REPOSITORY
from tests.processes import energynn, with_gpus
from tests.train.conftest import AFNO, HERE, IMAGES

FAST = PRESETS["fast"]
RESNET50 = IMAGES | dict(epochs=2)
RECIPES = {
    "resnet50-fast": (
        "resnet50",
        RESNET50 | FAST["resnet50"] | dict(synchronous_phases=True),
    ),
    "resnet50-device": ("resnet50", RESNET50 | dict(image_loading="device")),
    "fourcastnet-fast": (
        "fourcastnet",
        AFNO
        | FAST["fourcastnet"]
        | dict(
            epochs=2,
            activation_checkpointing=True,
            accumulation_steps=2,
            filter_modes="zonal",
        ),
    ),
}
IMAGINED = """
import pytest
from tests.train.imagined_gpu import imagined
gpu = imagined(pytest.MonkeyPatch())
gpu.__enter__()
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_a_training_stays_on_its_gpu(tmp_path, train, name):
    workload, parameters = RECIPES[name]
    here = train(tmp_path / "cpu", workload, device="cpu", **parameters)
    there = train(
        tmp_path / "gpu",
        workload,
        device="gpu",
        patch=IMAGINED,
        **parameters,
    )
    assert there.events()[0]["device"] == "imagined"
    (end,) = there.of_kind("training_end")
    assert end["memory_gpu_peak_B"] == 10**9
    rounding = 0.02 if "fast" in name or "device" in name else 1e-3
    np.testing.assert_allclose(there.losses, here.losses, rtol=rounding)


def start(tmp_path, sizes, fakes):
    """`energynn run` where NVML lists a GPU of 300 W, of which its limit leaves 200 W."""
    gpus = [dict(high_W=300.0, limit_W=200.0, update_s=0.1, averaged=True)]
    environment = with_gpus(gpus, *fakes)
    words = f"run workload=resnet50 --runs-dir {tmp_path}/runs"
    given = [f"{name}={value}" for name, value in sizes.items()]
    return energynn(words, *given, cwd=REPOSITORY, env=environment)


@pytest.mark.slow
def test_a_whole_run_has_its_gpus_energy_memory_and_phases(tmp_path):
    """From the command to the record: the energy is known from the training time."""
    sizes = dict(sampling_period_s=0.02, idle_ready_s=0.5)
    done = start(
        tmp_path,
        RESNET50 | FAST["resnet50"] | sizes,
        [HERE / "imagined"],
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (folder,) = records.list_run_folders(tmp_path / "runs")
    record = records.read_record_if_any(folder)
    assert record.valid, record.invalid_reasons
    assert (record.device_kind, record.device_name) == ("gpu", "a fake H100")
    assert (
        record.memory_gpu_peak_B == 10**9
        and record.energy_gpu_provenance == "simulated"
    )
    assert record.energy_gpu_J == pytest.approx(200 * record.training_time_s, rel=0.01)
    assert record.idle_power_gpu_ready_W == pytest.approx(200, rel=0.05)
    assert record.power_limit_gpu_W == record.power_limit_gpu_end_W == 200
    lengths_s = {each["phase"]: each["time_s"] for each in record.energy_phases[:-1]}
    assert (
        min(lengths_s[name] for name in ("forward", "backward", "host_to_device")) > 0
    )
    assert lengths_s["idle"] < 0.5 * record.training_time_s
    assert records.check(tmp_path / "runs") == []


@pytest.mark.slow
def test_a_gpu_that_torch_does_not_see_is_not_trained_for_on_a_core(tmp_path):
    assert "torch sees none" in start(tmp_path, RESNET50, []).stderr
