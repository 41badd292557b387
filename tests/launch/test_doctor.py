"""What `energynn doctor` says of machines with good, weak and no sensors."""

import threading

import pytest

from energynn.experiment import config
from energynn.launch import doctor, start
from energynn.measure import machine, sensors
from tests.measure.test_sensors import no_gpu, nvml, powercap_tree  # noqa: F401
from tests.processes import refused, told

MPI = doctor.Finding("MPI", doctor.GOOD, "taken as given")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(doctor, "_examine_mpi", lambda: MPI)
    monkeypatch.setattr(doctor, "SAMPLING_TIME_S", 0.3)


def of(findings, subject):
    own = [finding for finding in findings if finding.subject == subject]
    return " ".join(f"{finding.found} {finding.remedy}" for finding in own)


def test_a_machine_without_sensors_is_weak_and_says_why():
    found = told("doctor", status=1)["findings"]
    findings = [doctor.Finding(**finding) for finding in found]
    assert "estimated from busy time" in of(findings, "CPU")
    assert "one CPU core" in of(findings, "GPU")
    assert all(len(line) < 80 for line in doctor.findings_text(findings).splitlines())


def test_dead_counters_are_named(tmp_path):
    powercap_tree(tmp_path / "powercap")
    found = of(doctor.examine_machine(), "sensor")
    assert "cpu_0_package-0 does not move" in found


def test_gpus_and_their_power(nvml, monkeypatch):  # noqa: F811
    nvml.nvmlSystemGetDriverVersion = lambda: "580.1"
    nvml.nvmlDeviceGetEnforcedPowerLimit = lambda gpu: 400_000
    nvml.nvmlDeviceGetName = lambda gpu: "NVIDIA A100" if gpu == 0 else "NVIDIA H100"
    nvml.nvmlDeviceGetMigMode = lambda gpu: [gpu, 0]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    findings = doctor.examine_machine()
    found = of(findings, "GPU")
    assert "gpu_0_energy: energy, measured, counts" in found
    assert (
        "gpu_0_power: power, measured, cross-check" in found
        and "instantaneous, seen" in found
    )
    assert "gpu_1_power" in found and "average over 1 s" in found
    assert "power limit 400.0 W" in found
    # a whole one is beside it
    assert "GPU 1 is split into parts" in found and doctor.exit_status(findings) == 1


def test_a_run_on_a_gpu_that_is_split_is_refused(nvml, monkeypatch, tmp_path):  # noqa: F811
    nvml.nvmlDeviceGetMigMode = lambda gpu: [gpu, 0]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for device, devices in (("cpu", 1), ("gpu", 1)):
        made = config.make("fourcastnet", device=device, devices=devices)
        start.prepare_intent(made, tmp_path / "local" / "run")
    made = config.make("fourcastnet", device="gpu", devices=2)
    refused(
        "^device: GPU 1 is split .*nvidia-smi -i 1 -mig 0",
        start.prepare_intent,
        made,
        tmp_path / "local" / "run",
    )
    assert len(machine.list_gpus()) == 2


def test_a_driver_that_never_answers_stops_no_doctor(nvml, monkeypatch):  # noqa: F811
    never = threading.Event()
    nvml.nvmlDeviceGetPowerUsage = lambda gpu: never.wait()
    monkeypatch.setattr(sensors.Sampler, "START_PATIENCE_S", 0.5)
    findings = doctor.examine_machine()
    assert doctor.exit_status(findings) == 2
    assert "gpu_0_power does not answer" in of(findings, "sensor")
    never.set()


def test_perun_has_the_version_that_was_tried(monkeypatch):
    for version, state in (("0.8", doctor.BAD), (doctor.PERUN_VERSION, doctor.GOOD)):
        monkeypatch.setattr(
            doctor.importlib.metadata, "version", lambda _, v=version: v
        )
        perun = doctor._examine_package("perun", doctor.PERUN_VERSION)
        assert perun.state == state and bool(perun.remedy) == (state == doctor.BAD)
