"""Run a study on this machine: the launch notebook under papermill, one measured run at a time."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tarfile
import time
from functools import partial
from pathlib import Path

from energynn import config as configuration
from energynn import records
from energynn.config import RunConfig
from energynn.files import REPOSITORY, shipped
from energynn.launch import start
from energynn.processes import end_with_parent

# What papermill and the kernel say at every start: their transport, and parameters that only the configuration knows.
NOISE = ("[IPKernelApp]", "Passed unknown parameter")
NOTEBOOK = shipped("notebooks") / "run_training.ipynb"


def run_study(runs: list[RunConfig], runs_dir: Path, minutes: float = float("inf")) -> list[str]:
    """Make every run that has no valid record yet, in order; returns one line for each run that failed.

    A run that would not fit into ``minutes``, judged by the longest so far, is left out, and named in a line as well.
    A KeyboardInterrupt waits until the run that goes on has written its record. Raises ValueError with the remedy
    if this machine cannot make them, before the first one starts.
    """
    missing = [config for config in runs if not _is_done(config, runs_dir)]
    print(f"{len(runs) - len(missing)} of {len(runs)} runs have a valid record; {len(missing)} to make", flush=True)
    if missing:
        start.preflight(start.intend(missing[0], _folder(missing[0], runs_dir)))
    failed, begun, longest = [], time.monotonic(), 0.0
    for index, config in enumerate(missing):
        run_dir = _folder(config, runs_dir)
        elapsed = time.monotonic() - begun
        if elapsed + longest > 60 * minutes:
            failed += [f"{configuration.run_id(run)}: left out for lack of time" for run in missing[index:]]
            break
        left = f", about {elapsed / index * (len(missing) - index) / 60:.0f} min left" if index else ""
        done = f"{elapsed / 60:.1f} min so far{left}"
        print(f"\n--- run {index + 1} of {len(missing)}: {run_dir.name} ({done})", flush=True)
        status, last_line = execute(config, runs_dir, run_dir)
        longest = max(longest, time.monotonic() - begun - elapsed)
        if status:
            failed.append(f"{run_dir.name}: {_reason(run_dir) or last_line}")
            print(f"energynn: {failed[-1]}", flush=True)
    return failed


def execute(config: RunConfig, runs_dir: Path, run_dir: Path) -> tuple[int, str]:
    """Execute the launch notebook for one run; the executed notebook lies beside the record.

    Returns papermill's exit status and the last line that it wrote.
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
    last_line, in_traceback = "", False
    try:
        for line in papermill.stderr:
            in_traceback = in_traceback or line.startswith("Traceback")
            if not in_traceback and not line.startswith(NOISE):  # of an error, the last line says what it is
                print(line, end="", flush=True)
            last_line = line.strip() or last_line
    except BaseException:
        papermill.terminate()
        while records.is_running(run_dir):
            time.sleep(0.1)
        raise
    finally:
        papermill.wait()
    return papermill.returncode, last_line


def archive(runs: list[RunConfig], runs_dir: Path, path: Path) -> None:
    """Pack the runs that were made, raw samples and all, to take them home from a machine that is given back."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as file:
        for folder in [_folder(config, runs_dir) for config in runs]:
            if (folder / "record.json").exists():
                file.add(folder, f"{folder.parent.name}/{folder.name}")
    print(f"packed into {path}: {path.stat().st_size / 2**20:.1f} MiB")


def _folder(config: RunConfig, runs_dir: Path) -> Path:
    return runs_dir / config.system / configuration.run_id(config)


def _is_done(config: RunConfig, runs_dir: Path) -> bool:
    record = records.read(_folder(config, runs_dir))
    return bool(record and record["valid"])


def _reason(run_dir: Path) -> str:
    record = records.read(run_dir) or {}
    if record.get("status", "finished") != "finished":
        return f"{record['status']}: {record['status_reason']}"
    return "; ".join(record.get("invalid_reasons", []))
