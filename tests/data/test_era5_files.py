"""What an ERA5 file says of itself is used or refused: each case is a small file."""

import gc
import re
import shlex
import zipfile

import h5py
import numpy as np
import pytest
import xarray as xr

from energynn.data.era5 import GRAVITY_M_S2
from energynn.data.era5_values import CHANNELS, hours_of_year
from tests.data.test_era5_stores import LEVELS_HPA, dataset, state, write_hdf5
from tests.processes import answer, printed, refusal

HOURS = hours_of_year(2019)[:4]
FILE = "2019.h5"
REVERSED = [*CHANNELS, "sst"][::-1]


def hdf5(change=lambda values: values, hours=None, **members):
    """FourCastNet's file with other values, with times, with attributes (a_) and data sets."""

    def write(folder):
        write_hdf5(folder, 2019, 4)
        with h5py.File(folder / FILE, "r+") as file:
            values = change(file["fields"][:]).astype("f4")
            del file["fields"]
            file["fields"] = values
            for name, value in members.items():
                holder = file["fields"].attrs if name.startswith("a_") else file
                holder[name.removeprefix("a_")] = value
        if hours is not None:
            write_times(folder / FILE, hours)

    return write


def write_times(path, hours):
    with h5py.File(path, "r+") as file:
        file["time"] = hours
        file["time"].attrs["units"] = "hours since 1970-01-01"


def empty(*shape, kind="f4"):
    def write(folder):
        with h5py.File(folder / FILE, "w") as file:
            file.create_dataset("fields", shape, kind)

    return write


def linked(folder):
    write_hdf5(folder, 2018, 4)
    with h5py.File(folder / FILE, "w") as file:
        file["fields"] = h5py.ExternalLink("2018.h5", "fields")


def reversed_hdf5(**members):
    return hdf5(lambda values: values[:, ::-1], **members)


def cut(folder):
    hdf5()(folder)
    (folder / FILE).write_bytes((folder / FILE).read_bytes()[:-1000])


def netcdf(change=lambda source: source, hours=HOURS):
    """0.nc as from the Climate Data Store after a change, or 0.nc, 1.nc, ... of several."""

    def write(folder):
        sources = change(dataset(hours, which=1))
        for k, source in enumerate(sources if isinstance(sources, list) else [sources]):
            source.to_netcdf(folder / f"{k}.nc", engine="scipy")

    return write


def with_value(name, value):
    def change(source):
        source[name][1, ..., 2, 3] = value
        return source

    return netcdf(change)


def in_unit(name, unit, change):
    return netcdf(lambda s: s.assign({name: change(s[name]).assign_attrs(units=unit)}))


def with_cmips_names(source):
    source = source.rename(sp="ps", msl="psl", t="ta", u="other", v="va")
    source["other"].attrs["standard_name"] = "eastward_wind"
    source = source.rename(level="plev", latitude="lat", longitude="lon")
    return source.assign_coords(plev=source.plev * 100.0)


def with_wind_at_10_hPa(source):
    far = {name: source[name] + 1 for name in ("u10", "v10")}
    return source.rename(u10="u10m", v10="v10m").assign(far)


def with_wind_at_10_hPa_beside_10u(source):
    far = {name: source[name] + 1 for name in ("u10", "v10")}
    return source.rename(u10="10u", v10="10v").assign(far)


def with_step_type(kind):
    return netcdf(
        lambda s: s.assign(t2m=s.t2m.assign_attrs(GRIB_stepType=kind)),
    )


def with_gribs_names(source):
    """As NCAR has them, and as levels in the names."""
    levels = {"Z_500": 500, "geopotential-50": 50, "z850hPa": 850, "Z1000": 1000}
    levels = {
        name: source.z.sel(level=level, drop=True) for name, level in levels.items()
    }
    # u_10 may be at 10 hPa, where u10 is at 10 m
    other = xr.Dataset({"v_10": source.v10 + 1})
    source = xr.merge([other, source.drop_vars("z").assign(levels)])
    return source.rename(u10="VAR_10U", t2m="VAR_2T", msl="MSL", time="Time")


def forecast(source):
    begin = source.time - np.timedelta64(6, "h")
    return source.assign_coords(valid_time=("time", source.time.values), time=begin)


def without_units(source):
    return source.assign_coords(time=[0.0, 6, 12, 18])


def as_new(source):
    source = source.assign_coords(expver=("time", ["0001"] * 4), number=0)
    return source.rename(level="pressure_level", time="valid_time")


def with_calendar(source):
    source["time"] = ("time", [0.0, 6, 12, 18])
    source.time.attrs = {"units": "hours since 2019-01-01", "calendar": "365_day"}
    return source


