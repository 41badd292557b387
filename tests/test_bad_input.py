"""A corpus of bad input: whatever is given to a command is one clear line, executes nothing, and loses nothing."""

import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tracemalloc
from pathlib import Path

import h5py
import numpy as np
import pytest
import xarray as xr
from PIL import Image

from energynn import cli, config, records
from energynn.analysis import profiles, results
from energynn.data import describe, imagenet, manifests
from energynn.files import REPOSITORY
from energynn.launch import start, watch
from energynn.measure import machine
from tests.conftest import write_run_dir
from tests.data.test_era5_stores import CHANNELS, dataset, hours_of_year, write_hdf5
from tests.measure.test_perun_import import layout_0_8, write_run


@pytest.fixture(scope="session")
def two_runs(tmp_path_factory):
    """Two valid runs of two systems, built once and copied by each case."""
    runs = tmp_path_factory.mktemp("corpus") / "runs"
    for system in ("local", "other"):
        assert records.build(write_run_dir(runs, system), "finished", "")["valid"]
    assert records.check(runs) == []
    return runs


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty folder to work in, in which a program that is started would leave the file `canary`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path / 'programs'}:{os.environ['PATH']}")
    (tmp_path / "programs").mkdir()
    ghostscript = tmp_path / "programs" / "gs"
    ghostscript.write_text(f"#!/bin/sh\ntouch {tmp_path}/canary\n")
    ghostscript.chmod(0o755)
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
    handlers = {number: signal.getsignal(number) for number in numbers}
    yield tmp_path
    for number, handler in handlers.items():  # `measure` passes signals on to its command
        signal.signal(number, handler)


def content(folder: Path) -> dict:
    """Size and time of change of every file below a folder: what is given must stay as it is."""
    return {path: (path.lstat().st_size, path.lstat().st_mtime_ns) for path in folder.rglob("*") if not path.is_dir()}


def call(*words) -> tuple[int, str, str]:
    """Exit status, output and errors of a command, within this process."""
    out, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        try:
            status = cli.main([str(word) for word in words])
        except SystemExit as end:
            status = end.code
    return status, out.getvalue(), errors.getvalue()


def refused(here: Path, *words, says: str = "") -> None:
    """The command ends with status 2 and one line that holds ``says``; nothing was executed, nothing is lost."""
    before = content(here)
    status, _, errors = call(*words)
    assert status == 2, (status, errors)
    assert errors.startswith("energynn") and errors.count("\n") == 1 and len(errors) < 1000, errors
    assert says in errors and "Traceback" not in errors, errors
    assert not (here / "canary").exists(), "something was executed"
    after = content(here)
    assert {path: after.get(path) for path in before} == before, "something was lost"


# ------------------------------------------------------------------------------------------------- files of a run

PIPE, FOLDER, SPARSE, DEVICE, LOOP = "a pipe", "a folder", "3 GB of nothing", "a device", "a link to itself"
ILL_TYPED = {
    "empty": b"",
    "a list": b"[]",
    "a text": b'"run"',
    "null": b"null",
    "no fields": b"{}",
    "NaN": b'{"devices": NaN}',
    "1e400": b'{"devices": 1e400}',
    "cut off": b'{"run_id": "resn',
    "nested": b"[" * 200_000,
    "nested tables": b'{"a":' * 200_000,
    "digits": b'{"devices": ' + b"9" * 10_000 + b"}",
    "binary": bytes(range(256)) * 10,
    "UTF-16": '{"run_id": "x"}'.encode("utf-16"),
    "PNG": b"\x89PNG\r\n\x1a\n",
    "pickle": b"cos\nsystem\n(S'touch canary'\ntR.",
    PIPE: None,
    FOLDER: None,
    SPARSE: None,
    DEVICE: None,
    LOOP: None,
}
TYPED = {
    "devices": ["2", None, True, [], {}, -1, 1.5],
    "config": [[], "resnet50", None, {"devices": "2"}],
    "machine": [[], "vm", {"sockets": "1"}, {}],
    "valid": ["yes", 1, None],
    "training_time_s": ["20", [], True, 10**400],
    "sensors": [{}, "cpu", [1], [{}], [None]],
    "files": [[], {"a": 1}, {"run.json": {}}],
    "metrics": [[], {"top1_error": "low"}],
    "history": [{}, [1]],
    "flags": [[1], "none"],
}


def spoil(path: Path, what: str, text: bytes | None) -> None:
    """Put something in the place of a file."""
    path.unlink()
    if what == PIPE:
        os.mkfifo(path)
    elif what == FOLDER:
        path.mkdir()
    elif what == SPARSE:
        path.touch()
        os.truncate(path, 3 * 10**9)
    elif what == DEVICE:
        path.symlink_to("/dev/zero")
    elif what == LOOP:
        path.symlink_to(path.name)
    else:
        path.write_bytes(text)


