"""The training store of ERA5: a file of float32 for each year, read one state at a time, and
beside it what is in it.

``<year>.npy`` is (times, channels, latitude, longitude), uncompressed, so that it can be mapped
into memory; ``<year>.json`` has the valid times, the grid, the SHA-256, and count, mean and sum
of squared deviations of each channel; ``mean-<year>.npy`` is the mean state. Normalization and
climatology merge these over the training years, whichever they are.
"""

import os
import shlex
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np

from energynn.data import era5, era5_sources
from energynn.data.era5_values import CHANNELS, STEP_H, YearSource, hours_of_year
from energynn.experiment.config import parse_years
from energynn.host.progress import progress_meter
from energynn.host.reading import join_faults

STATES_READ_AHEAD = 8  # states that are read at once: 0.7 GB of memory at full size
READER_THREADS = 4  # threads that read them
# the published code's forecasts of the test year
TEST_INITIAL_CONDITIONS = 36
DAYS_BETWEEN_FORECASTS = 9
# forecasts of 6 h and 12 h, however many steps are trained on (section 3.3.1)
TEST_LEAD_STEPS = 2


class YearNote(msgspec.Struct):
    """Tell of <year>.npy what <year>.json holds; the last three have a value for each channel."""

    source: str
    channels: list[str]
    latitude_deg: list[float]
    longitude_deg: list[float]
    hours_since_1970: list[int]
    count: list[float]
    mean: list[float]
    squared_deviations: list[float]

    @property
    def grid(self) -> tuple[list, ...]:
        """Return what is the same in all years of a training: channels, latitudes, longitudes."""
        return self.channels, self.latitude_deg, self.longitude_deg


def write_store(source: str, out: Path, years: list[int]) -> list[str]:
    """Write the store of these years to ``out`` from a source that ``era5_sources.open_year``
    knows.

    Years that are there stay; one that was interrupted is made anew. Several calls at the same
    time must have different years. Returns what a person should know: which years are not whole,
    and what their files leave open. Raises ValueError naming what is wrong with the source, if
    possible before anything is written.
    """
    out.mkdir(parents=True, exist_ok=True)
    missing = [year for year in years if not (out / f"{year}.npy").is_file()]
    with join_faults(source):
        sources = {year: era5_sources.open_year(source, year) for year in missing}
        times = sum(len(opened.hours) for opened in sources.values())
    advance = progress_meter("era5", times, "states")
    for year, opened in sources.items():
        with join_faults(out):
            _write_year(opened, out / f"{year}.npy", source, advance)
    remarks = {opened.remark for opened in sources.values()} - {""}
    for year in years:
        count = len(_read_year_note(out, year).hours_since_1970)
        whole = len(hours_of_year(year))
        if count < whole:
            remarks.add(
                f"{year}: {count} of {whole} times; no sample crosses a gap; "
                f"after `rm {shlex.quote(f'{out}/{year}.npy')}` it is made anew"
            )
    return sorted(remarks)


def _write_year(
    source: YearSource,
    path: Path,
    origin: str,
    advance: Callable[[float], None],
) -> None:
    """Write the states of a year, and then what is in them; the file gets its name once all of
    that is there.
    """
    grid = len(CHANNELS), len(source.latitude_deg), len(source.longitude_deg)
    shape = len(source.hours), *grid
    total = np.zeros(grid)
    means = []
    variances = []
    for older in path.parent.glob(f"{path.stem}*.part"):
        older.unlink()  # of a call that was killed; one that goes on ends without it
    part = path.with_suffix(f".{os.getpid()}.part")
    with open(part, "wb") as file:
        np.lib.format.write_array_header_1_0(
            file, {"descr": "<f4", "fortran_order": False, "shape": shape}
        )
        for state, mean, variance in _read_states(source, origin):
            file.write(state)
            total += state
            means.append(mean)
            variances.append(variance)
            advance(1)
        file.flush()
        os.fsync(file.fileno())
    if not part.exists():
        raise ValueError(f"another call writes {path.stem}, too; let it end")
    np.save(path.with_name(f"mean-{path.name}"), (total / shape[0]).astype(np.float32))
    values = shape[0] * shape[2] * shape[3]
    path.with_suffix(".json").write_bytes(
        msgspec.json.encode(
            YearNote(
                source=origin,
                channels=list(CHANNELS),
                latitude_deg=source.latitude_deg.tolist(),
                longitude_deg=source.longitude_deg.tolist(),
                hours_since_1970=source.hours.tolist(),
                count=[values] * len(CHANNELS),
                mean=np.mean(means, axis=0).tolist(),
                squared_deviations=(
                    values * (np.mean(variances, axis=0) + np.var(means, axis=0))
                ).tolist(),
            )
        )
    )
    os.replace(part, path)


def _read_states(source: YearSource, origin: str) -> Iterator[tuple[np.ndarray, ...]]:
    """Read the states of a year in order, some at the same time, and mean and variance of their
    channels; a fault is that of the source's ``origin``.
    """

    def read_state_and_moments(index: int) -> tuple[np.ndarray, ...]:
        state = np.ascontiguousarray(source.read(index), dtype="<f4")
        mean = state.mean(axis=(1, 2), dtype=np.float64)
        return state, mean, state.var(axis=(1, 2), dtype=np.float64)

    indices = range(len(source.hours))
    with join_faults(origin), ThreadPoolExecutor(READER_THREADS) as pool:
        for first in indices[::STATES_READ_AHEAD]:
            yield from pool.map(
                read_state_and_moments, indices[first : first + STATES_READ_AHEAD]
            )


