"""Bad input to a command is one clear line, executes nothing, and loses nothing."""

import io
import os
import signal
from itertools import product
from pathlib import Path

import h5py
import numpy as np
import pytest
from PIL import Image

from energynn import records
from energynn.analysis import results
from energynn.data import imagenet
from tests.conftest import write_run_dir
from tests.data.test_era5_stores import CHANNELS, write_hdf5
from tests.perun_files import PACKAGE, layout_0_8, write_run
from tests.processes import said


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Work in an empty folder, in which a program that is started would leave `canary`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path / 'programs'}:{os.environ['PATH']}")
    (tmp_path / "programs").mkdir()
    ghostscript = tmp_path / "programs" / "gs"
    ghostscript.write_text(f"#!/bin/sh\ntouch {tmp_path}/canary\n")
    ghostscript.chmod(0o755)
    numbers = (
        signal.SIGINT,
        signal.SIGTERM,
        signal.SIGHUP,
        signal.SIGUSR1,
        signal.SIGUSR2,
    )
    handlers = {number: signal.getsignal(number) for number in numbers}
    yield tmp_path
    for number, handler in handlers.items():
        # `measure` passes signals on to its command
        signal.signal(number, handler)


def content(folder: Path) -> dict:
    stats = {path: path.lstat() for path in folder.rglob("*") if not path.is_dir()}
    return {path: (stat.st_size, stat.st_mtime_ns) for path, stat in stats.items()}


def refused(here: Path, *words, says: str = "") -> None:
    """Expect status 2 and one line that holds ``says``; nothing was executed, nothing is lost."""
    before = content(here)
    status, _, errors = said(*words)
    assert status == 2, (status, errors)
    assert (
        errors.startswith("energynn") and errors.count("\n") == 1 and len(errors) < 1000
    ), errors
    assert says in errors and "Traceback" not in errors, errors
    assert not (here / "canary").exists(), "something was executed"
    assert before.items() <= content(here).items(), "something was lost"


PIPE, FOLDER, SPARSE, DEVICE = "a pipe", "a folder", "3 GB of nothing", "a device"
CONTENTS = {
    "empty": b"",
    "a list": b"[]",
    "NaN": b'{"devices": NaN}',
    "1e400": b'{"devices": 1e400}',
    "nested": b'{"a":' * 200_000,
    "digits": b'{"devices": ' + b"9" * 10_000 + b"}",
    "binary": bytes(range(256)) * 10,
    "pickle": b"cos\nsystem\n(S'touch canary'\ntR.",
}


def spoil(path: Path, what: str) -> None:
    """Put something in the place of a file."""
    path.unlink(missing_ok=True)
    if what == PIPE:
        os.mkfifo(path)
    elif what == FOLDER:
        path.mkdir()
    elif what == SPARSE:
        path.touch()
        os.truncate(path, 3 * 10**9)
    elif what == DEVICE:
        path.symlink_to("/dev/zero")
    else:
        path.write_bytes(CONTENTS[what])


NO_RAW_FILE = [("samples-host.jsonl", PIPE), ("events-rank1.jsonl", DEVICE)]
NO_FILE = product(("run.json", "record.json"), (*CONTENTS, PIPE, FOLDER, SPARSE))


@pytest.mark.parametrize("name, what", [*NO_FILE, *NO_RAW_FILE])
def test_an_ill_typed_file_is_a_fault_of_one_run(here, name, what):
    bad, good = (write_run_dir(here / "runs", system) for system in ("local", "other"))
    for run in (bad, good):
        records.build(run, "finished", "")
    spoil(bad / name, what)
    status, out, errors = said("check", here / "runs")
    faults = [line for line in out.splitlines() if line.startswith("FAULT")]
    assert status == 1 and faults and not errors, (out, errors)
    assert all(bad.name in line and good.name not in line for line in faults), faults
    status, out, errors = said("status", "--runs-dir", here / "runs")
    assert status == 0 and not errors and "finished" in out, (out, errors)
    loaded = results.load(here / "runs")
    assert good.name in loaded["run_id"].values
    assert len(loaded) + len(loaded.attrs["excluded"]) == 2
    if name == "run.json":
        words = ["measure", "--out", bad, "--", "touch", "canary"]
        refused(here, *words, says="holds something else")


def test_what_cannot_work_is_refused_before_it_starts(here):
    script = here / "script"
    script.write_text("touch canary")
    script.chmod(0o755)
    refused(here, "measure", "--", script, says="a text that does not begin with #!")
    asked = "training_samples=9999"
    refused(here, "run", "--runs-dir", here, "-p", asked, says="the data set has 1000")


@pytest.mark.parametrize(
    "words, says",
    [
        (["--", "no-such-command"], "'no-such-command' is no command"),
        (["--period", "0", "--", "true"], "greater than or equal to 0.01"),
        (["--out", "/proc/nothing", "--", "true"], "No such file or directory"),
    ],
)
def test_what_cannot_be_measured_leaves_nothing(here, words, says):
    refused(here, "measure", *words, says=says)
    assert not (here / "runs").exists()


@pytest.mark.parametrize(
    "name, text",
    [
        ("thesis.tex", "years of work"),
        ("run.json", "{}"),
        ("run.json", "[1]"),
        ("run.json", '{"workload": "resnet50", "config": {}}'),
    ],
)
def test_a_folder_with_other_things_in_it_is_left_alone(here, name, text):
    folder = here / "full"
    folder.mkdir()
    (folder / name).write_text(text)
    refused(here, "measure", "--out", folder, "--", "true")
    assert len(content(folder)) == 1