def rewritten(path: Path, change, also: str = "") -> None:
    """Change a record or what is intended, and make the digests right again, as somebody who knows how would."""
    values = json.loads(path.read_text())
    change(values)
    values.pop("record_sha256", None)
    if path.name == "record.json":
        if also:
            values["files"] = records.hash_files(path.parent)
        values["record_sha256"] = config.digest(values)
    path.write_text(json.dumps(values))


def only_one_run_is_concerned(runs: Path) -> None:
    """check, status, load and the profiles name the run in one line each, and go on with the other."""
    status, out, errors = call("check", runs)
    (good,) = (runs / "other").glob("resnet50*")
    (bad,) = (runs / "local").glob("resnet50*")
    faults = [line for line in out.splitlines() if line.startswith("FAULT")]
    assert status == 1 and len(faults) >= 1 and not errors, (out, errors)
    assert all(bad.name in line for line in faults) and not any(good.name in line for line in faults), faults
    status, out, errors = call("status", "--runs-dir", runs)
    entries = [line for line in out.splitlines() if not line.startswith(" ")]
    assert status == 0 and not errors and len(entries) in (3, 4, 5), (out, errors)
    assert [line.split()[0] for line in out.splitlines() if line.endswith(good.name)] == ["finished"], out
    loaded = results.load(runs)
    assert good.name in loaded["run_id"].values and loaded.sizes["run"] + len(loaded.attrs["excluded"]) == 2
    assert all("\n" not in line for line in loaded.attrs["excluded"])
    assert good.name in set(profiles.available(runs)["run"])


@pytest.mark.parametrize("what", [PIPE, DEVICE, LOOP, "a list", "binary", "NaN"])
def test_a_bad_list_of_checksums_is_a_fault_of_one_run(here, two_runs, what):
    shutil.copytree(two_runs, here / "runs")
    (run,) = (here / "runs" / "local").glob("resnet50*")
    (run / "SHA256SUMS").touch()
    spoil(run / "SHA256SUMS", what, ILL_TYPED[what])
    only_one_run_is_concerned(here / "runs")


@pytest.mark.parametrize("what", ILL_TYPED)
@pytest.mark.parametrize("name", ["run.json", "record.json"])
def test_an_ill_typed_file_is_a_fault_of_one_run(here, two_runs, name, what):
    shutil.copytree(two_runs, here / "runs")
    (run,) = (here / "runs" / "local").glob("resnet50*")
    spoil(run / name, what, ILL_TYPED[what])
    if (name, what) != ("record.json", LOOP):  # which is none
        only_one_run_is_concerned(here / "runs")
        if name == "run.json" or what not in ("no fields", "UTF-16"):
            refused(here, "status", "--watch", run, "--once")


@pytest.mark.parametrize("name, value", [(name, value) for name, values in TYPED.items() for value in values])
def test_a_field_of_another_type_is_a_fault_of_one_run(here, two_runs, name, value):
    shutil.copytree(two_runs, here / "runs")
    (run,) = (here / "runs" / "local").glob("resnet50*")
    rewritten(run / "record.json", lambda record: record.update({name: value}))
    only_one_run_is_concerned(here / "runs")


# ------------------------------------------------------------------------------------------------------ raw files

LINES = {
    "a list": "[]",
    "a text": '"event"',
    "a time in words": '{"t_mono_ns": "now", "t_wall_ns": 1, "event": "epoch"}',
    "a time as float": '{"t_mono_ns": 1.5, "t_wall_ns": 1e400, "event": "epoch"}',
    "a nested line": "[" * 100_000,
    "no event": '{"t_mono_ns": 1, "t_wall_ns": 1}',
    "an event that is a list": '{"t_mono_ns": 1, "t_wall_ns": 1, "event": []}',
    "binary": "\x00\x01\xff",
    "readings of no sensor": '{"t": 1, "w": 1, "v": []}',
    "readings in words": '{"t": 1, "w": 1, "v": ["many"]}',
    "a time beyond 64 bits": '{"t": 99999999999999999999999, "w": 1, "v": [1]}',
    "a status of another type": '{"status": 5}',
    "a digit too many": '{"t": 1, "w": 1, "v": [' + "9" * 5000 + "]}",
}


