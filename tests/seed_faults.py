"""Seed faults into a copy of the package, one at a time, and see whether the tests catch them.

    .venv/bin/python tests/seed_faults.py --out build/seeded.json

faults.toml, beside this file, says what is broken and which tests are likely to see it. For each fault the package is
copied anew, the fault applied to the copy, and its tests run in their order until the first failure. One line for each
fault is printed and kept in the results: caught (by which test, and in which words), SURVIVED, or why it could not be
tried. What was caught or survived according to the results is not tried again. With ``--control`` all the chosen tests
are run without a fault first; those that fail then are left out, because they would prove nothing. ``--suite old``
takes the snippets and tests of the package as it was before its parts were written anew, for such a ``--tree``.
"""

import argparse
import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path

HERE = Path(__file__).resolve().parent
PYTEST = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb", "short"]
LEFT_BEHIND = "ENERGYNN_SEEDED"  # every process of a test has this variable, so that none outlives its fault
NOT_COPIED = shutil.ignore_patterns(".venv", "build", "__pycache__", "local", "measured", "imported")


def make_copy(tree: Path) -> Path:
    """A copy of a checkout in a temporary folder, with the checkout's own environment."""
    copy = Path(tempfile.mkdtemp(prefix="seeded-")) / "tree"
    shutil.copytree(tree, copy, ignore=NOT_COPIED, symlinks=True)
    (copy / ".venv").symlink_to((tree / ".venv").resolve())
    return copy


def of_suite(fault: dict, suite: str) -> dict:
    """A fault with the snippets and tests for the package that this suite tests."""
    kept = {name: fault.get(f"{name}_{suite}", fault.get(name)) for name in ("id", "about", "old", "new", "tests")}
    return kept | {"gone": fault.get("gone") if suite == "new" else None}


def seed(fault: dict, tree: Path, copy: Path) -> str:
    """Put the package with one fault into the copy; returns why that cannot be done, or nothing."""
    if fault["gone"]:
        return f"gone: {fault['gone']}"
    shutil.rmtree(copy / "energynn")
    shutil.copytree(tree / "energynn", copy / "energynn", ignore=shutil.ignore_patterns("__pycache__"))
    sources = {path: path.read_text() for path in sorted((copy / "energynn").rglob("*.py"))}
    if (number := sum(text.count(fault["old"]) for text in sources.values())) != 1:
        return f"`{fault['old']}` occurs {number} times, not once"
    for path, text in sources.items():
        path.write_text(text.replace(fault["old"], fault["new"]))
    return ""


def run_tests(copy: Path, tests: list[str], left_out: list[str], limit_s: float, to_the_end=False) -> tuple[int, str]:
    """Exit status and output of pytest in the copy; status -1 if it took longer than the limit.

    Of whole files the slow tests are left out; who wants one names it. Nightly tests are never run.
    """
    command = [str(copy / ".venv" / "bin" / "python"), *PYTEST, *([] if to_the_end else ["-x"]), *tests]
    command += ["-m", "not nightly" if "::" in tests[0] else "not slow and not nightly"]
    command += [word for test in left_out for word in ("--deselect", test)]
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        environment = os.environ | {"PYTHONPATH": str(copy), LEFT_BEHIND: str(copy)}
        pipes = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT}
        started = subprocess.Popen(command, cwd=copy, env=environment, start_new_session=True, **pipes)
        try:
            status = started.wait(limit_s)
        except subprocess.TimeoutExpired:
            status = -1
        finally:
            end_what_is_left(copy)
            started.wait()
        output.seek(0)
        return status, output.read()


def files_and_single_tests(tests: list[str]) -> list[list[str]]:
    """The tests in their order, so that no part has whole files and single tests."""
    return [list(some) for _, some in itertools.groupby(tests, key=lambda test: "::" in test)]


def end_what_is_left(copy: Path) -> None:
    """Kill every process that the tests have started and that is still there."""
    mark = f"{LEFT_BEHIND}={copy}".encode()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has ended, or belongs to somebody else
            if mark in path.read_bytes().split(b"\0"):
                os.kill(int(path.parent.name), signal.SIGKILL)