def channel_mean_and_std(root: Path, years: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Compute mean and (population) standard deviation of each channel over these years,
    (channels,) float64.
    """
    notes = [_read_year_note(root, year) for year in years]
    count = np.array([note.count for note in notes])
    means = np.array([note.mean for note in notes])
    variances = np.array([note.squared_deviations for note in notes]) / count
    mean = np.average(means, axis=0, weights=count)
    return mean, np.sqrt(
        np.average(variances + (means - mean) ** 2, axis=0, weights=count)
    )


def mean_state(root: Path, years: list[int]) -> np.ndarray:
    """Compute the mean state over these years, (channels, latitude, longitude) float64."""
    counts = [len(_read_year_note(root, year).hours_since_1970) for year in years]
    means = (np.load(root / f"mean-{year}.npy") for year in years)
    parts = zip(counts, means, strict=True)
    return sum(count / sum(counts) * mean.astype(np.float64) for count, mean in parts)


class StateSequences:
    """Read normalized states at t, t + 6 h, ... when they are indexed, by a DataLoader for
    example.

    ``self[i]`` is (steps + 1, channels, latitude, longitude) float32. Sequences are made from the
    valid times: none crosses a gap, and the end of a year's file is none.
    """

    def __init__(
        self,
        root: Path,
        years: list[int],
        steps: int,
        mean: np.ndarray,
        std: np.ndarray,
    ):
        notes = [_read_year_note(root, year) for year in years]
        self.hours = np.concatenate([note.hours_since_1970 for note in notes])
        self.places = []
        for year, note in zip(years, notes, strict=True):
            path = root / f"{year}.npy"
            with join_faults(f"copy {path} again"):  # one that was cut ends no training
                np.load(path, mmap_mode="r")
            times = range(len(note.hours_since_1970))
            self.places += [(path, time) for time in times]
        wanted = self.hours[:, None] + STEP_H * np.arange(steps + 1)
        complete = np.isin(wanted, self.hours).all(axis=1)
        # of the states of each sequence
        self.rows = np.searchsorted(self.hours, wanted[complete])
        if len(self.rows) == 0:
            raise ValueError(
                f"{root}: no {steps + 1} times {STEP_H} h apart in {years}"
            )
        self.grid = tuple(map(len, notes[0].grid))
        self.mean = mean.astype(np.float32)[:, None, None]
        self.scale = (1 / std).astype(np.float32)[:, None, None]

    @property
    def shape(self) -> tuple[int, ...]:
        return *self.rows.shape, *self.grid

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> np.ndarray:
        sequence = np.empty(self.shape[1:], np.float32)
        for state, row in zip(sequence, self.rows[index], strict=True):
            path, time = self.places[row]
            np.subtract(np.load(path, mmap_mode="r")[time], self.mean, out=state)
            state *= self.scale
        return sequence


def load_splits(
    root: Path, steps: int, *years: str
) -> tuple[StateSequences, StateSequences, era5.TestSet]:
    """Open the splits of these years ("1979-2015", "2016-2017", "2019"), normalized by the first
    of them, the training.

    Of the last, the test, only the forecasts of the published code, 6 h and 12 h: from 36 initial
    conditions, nine days apart from 1 January on. The climatology is the mean over the training
    years, without seasons. Raises ValueError if a year is missing or in two splits.
    """
    parsed = [parse_years(text) for text in years]
    if len(set().union(*parsed)) < sum(map(len, parsed)):
        raise ValueError(
            f"years: {', '.join(years)} overlap; what is tested must not have been trained on"
        )
    notes = [_read_year_note(root, year) for each in parsed for year in each]
    if any(note.grid != notes[0].grid for note in notes):
        raise ValueError(
            f"{root}: the grids of {', '.join(years)} differ; prepare them from one source"
        )
    mean, std = channel_mean_and_std(root, parsed[0])
    training, validation = (
        StateSequences(root, each, steps, mean, std) for each in parsed[:2]
    )
    test = StateSequences(root, parsed[2], TEST_LEAD_STEPS, mean, std)
    first_hour = hours_of_year(parsed[2][0])[0]
    chosen = (test.hours[test.rows[:, 0]] - first_hour) % (
        24 * DAYS_BETWEEN_FORECASTS
    ) == 0
    test.rows = test.rows[chosen][:TEST_INITIAL_CONDITIONS]
    if not len(test.rows):
        raise ValueError(
            f"test_years: {years[2]} has no time {DAYS_BETWEEN_FORECASTS} days apart from "
            "1 January, where forecasts begin; choose another"
        )
    weights = era5.latitude_weights(np.array(notes[0].latitude_deg))
    usual = (mean_state(root, parsed[0]) - mean[:, None, None]) / std[:, None, None]
    facts = [values.astype(np.float32) for values in (std, weights, usual)]
    z500 = CHANNELS.index("z500")
    scored_steps = tuple(range(1, TEST_LEAD_STEPS + 1))
    return training, validation, era5.TestSet(test, *facts, STEP_H, z500, scored_steps)


def _read_year_note(root: Path, year: int) -> YearNote:
    """Read what a store tells of a year. Raises ValueError naming the file if it is missing or
    damaged.
    """
    path = root / f"{year}.json"
    if not any(root.glob(f"{year}.*")):
        raise ValueError(
            f"{root}: has no year {year}; `energynn data era5 --years {year}` makes it, or choose "
            "others (training_years, validation_years, test_years)"
        )
    with join_faults(path):
        return msgspec.json.decode(path.read_bytes(), type=YearNote)
