"""How the ranks of a run are started, and what each launcher tells a rank of its place among
them.
"""

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from energynn.host.files import INSTALLATION
from energynn.host.processes import own_environment

# in a batch job: the options with which srun starts the ranks
SRUN_VARIABLE = "ENERGYNN_SRUN"
# in a batch job: how srun calls Python, as "apptainer exec image.sif python"
PYTHON_VARIABLE = "ENERGYNN_PYTHON"
# of srun, and of a batch job
SRUN_SIZE_VARIABLE = "SLURM_NTASKS"
# launchers whose runs have no file of perun's
LAUNCHERS_WITHOUT_PERUN = ("alone", "torchrun", "simulated")
# 75: exit status of a run that was interrupted and can go on
RESUMABLE_STATUS = os.EX_TEMPFAIL
LOST_RANK_TEXT = "another rank is lost"
LOST_RANK_HINT = "its own last lines, or its host's log, say why"


# -------------------------------------------------------------------------- what a rank is told


class LauncherVariables(NamedTuple):
    """Names the variables in which one launcher tells a process of its place."""

    rank: str
    size: str
    ranks_of_host: str

    def are_set(self) -> bool:
        """Tell whether this launcher has started this process as one of several, or says so."""
        tasks = os.environ.get("SLURM_STEP_NUM_TASKS")
        # one process: a batch script, or a step of one task
        is_alone = "SLURM_STEP_ID" not in os.environ or tasks == "1"
        if self.size == SRUN_SIZE_VARIABLE and is_alone:
            return False  # the number is the job's
        return {self.rank, self.size} <= os.environ.keys()

    def place(self) -> tuple[int, int]:
        """Read the rank and the number of all; raises ValueError for what is no place."""
        rank = os.environ[self.rank]
        size = os.environ[self.size]
        if rank.isdecimal() and size.isdecimal() and int(rank) < int(size):
            return int(rank), int(size)
        raise ValueError(f"{self}: is no place among ranks; {self.remedy()}")

    def __str__(self) -> str:
        names = self.rank, self.size
        return ", ".join(f"{name}={os.environ[name]}" for name in names)

    def remedy(self) -> str:
        """Say how a process that no launcher has started gets rid of these variables."""
        return f"`unset {self.rank} {self.size}` where no launcher has started this"