def expver(source, *others):
    """Final states of the first times, and preliminary ones of the others."""
    parts = [source.isel(time=[0, 1]), source.isel(time=[2, 3]), *others]
    numbers = xr.IndexVariable("expver", [1, 5, 6][: len(parts)])
    return xr.concat(parts, numbers, join="outer")


def apart(source, *levels):
    """The surface, and the levels in files of their own."""
    upper = source[[*"tuvzr"]]
    parts = [upper.sel(level=level) for level in levels] or [upper]
    return [source.drop_dims("level"), *parts]


def surface_geopotential(source):
    surface, levels = apart(source)
    z = surface.t2m + 1
    return [surface.assign(z=z), levels.assign(z=z), levels[["z"]]]


def grids(source, move, kind):
    surface, levels = apart(source)
    longitude = surface.longitude + 1 / 3
    return [
        surface.assign_coords(longitude=longitude),
        levels.assign_coords(longitude=(longitude + move).astype(kind)),
    ]


def hidden(folder):
    netcdf()(folder)
    (folder / "._single.nc").write_bytes(b"\0\5\26\7")


def zipped(folder):
    with zipfile.ZipFile(folder / "era5.nc", "w") as archive:
        archive.writestr("data.nc", b"CDF")


def zarr(folder):
    pytest.importorskip("zarr", reason="needs the extra era5")
    store = folder / "era5-2019"
    dataset(HOURS, which=1).to_zarr(store, consolidated=False, zarr_format=3)


