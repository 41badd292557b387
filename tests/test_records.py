"""Records: every number is the known one, and each later change is one line of `check`."""

import json
import math
import shutil
import tomllib
from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from energynn import records
from energynn.experiment import config, studies
from energynn.host import files, processes
from energynn.host.files import REPOSITORY
from energynn.host.reading import read_json
from energynn.measure import account
from tests.conftest import built, forge, write_runs
from tests.experiment.test_config import JSON
from tests.perun_files import damaged
from tests.processes import answer
from tests.run_files import edit, rewrite, text_of


def test_every_number_of_a_record_is_the_known_one(run_dir):
    record = built(run_dir)
    assert record.valid, record.invalid_reasons
    expected = dict(
        training_time_s=20.0,
        energy_cpu_J=2400.0,
        device_hours_training=2 * 20 / 3600,
        mean_power_total_W=120.0,
        energy_perun_total_J=120.0 * 21,
        perun_time_s=21.0,
        samples_in_training=201,
        coverage=1.0,
        sockets=1,
    )
    found = {name: getattr(record, name) for name in expected}
    assert found == pytest.approx(expected, rel=1e-6)
    assert record.metrics == {"top1_error": 0.25}
    for part in ("total", "cpu"):
        assert getattr(record, f"energy_{part}_provenance") == "simulated"
    forward_s = [
        each["time_s"] for each in record.energy_phases if each["phase"] == "forward"
    ]
    assert forward_s == [8.0, 8.000001]
    assert record.energy_gpu_J is None and record.energy_ram_J is None
    assert records.read_record_if_any(run_dir) == record
    assert records.check(run_dir) == []


@pytest.fixture(scope="session")
def two_runs(tmp_path_factory):
    """Two valid runs of two systems, built once and copied by each case."""
    runs = tmp_path_factory.mktemp("two") / "runs"
    write_runs(runs, "local", "other")
    assert records.check(runs) == []
    return runs


def copied(two_runs, tmp_path):
    """A copy of the two runs: its folder, and that of each."""
    runs = tmp_path / "runs"
    shutil.rmtree(runs, ignore_errors=True)
    shutil.copytree(two_runs, runs)
    return runs, *sorted(runs.glob("*/resnet50*"))


ONE_DATABASE = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@ONE_DATABASE
@given(st.sampled_from(["run.json", "record.json"]), st.data(), JSON)
def test_any_value_in_any_field_is_a_fault_of_this_run_alone(
    two_runs, tmp_path, file, data, value
):
    runs, run, other = copied(two_runs, tmp_path)
    values = read_json(run / file)
    field = data.draw(st.sampled_from(sorted(values)))
    known = values[field]
    if config.json_digest(known) == config.json_digest(value):
        return
    if type(known) is float and type(value) is int and known == value:
        return  # JSON has one kind of number: 0 is 0.0, but False is neither
    if type(known) is type(value) is float and math.isclose(
        known, value, abs_tol=1e-12
    ):
        return  # as another machine's sums are
    is_record = file == "record.json" and field != "record_sha256"
    (forge if is_record else edit)(run / file, **{field: value})
    faults = records.check(runs)
    assert faults and all(run.name in fault and "\n" not in fault for fault in faults)
    assert not any(other.name in fault for fault in faults)
    said = " ".join(faults)
    assert field in said or "not JSON" in said or file in said


IN_LINES = "t w v event t_mono_ns t_wall_ns rank status epoch phase gap_us length_us header host"
LINE = JSON | st.dictionaries(st.sampled_from(IN_LINES.split()), JSON)


