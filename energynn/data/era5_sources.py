"""ERA5 as others publish it: FourCastNet's yearly HDF5 files, and Zarr or NetCDF stores through
xarray.

Each year becomes a ``Source``: FourCastNet's twenty channels in its order, every six hours, from
north to south.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from energynn.reading import require_plain_hdf5

STEP_H = 6
CHANNELS = tuple(
    "u10 v10 t2m sp mslp t850 u1000 v1000 z1000 u850 v850 z850 u500 v500 z500 t500 z50 r500 r850 "
    "tcwv".split()
)
LEVELS_HPA = (50, 500, 850, 1000)
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


@dataclass(frozen=True)
class Source:
    """Hold one year: ``read(index)`` gives a state, (channels, latitude, longitude) float32 in
    SI units and %.

    hours: (times,) int, since 1970-01-01 00 UTC, rising, multiples of six. The south pole is left
    out, as in FourCastNet (721 rows -> 720). ``read`` may be called from several threads.
    """

    hours: np.ndarray
    latitude_deg: np.ndarray
    longitude_deg: np.ndarray
    read: Callable[[int], np.ndarray]


def open_year(place: str, year: int) -> Source:
    """Open one year of a folder of ``<year>.h5``, or of a Zarr store or NetCDF files at a path
    or URL.

    Raises ValueError if there is nothing of that year or its layout is another. What the
    libraries raise for damaged files is theirs; ``era5_store.prepare`` makes one ValueError of
    it.
    """
    # FourCastNet's own folders are train/, test/ and out_of_sample/.
    files = [*Path(place).glob(f"{year}.h5"), *Path(place).glob(f"*/{year}.h5")]
    source = _open_hdf5(files[0], year) if files else _open_xarray(place, year)
    if len(source.hours) == 0:
        raise ValueError(
            f"{place}: no six-hourly time of {year}; look at --years and --source"
        )
    return source


def hours_of_year(year: int) -> np.ndarray:
    """List the 6-hourly times of a year, 1460 or 1464 of them, in hours since 1970."""
    hours = np.arange(f"{year}", f"{year + 1}", STEP_H, dtype="datetime64[h]")
    return hours.astype(int)


def utc(hour: int) -> str:
    """Write an hour since 1970 as a date."""
    return f"{np.datetime64(int(hour), 'h')} UTC"


def _open_hdf5(path: Path, year: int) -> Source:
    """Open FourCastNet's file: ``fields`` float32 (times, 21, 721, 1440), the last channel (sst)
    unused.

    It has no coordinates: its times are those from 1 January 00 UTC on, so that a file of 1460 in
    a leap year ends on 30 December.
    """
    import h5py

    file = h5py.File(path)
    require_plain_hdf5(file)
    fields = file["fields"]
    shape = fields.shape
    if (
        len(shape) != 4
        or shape[1] != 21
        or shape[3] != 2 * (shape[2] - 1)
        or fields.dtype != "f4"
    ):
        raise ValueError(
            f"{path}: `fields` must be float32 of shape (times, 21, rows, 2 (rows - 1)), as "
            f"(1460, 21, 721, 1440); it is {fields.dtype} {shape}"
        )
    hours = hours_of_year(year)[: shape[0]]

    latitude_deg = np.linspace(90, -90, shape[2])[:-1]
    longitude_deg = np.arange(shape[3]) * 360 / shape[3]
    return Source(
        hours,
        latitude_deg,
        longitude_deg,
        lambda index: fields[index, : len(CHANNELS), :-1],
    )


@lru_cache(maxsize=1)
def _datasets(place: str) -> list:
    """Open the store, or the files of a folder, lazily; without dask, which would only be in the
    way.

    Raises ValueError where there are none, or where their grids differ.
    """
    import xarray as xr  # here, because it brings pandas, which the trainers do without

    path = Path(place)
    if "://" in place or ".zarr" in path.name:
        options = (
            {"storage_options": {"token": "anon"}} if place.startswith("gs://") else {}
        )
        return [_with_our_names(xr.open_zarr(place, chunks=None, **options))]
    files = [path] if path.is_file() else sorted(path.rglob("*.nc"))
    if not files:
        raise ValueError(
            f"{place}: neither <year>.h5 of every year, nor Zarr, nor NetCDF files"
        )
    datasets = [_with_our_names(xr.open_dataset(file)) for file in files]
    xr.align(*datasets, join="exact", exclude=("time", "level"))
    return datasets


def _with_our_names(dataset):
    """Give dimensions and variables the names of this module; rows from north to south, without
    the south pole.
    """
    names = {
        other: name for name, others in NAMES.items() for other in others
    } | DIMENSIONS
    present = {*dataset.dims, *dataset.data_vars}
    dataset = dataset.rename({name: names[name] for name in present & names.keys()})
    # WeatherBench2 derives a fraction over water alone; ERA5's own, in %, is over ice in the cold.
    if "r" in dataset and dataset.r.attrs.get("units") != "%":
        dataset = dataset.drop_vars("r")
    if "level" in dataset:
        dataset = dataset.sel(level=dataset.level.isin(LEVELS_HPA))
    if dataset.latitude[0] < dataset.latitude[-1]:
        dataset = dataset.isel(latitude=slice(None, None, -1))
    return dataset.isel(latitude=slice(-1 if dataset.latitude[-1] == -90 else None))


def _open_xarray(place: str, year: int) -> Source:
    """Open an hourly or 6-hourly store; variables and times may lie in several files of one
    grid.
    """
    datasets = _datasets(place)
    hours = hours_of_year(year)
    times = hours.astype("datetime64[h]").astype("datetime64[ns]")
    present = [np.isin(times, dataset.time.values) for dataset in datasets]
    hours = hours[np.any(present, axis=0)]
    grid = datasets[0].latitude.values, datasets[0].longitude.values
    return Source(hours, *grid, lambda index: _read_state(datasets, hours[index]))


def _read_state(datasets: list, hour: int) -> np.ndarray:
    """Read one time of some datasets, (channels, latitude, longitude)."""
    time = np.datetime64(int(hour), "h")
    fields: dict = {}
    for dataset in datasets:
        if time in dataset.time.values:
            fields |= dataset.sel(time=time).data_vars
    unused = "q" if "r" in fields else "r"
    for name in NAMES.keys() - {unused}:
        if name not in fields:
            raise ValueError(f"no {' or '.join(NAMES[name])} at {utc(hour)}")
        # All levels are read at once, because a chunk of such a store holds every level.
        fields[name] = fields[name].transpose(..., "latitude", "longitude").load()
    if unused == "r":
        temperature_K = fields["t"]
        humidity = fields["q"]
        pressure_Pa = 100 * humidity.level
        fields["r"] = relative_humidity_percent(temperature_K, humidity, pressure_Pa)
    planes = []
    for channel in CHANNELS:
        if channel in NAMES:
            planes.append(fields[channel])
        else:
            planes.append(fields[channel[0]].sel(level=int(channel[1:])))
    return np.stack(planes).astype(np.float32)


def relative_humidity_percent(
    temperature_K: np.ndarray, specific_humidity: np.ndarray, pressure_Pa: np.ndarray
) -> np.ndarray:
    """Compute relative humidity as ERA5 has it: over water above 0 C, over ice below -23 C, and
    mixed between.

    Source: IFS documentation Cy47r3, part IV, chapter 12 (Tetens' formula with Buck's constants,
    quadratic mixing); vapour pressure from specific humidity with R_dry / R_vapour = 0.621981.
    """

    def saturation_Pa(a3: float, a4_K: float) -> np.ndarray:
        return 611.21 * np.exp(a3 * (temperature_K - 273.16) / (temperature_K - a4_K))

    mixed_K = np.minimum(np.maximum(temperature_K, 250.16), 273.16)
    water = ((mixed_K - 250.16) / 23) ** 2
    over_water_Pa = saturation_Pa(17.502, 32.19)
    over_ice_Pa = saturation_Pa(22.587, -0.7)
    mixed_Pa = water * over_water_Pa + (1 - water) * over_ice_Pa
    vapour_Pa = (
        pressure_Pa * specific_humidity / (0.621981 + 0.378019 * specific_humidity)
    )
    return 100 * vapour_Pa / mixed_Pa
