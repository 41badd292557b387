"""What others wrote is data: it runs nothing, marks up nothing, and counts once."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pandas as pd
import pytest

from energynn import records
from energynn.analysis import results
from energynn.experiment import systems
from energynn.forecast import fits, runs
from energynn.host import files
from energynn.host.reading import read_json
from tests.conftest import built, forge
from tests.processes import ENERGYNN, answer, energynn, refusal
from tests.run_files import edit

# ----------------------------------------------------------------------------------- modules


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module that a record names; ``imported`` is there once it was imported."""
    imported = tmp_path / "imported"
    (tmp_path / "theirs.py").write_text(f"open({str(imported)!r}, 'w')")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield imported
    sys.modules.pop("theirs", None)


def fit_of(module):
    made = runs.ObservedRuns("theirs", systems.read_site("local"), [])
    taken = [{"config": {"workload": "theirs"}, "time_s": 1.0}]
    content = msgspec.to_builtins(made) | {"taken": taken}
    path = module.with_name("fit.json")
    files.write_json(path, {"schema": fits.FIT_FILE_SCHEMA, "runs": content})
    return path


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("what", ["fit", "held-out", "read"])
def test_only_the_caller_names_a_module(run_dir, module, what, named):
    config = read_json(run_dir / "run.json")["config"] | {"workload": "theirs"}
    machine = {"sockets": 1, "cores": 2}
    edit(run_dir / "run.json", workload="theirs", config=config, machine=machine)
    built(run_dir)
    of_runs = f"--system local --runs-dir {run_dir.parent.parent}"
    words = {
        "fit": f"fit --out {module.with_name('out.json')} {of_runs}",
        "held-out": f"predict --held-out {of_runs}",
        "read": f"predict -p devices=2 --fit {fit_of(module)}",
    }[what]
    name = {"fit": "theirs" if named else "resnet50"}.get(what, "theirs")
    words += f" --workload {name}" if named or what == "fit" else ""
    said = refusal(f"forecast {words}")
    assert module.exists() == named
    assert named or what == "fit" or "give it with --workload" in said


def test_a_record_with_two_workloads_is_a_fault(run_dir, module):
    config = read_json(run_dir / "run.json")["config"]
    edit(run_dir / "run.json", config=config | {"workload": "theirs"})
    built(run_dir)
    folder = run_dir.parent.parent
    assert "config.workload: is another" in answer("check", folder, status=1)
    words = f"forecast fit --workload resnet50 --system local --runs-dir {folder} --out"
    answer(words, module.with_name("x"), status=2)
    assert not module.exists()


# ----------------------------------------------------------------------------------- markup

HOSTILE = (
    "</script><script>alert(1)</script><!--<script>\x1b]0;x\x07\x9b2J\u202e\r\x7fend"
)


def test_nothing_of_a_record_is_markup_an_escape_or_a_formula(run_dir):
    folder = run_dir.parent.parent
    texts = dict(note=HOSTILE, name="=1+1", device_name=HOSTILE, workload="command")
    edit(run_dir / "run.json", config={"command": f"@x {HOSTILE}"}, **texts)
    host = json.dumps(HOSTILE)[1:-1]
    for path in run_dir.glob("*.jsonl"):
        path.write_text(path.read_text().replace('"host": "host"', f'"host": "{host}"'))
    built(run_dir)
    dead = folder / "local" / "dead"
    dead.mkdir()
    files.write_json(dead / "run.json", {"note": HOSTILE})
    page, table = folder / "x.html", folder / "x.csv"
    for said in (
        answer(f"show {run_dir} --details --plot", page),
        answer("status --runs-dir", folder),
        answer("check", folder, status=1),
        answer(f"export --own --csv {table} --runs-dir", folder),
        answer("show", run_dir, "--json"),
    ):
        assert said and all(one.isprintable() or one == "\n" for one in said), said
    text = page.read_text()
    assert "alert(1)" in text and not re.search("(<script>|<!--)(alert|<script)", text)
    row = pd.read_csv(table).set_index("name").loc["'=1+1"]
    assert row["command"].startswith("'@x")
    assert row["energy_J"] > 0, "numbers stay numbers"
    forge(run_dir / "record.json", config={"command": 5})
    assert "its files cannot be read" in answer("status --runs-dir", folder)


