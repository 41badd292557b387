import fcntl
import json
from unittest import mock

import pytest

from energynn import cli, config, files, records
from energynn.files import REPOSITORY
from energynn.measure import perun_adapter


def rewrite(run_dir, **changes):
    """Change a record and make its own digest right again, as somebody who knows how would."""
    record = json.loads((run_dir / "record.json").read_text()) | changes
    record.pop("record_sha256")
    record["record_sha256"] = config.digest(record)
    (run_dir / "record.json").write_text(json.dumps(record))


def test_every_number_of_a_record_is_the_known_one(run_dir):
    record = records.build(run_dir, "finished", "")
    assert record["valid"], record["invalid_reasons"]
    assert record["training_time_s"] == pytest.approx(20.0)
    assert record["energy_cpu_J"] == pytest.approx(2400.0, rel=1e-6)
    assert record["energy_total_provenance"] == record["energy_cpu_provenance"] == "simulated"
    assert record["device_hours_training"] == pytest.approx(2 * 20 / 3600)
    assert record["mean_power_total_W"] == pytest.approx(120.0)
    assert record["energy_perun_total_J"] == pytest.approx(120.0 * 21, rel=1e-6)
    assert record["perun_time_s"] == pytest.approx(21.0) and record["perun_samples"] == 81
    assert record["samples_in_training"] == 201 and record["coverage"] == pytest.approx(1.0)
    assert record["metrics"] == {"top1_error": 0.25} and record["phases"] == [
        {"rank": 0, "forward_s": 8.0, "backward_s": 10.0},
        {"rank": 1, "forward_s": 8.000001, "backward_s": 10.0},
    ]
    assert record["phase_spread"]["forward_s"] == {"min": 8.0, "mean": pytest.approx(8.0000005), "max": 8.000001}
    assert "energy_gpu_J" not in record and "energy_ram_J" not in record
    assert set(record) <= set(records.FIELDS)
    assert records.check(run_dir.parent.parent) == []


@pytest.mark.parametrize(
    "field, value",
    [
        ("energy_total_J", 2000.0),
        ("training_time_s", 19.0),
        ("samples_trained", 640),
        ("valid", False),
        ("metrics", {"top1_error": 0.2}),
        ("energy_cpu_provenance", "measured"),
        ("energy_perun_total_J", 1.0),
        ("device_hours_training", 1.0),
        ("coverage", 0.995),
        ("energy_gpu_J", 5.0),
        ("status", "excellent"),
        ("started_at", "2027-01-01T00:00:00Z"),
        ("more", 1),
    ],
)
def test_a_number_changed_by_somebody_who_mends_the_digest_is_found(run_dir, field, value):
    records.build(run_dir, "finished", "")
    rewrite(run_dir, **{field: value})
    faults = records.check(run_dir.parent.parent)
    assert any(field in fault for fault in faults), faults


def test_what_another_machines_sums_round_to_is_no_fault(run_dir):
    phases = records.build(run_dir, "finished", "")["energy_phases"]
    assert phases[-1]["phase"] == "unattributed" and phases[-1]["energy_cpu_J"] == 0.0, "all of it belongs to ranks"
    rewrite(run_dir, energy_phases=[*phases[:-1], phases[-1] | {"energy_cpu_J": 5.7e-14}])
    assert records.check(run_dir.parent.parent) == []
    rewrite(run_dir, energy_phases=[*phases[:-1], phases[-1] | {"energy_cpu_J": 1e-10}])
    assert len(records.check(run_dir.parent.parent)) == 1, "more than that is one"


def test_a_tampered_record_a_trace_or_a_missing_file_is_one_line_each(run_dir, capsys):
    runs = run_dir.parent.parent
    records.build(run_dir, "finished", "")
    assert cli.main(["check", str(runs)]) == 0
    text = (run_dir / "record.json").read_text()
    (run_dir / "record.json").write_text(text.replace('"status_reason": ""', '"status_reason": "x"'))
    assert cli.main(["check", str(runs)]) == 1
    assert "record.json was changed" in capsys.readouterr().out
    (run_dir / "record.json").write_text(text)
    trace = run_dir / "samples-host.jsonl"
    trace.write_text(trace.read_text().replace('"v": [1120000000]', '"v": [1120000009]'))
    (run_dir / "events-rank1.jsonl").unlink()
    (run_dir / "stray.txt").write_text("x")
    faults = records.check(runs)
    for expected in ("samples-host.jsonl: differs", "events-rank1.jsonl: missing", "stray.txt: not in the record"):
        assert sum(expected in fault for fault in faults) == 1, faults
    assert all("\n" not in fault for fault in faults)


def test_a_file_of_perun_that_was_changed_is_a_fault_and_stays_unread(run_dir, monkeypatch):
    records.build(run_dir, "finished", "")
    with open(run_dir / "perun" / "energynn.hdf5", "ab") as file:
        file.write(b"\0")
    monkeypatch.setattr(records, "read_hdf5", mock.Mock(side_effect=AssertionError("HDF5 may never come to an end")))
    differs, unread = records.check_record(run_dir)
    assert differs.startswith("perun/energynn.hdf5: differs") and "not derived again" in unread


