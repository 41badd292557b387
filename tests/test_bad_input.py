"""A corpus of bad input: whatever is given to a command is one clear line, executes nothing, and loses nothing."""

import contextlib
import io
import json
import os
import shlex
import shutil
from pathlib import Path

import h5py
import numpy as np
import pytest
import xarray as xr
from PIL import Image

from energynn import cli, config, records
from energynn.analysis import profiles, results
from energynn.cluster import systems
from energynn.data import imagenet
from energynn.measure import machine
from tests.conftest import write_run_dir
from tests.data.test_era5_stores import CHANNELS, dataset, hours_of_year, write_hdf5
from tests.measure.test_perun_import import layout_0_8, write_run

ARGUMENTS = []
for line in (Path(__file__).parent / "bad_arguments.txt").read_text().splitlines():
    if line and not line.startswith("#"):
        ARGUMENTS.append(tuple(part.strip() for part in line.split(" : ", 1)))


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
    return tmp_path


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


@pytest.mark.parametrize("words, says", ARGUMENTS, ids=[words for words, _ in ARGUMENTS])
def test_bad_arguments(here, two_runs, words, says):
    shutil.copytree(two_runs, here / "runs")
    (here / "empty").mkdir()
    (run,) = (here / "runs" / "local").glob("resnet50*")
    given = [word.format(here=here / "empty", runs=here / "runs", run=run) for word in shlex.split(words)]
    refused(here, *given, says=says)


# ------------------------------------------------------------------------------------------- parameters of a run


def beyond_its_limits():
    """Each parameter of each workload with values of other types and beyond its limits."""
    for workload, config_class in config.CONFIGS.items():
        for name, known in config.facts(config_class).items():
            values = [["a", "list"], {"a": 1}]
            values += [known.least - 1] if known.least is not None else []
            values += [2 * known.most + 1] if known.most is not None else []
            values += ["/etc/passwd", "\n"] if known.choices or known.form else []
            if name != "workload":
                yield from ((workload, name, value) for value in values)


@pytest.mark.parametrize("workload, name, value", list(beyond_its_limits()))
def test_parameters_of_papermill_and_of_run(workload, name, value):
    namespace = {"workload": workload, name: value, "In": [], "_": 1}
    with pytest.raises(ValueError, match=f"^{name}: must be ") as error:
        config.make(**config.from_notebook(namespace))
    assert "\n" not in str(error.value) and len(str(error.value)) < 300


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
    "training_time_s": ["20", [], True],
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
    assert status == 0 and not errors and out.count("\n") in (3, 4), (out, errors)
    assert [line.split()[1] for line in out.splitlines() if line.startswith(good.name)] == ["finished"], out
    loaded = results.load(runs)
    assert good.name in loaded["run_id"].values and loaded.sizes["run"] + len(loaded.attrs["excluded"]) == 2
    assert all("\n" not in line for line in loaded.attrs["excluded"])
    assert good.name in set(profiles.available(runs)["run"])


@pytest.mark.parametrize("what", ILL_TYPED)
@pytest.mark.parametrize("name", ["run.json", "record.json"])
def test_an_ill_typed_file_is_a_fault_of_one_run(here, two_runs, name, what):
    shutil.copytree(two_runs, here / "runs")
    (run,) = (here / "runs" / "local").glob("resnet50*")
    spoil(run / name, what, ILL_TYPED[what])
    if (name, what) != ("record.json", LOOP):  # which is none
        only_one_run_is_concerned(here / "runs")
        if name == "run.json" or what not in ("no fields", "UTF-16"):
            refused(here, "recompute", run)
            refused(here, "watch", run, "--once")


@pytest.mark.parametrize("name, value", [(name, value) for name, values in TYPED.items() for value in values])
def test_a_field_of_another_type_is_a_fault_of_one_run(here, two_runs, name, value):
    shutil.copytree(two_runs, here / "runs")
    (run,) = (here / "runs" / "local").glob("resnet50*")
    rewritten(run / "record.json", lambda record: record.update({name: value}))
    only_one_run_is_concerned(here / "runs")
