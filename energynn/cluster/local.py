"""Make a study on this machine: the launch notebook under papermill, one measured run at a time."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from functools import partial
from pathlib import Path

from energynn import config as configuration
from energynn import records
from energynn.config import RunConfig
from energynn.files import REPOSITORY, shipped
from energynn.launch import start
from energynn.processes import end_with_parent
from energynn.progress import tell

# What papermill and the kernel say at every start.
NOISE = ("[IPKernelApp]", "Passed unknown parameter")
MOST_ALIKE = 3  # first runs that fail alike: the others would fail, too
WARM, WARM_S = ".warm", 600.0  # a file in runs_dir; new as long as this machine is warm, and never packed
NOTEBOOK = shipped("notebooks") / "run_training.ipynb"


def run_study(
    runs: list[RunConfig],
    runs_dir: Path,
    minutes: float = math.inf,
    archive: Path | None = None,
    warm_up: bool = False,
    run_minutes: float = math.inf,
) -> list[str]:
    """Make every run that has no valid record yet; returns one line for each that failed or was left out.

    minutes: a run that would not fit, judged by those like it so far, is left out. run_minutes: a run that lasts longer
    is ended. archive: everything is packed into it after every run. warm_up: the first run is made once before, and
    forgotten. Raises ValueError with the remedy if this machine cannot make the runs.
    """
    missing = _in_order([run for run in runs if not _is_done(run, runs_dir)], runs_dir)
    print(f"{len(runs) - len(missing)} of {len(runs)} runs have a valid record; {len(missing)} to make", flush=True)
    begun, failed, made, reasons = time.monotonic(), [], [], []
    try:
        if missing:
            start.warnings_of(start.prepare(missing[0], _folder(missing[0], runs_dir)))
        if missing and warm_up and not _is_warm(runs_dir):
            _make_and_forget(runs[0], 60 * run_minutes)
        for index, run in enumerate(missing):
            elapsed_s, run_dir = time.monotonic() - begun, _folder(run, runs_dir)
            if elapsed_s + _expected_s(run, made) > 60 * minutes:
                failed.append(f"{run_dir.name}: left out for lack of time")
                continue
            tell(f"\n--- run {index + 1} of {len(missing)}, {elapsed_s / 60:.1f} min so far: {run_dir.name}")
            status, last_line = execute(command(run, runs_dir), run_dir, 60 * run_minutes)
            made.append((run, time.monotonic() - begun - elapsed_s))
            reasons.append((_why_not_valid(run_dir) or last_line) if status else "")
            if status:
                failed.append(f"{run_dir.name}: {reasons[-1]}")
                tell(f"energynn: {failed[-1]}")
            elif warm_up:
                (runs_dir / WARM).touch()
            if archive:
                pack(runs, runs_dir, archive)
            if status and len(reasons) == MOST_ALIKE and len(set(reasons)) == 1:
                failed.append(f"the other runs: left out, because the first {MOST_ALIKE} failed alike")
                break
    finally:
        if archive:
            pack(runs, runs_dir, archive)
            print(f"packed into {archive}: {archive.stat().st_size / 2**20:.1f} MiB", flush=True)
    return failed


def count_valid(runs: list[RunConfig], runs_dir: Path) -> tuple[int, list[str]]:
    """Count the valid records, and say why others that finished are not valid."""
    lines = []
    for folder in [_folder(run, runs_dir) for run in runs]:
        record = records.read(folder) or {}
        if record.get("status") == "finished" and not record["valid"]:
            lines.append(f"{folder.name}: not valid: {_why_not_valid(folder)}")
    return sum(_is_done(run, runs_dir) for run in runs), lines


def _in_order(missing: list[RunConfig], runs_dir: Path) -> list[RunConfig]:
    """Put last what was begun before, and what starts from it: what fails each time must not take others' time."""
    begun_before: set[Path] = set()
    for run in missing:
        folder = _folder(run, runs_dir)
        needs = folder.parent / (getattr(run, "initial_run", "") or folder.name)
        if (folder / "run.json").exists() or needs in begun_before:
            begun_before.add(folder)
    return sorted(missing, key=lambda run: _folder(run, runs_dir) in begun_before)


def _is_warm(runs_dir: Path) -> bool:
    """Test if this machine has just made a run; an archive from another one brings its records, but not this file."""
    mark = runs_dir / WARM
    return mark.exists() and time.time() - mark.stat().st_mtime < WARM_S