@ONE_DATABASE
@given(st.sampled_from(["events-rank1", "samples-host", "phases-rank0"]), LINE)
def test_any_further_line_of_a_raw_file_leaves_a_record_or_one_line(
    two_runs, tmp_path, file, value
):
    _, run, other = copied(two_runs, tmp_path)
    shutil.rmtree(other)
    shutil.rmtree(run / "perun")  # a process reads it
    built(run)
    with open(run / f"{file}.jsonl", "a") as raw:
        raw.write(json.dumps(value) + "\n")
    faults = records.check(run)
    assert len(faults) == 2 and f"{file}.jsonl: differs" in faults[0]
    (run / "record.json").unlink()
    (line,) = records.recover(run)
    assert line.startswith(f"{run.name}: ") and "\n" not in line
    if "recovered as" in line:
        assert records.check(run) == []


def test_a_tampered_record_a_trace_or_a_missing_file_is_one_line_each(
    two_runs, tmp_path
):
    runs, run, _ = copied(two_runs, tmp_path)
    text = (run / "record.json").read_text()
    (run / "record.json").write_text(text.replace('"ended_at": "2', '"ended_at": "1'))
    (fault,) = records.check(runs)
    assert "record.json was changed" in fault
    (run / "record.json").write_text(text)
    trace = run / "samples-host.jsonl"
    trace.write_text(
        trace.read_text().replace('"v": [1120000000]', '"v": [1120000009]')
    )
    (run / "events-rank1.jsonl").rename(run / "stray.jsonl")
    faults = " ".join(records.check(runs))
    for name in ("samples-host", "events-rank1", "stray"):
        assert faults.count(f"{name}.jsonl: differs") == 1, faults
    assert "not derived again" in faults


def test_a_changed_published_value_is_a_fault(tmp_path):
    folder = tmp_path / "published"
    shutil.copytree(REPOSITORY / "runs" / "published", folder)
    assert records.check(tmp_path) == []
    values = (folder / "values.csv").read_text()
    (folder / "values.csv").write_text(values.replace("10.25", "99.25", 1))
    (folder / "series.toml").unlink()
    faults = " ".join(records.check(tmp_path))
    for name in ("values.csv", "series.toml"):
        assert faults.count(f"{name}: differs from SHA256SUMS") == 1, faults
    (folder / "SHA256SUMS").write_text("no checksum\n")
    (fault,) = records.check(tmp_path)
    assert "SHA256SUMS is damaged" in fault and "\n" not in fault


def test_a_run_behind_a_link_is_read(run_dir, tmp_path):
    built(run_dir)
    (tmp_path / "seen").mkdir()
    (tmp_path / "seen" / "anna").symlink_to(run_dir.parent)
    assert len(records.read_all(tmp_path / "seen")) == 1


def test_what_another_machines_sums_round_to_is_no_fault(run_dir):
    phases = built(run_dir).energy_phases
    rest = phases[-1]
    assert rest["phase"] == "unattributed" and rest["energy_cpu_J"] == 0.0
    path = run_dir / "record.json"
    forge(path, energy_phases=[*phases[:-1], rest | {"energy_cpu_J": 5.7e-14}])
    assert records.check(run_dir) == []
    forge(path, energy_phases=[*phases[:-1], rest | {"energy_cpu_J": 1e-10}])
    (fault,) = records.check(run_dir)
    assert "energy_phases" in fault


@pytest.mark.parametrize("has_record", [True, False])
def test_a_damaged_file_of_perun_holds_nobody_up(run_dir, monkeypatch, has_record):
    """HDF5 goes round in it for ever; neither a record nor a checksum says that anybody read it."""
    monkeypatch.setattr(processes, "READ_TIMEOUT_S", 4)
    if has_record:
        built(run_dir)
    damaged(run_dir / "perun" / "damaged.hdf5")
    if has_record:
        fault, _ = records.check(run_dir)
        assert "perun/damaged.hdf5: differs" in fault
    else:
        assert "Traceback" not in answer("check", run_dir, "--recover")
        record = records.read_record(run_dir)
        assert "perun/damaged.hdf5: cannot be read" in " ".join(record.flags)
        assert record.energy_perun_total_J > 0, "the other file is whole"


