"""A private Slurm of two nodes, for the tests that need a real one."""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from energynn.files import REPOSITORY
from energynn.launch import supervise
from tests import powercap

NODE_W = 300.0  # of each simulated node
HERE = Path(__file__).parent
NEEDED = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "unshare")


class Cluster:
    """The Slurm under a folder, and energynn's commands on it."""

    def __init__(self, folder: Path):
        self.folder = folder
        hidden = ("PYTEST_CURRENT_TEST", "ENERGYNN_IMAGENET", supervise.HOST_LOCK)
        self.environment = {
            name: value for name, value in os.environ.items() if name not in hidden
        } | {
            "SLURM_CONF": str(folder / "etc" / "slurm.conf"),
            "SLURM_BASE_PORT": str(17000 + os.getpid() % 1000 * 10),
            "ENERGYNN_POWERCAP": str(folder / "powercap"),
            "PYTHONPATH": str(REPOSITORY),
        }

    def script(self, command, *words):
        subprocess.run(
            [HERE / "slurm_nodes.sh", command, self.folder, *words],
            env=self.environment,
            check=True,
            stdout=subprocess.DEVNULL,
            timeout=60,
        )

    def run(self, *command, check=True):
        done = subprocess.run(
            command,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=1200,
            cwd=REPOSITORY,
        )
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done

    def energynn(self, *words, check=True):
        return self.run(
            sys.executable, "-m", "energynn.cli", *map(str, words), check=check
        )

    def wait_for(self, condition, what, seconds=300):
        """Wait patiently: the machine may do other work, too."""
        deadline = time.monotonic() + seconds
        while not (found := condition()):
            assert time.monotonic() < deadline, (
                f"waited {seconds} s for {what}\n{self.run('squeue', check=False).stdout}"
            )
            time.sleep(1)  # a look costs CPU time that the runs need
        return found


@pytest.fixture(scope="session")
def cluster():
    missing = [command for command in NEEDED if shutil.which(command) is None]
    if missing:
        pytest.skip(
            f"no {', '.join(missing)} (apt-get install slurmctld slurmd slurm-client munge)"
        )
    if (
        os.getuid()
        or subprocess.run(["unshare", "--uts", "true"], capture_output=True).returncode
    ):
        pytest.skip(
            "a private Slurm of two nodes needs root, and the right to make UTS namespaces"
        )
    # A short path: munge's socket must fit.
    folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
    made, counter = (
        Cluster(folder),
        powercap.constant_power(folder / "powercap", NODE_W),
    )
    try:
        made.script("start")
        yield made
    finally:
        made.script("stop")
        counter.kill()
        counter.wait()
        shutil.rmtree(folder, ignore_errors=True)