@pytest.mark.parametrize("what", [PIPE, DEVICE, *LINES])
@pytest.mark.parametrize("name", ["events-rank1.jsonl", "samples-host.jsonl", "phases-rank0.jsonl"])
def test_an_ill_typed_raw_file_is_a_fault_of_one_run(here, two_runs, name, what):
    shutil.copytree(two_runs, here / "runs")
    (run,) = (here / "runs" / "local").glob("resnet50*")
    if what in LINES:
        with open(run / name, "a") as file:
            file.write(LINES[what] + "\n")
    else:
        spoil(run / name, what, None)
    only_one_run_is_concerned(here / "runs")
    for words in (["status", "--watch", run, "--once"],):
        status, _, errors = call(*words)
        assert status in (0, 1, 2) and errors.count("\n") == (status == 2) and "Traceback" not in errors, errors


FIT = "forecast fit --published --workload resnet50 --system horeka-a100 --out"
BEFORE_IT_WRITES = [
    (FIT, "forecast.calibration.make"),
    ("study run kick-the-tires --archive", "cluster.local.run_study"),
]
BEFORE_IT_WRITES += [(f"export --{name}", "interface.load") for name in ("csv", "netcdf", "parquet")]


@pytest.mark.parametrize("words, expensive", BEFORE_IT_WRITES)
def test_what_cannot_be_written_is_refused_before_it_is_computed(here, monkeypatch, words, expensive):
    monkeypatch.setattr(f"energynn.{expensive}", None)
    (here / "runs").mkdir()
    (here / "file").touch()
    os.mkfifo(here / "pipe")
    is_export = words.startswith("export")  # of which a pipe may be the reader
    for target in (here, "/dev/full", here / "pipe"):
        if not is_export or target == here:
            refused(here, *words.split(), target, says="is a directory, a device or a pipe, which no file may replace")
    refused(here, *words.split(), here / "file" / "more" / "out", says="no folder that you may write to; give another")
    monkeypatch.setattr(os, "access", lambda path, mode: path != here)  # for root every folder is its own
    refused(here, *words.split(), here / "out", says=f"{here} is no folder that you may write to; give another name")
    assert (here / "pipe").is_fifo()


def test_what_describes_data_must_be_writable_before_the_data_are_read(here, monkeypatch):
    monkeypatch.setattr(manifests, "DATA_MANIFESTS", here / "data_manifests")
    monkeypatch.setitem(describe.BUILDERS, "imagenet", None)
    monkeypatch.setattr(os, "access", lambda path, mode: path != here)
    refused(here, "data", "describe", "imagenet", "--root", here, says="is no folder that you may write to")


def test_a_copied_run_does_not_count_twice(here, two_runs):
    shutil.copytree(two_runs, here / "runs")
    (run,) = (here / "runs" / "local").glob("resnet50*")
    copy = here / "runs" / "local@anna" / run.name
    shutil.copytree(run, copy)
    status, out, _ = call("check", here / "runs")
    assert status == 1 and out.count("FAULT") == 1
    assert f"FAULT {run.name}: {copy} is a copy of {run}; keep one of the two" in out
    loaded = results.load(here / "runs")
    assert loaded.sizes["run"] == 2 and run.name in loaded["run_id"].values
    assert loaded.attrs["excluded"] == [f"{copy}: is a copy of {run}; keep one of the two"]


HUGE_PHASE = '{"t":5000000000001,"phase":[99999999],"gap_us":[1],"length_us":[1]}'


@pytest.mark.parametrize("line", [HUGE_PHASE, HUGE_PHASE.replace(":", ": ")])
def test_a_phase_without_a_name_is_left_out(run_dir, line):
    before = records.build(run_dir, "finished", "")
    path = run_dir / "phases-rank0.jsonl"
    path.write_text(f"{path.read_text()}{line}\n")
    tracemalloc.start()
    record = records.build(run_dir, "finished", "")
    _, peak_B = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_B < 100e6 and record["energy_phases"] == before["energy_phases"]


@pytest.mark.parametrize("old, new", [('"period_s": 0.1', '"period_s": 0'), ('"to_SI": 1e-06', '"to_SI": 1e300')])
def test_numpy_does_not_warn_beside_a_fault(here, two_runs, recwarn, old, new):
    shutil.copytree(two_runs, here / "runs")
    (run,) = (here / "runs" / "local").glob("resnet50*")
    samples = run / "samples-host.jsonl"
    samples.write_text(samples.read_text().replace(old, new, 1))
    only_one_run_is_concerned(here / "runs")
    for words in (["status", "--watch", run, "--once"],):
        call(*words)
    (run / "record.json").unlink()
    call("check", here / "runs", "--recover")
    assert [str(warning.message) for warning in recwarn] == []


