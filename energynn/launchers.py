"""How the ranks of a run are started, and what each launcher tells a rank of its place among
them.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from energynn.files import INSTALL

# in a batch job: the options with which srun starts the ranks
SRUN_VARIABLE = "ENERGYNN_SRUN"
PYTHON_VARIABLE = (
    # in a batch job: how srun calls Python, as "apptainer exec image.sif python"
    "ENERGYNN_PYTHON"
)
# launchers whose runs have no file of perun's
WITHOUT_PERUN = ("alone", "torchrun", "simulated")
# 75: exit status of a run that was interrupted and can go on
CAN_GO_ON = os.EX_TEMPFAIL
AFTER_A_LOSS = "its own last lines, or its host's log, say why; the run goes on from its checkpoint"


# -------------------------------------------------------------------------- what a rank is told


@dataclass(frozen=True)
class Variables:
    """Names the variables in which one launcher tells a process of its place; empty where it has
    none.
    """

    rank: str
    size: str
    ranks_of_host: str

    def are_set(self) -> bool:
        """Tell whether this launcher has started this process."""
        if self is SRUN and "SLURM_STEP_ID" not in os.environ:
            # the batch script itself is one process, whatever the number of tasks
            return False
        return {self.rank, self.size} <= os.environ.keys()


MPICH = Variables("PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS")  # and Slurm's pmi2
PMIX = Variables("PMIX_RANK", "SLURM_NTASKS", "SLURM_STEP_TASKS_PER_NODE")
OPEN_MPI = Variables(
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
)
TORCHRUN = Variables("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
# SLURM_STEP_TASKS_PER_NODE begins with the number of this host only where all hosts have the same
# number. No more is needed of it.
SRUN = Variables("SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_TASKS_PER_NODE")
OF_MPI = (MPICH, OPEN_MPI, PMIX)
ALL = (*OF_MPI, TORCHRUN, SRUN)


def started_by_mpi() -> bool:
    """Whether a launcher of MPI has started this process."""
    return any(variables.are_set() for variables in OF_MPI)


def rank() -> int:
    """The number of this process among the ranks of its run; 0 where no launcher has started it."""
    return (rank_and_size() or (0, 1))[0]


def rank_and_size() -> tuple[int, int] | None:
    """The number of this process and the number of all ranks; None where no launcher has started
    it.
    """
    for variables in ALL:
        if variables.are_set():
            return int(os.environ[variables.rank]), int(os.environ[variables.size])
    return None


def ranks_of_this_host() -> int:
    """How many ranks run on this host; 1 where no launcher says it."""
    told = [
        os.environ[variables.ranks_of_host]
        for variables in ALL
        if variables.ranks_of_host in os.environ
    ]
    return max((int(re.match(r"\d+", number)[0]) for number in told), default=1)


def stay_on_this_host(size: int) -> None:
    """Let gloo speak over the loopback where all ranks are here: without a network a host's name
    may lead nowhere.
    """
    if size == ranks_of_this_host() and Path("/sys/class/net/lo").exists():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def write_whole_lines() -> None:
    """Write each line by one call from now on, so that a launcher can label it and none is torn."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, write_through=False)


# ------------------------------------------------------------------------ how ranks are started


def python_of_ranks() -> list[str]:
    """The words that call Python for the ranks of a batch job: this Python, or the one in their
    container.
    """
    return shlex.split(os.path.expandvars(os.environ.get(PYTHON_VARIABLE, ""))) or [
        sys.executable
    ]


def find_launcher(devices: int) -> str:
    """Name what starts the ranks: ``srun`` in a batch job, else ``mpirun``.

    Where perun or MPI is missing it is ``torchrun``, or ``alone`` for one device; then only our own
    sampler measures, on this host. Raises ValueError for several devices in a batch job without.
    """
    in_batch_job = SRUN_VARIABLE in os.environ
    if in_batch_job and PYTHON_VARIABLE in os.environ:  # perun and MPI are in there
        return "srun"
    try:
        if importlib.util.find_spec("perun") is None:
            raise ValueError(f"no perun found; {INSTALL} installs it")
        if not in_batch_job:
            find_mpi()
        return "srun" if in_batch_job else "mpirun"
    except ValueError:
        if devices > 1 and in_batch_job:
            raise
    return "torchrun" if devices > 1 else "alone"


def find_mpi() -> str:
    """Path of mpirun; the environment's own comes before the site's.

    Raises ValueError with the remedy if there is no mpirun or mpi4py finds no MPI library.
    """
    remedy = f"{INSTALL} installs one, or load your site's module"
    own = Path(sys.executable).with_name("mpirun")
    mpirun = str(own) if own.exists() else shutil.which("mpirun")
    if mpirun is None:
        raise ValueError(f"no MPI found: mpirun is not on PATH; {remedy}")
    probe = subprocess.run(
        [sys.executable, "-c", "from mpi4py import MPI"], capture_output=True, text=True
    )
    if probe.returncode:
        lines = probe.stderr.strip().splitlines() or ["unknown error"]
        raise ValueError(f"no MPI library found by mpi4py ({lines[-1]}); {remedy}")
    return mpirun


def mpi_start(ranks: int) -> list[str]:
    """Begin an mpirun command that labels the ranks' lines.

    Open MPI has to be told that ranks may share and choose cores.
    """
    mpirun, options = find_mpi(), ["-l"]
    version = subprocess.run([mpirun, "--version"], capture_output=True, text=True)
    if "Open MPI" in version.stdout:
        options = ["--oversubscribe", "--bind-to", "none", "--tag-output"]
    return [mpirun, *options, "-n", str(ranks)]


def mpi_environment() -> dict[str, str]:
    """This environment; Open MPI may be run by root, as containers do."""
    return os.environ | {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }
