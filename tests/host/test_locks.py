"""Locks tell who lives: who holds lives, and who has died holds nothing."""

import errno
import fcntl

from energynn import records
from energynn.host import files
from tests.processes import python, refused


def holder(path, **how):
    """Start another process that holds a file until it is killed; does it get it?"""
    program = (
        "import pathlib, time; from energynn.host import files\n"
        f"held = files.lock(pathlib.Path({str(path)!r}), **{how!r})\n"
        "print(held is not None, flush=True); time.sleep(60)"
    )
    started = python(program)
    return started, started.stdout.readline() == "True\n"


def end(process):
    process.kill()
    process.wait()


def test_one_holds_until_it_closes_or_dies(tmp_path):
    path = tmp_path / "run.json"
    path.write_text("{}")
    assert not files.is_locked(path) and not records.is_run_locked(tmp_path)
    other, has_it = holder(path)
    assert has_it and files.is_locked(path) and records.is_run_locked(tmp_path)
    assert files.lock(path) is None  # is_locked has asked to share it
    end(other)
    assert not files.is_locked(path) and not records.is_run_locked(tmp_path)
    with files.lock(path):
        other, has_it = holder(path)
        end(other)
        assert not has_it and files.is_locked(path)
    assert not files.is_locked(path) and path.read_text() == "{}"


def test_several_hold_together_until_the_last_has_gone(tmp_path):
    path = tmp_path / ".ranks-host"
    ours = files.lock(path, shared=True)
    other, has_it = holder(path, shared=True)
    assert has_it and files.lock(path) is None
    ours.close()
    assert files.lock(path) is None
    end(other)
    assert files.lock(path) is not None


def test_a_file_system_without_locks_is_refused_with_the_remedy(tmp_path, monkeypatch):
    def flock(_file, _kind):
        raise OSError(errno.ENOSYS, "no locks here")

    monkeypatch.setattr(fcntl, "flock", flock)
    refused("mount it with locks", files.lock, tmp_path / "run.json")


def test_what_is_staged_is_hidden_and_removed(tmp_path):
    with files.staging_folder(tmp_path / "runs") as folder:
        assert folder.is_dir() and folder.name.startswith(".")
    assert list((tmp_path / "runs").iterdir()) == []
