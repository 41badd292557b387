"""Machines that people have are believed, and the same machines with a device that lies are not."""

import pytest

from energynn.launch import doctor
from energynn.measure import energy, kernel, machine
from tests.launch.test_doctor import of, quick  # noqa: F401
from tests.measure.healthy_machines import (
    BUSES,
    DEFENDED,
    LIARS,
    MACHINES,
    judge,
)
from tests.measure.test_sensors import no_gpu, pci  # noqa: F401
from tests.measure.worlds import is_right

# One of each kind in `make test`, all in `make test-all`.
FIRST = {one["kind"]: name for name, one in reversed(MACHINES.items())}.values()
FIRST = {*FIRST, *(name for name, bus in BUSES.items() if "is_first" in bus)}


def each_of(names):
    """Mark as slow all but the first of each kind."""
    marks = {False: pytest.mark.slow, True: []}
    return [pytest.param(name, marks=marks[name in FIRST]) for name in names]


@pytest.mark.parametrize("name", each_of(MACHINES))
def test_what_is_healthy_is_valid_and_right(tmp_path, name):
    found, true_J = judge(tmp_path, MACHINES[name])
    assert found["doubts"] == []
    assert is_right(found, true_J), (found, true_J)


@pytest.mark.parametrize("name", DEFENDED)
def test_what_looks_like_a_liar_is_valid_with_the_thresholds_that_are_told(
    tmp_path, name
):
    path, defended = tmp_path / "system.toml", DEFENDED[name]
    found, _ = judge(tmp_path, defended)
    (said,) = machine.system_file_remedy(found["doubts"], path)
    told = [name for name in energy.THRESHOLDS if name in said.split("[")[0]]
    lines = [f"{name} = {defended['thresholds'][name]}" for name in told]
    path.write_text("\n".join(["[thresholds]", *lines]))
    assert ("left_out" in said) == ("left_out" in defended)
    assert defended.get("left_out", "") in said
    found, true_J = judge(
        tmp_path, defended, thresholds=machine.load_system(path)["thresholds"]
    )
    assert found["doubts"] == [] and is_right(found, true_J)


@pytest.mark.parametrize("liar", LIARS, ids=lambda liar: " ".join(liar.values()))
def test_a_device_that_lies_is_doubted(tmp_path, liar):
    found, _ = judge(tmp_path, MACHINES[liar["machine"]], liar["device"], liar["fault"])
    assert found["doubts"]


@pytest.mark.parametrize("name", each_of(BUSES))
def test_a_device_on_the_bus_is_missed_only_if_it_could_train(
    tmp_path, monkeypatch, name
):
    bus = BUSES[name]
    for device in bus["devices"]:
        pci(tmp_path, *device)
    (tmp_path / "cpuinfo").write_text(f"model name\t: {bus['cpu']}\n")
    monkeypatch.setattr(kernel, "CPU_INFO_FILE", tmp_path / "cpuinfo")
    findings = doctor.examine_machine()
    said = of(findings, "sensor")
    addresses = [address for address, _, _ in bus["devices"]]
    assert [address for address in addresses if address in said] == bus["missed"]
    assert ("no record would be valid" in said) == bool(bus["missed"])
    if not bus["missed"]:
        states = [each.state for each in findings if each.subject == "GPU"]
        assert said == "" and states == [doctor.GOOD]
