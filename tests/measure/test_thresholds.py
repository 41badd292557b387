"""What system.toml says of a machine: every command asks it, and each refusal tells how."""

import json
import os
import re
import sys

import pytest

from energynn.measure import energy, machine
from energynn.measure.sensors import Sensor, SensorInventory, drop_left_out_sensors
from tests import powercap
from tests.processes import ENERGYNN, ended, refused, with_gpus

WINDOW = """
import time, energynn
with energynn.window("w") as w:
    time.sleep(1.5)
print(w)
"""
COMMANDS = {
    "measure": [*ENERGYNN, "measure", "--period", "0.01", "--", "sleep", "1"],
    "window": [sys.executable, "-c", WINDOW],
    "doctor": [*ENERGYNN, "doctor"],
}
MENDED = {"least_cpu_W": 0.1}


@pytest.fixture
def small_board(tmp_path):
    """A CPU of 0.6 W whose DRAM always shows 0; returns what executes a command on it."""
    powercap.zone(tmp_path / "powercap" / "intel-rapl:0:0", "dram", range_uJ=1)
    environment = with_gpus([], ENERGYNN_POWERCAP=str(tmp_path / "powercap"))

    def execute(words):
        done = ended(*words, timeout=100, cwd=tmp_path, env=environment)
        return " ".join((done.stdout + done.stderr).split())

    with powercap.constant_power(tmp_path / "powercap", 0.6):
        yield execute


def typed(said):
    """Do what the remedy in an output says: write that file."""
    named, left_out, path = re.search(
        r"set (\w+) in \[thresholds\] and (left_out = \[.*?\]) above the first table of (\S+?)[,;]",
        said,
    ).groups()
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w") as file:
        file.write(f"{left_out}\n[thresholds]\n{named} = {MENDED[named]}\n")


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_the_remedy_that_is_told_helps_every_command(small_board, command):
    refused = small_board(COMMANDS[command])
    assert "S: cpu_0_package-0 showed 0.6 W" in refused and "D: ram_0_dram" in refused
    typed(refused)
    said = small_board(COMMANDS[command])
    assert not re.search("NOT valid|no record would be valid", said), said
    for words in ("show", "check") if command == "measure" else ():
        told = small_board([*ENERGYNN, words])
        assert "judged by least_cpu_W = 0.1, usual is 1.0" in told, told
        assert "left out by system.toml: ram0" in told, told


@pytest.mark.parametrize(
    "name, gone",
    [
        ("gpu", ["gpu_0_power", "gpu_1_power"]),
        ("gpu1", ["gpu_1_power"]),
        ("cpu1", ["cpu_1_p", "cpu_estimate_busy"]),
        ("cpu_0_p", ["cpu_0_p", "cpu_estimate_busy"]),
        ("dram", ["ram_1_dram"]),
        ("dram1", ["ram_1_dram"]),
        ("GPU-1", ["gpu_1_power"]),
        ("gpu-1", ["gpu_1_power"]),
        ("00000000:03:00.0", []),
    ],
)
def test_what_is_left_out_is_named_by_device_or_sensor(name, gone):
    ids = ["cpu_0_p", "cpu_1_p", "cpu_estimate_busy", "ram_1_dram"]
    ids += ["gpu_0_power", "gpu_1_power"]
    found = []
    for one in ids:
        component, device, _ = one.split("_")
        kind, notes = "busy" if device == "estimate" else "energy", {}
        if component == "gpu":
            kind, notes = "power", {"uuid": f"GPU-{device}"}
        facts = component, device, kind, "measured"
        found.append(Sensor(one, *facts, read=lambda: 1.0, notes=notes))
    unread = ["GPU 0000:03:00.0: unread", "0 of 0000:03:00.0 0001:04:00.0"]
    inventory = SensorInventory(found, unaccounted=unread)
    drop_left_out_sensors(inventory, [name])
    kept = [sensor.id for sensor in inventory.sensors]
    assert kept == [one for one in ids if one not in gone]
    lines = {"gpu": 0, "00000000:03:00.0": 1}.get(name, 2)
    assert len(inventory.unaccounted) == lines
    (said,) = inventory.problems
    drop_left_out_sensors(inventory, ["0001:04:00.0"])
    assert len(inventory.unaccounted) == lines
    more = "" if gone or lines < 2 else ", but names nothing here"
    assert said == f"{name} is left out by system.toml{more}"


def test_a_remedy_keeps_what_was_left_out_before(tmp_path):
    path = tmp_path / "system.toml"
    path.write_text('left_out = ["b"]')
    reasons = [f"D: {energy.left_out_remedy(name)}" for name in ("cpu1", "a", "a")]
    (said,) = machine.system_file_remedy([*reasons, "M: cpu1 fell"], path)
    assert f"left_out = {json.dumps(['b', 'cpu1', 'a'])} above" in said
    assert machine.system_file_remedy(["M: cpu1 fell"], path) == []


@pytest.mark.parametrize(
    "text",
    [
        "[cpu_model]\nleft_out = ['dram']",
        "[cpu_model]\nidle_W_per_core = -1\nfull_W_per_core = 1",
        "[thresholds]\nleast_W = 1",
        "[threshold]\nleast_cpu_W = 1",
        "least_cpu_W = 1",
        "cpu_model = 5",
        "",
        "[",
    ],
)
def test_what_would_be_overlooked_is_refused(tmp_path, text):
    (tmp_path / "system.toml").write_text(text)
    refused(
        "cannot be read .*; mend or delete it",
        machine.load_system,
        tmp_path / "system.toml",
    )
