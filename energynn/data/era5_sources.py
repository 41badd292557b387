"""ERA5 as others publish it: FourCastNet's yearly HDF5 files, and Zarr or NetCDF stores through xarray.

Each year becomes a ``Source``: FourCastNet's twenty channels in its order, every six hours, from north to south.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

STEP_H = 6
CHANNELS = (
    "u10", "v10", "t2m", "sp", "mslp", "t850", "u1000", "v1000", "z1000", "u850", "v850", "z850", "u500", "v500",
    "z500", "t500", "z50", "r500", "r850", "tcwv",
)  # fmt: skip
# Our name -> those of WeatherBench2 and ARCO-ERA5, and of the Climate Data Store.
NAMES = {
    "u10": ("10m_u_component_of_wind", "u10"), "v10": ("10m_v_component_of_wind", "v10"),
    "t2m": ("2m_temperature", "t2m"), "sp": ("surface_pressure", "sp"), "mslp": ("mean_sea_level_pressure", "msl"),
    "tcwv": ("total_column_water_vapour", "tcwv"), "t": ("temperature", "t"), "u": ("u_component_of_wind", "u"),
    "v": ("v_component_of_wind", "v"), "z": ("geopotential", "z"), "r": ("relative_humidity", "r"),
    "q": ("specific_humidity", "q"),
}  # fmt: skip
# What is read at once, because a chunk of such a store holds every level: name -> levels in hPa, none at the surface.
FIELDS = {
    name: [int(channel[1:]) for channel in CHANNELS if channel not in NAMES and channel[0] == name]
    for name in NAMES if name != "q"
}  # fmt: skip


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
    source = _open_hdf5(found[0], year) if found else _open_xarray(place, year)
    if len(source.hours) == 0:
        raise ValueError(f"{place}: no 00, 06, 12 or 18 UTC of {year}; other years (--years) or another --source?")
    return source


def hours_of_year(year: int) -> np.ndarray:
    """The 6-hourly times of a year, 1460 or 1464 of them, in hours since 1970."""
    first, end = (np.datetime64(f"{y}-01-01", "h").astype(int) for y in (year, year + 1))
    return np.arange(first, end, STEP_H)


def utc(hour: int) -> str:
    return f"{datetime.datetime(1970, 1, 1) + datetime.timedelta(hours=int(hour)):%Y-%m-%d %H UTC}"


def _require_no_nan(values: np.ndarray, name: str, hour: int, file: str | Path) -> None:
    if np.isnan(values).any():
        raise ValueError(f"{file}: NaN in {name} at {utc(hour)}; get this file or time again")


def _open_hdf5(path: Path, year: int) -> Source:
    """FourCastNet's layout: ``fields`` float32 (times, 21, 721, 1440), the last channel (sst) unused, no coordinates.

    Its times are those from 1 January 00 UTC on: a file of 1460 in a leap year ends on 30 December.
    """
    import h5py

    try:
        fields = h5py.File(path).get("fields")
    except OSError as error:
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
            _require_no_nan(plane, channel, hours[index], path)
        return state

    return Source(hours[:times], np.linspace(90, -90, rows)[:-1], np.arange(columns) * 360 / columns, read)


@lru_cache(maxsize=1)
def _datasets(place: str) -> list:
    """The lazily opened store, or the files of a folder; without dask, which would only be in the way."""
    import xarray as xr  # here, because it brings pandas, which the trainers do without

    path = Path(place)
    if "://" in place or ".zarr" in path.name:
        options = {"storage_options": {"token": "anon"}} if place.startswith("gs://") else {}
        return [xr.open_zarr(place, chunks=None, **options)]
    files = [path] if path.is_file() else sorted(path.rglob("*.nc"))
    if not files:
        raise ValueError(
            f"{place}: neither <year>.h5 of every year, nor Zarr, nor NetCDF files; look at --source and --years"
        )
    return [xr.open_dataset(file) for file in files]


def _open_xarray(place: str, year: int) -> Source:
    """Hourly or 6-hourly stores; variables may lie in several files. Rows from south to north are turned round."""
    datasets = _datasets(place)
    found: dict[int, list] = {hour: [] for hour in hours_of_year(year).tolist()}
    for dataset in datasets:
        name = "time" if "time" in dataset.dims else "valid_time"
        if not {name, "latitude", "longitude"} <= set(dataset.dims):
            raise ValueError(f"{place}: dimensions must be time, latitude, longitude; found {', '.join(dataset.dims)}")
        seconds = dataset[name].values.astype("datetime64[s]").astype(np.int64)
        for index in np.flatnonzero(np.isin(seconds, np.array(list(found)) * 3600)).tolist():
            found[int(seconds[index]) // 3600].append((dataset, {name: index}))
    hours = [hour for hour, places in found.items() if places]
    latitude, longitude = (np.asarray(datasets[0][name].values, float) for name in ("latitude", "longitude"))
    rows = slice(None, None, 1 if latitude[0] > latitude[-1] else -1)
    latitude = latitude[rows]
    if longitude[0] != 0 or (np.diff(longitude) <= 0).any():
        raise ValueError(f"{place}: longitudes must rise from 0, they go from {longitude[0]} to {longitude[-1]}")
    height = len(latitude) - (latitude[-1] == -90)

    def find(hour: int, name: str, levels_hPa: list[int]) -> np.ndarray | None:
        """Levels of a variable, (levels, latitude, longitude), or None if the store has not got it."""
        for dataset, at in found[hour]:
            for variable in [dataset[full] for full in NAMES[name] if full in dataset]:
                # WeatherBench2 derives a fraction over water alone; ERA5's own, in %, is over ice in the cold.
                if name == "r" and variable.attrs.get("units") != "%":
                    continue
                values = variable.isel(at)
                if levels_hPa:
                    dimension = next(d for d in ("level", "pressure_level", "isobaricInhPa") if d in values.dims)
                    if not set(levels_hPa) <= set(values[dimension].values.tolist()):
                        continue
                    values = values.sel({dimension: levels_hPa})
                values = values.transpose(..., "latitude", "longitude").values.astype(np.float32, copy=False)
                if values.shape[-2:] != (len(latitude), len(longitude)):
                    raise ValueError(f"{place}: {variable.name} is {values.shape[-2:]}; all must have one grid")
                values = values.reshape(-1, *values.shape[-2:])[:, rows][:, :height]
                for level, plane in zip(levels_hPa or [""], values, strict=True):
                    _require_no_nan(plane, f"{name}{level}", hour, dataset.encoding.get("source", place))
                return values
        return None

    def read(index: int) -> np.ndarray:
        state = np.empty((len(CHANNELS), height, len(longitude)), np.float32)
        for name, levels_hPa in FIELDS.items():
            values = find(hours[index], name, levels_hPa)
            if values is None and name == "r" and (humidity := find(hours[index], "q", levels_hPa)) is not None:
                temperature = state[[CHANNELS.index(f"t{level}") for level in levels_hPa]]  # t comes before r
                pressure_Pa = 100 * np.array(levels_hPa, np.float32)[:, None, None]
                values = relative_humidity_percent(temperature, humidity, pressure_Pa)
            if values is None:
                levels = f" at {levels_hPa} hPa" if levels_hPa else ""
                raise ValueError(f"{place}: no {' or '.join(NAMES[name])}{levels} at {utc(hours[index])}")
            for level, plane in zip(levels_hPa or [""], values, strict=True):
                state[CHANNELS.index(f"{name}{level}")] = plane
        return state

    return Source(np.array(hours, dtype=int), latitude[:height], longitude, read)


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
