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
DIMENSIONS = {"valid_time": "time", "pressure_level": "level", "isobaricInhPa": "level"}
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
    found = [
        *Path(place).glob(f"{year}.h5"),
        *Path(place).glob(f"*/{year}.h5"),
    ]  # train/, test/, out_of_sample/
    try:
        source = _open_hdf5(found[0], year) if found else _open_xarray(place, year)
    except (LookupError, TypeError, AttributeError, ArithmeticError) as error:
        raise ValueError(
            f"{place}: no ERA5 that can be read ({type(error).__name__}: {error})"
        ) from error
    if len(source.hours) == 0:
        raise ValueError(
            f"{place}: no 00, 06, 12 or 18 UTC of {year}; other years (--years) or another --source?"
        )
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
    unit, least, most = RANGES.get(name) or RANGES[name[0]]
    if np.isnan(low):
        raise ValueError(f"{file}: NaN in {name} at {utc(hour)}; get this file or time again")
    if low < least or high > most:
        fault = f"not within {least:g} to {most:g} {unit}"
    elif name[0] == "r" and high < MOST_OF_A_FRACTION:
        fault = "a fraction instead of %"
    elif low == high:
        fault = "one value everywhere"
    else:
        return
    seen = f"{name} is {low:g} to {high:g} at {utc(hour)}"
    raise ValueError(f"{file}: {seen}, {fault}; convert its unit, or get this time again")


# --------------------------------------------------------------------------- FourCastNet's HDF5 files


def _open_hdf5(path: Path, year: int) -> Source:
    """FourCastNet's layout: ``fields`` float32 (times, 21, 721, 1440), the last channel (sst) unused, no coordinates.

    Its times are those from 1 January 00 UTC on: a file of 1460 in a leap year ends on 30 December.
    """
    import h5py

    require_file(path)
    try:
        file = h5py.File(path)
        require_plain_hdf5(file)
        fields = file.get("fields")
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: not a whole HDF5 file ({error}); copy it again") from error
    shape, kind = getattr(fields, "shape", ()), getattr(fields, "dtype", None)
    if len(shape) != 4 or shape[1] != 21 or shape[3] != 2 * (shape[2] - 1) or kind != np.float32:
        raise ValueError(
            f"{path}: `fields` must be float32 of shape (times, 21, rows, 2 (rows - 1)), as "
            f"(1460, 21, 721, 1440); found {kind} {shape}"
        )
    times, _, rows, columns = shape
    hours = hours_of_year(year)
    if times > len(hours):
        raise ValueError(
            f"{path}: {times} times, but {year} has {len(hours)} six-hourly ones; is its name right?"
        )

    def read(index: int) -> np.ndarray:
        state = fields[index, : len(CHANNELS), :-1]
        for channel, plane in zip(CHANNELS, state, strict=True):
            _require_physical(plane, channel, hours[index], path)
        return state

    latitude_deg = np.linspace(90, -90, rows)[:-1]
    return Source(hours[:times], latitude_deg, np.arange(columns) * 360 / columns, read)


# -------------------------------------------------------------------------------- Zarr and NetCDF stores


@lru_cache(maxsize=1)
def _datasets(place: str) -> list:
    """The lazily opened store, or the files of a folder; without dask, which would only be in the way."""
    import xarray as xr  # here, because it brings pandas, which the trainers do without

    path = Path(place)
    if "://" in place or ".zarr" in path.name:
        options = {"storage_options": {"token": "anon"}} if place.startswith("gs://") else {}
        try:
            return [_arranged(xr.open_zarr(place, chunks=None, **options), place)]
        except Exception as error:  # each protocol's library has errors of its own
            what = f"no Zarr store that can be opened ({type(error).__name__}: {error})"
            raise ValueError(f"{place}: {what}") from error
    files = [path] if path.is_file() else sorted(path.rglob("*.nc"))
    if not files:
        raise ValueError(
            f"{place}: neither <year>.h5 of every year, nor Zarr, nor NetCDF files; "
            "look at --source and --years"
        )
    opened = []
    for file in files:
        require_file(file)
        try:
            dataset = xr.open_dataset(file)
        except Exception as error:  # what is no NetCDF fails in many ways
            reason = str(error).partition("\n")[0]
            raise ValueError(f"{file}: no NetCDF file that can be opened ({reason})") from error
        opened.append(_arranged(dataset, file))
    return opened


