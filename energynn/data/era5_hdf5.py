"""FourCastNet's yearly HDF5 files of ERA5, and those that others write in its layout."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np

from energynn.data.era5_values import (
    CHANNELS,
    OURS,
    Source,
    conversion,
    hours_of_year,
    quantity,
    require_weather,
)
from energynn.reading import one_fault, require_plain_hdf5

COUNT = 21  # of channels, where a file does not name them; the last is the sea's temperature
CHANNEL_NAMES = ("channels", "channel", "channel_names", "fields", "variables")
STARTS = ("start", "start_time", "start_date", "first_time")
REMEDY = (
    "write its times into its data set `time`, with units as `hours since 1970-01-01`"
)
TIMES = ("time", "valid_time", "timestamp", "timestamps")


def open_year(path: Path, year: int) -> Source:
    """Open ``fields`` float32 (times, channels, 721, 1440); what else the file holds says which
    channels, times, rows and units these are.

    Without names the channels are FourCastNet's 21; without times they are those from 1 January
    00 UTC on, so that a file of 1460 in a leap year ends on 30 December. Raises ValueError where
    the file says otherwise, or where a part of it was never written.
    """
    import h5py

    file = h5py.File(path)
    require_plain_hdf5(file, texts=True)
    fields = file["fields"]
    shape = fields.shape
    names = _words(file, CHANNEL_NAMES)
    if (
        len(shape) != 4
        or shape[1] != (len(names) or COUNT)
        or shape[3] != 2 * (shape[2] - 1)
        or fields.dtype != "f4"
    ):
        raise ValueError(
            f"`fields` must be float32 of shape (times, {len(names) or COUNT}, rows, "
            f"2 (rows - 1)), as (1460, 21, 721, 1440); it is {fields.dtype} {shape}"
        )
    channels = _order(names)
    _require_written(fields, 1 + max(channels))
    hours, rows, remarks = _times(file, year)
    latitude_deg, north_first = _latitude(file)
    known_deg = _numbers(file, ("longitude", "lon"), shape[3])
    even_deg = np.arange(shape[3]) * 360 / shape[3]
    longitude_deg = even_deg if known_deg is None else known_deg[:]
    units = _words(file, ("units",))
    conversions = [(1.0, 0.0)] * len(channels)
    if len(units) == shape[1]:
        conversions = [
            conversion(name, units[index] or quantity(name)[0])
            for name, index in zip(CHANNELS, channels, strict=True)
        ]

    def read(index: int) -> np.ndarray:
        with one_fault(path):
            state = fields[rows[index], : 1 + max(channels)][channels]
            state = state[:, ::north_first][:, :-1]
            for channel, plane in enumerate(state):
                factor, offset = conversions[channel]
                if (factor, offset) != (1, 0):
                    plane[:] = plane * factor + offset
                require_weather(CHANNELS[channel], plane, hours[index])
        return state

    return Source(hours, latitude_deg, longitude_deg, read, remarks)


def _words(file, names: tuple[str, ...]) -> list[str]:
    """Read the texts that an attribute or a data set of one of these names holds, if any."""
    for holder in (file["fields"].attrs, file.attrs, file):
        for name in {*names} & holder.keys():
            member = holder[name]
            if getattr(member, "dtype", np.dtype(object)).kind not in "OSU":
                continue
            values = np.ravel(
                np.array(member[()] if holder is file else member, object)
            )
            texts = [
                each.decode() if isinstance(each, bytes) else each for each in values
            ]
            if len(texts) == 1:
                texts = re.findall(r"[^][\s,;'\"]+", str(texts[0]))
            return [str(text) for text in texts]
    return []


def _numbers(file, names: tuple[str, ...], count: int):
    """Find the data set of one of these names that has so many numbers, or None."""
    found = (file[name] for name in names if name in file)
    fitting = (each for each in found if each.shape == (count,))
    return next((each for each in fitting if each.dtype.kind in "iuf"), None)


def _order(names: list[str]) -> list[int]:
    """Find where our channels are in a file. Raises ValueError for one that is missing."""
    if not names:
        return list(range(len(CHANNELS)))
    ours = []
    for name in map(str.lower, names):
        variable, level = re.fullmatch(r"(.*?)[_@-]?(\d*)(?:_?hpa)?", name).groups()
        ours.append(OURS.get(name) or OURS.get(variable, variable) + level)
    for channel in CHANNELS:
        if ours.count(channel) != 1:
            raise ValueError(
                f"its channels are {' '.join(names)}; one of them must be {channel}"
            )
    return [ours.index(channel) for channel in CHANNELS]


def _require_written(fields, channels: int) -> None:
    """Raise ValueError if chunks of the first channels are not there, which HDF5 reads as 0."""
    if fields.chunks is None:
        return
    offsets: list = []
    fields.id.chunk_iter(lambda chunk: offsets.append(chunk.chunk_offset))
    written = sum(offset[1] < channels for offset in offsets)
    shape = fields.shape[0], channels, *fields.shape[2:]
    sizes = zip(shape, fields.chunks, strict=True)
    chunks = math.prod(math.ceil(size / chunk) for size, chunk in sizes)
    if written < chunks:
        raise ValueError(
            f"{chunks - written} of {chunks} chunks of `fields` were never written; "
            "get it again"
        )


def _times(file, year: int) -> tuple[np.ndarray, np.ndarray, tuple[str, ...]]:
    """List the six-hourly times of a file, in hours since 1970, where they stand in it, and what
    a person should know of them.
    """
    count = file["fields"].shape[0]
    hours = hours_of_year(year)
    known = _known_times(file, count)
    if known is not None:
        if len(np.unique(known)) < count:
            raise ValueError("a time is there twice; keep one of them")
        rows = np.flatnonzero(np.isin(known, hours.astype("datetime64[h]")))
        if len(rows) == 0:
            raise ValueError(
                f"no six-hourly time of {year}; its {count} times are "
                f"{min(known):.16} to {max(known):.16}"
            )
        rows = rows[np.argsort(known[rows])]
        return known[rows].astype("datetime64[h]").astype(int), rows, ()
    another_step = count in (365, 366, 730, 732, 1095, 1098)
    if count > len(hours) or another_step:
        raise ValueError(
            f"{count} states, and {year} has {len(hours)} six-hourly times; {REMEDY}"
        )
    start = " ".join(_words(file, STARTS))[:16]
    if start and np.datetime64(start) != np.datetime64(f"{year}-01-01"):
        raise ValueError(
            f"its first state is of {start}, not of 1 January 00 UTC; {REMEDY}"
        )
    remark = f"{file.filename} has no times: its {count} states are taken from 1 January 00 UTC on"
    return hours[:count], np.arange(count), (remark,) if count < len(hours) else ()


def _known_times(file, count: int) -> np.ndarray | None:
    """Read the times that a file has, as dates or as CF writes them, or seconds since 1970."""
    texts = _words(file, TIMES)
    if len(texts) == count:
        return np.array(texts, "datetime64[s]")
    numbers = _numbers(file, TIMES, count)
    if numbers is None:
        return None
    import xarray as xr  # here, because it brings pandas

    attributes = {"units": "seconds since 1970-01-01"}
    for name in {"units", "calendar"} & numbers.attrs.keys():
        text = numbers.attrs[name]
        attributes[name] = text.decode() if isinstance(text, bytes) else str(text)
    times = xr.Dataset(coords={"time": ("time", numbers[:], attributes)})
    decoded = xr.decode_cf(times).time.values
    if decoded.dtype.kind != "M":
        raise ValueError("time is not of the standard calendar")
    return decoded


def _latitude(file) -> tuple[np.ndarray, int]:
    """List the latitudes without the south pole from north to south, and the step that leads so."""
    rows = file["fields"].shape[2]
    even = np.linspace(90, -90, rows)
    found = _numbers(file, ("latitude", "lat"), rows)
    step = -1 if found is not None and found[0] < found[-1] else 1
    if found is not None and not np.allclose(found[:][::step], even, atol=0.01):
        raise ValueError("latitude does not go evenly from pole to pole")
    return even[:-1], step