def _make_and_forget(run: RunConfig, most_s: float) -> None:
    """Make a run where nobody looks for it, so that the next finds a warm machine."""
    print("\n--- to warm up: the first run, which does not count", flush=True)
    with tempfile.TemporaryDirectory() as name:
        execute(command(run, Path(name)), _folder(run, Path(name)), most_s)


def _expected_s(run: RunConfig, made: list[tuple[RunConfig, float]]) -> float:
    """Expect the duration of the longest run so far of the same recipe and epochs, else recipe, else of all; or 0."""
    known = made[1:] or made  # the first of all may be cold

    def recipe(of: RunConfig) -> tuple:
        return of.workload, of.preset, of.compile

    alike = [(other, s) for other, s in known if recipe(other) == recipe(run)]
    as_long = [(other, s) for other, s in alike if other.epochs == run.epochs]
    return max((s for _, s in as_long or alike or known), default=0.0)


def command(run: RunConfig, runs_dir: Path) -> list[str]:
    """Write the command that executes the launch notebook for a run, beside whose record it is kept."""
    parameters = configuration.to_dict(run)
    if importlib.util.find_spec("papermill"):
        options = ["--no-progress-bar", "--log-level", "WARNING", "--cwd", str(REPOSITORY)]
        options += ["--parameters_yaml", json.dumps(parameters | {"runs_dir": str(runs_dir)})]
        executed = _folder(run, runs_dir) / "notebook.ipynb"
        return [sys.executable, "-m", "papermill", str(NOTEBOOK), str(executed), *options]
    # A machine with a torch of its own and little else.
    assignments = [f"{name}={value}" for name, value in parameters.items()]
    return [sys.executable, "-m", "energynn.cli", "run", "--runs-dir", str(runs_dir), *assignments]


def execute(command: list[str], run_dir: Path, most_s: float = math.inf) -> tuple[int, str]:
    """Execute a command that makes a run, and end it after ``most_s``; returns its exit status and last line."""
    run_dir.mkdir(parents=True, exist_ok=True)
    ends_with_us = partial(end_with_parent, os.getpid())
    child = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, errors="replace", preexec_fn=ends_with_us)
    last_line, in_traceback, begun = "", False, time.monotonic()
    timer = threading.Timer(min(most_s, threading.TIMEOUT_MAX), child.terminate)
    timer.start()
    try:
        for line in child.stderr:
            in_traceback = in_traceback or line.startswith("Traceback")
            if not in_traceback and not line.startswith(NOISE):  # of an error, the last line says what it is
                tell(line.removesuffix("\n"))
            last_line = line.strip() or last_line
    except BaseException:
        child.terminate()
        raise
    finally:
        timer.cancel()
        timer.join()  # a process that has threads had better not fork
        child.wait()
        while records.is_running(run_dir):  # until its record is written
            time.sleep(0.1)
    if child.returncode and time.monotonic() - begun >= most_s:
        last_line = f"ended after {most_s:.0f} s, as one that hangs; its log.txt says how far it came"
    return child.returncode, last_line


def pack(runs: list[RunConfig], runs_dir: Path, path: Path) -> None:
    """Pack the runs that were made, without checkpoints, to take them home from a machine that is given back."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}")
    with tarfile.open(unfinished, "w:gz", compresslevel=4) as file:
        for folder in [_folder(run, runs_dir) for run in runs]:
            if (folder / "run.json").exists():
                file.add(folder, f"{folder.parent.name}/{folder.name}", filter=_without_checkpoints)
        for system in sorted({run.system for run in runs}):
            if (runs_dir / system / "system.toml").exists():
                file.add(runs_dir / system / "system.toml", f"{system}/system.toml")
    unfinished.replace(path)


def _without_checkpoints(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if member.name.endswith("/checkpoint") else member


def _folder(run: RunConfig, runs_dir: Path) -> Path:
    return runs_dir / run.system / configuration.run_id(run)


def _is_done(run: RunConfig, runs_dir: Path) -> bool:
    return records.is_made(_folder(run, runs_dir))


def _why_not_valid(run_dir: Path) -> str:
    record = records.read(run_dir) or {}
    if record.get("status", "finished") != "finished":
        return f"{record['status']}: {record['status_reason']}"
    return "; ".join(record.get("invalid_reasons", []))
