"""What `energynn doctor` says of devices on the PCI bus: only what could train is missed."""

import pytest

from energynn.launch import doctor
from energynn.measure import machine, sensors
from tests.measure.test_doctor import MPI, of
from tests.measure.test_sensors import no_gpu, pci  # noqa: F401

EPYC, RYZEN = (
    "AMD EPYC 9354 32-Core Processor",
    "AMD Ryzen 7 5700G with Radeon Graphics",
)
XEON = "Intel(R) Xeon(R) Platinum 8368 CPU @ 2.40GHz"
GOOD = {
    "a headless node with an ASPEED": (EPYC, "0000:03:00.0", "0x1a03", "0x030000"),
    "a headless node with a Matrox": (XEON, "0000:03:00.0", "0x102b", "0x030000"),
    "a laptop with Intel's graphics": (XEON, "0000:00:02.0", "0x8086", "0x030000"),
    "Intel's graphics, no display": (XEON, "0000:00:02.0", "0x8086", "0x038000"),
    "a VM with virtio graphics": (EPYC, "0000:00:01.0", "0x1af4", "0x038000"),
    "a VM of QEMU": (EPYC, "0000:00:01.0", "0x1234", "0x030000"),
    "a VM of VMware": (XEON, "0000:00:0f.0", "0x15ad", "0x030000"),
    "an APU desktop": (RYZEN, "0000:05:00.0", "0x1002", "0x030000"),
    "NVIDIA's sound": (XEON, "0000:01:00.1", "0x10de", "0x040300"),
    "an NVSwitch": (XEON, "0000:05:00.0", "0x10de", "0x068000"),
}
UNREAD = {
    "NVIDIA without a driver": (XEON, "0000:03:00.0", "0x10de", "0x030200"),
    "an AMD card": (XEON, "0000:03:00.0", "0x1002", "0x030000"),
    "an AMD Instinct": (EPYC, "0000:c1:00.0", "0x1002", "0x120000"),
    "an Intel card": (XEON, "0000:03:00.0", "0x8086", "0x038000"),
    "a Gaudi": (XEON, "0000:33:00.0", "0x1da3", "0x120000"),
}


@pytest.mark.parametrize("name", [*GOOD, *UNREAD])
def test_a_device_on_the_bus_is_missed_only_if_it_could_train(
    tmp_path, monkeypatch, name
):
    cpu, address, *vendor_and_class = (GOOD | UNREAD)[name]
    pci(tmp_path, address, *vendor_and_class)
    (tmp_path / "cpuinfo").write_text(f"model name\t: {cpu}\n")
    monkeypatch.setattr(machine, "CPU_INFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(doctor, "_mpi_finding", lambda devices: MPI)
    monkeypatch.setattr(doctor, "LOOK_S", 0.3)
    monkeypatch.setattr(sensors, "WATCH_S", 0.1)
    findings = doctor.examine()
    said = of(findings, "sensor")
    if name in GOOD:
        states = [each.state for each in findings if each.subject == "GPU"]
        assert said == "" and states == [doctor.GOOD]
    else:
        assert "no record would be valid" in said and address in said
