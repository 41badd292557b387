"""How a process ends with the one that it works for, whatever ends that one, from its first instruction on."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import multiprocessing
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path
from resource import RLIMIT_CPU, setrlimit

STARTER_VARIABLE = "ENERGYNN_STARTER"  # who started the ranks of a run, as ``name_of_this_process`` tells it
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
SET_PDEATHSIG, SET_DUMPABLE, SET_CHILD_SUBREAPER = 1, 4, 36  # numbers of Linux's prctl
GRACE_S = 2.0  # between asking processes to end and killing them
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # numbers of glibc's mallopt, which must be set together
BUSY_S = 15  # of a processor: the largest file of others takes seconds
RARELY = 100_000  # objects between two looks for garbage; the default of 700 costs a twentieth of a check

_libc = ctypes.CDLL(None, use_errno=True)  # loaded before a fork: a process that was just forked should load nothing
_forker = 0  # the process that forks, as its child will find it


def end_with_parent(parent: int | None = None, with_signal: int = signal.SIGKILL) -> None:
    """Have Linux send this process a signal when its parent ends, and send it now if that has ended already.

    ``parent`` is the number of the process that started this one, taken before it did: afterwards an orphan cannot
    tell its parent from who has adopted it. Where a launcher stands in between, the variable ENERGYNN_STARTER names
    who started the launcher; its end takes the launcher along, so it is asked instead.
    """
    _libc.prctl(SET_PDEATHSIG, with_signal, 0, 0, 0)
    is_orphan = os.getppid() != parent if parent else not is_alive(os.environ.get(STARTER_VARIABLE, ""))
    if is_orphan:
        os.kill(os.getpid(), with_signal)


def end_forks_with_this() -> None:
    """Have every process that this one forks from now on end with it; what it starts by exec, too, as a rule.

    A fork from a thread is left alone: Linux would end it with the thread.
    """
    os.register_at_fork(before=_remember_forker, after_in_child=_end_with_forker)


def _remember_forker() -> None:
    global _forker
    _forker = os.getpid() if threading.current_thread() is threading.main_thread() else 0


def _end_with_forker() -> None:
    if _forker:
        end_with_parent(_forker)


def on_all_cores(function: Callable, items: list, at_once: int = 1) -> list:
    """What a function of a module makes of each item, in their order, by a process for each core, some items at once.

    The processes end with this one. None is started on one core, or by such a process itself.
    """
    cores = min(len(os.sched_getaffinity(0)), len(items))
    if cores < 2 or multiprocessing.parent_process() is not None:
        return [function(item) for item in items]
    from concurrent.futures import ProcessPoolExecutor  # samplers and ranks need none

    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(cores, context, _work_for, (os.getpid(),)) as processes:
        return list(processes.map(function, items, chunksize=at_once))


def _work_for(parent: int) -> None:
    """Begin a process that works off a list. It keeps the memory that it frees: the next item needs as much."""
    end_with_parent(parent)
    gc.set_threshold(RARELY)
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy, imported after this, has one core
    if hasattr(_libc, "mallopt"):
        _libc.mallopt(TRIM_THRESHOLD, 2**28)
        _libc.mallopt(MMAP_THRESHOLD, 2**25)


def require_an_end(read: Callable, path: Path, patience_s: float) -> None:
    """Have a process of its own read a foreign file first: HDF5 crashes on some damaged ones, or never ends.

    Raises ValueError where that process crashes, or has no end after so many seconds, or ``BUSY_S`` of a processor;
    not for what the file holds. ``read`` is a function of a module. No signal for our group reaches that process: what
    stops this one must not seem a damaged file.
    """
    program = f"import sys; sys.path = {list(map(str, sys.path))}; from {read.__module__} import {read.__name__} as it"
    program += f"; from energynn import processes; processes.try_to_read(it, {str(path)!r}, {os.getpid()})"
    command = [sys.executable, "-c", program]
    try:
        for _ in range(2):  # one that is killed says nothing about the file
            done = subprocess.run(command, stderr=subprocess.DEVNULL, start_new_session=True, timeout=patience_s)
            if done.returncode not in (-signal.SIGKILL, -signal.SIGTERM):
                break
        found = {0: "", -signal.SIGXCPU: f"found no end in {BUSY_S} s"}.get(done.returncode, "crashed")
    except subprocess.TimeoutExpired:
        found = f"found no end in {patience_s:g} s"
    if found:
        raise ValueError(f"{path}: is damaged (a process that read it {found}); copy it again")


def try_to_read(read: Callable, path: str, parent: int) -> None:
    """What the process of ``require_an_end`` does."""
    end_with_parent(parent)
    setrlimit(RLIMIT_CPU, (BUSY_S, BUSY_S + 1))
    with contextlib.suppress(ValueError):
        read(Path(path))


def adopt_orphans() -> None:
    """Become the parent of every process below this one whose parent ends, so that none can be left behind."""
    _libc.prctl(SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def below(spared: Collection[int] = ()) -> list[int]:
    """Numbers of all processes that live below this one, but for some and what is below those."""
    parent_of = {}
    for process in {int(name) for name in os.listdir("/proc") if name.isdigit()}.difference(spared):
        with contextlib.suppress(OSError):  # it may have ended
            state, parent = _state_and_parent(process)
            if state != "Z":
                parent_of[process] = int(parent)
    family = [os.getpid()]
    for process in family:  # grows by its children
        family += [child for child, parent in parent_of.items() if parent == process]
    return family[1:]


def _state_and_parent(process: int) -> list[str]:
    with open(f"/proc/{process}/stat", errors="replace") as file:
        return file.read().rpartition(")")[2].split()[:2]


def end_below(asked: list[int], spared: Collection[int] = ()) -> None:
    """End every process below this one, but for some: politely those that are asked to, after a while all."""
    _send(signal.SIGTERM, asked)
    deadline = time.monotonic() + GRACE_S
    # One that is begun while we list them, by one that ends before we come to it, is seen by the second look.
    while (left := below(spared) or below(spared)) and time.monotonic() < deadline + 1:  # some are another user's
        if time.monotonic() > deadline:
            _send(signal.SIGKILL, left)
        time.sleep(0.05)


def _send(number: int, processes: list[int]) -> None:
    for process in processes:
        with contextlib.suppress(OSError):  # ended while we looked, or another user's
            os.kill(process, number)


def keep(parent: int, tell: int) -> None:
    """Have the command that a ``preexec_fn`` begins run below this process, its keeper, which ends as the command does.

    The keeper hands on what ``parent`` sends; what a terminal sends comes to the command by itself. It adopts what the
    command leaves behind, and ends that, too, if ``parent`` is gone or the command was ended by a signal or asked to.
    Into the pipe ``tell`` it writes the command's number, and the monotonic time of its end in ns, 8 bytes each.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    on_end = signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # where it is ignored, nobody learns of an end
    adopt_orphans()
    keeper = os.getpid()
    if command := os.fork():
        try:
            _keep(command, parent, tell)
        finally:
            os.kill(keeper, signal.SIGKILL)
    signal.signal(signal.SIGCHLD, on_end)
    end_with_parent(keeper, signal.SIGTERM)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _keep(command: int, parent: int, tell: int) -> None:
    _tell(tell, command)
    # Locks, and the pipe by which subprocess learns that the command runs.
    os.closerange(3, tell)
    os.closerange(tell + 1, max(map(int, os.listdir("/proc/self/fd"))) + 1)
    end_with_parent(parent, signal.SIGTERM)
    asked, (ended, status) = False, (0, 0)
    while ended != command:
        if not ended:
            sent = signal.sigwaitinfo(signal.valid_signals())
            if os.getppid() != parent:
                return end_below(below())
            if sent.si_pid == parent:
                _send(sent.si_signo, [command])
                asked = asked or sent.si_signo in (signal.SIGTERM, signal.SIGHUP)
        ended, status = os.waitpid(-1, os.WNOHANG)
    _tell(tell, time.monotonic_ns())
    if asked or os.WIFSIGNALED(status):
        end_below(below())
    if os.WIFEXITED(status):
        os._exit(os.WEXITSTATUS(status))
    _libc.prctl(SET_DUMPABLE, 0, 0, 0, 0)  # the command's core is enough
    signal.signal(os.WTERMSIG(status), signal.SIG_DFL)  # raises OSError for SIGKILL, by which we end then
    os.kill(os.getpid(), os.WTERMSIG(status))
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _tell(pipe: int, number: int) -> None:
    try:
        os.write(pipe, number.to_bytes(8, "little"))
    except BrokenPipeError:  # who would read it is dead; the signal that says so is none of the command's
        signal.sigtimedwait({signal.SIGPIPE}, 0)


