"""FourCastNet's channels of ERA5, whatever file they come from: names that others give them, units,
and what can be weather.
"""

import re
import warnings
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from energynn.data.era5 import GRAVITY_M_S2
from energynn.host.reading import read_toml

STEP_H = 6
CHANNELS = tuple(
    "u10 v10 t2m sp mslp t850 u1000 v1000 z1000 u850 v850 z850 u500 v500 z500 t500 z50 r500 r850 "
    "tcwv".split()
)
LEVELS_HPA = (50, 500, 850, 1000)
VOCABULARY = read_toml(Path(__file__).with_name("era5_vocabulary.toml"))
ALIASES_BY_CHANNEL = VOCABULARY["variables"]
CHANNEL_BY_ALIAS = {
    other: name for name, others in ALIASES_BY_CHANNEL.items() for other in others
}
WANTED_NAMES = {*ALIASES_BY_CHANNEL, *CHANNELS, "q500", "q850"}
# of a plane, in squares of four; a part of a file that was never written reads as zeros
MAX_SHARE_OF_ZEROS = 0.01


@dataclass(frozen=True)
class Era5Part:
    """Hold what one file has: ``read(row)`` gives names and planes, (latitude, longitude) in our
    units, of one of its times; a channel may come more than once.

    times: (times,) datetime64; content: the same for files of the same variables and levels;
    remark: what a person should know.
    """

    file: str
    times: np.ndarray
    latitude_deg: np.ndarray
    longitude_deg: np.ndarray
    read: Callable[[int], Iterable[tuple[str, np.ndarray]]]
    content: str = ""
    remark: str = ""

    @property
    def rows(self) -> np.ndarray:
        """Those of a plane from north to south, without the south pole, as in FourCastNet (721 rows
        -> 720).
        """
        order = np.argsort(-self.latitude_deg)
        return order[self.latitude_deg[order] > -89.999]


@dataclass(frozen=True)
class YearSource:
    """Hold one year: ``read(index)`` gives a state, (channels, latitude, longitude) float32 in
    SI units and %.

    hours: (times,) int, since 1970-01-01 00 UTC, rising, multiples of six. ``read`` may be called
    from several threads, and raises ValueError for what is no weather. remark: what a person
    should know.
    """

    hours: np.ndarray
    latitude_deg: np.ndarray
    longitude_deg: np.ndarray
    read: Callable[[int], np.ndarray]
    remark: str = ""


def our_name(name: str, others: Collection[str]) -> str:
    """Make ours of the name of a variable or channel, in whatever form: VAR_2T, z_500, z-500hPa.

    A name that is none of ours stays, in small letters; so does the wind at 10 hPa: u_10, or u10
    where u10m or 10u is among the ``others``.
    """
    name = name.lower().removeprefix("var_")
    variable, level = re.fullmatch(r"(.*?)[_@-]?(\d*)(?:_?hpa)?", name).groups()
    at_level = CHANNEL_BY_ALIAS.get(variable, variable) + level
    ours = CHANNEL_BY_ALIAS.get(name)
    surface = {f"{name}m", f"{level}{variable}"}
    is_like_surface = not ours and at_level in CHANNEL_BY_ALIAS
    if level and (is_like_surface or surface & {*others}):
        return f"{name} hPa"
    return ours or at_level


def hours_of_year(year: int) -> np.ndarray:
    """List the 6-hourly times of a year, 1460 or 1464 of them, in hours since 1970."""
    hours = np.arange(f"{year}", f"{year + 1}", STEP_H, dtype="datetime64[h]")
    return hours.astype(int)


def require_calendar_dates(time) -> None:
    """Raise ValueError where an xarray time has no dates of the calendar of ERA5."""
    if time.dtype.kind != "M":
        calendar = time.encoding.get("calendar")
        raise ValueError(
            f"time is of the calendar {calendar}, ERA5's is the standard one"
            if calendar
            else "time has no units; write them, as `hours since 1970-01-01`"
        )