@pytest.mark.parametrize("has_record", [True, False])
def test_a_damaged_file_of_perun_holds_nobody_up(run_dir, monkeypatch, capsys, has_record):
    """HDF5 goes round in it for ever; neither a record nor a checksum says that anybody has read it."""
    monkeypatch.setattr(perun_adapter, "READ_WITHIN_S", 2)
    if has_record:
        records.build(run_dir, "finished", "")
    whole = REPOSITORY / "runs/large-batch/resnet50-photographs-n1-lbs16-gbs48-s2-r0-87b7cd23/perun/energynn.hdf5"
    damaged = bytearray(whole.read_bytes())
    damaged[4105] = 202
    (run_dir / "perun" / "damaged.hdf5").write_bytes(damaged)
    if has_record:
        fault, *more = records.check(run_dir)
        assert "perun/damaged.hdf5: not in the record's list of files" in fault and "cannot be read" in "".join(more)
    else:
        assert cli.main(["check", str(run_dir), "--recover"]) == 0
        record = json.loads((run_dir / "record.json").read_text())
        assert "perun/damaged.hdf5: cannot be read, perun was cut off while it wrote" in record["flags"]
        assert record["energy_perun_total_J"] > 0, "the other file is whole"
    assert "Traceback" not in capsys.readouterr().err


def test_a_file_of_perun_that_was_read_before_is_read_at_once(run_dir, monkeypatch):
    records.build(run_dir, "finished", "")
    again = mock.Mock(side_effect=AssertionError("a process for each file would be slow"))
    monkeypatch.setattr(perun_adapter, "require_an_end", again)
    assert records.check(run_dir) == []


def test_what_makes_a_run_no_evidence(run_dir):
    trace = run_dir / "samples-host.jsonl"
    lines = trace.read_text().splitlines(keepends=True)
    trace.write_text("".join(lines[:100] + lines[150:]))  # five seconds without a sample
    record = records.build(run_dir, "finished", "")
    assert not record["valid"] and "cover" in record["invalid_reasons"][0]
    trace.write_text("".join(lines[:1] + lines[1::5]))
    record = records.build(run_dir, "finished", "")
    assert any("power samples" in reason for reason in record["invalid_reasons"])
    trace.write_text("".join(lines))
    (run_dir / "perun" / "energynn.hdf5").unlink()
    assert records.build(run_dir, "finished", "")["invalid_reasons"] == ["perun's HDF5 is missing or cannot be read"]


def test_a_dead_run_is_a_fault_until_it_is_recovered(run_dir, capsys):
    runs = run_dir.parent.parent
    for rank in range(2):
        events = run_dir / f"events-rank{rank}.jsonl"
        events.write_text("".join(line for line in events.read_text().splitlines(keepends=True) if "_end" not in line))
    (run_dir / "samples-host.jsonl").write_text((run_dir / "samples-host.jsonl").read_text()[:-20])
    assert cli.main(["check", str(runs)]) == 1
    assert "no record.json" in capsys.readouterr().out
    assert cli.main(["check", "--recover", str(runs)]) == 0
    record = records.read(run_dir)
    assert record["ended_at"].startswith("1970-01-01T00:00:20.8"), "at its last sample"
    assert record["status"] == "killed" and "1 of 1 epochs were done" in record["status_reason"]
    assert record["energy_cpu_J"] > 2400 and not record["valid"] and record["unreadable_lines"] == 1


HIDDEN = ".ipynb_checkpoints/notebook-checkpoint.ipynb"  # JupyterLab makes it beside a notebook that it opens


def test_what_lies_in_a_hidden_folder_is_no_raw_file(run_dir):
    """It may come and go; what a record of an earlier version lists of it may go, too, but not change."""
    hidden = run_dir / HIDDEN
    hidden.parent.mkdir()
    hidden.write_text("{}")
    listed = records.build(run_dir, "finished", "")["files"]
    assert HIDDEN not in listed and records.check(run_dir.parent.parent) == []
    digest = {"bytes": 2, "sha256": files.sha256(hidden)}
    rewrite(run_dir, files=listed | {HIDDEN: digest})
    assert records.check(run_dir.parent.parent) == []
    hidden.write_text("[]")
    assert records.check(run_dir.parent.parent) == [f"{run_dir.name}: {HIDDEN}: differs from its SHA-256 in the record"]
    hidden.unlink()
    assert records.check(run_dir.parent.parent) == []
    for name in (".state.json", "../other/samples.jsonl", ".a/../samples.jsonl", "gone.jsonl", "perun/.gone"):
        rewrite(run_dir, files=listed | {name: digest})
        assert records.check(run_dir.parent.parent) == [f"{run_dir.name}: {name}: missing"]


def test_a_run_that_goes_on_is_left_alone(run_dir):
    with open(run_dir / "run.json") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert records.is_running(run_dir)
        assert records.check(run_dir.parent.parent) == [] and records.recover(run_dir.parent.parent) == []
    assert not records.is_running(run_dir)


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "record.json"
    files.write_json(path, {"a": 1})
    with pytest.raises(ValueError):
        files.write_json(path, {"a": float("nan")})
    assert json.loads(path.read_text()) == {"a": 1} and list(tmp_path.iterdir()) == [path]


def test_the_data_dictionary_is_complete(run_dir):
    intent = json.loads((run_dir / "run.json").read_text())
    derived = {**records.derive(run_dir, intent), "valid": True, "invalid_reasons": [], "files": {}}
    missing = {*derived, *records.ALWAYS, *records.FROM_INTENT} - set(records.FIELDS)
    assert not missing, f"record_fields.toml does not explain {missing}"
    assert all(meaning for _, meaning in records.FIELDS.values())


def test_the_committed_records_are_whole():
    assert records.check(REPOSITORY / "runs" / "published") == []


def test_the_table_of_fields_is_made_from_the_data(tmp_path):
    committed = (REPOSITORY / "runs" / "README.md").read_text()
    copy = tmp_path / "README.md"
    copy.write_text(committed.replace("| UTC |", "| h |"))
    records.write_table_of_fields(copy)
    assert copy.read_text() == committed, "`python -m energynn.records` writes the table anew"
