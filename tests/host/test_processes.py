"""Processes end with those that they work for, whenever these end."""

import os
import signal
import subprocess

import pytest

from energynn.host import processes
from tests.processes import lives, python, refused, wait_until

CHILD = "import os, sys, time; from energynn.host import processes\n{arm}\n"
CHILD += "print(os.getpid(), flush=True); time.sleep(60)"


@pytest.mark.parametrize(
    "arm", ["processes.end_with_parent(os.getppid())", "processes.end_with_parent()"]
)
def test_a_process_ends_with_its_parent(arm):
    child = CHILD.format(arm=arm)
    parent = python(
        "import subprocess, sys, time\n"
        f"child = subprocess.Popen([sys.executable, '-c', {child!r}], stdout=subprocess.PIPE)\n"
        "print(child.stdout.readline().decode(), flush=True); time.sleep(60)"
    )
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    wait_until(lambda: not lives(pid), 5, "for the child to end")


def test_an_orphan_ends_at_once():
    """Its parent has ended before it could ask for the signal: it asks who has adopted it."""
    gone = python("pass")
    gone.wait()
    orphan = python(CHILD.format(arm=f"processes.end_with_parent({gone.pid})"))
    assert orphan.wait(20) == -signal.SIGKILL and orphan.stdout.read() == ""


@pytest.mark.parametrize("place", ["here", "elsewhere"])
def test_a_rank_whose_starter_has_ended_ends_unless_it_cannot_know(place):
    gone = python("pass")
    gone.wait()
    here = processes.name_of_this_process().rpartition(" ")[0]
    name = f"{here if place == 'here' else 'another-boot pid:[1]'} {gone.pid}"
    rank = python(
        CHILD.format(arm="processes.end_with_parent()"),
        env=os.environ | {processes.STARTER_VARIABLE: name},
    )
    if place == "here":
        assert rank.wait(20) == -signal.SIGKILL
    else:
        assert int(rank.stdout.readline()) == rank.pid
        rank.kill()
        rank.wait()


def test_what_a_process_forks_ends_with_it_but_not_with_a_thread():
    program = (
        "import multiprocessing, os, threading, time; from energynn.host import processes\n"
        "multiprocessing.set_start_method('fork')\n"
        "processes.end_forks_with_this()\n"
        "def grandchild():\n"
        "    inner = multiprocessing.Process(target=time.sleep, args=(60,)); inner.start()\n"
        "    print(f'{os.getpid()} {inner.pid}\\n', end='', flush=True); time.sleep(60)\n"
        "multiprocessing.Process(target=grandchild).start()\n"
        "def in_a_thread():\n"
        "    child = multiprocessing.Process(target=time.sleep, args=(60,)); child.start()\n"
        "    print(f'{child.pid}\\n', end='', flush=True)\n"
        "thread = threading.Thread(target=in_a_thread)\n"
        "thread.start(); thread.join(); time.sleep(60)\n"
    )
    parent = python(program)
    lines = sorted((parent.stdout.readline().split() for _ in range(2)), key=len)
    (of_thread,), forked = [[int(word) for word in line] for line in lines]
    assert lives(of_thread)
    parent.kill()
    parent.wait()
    wait_until(lambda: not any(map(lives, forked)), 5, "for what was forked to end")
    assert lives(of_thread)
    os.kill(of_thread, signal.SIGKILL)


def crashes(path):
    os.kill(os.getpid(), signal.SIGSEGV)


def never_ends(path):
    path.write_text(str(os.getpid()))
    while True:
        signal.pause()


@pytest.mark.parametrize("read", [crashes, never_ends])
def test_a_file_that_crashes_its_reader_or_holds_it_for_ever_is_one_line(
    tmp_path, monkeypatch, read
):
    monkeypatch.setattr(processes, "READ_TIMEOUT_S", 5)
    refused(
        "file: is damaged .*copy it again",
        processes.require_readable_in_time,
        read,
        tmp_path / "file",
    )
    for number in tmp_path.iterdir():
        assert not lives(int(number.read_text())), "the reader is left behind"


def test_all_that_works_for_a_folder_is_ended(tmp_path):
    """Also what its parent has left behind, and what does not hear SIGTERM."""
    script = "trap '' TERM; (sleep 60; sleep 60) & echo; sleep 60"
    mark = os.environ | {processes.MARK_VARIABLE: str(tmp_path)}
    started = subprocess.Popen(["sh", "-c", script], env=mark, stdout=subprocess.PIPE)
    started.stdout.readline()
    assert len(processes.list_marked(tmp_path)) >= 2
    processes.end_marked(tmp_path)
    assert not processes.list_marked(tmp_path) and started.wait() == -signal.SIGKILL
