"""The training store of ERA5: a file of float32 for each year, read one state at a time, and beside it what is in it.

``<year>.npy`` is (times, channels, latitude, longitude), uncompressed, so that it can be mapped into memory;
``<year>.json`` has the valid times, the grid, the SHA-256, and count, mean and sum of squared deviations of each
channel; ``mean-<year>.npy`` is the mean state. Normalization and climatology merge these over the training years,
whichever they are.
"""

from __future__ import annotations

import hashlib
import io
import math
import os
import re
import shutil
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache, reduce
from pathlib import Path

import msgspec
import numpy as np

from energynn.config import FourCastNetConfig
from energynn.data import era5, era5_sources
from energynn.data.era5_sources import CHANNELS, STEP_H, Source, hours_of_year, utc
from energynn.files import sha256, whole, write_json
from energynn.progress import meter
from energynn.reading import require_file

AHEAD = 8  # states that are read ahead: 0.7 GB of memory at full size
CHUNK = 2**16  # values that are normalized at once, and stay in the processor's cache meanwhile
HEADER_B = 128  # of NumPy's format, for every shape that occurs
MOMENTS = ("count", "mean", "squared_deviations")
INITIAL_CONDITIONS, DAYS_BETWEEN = 36, 9  # the published code's forecasts of the test year
TEST_STEPS = 2  # forecasts of 6 h and 12 h, however many steps are trained on (section 3.3.1)


class Note(msgspec.Struct):
    """What <year>.json tells of <year>.npy; the last three have a value for each channel."""

    source: str
    channels: list[str]
    latitude_deg: list[float]
    longitude_deg: list[float]
    hours_since_1970: list[int]
    sha256: str
    count: list[float]
    mean: list[float]
    squared_deviations: list[float]

    def moments(self) -> np.ndarray:
        """(3, channels) float64, as ``moments`` gives them of one state."""
        return np.array([self.count, self.mean, self.squared_deviations])


def parse_years(text: str) -> list[int]:
    """The years of a text like "1979-2017,2019". Raises ValueError for anything else."""
    parts = [part.partition("-") for part in text.split(",")]
    has_form = re.fullmatch(r"\d{4}(-\d{4})?(,\d{4}(-\d{4})?)*", text)
    if not has_form or any(last and last < first for first, _, last in parts):
        raise ValueError(f"years: must be like 1979-2015 or 1979-2017,2019; got {text!r}")
    return sorted(
        {year for first, _, last in parts for year in range(int(first), int(last or first) + 1)}
    )


# ------------------------------------------------------------------------------------------------------------- writing


def prepare(
    source: str,
    out: Path,
    years: list[int],
    workers: int = 4,
    progress: Callable[[str], None] = print,
) -> None:
    """Write the store of these years to ``out`` from a source that ``era5_sources.open_year`` knows.

    Years that are there stay; one that was interrupted is made anew. Several calls at the same time must have different
    years. Raises ValueError naming what is wrong with the source, if possible before anything is written, or if there
    is no room.
    """
    out.mkdir(parents=True, exist_ok=True)
    missing = [year for year in years if not (out / f"{year}.npy").is_file()]
    sources = {year: era5_sources.open_year(source, year) for year in missing}
    all_B = sum(len(opened.hours) * 4 * math.prod(opened.shape) for opened in sources.values())
    free_B = shutil.disk_usage(out).free
    if all_B > free_B:
        sizes = f"{all_B / 1e9:.1f} GB to write, {free_B / 1e9:.1f} GB free"
        raise ValueError(f"{out}: {sizes}; give another --out")
    advance = meter("era5", all_B / 1e9, "GB", progress)
    with ThreadPoolExecutor(workers) as pool:
        for year, opened in sources.items():
            _write_year(opened, out / f"{year}.npy", source, pool, advance)
            all_times = len(hours_of_year(year))
            progress(f"{year}: {len(opened.hours)} of {all_times} six-hourly times in {out}")


def _write_year(
    source: Source,
    path: Path,
    origin: str,
    pool: ThreadPoolExecutor,
    advance: Callable[[float], None],
) -> None:
    """Write the states of a year, and then what is in them; the file gets its name once all of that is there."""
    collected = np.zeros((len(MOMENTS), len(CHANNELS)))
    total = np.zeros(source.shape)
    digest, part = hashlib.sha256(), path.with_suffix(".part")
    header = _npy_header((len(source.hours), *source.shape))
    with open(part, "wb") as file:
        file.write(header)
        digest.update(header)
        for state in _states(source, origin, pool):
            file.write(state)
            digest.update(state)
            collected = merge(collected, moments(state))
            total += state
            advance(state.nbytes / 1e9)
        file.flush()
        os.fsync(file.fileno())
    with whole(path.with_name(f"mean-{path.name}")) as mean:
        np.save(mean, (total / len(source.hours)).astype(np.float32))
    note = Note(
        origin,
        list(CHANNELS),
        source.latitude_deg.tolist(),
        source.longitude_deg.tolist(),
        source.hours.tolist(),
        digest.hexdigest(),
        *collected.tolist(),
    )
    write_json(path.with_suffix(".json"), msgspec.to_builtins(note))
    os.replace(part, path)


