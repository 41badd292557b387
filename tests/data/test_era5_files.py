"""What an ERA5 file says of itself is used or refused: each case is a small file, and the words of
its refusal, or none where the states must be right.
"""

import re
import zipfile

import h5py
import numpy as np
import pytest
import xarray as xr

from energynn import cli
from energynn.data.era5 import GRAVITY_M_S2
from energynn.data.era5_values import CHANNELS, NAMES, hours_of_year
from tests.data.test_era5_stores import SURFACE, dataset, state, write_hdf5

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


def states(count):
    def write(folder):
        with h5py.File(folder / FILE, "w") as file:
            file.create_dataset("fields", (count, 21, 9, 16), "f4")

    return write


def reversed_hdf5(**members):
    return hdf5(lambda values: values[:, ::-1], **members)


def cds(names=NAMES):
    return dataset(HOURS, names, which=1)


def netcdf(change=lambda source: source):
    return files(lambda: {"store": change(cds())})


def files(sources):
    def write(folder):
        for name, source in sources().items():
            source.to_netcdf(folder / f"{name}.nc", engine="scipy")

    return write


def with_value(name, value):
    def change(source):
        source[name][1, 2, 3] = value
        return source

    return change


def in_units(change, **units):
    def changed(source):
        source = source.assign(change(source))
        for name, unit in units.items():
            source[name].attrs["units"] = unit
        return source

    return netcdf(changed)


def with_cmips_names(source):
    source = source.rename(sp="ps", msl="psl", t="ta", u="other", v="va")
    source["other"].attrs["standard_name"] = "eastward_wind"
    source = source.rename(level="plev", latitude="lat", longitude="lon")
    return source.assign_coords(plev=source.plev * 100.0)


def expver(source, *others):
    """Final states of the first times, and preliminary ones of the others."""
    parts = [source.isel(time=[0, 1]), source.isel(time=[2, 3]), *others]
    return xr.concat(
        parts, xr.IndexVariable("expver", [1, 5, 6][: len(parts)]), join="outer"
    )


def levels_apart():
    upper = cds("tuvzr")
    levels = {f"level{hPa}": upper.sel(level=hPa) for hPa in (50, 500, 850, 1000)}
    return levels | {"surface": cds(SURFACE)}


def levels_in_pairs():
    upper = cds("tuvzr")
    pairs = [upper.sel(level=pair) for pair in ([50, 500], [850, 1000])]
    return {"surface": cds(SURFACE), "high": pairs[0], "low": pairs[1]}


def surface_geopotential():
    surface = cds(SURFACE)
    return {"surface": surface.assign(z=surface.t2m + 1), "levels": cds("tuvzr")}


def almost_the_same_grid():
    surface, levels = (
        source.assign_coords(longitude=(source.longitude + 1 / 3).astype(kind))
        for source, kind in ((cds(SURFACE), "f4"), (cds("tuvzr"), "f8"))
    )
    return {"surface": surface, "levels": levels}


def hidden(folder):
    netcdf()(folder)
    (folder / "._single.nc").write_bytes(b"\0\5\26\7")


def zipped(folder):
    with zipfile.ZipFile(folder / "era5.nc", "w") as archive:
        archive.writestr("data.nc", b"CDF")


def zarr_by_content(folder):
    pytest.importorskip("zarr", reason="needs the extra era5")
    cds().to_zarr(folder / "era5-2019", zarr_format=3, consolidated=False)


def missing_chunk(folder):
    pytest.importorskip("zarr", reason="needs the extra era5")
    chunks = {"t2m": {"chunks": (1, 9, 16)}}
    cds().to_zarr(folder / "s", zarr_format=2, encoding=chunks, consolidated=False)
    (folder / "s" / "t2m" / "1.0.0").unlink()
    about = folder / "s" / "t2m" / ".zarray"
    about.write_text(about.read_text().replace('"NaN"', "null"))


def with_calendar(source):
    source["time"] = ("time", [0.0, 6, 12, 18])
    source.time.attrs = {"units": "hours since 2019-01-01", "calendar": "365_day"}
    return source