def test_a_wall_clock_that_is_set_back_does_not_reorder_the_history(run_dir):
    for rank in range(2):  # killed, so that the last epoch tells what was trained
        events = run_dir / f"events-rank{rank}.jsonl"
        events.write_text("".join(line for line in events.read_text().splitlines(True)[:2]))
    path = run_dir / "events-rank0.jsonl"
    start_ns = json.loads(path.read_text().splitlines()[0])["t_mono_ns"]
    with open(path, "a") as file:
        for epoch in range(1, 61):
            t = start_ns + int((0.6 + epoch / 4) * 1e9)
            set_back_ns = 3600 * 10**9 if epoch > 20 else 0
            event = {"t_mono_ns": t, "t_wall_ns": t - start_ns - set_back_ns, "event": "epoch"}
            event |= {"epoch": epoch, "epochs": 60, "samples_trained": 20 * epoch, "samples_to_train": 1200}
            file.write(json.dumps(event) + "\n")
    record = records.build(run_dir, "killed", "by a test")
    assert [entry["epoch"] for entry in record["history"]] == list(range(1, 61))
    assert record["samples_trained"] == 1200
    state = watch.look(run_dir, {})
    assert (state["epoch"], state["samples_trained"]) == (60, 1200)


# -------------------------------------------------------------------------------------------------- perun's files


def links_outside(path: Path) -> None:
    other = path.with_name("other.hdf5")
    write_run(other, sensors=layout_0_8())
    with h5py.File(path, "w") as file:
        file["app"] = h5py.ExternalLink("other.hdf5", "/app")


def soft_link(path: Path) -> None:
    with h5py.File(path, "a") as file:
        file["app/nodes/again"] = h5py.SoftLink("/app/nodes/run")


def values_of(file) -> h5py.Group:
    return file["app/nodes/run/nodes/0/nodes/a/nodes/cpu/nodes/cpu_0_package-0/raw_data"]


def replaced(path: Path, name: str = "values", **facts) -> None:
    """Make a data set anew in its place, with its attributes."""
    with h5py.File(path, "a") as file:
        raw = values_of(file)
        kept = dict(raw[name].attrs)
        del raw[name]
        raw.create_dataset(name, **facts).attrs.update(kept)


def external_storage(path: Path) -> None:
    secret = path.with_name("secret")
    secret.write_bytes(np.full(21, 12.1).tobytes())
    replaced(path, shape=(21,), dtype="f8", external=[(str(secret), 0, 21 * 8)])


def virtual(path: Path) -> None:
    other = path.with_name("other.hdf5")
    write_run(other, sensors=layout_0_8())
    with h5py.File(path, "a") as file:
        raw = values_of(file)
        layout = h5py.VirtualLayout((21,), "u8")
        layout[:] = h5py.VirtualSource(str(other), raw["values"].name, (21,))
        del raw["values"]
        raw.create_virtual_dataset("values", layout)


def under_a_second_name(path: Path) -> None:
    virtual(path)
    with h5py.File(path, "a") as file:
        file["app/a"] = values_of(file)["values"]


def unread_in_another_file(path: Path) -> None:
    with h5py.File(path, "a") as file:
        file["app"].create_dataset("unread", (2,), "u8", external=[("/etc/passwd", 0, 16)])


def attribute(name: str, value, dataset: str = "values"):
    def change(path: Path) -> None:
        with h5py.File(path, "a") as file:
            values_of(file)[dataset].attrs[name] = value

    return change


def of_the_run(name: str, value):
    def change(path: Path) -> None:
        with h5py.File(path, "a") as file:
            file["app/nodes/run"].attrs[name] = value

    return change


def times(values):
    return lambda path: replaced(path, "timesteps", data=np.asarray(values, "f8"))