def test_what_cannot_be_written_is_refused_before_it_is_computed(here, monkeypatch):
    monkeypatch.setattr("energynn.analysis.interface.load", None)
    (here / "runs").mkdir()
    (here / "file").touch()
    refused(here, "export", "--csv", here, says="is a directory")
    place = here / "file" / "out"
    refused(here, "export", "--csv", place, says="no folder that you may write")


# ---------------------------------------------------------------------------------- foreign files


def replaced(name: str = "values", **facts):
    """Make a data set anew in its place, with its attributes."""

    def change(file: h5py.File) -> None:
        raw = file[PACKAGE]
        kept = dict(raw[name].attrs)
        del raw[name]
        raw.create_dataset(name, **facts).attrs.update(kept)

    return in_place(change)


def in_place(change):
    """Change an HDF5 file."""

    def changed(path: Path) -> None:
        with h5py.File(path, "a") as file:
            change(file)

    return changed


def linked(link):
    return in_place(lambda file: file["app/nodes"].__setitem__("again", link))


OUTSIDE = [("/etc/passwd", 0, 21 * 8)]
TOO_MANY = dict(shape=(3 * 10**8,), dtype="u8", chunks=(1000,))
PERUN = [
    ("is a link", linked(h5py.SoftLink("/app/nodes/run"))),
    ("is a link", linked(h5py.ExternalLink("elsewhere.hdf5", "/app"))),
    ("another file", replaced(shape=(21,), dtype="f8", external=OUTSIDE)),
    ("no real numbers", replaced(data=np.full(21, 1 + 2j))),
    ("is of type object", replaced(data=["12.1"] * 21)),
    ("declares more than 5e+07", replaced(**TOO_MANY)),
    ("do not match", replaced(data=np.ones(5))),
    (
        "can be read",
        in_place(lambda file: file[PACKAGE]["values"].attrs.update(mag="many")),
    ),
    ("not those of a run", replaced("timesteps", data=np.arange(21.0)[::-1])),
    (
        "not a perun",
        lambda path: path.write_bytes(b"\x89HDF\r\n\x1a\n" + b"\xff" * 100),
    ),
    ("not a perun", lambda path: os.truncate(path, path.stat().st_size // 2)),
    (
        "not a perun",
        lambda path: h5py.File(path, "w").create_dataset("x", data=1).file.close(),
    ),
    ("not a perun", Path.unlink),
    ("is no regular file", lambda path: spoil(path, PIPE)),
]


@pytest.mark.parametrize("says, change", PERUN)
def test_foreign_perun_files(here, says, change):
    path = write_run(here / "x.hdf5", layout_0_8())
    change(path)
    refused(here, "import-perun", path, "--runs-dir", here / "runs", says=says)
    assert not list((here / "runs").rglob("run.json")), "nothing half imported"


def infinite_era5(folder: Path) -> None:
    write_hdf5(folder, 2019, 2)
    with h5py.File(folder / "2019.h5", "r+") as file:
        file["fields"][1, CHANNELS.index("v850")] = np.inf


def linked_era5(folder: Path) -> None:
    write_hdf5(folder, 2018, 2)
    with h5py.File(folder / "2019.h5", "w") as file:
        file["fields"] = h5py.ExternalLink("2018.h5", "fields")


@pytest.mark.parametrize(
    "spoiled, says",
    [
        (infinite_era5, "no finite v850 at 2019-01-01T06 UTC"),
        (linked_era5, "is a link"),
    ],
)
def test_foreign_era5(here, spoiled, says):
    (here / "source").mkdir()
    spoiled(here / "source")
    words = ["data", "era5", "--source", here / "source", "--out", here / "store"]
    refused(here, *words, "--years", "2019", says=says)
    assert not list((here / "store").glob("*.npy")), "nothing of it was stored as good"


def encoded(kind: str) -> bytes:
    data = io.BytesIO()
    Image.new("RGB", (8, 8), "red").save(data, kind)
    return data.getvalue()


IMAGES = {
    "empty": b"",
    "EPS": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n%%EOF\n",
    "GIF": encoded("GIF"),
    "a PNG cut off": encoded("PNG")[:40],
    "a script": b"#!/bin/sh\ntouch canary\n",
}


@pytest.mark.parametrize("what", IMAGES)
def test_images_that_are_none(here, what):
    for split in imagenet.SPLITS:
        folder = here / "images" / split / "n01"
        folder.mkdir(parents=True)
        (folder / "good.JPEG").write_bytes(encoded("JPEG"))
    bad = here / "images" / "train" / "n01" / "bad.JPEG"
    bad.write_bytes(IMAGES[what])
    with pytest.raises(ValueError, match="bad.JPEG is broken"):
        imagenet.prepare(here / "images", here / "store")
    assert not (here / "canary").exists(), "Ghostscript was started"
    spoil(bad, PIPE)  # a pipe is no image, and is not waited for
    imagenet.prepare(here / "images", here / "other")


# -------------------------------------------------------- systems of one's own

MACHINES = [
    "",
    "cpu_model = 5",
    "[",
    "[cpu_model]\nidle_W_per_core = -1\nfull_W_per_core = 1",
]


@pytest.mark.parametrize("text", MACHINES)
def test_descriptions_of_the_machine(here, text):
    (here / "runs" / "local").mkdir(parents=True)
    (here / "runs" / "local" / "system.toml").write_text(text)
    refused(
        here, "measure", "--", "touch", "canary", says="system.toml: cannot be read"
    )
