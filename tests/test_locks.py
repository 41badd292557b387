"""Locks, on file systems with flock and without: who lives holds, who has died holds nothing."""

import errno
import fcntl
import json
import os
import subprocess
import sys

import pytest

from energynn import cli, files, records

WITHOUT_FLOCK = """
import errno, fcntl, os
def flock(file, kind):
    raise OSError(int(os.environ["FLOCK_ERROR"]), "no locks here")
fcntl.flock = flock
"""


@pytest.fixture(params=["flock", errno.ENOSYS, errno.EOPNOTSUPP])
def environment(request, tmp_path, monkeypatch):
    """The environment of a child process, and this process, with flock or without."""
    (tmp_path / "site").mkdir()
    if request.param == "flock":
        return dict(os.environ)
    (tmp_path / "site" / "sitecustomize.py").write_text(WITHOUT_FLOCK)

    def flock(_file, _kind):
        raise OSError(request.param, "no locks here")

    monkeypatch.setattr(fcntl, "flock", flock)
    python = os.pathsep.join([str(tmp_path / "site"), os.environ.get("PYTHONPATH", "")])
    return os.environ | {"PYTHONPATH": python, "FLOCK_ERROR": str(request.param)}


def holder(path, environment, **how):
    """Another process that holds a file until it is killed."""
    program = (
        "import pathlib, time; from energynn import files\n"
        f"held = files.lock(pathlib.Path({str(path)!r}), **{how!r})\n"
        "print(held is not None, flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", program]
    started = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    return started, started.stdout.readline() == "True\n"


def test_one_holds_until_it_closes_or_dies(tmp_path, environment):
    path = tmp_path / "run.json"
    path.write_text("{}")
    assert not files.is_locked(path) and not records.is_running(tmp_path)
    other, has_it = holder(path, environment)
    assert has_it and files.is_locked(path) and records.is_running(tmp_path)
    assert files.lock(path) is None and files.lock(path, shared=True) is None
    other.kill()
    other.wait()
    assert not files.is_locked(path) and not records.is_running(tmp_path)
    held = files.lock(path, wait=True)
    assert not holder_gets(path, environment) and files.is_locked(path)
    held.close()
    assert not files.is_locked(path) and holder_gets(path, environment)
    assert path.read_text() == "{}"


def holder_gets(path, environment, **how):
    other, has_it = holder(path, environment, **how)
    other.kill()
    other.wait()
    return has_it


def test_several_hold_together_until_the_last_has_gone(tmp_path, environment):
    path = tmp_path / ".ranks-host"
    ours = files.lock(path, shared=True, wait=True)
    other, has_it = holder(path, environment, shared=True, wait=True)
    assert has_it and files.lock(path) is None and files.is_locked(path)
    ours.close()
    assert files.is_locked(path)
    other.kill()
    other.wait()
    assert not files.is_locked(path) and files.lock(path) is not None


def test_an_owner_on_another_host_is_believed_and_named(tmp_path, monkeypatch, capsys):
    def flock(_file, _kind):
        raise OSError(errno.ENOSYS, "no locks here")

    monkeypatch.setattr(fcntl, "flock", flock)
    path = tmp_path / "local" / "run" / "run.json"
    path.parent.mkdir(parents=True)
    path.with_name(".run.json.owner").write_text("cn7 a-boot pid:[1] 77")
    assert files.lock(path) is None
    told = ".run.json.owner says that cn7 holds it; if nothing of it runs there, delete this file"
    assert told in capsys.readouterr().err
    assert cli.main(["status", "--json", "--runs-dir", str(tmp_path)]) == 0
    out, errors = capsys.readouterr()
    assert json.loads(out)["runs"][0]["state"] == "running" and told in errors
    path.with_name(".run.json.owner").write_text(f"{os.uname().nodename} an-earlier-boot pid:[1] {os.getpid()}")
    assert files.lock(path) is not None, "this host has started anew since"


def test_a_staged_folder_that_another_took_for_a_dead_ones_is_made_anew(tmp_path, environment, monkeypatch):
    """Between its file and the lock on it another process may look."""
    flock, seen = fcntl.flock, []

    def too_late(file, kind):
        if not seen:  # once: between the file and its lock
            seen.append(file)
            with files.staged(tmp_path / "runs"):
                pass
        return flock(file, kind)

    monkeypatch.setattr(fcntl, "flock", too_late)
    with files.staged(tmp_path / "runs") as folder:
        assert folder.is_dir() and files.is_locked(folder / "held", by_one=True)
        with files.staged(tmp_path / "runs") as other:
            assert folder.is_dir() and other != folder and (folder / "held").exists()
    assert seen and list((tmp_path / "runs").iterdir()) == []


def test_a_staged_folder_may_go_before_anything_is_in_it(tmp_path, environment, monkeypatch):
    lock, gone = files.lock, []

    def too_late(path, **how):
        if not gone:
            gone.append(path)
            path.parent.rmdir()
        return lock(path, **how)

    monkeypatch.setattr(files, "lock", too_late)
    with files.staged(tmp_path / "runs") as folder:
        assert gone and folder.is_dir() and files.is_locked(folder / "held", by_one=True)


def test_a_kill_before_a_staged_folder_is_held_leaves_nothing_for_ever(tmp_path, environment):
    left = tmp_path / "runs" / ".staged-killed"
    left.mkdir(parents=True)
    with files.staged(tmp_path / "runs"):
        assert not left.exists()
    (tmp_path / "runs" / ".staged-link").symlink_to(tmp_path / "site")
    (tmp_path / "runs" / ".staged-file").touch()
    with files.staged(tmp_path / "runs"):
        assert not (tmp_path / "site" / "held").exists(), "what is linked is none of ours"


STAGES = """
import sys
from pathlib import Path
from energynn import files
for _ in range(600):
    with files.staged(Path(sys.argv[1])) as folder:
        assert (folder / "held").exists() and files.is_locked(folder / "held", by_one=True)
"""


def test_many_processes_stage_at_once_and_none_loses_its_folder(tmp_path, environment):
    command = [sys.executable, "-c", STAGES, str(tmp_path / "runs")]
    started = [subprocess.Popen(command, env=environment) for _ in range(4)]
    assert [process.wait() for process in started] == [0] * 4
    with files.staged(tmp_path / "runs"):
        pass
    assert list((tmp_path / "runs").iterdir()) == []


@pytest.mark.slow
def test_a_command_and_a_run_are_measured_without_flock(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_FLOCK)
    environment = os.environ | {"FLOCK_ERROR": str(errno.ENOSYS)}
    environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    energynn = [sys.executable, "-m", "energynn.cli"]
    runs = ["--runs-dir", str(tmp_path / "runs")]
    small = "workload=fourcastnet embed_dim=32 depth=1 epochs=4 devices=2".split()
    parameters = [word for each in small for word in ("-p", *each.split("="))]
    for words, launched in (
        (["measure", "--out", str(tmp_path / "runs" / "one"), "--", "sleep", "1"], {}),
        (["measure", "--out", str(tmp_path / "runs" / "two"), "--", "sleep", "1"], {"PMI_RANK": "0", "PMI_SIZE": "1"}),
        (["run", *runs, *parameters], {}),
    ):
        done = subprocess.run(
            [*energynn, *words],
            env=environment | launched,
            capture_output=True,
            text=True,
            timeout=280,
            cwd=files.REPOSITORY,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    assert records.check(tmp_path / "runs") == []
