"""ERA5 states for FourCastNet: the embedded ensemble, and how it is split and normalized."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from energynn.experiment.config import SYNTHETIC_STATES

GRAVITY_M_S2 = 9.80665  # geopotential / gravity = geopotential height
# Those of FourCastNet's twenty that the embedded file has, in its order.
ENSEMBLE_CHANNELS = ("t850", "z850", "z500", "t500")
Z500 = ENSEMBLE_CHANNELS.index("z500")
LEAD_H = 12  # hours between two states of the embedded file


@dataclass(frozen=True)
class TestSet:
    """Hold normalized states to test on, and what their scores need; training and validation are
    such sequences alone.

    sequences: (samples, steps + 1, channels, latitude, longitude) float32, or what is read as
    such when indexed; std: (channels,) in the channels' units, by which they are normalized;
    latitude_weights: (latitude,), mean 1; climatology: (channels, latitude, longitude), the time
    mean of the training data, normalized; lead_h: hours of a step; z500: the channel, None
    where none is a height; scored_steps: those after which a forecast is compared with the truth.
    """

    sequences: np.ndarray
    std: np.ndarray
    latitude_weights: np.ndarray
    climatology: np.ndarray
    lead_h: int
    z500: int | None
    scored_steps: tuple[int, ...]


def load_ensemble(path: Path, steps: int) -> tuple[np.ndarray, TestSet]:
    """Read training and test sequences of ``steps`` (1 or 2) consecutive 12 h steps from the
    embedded ensemble.

    Four times t0..t3, 12 h apart, ten members each. Members are near copies of each other, so the
    split is by time: t0, t1, t2 train (20 samples of one step, 10 of two), and the test (10
    samples) predicts t3, which no training sample contains. The last latitude row, a pole, is
    dropped as in FourCastNet (721 -> 720, here 61 -> 60). Mean and standard deviation come from
    t0, t1, t2 alone, and so does the climatology: 36 h are a poor one. Only the last step of a
    test sequence is new, and scored.
    """
    states, latitude = read_ensemble_states(path)
    states = states[..., :-1, :]
    latitude = latitude[:-1]
    last = states.shape[1] - 1
    training = states[:, :last]
    over = dict(axis=(0, 1, 3, 4), dtype=np.float64)
    mean = training.mean(**over).astype(np.float32)
    std = training.std(**over).astype(np.float32)
    normalized = (states - mean[:, None, None]) / std[:, None, None]
    train = np.concatenate(
        [normalized[:, start : start + steps + 1] for start in range(last - steps)]
    )
    test = normalized[:, last - steps :]
    climatology = (
        normalized[:, :last].mean(axis=(0, 1), dtype=np.float64).astype(np.float32)
    )
    weights = latitude_weights(latitude)
    return train, TestSet(
        test, std, weights, climatology, LEAD_H, Z500, scored_steps=(steps,)
    )


def make_random_splits(steps: int) -> tuple[np.ndarray, TestSet]:
    """Make random states of the paper's size, one sequence again and again: a training's cost,
    not what it learns.
    """
    state = (20, 720, 1440)
    sequence = np.random.default_rng(0).standard_normal(
        (1, steps + 1, *state), dtype=np.float32
    )
    sequences = np.broadcast_to(sequence, (SYNTHETIC_STATES, steps + 1, *state))
    std = np.ones(20, np.float32)
    climatology = np.zeros(state, np.float32)
    weights = latitude_weights(90 - 0.25 * np.arange(720))
    return sequences, TestSet(
        sequence, std, weights, climatology, 6, None, scored_steps=(steps,)
    )


def read_ensemble_states(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Read states (member, time, channel, latitude, longitude) float32 in K and m2/s2, and the
    latitudes in degrees.

    ``xarray.open_dataset(path, engine="scipy")`` reads the same file; here scipy alone does,
    because xarray would bring pandas into the trainers.
    """
    from scipy.io import netcdf_file

    with netcdf_file(path, mmap=False, maskandscale=True) as file:
        states = np.stack(
            [file.variables[name][:] for name in ENSEMBLE_CHANNELS], axis=2
        )
        latitude = np.array(file.variables["latitude"][:], dtype=np.float64)
    return states.astype(np.float32), latitude


def latitude_weights(latitude_deg: np.ndarray) -> np.ndarray:
    """Compute weights H cos(latitude) / sum cos(latitude) of H grid rows, as FourCastNet's
    metric has them.
    """
    cosine = np.cos(np.deg2rad(latitude_deg)).clip(min=0.0)
    return (len(latitude_deg) * cosine / cosine.sum()).astype(np.float32)