CASES = {
    "plain": (netcdf(), ""),
    "hdf5": (hdf5(), ""),
    # a count is no clock
    "hourly": (states(8760), "8760 states, and 2019 has 1460"),
    "surplus": (states(1461), "1461 states"),
    "12-hourly": (states(730), "730 states"),
    "begins late": (hdf5(a_start_time="2019-01-01T12"), "2019.h5: it starts at"),
    "times": (hdf5(lambda values: values[::-1], HOURS[::-1]), ""),
    "03, 09": (hdf5(hours=HOURS + 3), "2019-01-01T03:00 to 2019-01-01T21:00"),
    "a time twice": (hdf5(hours=HOURS[[0, 1, 1, 2]]), "a time is there twice"),
    "12 hours apart": (
        netcdf(lambda s: s.assign_coords(time=s.time[0] + 2 * (s.time - s.time[0]))),
        "4 of 1460 times of 2019, and none is 6 h after another",
    ),
    "365_day": (netcdf(with_calendar), "store.nc: time is of the calendar 365_day"),
    # what is missing
    "zeros": (
        hdf5(lambda values: values * (np.arange(4) < 2)[:, None, None, None]),
        "u10 is 0 to 0",
    ),
    "half a plane": (
        netcdf(lambda s: s.assign(u10=s.u10 * (s.longitude < 180))),
        "u10 is 0 to",
    ),
    "missing chunk": (missing_chunk, "t2m is 0 to 0"),
    "fill": (netcdf(with_value("t2m", 9.97e36)), "store.nc: t2m is .* to 9.97e"),
    "packed fill": (netcdf(with_value("t2m", -32767)), "store.nc: t2m is -32767"),
    "-9999": (netcdf(with_value("u10", -9999)), "u10 is -9999"),
    # units
    "degC": (in_units(lambda s: {"t2m": s.t2m - 273.15}, t2m="degC"), ""),
    "degF": (in_units(lambda s: {"t2m": s.t2m * 1.8 - 459.67}, t2m="degF"), ""),
    "hPa, gpm, km/h": (
        in_units(
            lambda s: {"sp": s.sp / 100, "z": s.z / GRAVITY_M_S2, "u10": s.u10 * 3.6},
            **dict(sp="hPa", z="gpm", u10="km/h"),
        ),
        "",
    ),
    "another kind": (in_units(lambda s: {}, t2m="m"), "store.nc: t2m is in 'm'"),
    "no unit": (in_units(lambda s: {}, t2m="warm"), "store.nc: t2m is in 'warm'"),
    "unsaid hPa": (netcdf(lambda s: s.assign(msl=s.msl + 750)), "mslp is .*as in hPa"),
    # names, dimensions and files
    "CMIP": (netcdf(with_cmips_names), ""),
    "expver": (netcdf(expver), ""),
    "expver differ": (
        netcdf(lambda s: expver(s, s.assign(sp=s.sp + 1))),
        "store.nc: two values of sp at .* differ; keep one",
    ),
    "new CDS": (
        netcdf(lambda s: s.assign_coords(expver=("time", ["0001"] * 4), number=0)),
        "",
    ),
    "member": (netcdf(lambda s: s.expand_dims(number=[0], axis=1)), ""),
    "members": (
        netcdf(lambda s: s.expand_dims(number=range(10), axis=1)),
        "store.nc: .* has a dimension number of 10",
    ),
    "equal twice": (netcdf(lambda s: s.isel(time=[0, 1, 1, 2, 3])), ""),
    "zip": (zipped, "era5.nc: is a ZIP archive; unpack it"),
    "hidden": (hidden, ""),
    "no NetCDF": (
        lambda folder: (folder / "a.nc").write_text("<html>"),
        "a.nc: is no NetCDF file",
    ),
    "levels apart": (files(levels_apart), ""),
    "levels in pairs": (files(levels_in_pairs), ""),
    "a level missing": (
        netcdf(lambda s: s.isel(level=[0, 1, 2])),
        "no .* or u for u1000 at",
    ),
    "times apart": (
        files(lambda: {f"t{index}": cds().isel(time=index) for index in range(4)}),
        "",
    ),
    "surface z": (files(surface_geopotential), ""),
    "float32 grid": (files(almost_the_same_grid), ""),
    "another grid": (
        files(
            lambda: {
                "a": cds("tuvzr"),
                "b": cds(SURFACE).assign_coords(longitude=range(16)),
            }
        ),
        "b.nc: longitude differs from .*a.nc",
    ),
    "shuffled": (
        netcdf(lambda s: s.isel(latitude=[0, 2, 1, *range(3, 9)])),
        "latitude",
    ),
    "zarr by content": (zarr_by_content, ""),
    # names of channels and rows
    "attribute": (reversed_hdf5(a_channels=REVERSED), ""),
    "bytes": (reversed_hdf5(channel=np.array(REVERSED, "S")), ""),
    "one text": (reversed_hdf5(a_fields=", ".join(REVERSED)), ""),
    "other names": (
        reversed_hdf5(
            channel=[name.replace("z", "geopotential_") for name in REVERSED]
        ),
        "",
    ),
    "other channel": (
        hdf5(channel=[name.replace("r500", "q500") for name in REVERSED]),
        "one of them must be r500",
    ),
    "south first": (
        hdf5(lambda values: values[:, :, ::-1], latitude=np.linspace(-90, 90, 9)),
        "",
    ),
}


