"""Run a study on this machine: the launch notebook under papermill, one measured run at a time."""

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

# What papermill and the kernel say at every start: their transport, and parameters that only the configuration knows.
NOISE = ("[IPKernelApp]", "Passed unknown parameter")
HOPELESS = 3  # runs that fail alike, one after the other, before any was made: the others would fail, too
TOO_LONG = ".too-long"  # in the folder of a run that was ended because it took too long
WARM, WARM_S = ".warm", 600.0  # beside the systems; new as long as this machine is warm, and never packed
ENDS_S = 60.0  # for a run that is ended to write its record
NOTEBOOK = shipped("notebooks") / "run_training.ipynb"


def run_study(
    runs: list[RunConfig],
    runs_dir: Path,
    minutes: float = float("inf"),
    archive: Path | None = None,
    warm_up: bool = False,
    run_minutes: float = float("inf"),
) -> list[str]:
    """Make every run that has no valid record yet, in order; returns one line for each run that failed.

    Those that failed before come last: what fails in each call must not take the time of the others. A run that lasts
    longer than ``run_minutes`` is ended, and has failed.
    A run that would not fit into ``minutes``, judged by those like it so far, is left out, and named in a line as well.
    So are all others where the first three fail alike. What is there is packed into ``archive`` after every run and
    whatever happens. With ``warm_up`` the first run is made once before, and forgotten, unless this machine has made
    one just now. A KeyboardInterrupt waits until the run that goes on has written its record. Raises ValueError with
    the remedy if this machine cannot make them, before the first one starts.
    """
    missing = [config for config in runs if not _is_done(config, runs_dir)]
    failed_before = _failed_before(missing, runs_dir)
    missing.sort(key=lambda config: _folder(config, runs_dir) in failed_before)
    print(f"{len(runs) - len(missing)} of {len(runs)} runs have a valid record; {len(missing)} to make", flush=True)
    failed, begun, made, reasons = [], time.monotonic(), [], []
    try:
        if missing:
            start.warnings_of(start.prepare(missing[0], _folder(missing[0], runs_dir)))
        if warm_up and missing and not _is_warm(runs_dir):
            _make_and_forget(runs[0], 60 * run_minutes)
        for index, config in enumerate(missing):
            elapsed_s = time.monotonic() - begun
            if elapsed_s + _expected_s(config, made) > 60 * minutes:
                failed.append(f"{configuration.run_id(config)}: left out for lack of time")
                continue
            left_s = sum(_expected_s(later, made) for later in missing[index:])
            left = f", about {min(left_s / 60, minutes - elapsed_s / 60):.0f} min left" if made else ""
            run_dir = _folder(config, runs_dir)
            done = f"{elapsed_s / 60:.1f} min so far{left}"
            tell(f"\n--- run {index + 1} of {len(missing)}: {run_dir.name} ({done})")
            status, last_line = execute(config, runs_dir, run_dir, 60 * run_minutes)
            made.append((config, time.monotonic() - begun - elapsed_s))
            reasons.append((_reason(run_dir) or last_line) if status else "")
            if status:
                failed.append(f"{run_dir.name}: {reasons[-1]}")
                tell(f"energynn: {failed[-1]}")
            elif warm_up:
                (runs_dir / WARM).touch()
            if archive:
                pack(runs, runs_dir, archive)
            if len(reasons) == HOPELESS and len(set(reasons)) == 1 and status:
                failed.append(f"the other runs: left out, because the first {HOPELESS} failed alike")
                break
    finally:
        if archive:
            pack(runs, runs_dir, archive)
            print(f"packed into {archive}: {archive.stat().st_size / 2**20:.1f} MiB", flush=True)
    return failed


def count_valid(runs: list[RunConfig], runs_dir: Path) -> tuple[int, list[str]]:
    """How many runs have a valid record, and a line with the reason for each that finished without one."""
    lines = []
    for folder in [_folder(config, runs_dir) for config in runs]:
        record = records.read(folder)
        if record and record["status"] == "finished" and not record["valid"]:
            lines.append(f"{folder.name}: not valid: {_reason(folder)}")
    return sum(_is_done(config, runs_dir) for config in runs), lines


def _is_warm(runs_dir: Path) -> bool:
    """Whether this machine has made a run just now; an archive of another one brings its records, but not this."""
    mark = runs_dir / WARM
    return mark.exists() and time.time() - mark.stat().st_mtime < WARM_S


def _failed_before(missing: list[RunConfig], runs_dir: Path) -> set[Path]:
    """Folders of the runs that have failed, not of those that were interrupted, and of all that start from them.

    One that was ended because it took too long has failed: it may hang each time.
    """
    failed: set[Path] = set()
    for config in missing:
        folder = _folder(config, runs_dir)
        status = (records.read(folder) or {}).get("status", "interrupted")
        has_failed = status != "interrupted" or (folder / TOO_LONG).exists()
        if has_failed or folder.parent / getattr(config, "initial_run", "") in failed:
            failed.add(folder)
    return failed


