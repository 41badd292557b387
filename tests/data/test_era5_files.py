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
from energynn.data import era5_values
from energynn.data.era5_sources import CHANNELS, NAMES, hours_of_year
from tests.data.test_era5_stores import SURFACE, dataset, state, write_hdf5

HOURS = hours_of_year(2019)[:4]
G = era5_values.GRAVITY_M_S2


def cds(names=NAMES, hours=HOURS):
    return dataset(hours, names, which=1)


def save(folder, **files):
    for name, source in files.items():
        source.to_netcdf(folder / f"{name}.nc", engine="scipy")


def in_units(source, **units):
    """Say the units of some variables; the numbers stay."""
    for name, unit in units.items():
        source[name].attrs["units"] = unit
    return source


def fields(folder, **members):
    """FourCastNet's file; what begins with a_ becomes an attribute of it, others data sets."""
    write_hdf5(folder, 2019, 4)
    with h5py.File(folder / "2019.h5", "r+") as file:
        for name, value in members.items():
            if name.startswith("a_"):
                file["fields"].attrs[name[2:]] = value
            elif callable(value):
                value(file)
            else:
                file[name] = value


def change(function):
    return lambda folder: fields(folder, change=function)


def replace(values):
    """Put other values into ``fields``, as a function of those that are there."""

    def replaced(file):
        new = values(file["fields"][:]).astype("f4")
        del file["fields"]
        file["fields"] = new

    return change(replaced)


def netcdf(function):
    return lambda folder: save(folder, store=function(cds()))


def unwritten(file):
    """Chunks of half a plane, of which one is never written."""
    values = file["fields"][:]
    del file["fields"]
    new = file.create_dataset("fields", values.shape, "f4", chunks=(1, 21, 9, 8))
    new[..., :8] = values[..., :8]
    new[1:, ..., 8:] = values[1:, ..., 8:]


def timed(hours, unit="hours since 1970-01-01", kind="i8"):
    def write(file):
        file["time"] = np.array(hours, kind)
        file["time"].attrs["units"] = unit

    return change(write)


def fill(value, name="t2m"):
    def filled(source):
        source[name][1, 2, 3] = value
        return source

    return filled


def renamed_as_cmip(source):
    source = source.rename(
        u10="uas", v10="vas", t2m="tas", sp="ps", msl="psl", t="ta", u="x1", v="va"
    ).rename(level="plev", latitude="lat", longitude="lon")
    source["plev"] = source.plev * 100.0
    source["x1"].attrs["standard_name"] = "eastward_wind"
    return source


def expver(source):
    """Final states of the first times, and preliminary ones of the others."""
    first = source.where(source.time < source.time[2])
    last = source.where(source.time >= source.time[2])
    return xr.concat([first, last], xr.IndexVariable("expver", [1, 5]), join="outer")


def zipped(folder):
    with zipfile.ZipFile(folder / "era5.nc", "w") as archive:
        archive.writestr("data.nc", b"CDF")


def levels_apart(folder):
    save(folder, surface=cds(SURFACE))
    upper = cds("tuvzr")
    for hPa in (50, 500, 850, 1000):
        save(folder, **{f"level{hPa}": upper.sel(level=hPa)})


def levels_in_pairs(folder):
    upper = cds("tuvzr")
    pairs = [upper.sel(level=pair) for pair in ([50, 500], [850, 1000])]
    save(folder, surface=cds(SURFACE), upper=pairs[0], lower=pairs[1])


def surface_z(folder):
    single = cds(SURFACE)
    single["z"] = single.t2m * 0 + np.arange(16)
    save(folder, single=single, levels=cds("tuvzr"))


def single_and_almost_the_same_grid(folder):
    single, levels = cds(SURFACE), cds("tuvzr")
    single["longitude"] = (single.longitude + 1 / 3).astype("f4")
    levels["longitude"] = levels.longitude + 1 / 3
    save(folder, single=single, levels=levels)


def hidden(folder):
    save(folder, single=cds())
    (folder / "._single.nc").write_bytes(b"\0\5\26\7")


