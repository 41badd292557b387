"""Processes end with those that they work for, whenever these end; locks tell who lives, with flock and without."""

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial

import pytest

from energynn import processes
from energynn.measure import machine
from tests.processes import wait_until

CHILD = "import os, sys, time; from energynn import processes\n{arm}\nprint(os.getpid(), flush=True); time.sleep(60)"


def python(program, **more):
    return subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, **more)


@pytest.mark.parametrize("arm", ["processes.end_with_parent(os.getppid())", "processes.end_with_parent()"])
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
    wait_until(lambda: not processes.lives(pid), 5, "for the child to end")


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
    rank = python(CHILD.format(arm="processes.end_with_parent()"), env=os.environ | {processes.STARTER_VARIABLE: name})
    if place == "here":
        assert rank.wait(20) == -signal.SIGKILL
    else:
        assert int(rank.stdout.readline()) == rank.pid
        rank.kill()
        rank.wait()


def test_what_a_process_forks_ends_with_it_but_not_with_a_thread():
    program = (
        "import multiprocessing, os, threading, time; from energynn import processes\n"
        "multiprocessing.set_start_method('fork')\n"
        "processes.end_forks_with_this()\n"
        "def grandchild():\n"
        "    inner = multiprocessing.Process(target=time.sleep, args=(60,)); inner.start()\n"
        "    print(f'{os.getpid()} {inner.pid}\\n', end='', flush=True); time.sleep(60)\n"
        "multiprocessing.Process(target=grandchild).start()\n"
        "def in_a_thread():\n"
        "    child = multiprocessing.Process(target=time.sleep, args=(60,)); child.start()\n"
        "    print(f'{child.pid}\\n', end='', flush=True)\n"
        "thread = threading.Thread(target=in_a_thread); thread.start(); thread.join(); time.sleep(60)\n"
    )
    parent = python(program)
    lines = sorted((parent.stdout.readline().split() for _ in range(2)), key=len)
    (of_thread,), forked = [[int(word) for word in line] for line in lines]
    assert processes.lives(of_thread)
    parent.kill()
    parent.wait()
    wait_until(lambda: not any(map(processes.lives, forked)), 5, "for what was forked to end")
    assert processes.lives(of_thread)
    os.kill(of_thread, signal.SIGKILL)


def crashes(path):
    os.kill(os.getpid(), signal.SIGSEGV)


def never_ends(path):
    path.write_text(str(os.getpid()))
    while True:
        signal.pause()


def refuses(path):
    raise ValueError(f"{path}: no file of ours")


@pytest.mark.parametrize("read, found", [(crashes, "crashed"), (never_ends, "found no end in 5 s")])
def test_a_file_that_crashes_its_reader_or_holds_it_for_ever_is_one_line(tmp_path, read, found):
    with pytest.raises(ValueError, match=rf"file: is damaged \(a process that read it {found}\); copy it again"):
        processes.require_an_end(read, tmp_path / "file", 5)
    for number in tmp_path.iterdir():
        assert not processes.lives(int(number.read_text())), "the reader is left behind"


def is_killed_once(path):
    if not path.exists():
        path.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_reader_that_somebody_kills_says_nothing_about_the_file(tmp_path):
    processes.require_an_end(is_killed_once, tmp_path / "file", 60)


def is_busy_for_ever(path):
    while True:
        pass


@pytest.mark.slow
def test_a_file_whose_reader_is_busy_for_ever_is_one_line(tmp_path):
    """However patient we are: its process has only so many seconds of a processor."""
    with pytest.raises(ValueError, match=f"found no end in {processes.BUSY_S} s"):
        processes.require_an_end(is_busy_for_ever, tmp_path / "file", 600)


@pytest.mark.parametrize("read", [refuses, repr])
def test_a_reader_that_ends_is_heard_later(tmp_path, read):
    processes.require_an_end(read, tmp_path / "file", 60)


