"""Ranks run in processes of their own, started as a run starts them, because they set threads, cores and seeds."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from energynn import config as configuration
from energynn.files import REPOSITORY

HERE = Path(__file__).parent
MPIRUN = shutil.which("mpirun", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
# Open MPI wants to be told that the tests may run as root and on few cores; MPICH does not look at these.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
}


@dataclass
class Run:
    """What a few ranks left behind."""

    run_dir: Path
    status: int
    output: str

    @property
    def losses(self) -> list[float]:
        line = next(line for line in self.output.splitlines() if line.startswith("losses "))
        return json.loads(line.removeprefix("losses "))

    def events(self, rank: int = 0) -> list[dict]:
        return [json.loads(line) for line in (self.run_dir / f"events-rank{rank}.jsonl").read_text().splitlines()]


def start_ranks(ranks: int, script: str, *arguments: str, extra: dict | None = None) -> subprocess.CompletedProcess:
    if ranks > 1 and not MPIRUN:
        pytest.skip("no mpirun")
    command = [MPIRUN, "-n", str(ranks)] if ranks > 1 else []
    return subprocess.run(
        [*command, sys.executable, str(HERE / script), *arguments],
        env=os.environ | ENVIRONMENT | (extra or {}),
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )


@pytest.fixture(scope="session")
def run_ranks():
    """Run a script of this folder in so many ranks."""
    return start_ranks


@pytest.fixture(scope="session")
def train():
    """Train in so many ranks (as many as devices, if not told otherwise) with these parameters."""

    def start(
        run_dir: Path,
        workload: str,
        ranks: int | None = None,
        extra: dict | None = None,
        dtype: str = "float32",
        **parameters,
    ) -> Run:
        run_dir.mkdir(parents=True)
        config = configuration.make(workload, **parameters)
        settings = json.dumps(configuration.to_dict(config))
        done = start_ranks(ranks or config.devices, "rank_main.py", str(run_dir), settings, dtype, extra=extra)
        return Run(run_dir, done.returncode, done.stdout)

    return start