# Case -> how it is written, so that the states must be right.
RIGHT = {
    "hdf5 without sst": hdf5(
        lambda values: values * np.where(np.arange(21) < 20, 1, np.nan)[:, None, None]
    ),
    "times": hdf5(lambda values: values[::-1], HOURS[::-1]),
    "every hour": netcdf(hours=np.arange(HOURS[0] - 3, HOURS[0] + 20)),
    "forecast": netcdf(forecast),
    "the wind at 10 hPa": netcdf(with_wind_at_10_hPa),
    "the wind at 10 hPa beside 10u": netcdf(with_wind_at_10_hPa_beside_10u),
    "a GRIB of instants": with_step_type("instant"),
    "a count of channels": reversed_hdf5(
        a_channels=21, channel_names=np.array(REVERSED, "S")
    ),
    "a history": hdf5(a_history="made by hand", a_source=["era5"], number=0),
    "without an axis": hdf5(latitude=np.zeros(9)),
    "of makani": hdf5(valid_data=np.ones((4, 21)), a_units=["K"] * 21),
    "begins well": hdf5(a_start_time="20190101"),
    "begins in UTC": hdf5(a_start_time="2019-01-01T00:00:00+00:00"),
    "begins in Paris": hdf5(a_start_time="2019-01-01T01:00:00+01:00"),
    "degC": in_unit("t2m", "degC", lambda values: values - 273.15),
    "hPa": in_unit("sp", "hPa", lambda values: values / 100),
    "gpm": in_unit("z", "gpm", lambda values: values / GRAVITY_M_S2),
    "mb": in_unit("sp", "mb", lambda values: values / 100),
    "Kelvin": in_unit("t2m", "Kelvin", abs),
    "degrees K": in_unit("t2m", "degrees K", abs),
    "GRIB": netcdf(with_gribs_names),
    "CMIP": netcdf(with_cmips_names),
    "expver": netcdf(expver),
    "new CDS": netcdf(as_new),
    "member": netcdf(lambda s: s.expand_dims(number=[0], axis=1)),
    "equal twice": netcdf(lambda s: s.isel(time=[0, 1, 1, 2, 3])),
    "hidden": hidden,
    "levels apart": netcdf(lambda s: apart(s, *LEVELS_HPA)),
    "times apart": netcdf(lambda s: [s.isel(time=k) for k in range(4)]),
    "surface z": netcdf(surface_geopotential),
    "float32 grid": netcdf(lambda s: grids(s, 0, "f4")),
    "rows after columns": netcdf(lambda s: s.transpose(..., "longitude", "latitude")),
    "shuffled": netcdf(lambda s: s.isel(latitude=[0, 2, 1, *range(3, 9)])),
    "zarr by content": zarr,
    "attribute": reversed_hdf5(a_channels=REVERSED),
    "bytes": reversed_hdf5(channel=np.array(REVERSED, "S")),
    "one text": reversed_hdf5(a_fields=", ".join(REVERSED)),
    **{
        f"{name} for z": reversed_hdf5(
            channel=[each.replace("z", name) for each in REVERSED]
        )
        for name in ("geopotential_", "Z-", "z@")
    },
    "south first": hdf5(
        lambda values: values[:, :, ::-1], latitude=np.linspace(-90, 90, 9)
    ),
}
# Case -> how it is written, and what is said of it.
REFUSED = {
    # a count is no clock
    "surplus": (empty(1461, 21, 9, 16), "1461 states, and 2019 has 1460"),
    "12-hourly": (empty(730, 21, 9, 16), "730 states"),
    "begins late": (hdf5(a_start_time="2019-01-01T12"), "2019.h5: it starts at"),
    "texts": (hdf5(time=["2019-01-01T00"] * 4), "2019.h5: its times are no numbers"),
    "03, 09": (hdf5(hours=HOURS + 3), "2019-01-01T03:00 to 2019-01-01T21:00"),
    "a time twice": (hdf5(hours=HOURS[[0, 1, 1, 2]]), "2019.h5: two values of u10"),
    "12 hours apart": (
        netcdf(hours=HOURS[0] + 12 * np.arange(4)),
        "4 of 1460 times of 2019, and none is 6 h after another",
    ),
    "no units of time": (netcdf(without_units), "0.nc: time has no units; write them"),
    "a forecast's lead": (
        netcdf(lambda s: s.assign_coords(step=np.timedelta64(6, "h"))),
        "0.nc: step: add this lead",
    ),
    "a mean of a month, each hour": (
        with_step_type("avgid"),
        "0.nc: t2m is no state but of times between: time: avgid",
    ),
    "no time at all": (
        netcdf(lambda s: s.isel(time=slice(0, 0))),
        "neither <year>.h5 of every year",
    ),
    "a mean of six hours": (
        netcdf(lambda s: s.assign(t2m=s.t2m.assign_attrs(cell_methods="time: mean"))),
        "0.nc: t2m is no state but of times between: time: mean",
    ),
    "a lead in hours": (
        netcdf(lambda s: s.assign_coords(step=6)),
        "0.nc: step: add this lead",
    ),
    "a region": (
        netcdf(lambda s: s.isel(longitude=slice(0, 7))),
        "0.nc: longitude does not go eastward once around in equal steps",
    ),
    "row numbers": (
        netcdf(lambda s: s.assign_coords(latitude=np.arange(9.0))),
        "0.nc: latitude does not go in equal steps from pole to pole",
    ),
    "its own words": (
        reversed_hdf5(channels=np.array(REVERSED, "S"), TIME=np.arange(4) * 21_600.0),
        "of 2019; look at --years",
    ),
    "a step of an hour": (hdf5(a_dt=1), "2019.h5: holds dt, which is not understood"),
    "a clock of its own": (hdf5(date=HOURS), "2019.h5: holds date, which is not"),
    "a group": (hdf5(**{"coords/lat": HOURS}), "2019.h5: holds coords, which is not"),
    "gaps of makani": (
        hdf5(valid_data=np.eye(4, 21)),
        "2019.h5: holds valid_data, which",
    ),
    "a year of its own": (hdf5(date="2018"), "2019.h5: holds date, which is not"),
    "no fields": (lambda folder: h5py.File(folder / FILE, "w").close(), "no data set"),
    "rows of others": (
        hdf5(latitude=np.linspace(90, -90, 3)),
        "2019.h5: latitude: 3 values of 9",
    ),
    "a row missing": (
        netcdf(lambda s: s.drop_isel(latitude=3)),
        "latitude does not go in equal steps",
    ),
    "fewer times": (hdf5(hours=HOURS[:3]), "2019.h5: 3 times of 4 states"),
    "365_day": (netcdf(with_calendar), "0.nc: time is of the calendar 365_day"),
    "rows": (empty(4, 21, 8, 16), r"2019.h5: .* it is float32 \(4, 21, 8, 16\)"),
    "float64": (empty(4, 21, 9, 16, kind="f8"), r"it is float64 \(4, 21, 9, 16\)"),
    "nothing": (lambda folder: None, "neither <year>.h5 of every year"),
    "another year": (netcdf(hours=HOURS - 8760), "of 2019; look at --years"),
    "no times": (empty(9, 16), r"2019.h5: .* it is float32 \(9, 16\)"),
    "cut": (cut, "truncated file"),
    "link": (linked, "2019.h5: .*is a link"),
    "zeros": (
        hdf5(lambda values: values * (np.arange(4) < 2)[:, None, None, None]),
        "u10 is 0 to 0",
    ),
    "half a plane": (
        netcdf(lambda s: s.assign(u10=s.u10 * (s.longitude < 180))),
        "u10 is 0 to",
    ),
    "fill in hdf5": (
        hdf5(lambda values: np.where(values > 290, -999, values), a__FillValue=-999.0),
        "2019.h5: no finite u10 at 2019-01-01T00 UTC",
    ),
    "fill": (with_value("t2m", 9.97e36), "0.nc: t2m is .* to 9.97e"),
    "NaN": (with_value("z", np.nan), "0.nc: no finite z1000 at 2019-01-01T06 UTC"),
    "no t2m": (netcdf(lambda s: s.drop_vars("t2m")), "no 2m_temperature or t2m .* at"),
    "a level missing": (
        netcdf(lambda s: s.sel(level=[50, 500, 850])),
        "no u_component_of_wind or u for u1000 at 2019-01-01T00 UTC",
    ),
    "another kind": (in_unit("t2m", "m", abs), "0.nc: t2m is in 'm'"),
    "model levels": (in_unit("level", "1", abs), "0.nc: level is in '1'"),
    "unsaid hPa": (
        netcdf(lambda s: s.assign(msl=s.msl / 64)),
        "mslp is .*; convert it, or",
    ),
    "expver differ": (
        netcdf(lambda s: expver(s, s.assign(sp=s.sp + 1))),
        "0.nc: two values of sp at .* differ; keep one",
    ),
    "members": (
        netcdf(lambda s: s.expand_dims(number=range(10), axis=1)),
        "0.nc: .* has a dimension number of 10",
    ),
    "zip": (zipped, "era5.nc: is a ZIP archive; unpack it"),
    "no NetCDF": (
        lambda folder: (folder / "a.nc").write_text("<html>"),
        "a.nc: is no NetCDF file",
    ),
    "another grid": (
        netcdf(lambda s: grids(s, 1, "f8")),
        "1.nc: longitude differs from .*0.nc",
    ),
    "westward": (
        netcdf(lambda s: s.isel(longitude=slice(None, None, -1))),
        "0.nc: longitude does not go eastward once around",
    ),
    "other channel": (
        reversed_hdf5(channel=[name.replace("t500", "t600") for name in REVERSED]),
        "2019.h5: no temperature or t for t500",
    ),
}
CONVERTED = ("degC", "hPa", "mb", "gpm")


