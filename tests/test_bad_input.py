"""Bad input to a command is one clear line, executes nothing, and loses nothing."""

import os
from itertools import product
from pathlib import Path

import h5py
import numpy as np
import pytest

from energynn.analysis import results
from energynn.data import imagenet
from energynn.host import processes
from tests.conftest import write_runs
from tests.data.test_own_images import picture
from tests.perun_files import PACKAGE, damaged, layout_0_8, write_run
from tests.processes import answer, refusal, said, write_program


@pytest.fixture
def here(tmp_path, monkeypatch, signals):
    """Work in an empty folder, in which a program that is started would leave `canary`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path / 'programs'}:{os.environ['PATH']}")
    (tmp_path / "programs").mkdir()
    write_program(tmp_path / "programs" / "gs", f"touch {tmp_path}/canary")
    return tmp_path  # `measure` passes signals on to its command


def content(folder: Path) -> dict:
    stats = {path: path.lstat() for path in folder.rglob("*") if not path.is_dir()}
    return {path: (stat.st_size, stat.st_mtime_ns) for path, stat in stats.items()}


def refused(here: Path, command: str, says: str = "") -> None:
    """Expect status 2 and one line that holds ``says``; nothing was executed, nothing is lost."""
    before = content(here)
    errors = refusal(command)
    assert errors.startswith("energynn") and len(errors) < 1000, errors
    assert says in errors, errors
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
    bad, good = write_runs(here / "runs", "local", "other")
    spoil(bad / name, what)
    status, out, errors = said("check", here / "runs")
    faults = [line for line in out.splitlines() if line.startswith("FAULT")]
    assert status == 1 and faults and not errors, (out, errors)
    assert all(bad.name in line and good.name not in line for line in faults), faults
    assert "finished" in answer("status --runs-dir", here / "runs")
    loaded = results.load_records(here / "runs")
    assert good.name in loaded["run_id"].values
    assert len(loaded) + len(loaded.attrs["excluded"]) == 2


@pytest.mark.parametrize(
    "words, says",
    [
        ("run -p training_samples=9999", "the data set has 1000"),
        ("measure -- no-such-command", "'no-such-command' is no command"),
        ("measure --period 0 true", "is not in the range 0.01<=x<=60"),
        ("measure --period nan true", "nan is no number."),
        ("status --watch last --json", "asks --json again"),
        ("measure --out /proc/nothing true", "No such file or directory"),
    ],
)
def test_what_cannot_work_leaves_nothing(here, monkeypatch, words, says):
    monkeypatch.delenv("ENERGYNN_RUNS", raising=False)
    refused(here, words, says=says)
    assert not (here / "runs").exists()


def test_a_machine_that_leaves_all_sensors_out_is_not_measured(here):
    (here / "runs/local").mkdir(parents=True)
    (here / "runs/local/system.toml").write_text('left_out = ["cpu"]')
    refused(here, "measure true", says="leaves no sensor; leave one in")
    assert not (here / "runs/measured").exists()


@pytest.mark.parametrize(
    "name, text",
    [
        ("thesis.tex", "years of work"),
        ("run.json", "{"),
        ("run.json", "{}"),
        ("run.json", "[1]"),
        ("run.json", '{"workload": "resnet50", "config": {}}'),
    ],
)
def test_a_folder_with_other_things_in_it_is_left_alone(here, name, text):
    folder = here / "full"
    folder.mkdir()
    (folder / name).write_text(text)
    refused(here, f"measure --out {folder} -- true")
    assert len(content(folder)) == 1


def test_what_cannot_be_written_is_refused_before_it_is_computed(here, monkeypatch):
    monkeypatch.setattr("energynn.analysis.interface.load", None)
    (here / "runs").mkdir()
    (here / "file").touch()
    refused(here, f"export --csv {here}", says="is a directory")
    place = here / "file" / "out"
    refused(here, f"export --csv {place}", says="no folder that you may write")


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
    # found by damaging 14,000 copies
    ("is damaged", damaged),
    ("is no regular file", lambda path: spoil(path, PIPE)),
]


@pytest.mark.parametrize("says, change", PERUN)
def test_foreign_perun_files(here, monkeypatch, says, change):
    monkeypatch.setattr(processes, "READ_TIMEOUT_S", 6)
    path = write_run(here / "x.hdf5", layout_0_8())
    change(path)
    refused(here, f"import-perun {path} --runs-dir {here}/runs", says=says)
    assert not list((here / "runs").rglob("run.json")), "nothing half imported"


EPS = (
    b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n%%EOF\n"
)


def test_an_image_that_is_a_program_is_not_executed(here):
    """Other files that are no images: tests/data/test_own_images.py."""
    for place in product(imagenet.SPLIT_NAMES, ("n01", "n02")):
        picture(here.joinpath("images", *place, "good.JPEG"))
    bad = here / "images" / "train" / "n01" / "bad.JPEG"
    bad.write_bytes(EPS)
    with pytest.raises(ValueError, match="bad.JPEG is broken"):
        imagenet.write_ppm_store(here / "images", here / "store")
    assert not (here / "canary").exists(), "Ghostscript was started"
    spoil(bad, PIPE)  # a pipe is no image, and is not waited for
    imagenet.write_ppm_store(here / "images", here / "other")