# SLURM_STEP_TASKS_PER_NODE begins with the number of this host only where all hosts have the same
# number. No more is needed of it.
MPI_LAUNCHERS = (
    # MPICH, and Slurm's pmi2
    LauncherVariables("PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"),
    # Open MPI
    LauncherVariables(
        "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"
    ),
    # srun with PMIx
    LauncherVariables("PMIX_RANK", SRUN_SIZE_VARIABLE, "SLURM_STEP_TASKS_PER_NODE"),
)
LAUNCHERS = (
    *MPI_LAUNCHERS,
    # torchrun
    LauncherVariables("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    # srun
    LauncherVariables("SLURM_PROCID", SRUN_SIZE_VARIABLE, "SLURM_STEP_TASKS_PER_NODE"),
)
# What launchers tell ranks, and Kubernetes a pod, for which PET_ holds options of torchrun; what
# sites set for MPI (OMPI_MCA_) is none of it. PERUN_ would overrule our file of perun's options.
RANK_VARIABLE_PATTERN = re.compile(
    r"((LOCAL_|NODE_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|MPI_LOCAL.*"
    r"|(TORCHELASTIC|PET|PMI|HYDI|HYDRA|MPIEXEC|PERUN)_.*|(PMIX|OMPI|PRTE)_(?!MCA_).*)"
)
INTERACTIVE_STEP_ID = "4294967290"  # of salloc: a shell, not a task


def rank_and_size() -> tuple[int, int]:
    """Return the number of this process and the number of all ranks; (0, 1) where no launcher has
    started it.
    """
    variables = own_launcher()
    return variables.place() if variables else (0, 1)


def own_launcher() -> LauncherVariables | None:
    """Return the variables of the launcher that has started this process; None where none has."""
    return next((variables for variables in LAUNCHERS if variables.are_set()), None)


def count_ranks_of_this_host(otherwise: int = 1) -> int:
    """Count the ranks of this host; ``otherwise`` where no launcher says it."""
    told = [os.environ.get(variables.ranks_of_host, "") for variables in LAUNCHERS]
    numbers = re.findall(r"^\d+", "\n".join(told), re.MULTILINE)
    return max(map(int, numbers), default=otherwise)


def use_loopback_on_one_host(size: int) -> None:
    """Let gloo speak over the loopback where all ranks are here: without a network a host's name
    may lead nowhere.
    """
    if size == count_ranks_of_this_host() and Path("/sys/class/net/lo").exists():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def unlink_shared_memory() -> None:
    """Take the name of MPICH's shared memory away, when all ranks of this host have it mapped.

    It does so itself at its first collective. Of a rank that is killed before, the name would stay,
    and a job that Slurm queues again, with the same numbers, would take it for its own.
    """
    maps = Path("/proc/self/maps").read_text()
    for name in re.findall(r"/dev/shm/mpich_shm_\w+$", maps, re.MULTILINE):
        Path(name).unlink(missing_ok=True)


def buffer_output_by_line() -> None:
    """Write each line by one call from now on, so that a launcher can label it and none is torn."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, write_through=False)


# ------------------------------------------------------------------------ how ranks are started


def python_command_of_ranks() -> list[str]:
    """Return the words that call Python for the ranks of a batch job: this Python, or the one in
    their container.
    """
    return shlex.split(os.path.expandvars(os.environ.get(PYTHON_VARIABLE, ""))) or [
        sys.executable
    ]


def find_launcher(devices: int) -> str:
    """Name what starts the ranks: ``srun`` in a batch job, else ``mpirun``.

    Where perun or MPI is missing it is ``torchrun``, or ``alone`` for one device; then only our own
    sampler measures, on this host. Raises ValueError for several devices in a batch job without,
    and where there is no torch.
    """
    in_batch_job = SRUN_VARIABLE in os.environ
    if in_batch_job and PYTHON_VARIABLE in os.environ:  # perun and MPI are in there
        return "srun"
    require_package("torch")
    try:
        require_package("perun")
        if in_batch_job:
            return "srun"
        find_mpirun()
        return "mpirun"
    except ValueError:
        if devices > 1 and in_batch_job:
            raise
    return "torchrun" if devices > 1 else "alone"


def require_package(name: str) -> None:
    """Raise ValueError with the remedy where a package is not installed."""
    if importlib.util.find_spec(name) is None:
        raise ValueError(f"no {name} found; {INSTALLATION} installs it")


def find_mpirun() -> str:
    """Find mpirun; the environment's own comes before the site's.

    Raises ValueError with the remedy if there is no mpirun or mpi4py finds no MPI library.
    """
    remedy = f"{INSTALLATION} installs one, or load your site's module"
    own = Path(sys.executable).with_name("mpirun")
    mpirun = str(own) if own.exists() else shutil.which("mpirun")
    if mpirun is None:
        raise ValueError(f"no MPI found: mpirun is not on PATH; {remedy}")
    probe = subprocess.run(
        [sys.executable, "-P", "-c", "from mpi4py import MPI"],
        capture_output=True,
        text=True,
        env=mpi_environment(),
    )
    if probe.returncode:
        lines = probe.stderr.strip().splitlines() or ["unknown error"]
        raise ValueError(f"no MPI library found by mpi4py ({lines[-1]}); {remedy}")
    return mpirun


def mpirun_command(ranks: int) -> list[str]:
    """Begin an mpirun command that labels the ranks' lines.

    Open MPI has to be told that ranks may share and choose cores.
    """
    mpirun = find_mpirun()
    options = ["-l"]
    version = subprocess.run([mpirun, "--version"], capture_output=True, text=True)
    if "Open MPI" in version.stdout:
        options = ["--oversubscribe", "--bind-to", "none", "--tag-output"]
    return [mpirun, *options, "-n", str(ranks)]


def mpi_environment() -> dict[str, str]:
    """Return our environment for a launcher: what another one has told its ranks, or a shell still
    says, is not in it. Open MPI may be run by root, as containers do.

    On one node mpirun starts the ranks without Slurm, for which a step within a step would wait.
    """
    is_slurms = SRUN_VARIABLE in os.environ or count_slurm_nodes() > 1
    told = (
        RANK_VARIABLE_PATTERN
        if is_slurms
        else re.compile(
            rf"{RANK_VARIABLE_PATTERN.pattern}|(SLURM|PBS|LSB|LSF)_.*|PE_HOSTFILE"
        )
    )
    environment = own_environment()
    kept = {name: environment[name] for name in environment if not told.fullmatch(name)}
    return kept | {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def count_slurm_nodes() -> int:
    """Count the nodes that Slurm has given; 1 without it."""
    return int(os.environ.get("SLURM_NNODES") or 1)


def require_no_slurm_step() -> None:
    """Raise ValueError in a step of Slurm that can start no ranks: srun would wait for ever."""
    if os.environ.get("SLURM_STEP_ID", INTERACTIVE_STEP_ID) == INTERACTIVE_STEP_ID:
        return
    options = os.environ.get(SRUN_VARIABLE)
    is_one_task = os.environ.get("SLURM_STEP_NUM_TASKS", "1") == "1"
    can_start = count_slurm_nodes() == 1 if options is None else "--overlap" in options
    if not (is_one_task and can_start):
        raise ValueError(
            "this is a step of Slurm, where no ranks can be started: start the run by `srun -n 1 "
            f"-N 1` (with --overlap in {SRUN_VARIABLE}, where that is set), from salloc or a batch "
            "script"
        )