@pytest.mark.parametrize("sensors", [[{}], [{"primary": True}], [{"notes": None}]])
def test_what_is_no_sensor_is_said_in_one_line(run_dir, sensors):
    built(run_dir)
    forge(run_dir / "record.json", sensors=sensors)
    for word, status in (("show", 2), ("check", 1)):
        said = answer(word, run_dir, status=status)
        assert run_dir.name in said and "Traceback" not in said


# ------------------------------------------------------------------------------------ copies


# renamed; on another system; as another repeat, whose files have other digests, too
@pytest.mark.parametrize(
    "place, repeat", [("local/another", None), ("elsewhere/run", 0), ("local/run", 7)]
)
def test_a_copy_is_a_fault_and_counts_once(run_dir, place, repeat):
    folder = run_dir.parent.parent
    built(run_dir)
    assert records.check(folder) == []
    copy = shutil.copytree(run_dir, folder / place)
    if repeat is not None:
        config = read_json(copy / "run.json")["config"]
        names = {"run_id": copy.name, "system": copy.parent.name}
        edit(copy / "run.json", config=config | {"repeat": repeat}, **names)
        with open(copy / "samples-host.jsonl", "a") as file:
            file.write("\n" * repeat)
        built(copy)
    said = answer("check", folder, status=1)
    assert "has the samples of" in said and "valid: 1" in said
    table = folder / "x.csv"
    answer(f"export --own --csv {table} --runs-dir", folder)
    assert len(pd.read_csv(table)) == 1
    found = runs.valid_records(folder, systems.read_site("local"))
    assert len(found) <= 1 and len(records.read_all(folder)) == 1
    assert len(results.load_records(folder)) == 1


def test_runs_that_were_killed_before_a_sample_are_no_copies(run_dir):
    folder = run_dir.parent.parent
    (run_dir / "samples-host.jsonl").write_text("")
    shutil.copytree(run_dir, folder / "local" / "another")
    edit(folder / "local" / "another" / "run.json", run_id="another")
    records.recover(folder)
    assert records.check(folder) == [] and len(records.read_all(folder)) == 2


# --------------------------------------------------------------------------------- commands


@pytest.mark.parametrize("streams", [b" 2>&- >/dev/full", b" >&-"])
def test_a_measured_command_may_have_any_bytes_and_leave_processes(tmp_path, streams):
    """Its own status is passed on, though nobody hears; what outlives it is named."""
    program = f"setsid tail -f {tmp_path}/own & exit 7"
    (tmp_path / "own").touch()
    words = [*ENERGYNN, "measure", "--out", b"gr\xf6"]
    words += ["--", "sh", "-c", program, b"\xdf"]
    line = b" ".join(b"'%s'" % os.fsencode(word) for word in words)
    closed = [b"sh", b"-c", line + streams]
    assert subprocess.run(closed, cwd=tmp_path, timeout=60).returncode == 7
    (folder,) = map(Path, tmp_path.glob("gr*"))
    record = records.read_record_if_any(folder)
    assert record.config["command"].endswith(r"'\xdf'")
    assert record.run_id == r"gr\xf6"
    assert record.exit_status == 7 and records.check(tmp_path) == []
    (left,) = [flag for flag in record.flags if "still running" in flag]
    pid = int(left.partition("tail (")[2].rstrip(")"))
    os.kill(pid, 9)


@pytest.mark.slow
@pytest.mark.parametrize(
    "content, why",
    [
        (b"\x7fELF\0\0", "Exec format error"),
        (b"touch canary", "Exec format error"),
        (b"#!/bin/sh\r\nexit 0\r\n", "No such file or directory"),
    ],
)
def test_what_the_system_refuses_is_a_record_that_says_why(tmp_path, content, why):
    script = tmp_path / "script"
    script.write_bytes(content)
    script.chmod(0o755)
    done = energynn("measure --out", tmp_path / "run", "--", script)
    assert done.returncode == 126
    reason = records.read_record_if_any(tmp_path / "run").status_reason
    assert f"cannot be started: {why}; of a script" in reason