def six_hourly_times(times: np.ndarray, year: int) -> np.ndarray:
    """List which of the 6-hourly times of a year are there, in hours since 1970.

    Raises ValueError naming those that are there if none is of them, and where none is six hours
    after another.
    """
    wanted = hours_of_year(year)
    hours = wanted[np.isin(wanted.astype("datetime64[h]"), times)]
    if len(hours) == 0:
        raise ValueError(
            f"no six-hourly time of {year}; look at --years and --source, whose "
            f"{len(times)} times are {min(times)!s:.16} to {max(times)!s:.16}"
        )
    if len(hours) > 1 and STEP_H not in np.diff(hours):
        raise ValueError(
            f"{len(hours)} of {len(wanted)} times of {year}, and none is {STEP_H} h after "
            "another; get those of 00, 06, 12 and 18 UTC"
        )
    return hours


def utc(hour: int) -> str:
    """Write an hour since 1970 as a date."""
    return f"{np.datetime64(int(hour), 'h')} UTC"


def range_of_variable(name: str) -> tuple[str, float, float]:
    """Look up unit, least and most of a variable or channel."""
    ranges = VOCABULARY["ranges"]
    return ranges.get(name) or ranges[name[0]]


def convert_to_our_unit(name: str, values: np.ndarray, unit: str | None) -> np.ndarray:
    """Convert values from the unit that their file names, as CF and pint have it; a geopotential
    height becomes a geopotential.

    Raises ValueError where the units are of two kinds, or the unit is none.
    """
    ours = range_of_variable(name)[0]
    if unit in (None, "", ours):
        return values
    try:
        with warnings.catch_warnings(action="ignore"):  # it has no matplotlib
            from cf_xarray.units import units as registry
    except ImportError as error:
        raise ValueError("units need packages: pip install 'energynn[era5]'") from error
    try:
        # names, but no symbols, in any letters: Kelvin, Pascals
        name_of_unit = re.sub(r"\b[A-Z][a-z]{4,}", lambda word: word[0].lower(), unit)
        name_of_unit = re.sub(r"\bmb\b", "hPa", name_of_unit)
        # none of ours is an angle
        name_of_unit = re.sub(r"\bdeg(ree)?s? ", "", name_of_unit)
        quantity = registry.Quantity(values, name_of_unit)
        if ours == "m2/s2" and quantity.check("[length]"):
            quantity = quantity * registry.Quantity(GRAVITY_M_S2, "m/s2")
        return quantity.to(ours).magnitude
    except Exception as error:  # pint's own errors are of many types
        raise ValueError(
            f"{name} is in {unit!r}, which is no unit like {ours}; write CF's"
        ) from error


def require_valid_weather(name: str, plane: np.ndarray, hour: int) -> None:
    """Raise ValueError naming channel and time for values that are no weather: missing, a
    fill value, never written, or in another unit.

    plane: (latitude, longitude).
    """
    unit, least, most = range_of_variable(name)
    low = float(plane.min())
    high = float(plane.max())
    shown = f"{name} is {low:g} to {high:g}"
    zero = plane == 0
    zero = zero[1:, 1:] & zero[1:, :-1] & zero[:-1, 1:] & zero[:-1, :-1]
    fault = ""
    if not np.isfinite(high - low):
        fault = f"no finite {name} at {utc(hour)}; get it again"
    elif low == high or zero.mean() > MAX_SHARE_OF_ZEROS:
        fault = f"{shown} at {utc(hour)}, as if it had not been written; get it again"
    elif low < least or high > most:
        fault = (
            f"{shown} at {utc(hour)}, outside of {least:g} to {most:g} {unit}; convert it, or get "
            "it again"
        )
    if fault:
        raise ValueError(fault)


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

    mixed_K = np.clip(temperature_K, 250.16, 273.16)
    water = ((mixed_K - 250.16) / 23) ** 2
    over_water_Pa = saturation_Pa(17.502, 32.19)
    over_ice_Pa = saturation_Pa(22.587, -0.7)
    mixed_Pa = water * over_water_Pa + (1 - water) * over_ice_Pa
    vapour_Pa = (
        pressure_Pa * specific_humidity / (0.621981 + 0.378019 * specific_humidity)
    )
    return 100 * vapour_Pa / mixed_Pa
