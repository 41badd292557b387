"""ERA5 as others publish it: FourCastNet's yearly HDF5 files, and Zarr or NetCDF stores through
xarray.

Each year becomes a ``Source``: FourCastNet's twenty channels in its order, every six hours, from
north to south.
"""

from __future__ import annotations

import os
import zipfile
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import numpy as np

from energynn.data import era5_hdf5
from energynn.data.era5_values import (
    CHANNELS,
    LEVELS_HPA,
    NAMES,
    OURS,
    Source,
    in_our_unit,
    relative_humidity_percent,
    require_dates,
    require_weather,
    six_hourly,
    utc,
)
from energynn.reading import one_fault

COORDINATES = {
    "time": "time",
    "valid_time": "time",
    "latitude": "latitude",
    "lat": "latitude",
    "longitude": "longitude",
    "lon": "longitude",
    "level": "level",
    "pressure_level": "level",
    "isobaricInhPa": "level",
    "plev": "level",
    "pressure": "level",
    "lev": "level",
    "air_pressure": "level",
}
GRID = ("latitude", "longitude")
ZARR = ("zarr.json", ".zgroup", ".zmetadata")
NETCDF = (".nc", ".nc4", ".netcdf")


def open_year(place: str, year: int) -> Source:
    """Open one year of a folder of ``<year>.h5``, or of a Zarr store or NetCDF files at a path
    or URL.

    Raises ValueError if there is nothing of that year, its layout is another, or no time of it is
    six hours after another. What the libraries raise for damaged files is theirs;
    ``era5_store.prepare`` makes one ValueError of it.
    """
    # FourCastNet's own folders are train/, test/ and out_of_sample/.
    files = [*Path(place).glob(f"{year}.h5"), *Path(place).glob(f"*/{year}.h5")]
    if len(files) > 1:
        raise ValueError(f"{files[0]}: there is {files[1]}, too; keep one of them")
    with one_fault(files[0] if files else place):
        if files:
            return era5_hdf5.open_year(files[0], year)
        return _open_xarray(place, year)


def _places(path: Path) -> Iterator[Path]:
    """List the Zarr stores and NetCDF files of a folder, whatever a store's name; hidden ones and
    links back into their own path are left out.
    """
    if path.is_file() or any((path / name).is_file() for name in ZARR):
        yield path
        return
    for child in sorted(path.iterdir()) if path.is_dir() else ():
        back = path.resolve().is_relative_to(child.resolve())
        wanted = child.is_dir() and not back or child.suffix in NETCDF
        if wanted and not child.name.startswith("."):
            yield from _places(child)


def _open(place: str):
    """Open a Zarr store or a NetCDF file lazily; without dask, which would only be in the way."""
    import xarray as xr  # here, because it brings pandas, which the trainers do without

    if "://" in place or os.path.isdir(place):
        options = (
            {"storage_options": {"token": "anon"}} if place.startswith("gs://") else {}
        )
        return xr.open_zarr(place, chunks=None, **options)
    if zipfile.is_zipfile(place):
        raise ValueError("is a ZIP archive; unpack it")
    try:
        return xr.open_dataset(place)
    except ValueError as error:
        if "IO backends" not in str(error):
            raise
        raise ValueError(
            "is no NetCDF file, or one that needs pip install 'energynn[era5]'"
        ) from error


@lru_cache(maxsize=1)
def _datasets(place: str) -> dict:
    """Open the stores and files of a place that have something wanted, each by its path.

    Raises ValueError where there are none.
    """
    datasets: dict = {}
    for file in [place] if "://" in place else map(str, _places(Path(place))):
        with one_fault(file):
            dataset = _arranged(_open(file))
            if dataset.data_vars:
                datasets[file] = _on_our_grid(_with_our_levels(dataset))
    if not datasets:
        raise ValueError(
            f"{place}: neither <year>.h5 of every year, nor Zarr, nor NetCDF files with them"
        )
    return datasets


def _arranged(dataset):
    """Give coordinates and variables our names, by theirs or else by CF's standard name, and leave
    out the others.

    A variable of several levels without a level is another: the surface's geopotential. Raises
    ValueError for a dimension that we do not know, and for a unit that is not known.
    """

    def rank(name: str) -> tuple[bool, ...]:
        """Of two times, take the one that is a dimension, or lies along one."""
        is_named = name in COORDINATES or name in OURS
        return not is_named, name not in dataset.dims, dataset[name].ndim != 1

    found: dict[str, str] = {}
    for name in sorted(dataset.variables, key=rank):
        names = COORDINATES if name in dataset.coords else OURS
        word = name if name in names else dataset[name].attrs.get("standard_name")
        if word in names:
            found.setdefault(names[word], name)
    others = {*dataset.variables} - {*found.values()}
    dataset = dataset.squeeze().drop_vars(others)
    dataset = dataset.rename({name: ours for ours, name in found.items()})
    dataset = dataset.swap_dims(
        {time.dims[0]: name for name, time in dataset.coords.items() if time.ndim == 1}
    )
    for name, variable in dataset.data_vars.items():
        for dim in sorted({*variable.dims} - {*COORDINATES.values(), "expver"}):
            raise ValueError(
                f"{name} has a dimension {dim} of {dataset.sizes[dim]}; keep one of them"
            )
        unit = variable.attrs.get("units")
        # WeatherBench2 derives a fraction over water alone; ERA5's own, in %, is over ice in the
        # cold.
        fraction = name == "r" and unit not in ("%", "percent")
        if fraction or (len(name) == 1 and "level" not in variable.coords):
            dataset = dataset.drop_vars(name)
        else:
            in_our_unit(name, np.zeros(1), unit)
    return dataset


