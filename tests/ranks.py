"""Ranks for tests, forked from one process that has imported torch: each import takes longer
than a short training.

They find each other as torchrun's ranks do. Ranks that real launchers start have tests of their
own (launch/test_launch.py).
"""

import gc
import multiprocessing
import multiprocessing.connection
import multiprocessing.reduction
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

from energynn.host.files import REPOSITORY

# OpenMP reads its number of threads once, when torch is imported.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
}
PATIENCE_S = 300  # until ranks count as hanging
GRACE_S = 20  # in which the others end by themselves when one has failed
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    ["energynn.train.resnet50", "energynn.train.fourcastnet", "energynn.train.session"]
)


class Ranks:
    """A script in so many ranks, which go on while the test looks at them."""

    def __init__(
        self, ranks: int, script: str | Path, *arguments: str, extra: dict | None = None
    ):
        self.output = tempfile.TemporaryFile("w+", errors="replace")
        self.command = [str(script), *map(str, arguments)]
        environment = os.environ | ENVIRONMENT | (extra or {})
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        self.processes = []
        for rank in range(ranks):
            if ranks > 1:
                environment |= dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
                environment |= dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))
                sizes = ("WORLD_SIZE", "LOCAL_WORLD_SIZE")
                environment |= dict.fromkeys(sizes, str(ranks))
            self.processes.append(self._fork(environment))

    def _fork(self, environment: dict[str, str]):
        descriptor = multiprocessing.reduction.DupFd(self.output.fileno())
        process = FORKS.Process(
            target=_run, args=(self.command, environment, descriptor)
        )
        with mock.patch.dict(
            os.environ, ENVIRONMENT
        ):  # of the server, which the first fork starts
            process.start()
        return process

    def wait(self) -> subprocess.CompletedProcess:
        """Until all have ended; when one has failed, those that do not end by themselves are
        ended. Returns the first status but 0, and what all of them printed.
        """
        deadline = time.monotonic() + PATIENCE_S
        while alive := [each.sentinel for each in self.processes if each.is_alive()]:
            if any(process.exitcode for process in self.processes):
                deadline = min(deadline, time.monotonic() + GRACE_S)
            if time.monotonic() > deadline:
                for process in self.processes:
                    process.kill()
            multiprocessing.connection.wait(alive, 1.0)
        self.output.seek(0)
        failed = [process.exitcode for process in self.processes if process.exitcode]
        return subprocess.CompletedProcess(
            self.command, failed[0] if failed else 0, self.output.read()
        )


def _run(command: list[str], environment: dict[str, str], output) -> None:
    """Be a fresh ``python SCRIPT ARGUMENTS``, as far as a script can see."""
    descriptor = output.detach()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(REPOSITORY)
    gc.freeze()  # what the server has imported is nobody's garbage
    # of the loader's workers, as in a process of its own
    multiprocessing.set_start_method("fork", force=True)
    sys.argv = command
    sys.path.insert(0, str(Path(command[0]).parent))
    runpy.run_path(command[0], run_name="__main__")
