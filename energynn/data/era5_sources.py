"""ERA5 as others publish it: FourCastNet's yearly HDF5 files, and Zarr or NetCDF stores through xarray.

Each year becomes a ``Source``: FourCastNet's twenty channels in its order, every six hours, from north to south.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from energynn.reading import require_file, require_plain_hdf5

STEP_H = 6
CHANNELS = (
    "u10", "v10", "t2m", "sp", "mslp", "t850", "u1000", "v1000", "z1000", "u850", "v850", "z850", "u500", "v500",
    "z500", "t500", "z50", "r500", "r850", "tcwv",
)  # fmt: skip
# Our name -> those of WeatherBench2 and ARCO-ERA5, and of the Climate Data Store.
NAMES = {
    "u10": ("10m_u_component_of_wind", "u10"),
    "v10": ("10m_v_component_of_wind", "v10"),
    "t2m": ("2m_temperature", "t2m"),
    "sp": ("surface_pressure", "sp"),
    "mslp": ("mean_sea_level_pressure", "msl"),
    "tcwv": ("total_column_water_vapour", "tcwv"),
    "t": ("temperature", "t"),
    "u": ("u_component_of_wind", "u"),
    "v": ("v_component_of_wind", "v"),
    "z": ("geopotential", "z"),
    "r": ("relative_humidity", "r"),
    "q": ("specific_humidity", "q"),
}
LEVEL_DIMENSIONS = ("level", "pressure_level", "isobaricInhPa")
# What can occur on Earth, with room: another unit or a fill value is outside. Unit, least, most.
RANGES = {
    "u10": ("m/s", -120, 120),
    "v10": ("m/s", -120, 120),
    "t2m": ("K", 150, 350),
    "sp": ("Pa", 30_000, 120_000),
    "mslp": ("Pa", 80_000, 120_000),
    "tcwv": ("kg/m2", -5, 150),
    "t": ("K", 150, 350),
    "u": ("m/s", -200, 200),
    "v": ("m/s", -200, 200),
    "z": ("m2/s2", -15_000, 250_000),
    "z1000": ("m2/s2", -15_000, 15_000),
    "z850": ("m2/s2", 5_000, 25_000),
    "z500": ("m2/s2", 35_000, 70_000),
    "z50": ("m2/s2", 150_000, 230_000),
    "r": ("%", -50, 300),
    "q": ("kg/kg", -0.01, 0.1),
}
# How else stores write these units, in lower case, without spaces and signs of powers.
SPELLED = {"m/s": "ms-1", "K": "kelvin", "Pa": "pascal", "kg/m2": "kgm-2", "m2/s2": "m2s-2", "kg/kg": "kgkg-1"}
MOST_OF_A_FRACTION = 3  # relative humidity that is nowhere above it is no percentage


def _levels_hPa(name: str) -> list[int]:
    """Levels of a variable among the channels; none at the surface."""
    return [int(channel[1:]) for channel in CHANNELS if channel not in NAMES and channel[0] == name]


# All levels of a variable are read at once, because a chunk of such a store holds every level.
FIELDS = {name: _levels_hPa(name) for name in NAMES if name != "q"}


@dataclass(frozen=True)
class Source:
    """The states of one year: ``read(index)`` gives one, (channels, latitude, longitude) float32 in SI units and %.

    hours: (times,) int, since 1970-01-01 00 UTC, rising, multiples of six. The south pole is left out, as in
    FourCastNet (721 rows -> 720). ``read`` may be called from several threads; it raises ValueError naming variable,
    time and file if a value is missing.
    """

    hours: np.ndarray
    latitude_deg: np.ndarray
    longitude_deg: np.ndarray
    read: Callable[[int], np.ndarray]

    @property
    def shape(self) -> tuple[int, int, int]:
        return len(CHANNELS), len(self.latitude_deg), len(self.longitude_deg)


def open_year(place: str, year: int) -> Source:
    """One year of a folder of yearly HDF5 files (``<year>.h5``), or of a Zarr store or NetCDF file, folder or URL.

    Raises ValueError if there is nothing of that year, a variable or level is missing, or the shape is another.
    """
    found = [*Path(place).glob(f"{year}.h5"), *Path(place).glob(f"*/{year}.h5")]  # train/, test/, out_of_sample/
    try:
        source = _open_hdf5(found[0], year) if found else _open_xarray(place, year)
    except (LookupError, TypeError, AttributeError, ArithmeticError) as error:
        raise ValueError(f"{place}: no ERA5 that can be read ({type(error).__name__}: {error})") from error
    if len(source.hours) == 0:
        raise ValueError(f"{place}: no 00, 06, 12 or 18 UTC of {year}; other years (--years) or another --source?")
    return source


def hours_of_year(year: int) -> np.ndarray:
    """The 6-hourly times of a year, 1460 or 1464 of them, in hours since 1970."""
    first, end = (np.datetime64(f"{y}-01-01", "h").astype(int) for y in (year, year + 1))
    return np.arange(first, end, STEP_H)


def utc(hour: int) -> str:
    return f"{datetime.datetime(1970, 1, 1) + datetime.timedelta(hours=int(hour)):%Y-%m-%d %H UTC}"


def _require_physical(values: np.ndarray, name: str, hour: int, file: str | Path) -> None:
    """Raise ValueError naming variable, time and file for values that cannot be ERA5's: NaN, fills, other units."""
    low, high = float(values.min()), float(values.max())
    if np.isnan(low):
        raise ValueError(f"{file}: NaN in {name} at {utc(hour)}; get this file or time again")
    unit, least, most = RANGES.get(name) or RANGES[name[0]]
    if low < least or high > most:
        raise ValueError(
            f"{file}: {name} is {low:g} to {high:g} at {utc(hour)}, not within {least:g} to {most:g} {unit}; "
            "is it in another unit, or are values missing?"
        )
    if name[0] == "r" and high < MOST_OF_A_FRACTION:
        raise ValueError(f"{file}: {name} is {low:g} to {high:g} at {utc(hour)}, a fraction instead of %")
    if low == high:
        raise ValueError(f"{file}: {name} is {low:g} everywhere at {utc(hour)}; get this file or time again")