def years_of_zarr(folder):
    pytest.importorskip("zarr", reason="needs the extra era5")
    cds().to_zarr(folder / "era5-2019", zarr_format=3)
    cds(hours=hours_of_year(2018)[:4]).to_zarr(folder / "2018", zarr_format=2)


def missing_chunk(folder):
    pytest.importorskip("zarr", reason="needs the extra era5")
    cds().to_zarr(folder / "s", zarr_format=2, encoding={"t2m": {"chunks": (1, 9, 16)}})
    (folder / "s" / "t2m" / "1.0.0").unlink()
    text = (folder / "s" / "t2m" / ".zarray").read_text()
    new = text.replace('"NaN"', "null")
    assert new != text
    (folder / "s" / "t2m" / ".zarray").write_text(new)
    (folder / "s" / ".zmetadata").unlink()


def noleap(source):
    source["time"] = ("time", [0.0, 6, 12, 18])
    source.time.attrs = {"units": "hours since 2019-01-01", "calendar": "365_day"}
    return source


NEW_CDS = dict(expver=("time", ["0001"] * 4), number=0)
REVERSED = [*CHANNELS, "sst"][::-1]


def reordered(**members):
    def write(folder):
        replace(lambda values: values[:, ::-1])(folder)
        with h5py.File(folder / "2019.h5", "r+") as file:
            for name, value in members.items():
                holder = file["fields"].attrs if name.startswith("a_") else file
                holder[name.removeprefix("a_")] = value

    return write


def t2m_in(unit, convert):
    def converted(source):
        source["t2m"] = convert(source.t2m)
        return in_units(source, t2m=unit)

    return netcdf(converted)