PERUN = {
    "a link, and links are not followed": links_outside,
    "again: is a link": soft_link,
    "lies in another file": external_storage,
    "another file, which is not followed": virtual,
    "/app/a: lies in another file": under_a_second_name,
    "/app/unread: lies in another file": unread_in_another_file,
    "no real numbers": lambda path: replaced(path, data=np.full(21, 1 + 2j)),
    "is of type object": lambda path: replaced(path, data=["12.1"] * 21),
    "is of type |S4": lambda path: replaced(path, data=np.array([b"12.1"] * 21)),
    "is of type [('a'": lambda path: replaced(path, data=np.zeros(21, [("a", "f8")])),
    "declares more than 5e+07": lambda path: replaced(path, shape=(3 * 10**8,), dtype="u8", chunks=(1000,)),
    "chunks of more than 5e+07": lambda path: replaced(
        path, shape=(21,), maxshape=(None,), dtype="u8", chunks=(10**8,), compression="gzip"
    ),
    "do not match": lambda path: replaced(path, data=np.ones(5)),
    "not a perun HDF5 file": lambda path: replaced(path, data=h5py.Empty("f8")),
    "its magnitude is nan": attribute("mag", np.nan),
    "its magnitude is inf": attribute("mag", np.inf),
    "its magnitude is -1": attribute("mag", -1.0),
    "can be read": attribute("mag", "many"),
    "not a perun HDF5 file that": attribute("mag", 1 + 1j),
    "an array of size 1 to": attribute("mag", np.full(8000, 1e-6)),
    "Use () not None as shape": attribute("mag", h5py.Empty("f8")),
    "not those of a run, from nan": times(np.full(21, np.nan)),
    "not those of a run, from 20": times(np.arange(21)[::-1]),
    "not those of a run, from 0.0 to 2": times(np.arange(21) * 1e9),
    "in the year 9999": of_the_run("execution_dt", "9999-12-31T23:59:59"),
    "in the year 1": of_the_run("execution_dt", "0001-01-01T00:00:00"),
    "file that can be read": lambda path: path.write_bytes(path.read_bytes()[:3000]),
    "x.hdf5: not a perun": lambda path: path.write_bytes(b"\x89HDF\r\n\x1a\n" + b"\xff" * 100),
    "is no regular file": lambda path: spoil(path, PIPE, None),
}


@pytest.mark.parametrize("says", PERUN)
def test_foreign_perun_files(here, says):
    path = write_run(here / "x.hdf5", sensors=layout_0_8())
    PERUN[says](path)
    refused(here, "import-perun", path, "--runs-dir", here / "runs", says=says)
    assert not list((here / "runs").rglob("run.json")), "nothing half imported"


# ---------------------------------------------------------------------------------------------------- ERA5 sources


def in_hdf5(channel: str, change):
    """Change the values of a channel of FourCastNet's file at its second time."""

    def spoil(folder: Path) -> None:
        write_hdf5(folder, 2019, 2)
        with h5py.File(folder / "2019.h5", "r+") as file:
            index = CHANNELS.index(channel)
            file["fields"][1, index] = change(file["fields"][1, index])

    return spoil


def in_netcdf(change, names=("single", "levels")):
    """A NetCDF file with a change of its Dataset."""

    def spoil(folder: Path) -> None:
        change(dataset(hours_of_year(2019)[:2], which=1)).to_netcdf(folder / "store.nc", engine="scipy")

    return spoil


def shuffled(found: xr.Dataset) -> xr.Dataset:
    return found.isel(latitude=[3, 0, 1, 2, 4, 5, 6, 7, 8])


def with_inf(found: xr.Dataset) -> xr.Dataset:
    found["msl"].values[1, 2, 3] = np.inf
    return found


def with_units(name: str, units: str):
    def change(found: xr.Dataset) -> xr.Dataset:
        found[name].attrs["units"] = units
        return found

    return in_netcdf(change)


def with_axis(**degrees):
    return in_netcdf(lambda found: found.assign_coords(degrees))


def two_grids(folder: Path) -> None:
    found = dataset(hours_of_year(2019)[:2], which=1)
    found[["t2m"]].to_netcdf(folder / "a.nc", engine="scipy")
    shuffled(found.drop_vars("t2m")).to_netcdf(folder / "b.nc", engine="scipy")


def linked_era5(folder: Path) -> None:
    write_hdf5(folder, 2018, 2)
    with h5py.File(folder / "2019.h5", "w") as file:
        file["fields"] = h5py.ExternalLink("2018.h5", "fields")