def _require_unit(variable, name: str, place: str) -> None:
    """Raise ValueError for a variable that says that it has another unit; it need not say one, or says 1."""
    unit, said = RANGES[name][0], str(variable.attrs.get("units", ""))
    if re.sub(r"[\s.*^]", "", said).lower() not in ("", "1", unit.lower(), SPELLED.get(unit)):
        raise ValueError(f"{place}: the units of {variable.name} are {said[:40]!r}; convert it to {unit}")


def _require_north_first(surface_pressure: np.ndarray, hour: int, file: str | Path) -> None:
    """Antarctica is high, and the Arctic Ocean is not: the pressure tells which of the two is the first row."""
    north_Pa, south_Pa = (float(row.mean()) for row in surface_pressure[[0, -1]])
    if north_Pa < south_Pa:
        raise ValueError(
            f"{file}: sp is {north_Pa:g} Pa in the first row and {south_Pa:g} Pa in the last at {utc(hour)}; "
            "rows must go from north to south"
        )


def _open_hdf5(path: Path, year: int) -> Source:
    """FourCastNet's layout: ``fields`` float32 (times, 21, 721, 1440), the last channel (sst) unused, no coordinates.

    Its times are those from 1 January 00 UTC on: a file of 1460 in a leap year ends on 30 December.
    """
    import h5py

    try:
        require_file(path)
        file = h5py.File(path)
        require_plain_hdf5(file)
        fields = file.get("fields")
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: not a whole HDF5 file ({error}); copy it again") from error
    shape, kind = getattr(fields, "shape", ()), getattr(fields, "dtype", None)
    if len(shape) != 4 or shape[1] != 21 or shape[3] != 2 * (shape[2] - 1) or kind != np.float32:
        raise ValueError(
            f"{path}: `fields` must be float32 of shape (times, 21, rows, 2 (rows - 1)), as (1460, 21, 721, 1440); "
            f"found {kind} {shape}"
        )
    times, _, rows, columns = shape
    hours = hours_of_year(year)
    if times > len(hours):
        raise ValueError(f"{path}: {times} times, but {year} has {len(hours)} six-hourly ones; is its name right?")

    def read(index: int) -> np.ndarray:
        state = fields[index, : len(CHANNELS), :-1]
        for channel, plane in zip(CHANNELS, state, strict=True):
            _require_physical(plane, channel, hours[index], path)
        _require_north_first(state[CHANNELS.index("sp")], hours[index], path)
        return state

    return Source(hours[:times], np.linspace(90, -90, rows)[:-1], np.arange(columns) * 360 / columns, read)