def _states(source: Source, origin: str, pool: ThreadPoolExecutor) -> Iterator[np.ndarray]:
    """The states of a year in order; the next ones are read while one is written."""
    reading: deque[Future] = deque()
    for index in range(len(source.hours)):
        while len(reading) < AHEAD and index + len(reading) < len(source.hours):
            reading.append(pool.submit(source.read, index + len(reading)))
        try:
            yield np.ascontiguousarray(reading.popleft().result(), dtype="<f4")
        except (RuntimeError, LookupError, TypeError, OSError) as error:
            what = f"{utc(source.hours[index])} cannot be read ({type(error).__name__}: {error})"
            raise ValueError(f"{origin}: {what}; get it again") from error


def _npy_header(shape: tuple[int, ...]) -> bytes:
    """What NumPy's format has before the values of a float32 array."""
    header = io.BytesIO()
    facts = {"descr": "<f4", "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(header, facts)
    assert len(header.getvalue()) == HEADER_B
    return header.getvalue()


# ---------------------------------------------------------------------------------------------------------- statistics


def moments(state: np.ndarray) -> np.ndarray:
    """(3, channels) float64: count, mean and sum of squared deviations of (channels, latitude, longitude)."""
    collected = np.empty((len(MOMENTS), len(state)))
    for channel, plane in enumerate(state):
        values = plane.astype(np.float64).ravel()
        mean = values.mean()
        values -= mean
        collected[:, channel] = values.size, mean, values.dot(values)
    return collected


def merge(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Moments of two sets of values together (Chan, Golub and LeVeque 1983: stable however many are added)."""
    count = one[0] + other[0]
    difference = other[1] - one[1]
    mean = one[1] + difference * other[0] / count
    return np.array([count, mean, one[2] + other[2] + difference**2 * one[0] * other[0] / count])


def statistics(root: Path, years: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Mean and (population) standard deviation of each channel over these years, (channels,) float64."""
    count, mean, squared_deviations = reduce(merge, [_note(root, year).moments() for year in years])
    return mean, np.sqrt(squared_deviations / count)


def climatology(root: Path, years: list[int]) -> np.ndarray:
    """Mean state over these years, (channels, latitude, longitude) float64."""
    counts = [len(_note(root, year).hours_since_1970) for year in years]
    means = (np.load(root / f"mean-{year}.npy") for year in years)
    parts = zip(counts, means, strict=True)
    return sum(count / sum(counts) * mean.astype(np.float64) for count, mean in parts)


# ------------------------------------------------------------------------------------------------------------- reading


class Sequences:
    """Normalized states at t, t + 6 h, ..., as an array that is read when it is indexed, by a DataLoader for example.

    ``self[i]`` is (steps + 1, channels, latitude, longitude) float32. Sequences are made from the valid times: none
    crosses a gap, and the end of a year's file is none. Raises ValueError naming variable, time and file if a value
    is missing.
    """

    def __init__(self, root: Path, years: list[int], steps: int, mean: np.ndarray, std: np.ndarray):
        notes = [_note(root, year) for year in years]
        grids = [(note.channels, note.latitude_deg, note.longitude_deg) for note in notes]
        if any(grid != grids[0] for grid in grids):
            raise ValueError(f"{root}: the grids of {years} differ; prepare them from one source")
        self.hours = np.concatenate([note.hours_since_1970 for note in notes])
        self.places = []
        for year, note in zip(years, notes, strict=True):
            path = root / f"{year}.npy"
            self.places += [(path, index) for index in range(len(note.hours_since_1970))]
        wanted = self.hours[:, None] + STEP_H * np.arange(steps + 1)
        rows = np.searchsorted(self.hours, wanted).clip(max=len(self.hours) - 1)
        self.rows = rows[
            (self.hours[rows] == wanted).all(axis=1)
        ]  # indices of the states of each sequence
        self.state_shape = tuple(map(len, grids[0]))
        self.mean, self.scale = mean.astype(np.float32), (1 / std).astype(np.float32)
        if len(self.rows) == 0:
            raise ValueError(
                f"{root}: no {steps + 1} times in sequence, {STEP_H} h apart, in {years}"
            )

    @property
    def shape(self) -> tuple[int, ...]:
        return *self.rows.shape, *self.state_shape

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> np.ndarray:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> np.ndarray:
        """A whole batch, read to where it stays; PyTorch's loader asks for it if there is this method."""
        batch = np.empty((len(indices), *self.shape[1:]), np.float32)
        for sequence, index in zip(batch, indices, strict=True):
            for state, row in zip(sequence, self.rows[index], strict=True):
                self._read(row, state)
        return batch

    def _read(self, row: int, state: np.ndarray) -> None:
        path, index = self.places[row]
        stored, descriptor = _map(path)
        # The disk begins with all of it at once.
        os.posix_fadvise(
            descriptor, HEADER_B + index * state.nbytes, state.nbytes, os.POSIX_FADV_WILLNEED
        )
        planes = zip(
            stored[index].reshape(len(state), -1), state.reshape(len(state), -1), strict=True
        )
        for channel, (source, plane) in enumerate(planes):
            for first in range(0, plane.size, CHUNK):
                values = plane[first : first + CHUNK]
                np.subtract(source[first : first + CHUNK], self.mean[channel], out=values)
                values *= self.scale[channel]
                if np.isnan(values.min()):
                    raise ValueError(
                        f"{path}: NaN in {CHANNELS[channel]} at {utc(self.hours[row])}; prepare it again"
                    )


def splits_read(config: FourCastNetConfig) -> tuple[str, str, str]:
    """The years that a run trains on, validates on and tests on."""
    return config.training_years, config.validation_years, config.test_years


def files_read(config: FourCastNetConfig) -> list[str]:
    """The files that a run reads."""
    years = [year for text in splits_read(config) for year in parse_years(text)]
    return [name for year in years for name in files_of(year)]


def files_of(year: int) -> tuple[str, str, str]:
    """The files of a year in a store."""
    return f"{year}.npy", f"{year}.json", f"mean-{year}.npy"


def load(root: Path, steps: int, *years: str) -> list[era5.Split]:
    """The splits of these years ("1979-2015", "2016-2017", "2019"), normalized by the first of them, the training.

    Of the last, the test, only the forecasts of the published code, 6 h and 12 h: from 36 initial conditions, nine days
    apart from 1 January on. The climatology is the mean over the training years, without seasons. Raises ValueError if
    a year is missing or in two splits.
    """
    parsed = [parse_years(text) for text in years]
    if len(set().union(*parsed)) < sum(map(len, parsed)):
        raise ValueError(
            f"years: {', '.join(years)} overlap; what is tested must not have been trained on"
        )
    mean, std = statistics(root, parsed[0])
    training, validation = (Sequences(root, each, steps, mean, std) for each in parsed[:2])
    test, first_hour = (
        Sequences(root, parsed[2], TEST_STEPS, mean, std),
        hours_of_year(parsed[2][0])[0],
    )
    chosen = (test.hours[test.rows[:, 0]] - first_hour) % (24 * DAYS_BETWEEN) == 0
    test.rows = test.rows[chosen][:INITIAL_CONDITIONS]
    weights = era5.latitude_weights(np.array(_note(root, parsed[0][0]).latitude_deg))
    usual = (climatology(root, parsed[0]) - mean[:, None, None]) / std[:, None, None]
    facts = [values.astype(np.float32) for values in (mean, std, weights, usual)]
    scored = (STEP_H, CHANNELS.index("z500"), tuple(range(1, TEST_STEPS + 1)))
    return [era5.Split(each, *facts, *scored) for each in (training, validation, test)]


def _note(root: Path, year: int) -> Note:
    if missing := [name for name in files_of(year) if not (root / name).is_file()]:
        raise ValueError(f"{root}: no {', '.join(missing)}; `energynn data era5` makes them")
    path = root / f"{year}.json"
    try:
        require_file(path)
        return msgspec.json.decode(path.read_bytes(), type=Note)
    except Exception as error:
        raise ValueError(f"{path}: {error}; prepare this year again") from error


@cache
def _map(path: Path) -> tuple[np.ndarray, int]:
    """A year's file, mapped once in each process, and its descriptor."""
    return np.asarray(np.load(path, mmap_mode="r")), os.open(path, os.O_RDONLY)


# -------------------------------------------------------------------------------------------------------- the manifest


def describe(root: Path) -> tuple[dict[str, str], dict]:
    """File name -> SHA-256, as it was while the store was written, and what a manifest says besides.

    Raises ValueError if there is no store, or a year of it is not complete.
    """
    years = sorted(int(path.stem) for path in root.glob("[0-9]*.npy"))
    unfinished = sorted(path.name for path in root.glob("*.part"))
    if unfinished or not years:
        raise ValueError(
            f"era5: {root} has {unfinished or 'no year'}; `energynn data era5` goes on with it"
        )
    sums, times = {}, {}
    for year in years:
        note = _note(root, year)
        sums |= {name: sha256(root / name) for name in (f"{year}.json", f"mean-{year}.npy")}
        sums[f"{year}.npy"] = note.sha256
        times[str(year)] = len(note.hours_since_1970)
    return sums, {"energynn:times": times, "energynn:source": note.source}