def _arranged(dataset, place: str | Path):
    """Dimensions time, level, latitude and longitude, rows from north to south, without the south pole."""
    names = {name: to for name, to in DIMENSIONS.items() if name in dataset.dims}
    dataset = dataset.rename(names)
    if not {"time", "latitude", "longitude"} <= set(dataset.dims):
        found = ", ".join(map(str, dataset.dims))
        raise ValueError(f"{place}: dimensions must be time, latitude, longitude; found {found}")
    if dataset.latitude[0] < dataset.latitude[-1]:
        dataset = dataset.isel(latitude=slice(None, None, -1))
    if dataset.latitude[-1] == -90:
        dataset = dataset.isel(latitude=slice(-1))
    latitude_deg, longitude_deg = dataset.latitude.values, dataset.longitude.values
    falls = (np.diff(latitude_deg) < 0).all() and latitude_deg[0] <= 90
    rises = (np.diff(longitude_deg) > 0).all() and longitude_deg[0] == 0
    if not (falls and rises):
        raise ValueError(
            f"{place}: latitudes must go from pole to pole and longitudes rise from 0, they begin "
            f"{latitude_deg[:3]} and {longitude_deg[:3]}; regrid it"
        )
    return dataset


def _open_xarray(place: str, year: int) -> Source:
    """Hourly or 6-hourly stores; variables and times may lie in several files of one grid."""
    datasets = _datasets(place)
    grid = datasets[0].latitude.values, datasets[0].longitude.values
    for dataset in datasets:
        if not all(map(np.array_equal, (dataset.latitude, dataset.longitude), grid)):
            raise ValueError(f"{place}: the grids of its files differ; all must have one")
    of_year = hours_of_year(year).astype("datetime64[h]").astype("datetime64[ns]")
    held = [np.isin(of_year, dataset.time.values) for dataset in datasets]
    hours = hours_of_year(year)[np.any(held, axis=0)]

    def read(index: int) -> np.ndarray:
        return _read_state(datasets, hours[index], place)

    return Source(hours, grid[0].astype(float), grid[1].astype(float), read)


def _read_state(datasets: list, hour: int, place: str) -> np.ndarray:
    """One time of some datasets, (channels, latitude, longitude)."""
    time = np.datetime64(int(hour), "h")
    parts = [each.sel(time=time) for each in datasets if time in each.time.values]
    planes: dict[str, np.ndarray] = {}
    for name, levels_hPa in FIELDS.items():
        values = _field(parts, hour, name, levels_hPa, place)
        humidity = None
        if values is None and name == "r":
            humidity = _field(parts, hour, "q", levels_hPa, place)
        if humidity is not None:
            pressure_Pa = 100 * np.array(levels_hPa, np.float32)[:, None, None]
            temperature_K = np.stack([planes[f"t{level}"] for level in levels_hPa])
            values = relative_humidity_percent(temperature_K, humidity, pressure_Pa)
        if values is None:
            levels = f" at {levels_hPa} hPa" if levels_hPa else ""
            names = " or ".join(NAMES[name])
            raise ValueError(f"{place}: no {names}{levels} at {utc(hour)}")
        for level, plane in zip(levels_hPa or [""], values, strict=True):
            planes[f"{name}{level}"] = plane
    return np.stack([planes[channel] for channel in CHANNELS])


def _field(
    parts: list, hour: int, name: str, levels_hPa: list[int], place: str
) -> np.ndarray | None:
    """Levels of a variable at one time, (levels, latitude, longitude), or None if no part has got them all."""
    for variable in [part[full] for part in parts for full in NAMES[name] if full in part]:
        # WeatherBench2 derives a fraction over water alone; ERA5's own, in %, is over ice in the cold.
        if name == "r" and variable.attrs.get("units") != "%":
            continue
        if levels_hPa:
            if "level" not in variable.dims:
                raise ValueError(f"{place}: {variable.name} has no dimension level")
            if not set(levels_hPa) <= set(variable.level.values.tolist()):
                continue
            variable = variable.sel(level=levels_hPa)
        values = variable.transpose(..., "latitude", "longitude").values.astype(np.float32)
        values = values.reshape(-1, *values.shape[-2:])
        file = variable.encoding.get("source", place)
        for level, plane in zip(levels_hPa or [""], values, strict=True):
            _require_physical(plane, f"{name}{level}", hour, file)
        return values
    return None


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
    return (
        100 * pressure_Pa * specific_humidity / (0.621981 + 0.378019 * specific_humidity) / mixed_Pa
    )
