"""ERA5 as others publish it: FourCastNet's yearly HDF5 files, and Zarr or NetCDF stores through
xarray.

Each year becomes a ``Source``: FourCastNet's twenty channels in its order, every six hours, from
north to south.
"""

from __future__ import annotations

import os
import zipfile
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
    STEP_H,
    Source,
    conversion,
    hours_of_year,
    relative_humidity_percent,
    require_dates,
    require_weather,
    six_hourly,
    utc,
)
from energynn.reading import one_fault

COORDINATES = {"time": "time", "valid_time": "time"}
COORDINATES |= {"latitude": "latitude", "lat": "latitude"}
COORDINATES |= {"longitude": "longitude", "lon": "longitude"}
COORDINATES |= dict.fromkeys(
    "level pressure_level isobaricInhPa plev pressure lev air_pressure".split(), "level"
)
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
        opened = era5_hdf5.open_year if files else _open_xarray
        source = opened(files[0] if files else place, year)
    count = len(source.hours)
    if count > 1 and STEP_H not in np.diff(source.hours):
        raise ValueError(
            f"{place}: {count} of {len(hours_of_year(year))} times of {year}, and none is "
            f"{STEP_H} h after another; get those of 00, 06, 12 and 18 UTC"
        )
    return source


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

    Raises ValueError where there are none, or where their grids differ.
    """
    datasets: dict = {}
    for file in [place] if "://" in place else map(str, _places(Path(place))):
        with one_fault(file):
            dataset = _arranged(_open(file))
            if not dataset.data_vars:
                continue
            dataset = _on_our_grid(_with_our_levels(dataset))
            for name in GRID if datasets else ():
                first = next(iter(datasets.values()))[name].values
                # nearly: float32 in one file and float64 in another
                if len(first) != len(dataset[name]) or not np.allclose(
                    first, dataset[name], rtol=0, atol=1e-3
                ):
                    raise ValueError(f"{name} differs from {next(iter(datasets))}")
                dataset = dataset.assign_coords({name: first})
            datasets[file] = dataset
    if not datasets:
        raise ValueError(
            f"{place}: neither <year>.h5 of every year, nor Zarr, nor NetCDF files with them"
        )
    return datasets


def _named(variables, names: dict[str, str]) -> dict[str, str]:
    """Find which variables are ours, {name: our name}, by name or else by CF's standard name."""
    found: dict[str, str] = {}
    standard = {name: variables[name].attrs.get("standard_name") for name in variables}
    for words in ({name: name for name in variables}, standard):
        for name, word in words.items():
            if word in names and name not in found.values():
                found.setdefault(names[word], name)
    return {name: ours for ours, name in found.items()}


def _arranged(dataset):
    """Give coordinates and variables our names, and leave out the others.

    A variable of several levels without a level is another: the surface's geopotential. Raises
    ValueError for a dimension that we do not know, and for a unit that is not known.
    """
    ours = {*COORDINATES.values()}
    # of two times, the one that is a dimension, or lies along one
    first = sorted(
        dataset.coords,
        key=lambda name: (name not in dataset.dims, dataset[name].ndim != 1),
    )
    renamed = _named({name: dataset[name] for name in first}, COORDINATES)
    clashing = ours & {*dataset.variables} - renamed.keys()
    dataset = dataset.drop_vars(clashing).rename(renamed)
    along = {name: dataset[name].dims for name in renamed.values()}
    dataset = dataset.swap_dims(
        {d[0]: name for name, d in along.items() if len(d) == 1}
    )
    single = [dim for dim, size in dataset.sizes.items() if size == 1]
    dataset = dataset.squeeze([dim for dim in single if dim not in ours], drop=True)

    renamed = _named(dataset.data_vars, OURS)
    dataset = dataset[list(renamed)].rename(renamed)
    for name, variable in dataset.data_vars.items():
        unit = variable.attrs.get("units")
        for dim in sorted({*variable.dims} - ours - {"expver"}):
            raise ValueError(
                f"{name} has a dimension {dim} of {dataset.sizes[dim]}; keep one of them"
            )
        # WeatherBench2 derives a fraction over water alone; ERA5's own, in %, is over ice in the
        # cold.
        fraction = name == "r" and unit not in ("%", "percent")
        if fraction or (len(name) == 1 and "level" not in variable.coords):
            dataset = dataset.drop_vars(name)
        elif unit:
            conversion(name, unit)
    used = {*dataset.dims, "time", "level"}
    return dataset.drop_vars({*dataset.coords} - used)


def _with_our_levels(dataset):
    """Select our levels, in hPa. Raises ValueError where there is no time of the usual calendar."""
    if "time" not in dataset.coords:
        raise ValueError("no coordinate time")
    require_dates(dataset.time)
    if "level" not in dataset.coords:
        return dataset
    unit = dataset.level.attrs.get("units")
    pascal = unit == "Pa" or (unit is None and dataset.level.max() > 2_000)
    level_hPa = np.rint(dataset.level / (100 if pascal else 1)).astype(int)
    dataset = dataset.assign_coords(level=level_hPa)
    return dataset.sel(level=level_hPa.isin(LEVELS_HPA)) if level_hPa.dims else dataset