def name_of_this_process() -> str:
    """Boot, process namespace and number: what names this process to another one, which may run elsewhere."""
    return f"{_place()} {os.getpid()}"


def is_alive(name: str) -> bool:
    """Whether the process of a name as ``name_of_this_process`` gives it lives, as far as this one can see."""
    place, _, number = name.rpartition(" ")
    return place != _place() or lives(int(number))


def _place() -> str:
    return f"{boot_id() or os.uname().nodename} {os.readlink('/proc/self/ns/pid')}"


def boot_id() -> str:
    """What names this start of the host's kernel; nothing where it tells none, as gVisor's."""
    return BOOT_ID.read_text().strip() if BOOT_ID.exists() else ""


def lives(process: int) -> bool:
    """Whether a process of this host has not ended; one that nobody has waited for yet has."""
    try:
        file = os.pidfd_open(process)
    except ProcessLookupError:
        return False
    except (OSError, AttributeError):  # gVisor's kernel, one before 5.3, or a Python built for one
        return _is_listed(process)
    try:
        return not select.select([file], [], [], 0)[0]
    finally:
        os.close(file)


def _is_listed(process: int) -> bool:
    """The same as far as /proc tells, which may hide processes of others."""
    try:
        os.kill(process, 0)
        return _state_and_parent(process)[0] != "Z"
    except ProcessLookupError:
        return False
    except OSError:
        return True
