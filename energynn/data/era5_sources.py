"""ERA5 as others publish it: FourCastNet's yearly HDF5 files, and Zarr or NetCDF stores through
xarray.

Each year becomes a ``YearSource``: FourCastNet's twenty channels in its order, every six hours,
from north to south.
"""

import os
import re
import zipfile
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import numpy as np

from energynn.data import era5_hdf5
from energynn.data.era5_values import (
    ALIASES_BY_CHANNEL,
    CHANNEL_BY_ALIAS,
    CHANNELS,
    LEVELS_HPA,
    VOCABULARY,
    WANTED_NAMES,
    Era5Part,
    YearSource,
    convert_to_our_unit,
    our_name,
    relative_humidity_percent,
    require_calendar_dates,
    require_valid_weather,
    six_hourly_times,
    utc,
)
from energynn.host.reading import join_faults

OUR_COORDINATE_NAMES = {
    other: name
    for name, others in VOCABULARY["coordinates"].items()
    for other in others
}
LEAD_PATTERN = re.compile(
    r"\b(step|lead\w*|fhour|ftime|forecast_(period|hour)|prediction_timedelta)\b",
    re.IGNORECASE,
)
GRID_COORDINATES = ("latitude", "longitude")
ZARR_MARKER_FILES = ("zarr.json", ".zgroup", ".zmetadata")
NETCDF_ENDINGS = (".nc", ".nc4", ".netcdf")


def open_year(place: str, year: int) -> YearSource:
    """Open one year of a folder of ``<year>.h5``, or of a Zarr store or NetCDF files at a path
    or URL.

    Raises ValueError if there is nothing of that year, its layout is another, or no time of it is
    six hours after another. What the libraries raise for damaged files is theirs;
    ``era5_store.write_store`` makes one ValueError of it.
    """
    # FourCastNet's own folders are train/, test/ and out_of_sample/.
    files = [*Path(place).glob(f"{year}.h5"), *Path(place).glob(f"*/{year}.h5")]
    if len(files) > 1:
        raise ValueError(f"{files[0]}: there is {files[1]}, too; keep one of them")
    path = str(files[0]) if files else place
    with join_faults(path):
        parts = [era5_hdf5.open_hdf5_file(path, year)] if files else _open_parts(path)
        return _join_parts(path, parts, year)


def _list_stores(path: Path) -> Iterator[Path]:
    """List the Zarr stores and NetCDF files of a folder, whatever a store's name; hidden ones and
    links back into their own path are left out.
    """
    if path.is_file() or any((path / name).is_file() for name in ZARR_MARKER_FILES):
        yield path
        return
    for child in sorted(path.iterdir()) if path.is_dir() else ():
        back = path.resolve().is_relative_to(child.resolve())
        wanted = child.is_dir() and not back or child.suffix.lower() in NETCDF_ENDINGS
        if wanted and not child.name.startswith("."):
            yield from _list_stores(child)


def _open_dataset(place: str):
    """Open a Zarr store or a NetCDF file lazily; without dask, which would only be in the way."""
    import xarray as xr  # here, because it brings pandas, which the trainers do without

    if "://" in place or os.path.isdir(place):
        options = {"token": "anon"} if place.startswith("gs://") else None
        return xr.open_zarr(place, chunks=None, storage_options=options)
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
def _open_parts(place: str) -> list[Era5Part]:
    """Open the stores and files of a place that have something wanted. Raises ValueError if none
    has.
    """
    parts = []
    for file in [place] if "://" in place else map(str, _list_stores(Path(place))):
        with join_faults(file):
            dataset = _rename_variables(_open_dataset(file))
            if dataset.data_vars and dataset.sizes.get("time", 1):
                parts.append(_part_of_dataset(file, dataset))
    if not parts:
        raise ValueError(
            f"{place}: neither <year>.h5 of every year, nor Zarr, nor NetCDF files with variables "
            "of ours; --source is the folder that holds them; GRIB: `cdo -f nc4 copy` makes NetCDF"
        )
    return parts