@lru_cache(maxsize=1)
def _datasets(place: str) -> list:
    """The lazily opened store, or the files of a folder; without dask, which would only be in the way."""
    import xarray as xr  # here, because it brings pandas, which the trainers do without

    path = Path(place)
    if "://" in place or ".zarr" in path.name:
        options = {"storage_options": {"token": "anon"}} if place.startswith("gs://") else {}
        try:
            return [xr.open_zarr(place, chunks=None, **options)]
        except Exception as error:  # each protocol's library has errors of its own, and one may be missing
            raise ValueError(f"{place}: no Zarr store that can be opened ({type(error).__name__}: {error})") from error
    files = [path] if path.is_file() else sorted(path.rglob("*.nc"))
    if not files:
        raise ValueError(
            f"{place}: neither <year>.h5 of every year, nor Zarr, nor NetCDF files; look at --source and --years"
        )
    opened = []
    for file in files:
        require_file(file)
        try:
            opened.append(xr.open_dataset(file))
        except Exception as error:  # what is no NetCDF fails in many ways
            reason = str(error).partition("\n")[0]
            raise ValueError(f"{file}: no NetCDF file that can be opened ({reason})") from error
    return opened


def _open_xarray(place: str, year: int) -> Source:
    """Hourly or 6-hourly stores; variables may lie in several files. Rows from south to north are turned round."""
    stores = _Stores(place, year)
    return Source(np.array(stores.hours, dtype=int), stores.latitude_deg, stores.longitude_deg, stores.read)


def _even_step(degrees: np.ndarray) -> float:
    """From each coordinate to the next; NaN where that differs by more than a hundredth."""
    steps = np.diff(degrees)
    return float(steps.mean()) if len(steps) and np.allclose(steps, steps.mean(), rtol=0.01, atol=0) else np.nan


def _spans_poles(latitude: np.ndarray) -> bool:
    """Whether even rows, or their middles, go from one pole to the other; the row of the south pole may be missing."""
    step, ends = abs(_even_step(latitude)), (latitude[0], latitude[-1])
    north, south = 90 - max(ends), 90 + min(ends)
    return 0 <= north <= 0.51 * step and 0 <= south <= 1.01 * step


