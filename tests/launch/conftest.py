"""A private Slurm of two nodes, for the tests that need a real one."""

import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from energynn.host.files import REPOSITORY
from energynn.launch import slurm, supervise
from tests import powercap
from tests.processes import (
    ENERGYNN,
    answer,
    can_be_executed,
    ended,
    typed,
    variables_without,
)

NODE_W = 300.0  # of each simulated node
HERE = Path(__file__).parent
TWO_NODES = str(HERE / "two-nodes.toml")
NEEDED = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "unshare")


class Cluster:
    """The Slurm under a folder, and energynn's commands on it."""

    def __init__(self, folder: Path):
        self.folder = folder
        hidden = (
            "PYTEST_CURRENT_TEST",
            "ENERGYNN_IMAGENET",
            supervise.HOST_LOCK_VARIABLE,
        )
        self.environment = variables_without(*hidden) | {
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

    def daemon(self, name):
        return psutil.Process(int((self.folder / "run" / f"{name}.pid").read_text()))

    def run(self, *command, check=True):
        done = ended(*command, env=self.environment, timeout=1200, cwd=REPOSITORY)
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done

    def energynn(self, *words, check=True):
        return self.run(*ENERGYNN, *typed(*words), check=check)


@pytest.fixture(scope="session")
def cluster():
    missing = [command for command in NEEDED if shutil.which(command) is None]
    if missing:
        pytest.skip(
            f"no {', '.join(missing)} (apt-get install slurmctld slurmd slurm-client munge)"
        )
    if os.getuid() or not can_be_executed("unshare", "--time", "true"):
        pytest.skip(
            "a private Slurm of two nodes needs root, and the right to make time namespaces"
        )
    # A short path: munge's socket must fit.
    folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
    made = Cluster(folder)
    with powercap.constant_power(folder / "powercap", NODE_W):
        try:
            made.script("start")
            yield made
        finally:
            made.script("stop")
            shutil.rmtree(folder, ignore_errors=True)


class FakeSlurm:
    """Stands for the programs of Slurm, as slurm.py starts them.

    queue: state and reason of each task; room: for so many. answers: what a program says, in place
    of what it would; None: it fails. given, variables: words and environment of its last call.
    """

    def __init__(self, runs_dir):
        self.runs_dir, self.queue, self.room, self.answers = runs_dir, {}, 99, {}
        self.given, self.variables = {}, {}

    def run(self, command, env, **_more):
        name, *words = command
        self.given[name], self.variables[name] = words, env
        if name in self.answers:
            said = self.answers[name]
        else:
            said = getattr(self, name)(*words)
        status = 1 if said is None else 0
        return subprocess.CompletedProcess(command, status, said, "no")

    def sbatch(self, *words):
        last = re.search(r"--array=0-(\d+)", " ".join(words))[1]
        number = 41 + len(self.queue)
        if len(self.queue) >= self.room:
            return None
        for task in range(int(last) + 1):
            self.queue[f"{number}_{task}"] = ("PENDING", "None")
        return f"{number}\n"

    def squeue(self, *_words):
        return "".join(f"{task}|{'|'.join(at)}\n" for task, at in self.queue.items())

    def scancel(self, *tasks):
        for task in tasks:
            del self.queue[task]
        return ""

    def energynn(self, command, *more, status=0):
        return answer(command, "--runs-dir", self.runs_dir, *more, status=status)

    def submit(self, *more, status=0):
        words = f"submit --system {TWO_NODES} -p workload fourcastnet"
        return self.energynn(words, *more, status=status)

    def submission(self):
        (path,) = self.runs_dir.glob("*/*/job/submission.json")
        return path


@pytest.fixture
def fake_slurm(tmp_path, monkeypatch):
    fake = FakeSlurm(tmp_path / "runs")
    late = subprocess.TimeoutExpired
    programs = SimpleNamespace(run=fake.run, TimeoutExpired=late)
    monkeypatch.setattr(slurm, "subprocess", programs)
    monkeypatch.setattr(slurm, "shutil", SimpleNamespace(which=str))
    return fake