def _rename_variables(dataset):
    """Give coordinates and variables our names, by theirs or else by CF's standard name, and leave
    out the others.

    A variable of several levels without a level is another: the surface's geopotential. Raises
    ValueError for a dimension that we do not know, and for a unit that is not known.
    """
    dataset = dataset.squeeze()
    for name, each in dataset.coords.items():
        words = f"{name} {each.attrs.get('standard_name')}"
        is_lead = each.dtype.kind == "m" or LEAD_PATTERN.search(words)
        if is_lead and each.any() and "valid_time" not in dataset:
            raise ValueError(f"{name}: add this lead of a forecast to its time")

    def name_of_ours(name: str, word: str) -> str:
        if name in dataset.coords:
            return OUR_COORDINATE_NAMES.get(word.lower(), "")
        ours = our_name(word, dataset.variables)
        return ours if ours in WANTED_NAMES else ""

    def name_priority(name: str) -> tuple[bool, ...]:
        """Of two names take ours; of two times the one along a dimension, and when a forecast is
        valid.
        """
        is_first = name in CHANNEL_BY_ALIAS or name == "valid_time"
        return not name_of_ours(name, name), dataset[name].ndim != 1, not is_first

    theirs = {}
    for name in sorted(dataset.variables, key=name_priority):
        standard = dataset[name].attrs.get("standard_name", "")
        if word := name_of_ours(name, name) or name_of_ours(name, standard):
            theirs.setdefault(word, name)
    dataset = dataset.drop_vars({*dataset.variables} - {*theirs.values()})
    dataset = dataset.swap_dims(
        {each.dims[0]: name for name, each in dataset.coords.items() if each.ndim == 1}
    )
    dataset = dataset.rename({name: ours for ours, name in theirs.items()})
    for name, variable in dataset.data_vars.items():
        unknown = {*variable.dims} - {*OUR_COORDINATE_NAMES.values(), "expver"}
        if unknown:
            dim = min(unknown)
            raise ValueError(
                f"{name} has a dimension {dim} of {dataset.sizes[dim]}; keep one of them, or "
                "name it as CF does: time, latitude, longitude, level"
            )
        step_type = variable.attrs.get("GRIB_stepType", "instant")
        methods = variable.attrs.get("cell_methods", f"time: {step_type}")
        if re.search(r"\btime: (?!point|instant)", methods):
            raise ValueError(f"{name} is no state but of times between: {methods}")
        unit = variable.attrs.get("units")
        # WeatherBench2 derives a fraction over water alone; ERA5's own, in %, is over ice in the
        # cold.
        fraction = name[0] == "r" and unit not in ("%", "percent")
        if fraction or (len(name) == 1 and "level" not in variable.coords):
            dataset = dataset.drop_vars(name)
        else:
            convert_to_our_unit(name, np.zeros(1), unit)
    return dataset


def _part_of_dataset(file: str, dataset) -> Era5Part:
    """Select our levels, in hPa, of a dataset with our names. Raises ValueError where a coordinate
    is missing, or the calendar is another.
    """
    for name in GRID_COORDINATES:
        if name not in dataset.indexes:
            raise ValueError(f"no coordinate {name} of one dimension")
    if "time" not in dataset.coords:
        raise ValueError("no coordinate time")
    require_calendar_dates(dataset.time)
    levels_hPa = np.empty(0)
    if "level" in dataset.coords:
        level = dataset.level
        unit = level.attrs.get("units") or ("Pa" if level.max() > 2_000 else "hPa")
        level_Pa = convert_to_our_unit("level", np.atleast_1d(level), unit)
        levels_hPa = np.rint(level_Pa / 100).astype(int)
        is_ours = np.isin(levels_hPa, LEVELS_HPA)
        levels_hPa = levels_hPa[is_ours]
        dataset = dataset.isel(level=is_ours, missing_dims="ignore")

    def read_channels(row: int) -> Iterator[tuple[str, np.ndarray]]:
        # All levels are read at once, because a chunk of such a store holds every level.
        piece = (
            dataset.isel(time=row, missing_dims="ignore")
            .transpose("expver", "level", *GRID_COORDINATES, missing_dims="ignore")
            .load()
        )
        for name, field in piece.data_vars.items():
            levels = levels_hPa if len(name) == 1 else [""]
            if len(levels) == 0:  # a file of others
                continue
            values = convert_to_our_unit(name, field.values, field.attrs.get("units"))
            for planes in values.reshape(-1, len(levels), *values.shape[-2:]):
                for level, plane in zip(levels, planes, strict=True):
                    yield f"{name}{level}", plane

    times = np.atleast_1d(dataset.time.values)
    grid = [dataset[name].values for name in GRID_COORDINATES]
    return Era5Part(
        file, times, *grid, read_channels, f"{[*dataset.data_vars]} {levels_hPa}"
    )


