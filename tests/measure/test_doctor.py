import json
import sys
import threading
import time

import pytest

from energynn import cli, config, launchers
from energynn.launch import doctor, start
from energynn.measure import machine, perun_adapter, sensors
from tests.measure.test_sensors import fake_nvml, powercap_tree

MPI = doctor.Finding("MPI", doctor.GOOD, "taken as given")


def states(findings, subject):
    return [finding.state for finding in findings if finding.subject == subject]


def test_a_machine_without_sensors_is_weak_and_says_why(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "_mpi_finding", lambda devices: MPI)
    findings = doctor.examine(powercap=tmp_path / "nothing")
    assert states(findings, "CPU") == states(findings, "RAM") == [doctor.WEAK]
    assert doctor.exit_status(findings) == 1
    text = doctor.report(findings)
    assert "estimated from busy time" in text and "absent" in text


def test_counters_are_watched_and_simulated_ones_are_not_taken_for_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "_mpi_finding", lambda devices: MPI)
    monkeypatch.setattr(doctor, "LOOK_S", 0.05)
    monkeypatch.setattr(doctor, "LOAD_S", 0.1)
    findings = doctor.examine(powercap=powercap_tree(tmp_path))
    cpu, reserve = [finding for finding in findings if finding.subject == "CPU"]
    assert "simulated" in cpu.found and "did not change in 0.1 s" in cpu.found and cpu.state == doctor.WEAK
    assert "dead" in cpu.remedy and "estimated from busy time" in cpu.remedy and "in reserve" in reserve.found
    (ram,) = [finding for finding in findings if finding.subject == "RAM"]
    assert "dead" in ram.remedy and ram.state == doctor.WEAK


def test_a_counter_that_moves_late_is_watched_for_long_enough(monkeypatch):
    monkeypatch.setattr(doctor, "LOOK_S", 0.05)
    monkeypatch.setattr(doctor, "LOAD_S", 0.7)
    begun = time.monotonic()
    sensor = sensors.Sensor("cpu_0", "cpu", "0", "energy", "measured", lambda: int((time.monotonic() - begun) / 0.3))
    finding = doctor._look_at(sensor)
    assert finding.state == doctor.GOOD and not finding.remedy
    drips = sensors.Sensor("cpu_0", "cpu", "0", "energy", "measured", lambda: int((time.monotonic() - begun) / 1.4))
    finding = doctor._look_at(drips)
    assert finding.state == doctor.WEAK and "it is dead" in finding.remedy
    zero = sensors.Sensor("gpu_0_power", "gpu", "0", "power", "measured", lambda: 0)
    assert doctor._look_at(zero).state == doctor.WEAK and "stands at 0" in doctor._look_at(zero).found


def test_a_counter_that_may_not_be_read_comes_with_the_command_that_mends_it(tmp_path, monkeypatch):
    counter = powercap_tree(tmp_path) / "intel-rapl:0" / "energy_uj"
    counter.unlink()
    counter.mkdir()  # reading it fails, for root too
    monkeypatch.setattr(doctor, "LOAD_S", 0.02)
    findings = doctor._sensor_findings(tmp_path)
    (cpu,) = [finding for finding in findings if finding.subject == "CPU"]
    assert cpu.remedy.startswith("sudo chmod a+r") and "may not be read" in cpu.found


def test_gpus_their_power_semantics_and_other_processes(monkeypatch, tmp_path):
    nvml = fake_nvml()
    nvml.nvmlSystemGetDriverVersion = lambda: "580.1"
    nvml.nvmlDeviceGetPowerManagementLimit = lambda handle: 400_000
    nvml.nvmlDeviceGetName = lambda handle: "NVIDIA A100-SXM4-40GB" if handle == 0 else "NVIDIA H100"
    nvml.nvmlDeviceGetComputeRunningProcesses = lambda handle: [1, 2] if handle == 1 else []
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(doctor, "LOOK_S", 0.02)
    monkeypatch.setattr(doctor, "LOAD_S", 0.02)
    text = " ".join(doctor.report(doctor._sensor_findings(tmp_path) + doctor._gpu_findings()).split())
    assert "gpu_0_power: power, measured, cross-check" in text and ", instantaneous, seen" in text
    assert "gpu_1_power" in text and "average over 1 s" in text
    assert "2 processes use it" in text and "power limit 400 W" in text


@pytest.mark.parametrize(
    "modes, shown, words",
    [
        ((0, 0), None, ""),
        ((0, 1), "MIG-q1", ""),
        ((0, 1), "GPU-0", ""),
        ((1, 1), "MIG-q0,1", "GPU 1 is split into parts (MIG), of which CUDA would use one at most"),
        ((0, 1), "GPU-1", "GPU 1 is split into parts (MIG), of which CUDA would use one at most"),
        ((1, 0), None, "GPU 0 is split into parts (MIG), of which CUDA would use one at most"),
    ],
)
def test_a_gpu_that_is_split_is_no_device_as_a_whole(monkeypatch, tmp_path, modes, shown, words):
    """Doctor and run say it where no part is named; a run on the cores is none of its business."""
    nvml = fake_nvml()
    nvml.nvmlDeviceGetMigMode = lambda handle: [modes[handle], 0]  # now, and after a reset
    nvml.nvmlDeviceGetMaxMigDeviceCount = lambda handle: modes[handle]
    nvml.nvmlDeviceGetMigDeviceHandleByIndex = lambda handle, part: f"MIG-q{handle}"
    nvml.nvmlDeviceGetUUID = lambda handle: handle if isinstance(handle, str) else f"GPU-{handle}"
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if shown:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    bad = [finding for finding in doctor._gpu_findings() if finding.state == doctor.BAD]
    assert [finding.found for finding in bad] == ([words] if words else [])
    assert not bad or "`nvidia-smi -L`" in bad[0].remedy
    for device in ("cpu", "gpu"):
        devices = len(machine.gpus()) if device == "gpu" else 1
        made = config.make("fourcastnet", device=device, devices=devices)
        if words and device == "gpu":
            with pytest.raises(ValueError, match="^device: GPU . is split .* CUDA_VISIBLE_DEVICES to a part"):
                start.prepare(made, tmp_path / "local" / "run")
        else:
            start.prepare(made, tmp_path / "local" / "run")


def test_a_driver_that_never_answers_stops_no_doctor(monkeypatch, tmp_path):
    nvml, never = fake_nvml(), threading.Event()
    nvml.nvmlDeviceGetPowerUsage = lambda handle: never.wait()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(doctor, "PATIENCE_S", 0.3)
    monkeypatch.setattr(doctor, "_mpi_finding", lambda devices: MPI)
    findings = doctor.examine(powercap=tmp_path)
    assert doctor.exit_status(findings) == 2 and "no answer for" in doctor.report(findings)
    never.set()


@pytest.mark.slow
def test_a_real_mpi_world_is_tried_and_a_wrong_one_is_refused(monkeypatch, tmp_path):
    assert doctor._mpi_finding(2).state == doctor.GOOD
    monkeypatch.setattr(launchers, "mpi_start", lambda mpirun, flavour, ranks: [])  # as srun without --mpi=pmi2
    finding = doctor._mpi_finding(2)
    assert finding.state == doctor.BAD and "worlds of 1" in finding.found


def test_json_and_exit_status(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(
        doctor, "_mpi_finding", lambda devices: doctor.Finding("MPI", doctor.BAD, "none", "install one")
    )
    monkeypatch.setenv(perun_adapter.POWERCAP_VARIABLE, str(tmp_path))
    assert cli.main(["doctor", "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["exit_status"] == 2
