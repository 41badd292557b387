"""Records of other machines come in and are told apart; a run that is ignored is left out, and named."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import energynn
from energynn import cli, files, processes, records
from energynn.analysis import results
from tests.conftest import POWER_W, TRAINING_S, write_run_dir
from tests.measure.test_perun_import import layout_0_8, write_run


@pytest.fixture
def own(tmp_path):
    """A folder runs/ with one valid run of this machine."""
    records.build(write_run_dir(tmp_path / "runs"), "finished", "")
    return tmp_path / "runs"


@pytest.fixture
def theirs(tmp_path):
    """The same run of another machine, which took place a day later."""
    folder = write_run_dir(tmp_path / "theirs" / "runs")
    intent = json.loads((folder / "run.json").read_text())
    intent |= {"started_at": "2026-01-02T00:00:00Z", "machine": {"sockets": 1, "hostname": "anna's laptop"}}
    files.write_json(folder / "run.json", intent)
    records.build(folder, "finished", "")
    return folder


def merge(capsys, folder, runs_dir, *more):
    status = cli.main(["merge", str(folder), "--runs-dir", str(runs_dir), *more])
    return status, capsys.readouterr().out


def test_a_run_of_another_machine_comes_and_is_told_apart(own, theirs, capsys):
    status, out = merge(capsys, theirs.parent.parent, own)
    assert status == 0 and "1 came, 0 were here already, 0 refused" in out
    assert max(map(len, out.splitlines())) <= 80
    (came,) = own.glob("local@anna-s-laptop/*/record.json")
    assert came.parent.name == theirs.name and not list(own.glob("*/.*"))
    assert records.check(own) == []
    runs = results.load(own)
    assert sorted(runs.run_id.values) == [theirs.name, f"{theirs.name}@anna-s-laptop"] and not runs.attrs["excluded"]
    assert set(runs.system.values) == {"local", "local@anna-s-laptop"}
    table = energynn.compare(own / "local" / theirs.name, came.parent)
    assert f"{theirs.name}@anna-s-laptop" in table
    assert {record["system"] for record in records.read_all(own)} == {"local", "local@anna-s-laptop"}


def test_a_folder_that_was_renamed_by_the_sender_comes_under_its_own_names(own, theirs, capsys):
    renamed = theirs.parent.with_name("annas")
    theirs.parent.rename(renamed)
    (renamed / theirs.name).rename(renamed / "best-run")
    assert merge(capsys, renamed, own)[0] == 0 and records.check(own) == []
    assert (own / "local@anna-s-laptop" / theirs.name / "record.json").is_file() and not list(own.glob(".*"))


def test_nothing_comes_twice_and_nothing_is_overwritten(own, theirs, capsys):
    merge(capsys, theirs, own)
    assert merge(capsys, theirs, own)[1].splitlines()[-1] == "0 came, 1 were here already, 0 refused"
    intent = json.loads((theirs / "run.json").read_text())
    files.write_json(theirs / "run.json", intent | {"started_at": "2026-01-03T00:00:00Z"})
    records.build(theirs, "finished", "")
    before = records.read_all(own)
    status, out = merge(capsys, theirs, own)
    assert status == 1 and "is another record; --machine NAME" in " ".join(out.split())
    assert records.read_all(own) == before
    assert merge(capsys, theirs, own, "--machine", "berta")[0] == 0 and records.check(own) == []


KILLED_AT_ITS_END = """
import os, signal, sys
from pathlib import Path
from energynn import cli
Path.rename = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
cli.main(sys.argv[1:])
"""


@pytest.mark.parametrize("command", ["merge", "import-perun"])
def test_what_a_killed_process_left_counts_nowhere_and_goes_with_the_next_one(own, theirs, capsys, command):
    source = write_run(own.parent / "perun.hdf5", sensors=layout_0_8()) if command == "import-perun" else theirs
    words = [command, str(source), "--runs-dir", str(own)]
    environment = os.environ | {"PYTHONPATH": str(files.REPOSITORY)}
    killed = subprocess.run([sys.executable, "-c", KILLED_AT_ITS_END, *words], env=environment)
    assert killed.returncode == -signal.SIGKILL
    (left,) = own.rglob(".staged-*")
    assert list(left.rglob("record.json")) and len(records.run_dirs(own)) == 1
    shutil.copytree(next(left.rglob("record.json")).parent, own / "local" / ".as-they-lay.123")  # by earlier versions
    assert cli.main(["status", "--json", "--runs-dir", str(own)]) == 0
    assert len(json.loads(capsys.readouterr().out)["runs"]) == 1
    with files.staged(left.parent) as other:
        assert not left.exists() and other.exists(), "of one that has died"
        assert cli.main(words) == 0 and other.exists(), "of one that lives"
    assert len(records.run_dirs(own)) == 2 and not list(own.rglob(".staged-*"))
    assert records.check(own) == [] and len(records.read_all(own)) == 2


def test_what_check_finds_fault_with_stays_outside(own, theirs, capsys):
    samples = theirs / "samples-host.jsonl"
    samples.write_text(samples.read_text().replace("1000000000", "1000000001", 1))
    status, out = merge(capsys, theirs.parent.parent, own)
    assert status == 1 and "differs from its SHA-256" in " ".join(out.split()) and not list(own.glob("local@*"))
    (theirs / "record.json").unlink()
    assert "no record.json" in merge(capsys, theirs, own)[1]
    assert cli.main(["merge", str(samples)]) == 2 and cli.main(["merge", str(own.parent / "theirs")]) == 1


@pytest.mark.parametrize("target", ["/dev/zero", "/etc/passwd", ".", "nowhere"])
def test_a_link_is_refused_before_anything_is_copied(own, theirs, capsys, monkeypatch, target):
    (theirs / "perun" / "link").symlink_to(target)
    copyfile = shutil.copyfile

    def without_devices(source, *more, **options):
        assert not Path(source).is_symlink(), "a device has no end"
        return copyfile(source, *more, **options)

    monkeypatch.setattr(shutil, "copyfile", without_devices)
    status, out = merge(capsys, theirs.parent, own)
    assert status == 1 and "link: is a link or no regular file, which is not copied" in " ".join(out.split())
    assert not list(own.glob("local@*")) and not list(own.glob(".*"))


def test_links_that_stay_behind_are_no_fault(own, theirs, capsys):
    (theirs / "checkpoint").symlink_to("/dev")
    assert merge(capsys, theirs, own)[0] == 0 and records.check(own) == []


def test_a_file_of_perun_that_never_ends_is_refused_whatever_the_record_says(own, theirs, capsys, monkeypatch):
    def no_end(read, path, patience_s):
        raise ValueError(f"{path}: is damaged (found no end)")

    monkeypatch.setattr(processes, "require_an_end", no_end)
    status, out = merge(capsys, theirs, own)
    assert status == 1 and "energynn.hdf5: is damaged" in " ".join(out.split()) and not list(own.glob("local@*"))


def test_a_place_that_is_no_folder_is_refused_once(theirs, tmp_path, capsys):
    """Not once for each run."""
    (tmp_path / "file").touch()
    assert cli.main(["merge", str(theirs), "--runs-dir", str(tmp_path / "file")]) == 2
    assert "is no folder that you may write to" in capsys.readouterr().err


def test_names_that_lead_elsewhere_are_refused(own, theirs, capsys):
    intent = json.loads((theirs / "run.json").read_text())
    del intent["config_digest"], intent["data_digest"]
    intent |= {"workload": "command", "system": "../../x", "config": {"command": "sleep 1"}}
    files.write_json(theirs / "run.json", intent)
    for path in theirs.glob("events-*"):  # as those of a command
        path.write_text(path.read_text().replace('"training_end"', '"training_end", "exit_status": 0'))
    records.build(theirs, "finished", "")
    assert (
        "is no name of a folder" in " ".join(merge(capsys, theirs, own)[1].split()) and not (own.parent / "x").exists()
    )


def test_an_ignored_run_is_left_out_and_named_with_the_reason(own, capsys):
    (folder,) = own.glob("local/*")
    words = ["ignore", folder.name[:12], "--runs-dir", str(own)]
    assert cli.main([*words, "--why", "a backup ran, too"]) == 0
    assert records.check(own) == [], "the record is as it was"
    runs = results.load(own)
    assert runs.sizes["run"] == 0 and runs.attrs["excluded"] == [f"{folder}: ignored: a backup ran, too"]
    assert records.read_all(own) == []
    assert cli.main(["show", folder.name, "--runs-dir", str(own)]) == 0
    assert cli.main(["status", "--runs-dir", str(own)]) == 0
    assert capsys.readouterr().out.count("a backup ran, too") == 2
    assert cli.main([*words, "--undo"]) == 0 and results.load(own).sizes["run"] == 1
    assert cli.main([*words, "--why", " "]) == 2


def test_a_measured_command_is_ignored_and_counts_once_too(own):
    (folder,) = own.glob("local/*")
    record = json.loads((folder / "record.json").read_text())
    made = own / "measured" / "sleep-1"
    made.mkdir(parents=True)
    files.write_json(made / "run.json", {"workload": "command"})
    record |= {"workload": "command", "run_id": "sleep-1", "config": {"command": "sleep 1"}, "record_sha256": "0" * 64}
    files.write_json(made / "record.json", record)
    assert list(energynn.load(own).run).count("sleep-1") == 1
    copy = own / "measured" / "z-copied"
    shutil.copytree(made, copy)
    runs = energynn.load(own)
    assert list(runs.run).count("sleep-1") == 1
    assert runs.attrs["excluded"] == [f"{copy}: is a copy of {made}; keep one of the two"]
    shutil.rmtree(copy)
    (made / records.IGNORED).write_text("a test\n")
    shutil.rmtree(folder)
    runs = energynn.load(own)
    assert "sleep-1" not in runs.run and runs.attrs["excluded"] == [f"{made}: ignored: a test"]


def test_a_copy_of_a_run_counts_once(own, capsys):
    (folder,) = own.glob("local/*")
    copy = own / "local" / "z-copied"
    shutil.copytree(folder, copy)
    assert len(records.read_all(own)) == 1
    assert cli.main(["footprint", "--runs-dir", str(own), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["sums"][0]["runs"] == 1
    assert said["left_out"] == [{"run": copy.name, "reason": f"is a copy of {folder}; keep one of the two"}]
    assert cli.main(["status", "--runs-dir", str(own)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "2 runs: 2 finished; 0.667 Wh" in shown and "is a copy of local/" in shown
    assert cli.main(["status", copy.name, "--runs-dir", str(own)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "1 runs: 1 finished; 0.667 Wh" in shown and "is a copy" not in shown, "the only one that is asked for"
    (folder / records.IGNORED).write_text("a test\n")  # then the copy counts
    assert len(records.read_all(own)) == 1


def test_the_footprint_of_any_runs_by_a_factor_with_source_and_date(own, theirs, capsys):
    merge(capsys, theirs, own)
    words = ["footprint", "--runs-dir", str(own)]
    factors = ["--gCO2-per-kWh", "360", "--cost-per-kWh", "36", "--source", "a table", "--date", "2026-01-01"]
    assert cli.main([*words, *factors[:4]]) == 2 and "where the factor comes from" in capsys.readouterr().err
    assert cli.main([*words, *factors, "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["sums"]
    joules = 2 * POWER_W * TRAINING_S
    assert row["runs"] == 2 and row["provenance"] == "simulated"
    assert row["energy_J"] == pytest.approx(joules, rel=1e-3) and row["carbon_g"] == pytest.approx(
        joules / 1e4, rel=1e-3
    )
    assert row["price"] == pytest.approx(joules / 1e5, rel=1e-3)
    (theirs_here,) = own.glob("local@*/*")
    assert cli.main(["ignore", str(theirs_here), "--why", "a test"]) == 0
    assert cli.main([*words, *factors]) == 0
    said = capsys.readouterr().out
    assert (
        "simulated: 1 runs, 0.667 Wh" in said and "ignored: a test" in said and "factors: a table, 2026-01-01" in said
    )
    assert cli.main([*words, str(theirs_here)]) == 0 and "left out" in capsys.readouterr().out
    assert cli.main([*words, "local"]) == 0 and "simulated: 1 runs" in capsys.readouterr().out  # a system
    assert cli.main([*words, "R1"]) == 2 and "none of its runs is below" in capsys.readouterr().err