ERA5 = {
    "t2m is": in_hdf5("t2m", lambda kelvin: kelvin - 273.15),
    "150 to 350 K": in_hdf5("t850", lambda kelvin: kelvin * 9 / 5 - 459.67),
    "30000 to 120000 Pa": in_hdf5("sp", lambda pascal: pascal / 100),
    "mslp is": in_hdf5("mslp", lambda pascal: pascal / 133.3),
    "z500 is": in_hdf5("z500", lambda geopotential: geopotential / 9.80665),
    "z50 is": in_hdf5("z50", lambda geopotential: geopotential / 9.80665),
    "a fraction instead of %": in_hdf5("r500", lambda percent: percent / 100),
    "9.97e+36 at 2019-01-01 06 UTC": in_hdf5("u10", lambda values: np.full_like(values, 9.97e36)),
    "-9999": in_hdf5("tcwv", lambda values: np.full_like(values, -9999)),
    "inf at 2019-01-01 06 UTC": in_hdf5("v850", lambda values: np.full_like(values, np.inf)),
    "NaN in r850 at 2019-01-01 06 UTC": in_hdf5("r850", lambda values: np.full_like(values, np.nan)),
    "rows must go from north to south": in_hdf5("sp", lambda values: values[::-1]),
    "not a whole HDF5 file": lambda folder: (folder / "2019.h5").write_bytes(b"\x89HDF\r\n\x1a\n" + b"x" * 99),
    "is a link, and links": linked_era5,
    "is no regular file": lambda folder: os.mkfifo(folder / "2019.h5"),
    "latitudes must go from pole to pole": in_netcdf(shuffled),
    "latitudes must go": in_netcdf(lambda found: found.assign_coords(latitude=np.full(9, np.nan))),
    "they begin [180": in_netcdf(lambda found: found.assign_coords(latitude=2 * found["latitude"])),
    "longitudes must rise": in_netcdf(lambda found: found.assign_coords(longitude=found["longitude"] - 180)),
    "they begin [45.0, 33.75, 22.5, 11.25]": with_axis(latitude=np.linspace(45, -45, 9)),
    "[90.0, 67.5, 45.0, 22.5]": with_axis(latitude=[90, 67.5, 45, 22.5, 0, -11, -22.5, -33, -45]),
    "pole to pole evenly, they begin [90.0, 89.0, 88.0, 87.0]": with_axis(
        latitude=[90, 89, 88, 87, 0, -30, -60, -75, -90]
    ),
    "once around the Earth, are 0.0 to 168.75": with_axis(longitude=11.25 * np.arange(16)),
    "once around the Earth, are 0.0 to 360.0": with_axis(longitude=np.linspace(0, 360, 16)),
    "from 0 evenly, once around": with_axis(longitude=[*range(15), 337.5]),
    "the units of u10 are 'knots'; convert it to m/s": with_units("u10", "knots"),
    "the units of t2m are 'degF'; convert it to K": with_units("t2m", "degF"),
    "the units of z are 'm'; convert it to m2/s2": with_units("z", "m"),
    "u10 is 0 everywhere at 2019-01-01 06 UTC": in_hdf5("u10", np.zeros_like),
    "the latitudes of its files differ": two_grids,
    "has no dimension level": in_netcdf(lambda found: found.rename(level="height")),
    "no geopotential or z at": in_netcdf(lambda found: found.assign_coords(level=[51, 500, 850, 925, 1000])),
    "mslp is 95": in_netcdf(with_inf),
    "dimensions must be time": in_netcdf(lambda found: found.rename(latitude="lat")),
    "no 00, 06, 12 or 18 UTC of 2019": in_netcdf(
        lambda found: found.assign_coords(time=found["time"] + np.timedelta64(1, "h"))
    ),
    "no 10m_u_component_of_wind or u10": in_netcdf(lambda found: found.drop_vars("u10")),
    "no NetCDF file that can be opened": lambda folder: (folder / "store.nc").write_bytes(b"CDF\x01" + b"\xff" * 50),
    "store.nc: is no regular file": lambda folder: os.mkfifo(folder / "store.nc"),
}


@pytest.mark.parametrize("says", ERA5)
def test_foreign_era5(here, says):
    (here / "source").mkdir()
    ERA5[says](here / "source")
    words = ["data", "era5", "--source", here / "source", "--out", here / "store", "--years", "2019"]
    refused(here, *words, "--workers", 1, says=says)
    assert not list((here / "store").glob("*.npy")), "nothing of it was stored as good"


# ---------------------------------------------------------------------------------------------------------- images

EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n(canary) (w) file\nshowpage\n%%EOF\n"


def encoded(kind: str, **facts) -> bytes:
    data = io.BytesIO()
    Image.new("RGB", (8, 8), "red").save(data, kind, **facts)
    return data.getvalue()


def declared(width: int, height: int, data: bytes) -> bytes:
    """A PNG that says it is larger than it is."""
    import struct
    import zlib

    header = b"IHDR" + struct.pack(">II", width, height) + data[24:29]
    return data[:8] + struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header)) + data[33:]


IMAGES = {
    "empty": b"",
    "EPS": EPS,
    "GIF": encoded("GIF"),
    "TIFF": encoded("TIFF"),
    "BMP": encoded("BMP"),
    "WebP": encoded("WEBP"),
    "a PNG of 400 megapixels": declared(20_000, 20_000, encoded("PNG")),
    "a PNG of 120 megapixels": declared(12_000, 10_000, encoded("PNG")),
    "a PNG cut off": encoded("PNG")[:40],
    "a JPEG cut off": encoded("JPEG")[:200],
    "a PDF": b"%PDF-1.4\n%%EOF",
    "a script": b"#!/bin/sh\ntouch canary\n",
    "text": b"no image",
}


