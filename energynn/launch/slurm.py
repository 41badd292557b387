"""Ask Slurm by its own commands, each with a time limit: its controller may be down."""

import os
import re
import shlex
import shutil
import subprocess
import time
from pathlib import Path
from typing import NamedTuple

COMMAND_TIMEOUT_S = 20
REQUEUE_WAIT_S = 60  # in which Slurm ends a job that it has queued again
# variables that are options of Slurm's commands, which nobody sees and which would change a job
SLURM_OPTIONS_PATTERN = re.compile(
    r"(SBATCH|SQUEUE|SCANCEL|SCONTROL)_|SLURM_(?!CONF|JWT)"
)
# of these, who pays and where it runs: our script does not say it
KEPT_VARS = ("SBATCH_ACCOUNT", "SBATCH_PARTITION", "SBATCH_QOS", "SBATCH_RESERVATION")
# a whole line; a site's own lines may stand before and after
NUMBER_LINE_PATTERN = re.compile(r"(?m)^[^\S\n]*([1-9]\d{0,9})(?:;[\w.-]+)?[^\S\n]*$")
# as SQUEUE_FORMAT asks for
SQUEUE_LINE_PATTERN = re.compile(r"(\d+_(?:\d+|N/A))\|([A-Z_]+)\|(.*)")
SQUEUE_FORMAT = "%F_%K|%T|%r"


class QueuedJob(NamedTuple):
    """A job in the queue, as squeue shows it."""

    state: str
    reason: str


def submit_script(script: Path, *options: str) -> str:
    """Queue a script; returns the job's number.

    What its comments ask for is given as options, too: a variable beats a comment. Raises
    ValueError where sbatch refuses it, and where its answer has no number.
    """
    comments = re.findall("^#SBATCH (.*)", script.read_text(), re.MULTILINE)
    asked = shlex.split("\n".join(comments))
    answer = call_slurm("sbatch", "--parsable", *asked, *options, str(script))
    # what sbatch says goes before what a site's wrapper adds
    said = re.findall(r"Submitted batch job (\d+)", answer)
    numbers = said or NUMBER_LINE_PATTERN.findall(answer)
    if len(set(numbers)) != 1:
        raise ValueError(
            f"sbatch: its answer has no job number that is sure: {_one_line(answer)!r}; where "
            "`squeue --me` shows the job, end it by scancel"
        )
    return numbers[-1]


def read_queue(has_jobs: bool) -> dict[str, QueuedJob]:
    """Ask what this user has queued or running, by ARRAY_TASK; where there are no jobs, nobody.

    Raises ValueError without an answer, and for one that cannot be read.
    """
    if not has_jobs:
        return {}
    answer = call_slurm(
        "squeue", "--me", "--array", "--noheader", f"--format={SQUEUE_FORMAT}"
    )
    queued = {}
    for line in answer.splitlines():
        if found := SQUEUE_LINE_PATTERN.fullmatch(line.strip()):
            queued[found[1]] = QueuedJob(found[2], found[3])
        elif re.match(r"\d+_", line):  # a job's, not a site's
            raise ValueError(f"squeue: {_one_line(line)!r} is no line of its format")
    return queued


def _one_line(answer: str) -> str:
    return " ".join(answer.split())[:200]


def current_array_task() -> str:
    """Name the array task that this process belongs to; empty outside of one."""
    job = os.environ.get("SLURM_ARRAY_JOB_ID")
    return f"{job}_{os.environ['SLURM_ARRAY_TASK_ID']}" if job else ""


def requeue_task(job: str) -> None:
    """Queue a task again. Raises ValueError where the site forbids that, or Slurm is down."""
    for patience_s in (5, 20, 60, 0):
        try:
            # by task: the job's own number may name the array
            call_slurm("scontrol", "requeue", job)
            time.sleep(REQUEUE_WAIT_S)
            return
        except ValueError:
            if not patience_s:
                raise
            time.sleep(patience_s)


def list_kept_options() -> list[str]:
    """List the variables that a submission takes from this environment."""
    return [f"{name}={os.environ[name]}" for name in KEPT_VARS if os.environ.get(name)]


def call_slurm(*command: str) -> str:
    """Return what a command of Slurm prints; raises ValueError if it is missing, fails or hangs."""
    name = command[0]
    if shutil.which(name) is None:
        raise ValueError(
            f"{name}: not found; submit from a login node of a Slurm cluster"
        )
    # without the variables that change what Slurm's commands do
    environment = {
        name: value
        for name, value in os.environ.items()
        if name in KEPT_VARS or not SLURM_OPTIONS_PATTERN.match(name)
    }
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=COMMAND_TIMEOUT_S,
            env=environment,
        )
    except subprocess.TimeoutExpired:
        raise ValueError(
            f"{name}: no answer in {COMMAND_TIMEOUT_S} s; see `squeue --me`, then try again"
        ) from None
    if done.returncode:
        # a site's own checks may speak on either stream
        said = _one_line(done.stderr or done.stdout) or f"exit status {done.returncode}"
        raise ValueError(f"{' '.join(command[:2])}: {said}")
    return done.stdout
