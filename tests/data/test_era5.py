import numpy as np
import pytest

from energynn.data import era5, manifests

FILE = manifests.root("era5_ensemble") / "era5_ensemble.nc"


def test_embedded_states_are_era5():
    states, latitude = era5.read_ensemble_states(FILE)
    assert states.shape == (10, 4, 4, 61, 120) and states.dtype == np.float32
    assert latitude[0] == 90 and latitude[-1] == -90
    # Climatology of FourCastNet's training years (mean, standard deviation) with room for two
    # days in January.
    for channel, mean, std in (
        ("t850", 274.6, 15.6),
        ("z500", 54115, 3353),
        ("t500", 252.9, 13.1),
    ):
        field = states[:, :, era5.ENSEMBLE_CHANNELS.index(channel)]
        assert (
            abs(field.mean() - mean) < 0.1 * std
            and 0.85 * std < field.std() < 1.15 * std
        )


@pytest.mark.parametrize("steps, training_samples", [(1, 20), (2, 10)])
def test_split_is_by_time_and_the_last_time_is_never_trained_on(
    steps, training_samples
):
    training, test = era5.load_ensemble(FILE, steps)
    # without the last row of latitude
    states = era5.read_ensemble_states(FILE)[0][:, :, :, :-1]
    mean = states[:, :3].mean(axis=(0, 1, 3, 4))
    parts = [states[:, start : start + steps + 1] for start in range(4 - steps)]
    splits = (training, np.concatenate(parts[:-1])), (test.sequences, parts[-1])
    for sequences, expected in splits:
        values = sequences * test.std[:, None, None] + mean[:, None, None]
        assert values.shape == expected.shape and np.allclose(
            values, expected, atol=0.1
        )
    assert len(training) == training_samples
