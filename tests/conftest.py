"""A finished run on disk, written by hand: every number in it is known."""

import os
import signal

import msgspec
import numpy as np
import pytest
from xdist.scheduler import LoadScopeScheduling

from energynn import records
from energynn.experiment import config
from energynn.host import files, launchers
from energynn.host.reading import read_json
from tests import perun_files
from tests.measure.worlds import sensor
from tests.run_files import edit, nanoseconds, write_lines, write_marks, write_samples

POWER_W = 120.0
TRAINING_S = 20.0


# Of these files all tests go to one process of pytest: they share a cluster, a network, a wheel.
TOGETHER = (
    "tests/launch/test_slurm.py",
    "tests/test_wheel.py",
)
# What takes longest begins first, so that no process works long after the others have ended.
FIRST = (
    "tests/launch/test_slurm.py",
    "tests/launch/test_guides.py",
    "tests/launch/test_status.py",
    "tests/launch/test_launch.py",
    "tests/analysis/test_notebooks.py",
    "tests/train/test_resnet50.py",
    "tests/train/test_traces.py",
    "tests/analysis/test_report.py",
)


def pytest_configure():
    """The tests press Ctrl-C and hang up, which what a shell starts in the background, or under
    nohup, would ignore.

    And several processes of tests make measured runs on one host, one at a time each.
    """
    os.environ["ENERGYNN_HOST_LOCK"] = f"test-{os.getpid()}"
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    for number, handler in usual.items():
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


def pytest_collection_modifyitems(items):
    rank = {path: place for place, path in enumerate(FIRST)}
    items.sort(key=lambda item: rank.get(item.nodeid.split("::")[0], len(FIRST)))


class OneByOne(LoadScopeScheduling):
    """xdist's own marks for groups do nothing with pytest 9."""

    def _split_scope(self, nodeid):
        path = nodeid.split("::")[0]
        return path if path in TOGETHER else nodeid


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    return OneByOne(config, log) if config.getvalue("dist") == "loadgroup" else None


@pytest.fixture
def signals():
    """What a test does to the handling of signals ends with it."""
    numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
    numbers += [signal.SIGUSR1, signal.SIGUSR2]
    kept = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


def variables(text):
    return dict(word.split("=", 1) for word in text.split())


@pytest.fixture
def around(monkeypatch):
    """Set the variables of a text, and no other launcher's."""
    for name in list(os.environ):
        if launchers.RANK_VARIABLE_PATTERN.fullmatch(name) or name.startswith("SLURM_"):
            monkeypatch.delenv(name)

    def put(text):
        for name, value in variables(text).items():
            monkeypatch.setenv(name, value)

    return put


def minimal_record(**fields) -> dict:
    """A record with every field that each must have, empty but for those given."""
    told = {"schema": records.RECORD_SCHEMA_VERSION, "status": "finished"}
    told["ended_at"] = "2026-01-01T00:00:00Z"
    for field in msgspec.structs.fields(records.Record):
        if field.required and field.name not in told:
            told[field.name] = field.type()
    record = records.Record(**told)
    return msgspec.to_builtins(record) | fields


def record_of(**fields) -> records.Record:
    return msgspec.convert(minimal_record(**fields), records.Record)


def write_perun_hdf5(path, watts, seconds):
    """Write what perun leaves of a CPU of constant power."""
    joules = watts * seconds
    results = {"ENERGY": joules, "CPU_ENERGY": joules, "RUNTIME": seconds}
    cpu = ("cpu", "cpu_0", "W", 1.0, np.full(81, watts, dtype="float32"))
    times_s = np.linspace(0, seconds, 81, dtype="float32")
    perun_files.write_run(path, [cpu], results=results, seconds=times_s)


@pytest.fixture
def run_dir(tmp_path):
    """A valid run of resnet50 on two devices; the caller breaks it and calls records.build."""
    return write_run_dir(tmp_path / "runs")


def built(run_dir):
    """Build the record of a run that has finished."""
    return records.save_record(run_dir, "finished", "")


def forge(path, **fields):
    """Change a record and make its own digest right again, as somebody who knows how would."""
    record = read_json(path) | fields
    del record["record_sha256"]
    edit(path, **record, record_sha256=config.json_digest(record))


def write_runs(runs_dir, *systems):
    """Valid runs of these systems, with their records."""
    folders = [write_run_dir(runs_dir, system) for system in systems]
    for folder in folders:
        assert built(folder).valid
    return folders


def write_run_dir(runs_dir, system="local"):
    """The raw files of such a run, in a system's folder: a microsecond longer on each but local."""
    training_s = TRAINING_S + 1e-6 * (system != "local")
    made = config.make("resnet50", devices=2, local_batch_size=16, system=system)
    folder = runs_dir / system / config.run_id(made)
    folder.mkdir(parents=True)
    values = config.asdict(made)
    files.write_json(
        folder / "run.json",
        {
            "run_id": folder.name,
            "workload": "resnet50",
            "system": system,
            "started_at": "2026-01-01T00:00:00Z",
            "config": values,
            "config_digest": config.json_digest(values),
            "data_digest": config.manifest_digest("photographs"),
            "device_kind": "cpu core",
            "device_name": "a core",
            "devices": 2,
            "versions": {},
            "git_commit": "",
            "git_dirty": False,
            "machine": {"sockets": 1},
            "cpu_model": {},
        },
    )
    counter = {"to_SI": 1e-6, "wraps_at": 262143328850.0, "provenance": "simulated"}
    t_s = np.arange(-10, 10 * (TRAINING_S + 1)) / 10 + 1e-6 * (system != "local")
    readings = (10**9 + POWER_W * 1e6 * (1 + t_s).round(1)).astype(int)
    columns = [(sensor("cpu_0", "energy", "cpu", **counter), readings)]
    write_samples(folder, t_s, columns, host="host", period_s=0.1)
    counts = dict(samples_trained=320, samples_evaluated=50, optimizer_steps=10)
    epoch = dict(epoch=1, epochs=1, training_loss=2.0, **counts)
    at_end = dict(forward_backward_passes=10, metrics={"top1_error": 0.25}, **counts)
    for rank in range(2):
        marks = [
            ("rank_start", -0.5, dict(world_size=2, pid=1, device="cpu")),
            ("training_start", 0.0, dict(dataset_samples=1000)),
            ("epoch", TRAINING_S - 0.1, epoch),
            ("training_end", training_s, at_end),
            ("rank_end", TRAINING_S + 0.5, dict(status="finished")),
        ]
        if rank:
            del marks[2]
        write_marks(folder, marks, rank, "host")
        phases = {
            "t": nanoseconds(0),
            "phase": [0, 1],
            "gap_us": [0, 500_000],
            "length_us": [8_000_000 + rank, 10_000_000],
        }
        names = {"names": ["forward", "backward"]}
        write_lines(folder / f"phases-rank{rank}.jsonl", [names, phases])
    write_perun_hdf5(folder / "perun" / "energynn.hdf5", POWER_W, TRAINING_S + 1)
    return folder