def command_on(tmp_path, write):
    """The command that stores what is written."""
    folder = tmp_path / "source"
    folder.mkdir()
    write(folder)
    return f"data era5 --source {folder} --out {tmp_path}/out --years 2019"


@pytest.mark.filterwarnings("ignore:Failed to open Zarr store")
@pytest.mark.parametrize("case", RIGHT)
def test_what_a_file_says_of_itself_is_used(tmp_path, case):
    told = answer(command_on(tmp_path, RIGHT[case]))
    stored = np.load(tmp_path / "out" / "2019.npy")
    states = [state(hour) for hour in HOURS]
    assert np.allclose(stored, states, rtol=1e-5 if case in CONVERTED else 0, atol=0)
    assert "2019: 4 of 1460 times" in told
    assert ("1 times of" in told) == (case == "equal twice")


@pytest.mark.parametrize("write, says", REFUSED.values(), ids=REFUSED)
def test_what_a_file_says_of_itself_is_refused(tmp_path, write, says):
    error = refusal(command_on(tmp_path, write))
    assert re.search(says, error), error
    assert not list(tmp_path.glob("out/*.npy"))


def test_times_written_into_a_file_of_too_many_states_help(tmp_path):
    """The remedy of the refusal, typed."""
    values = np.random.default_rng(0).uniform(220, 300, (366, 21, 9, 16))
    values[:, [CHANNELS.index(name) for name in ("sp", "mslp", "z500")]] *= 256
    with h5py.File(tmp_path / FILE, "w") as file:
        file["fields"] = values.astype("f4")
    words = f"data era5 --source {tmp_path} --out {tmp_path / 'out'} --years 2019"
    error = refusal(words)
    assert "data set `time`, with units as `hours since" in error
    gc.collect()  # Python 3.13 keeps the refused file open until then
    write_times(tmp_path / FILE, hours_of_year(2019)[0] + 3 * np.arange(366))
    answer(words)
    stored = np.load(tmp_path / "out" / "2019.npy")
    assert np.array_equal(stored, values.astype("f4")[::2, :20, :8])


@pytest.mark.slow
def test_a_whole_year_is_complete_and_a_gap_is_said(tmp_path):
    source = tmp_path / "source"
    write_hdf5(source, 2019)
    write_hdf5(source, 2018, 25)
    write_times(source / "2018.h5", np.delete(hours_of_year(2018)[:40], slice(10, 25)))
    words = f"data era5 --source {source} --out {tmp_path}/out --years"
    assert ": complete" in answer(words, "2019")
    for _ in range(2):  # said again of what is there
        told = answer(words, "2018-2019")
        assert "2018: 25 of 1460 times" in told and ": complete" not in told
    (remedy,) = re.findall("`(rm .*)`", told)
    printed(*shlex.split(remedy))
    write_hdf5(source, 2018)
    assert ": complete" in answer(words, "2018")
