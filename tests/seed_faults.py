"""Seed faults into a copy of the package, one at a time, and see whether the tests catch them.

    .venv/bin/python tests/seed_faults.py [ID ...]

faults.toml, beside this file, says what is broken and which tests are likely to see it. For each
fault the package is copied anew, the fault applied to the copy, and its tests run in their order
until the first failure. A line for each fault says what became of it: caught (by which test),
SURVIVED, or why it could not be tried.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from tests.processes import kill  # noqa: E402

MARK = "ENERGYNN_SEEDED"
NOT_COPIED = (".venv", "build", "__pycache__", "local", "measured", "imported")
LIMIT_S = 600


def read_faults() -> list[dict]:
    return tomllib.loads((HERE / "faults.toml").read_text())["fault"]


def seed(fault: dict, copy: Path) -> None:
    """Put the package with one fault into the copy of the checkout."""
    shutil.rmtree(copy / "energynn")
    shutil.copytree(HERE.parent / "energynn", copy / "energynn")
    for path in (copy / "energynn").rglob("*.py"):
        text = path.read_text()
        if fault["old"] in text:
            path.write_text(text.replace(fault["old"], fault["new"]))


def failure(copy: Path, test: str) -> str:
    """Run a test, or a file of tests without its slow ones; returns what has failed, or nothing."""
    marks = "not nightly" if "::" in test else "not slow and not nightly"
    words = [*"-m pytest -q -x -p no:cacheprovider --tb short -m".split(), marks]
    # all that a test starts has the copy among its variables, so that none is left
    environment = os.environ | dict.fromkeys(("PYTHONPATH", MARK), str(copy))
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        started = subprocess.Popen(
            [sys.executable, *words, test],
            cwd=copy,
            env=environment,
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            status = started.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            return f"{test} (no end)"
        finally:
            kill(copy)
            started.wait()
        output.seek(0)
        pattern = r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$"
        failed = re.search(pattern, output.read(), re.MULTILINE)
    if failed:
        return failed[1]
    return f"{test} (status {status})" if status else ""


def fate(fault: dict, copy: Path) -> str:
    """Say what becomes of one fault."""
    if "gone" in fault:
        return f"gone: {fault['gone']}"
    seed(fault, copy)
    failed = next(filter(None, (failure(copy, test) for test in fault["tests"])), "")
    return f"caught by {failed}" if failed else "SURVIVED"


def main(names: list[str]) -> int:
    with tempfile.TemporaryDirectory(prefix="seeded-") as folder:
        copy = Path(folder) / "tree"
        ignored = shutil.ignore_patterns(*NOT_COPIED)
        shutil.copytree(HERE.parent, copy, ignore=ignored, symlinks=True)
        for fault in read_faults():
            if not names or fault["id"] in names:
                print(f"{fault['id']}: {fate(fault, copy)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
