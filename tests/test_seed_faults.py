"""Every seeded fault can still be seeded, and the tests that should see it are there."""

import pytest

from energynn.host.files import PACKAGE_FOLDER
from tests.run_files import text_of
from tests.seed_faults import read_faults

PRESENT = [fault for fault in read_faults() if "gone" not in fault]
SOURCE = "".join(path.read_text() for path in sorted(PACKAGE_FOLDER.rglob("*.py")))


@pytest.mark.parametrize("fault", PRESENT, ids=lambda fault: fault["id"])
def test_a_fault_has_one_place_and_its_tests(fault):
    assert SOURCE.count(fault["old"]) == 1 and fault["new"] != fault["old"]
    for name in fault["tests"]:
        path, _, function = name.partition("::")
        assert f"def {function.partition('[')[0]}" in text_of(path), name
