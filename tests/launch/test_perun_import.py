"""perun files of each layout, with closed-form power: what they import to, beside what perun
wrote.
"""

import hashlib
import json
import shutil
from unittest.mock import Mock
from urllib.parse import unquote

import h5py
import numpy as np
import pytest

from energynn import records
from energynn.host import files
from energynn.launch import perun_import
from energynn.measure import perun_adapter
from energynn.measure.samples import read_pieces
from tests.perun_files import (
    PACKAGE,
    RANGE_UJ,
    STARTED,
    counter_uJ,
    layout_0_8,
    write_run,
)
from tests.processes import answer, refused

HOREKA = files.REPOSITORY.parent / "shared" / "data" / "perun_horeka_0.8.hdf5"

CPU = layout_0_8()[:1]


def layout_1_0():
    """perun 0.9.1 and 1.0: the power made of a counter, its first value repeated, and the raw
    counter beside it.
    """
    watts = np.r_[np.full(11, 300.0), np.full(10, 50.0)].astype("float32")
    counter = (10**9 + np.r_[0, np.cumsum(watts[1:])] * 1e6).astype("uint64")
    rocm = "ROCM:00ff74a0-0000-1000_POWER"
    return [
        ("cpu", "cpu_0_package-0", "W", 1.0, watts, counter),
        ("gpu", rocm, "W", 1.0, np.full(21, 400, "uint32")),
        ("other", "estimate", "W", 1.0, np.full(21, 99, "float32")),
    ]


@pytest.fixture
def written(tmp_path):
    """Write the file of a run; by default perun 0.8 did."""

    def write(sensors=None, **more):
        return write_run(tmp_path / "perun.hdf5", sensors or layout_0_8(), **more)

    return write


def imported(path):
    """The records of a file's runs, the folder of the first, and its samples."""
    folders, _ = perun_import.import_perun_file(path, path.parent / "runs")
    assert records.check(path.parent / "runs") == []
    found = [records.read_record_if_any(folder) for folder in folders]
    return (
        found,
        folders[0],
        [next(read_pieces(one)) for one in sorted(folders[0].rglob("samples-*"))],
    )


def energies(record):
    return [sensor.energy_J for sensor in record.sensors]


def test_counters_of_0_8_are_differenced_over_their_wrap_around(written):
    path = written()
    (record,), folder, (samples,) = imported(path)
    assert energies(record) == pytest.approx([2000, 5000, 400])
    of_perun = {
        "energy_perun_gpu_J": 100,
        "energy_perun_ram_J": 7,
        "perun_time_s": 20.5,
    }
    of_perun["energy_perun_total_J"] = 107
    assert of_perun == {name: getattr(record, name) for name in of_perun}
    assert record.device_hours_perun == pytest.approx(20.5 / 3600)
    assert record.energy_perun_cpu_J is None
    assert samples.header.period_s == 1.0
    assert samples.t_ns[:2].tolist() == [0, 10**9]
    cpu, gpu, ram = samples.header.sensors
    assert (cpu.kind, cpu.wraps_at, cpu.to_SI) == ("energy", RANGE_UJ, 1e-6)
    assert (gpu.kind, gpu.wraps_at, gpu.to_SI) == ("power", None, 1e-3)
    assert {sensor.provenance for sensor in (cpu, ram, gpu)} == {"measured"}
    raw = json.loads((folder / "samples-a.jsonl").read_text().splitlines()[1])["v"][0]
    assert raw == RANGE_UJ - 500_000_000, "raw readings, to the last digit"


def test_the_run_folder_names_its_source(written):
    path = written(run=STARTED)
    (record,), folder, _ = imported(path)
    assert folder.name.startswith("app-2026-01-02T03-04-05.500000-")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    config = {
        "source": "perun.hdf5",
        "source_sha256": digest,
        "application": "app",
        "run": STARTED,
    }
    assert record.config == config and record.started_at == STARTED
    begun_ns = (folder / "record.json").stat().st_mtime_ns
    assert imported(path)[1] == folder, "a second import changes nothing"
    assert (folder / "record.json").stat().st_mtime_ns == begun_ns
    both, first, _ = imported(written(layout_1_0(), run="later"))  # perun appends
    assert len(both) == 2 and first == folder


def test_counters_of_1_0_are_not_integrated_again(written):
    """A step from 300 to 50 W after 10 of 20 s: perun would give 3625 J, it counted 3500 J."""
    (record,), _, (samples,) = imported(written(layout_1_0()))
    assert record.energy_cpu_J == pytest.approx(3500)
    assert record.energy_gpu_J == pytest.approx(8000)
    assert record.energy_total_J == pytest.approx(11500), (
        "what perun does not sum we do not"
    )


def test_a_host_that_was_not_read_makes_a_run_not_valid(written):
    path = written(hosts=("a", "b"))
    with h5py.File(path, "a") as file:
        sensors = file["app/nodes/run/nodes/0/nodes/b/nodes"]
        for name in ("cpu/nodes/cpu_0_package-0", "ram/nodes/ram_0_dram"):
            del sensors[name]
        del sensors["gpu/nodes/CUDA:0_POWER"]
    (record,), *_ = imported(path)
    assert "no samples of b" in str(record.invalid_reasons) and record.nodes == 2