CASES = {
    "plain": (netcdf(lambda s: s), ""),
    "hdf5": (fields, ""),
    # a count is no clock
    "hourly": (lambda f: write_year(f, 8760), "8760 states, and 2019 has 1460"),
    "one day too many": (lambda f: write_year(f, 1464), "1464 states"),
    "one state too many": (lambda f: write_year(f, 1461), "1461 states"),
    "12-hourly": (lambda f: write_year(f, 730), "730 states"),
    "daily in a leap year": (lambda f: write_year(f, 366), "366 states"),
    "begins late": (
        lambda f: fields(f, a_start_time="2019-01-01T12:00"),
        "2019.h5: it starts at 2019-01-01T12:00, not at 1 January 00 UTC",
    ),
    "begins at once": (lambda f: fields(f, a_start_time="2019-01-01"), ""),
    "hdf5 with times": (timed(HOURS), ""),
    "times as float seconds": (
        timed(HOURS * 3600.0, "seconds since 1970-01-01", "f8"),
        "",
    ),
    "times backwards": (
        lambda f: (replace(lambda v: v[::-1])(f), add_time(f, HOURS[::-1])),
        "",
    ),
    "12-hourly with times": (
        timed(HOURS[0] + 6 + 12 * np.arange(4)),
        "4 of 1460 times",
    ),
    "3-hourly, late": (timed(HOURS[0] + 3 + 6 * np.arange(4)), "no six-hourly time"),
    "a time twice": (timed(HOURS[[0, 1, 1, 2]]), "a time is there twice"),
    # what is missing or left over
    "unwritten": (change(unwritten), "u10 is 0 to"),
    "zeros": (
        replace(lambda v: v * (np.arange(4) < 2)[:, None, None, None]),
        "u10 is 0 to 0",
    ),
    "missing chunk": (missing_chunk, "t2m is 0 to 0"),
    "fill": (netcdf(fill(9.97e36)), "store.nc: t2m is .* to 9.97e"),
    "packed fill": (netcdf(fill(-32767)), "store.nc: t2m is -32767"),
    "1e20": (netcdf(fill(1e20, "u10")), "u10 is .* to 1e"),
    "-9999": (
        replace(lambda v: np.where(v == v[1, 9, 1, 1], -9999, v)),
        "u850 is -9999",
    ),
    # units
    "degC": (t2m_in("degC", lambda t: t - 273.15), ""),
    "celsius": (t2m_in("celsius", lambda t: t - 273.15), ""),
    "degF": (t2m_in("degF", lambda t: t * 1.8 - 459.67), ""),
    "a unit of another kind": (t2m_in("m", lambda t: t), "store.nc: t2m is in 'm'"),
    "no unit": (t2m_in("Kelvins!", lambda t: t), "store.nc: t2m is in 'Kelvins!'"),
    "hPa, m, km/h": (
        netcdf(
            lambda s: in_units(
                s.assign(sp=s.sp / 100, z=s.z / G, u10=s.u10 * 3.6),
                **dict(sp="hPa", z="gpm", u10="km/h"),
            )
        ),
        "",
    ),
    "unsaid hPa": (netcdf(lambda s: s.assign(msl=s.msl + 750)), "mslp is .*as in hPa"),
    # names and dimensions
    "CMIP's names, Pa": (netcdf(renamed_as_cmip), ""),
    "expver": (netcdf(expver), ""),
    "new CDS": (netcdf(lambda s: s.assign_coords(NEW_CDS)), ""),
    "number of 1": (netcdf(lambda s: s.expand_dims(number=[0], axis=1)), ""),
    "number of 10": (
        netcdf(lambda s: s.expand_dims(number=range(10), axis=1)),
        "store.nc: .* has a dimension number of 10",
    ),
    "another dimension": (
        netcdf(lambda s: s.rename(level="sigma")),
        "dimension sigma of 5",
    ),
    "duplicates": (
        lambda f: save(f, a=cds().isel(time=[0, 1, 2]), b=cds().isel(time=[2, 3])),
        "",
    ),
    "duplicates that differ": (
        lambda f: save(f, a=cds(), b=cds(["t2m"]) + 1),
        "a.nc.*two values of t2m at .* differ; keep one",
    ),
    "zip": (zipped, "era5.nc: is a ZIP archive; unpack it"),
    "hidden": (hidden, ""),
    "no NetCDF": (
        lambda f: (f / "a.nc").write_text("<html>"),
        "a.nc: is no NetCDF file",
    ),
    "a file a level": (levels_apart, ""),
    "two levels a file": (levels_in_pairs, ""),
    "a level missing": (
        netcdf(lambda s: s.sel(level=[50, 500, 850])),
        "no u at 1000 hPa",
    ),
    "surface z": (surface_z, ""),
    "a file a time": (
        lambda f: save(f, **{f"t{i}": cds().isel(time=i) for i in range(4)}),
        "",
    ),
    "a time twice in one file": (netcdf(lambda s: s.isel(time=[0, 1, 1, 2, 3])), ""),
    "two expver differ": (
        netcdf(
            lambda s: xr.concat(
                [s, s.assign(sp=s.sp + 1)], xr.IndexVariable("expver", [1, 5])
            )
        ),
        "two values of sp",
    ),
    "half a plane": (
        netcdf(lambda s: s.assign(u10=s.u10 * (s.longitude < 180))),
        "u10 is 0 to",
    ),
    "float32 grid": (single_and_almost_the_same_grid, ""),
    "another grid": (
        lambda f: save(
            f, a=cds("tuvzr"), b=cds(SURFACE).assign_coords(longitude=range(16))
        ),
        "b.nc: longitude differs from .*a.nc",
    ),
    "latitudes shuffled": (
        netcdf(lambda s: s.isel(latitude=[0, 2, 1, 3, 4, 5, 6, 7, 8])),
        "latitude",
    ),
    "zarr by content": (years_of_zarr, ""),
    "365_day": (netcdf(noleap), "store.nc: .*of the calendar 365_day"),
    "03, 09": (
        netcdf(lambda s: s.assign_coords(time=s.time + np.timedelta64(3, "h"))),
        "2019-01-01T03:00 to 2019-01-01T21:00",
    ),
    "12-hourly NetCDF": (
        lambda f: save(f, a=cds(hours=HOURS[0] + 12 * np.arange(4))),
        "4 of 1460 times of 2019, and none is 6 h after another",
    ),
    # names of channels
    "attribute": (reordered(a_channels=REVERSED), ""),
    "bytes": (reordered(channel=np.array(REVERSED, "S")), ""),
    "objects": (reordered(channel=REVERSED), ""),
    "one text": (reordered(a_fields=", ".join(REVERSED)), ""),
    "other names": (
        reordered(
            channel=[
                n.replace("mslp", "msl").replace("z500", "geopotential_500")
                for n in REVERSED
            ]
        ),
        "",
    ),
    "another variable": (
        reordered(channel=[n.replace("r500", "q500") for n in REVERSED]),
        "one of them must be r500",
    ),
    "south first": (
        lambda f: (
            replace(lambda v: v[:, :, ::-1])(f),
            add(f, latitude=np.linspace(-90, 90, 9)),
        ),
        "",
    ),
}