def _expected_s(config: RunConfig, made: list[tuple[RunConfig, float]]) -> float:
    """How long a run will take: as the longest of those most like it; 0 if there is none.

    Alike are those of its workload, recipe and number of epochs, else of its workload and recipe, else all. The first
    of all may be cold, and counts only as long as nothing else is known.
    """
    known = made[1:] or made
    alike = [(run, seconds) for run, seconds in known if _recipe(run) == _recipe(config)] or known
    as_long = [(run, seconds) for run, seconds in alike if run.epochs == config.epochs] or alike
    return max((seconds for _, seconds in as_long), default=0.0)


def _recipe(config: RunConfig) -> tuple:
    """What runs have in common that take about as long; to compile takes longer than such a run."""
    return config.workload, config.preset, config.compile


def _make_and_forget(config: RunConfig, most_s: float) -> None:
    """Make a run where nobody looks for it, so that the next finds a warm machine."""
    print("\n--- to warm up: the first run, which does not count", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        execute(config, Path(folder), _folder(config, Path(folder)), most_s)


def execute(config: RunConfig, runs_dir: Path, run_dir: Path, most_s: float = math.inf) -> tuple[int, str]:
    """Execute the launch notebook for one run; the executed notebook lies beside the record.

    It is ended after ``most_s``. Returns papermill's exit status and the last line that it wrote.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    parameters = configuration.to_dict(config)
    if importlib.util.find_spec("papermill"):
        options = ["--no-progress-bar", "--log-level", "WARNING", "--cwd", str(REPOSITORY), "--parameters_yaml"]
        options.append(json.dumps(parameters | {"runs_dir": str(runs_dir)}))
        command = [sys.executable, "-m", "papermill", str(NOTEBOOK), str(run_dir / "notebook.ipynb"), *options]
    else:  # a machine with a torch of its own and little else
        command = [sys.executable, "-m", "energynn.cli", "run", "--runs-dir", str(runs_dir)]
        for name, value in parameters.items():
            command += ["-p", name, str(value)]
    end_with_us = partial(end_with_parent, os.getpid())
    papermill = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, errors="replace", preexec_fn=end_with_us)
    last_line, in_traceback, begun = "", False, time.monotonic()
    late = threading.Timer(min(most_s, threading.TIMEOUT_MAX), papermill.terminate)
    late.start()
    try:
        for line in papermill.stderr:
            in_traceback = in_traceback or line.startswith("Traceback")
            if not in_traceback and not line.startswith(NOISE):  # of an error, the last line says what it is
                tell(line.removesuffix("\n"))
            last_line = line.strip() or last_line
    except BaseException:
        papermill.terminate()
        while records.is_running(run_dir):
            time.sleep(0.1)
        raise
    finally:
        late.cancel()
        late.join()  # a process that has threads had better not fork
        papermill.wait()
    if papermill.returncode and time.monotonic() - begun >= most_s:
        last_line = f"ended after {most_s:.0f} s, as one that hangs; its log.txt says how far it came"
        tell(f"energynn: {run_dir.name}: {last_line}")
        while records.is_running(run_dir) and time.monotonic() - begun < most_s + ENDS_S:
            time.sleep(0.1)
        (run_dir / TOO_LONG).touch()
    return papermill.returncode, last_line


def pack(runs: list[RunConfig], runs_dir: Path, path: Path) -> None:
    """Pack the runs that were made, raw samples and all, to take them home from a machine that is given back.

    Without checkpoints: one can be larger than all the rest, and than what may be taken home.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}")
    with tarfile.open(unfinished, "w:gz", compresslevel=4) as file:
        for folder in [_folder(config, runs_dir) for config in runs]:
            if (folder / "run.json").exists():
                file.add(folder, f"{folder.parent.name}/{folder.name}", filter=_but_checkpoints)
        for system in sorted({config.system for config in runs}):
            if (runs_dir / system / "system.toml").exists():
                file.add(runs_dir / system / "system.toml", f"{system}/system.toml")
    unfinished.replace(path)


def _but_checkpoints(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if member.name.endswith("/checkpoint") else member


def _folder(config: RunConfig, runs_dir: Path) -> Path:
    return runs_dir / config.system / configuration.run_id(config)


def _is_done(config: RunConfig, runs_dir: Path) -> bool:
    return records.is_made(_folder(config, runs_dir))


def _reason(run_dir: Path) -> str:
    record = records.read(run_dir) or {}
    if record.get("status", "finished") != "finished":
        return f"{record['status']}: {record['status_reason']}"
    return "; ".join(record.get("invalid_reasons", []))