def images(here: Path, image: bytes) -> Path:
    """ImageNet's tree with a good image and this one, named .JPEG."""
    for split in imagenet.SPLITS:
        folder = here / "images" / split / "n01"
        folder.mkdir(parents=True)
        (folder / "good.JPEG").write_bytes(encoded("JPEG"))
    (here / "images" / "train" / "n01" / "bad.JPEG").write_bytes(image)
    return here / "images"


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("what", IMAGES)
def test_images_that_are_none(here, what):
    with pytest.raises(imagenet.BAD_IMAGE):
        imagenet.open_image(IMAGES[what]).convert("RGB")
    root = images(here, IMAGES[what])
    assert imagenet.prepare(root, here / "store", progress=lambda line: None) == [f"{root}/train/n01/bad.JPEG"]
    assert not (here / "canary").exists(), "Ghostscript was started"


@pytest.mark.parametrize("what", [PIPE, DEVICE, FOLDER])
def test_an_image_that_is_no_file(here, what):
    root = images(here, b"")
    spoil(root / "train" / "n01" / "bad.JPEG", what, None)
    words = ["data", "imagenet", "--root", root, "--out", here / "store"]
    refused(here, *words, says="bad.JPEG: is no regular file")


def test_good_images_of_both_kinds_are_read():
    for kind in ("JPEG", "PNG"):
        assert imagenet.open_image(encoded(kind)).convert("RGB").size == (8, 8)


def an_archive(folder: Path, name: str, data: bytes) -> None:
    (folder / name).write_bytes(data)


STORES = {
    "is not complete": lambda folder: an_archive(folder, "train.ppm", b""),
    "train.npz cannot be read": lambda folder: [an_archive(folder, f"train.{end}", b"PK") for end in ("ppm", "npz")],
    "cannot be indexed": lambda folder: an_archive(folder, imagenet.TRAINING_ARCHIVE, b"no archive" * 100),
    "train.ppm is not complete": lambda folder: (
        an_archive(folder, "train.ppm", b""),
        os.mkfifo(folder / "train.npz"),
    ),
    "has no images": lambda folder: (folder / "train" / "n01").mkdir(parents=True),
}


@pytest.mark.parametrize("says", STORES)
def test_image_stores(here, says):
    (here / "root").mkdir()
    STORES[says](here / "root")
    refused(here, "data", "imagenet", "--root", here / "root", "--out", here / "store", says=says)


# ------------------------------------------------------------------------- manifests, systems, studies and workloads


@pytest.mark.parametrize("what", ["empty", "a list", "binary", "nested", "cut off", PIPE, FOLDER, SPARSE, "no fields"])
def test_manifests(here, what, monkeypatch):
    shutil.copytree(manifests.DATA_MANIFESTS / "photographs", here / "data_manifests" / "photographs")
    monkeypatch.setattr(manifests, "DATA_MANIFESTS", here / "data_manifests")
    monkeypatch.setattr(manifests, "GENERATED", here / "build")
    spoil(here / "data_manifests" / "photographs" / "manifest.json", what, ILL_TYPED[what])
    refused(here, "data", "verify", "photographs")






MACHINES = ["", "cpu_model = 5", "[cpu_model]\nidle_W_per_core = nan\nfull_W_per_core = 1", "[", "a = " + "[" * 99_999]
MACHINES += ['[cpu_model]\nidle_W_per_core = "3"\nfull_W_per_core = "x"', "[cpu_model]\nidle_W_per_core = -1"]
MACHINES += ["[cpu_model]\nidle_W_per_core = 1\nfull_W_per_core = 1e9"]


@pytest.mark.parametrize("text", MACHINES)
def test_descriptions_of_the_machine(here, text):
    (here / "runs" / "local").mkdir(parents=True)
    (here / "runs" / "local" / "system.toml").write_text(text)
    refused(here, "measure", "--", "touch", "canary", says="system.toml: cannot be read")
    with pytest.raises(ValueError, match="system.toml: cannot be read"):
        machine.load(here / "runs", "local", {})