def _on_our_grid(dataset):
    """Order rows from north to south, without the south pole. Raises ValueError for other grids."""
    for name in GRID:
        if name not in dataset.coords or dataset[name].dims != (name,):
            raise ValueError(f"no coordinate {name} of one dimension")
    steps = np.diff(dataset.latitude)
    if (steps > 0).all():
        dataset = dataset.isel(latitude=slice(None, None, -1))
    elif not (steps < 0).all():
        raise ValueError("latitude does not go from pole to pole")
    pole = np.isclose(dataset.latitude[-1], -90)
    return dataset.isel(latitude=slice(-1 if pole else None))


def _open_xarray(place: str, year: int) -> Source:
    """Open an hourly or 6-hourly store; variables, levels and times may lie in several files of
    one grid.

    Raises ValueError naming the times that there are where none is wanted.
    """
    datasets = _datasets(place)
    times: dict = {}
    for dataset in datasets.values():
        levels = dataset.level.values if "level" in dataset.coords else ""
        values = np.atleast_1d(dataset.time.values)
        times.setdefault(f"{[*dataset.data_vars]} {levels}", []).append(values)
    every = [np.concatenate(parts) for parts in times.values()]
    hours = six_hourly(np.concatenate(every), year)
    repeated = max(len(values) - len(np.unique(values)) for values in every)
    remark = (
        f"{repeated} times of {place} are there more than once, with the same values"
    )
    grid = [next(iter(datasets.values()))[name].values for name in GRID]

    def read(index: int) -> np.ndarray:
        return _read_state(datasets, hours[index])

    return Source(hours, *grid, read, remark if repeated else "")


def _read_state(datasets: dict, hour: int) -> np.ndarray:
    """Read one time of some datasets, (channels, latitude, longitude).

    What lies in several files, under several `expver` or twice becomes one by xarray's merge.
    Raises ValueError for what is missing, differs or is no weather.
    """
    import xarray as xr

    time = np.datetime64(int(hour), "h")
    pieces = [
        (file, dataset.isel(time=row) if dataset.time.dims else dataset)
        for file, dataset in datasets.items()
        for row in np.flatnonzero(np.atleast_1d(dataset.time.values) == time)
    ]
    files: dict = {}
    for file, piece in pieces:
        for name in piece.data_vars:
            files.setdefault(name, {})[file] = None
    unused = "q" if "r" in files else "r"
    for name in NAMES.keys() - {unused}:
        if name not in files:
            raise ValueError(f"no {' or '.join(NAMES[name][:2])} at {utc(hour)}")
    parts = []
    for file, piece in pieces:
        with one_fault(file):
            parts += _load(piece.drop_vars(unused, errors="ignore"))
    try:
        state = xr.merge(parts, join="outer", compat="no_conflicts")
    except xr.MergeError as error:
        name = next(name for name in files if f"'{name}'" in str(error))
        raise ValueError(
            f"{', '.join(files[name])}: two values of {name} at {utc(hour)} differ; keep one"
        ) from error

    def plane(channel: str):
        name = channel if channel in NAMES else channel[0]
        field = state[name]
        with one_fault(", ".join(files[name])):
            if name != channel:
                level_hPa = int(channel[1:])
                if level_hPa not in state.level:
                    raise ValueError(f"no {name} at {level_hPa} hPa")
                field = field.sel(level=level_hPa)
            require_weather(channel, field.values, hour)
        return field

    planes = []
    for channel in CHANNELS:
        if channel[0] == unused == "r":
            temperature_K, humidity = plane(f"t{channel[1:]}"), plane(f"q{channel[1:]}")
            pressure_Pa = 100 * humidity.level
            planes.append(
                relative_humidity_percent(temperature_K, humidity, pressure_Pa)
            )
        else:
            planes.append(plane(channel))
    return np.stack(planes).astype(np.float32)


def _load(piece) -> list:
    """Load one time of a dataset in our units, each `expver` by itself."""
    # All levels are read at once, because a chunk of such a store holds every level.
    piece = piece.transpose(..., *GRID).load().drop_vars("time")
    for name, field in piece.data_vars.items():
        unit = field.attrs.get("units")
        factor, offset = conversion(name, unit) if unit else (1, 0)
        if (factor, offset) != (1, 0):
            field = field * factor + offset
        piece[name] = field
    if "level" in piece.coords and not piece.level.dims:
        piece = piece.expand_dims("level")
    if "expver" not in piece.dims:
        return [piece]
    return [piece.isel(expver=row, drop=True) for row in range(piece.sizes["expver"])]