def _join_parts(place: str, parts: list[Era5Part], year: int) -> YearSource:
    """Make one source of the variables, levels and times of several files of one grid. Raises
    ValueError where their grids differ.
    """
    first = parts[0]
    grid = first.latitude_deg[first.rows], first.longitude_deg
    told = Counter()
    for part in parts:
        here = part.latitude_deg[part.rows], part.longitude_deg
        east = np.diff(here[1], append=here[1][:1]) % 360
        if not np.allclose(east, 360 / len(east), rtol=0, atol=1e-3):
            raise ValueError(
                f"{part.file}: longitude does not go eastward once around in equal steps; sort it, "
                "each once, of the whole globe"
            )
        south = np.diff(here[0])
        if (
            np.ptp(south) > 1e-3
            or max(90 - here[0][0], here[0][-1] + 90) > 1e-3 - south[0]
        ):
            raise ValueError(
                f"{part.file}: latitude does not go in equal steps from pole to pole, in degrees"
            )
        for name, one, other in zip(GRID_COORDINATES, grid, here, strict=True):
            # nearly: float32 in one file and float64 in another
            if len(one) != len(other) or not np.allclose(one, other, rtol=0, atol=1e-3):
                raise ValueError(f"{part.file}: {name} differs from {first.file}")
        told.update((part.content, time) for time in part.times)
    hours = six_hourly_times(np.array([time for _, time in told]), year)
    remark = first.remark
    if repeated := sum(count > 1 for count in told.values()):
        remark = f"{repeated} times of {place} are there more than once, with the same values"

    def read_state_at_index(index: int) -> np.ndarray:
        with join_faults(place):
            return _read_state_at_hour(parts, hours[index])

    return YearSource(hours, *grid, read_state_at_index, remark)


def _read_state_at_hour(parts: list[Era5Part], hour: int) -> np.ndarray:
    """Read one time, (channels, latitude, longitude).

    What lies in several files, under several `expver` or twice becomes one. Raises ValueError for
    what is missing, differs or is no weather.
    """
    time = np.datetime64(int(hour), "h")
    planes = {}
    for part in parts:
        for row in np.flatnonzero(part.times == time):
            with join_faults(part.file):
                for channel, values in part.read(row):
                    plane = values[part.rows]
                    if channel in planes:
                        first, other = planes[channel]
                        lesser = np.fmin(first, plane)
                        plane = np.fmax(first, plane)
                        if not np.array_equal(lesser, plane, equal_nan=True):
                            raise ValueError(
                                f"two values of {channel} at {utc(hour)}, here and in {other}, "
                                "differ; keep one"
                            )
                    planes[channel] = plane, part.file

    def weather(channel: str) -> np.ndarray:
        if channel[0] == "r" and channel not in planes:
            level = channel[1:]
            return relative_humidity_percent(
                weather(f"t{level}"), weather(f"q{level}"), 100 * np.float64(level)
            )
        if channel not in planes:
            names = ALIASES_BY_CHANNEL.get(channel) or ALIASES_BY_CHANNEL[channel[0]]
            raise ValueError(
                f"no {' or '.join(names[:2])} for {channel} at {utc(hour)}"
            )
        plane, file = planes[channel]
        with join_faults(file):
            require_valid_weather(channel, plane, hour)
        return plane

    return np.stack([weather(channel) for channel in CHANNELS]).astype(np.float32)