@pytest.mark.filterwarnings("ignore:Failed to open Zarr store")
@pytest.mark.parametrize("case", CASES)
def test_what_a_file_says_of_itself(tmp_path, capsys, case):
    write, says = CASES[case]
    folder, out = tmp_path / "source", tmp_path / "out"
    folder.mkdir()
    write(folder)
    status = cli.main(f"data era5 --source {folder} --out {out} --years 2019".split())
    told = capsys.readouterr()
    if says:
        assert status == 2 and told.err.count("\n") == 1, told.err
        assert re.search(says, told.err), told.err
        assert not list(out.glob("*.npy"))
        return
    assert status == 0, told.err
    stored = np.load(out / "2019.npy")
    assert np.allclose(stored, [state(hour) for hour in HOURS], rtol=1e-5)
    assert "2019: 4 of 1460 times" in told.out
    assert ("1 times of" in told.out) == (case == "equal twice")


def test_times_written_into_a_file_of_too_many_states_help(tmp_path, capsys):
    """The remedy of the refusal, typed."""
    values = np.random.default_rng(0).uniform(220, 300, (366, 21, 9, 16))
    with h5py.File(tmp_path / FILE, "w") as file:
        file["fields"] = values.astype("f4")
    words = f"data era5 --source {tmp_path} --out {tmp_path / 'out'} --years 2019"
    assert cli.main(words.split()) == 2
    assert "data set `time`, with units as `hours since" in capsys.readouterr().err
    write_times(tmp_path / FILE, hours_of_year(2019)[0] + 3 * np.arange(366))
    assert cli.main(words.split()) == 0
    stored = np.load(tmp_path / "out" / "2019.npy")
    assert np.array_equal(stored, values.astype("f4")[::2, :20, :8])


def test_a_whole_year_is_complete_and_a_gap_is_said(tmp_path, capsys):
    source = tmp_path / "source"
    write_hdf5(source, 2019)
    write_hdf5(source, 2018, 25)
    write_times(source / "2018.h5", np.delete(hours_of_year(2018)[:40], slice(10, 25)))
    words = f"data era5 --source {source} --out {tmp_path / 'out'} --years"
    assert cli.main([*words.split(), "2019"]) == 0
    assert ": complete" in capsys.readouterr().out
    for _ in range(2):  # said again of what is there
        assert cli.main([*words.split(), "2018-2019"]) == 0
        told = capsys.readouterr().out
        assert "2018: 25 of 1460 times" in told and ": complete" not in told