class _Stores:
    """One year of what xarray has opened; ``read`` gives the states as ``Source`` has them."""

    def __init__(self, place: str, year: int):
        datasets = _datasets(place)
        self.place = place
        # In which datasets, and where.
        self.places: dict[int, list] = {hour: [] for hour in hours_of_year(year).tolist()}
        for dataset in datasets:
            self._find_times(dataset)
            for name in ("latitude", "longitude"):
                if not np.array_equal(dataset[name].values, datasets[0][name].values, equal_nan=True):
                    raise ValueError(f"{place}: the {name}s of its files differ; all must have one grid")
        self.hours = [hour for hour, places in self.places.items() if places]
        latitude, longitude = (np.asarray(datasets[0][name].values, float) for name in ("latitude", "longitude"))
        if not _spans_poles(latitude):
            raise ValueError(f"{place}: latitudes must go from pole to pole evenly, they begin {latitude[:4].tolist()}")
        step = _even_step(longitude)
        if longitude[0] != 0 or not abs(360 - len(longitude) * step) < step / 2:
            ends = f"{longitude[0]} to {longitude[-1]}"
            raise ValueError(f"{place}: longitudes must rise from 0 evenly, once around the Earth, are {ends}")
        self.stored_shape = (len(latitude), len(longitude))
        north_first = latitude[0] > latitude[-1]
        self.rows = slice(None) if north_first else slice(None, None, -1)
        latitude = latitude[self.rows]
        self.latitude_deg = latitude[:-1] if latitude[-1] == -90 else latitude
        self.longitude_deg = longitude

    def _find_times(self, dataset) -> None:
        """Note where this dataset has the times of the year."""
        name = "time" if "time" in dataset.dims else "valid_time"
        if not {name, "latitude", "longitude"} <= set(dataset.dims):
            found = ", ".join(dataset.dims)
            raise ValueError(f"{self.place}: dimensions must be time, latitude, longitude; found {found}")
        seconds = dataset[name].values.astype("datetime64[s]").astype(np.int64)
        wanted = np.array(list(self.places)) * 3600
        for index in np.flatnonzero(np.isin(seconds, wanted)).tolist():
            self.places[int(seconds[index]) // 3600].append((dataset, {name: index}))

    def read(self, index: int) -> np.ndarray:
        """The state of a time, (channels, latitude, longitude). Raises ValueError naming what is missing."""
        hour = self.hours[index]
        state = np.empty((len(CHANNELS), len(self.latitude_deg), len(self.longitude_deg)), np.float32)
        for name, levels_hPa in FIELDS.items():
            values = self._field(hour, name, levels_hPa)
            if values is None and name == "r":
                temperature_K = state[[CHANNELS.index(f"t{level}") for level in levels_hPa]]  # t comes before r
                values = self._humidity_percent(hour, levels_hPa, temperature_K)
            if values is None:
                levels = f" at {levels_hPa} hPa" if levels_hPa else ""
                raise ValueError(f"{self.place}: no {' or '.join(NAMES[name])}{levels} at {utc(hour)}")
            for level, plane in zip(levels_hPa or [""], values, strict=True):
                state[CHANNELS.index(f"{name}{level}")] = plane
        return state

    def _humidity_percent(self, hour: int, levels_hPa: list[int], temperature_K: np.ndarray) -> np.ndarray | None:
        """Relative humidity from specific humidity, or None if the store has not got that either."""
        humidity = self._field(hour, "q", levels_hPa)
        if humidity is None:
            return None
        pressure_Pa = 100 * np.array(levels_hPa, np.float32)[:, None, None]
        return relative_humidity_percent(temperature_K, humidity, pressure_Pa)

    def _field(self, hour: int, name: str, levels_hPa: list[int]) -> np.ndarray | None:
        """Levels of a variable, (levels, latitude, longitude), or None if the store has not got it."""
        for dataset, at in self.places[hour]:
            for variable in [dataset[full] for full in NAMES[name] if full in dataset]:
                # WeatherBench2 derives a fraction over water alone; ERA5's own, in %, is over ice in the cold.
                if name == "r" and variable.attrs.get("units") != "%":
                    continue
                values = self._planes(variable, at, levels_hPa)
                if values is None:
                    continue
                _require_unit(variable, name, self.place)
                for level, plane in zip(levels_hPa or [""], values, strict=True):
                    _require_physical(plane, f"{name}{level}", hour, dataset.encoding.get("source", self.place))
                return values
        return None

    def _planes(self, variable, at: dict[str, int], levels_hPa: list[int]) -> np.ndarray | None:
        """Levels of a variable at one time, from north to south, or None if it has not got them all."""
        values = variable.isel(at)
        if levels_hPa:
            dimension = next((name for name in LEVEL_DIMENSIONS if name in values.dims), None)
            if dimension is None:
                known = ", ".join(LEVEL_DIMENSIONS)
                raise ValueError(
                    f"{self.place}: {variable.name} has no dimension {known}, but {', '.join(values.dims)}"
                )
            if not set(levels_hPa) <= set(values[dimension].values.tolist()):
                return None
            values = values.sel({dimension: levels_hPa})
        values = values.transpose(..., "latitude", "longitude").values.astype(np.float32, copy=False)
        if values.shape[-2:] != self.stored_shape:
            raise ValueError(f"{self.place}: {variable.name} is {values.shape[-2:]}; all must have one grid")
        return values.reshape(-1, *self.stored_shape)[:, self.rows][:, : len(self.latitude_deg)]


def relative_humidity_percent(
    temperature_K: np.ndarray, specific_humidity: np.ndarray, pressure_Pa: np.ndarray
) -> np.ndarray:
    """Relative humidity as ERA5 has it: over water above 0 C, over ice below -23 C, and mixed between.

    Source: IFS documentation Cy47r3, part IV, chapter 12 (Tetens' formula with Buck's constants, quadratic mixing);
    vapour pressure from specific humidity with R_dry / R_vapour = 0.621981.
    """

    def saturation_Pa(a3: float, a4_K: float) -> np.ndarray:
        return 611.21 * np.exp(a3 * (temperature_K - 273.16) / (temperature_K - a4_K))

    water = ((np.clip(temperature_K, 250.16, 273.16) - 250.16) / 23) ** 2
    mixed_Pa = water * saturation_Pa(17.502, 32.19) + (1 - water) * saturation_Pa(22.587, -0.7)
    return 100 * pressure_Pa * specific_humidity / (0.621981 + 0.378019 * specific_humidity) / mixed_Pa
