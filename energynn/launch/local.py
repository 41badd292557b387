"""Make a study on this machine: the launch notebook under papermill, one measured run at a time."""

import importlib.util
import json
import math
import os
import subprocess
import tempfile
import time
from functools import partial
from pathlib import Path

from energynn import records
from energynn.experiment import config as configuration
from energynn.host.files import REPOSITORY, shipped_path, write_json
from energynn.host.processes import OWN_PYTHON, end_with_parent, own_environment
from energynn.host.progress import print_lines
from energynn.launch import start, supervise

# for the end of a measured run that is not of this study
PATIENCE_WITH_OTHERS_S = 600.0
# What papermill and the kernel say at every start.
IGNORED_LINE_STARTS = ("[IPKernelApp]", "Passed unknown parameter")
LAUNCH_NOTEBOOK = shipped_path("notebooks") / "run_training.ipynb"


def make_missing_runs(
    runs: list[configuration.RunConfig],
    runs_dir: Path,
    minutes: float = math.inf,
    warm_up: bool = False,
    **labels: str,
) -> list[str]:
    """Make every run that has no valid record yet; returns a line for each that was not.

    minutes: a run that would not fit, if it took as long as the longest so far, is left out.
    warm_up: where none is made yet, the first run is made once before, and forgotten.
    labels: name and note of every run.
    Raises ValueError with the remedy if this machine cannot make the runs.
    """
    folders = {run: configuration.folder(run, runs_dir.absolute()) for run in runs}
    missing = [run for run in runs if not records.has_valid_record(folders[run])]
    begun_s = time.monotonic()
    # one of each kind, so that none is refused after hours
    kinds = {(run.dataset, run.device, run.devices): run for run in missing}
    for run in kinds.values():
        start.prepare_intent(run, folders[run])
    if warm_up and len(missing) == len(runs):
        print_lines("\n--- to warm up: the first run, which does not count")
        with tempfile.TemporaryDirectory() as name:
            execute(
                configuration.asdict(runs[0]), configuration.folder(runs[0], Path(name))
            )
    failed = []
    durations_s = []
    for number, run in enumerate(missing, 1):
        elapsed_s = time.monotonic() - begun_s
        run_dir = folders[run]
        # The first of all may be cold, and says least of the others.
        if elapsed_s + max(durations_s[1:] or durations_s, default=0.0) > 60 * minutes:
            failed.append(f"{run_dir.name}: left out for lack of time")
            continue
        print_lines(f"\n--- run {number} of {len(missing)}: {run_dir.name}")
        while True:
            # a measured run of somebody else may have begun, or begin before this one
            supervise.lock_host(PATIENCE_WITH_OTHERS_S).close()
            status, last_line = execute(configuration.asdict(run) | labels, run_dir)
            if supervise.HOST_TAKEN_TEXT not in last_line:
                break
        durations_s.append(time.monotonic() - begun_s - elapsed_s)
        record = records.read_record_if_any(run_dir)
        if record:
            print_lines(records.summary_text(record))
        if reason := records.reason_of_record(record) or (last_line if status else ""):
            print_lines(f"energynn: {run_dir.name}: {reason}")
        if status:
            failed.append(f"{run_dir.name}: {reason}")
    valid = sum(records.has_valid_record(folders[run]) for run in runs)
    print_lines(f"{valid} of {len(runs)} runs have a valid record in {runs_dir}")
    if valid < len(runs):
        print_lines(
            "`energynn status --failed` says why; the same command makes them again"
        )
    return failed


def _papermill_command(parameters: dict, run_dir: Path) -> list[str]:
    """Write the command that executes the launch notebook for a run, in the run's folder."""
    runs_dir = str(run_dir.parent.parent)
    if importlib.util.find_spec("papermill"):
        words = [
            "papermill",
            str(LAUNCH_NOTEBOOK),
            str(run_dir / "notebook.ipynb"),
            "--cwd",
            str(REPOSITORY),
            "--no-progress-bar",
            "--log-level",
            "WARNING",
            "--parameters_yaml",
            json.dumps(parameters | {"runs_dir": runs_dir}),
        ]
    else:  # a machine with a torch of its own and little else
        words = ["energynn.cli", "run", "--runs-dir", runs_dir]
        for name, value in parameters.items():
            option = "--" if name in configuration.NOTEBOOK_OPTIONS[1:] else ""
            words.append(f"{option}{name}={value}")
    return [*OWN_PYTHON, "-m", *words]


def execute(parameters: dict, run_dir: Path) -> tuple[int, str]:
    """Make the run of some parameters and labels in a process of its own; returns its exit status
    and last line.

    A notebook is executed by this Python, whatever kernels are installed.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    last_line = ""
    in_traceback = False
    with tempfile.TemporaryDirectory(prefix="energynn-") as folder:
        child = subprocess.Popen(
            _papermill_command(parameters, run_dir),
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            preexec_fn=partial(end_with_parent, os.getpid()),
            env=own_environment() | _write_kernel(Path(folder)),
        )
        try:
            for line in child.stderr:
                in_traceback = in_traceback or line.startswith("Traceback")
                # Of an error, the last line says what it is.
                if not in_traceback and not line.startswith(IGNORED_LINE_STARTS):
                    print_lines(line.removesuffix("\n"))
                last_line = line.strip() or last_line
        except BaseException:
            child.terminate()
            raise
        finally:
            child.wait()
            while records.is_run_locked(run_dir):  # until its record is written
                time.sleep(0.1)
    return child.returncode, last_line


def _write_kernel(folder: Path) -> dict[str, str]:
    """Write a kernel "python3" that is this Python; returns the variable that puts it first."""
    words = [
        *OWN_PYTHON,
        "-m",
        "ipykernel",  # the launcher takes a checkout off the path where it is the working folder
        "-f",
        "{connection_file}",
        "--InteractiveShellApp.ignore_cwd=True",
    ]
    write_json(folder / "kernels" / "python3" / "kernel.json", {"argv": words})
    places = filter(None, [str(folder), os.environ.get("JUPYTER_PATH")])
    return {"JUPYTER_PATH": os.pathsep.join(places)}