@pytest.mark.parametrize("hosts", [("a", "b.cluster"), ("a b", "a-b"), (".a", "a")])
def test_two_hosts_have_a_file_each_and_rounds_are_segments(written, hosts):
    """The time between two rounds does not count. Odd names are two, too."""
    path = written(hosts=hosts, rounds=2)
    (record,), folder, samples = imported(path)
    assert sorted(unquote(one.header.host) for one in samples) == sorted(2 * hosts)
    assert len(list(folder.glob("segment-2/samples-*.jsonl"))) == 2
    assert record.energy_total_J == pytest.approx(2 * 2 * 7400)
    assert (record.nodes, record.sockets, record.devices) == (2, 2, 2)
    assert "overlap" not in str(record.invalid_reasons)
    assert record.training_time_s == 40


def test_sensors_of_one_host_have_the_same_times(written):
    path = written()
    with h5py.File(path, "a") as file:
        file[f"{PACKAGE}/timesteps"][:] *= 2
    refused("the times of a are not", imported, path)


def test_what_is_imported_is_told_nothing_that_would_not_help(written, tmp_path):
    counter = np.full(21, 7, "uint64")  # of DRAM that is not counted
    dead = ("ram", "dram_0", *CPU[0][2:4], counter)
    (record,), _, _ = imported(written([*CPU, dead]))
    assert record.doubts and records.remarks_on_record(record, tmp_path) == []


def test_two_runs_are_two_folders_and_each_can_be_read_by_name(tmp_path):
    path = tmp_path / "perun.hdf5"
    write_run(path, CPU, run="new", execution_dt="2026-05-01T00:00:00+02:00")
    write_run(path, layout_0_8(), run="old")
    assert [run.energy_total_J for run in imported(path)[0]] == pytest.approx(
        [2000, 7400]
    )
    with h5py.File(path, "a") as file:
        file["app/nodes/old/metrics/ENERGY"].attrs["sum"] = 1.0
    assert perun_adapter.read_perun_results(path, "new")["energy_perun_total_J"] == 107
    assert perun_adapter.read_perun_results(path, "old")["energy_perun_total_J"] == 1
    refused(
        "perun.hdf5: has 0 runs none", perun_adapter.read_perun_results, path, "none"
    )
    refused("perun.hdf5: has 2 runs", perun_adapter.read_perun_results, path)


def test_a_failed_read_is_a_gap_and_no_zero(written):
    """And a counter of 64 bits never wraps."""
    counter = counter_uJ(100, start=10**9)
    counter[7] = 0
    watts = np.full(21, 120.0, "float32")
    watts[[4, 5, 9, 12]] = 0, 0, np.nan, -1
    cpu = (*CPU[0][:4], counter)
    gpu = ("gpu", "CUDA:3_POWER", "W", 1.0, watts)
    path = written([cpu, gpu], execution_dt=None)
    with h5py.File(path, "a") as file:
        file[PACKAGE]["values"].attrs["valid_max"] = np.uint64(2**64 - 1)
    (record,), _, (samples,) = imported(path)
    assert np.isnan(samples.readings).sum(axis=0).tolist() == [1, 4]
    assert energies(record) == pytest.approx([2000, 2400])
    assert samples.header.sensors[0].wraps_at is None


@pytest.mark.skipif(
    not HOREKA.exists(), reason="the study's file does not lie beside this checkout"
)
def test_the_studys_own_file(tmp_path):
    (folder,), _ = perun_import.import_perun_file(HOREKA, tmp_path)
    record = records.read_record_if_any(folder)
    assert record.energy_perun_total_J == pytest.approx(407_972, abs=1)
    assert record.energy_perun_gpu_J == pytest.approx(122_854.64)
    assert record.perun_time_s == pytest.approx(894.153, abs=1e-3)
    assert (
        record.energy_total_J == pytest.approx(407_972.27, abs=1)
        and record.devices == 2
    )


def test_whole_runs_are_imported_and_others_named(tmp_path):
    """One was cut off, one has a single sample; another application has a run of the same name."""
    path = tmp_path / "perun.hdf5"
    for run, watts in (("one", 100), ("two", 90), ("cut", 80)):
        write_run(path, [(*CPU[0][:4], counter_uJ(watts))], run=run)
    write_run(path, [(*CPU[0][:4], counter_uJ(70)[:1])], run="single")
    with h5py.File(path, "a") as file:
        del file["app/nodes/cut/metrics"]
        file.move("app/nodes/two", "other/nodes/one")
    said = answer(f"import-perun {path} --runs-dir {tmp_path}/runs", status=1)
    for name in ("app/cut: ", "app/single: the times of a are not"):
        assert f"not imported: {path}: run {name}" in said
    found = records.read_all(tmp_path / "runs")
    energies_J = {record.config["application"]: record.energy_cpu_J for record in found}
    assert energies_J == pytest.approx({"app": 2000, "other": 1800})
    assert not any(
        "cannot be read" in flag for record in found for flag in record.flags
    )
    assert records.check(tmp_path / "runs") == []


def test_a_file_in_use_is_tried_again(written):
    path = written()
    with files.lock(path):
        refused("in use .* try again", imported, path)
    assert len(imported(path)[0]) == 1


def test_an_import_that_is_cut_off_leaves_no_folder(written, tmp_path, monkeypatch):
    path = written()
    with h5py.File(path, "a") as file:
        file.move("app", ".train")  # a hidden folder would be a run for no command
    with monkeypatch.context() as full, pytest.raises(OSError):
        full.setattr(
            shutil,
            "copyfile",
            Mock(side_effect=OSError("No space left")),
        )
        perun_import.import_perun_file(path, tmp_path / "runs")
    assert list((tmp_path / "runs" / "imported").iterdir()) == []
    assert not imported(path)[1].name.startswith(".")
