"""Machines that people have are believed, and the same machines with a device that lies are not."""

import pytest

from energynn.measure import energy, machine
from tests.measure.healthy_machines import DEFENDED, LIARS, MACHINES, is_right, judge

# One of each kind in `make test`, all in `make test-all`.
FIRST = {machine["kind"]: name for name, machine in reversed(MACHINES.items())}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in FIRST.values() else pytest.mark.slow)
        for name in MACHINES
    ],
)
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
    (said,) = machine.remedy(found["doubts"], path)
    told = [name for name in energy.THRESHOLDS if f"{name}" in said.split("[")[0]]
    lines = [f"{name} = {defended['thresholds'][name]}" for name in told]
    path.write_text("\n".join(["[thresholds]", *lines]))
    assert ("left_out" in said) == ("left_out" in defended)
    assert defended.get("left_out", "") in said
    found, true_J = judge(
        tmp_path, defended, thresholds=machine.load(path)["thresholds"]
    )
    assert found["doubts"] == [] and is_right(found, true_J)


@pytest.mark.parametrize("liar", LIARS, ids=lambda liar: " ".join(liar.values()))
def test_a_device_that_lies_is_doubted(tmp_path, liar):
    found, _ = judge(tmp_path, MACHINES[liar["machine"]], liar["device"], liar["fault"])
    assert found["doubts"]
    assert {doubt[0] for doubt in found["doubts"]} <= set("DSMPGC")