def add(folder, **members):
    with h5py.File(folder / "2019.h5", "r+") as file:
        for name, value in members.items():
            file[name] = value


def add_time(folder, hours, year=2019):
    with h5py.File(folder / f"{year}.h5", "r+") as file:
        file["time"] = hours
        file["time"].attrs["units"] = "hours since 1970-01-01"


def write_year(folder, count):
    with h5py.File(folder / "2019.h5", "w") as file:
        file.create_dataset("fields", (count, 21, 9, 16), "f4")


@pytest.mark.parametrize("case", CASES)
def test_what_a_file_says_of_itself(tmp_path, capsys, case):
    write, says = CASES[case]
    folder = tmp_path / "source"
    folder.mkdir()
    write(folder)
    out = tmp_path / "out"
    words = f"data era5 --source {folder} --out {out} --years 2019".split()
    status = cli.main(words)
    told = capsys.readouterr()
    if says:
        assert status == 2 and told.err.count("\n") == 1, told.err
        assert re.search(says, told.err), told.err
        assert not list(out.glob("*.npy"))
        return
    assert status == 0, told.err
    stored = np.load(out / "2019.npy")
    assert np.allclose(stored, [state(hour) for hour in HOURS], rtol=1e-5)
    assert "2019: 4 of 1460 times" in told.err + told.out


def test_times_written_into_a_file_of_too_many_states_help(tmp_path, capsys):
    """The remedy of the refusal, typed."""
    generator = np.random.default_rng(0)
    with h5py.File(tmp_path / "2019.h5", "w") as file:
        file["fields"] = generator.uniform(220, 300, (366, 21, 9, 16)).astype("f4")
    words = f"data era5 --source {tmp_path} --out {tmp_path / 'out'} --years 2019"
    assert cli.main(words.split()) == 2
    assert "data set `time`, with units as `hours since" in capsys.readouterr().err
    add_time(tmp_path, hours_of_year(2019)[0] + 3 * np.arange(366))
    assert cli.main(words.split()) == 0
    stored = np.load(tmp_path / "out" / "2019.npy", mmap_mode="r")
    with h5py.File(tmp_path / "2019.h5") as file:
        assert np.array_equal(stored[1], file["fields"][2, :20, :8])


def test_a_whole_year_is_complete_and_a_gap_is_said(tmp_path, capsys):
    write_hdf5(tmp_path / "source", 2019)
    hours = np.delete(hours_of_year(2018), slice(100, 115))
    write_hdf5(tmp_path / "source", 2018, len(hours))
    words = f"data era5 --source {tmp_path / 'source'} --out {tmp_path / 'out'} --years"
    assert cli.main([*words.split(), "2019"]) == 0
    assert ": complete" in capsys.readouterr().out
    add_time(tmp_path / "source", hours, 2018)
    for _ in range(2):  # said again of what is there
        assert cli.main([*words.split(), "2018-2019"]) == 0
        told = capsys.readouterr().out
        assert "2018: 1445 of 1460 times" in told and ": complete" not in told