def test_a_dead_run_is_a_fault_until_it_is_recovered(run_dir):
    runs = run_dir.parent.parent
    for rank in range(2):
        events = run_dir / f"events-rank{rank}.jsonl"
        rewrite(events, lambda line: "_end" not in line["event"])
    samples = run_dir / "samples-host.jsonl"
    samples.write_text(samples.read_text()[:-20])
    for name in (records.START_LOCK, "run.json"):  # its launcher is alive
        with files.lock(run_dir / name):
            assert records.check(runs) == [] == records.recover(runs)
    with files.lock(run_dir / "run.json"):
        assert "is running" in records.recover_record(run_dir)
    assert not (run_dir / "record.json").exists()
    assert "no record.json" in answer("check", runs, status=1)
    answer("check --recover", runs)
    record = records.read_record_if_any(run_dir)
    assert record.status == "killed" and record.energy_cpu_J > 2400
    assert "1 of 1 epochs done" in record.status_reason and not record.valid


def test_what_lies_in_a_hidden_folder_is_no_raw_file(run_dir):
    hidden = run_dir / ".ipynb_checkpoints" / "notebook-checkpoint.ipynb"
    hidden.parent.mkdir()
    hidden.write_text("{}")
    built(run_dir)
    hidden.write_text("[]")
    assert records.check(run_dir) == []


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "record.json"
    files.write_json(path, {"a": 1})
    with pytest.raises(ValueError):
        files.write_json(path, {"a": float("nan")})
    assert json.loads(path.read_text()) == {"a": 1} and [*tmp_path.iterdir()] == [path]


def test_each_committed_record_is_whole_and_finds_its_run_in_its_study():
    """Its system is called as its study. A run that was renamed says what it was called."""
    assert records.check(REPOSITORY / "runs" / "large-batch") == []
    folders = [path.parent for path in REPOSITORY.glob("runs/*/*/record.json")]
    committed = [each for each in folders if each.parent.name in studies.STUDIES]
    assert len(committed) >= 24
    was = set()
    for folder in committed:
        record = records.read_record(folder)
        made = config.config_from_dict(record.config)
        assert config.asdict(made) == record.config, "every parameter stands there"
        assert made in studies.find_studies([folder.parent.name])[folder.parent.name]
        assert folder.name == record.run_id == config.run_id(made)
        was |= {record.run_id, record.was["run_id"]}
    assert len(was) == 2 * len(committed)


def test_the_committed_runs_of_a_gpu_are_its_study_and_its_minutes_and_measured():
    folder = REPOSITORY / "runs" / "gpu-h200"
    assert records.check(folder) == []
    found = records.read_all(folder)
    assert all(record.valid for record in found)
    assert {record.energy_gpu_provenance for record in found} == {"measured"}
    kinds = Counter(record.config.get("kind", "") for record in found)
    minutes = dict(idle=1, simulated_collective=1, starved=1, work=3)
    assert kinds == minutes | {"": len(studies.gpu())}
    for run in studies.gpu(folder.name):
        assert records.has_valid_record(config.folder(run, folder.parent)), run


def test_the_table_of_the_fields_says_what_the_record_has():
    lines = ["| field | unit | meaning |", "|---|---|---|"]
    fields = REPOSITORY / "energynn" / "record_fields.toml"
    for name, facts in tomllib.loads(fields.read_text()).items():
        lines.append(f"| `{name}` | {facts.get('unit', '')} | {facts['meaning']} |")
    table = text_of("runs/README.md").splitlines()
    begin = table.index(lines[0])
    assert table[begin : begin + len(lines)] == lines


def test_each_field_of_the_record_has_a_meaning():
    fields = tomllib.loads(text_of("energynn/record_fields.toml"))
    names = set()
    for name in fields:
        names |= {name.replace("*", part) for part in ("gpu", "cpu", "ram", "total")}
    unknown = {f"idle_power_total_{when}_W" for when in account.IDLE_WINDOWS}
    assert names - unknown == set(records.Record.__struct_fields__)
