import numpy as np
import pytest
import xarray as xr

from energynn import manifests
from energynn.data import era5

STEPS = {"pre-training": 1, "fine-tuning": 2}


@pytest.fixture(scope="module")
def ensemble():
    return manifests.verify("era5_ensemble") / "era5_ensemble.nc"


def test_the_states_are_plausible_weather(ensemble):
    with xr.open_dataset(ensemble, engine="scipy") as dataset:
        assert dict(dataset.sizes) == {"member": 10, "time": 4, "latitude": 61, "longitude": 120}
        assert tuple(dataset.data_vars) == era5.CHANNELS
        assert (np.diff(dataset["time"].values) == np.timedelta64(era5.LEAD_H, "h")).all()
        assert 53000 < float(dataset["z500"].mean()) < 56000 and dataset["z500"].attrs["units"] == "m2 s-2"
        assert 260 < float(dataset["t850"].mean()) < 285
        assert "Copernicus" in dataset.attrs["attribution"]


@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS)
def test_the_split_is_by_time(ensemble, steps):
    training, test = era5.load_ensemble(ensemble, steps)
    assert training.sequences.shape == (10 * (3 - steps), steps + 1, 4, 60, 120)
    assert test.sequences.shape == (10, steps + 1, 4, 60, 120)
    seen = {state.tobytes() for sequence in training.sequences for state in sequence}
    assert not any(sequence[-1].tobytes() in seen for sequence in test.sequences), "the test predicts a state of the training"
    assert len(seen) == 30  # all ten members at all three training times


def test_normalization_comes_from_the_training_times(ensemble):
    training, test = era5.load_ensemble(ensemble, 2)
    assert np.allclose(training.sequences.mean(axis=(0, 1, 3, 4)), 0, atol=2e-3)
    assert np.allclose(training.sequences.std(axis=(0, 1, 3, 4)), 1, atol=2e-3)
    with xr.open_dataset(ensemble, engine="scipy") as dataset:
        truth = dataset["z500"].isel(time=3, member=4).values[:-1]
    restored = test.sequences[4, -1, era5.Z500] * test.std[era5.Z500] + test.mean[era5.Z500]
    assert np.allclose(restored, truth, rtol=1e-5)


def test_latitude_weights_have_mean_one_and_vanish_at_the_poles():
    weights = era5.latitude_weights(np.arange(90, -90, -3))
    assert weights.mean() == pytest.approx(1) and weights[0] == pytest.approx(0, abs=1e-6)
    assert weights.argmax() == 30 and weights[30] / weights[10] == pytest.approx(1 / np.cos(np.deg2rad(60)))


def test_nan_is_named(tmp_path, ensemble):
    with xr.open_dataset(ensemble, engine="scipy") as dataset:
        broken = dataset.load().drop_encoding()
    broken["z500"][2, 1, 5, 5] = np.nan
    broken.to_netcdf(tmp_path / "broken.nc", engine="scipy")
    with pytest.raises(ValueError, match="NaN in z500 at time 1, member 2"):
        era5.load_ensemble(tmp_path / "broken.nc", 1)