STUDIES = {
    "defines no study": "x = 1",
    "mine.py defines no study": "study = 5",
    "SystemExit": "def study(): raise SystemExit(3)",
    "SystemExit: bye": "import sys\ndef study(system): sys.exit('bye')",
    "cannot be read: SystemExit": "raise SystemExit",
    "cannot be read: SyntaxError": "def study(:",
    "cannot be read: ModuleNotFoundError": "import nothing_of_this_name",
    "ZeroDivisionError": "def study(): return 1 / 0",
    "RecursionError": "def study(): return study()",
    "TypeError": "def study(): return 5",
    "TypeError: ": "def study(a, b): return []",
    "must return runs": "def study(): return []",
    "must return runs of": "def study(): return [{'devices': 2}]",
    "devices: must be": "from energynn import config\ndef study(): return [config.make(devices=10**21)]",
    "null bytes": "\0",
    "KeyError": "def study(): return [{}['a']]",
    "OSError": "def study(): raise OSError('disk')",
}


@pytest.mark.parametrize("says", STUDIES)
def test_studies_of_ones_own(here, says):
    (here / "mine.py").write_text(STUDIES[says])
    refused(here, "study", "show", here / "mine.py", says=says)


@pytest.mark.parametrize("what", [PIPE, FOLDER, DEVICE, SPARSE])
def test_a_study_that_is_no_file(here, what):
    (here / "mine.py").touch()
    spoil(here / "mine.py", what, None)
    refused(here, "study", "show", here / "mine.py", says="mine.py")


WORKLOADS = {
    "no_config": "x = 1",
    "a_number": "Config = 5",
    "a_class": "class Config: pass",
    "an_exit": "raise SystemExit",
    "an_error": "1 / 0",
    "no_python": "def",
}


@pytest.mark.parametrize("name", WORKLOADS)
def test_workloads_of_ones_own(here, name, monkeypatch):
    (here / "modules").mkdir()
    (here / "modules" / f"{name}.py").write_text(WORKLOADS[name])
    monkeypatch.syspath_prepend(str(here / "modules"))
    refused(here, "run", "-p", "workload", name, says=f"workload: '{name}' is not known")


@pytest.mark.parametrize("what", ["empty", "a list", "NaN", "nested", "binary", "no fields", PIPE, SPARSE, DEVICE])
def test_a_folder_whose_run_json_is_none_of_ours(here, what):
    (here / "out").mkdir()
    (here / "out" / "run.json").touch()
    spoil(here / "out" / "run.json", what, ILL_TYPED[what])
    refused(here, "measure", "--out", here / "out", "--", "touch", "canary", says="run.json")


@pytest.mark.parametrize("what", ["empty", "a list", "NaN", "nested", "binary", PIPE, SPARSE])
def test_numbers_of_notebooks(here, what):
    (here / "build" / "numbers").mkdir(parents=True)
    for path in (here / "build" / "numbers.json", here / "build" / "numbers" / "x.json"):
        path.touch()
        spoil(path, what, ILL_TYPED[what])
    (here / "runs").mkdir()
    refused(here, "check", here / "runs", "--reference", "--build-dir", here / "build")
    refused(here, "paper", "--build-dir", here / "build")


@pytest.mark.parametrize("runs_dir", [0, 7, "", None, [], b"runs", 1.5, "a\0b"])
def test_the_folder_of_the_runs_as_a_parameter(here, runs_dir):
    with pytest.raises(ValueError) as error:
        start.run(config.make(), runs_dir)
    assert "\n" not in str(error.value)


# --------------------------------------------------------------------------- what needs torch, or a process of its own


@pytest.mark.slow
def test_images_that_are_none_are_broken_for_the_trainer():
    from energynn.data import images as of_trainer

    for what, data in IMAGES.items():
        for load in (of_trainer.decode, of_trainer.load_pillow):
            if what != "a JPEG cut off" or load is of_trainer.load_pillow:
                with pytest.raises(imagenet.BAD_IMAGE):
                    load(data)


@pytest.mark.slow
def test_a_folder_that_is_deleted_while_it_is_measured_is_one_line(here):
    words = ["measure", "--out", "out", "--", "sh", "-c", f"rm -rf {here}/out; exit 7"]
    command = [sys.executable, "-m", "energynn.cli", *words]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 2 and "out was deleted while the command ran" in last, done.stderr
    assert done.stderr.count("energynn: ") == 1 and "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name, value", [("devices", 10**21), ("epochs", "two"), ("devises", 2), ("runs_dir", 7)])
def test_the_launch_notebook_refuses_bad_parameters_in_one_line(here, name, value):
    options = ["--no-progress-bar", "--cwd", str(REPOSITORY), "--parameters_yaml", json.dumps({name: value})]
    notebook = REPOSITORY / "notebooks" / "run_training.ipynb"
    command = [sys.executable, "-m", "papermill", str(notebook), str(here / "out.ipynb"), *options]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode and f"ValueError: {name}: " in done.stderr.strip().splitlines()[-1], done.stderr
