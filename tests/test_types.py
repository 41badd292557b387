"""Types: mypy finds no fault in the Python interface, the instrument and the record, and an editor
refuses what is not there.
"""

import os
import re
import sys

import pytest

from energynn.host.files import REPOSITORY
from tests.processes import ended


def mypy(*files):
    """What mypy says; without files of those that pyproject.toml names."""
    where = dict(cwd=REPOSITORY, env=os.environ | {"MYPYPATH": str(REPOSITORY)})
    done = ended(sys.executable, "-m", "mypy", *files, **where)
    assert not done.stderr, done.stderr
    return done.stdout


def test_mypy_finds_nothing():
    said = mypy()
    found = re.fullmatch(r"Success: no issues found in (\d+) source files\n", said)
    assert found and int(found[1]) > 15, said


PROGRAM = """from pathlib import Path

import energynn
from energynn import records
from energynn.measure.samples import Channel

run = Path("run")
sizes = energynn.load("runs").sizes
times_s = energynn.table()["time_s"].mean()
power = energynn.trace("last", period_s=1.0).attrs
ratios = energynn.compare(run, "other")["ratio"]
with energynn.window("epoch") as measured:
    joules: float = measured.energy_J
record = records.read_record(run)
valid: bool = record.valid and record.sensors[0].primary
"""
REFUSED = {
    "energynn.lod()": 'has no attribute "lod"',
    "energynn.load(3)": 'Argument 1 to "load" .* incompatible type "int"',
    "energynn.table(own=True)": 'Unexpected keyword argument "own"',
    'energynn.trace("last", period_s="1")': 'incompatible type "str"; expected "float"',
    "energynn.compare(1, 2)": 'to "compare" has incompatible type "int"',
    "energynn.window(no_gpus=True)": 'Unexpected keyword argument "no_gpus"',
    "measured.energies_J": 'has no attribute "energies_J"',
    "records.read_record_if_any(run).valid": 'Item "None" of "Record | None"',
    "record.energy_gpu": 'has no attribute "energy_gpu"',
    'record["valid"]': "not indexable",
    "record.energy_gpu_J / 2": "Unsupported operand",
    "record.sensors[0].energy": 'has no attribute "energy"',
    'Channel("a", "cpu", "0", "energy")': 'Missing positional argument "provenance"',
}


@pytest.fixture(scope="module")
def refused(tmp_path_factory):
    """What mypy says of each line of a program."""
    path = tmp_path_factory.mktemp("types") / "program.py"
    path.write_text(PROGRAM + "\n".join(REFUSED))
    said: dict[int, str] = {}
    for line, text in re.findall(r"program\.py:(\d+): error: (.*)", mypy(path)):
        said[int(line)] = said.get(int(line), "") + text
    return said


def test_an_editor_takes_what_is_right(refused):
    right = len(PROGRAM.splitlines())
    assert not [text for line, text in refused.items() if line <= right]


@pytest.mark.parametrize("number, line", [*enumerate(REFUSED, start=1)])
def test_an_editor_refuses_what_is_not_there(refused, number, line):
    text = refused.get(len(PROGRAM.splitlines()) + number, "no fault")
    assert re.search(REFUSED[line], text), text
