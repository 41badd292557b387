"""Start, find, count and end processes of ours; read a stranger's file in one of its own."""

import contextlib
import ctypes
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from energynn.host.files import IS_CHECKOUT, PACKAGE_FOLDER

# Python for processes of ours: without -P, -c and -m find modules in the working folder first
OWN_PYTHON = (sys.executable, "-P")
# who started the ranks, as ``name_of_this_process`` tells it
STARTER_VARIABLE = "ENERGYNN_STARTER"
# the folder for which a process and all that it starts work
MARK_VARIABLE = "ENERGYNN_MARK"
SET_PDEATHSIG = 1  # number of Linux's prctl
TERMINATION_GRACE_S = 2.0  # in which processes may end before they are killed
READ_TIMEOUT_S = 120.0  # for a foreign file; the largest that is accepted takes seconds
STUCK_LIMIT_S = 30.0  # for one that even SIGKILL does not end, as it waits for a disk

# loaded before a fork: a fork should load nothing
_c_library = ctypes.CDLL(None, use_errno=True)
_forking_process_id = 0  # the process that forks, as its child will find it


def own_environment() -> dict[str, str]:
    """Return this environment for a process of ours and all that it starts, which then import
    nothing from the folder that they happen to be in.

    What a user named on PYTHONPATH, and as a folder of ours, stays, as absolute paths: an empty
    entry is the working folder.
    """
    named = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    entries = [os.path.abspath(entry) for entry in named if entry]
    if IS_CHECKOUT:  # of this one, not of another that is named, too
        entries.insert(0, str(PACKAGE_FOLDER.parent))
    folders = {
        name: os.path.abspath(text)
        for name, text in os.environ.items()
        if name.startswith("ENERGYNN_") and os.path.isdir(text)
    }
    path = os.pathsep.join(dict.fromkeys(entries))
    return os.environ | folders | {"PYTHONPATH": path, "PYTHONSAFEPATH": "1"}


def end_with_parent(
    parent: int | None = None, with_signal: int = signal.SIGKILL
) -> None:
    """Have Linux send this process a signal when its parent ends, now if that has ended already.

    ``parent`` is the number of the process that started this one, taken before it did: afterwards
    an orphan cannot tell its parent from who has adopted it. Where a launcher stands in between,
    the variable ENERGYNN_STARTER names who started the launcher; that one is asked instead.
    """
    _c_library.prctl(SET_PDEATHSIG, with_signal, 0, 0, 0)
    starter = os.environ.get(STARTER_VARIABLE, "")
    is_orphan = os.getppid() != parent if parent else not is_named_alive(starter)
    if is_orphan:
        os.kill(os.getpid(), with_signal)


def end_forks_with_this() -> None:
    """Have every process that this one forks from now on end with it.

    A fork from a thread is left alone: Linux would end it with the thread.
    """
    os.register_at_fork(
        before=_remember_forking_process, after_in_child=_end_with_forking_process
    )


def _remember_forking_process() -> None:
    global _forking_process_id
    is_main = threading.current_thread() is threading.main_thread()
    _forking_process_id = os.getpid() if is_main else 0


def _end_with_forking_process() -> None:
    if _forking_process_id:
        end_with_parent(_forking_process_id)


def list_marked(folder: Path) -> list[psutil.Process]:
    """List the other processes that work for a folder, whoever their parent is now."""
    mark = (MARK_VARIABLE, str(folder))
    return [
        process
        for process in psutil.process_iter(["environ", "name"])
        # None: another user's
        if process.pid != os.getpid()
        and mark in (process.info["environ"] or {}).items()
    ]


def is_alive(process: psutil.Process) -> bool:
    """Tell whether a process goes on; False for a zombie, and if its PID has a new owner."""
    with contextlib.suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def cpu_times() -> dict[str, float]:
    """Return seconds of CPU time so far: of this process and all below it, and of this host."""
    this = psutil.Process()
    own_s = 0.0
    for process in [this, *this.children(recursive=True)]:
        with contextlib.suppress(psutil.Error):  # it has ended
            # and of its children that have ended
            own_s += sum(process.cpu_times()[:4])
    return {"cpu_own_s": own_s, "cpu_host_s": busy_core_seconds()}


def busy_core_seconds() -> float:
    """Return the time that all cores have been busy since boot, in core-seconds."""
    # guest time is part of user; stolen time is somebody else's
    times = psutil.cpu_times()
    return round(times.user + times.nice + times.system + times.irq + times.softirq, 2)


def ask_marked_to_end(folder: Path) -> None:
    """Send SIGTERM to all processes that work for a folder."""
    for process in list_marked(folder):
        with contextlib.suppress(psutil.Error):
            process.terminate()


def end_marked(folder: Path, grace_s: float = TERMINATION_GRACE_S) -> None:
    """Give all processes that work for a folder ``grace_s`` to end, then kill them.

    Give up after ``STUCK_LIMIT_S``.
    """
    begun_s = time.monotonic()
    # A process that is forked while they are listed is seen by the second look.
    while left := list_marked(folder) or list_marked(folder):
        if time.monotonic() > begun_s + STUCK_LIMIT_S:
            return
        if time.monotonic() > begun_s + grace_s:
            for process in left:
                with contextlib.suppress(psutil.Error):
                    process.kill()
        time.sleep(0.05)


def require_readable_in_time(read: Callable, path: Path) -> None:
    """Have another process read a foreign file first: HDF5 crashes on some, or never ends.

    Raises ValueError where that process crashes or takes ``READ_TIMEOUT_S``; not for what the file
    holds. ``read`` is a function of a module.
    """
    program = (
        f"from {read.__module__} import {read.__name__} as read\n"
        "from energynn.host import processes\n"
        f"processes.read_for_parent(read, {str(path)!r}, {os.getpid()})"
    )
    try:
        subprocess.run(
            [*OWN_PYTHON, "-c", program],
            stderr=subprocess.DEVNULL,
            timeout=READ_TIMEOUT_S,
            check=True,
            env=own_environment(),
        )
    except subprocess.SubprocessError as error:
        raise ValueError(
            f"{path}: is damaged (a process that read it crashed or found no end); "
            "copy it again"
        ) from error


def read_for_parent(read: Callable, path: str, parent: int) -> None:
    """Read a file in the process of ``require_readable_in_time``."""
    end_with_parent(parent)
    with contextlib.suppress(ValueError):
        read(Path(path))


def name_of_this_process() -> str:
    """Name this process by host, process namespace and number to another, which may be
    elsewhere.
    """
    return f"{_process_namespace()} {os.getpid()}"


def is_named_alive(name: str) -> bool:
    """Tell whether a process named by ``name_of_this_process`` lives, as far as this one sees."""
    place, _, number = name.rpartition(" ")
    if place != _process_namespace():
        return True
    with contextlib.suppress(psutil.NoSuchProcess):
        return is_alive(psutil.Process(int(number)))
    return False


def _process_namespace() -> str:
    return f"{platform.node()} {os.readlink('/proc/self/ns/pid')}"
