"""FourCastNet's yearly HDF5 files of ERA5, and those that others write in its layout."""

import re
from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import chain

import numpy as np

from energynn.data.era5_values import (
    CHANNELS,
    VOCABULARY,
    Era5Part,
    hours_of_year,
    our_name,
    require_calendar_dates,
)
from energynn.host.reading import require_plain_hdf5

NAMES_IN_HDF5 = VOCABULARY["hdf5"]
KNOWN_NAMES = set(chain.from_iterable(NAMES_IN_HDF5.values()))
MISSING_TIMES_REMEDY = (
    "write its times into a data set `time`, with units as `hours since 1970-01-01`"
)
# How many states a year has 8, 12 and 24 hours apart.
STATES_A_YEAR_OF_OTHER_STEPS = (365, 366, 730, 732, 1095, 1098)


def open_hdf5_file(path: str, year: int) -> Era5Part:
    """Open ``fields`` float32 (times, channels, 721, 1440); what else the file holds says which
    channels, times, rows and columns these are.

    Without names the channels are FourCastNet's 21; without times they are those from 1 January
    00 UTC on, so that a file of 1460 in a leap year ends on 30 December. Raises ValueError where
    the file says otherwise, or what we do not understand.
    """
    import h5py

    file = h5py.File(path)
    require_plain_hdf5(file, texts=True)
    if "fields" not in file:
        raise ValueError("no data set `fields`; NetCDF ends in .nc")
    _require_known_names(file)
    fields = file["fields"]
    shape = fields.shape
    names = []
    # names are texts, bytes or one text; numbers name none
    for said in _find_texts(file, *NAMES_IN_HDF5["channel"]):
        text = " ".join(said.astype("S").astype(str))
        names = names or re.findall(r"[\w@-]*[A-Za-z][\w@-]*", text)
    channels = [our_name(name, names) for name in names] or [*CHANNELS, "sst"]
    if (
        len(shape) != 4
        or shape[1] != len(channels)
        or shape[3] != 2 * (shape[2] - 1)
        or fields.dtype != "f4"
    ):
        raise ValueError(
            f"`fields` must be float32 of shape (times, {len(channels)}, rows, "
            f"2 (rows - 1)), as (1460, 21, 721, 1440); it is {fields.dtype} {shape}; other "
            "channels are named in a data set `channel`"
        )
    times, remark = _read_times(file, year)
    latitude_deg = _read_axis(
        file, NAMES_IN_HDF5["latitude"], np.linspace(90, -90, shape[2])
    )
    usual_deg = np.arange(shape[3]) * 360 / shape[3]
    longitude_deg = _read_axis(file, NAMES_IN_HDF5["longitude"], usual_deg)
    if times.shape != shape[:1]:
        raise ValueError(
            f"{times.size} times of {shape[0]} states; {MISSING_TIMES_REMEDY}"
        )
    fill = [*_find_texts(file, *NAMES_IN_HDF5["fill"])][:1]

    def read_channels(row: int) -> Iterator[tuple[str, np.ndarray]]:
        planes = fields[row]
        planes[np.isin(planes, fill)] = np.nan
        return zip(channels, planes, strict=True)

    return Era5Part(
        path, times, latitude_deg, longitude_deg, read_channels, remark=remark
    )


def _require_known_names(file) -> None:
    """Raise ValueError for what a file says that we do not understand."""
    for holder in (file["fields"].attrs, file.attrs, file):
        for name, said in holder.items():
            if not _is_understood(name, said):
                raise ValueError(
                    f"holds {name}, which is not understood; take it out, or name it time, "
                    "channel, latitude, longitude or start_time"
                )


def _is_understood(name: str, said) -> bool:
    """Tell whether a name is known, or nothing follows from what it says: an attribute of one text,
    as a history, a number that is 0, or makani's ``valid_data`` where all are.
    """
    import h5py

    if name.lower() in KNOWN_NAMES:
        return True
    if getattr(said, "size", 1) > 1:
        return name == "valid_data" and bool(np.all(said))
    value = np.array(said)
    if value.dtype.kind in "SUO":
        return not isinstance(said, h5py.HLObject)
    return not value.any()


def _read_axis(file, names: list[str], usual_deg: np.ndarray) -> np.ndarray:
    """Read latitudes or longitudes in degrees, the ``usual_deg`` where the file has none.

    Raises ValueError for others than one of each row or column.
    """
    axes = [axis for axis in _find_texts(file, *names) if np.any(axis)]
    fit = [axis for axis in axes if axis.shape == usual_deg.shape]
    if axes and not fit:
        raise ValueError(f"{names[0]}: {axes[0].size} values of {usual_deg.size}")
    return fit[0] if fit else usual_deg


def _find_texts(file, *names: str) -> Iterator[np.ndarray]:
    """Read what attributes and data sets of these names say, flat."""
    for holder in (file["fields"].attrs, file.attrs, file):
        called = {name.lower(): name for name in holder}
        for name in names:
            if name in called and (holder is not file or name != "fields"):
                yield np.ravel(np.array(holder[called[name]]))


def _read_times(file, year: int) -> tuple[np.ndarray, str]:
    """List the times of a file, and what a person should know of them."""
    count = len(file["fields"])
    called = {name.lower(): name for name in file}
    clock = next(
        (file[called[name]] for name in NAMES_IN_HDF5["time"] if name in called), None
    )
    if clock is not None and (clock.attrs.get("units") or np.any(clock)):
        import xarray as xr  # here, because it brings pandas

        if clock.dtype.kind not in "iuf":
            raise ValueError(f"its times are no numbers; {MISSING_TIMES_REMEDY}")
        attributes = {"units": "seconds since 1970-01-01"}
        for name, text in clock.attrs.items():
            attributes[name] = text.decode() if isinstance(text, bytes) else text
        time = xr.decode_cf(
            xr.Dataset(coords={"time": ("time", clock[:], attributes)})
        ).time
        require_calendar_dates(time)
        return time.values, ""
    hours = hours_of_year(year)
    if count > len(hours) or count in STATES_A_YEAR_OF_OTHER_STEPS:
        raise ValueError(
            f"{count} states, and {year} has {len(hours)} six-hourly times; {MISSING_TIMES_REMEDY}"
        )
    starts = _find_texts(file, *NAMES_IN_HDF5["start"])
    start = "".join(next(starts, np.empty(0)).astype(str))
    begin = datetime.fromisoformat(start or f"{year}-01-01")
    # in UTC, where it names no other zone
    begin = begin.replace(tzinfo=begin.tzinfo or UTC)
    if begin != datetime(year, 1, 1, tzinfo=UTC):
        raise ValueError(
            f"it starts at {start}, not at 1 January 00 UTC; {MISSING_TIMES_REMEDY}"
        )
    remark = (
        f"{file.filename} has no times: its {count} states are taken from 1 January on"
    )
    times = hours[:count].astype("datetime64[h]")
    return times, remark if count < len(hours) else ""