def _with_our_levels(dataset):
    """Select our levels, in hPa. Raises ValueError where there is no time of the usual calendar."""
    if "time" not in dataset.coords:
        raise ValueError("no coordinate time")
    require_dates(dataset.time)
    if "level" not in dataset.coords:
        return dataset
    pascal = dataset.level.attrs.get("units") == "Pa" or dataset.level.max() > 2_000
    level_hPa = np.rint(dataset.level / (100 if pascal else 1)).astype(int)
    dataset = dataset.assign_coords(level=level_hPa)
    return dataset.isel(level=np.isin(level_hPa, LEVELS_HPA), missing_dims="ignore")


def _on_our_grid(dataset):
    """Order rows from north to south, without the south pole. Raises ValueError for other grids."""
    for name in GRID:
        if name not in dataset.indexes:
            raise ValueError(f"no coordinate {name} of one dimension")
    steps = np.diff(dataset.latitude)
    if (steps > 0).all():
        dataset = dataset.isel(latitude=slice(None, None, -1))
    elif not (steps < 0).all():
        raise ValueError("latitude does not go from pole to pole")
    return dataset.sel(latitude=slice(None, -89.999))


def _open_xarray(place: str, year: int) -> Source:
    """Open an hourly or 6-hourly store; variables, levels and times may lie in several files of
    one grid. Raises ValueError where their grids differ.
    """
    datasets = _datasets(place)
    first = next(iter(datasets))
    grid = [datasets[first][name].values for name in GRID]
    told: Counter = Counter()
    for file, dataset in datasets.items():
        for name, values in zip(GRID, grid, strict=True):
            # nearly: float32 in one file and float64 in another
            if len(values) != len(dataset[name]) or not np.allclose(
                values, dataset[name], rtol=0, atol=1e-3
            ):
                raise ValueError(f"{file}: {name} differs from {first}")
        levels = dataset.level.values if "level" in dataset.coords else ""
        for time in np.atleast_1d(dataset.time.values):
            told[f"{[*dataset.data_vars]} {levels}", time] += 1
    hours, _ = six_hourly(np.array([time for _, time in told]), year)
    repeated = sum(count > 1 for count in told.values())
    remark = (
        f"{repeated} times of {place} are there more than once, with the same values"
    )

    def read(index: int) -> np.ndarray:
        return _read_state(datasets, hours[index])

    return Source(hours, *grid, read, remark if repeated else "")


def _read_state(datasets: dict, hour: int) -> np.ndarray:
    """Read one time of some datasets, (channels, latitude, longitude).

    What lies in several files, under several `expver` or twice becomes one. Raises ValueError for
    what is missing, differs or is no weather.
    """
    time = np.datetime64(int(hour), "h")
    planes: dict[str, tuple[np.ndarray, str]] = {}
    for file, dataset in datasets.items():
        for row in np.flatnonzero(np.atleast_1d(dataset.time.values) == time):
            with one_fault(file):
                piece = dataset.isel(time=row, missing_dims="ignore")
                for channel, plane in _planes(piece):
                    if channel in planes:
                        first, other = planes[channel]
                        lesser, plane = np.fmin(first, plane), np.fmax(first, plane)
                        if not np.array_equal(lesser, plane, equal_nan=True):
                            raise ValueError(
                                f"two values of {channel} at {utc(hour)}, here and in {other}, "
                                "differ; keep one"
                            )
                    planes[channel] = plane, file

    def weather(channel: str) -> np.ndarray:
        if channel not in planes:
            names = NAMES.get(channel) or NAMES[channel[0]]
            raise ValueError(
                f"no {' or '.join(names[:2])} for {channel} at {utc(hour)}"
            )
        plane, file = planes[channel]
        with one_fault(file):
            require_weather(channel, plane, hour)
        return plane

    state = []
    for channel in CHANNELS:
        if channel[0] == "r" and channel not in planes:
            level = channel[1:]
            pressure_Pa = 100 * np.float64(level)
            parts = weather(f"t{level}"), weather(f"q{level}"), pressure_Pa
            state.append(relative_humidity_percent(*parts))
        else:
            state.append(weather(channel))
    return np.stack(state).astype(np.float32)


def _planes(piece) -> Iterator[tuple[str, np.ndarray]]:
    """Load one time of a dataset in our units: channels and planes, again for each `expver`."""
    # All levels are read at once, because a chunk of such a store holds every level.
    order = ("expver", "level", *GRID)
    piece = piece.transpose(*order, missing_dims="ignore").load()
    for name, field in piece.data_vars.items():
        values = in_our_unit(name, field.values, field.attrs.get("units"))
        levels = np.atleast_1d(field.level) if len(name) == 1 else [""]
        for planes in values.reshape(-1, len(levels), *values.shape[-2:]):
            for level, plane in zip(levels, planes, strict=True):
                yield f"{name}{level}", plane
