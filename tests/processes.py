"""Processes as the tests that kill them see them."""

import contextlib
import io
import json
import os
import shlex
import shutil
import subprocess
import sys
import time

import psutil
import pytest

from energynn import cli
from energynn.host.files import REPOSITORY

ENERGYNN = [sys.executable, "-m", "energynn.cli"]


def ended(*words, **more):
    """Execute a program, and wait for its end."""
    return subprocess.run(list(map(str, words)), capture_output=True, text=True, **more)


def typed(command="", *words):
    """The words of a command of ours as it is typed, and further ones that stand as they are."""
    return [*shlex.split(command), *map(str, words)]


def energynn(*words, **more):
    """Execute a command in a process of its own, and wait for its end."""
    return ended(*ENERGYNN, *typed(*words), **more)


def can_be_executed(*words) -> bool:
    """Whether a program is there, and ends well."""
    return shutil.which(words[0]) is not None and not ended(*words).returncode


def printed(*words, **more) -> str:
    """Return what a program prints, which ends well."""
    done = ended(*words, **more)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def python(program, **more) -> subprocess.Popen:
    """Start a program of Python that prints."""
    words = [sys.executable, "-c", program]
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True, **more)


def variables_without(*beginnings) -> dict[str, str]:
    """The environment without the variables of these beginnings."""
    return {
        name: word
        for name, word in os.environ.items()
        if not name.startswith(beginnings)
    }


FAKES = REPOSITORY / "tests/measure/fake_sensors"
OF_OTHERS = ("PMI_", "CUDA_", "ENERGYNN_READY")


def with_gpus(gpus, *folders, **more):
    """The environment of a machine with these fake GPUs; modules in folders go before others."""
    clean = variables_without(*OF_OTHERS)
    places = [*folders, FAKES, REPOSITORY, os.environ.get("PYTHONPATH", "")]
    fake = {"FAKE_GPUS": json.dumps(list(gpus))}
    return clean | fake | {"PYTHONPATH": os.pathsep.join(map(str, places))} | more


def write_program(path, lines):
    """Write a shell script that can be executed."""
    path.write_text(f"#!/bin/sh\n{lines}\n")
    path.chmod(0o755)


def said(*words) -> tuple[int, str, str]:
    """Return exit status, output and errors of a command, within this process."""
    out, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        status = cli.main(typed(*words))
    return status, out.getvalue(), errors.getvalue()


def answer(*words, status=0) -> str:
    """Return output and errors of a command, within this process, that ends with a status."""
    found, out, errors = said(*words)
    assert found == status, out + errors
    return out + errors


def refusal(*words) -> str:
    """Return the one line with which a command, within this process, refuses."""
    status, out, errors = said(*words)
    assert (status, out, errors.count("\n")) == (2, "", 1), out + errors
    return errors


def told(*words, status=0):
    """Return what a command, within this process, tells a program."""
    return json.loads(answer(*words, "--json", status=status))


def refused(words, function, *given, **named):
    """Expect that a function refuses what it is given, in one line that holds these words."""
    with pytest.raises(ValueError, match=words) as error:
        function(*given, **named)
    assert "\n" not in str(error.value)


def wait_until(condition, timeout_s=180, what="", pause_s=0.05):
    """Wait for a condition, or fail; a look may cost CPU time that others need."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s} s in vain {what}"
        time.sleep(pause_s)


def processes_of(folder):
    """Everything that carries a folder in its command line or its variables, except this test."""
    found = []
    for process in psutil.process_iter():
        try:
            words = [*process.cmdline(), *process.environ().values()]
            alive = process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            continue
        if str(folder) in " ".join(words) and process.pid != os.getpid() and alive:
            found.append(process)
    return found


def wait_until_gone(folder, timeout_s=5):
    """Wait until nothing is left that carries a folder."""
    left = f"for {processes_of(folder)} to end"
    wait_until(lambda: not processes_of(folder), timeout_s, left)


def kill(folder):
    """Let nothing be left that carries a folder."""
    for process in processes_of(folder):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def lives(number):
    """Whether a process of this host has not ended."""
    try:
        return psutil.Process(number).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
