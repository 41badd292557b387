"""How the ranks of a run are started, and what each launcher tells a rank of its world."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

SRUN_VARIABLE = "ENERGYNN_SRUN"  # in a batch job: the options with which srun starts the ranks
WITHOUT_PERUN = ("alone", "torchrun")  # launchers whose ranks are measured by our own sampler only


def launcher(devices: int) -> str:
    """``srun`` in a batch job, else ``mpirun``; where perun or MPI is missing ``torchrun``, or one device ``alone``.

    Ranks of srun and mpirun run under perun. Else only our own sampler measures, on this host; so in a batch job
    several devices need them: ValueError with the remedy.
    """
    try:
        if importlib.util.find_spec("perun") is None:
            raise ValueError("no perun found; `make train-env` installs it")
        if SRUN_VARIABLE in os.environ:
            return "srun"
        find_mpi()
    except ValueError:
        if devices > 1 and SRUN_VARIABLE in os.environ:
            raise
        return "torchrun" if devices > 1 else "alone"
    return "mpirun"


def find_mpi() -> tuple[str, str]:
    """Path of mpirun and its flavour, ``mpich`` or ``openmpi``; the environment's own comes before the site's.

    Raises ValueError with the remedy if there is no mpirun or mpi4py finds no MPI library.
    """
    remedy = "`make train-env` installs one, or load your site's module"
    own = Path(sys.executable).with_name("mpirun")
    mpirun = str(own) if own.exists() else shutil.which("mpirun")
    if mpirun is None:
        raise ValueError(f"no MPI found: mpirun is not on PATH; {remedy}")
    probe = subprocess.run([sys.executable, "-c", "from mpi4py import MPI"], capture_output=True, text=True)
    if probe.returncode:
        last = (probe.stderr.strip().splitlines() or ["unknown error"])[-1]
        raise ValueError(f"no MPI library found by mpi4py ({last}); {remedy}")
    version = subprocess.run([mpirun, "--version"], capture_output=True, text=True).stdout
    return mpirun, "openmpi" if "Open MPI" in version else "mpich"


def mpi_start(mpirun: str, flavour: str, ranks: int) -> list[str]:
    """The beginning of an mpirun command; Open MPI has to be told that ranks may share and choose cores."""
    options = ["--oversubscribe", "--bind-to", "none"] if flavour == "openmpi" else []
    return [mpirun, *options, "-n", str(ranks)]


def mpi_environment() -> dict[str, str]:
    """This environment, with Open MPI content to be run by root, as containers do."""
    return os.environ | {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