def test_a_script_that_reads_such_a_file_runs_once(tmp_path):
    """A process that multiprocessing spawns would run it again: few scripts of others have a guard against that."""
    script = tmp_path / "script.py"
    script.write_text(
        "from energynn.measure import perun_adapter\nfrom energynn.processes import require_an_end\n"
        "print('once')\nrequire_an_end(perun_adapter.read_hdf5, 'nowhere.hdf5', 60)\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "once\n", "")


def kept(*words, **more):
    with open(os.devnull, "wb") as told:
        as_child = partial(processes.keep, os.getpid(), told.fileno())
        return subprocess.Popen(words, preexec_fn=as_child, close_fds=False, **more)


@pytest.mark.parametrize("script", ["exit 0", "exit 7", "kill -9 $$", "kill -15 $$", "kill -11 $$", "kill -40 $$"])
def test_a_keeper_ends_as_its_command_does(script):
    assert kept("sh", "-c", script).wait() == subprocess.call(["sh", "-c", script])


def test_a_keeper_changes_nothing_for_its_command(tmp_path):
    """Standard output, open files, signals, what it leaves in the background, and why it cannot be started."""
    with pytest.raises(PermissionError):
        kept(str(tmp_path))
    reader, writer = os.pipe()
    os.set_inheritable(writer, True)
    shows = "for what in SigBlk SigIgn; do grep $what /proc/self/status; done"
    script = f"{shows}; echo handed > /proc/self/fd/{writer}; tail -f /dev/null >&- & echo $!; exit 3"
    plain = subprocess.run(["sh", "-c", shows], stdout=subprocess.PIPE, text=True).stdout
    child = kept("sh", "-c", script, stdout=subprocess.PIPE, text=True)
    os.close(writer)
    *signals, left = child.stdout.read().split("\n")[:-1]
    assert child.wait() == 3 and os.read(reader, 10) == b"handed\n" and signals == plain.split("\n")[:-1]
    os.close(reader)
    time.sleep(0.2)
    os.kill(int(left), signal.SIGKILL)  # raises an error where it is gone


def test_a_keeper_hands_on_once_what_it_is_sent_and_nothing_of_a_terminal():
    count = "import signal, time; got = []\n"
    count += "for each in (2, 10, 15, 20): signal.signal(each, lambda number, _: got.append(number))\n"
    count += "print(flush=True)\nwhile 15 not in got: time.sleep(0.01)\nprint(got)"
    child = kept(sys.executable, "-S", "-c", count, stdout=subprocess.PIPE, text=True, start_new_session=True)
    child.stdout.readline()
    other = f"import os; os.killpg({child.pid}, 2); os.killpg({child.pid}, 20); os.killpg({child.pid}, 10)"
    subprocess.run([sys.executable, "-S", "-c", other], check=True)  # as a terminal does
    time.sleep(0.3)
    child.send_signal(signal.SIGUSR1)
    time.sleep(0.3)
    child.terminate()
    assert sorted(json.loads(child.stdout.read())) == [2, 10, 10, 15, 20] and child.wait() == 0


def test_a_keeper_whom_nobody_hears_any_more_ends_what_is_left():
    """As where `measure` is killed, and perun passes that on and is gone before the command is."""
    reader, writer = os.pipe()
    words, as_child = ["sh", "-c", "tail -f /dev/null & echo $!; wait"], partial(processes.keep, os.getpid(), writer)
    child = subprocess.Popen(words, preexec_fn=as_child, close_fds=False, stdout=subprocess.PIPE, text=True)
    left = int(child.stdout.readline())
    os.close(writer)
    os.close(reader)
    child.terminate()
    assert child.wait() == -signal.SIGTERM
    wait_until(lambda: not processes.lives(left), 5)


@pytest.mark.parametrize("answer", [OSError, AttributeError])
def test_where_nobody_can_tell_a_process_lives(monkeypatch, answer):
    """On gVisor's or an old kernel, and where Python was built for one: /proc tells, or it is not taken for dead."""

    def raises(process):
        raise answer

    monkeypatch.setattr(os, "pidfd_open", raises)
    assert processes.lives(1)
    child = python("input()", stdin=subprocess.PIPE)
    assert processes.lives(child.pid)
    child.stdin.close()
    wait_until(lambda: not processes.lives(child.pid), 20, "for one that nobody has waited for")
    child.wait()
    assert not processes.lives(child.pid)
    monkeypatch.setattr(processes, "_state_and_parent", lambda process: open("/no/such/file"))
    assert processes.lives(os.getpid()), "of another user, and hidden from us"


def test_a_kernel_without_a_name_for_its_start_has_that_of_the_host(monkeypatch, tmp_path):
    """As gVisor's: there no run could begin."""
    monkeypatch.setattr(processes, "BOOT_ID", tmp_path / "missing")
    name = processes.name_of_this_process()
    assert name.startswith(f"{os.uname().nodename} pid:[") and processes.is_alive(name)
    assert machine.describe_host()["boot_id"] == ""