def failures(output: str) -> list[tuple[str, str]]:
    """Test and words of each failure or error in pytest's summary; parameters may contain spaces."""
    return re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - (.*))?$", output, re.MULTILINE)


def judge(fault: dict, tree: Path, copy: Path, left_out: list[str], limit_s: float) -> dict:
    """What becomes of one fault."""
    begun = time.monotonic()
    if reason := seed(fault, tree, copy):
        return {"status": "cannot be applied", "words": reason}
    if not fault["tests"]:
        return {"status": "cannot be tried", "words": "no tests are named for this suite"}
    for some in files_and_single_tests(fault["tests"]):
        status, output = run_tests(copy, some, left_out, limit_s - (time.monotonic() - begun))
        if status != 0:
            break
    seconds, last_line = round(time.monotonic() - begun, 1), (output.strip().splitlines() or [""])[-1]
    if "ModuleNotFoundError" in output:  # somebody is installing it anew
        return {"status": "cannot be tried", "words": "the environment is not whole", "seconds": seconds}
    if status == 0:
        return {"status": "SURVIVED", "words": last_line, "seconds": seconds}
    if status in (1, 2) and failures(output):
        test, words = failures(output)[0]
        why = re.search(r"^E +(.*)", output, re.MULTILINE)
        return {"status": "caught", "by": test, "words": (why[1] if why else words)[:300], "seconds": seconds}
    if status == -1:
        return {"status": "out of time", "words": f"longer than {limit_s:.0f} s", "seconds": seconds}
    return {"status": "cannot be tried", "words": f"pytest ended with {status}: {last_line}", "seconds": seconds}


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--suite", choices=("old", "new"), default="new", help="whose tests are run")
    options.add_argument("--only", action="append", default=[], metavar="ID", help="try this fault, even again")
    options.add_argument("--tree", type=Path, default=HERE.parent, help="the checkout, which is not touched")
    options.add_argument("--faults", type=Path, default=HERE / "faults.toml")
    options.add_argument("--out", type=Path, default=Path("seeded.json"), help="results; what stands there is kept")
    options.add_argument("--limit", type=float, default=600, help="seconds for the tests of one fault")
    options.add_argument("--control", action="store_true", help="first run all chosen tests without a fault")
    chosen = options.parse_args()
    faults = [of_suite(fault, chosen.suite) for fault in tomllib.loads(chosen.faults.read_text())["fault"]]
    if unknown := set(chosen.only) - {fault["id"] for fault in faults}:
        options.error(f"no fault is called {', '.join(sorted(unknown))}")
    results = json.loads(chosen.out.read_text()) if chosen.out.exists() else {"control": {}, "faults": {}}
    known = {name for name, result in results["faults"].items() if result["status"] in ("caught", "SURVIVED")}
    faults = [fault for fault in faults if (fault["id"] in chosen.only if chosen.only else fault["id"] not in known)]
    copy = make_copy(chosen.tree)
    try:
        if chosen.control:
            tests = list(dict.fromkeys(test for fault in faults for test in fault["tests"]))
            failed, words = [], []
            for some in files_and_single_tests(sorted(tests, key=lambda test: "::" in test)):
                _, output = run_tests(copy, some, [], 3600, to_the_end=True)
                failed += [test for test, _ in failures(output)]
                words.append(output.strip().splitlines()[-1])
            results["control"] = {"failed": failed, "words": words}
            print(f"control: {'; '.join(words)}", flush=True)
        for fault in faults:
            result = judge(fault, chosen.tree, copy, results["control"].get("failed", []), chosen.limit)
            results["faults"][fault["id"]] = {"about": fault["about"], **result}
            chosen.out.write_text(json.dumps(results, indent=1) + "\n")
            by = f" by {result['by']}" if "by" in result else ""
            seconds = result.get("seconds", 0)
            print(f"{fault['id']}: {result['status']}{by} ({seconds} s): {result['words']}", flush=True)
    finally:
        shutil.rmtree(copy.parent, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
