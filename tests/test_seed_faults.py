"""Every seeded fault can still be seeded, and the tests that should see it are there (tests/seed_faults.py)."""

import tomllib

import pytest

from energynn.files import PACKAGE, REPOSITORY
from tests.seed_faults import HERE, of_suite

FAULTS = [of_suite(fault, "new") for fault in tomllib.loads((HERE / "faults.toml").read_text())["fault"]]
SOURCE = "".join(path.read_text() for path in sorted(PACKAGE.rglob("*.py")))


@pytest.mark.parametrize("fault", [each for each in FAULTS if not each["gone"]], ids=lambda fault: fault["id"])
def test_a_fault_has_one_place_and_its_tests(fault):
    assert SOURCE.count(fault["old"]) == 1 and fault["new"] != fault["old"]
    for name in fault["tests"]:
        path, _, function = name.partition("::")
        assert f"def {function.partition('[')[0]}" in (REPOSITORY / path).read_text(), name
