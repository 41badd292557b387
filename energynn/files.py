"""Where this project's own files lie, and files that are written whole or not at all."""

from __future__ import annotations

import contextlib
import datetime
import errno
import fcntl
import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, TextIO

from energynn.processes import lives, name_of_this_process

PACKAGE = Path(__file__).resolve().parent
SHIPPED = PACKAGE / "shipped"  # pyproject.toml puts it into a wheel; a checkout has none
IS_CHECKOUT = not SHIPPED.is_dir()
# What the package writes of itself lies below REPOSITORY / "build". An installed package writes to the working folder.
REPOSITORY = PACKAGE.parent if IS_CHECKOUT else Path.cwd()
INSTALL = "`make train-env`" if IS_CHECKOUT else "`pip install 'energynn[train]'`"  # torch, perun and MPI


def shipped(name: str) -> Path:
    """A file or folder that comes with the project, as "systems": in the checkout, or within the installed package."""
    return (REPOSITORY if IS_CHECKOUT else SHIPPED) / name


DATA_MANIFESTS = shipped("data_manifests")


def require_place(path: Path) -> None:
    """Raise ValueError where a file cannot be written, or its folders made: to be asked before anything expensive."""
    _require_name(path)
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError(f"{path}: {folder} is no folder that you may write to; give another name")


def _require_name(path: Path) -> None:
    if path.exists() and not path.is_file():
        raise ValueError(f"{path}: is a directory, a device or a pipe, which no file may replace; give another name")


@contextlib.contextmanager
def whole(path: Path) -> Iterator[BinaryIO]:
    """A binary file to write, of which others see the old or the new one, never a part (fsync, rename).

    Raises ValueError where something else has its name: a device that is replaced is gone for everybody.
    """
    _require_name(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, "w+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, value) -> None:
    """Write a JSON file, whole or not at all."""
    with whole(path) as file:
        file.write(json.dumps(value, indent=1, allow_nan=False).encode() + b"\n")


def force(path: Path) -> None:
    """Have all that any process of this host has written to a file forced to disk, as far as the disk takes it."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        os.fsync(file.fileno())


def default_runs_dir() -> Path:
    """The folder of the records where nobody names one."""
    return Path(os.environ.get("ENERGYNN_RUNS") or "runs")


def sha256(path: Path | str) -> str:
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        while block := file.read(2**17):  # for small files a third of the time of hashlib.file_digest
            digest.update(block)
    return digest.hexdigest()


def utc_now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


# --------------------------------------------------------------------------------------------------------------- locks

WITHOUT_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)  # what file systems say that have none


def lock(path: Path, shared: bool = False, wait: bool = False) -> TextIO | Owner | None:
    """A file that this process holds locked until it is closed; None where another process holds it.

    ``shared``: several processes may hold it. ``wait``: until the others have let go. On a file system without locks a
    file beside it names its owner.
    """
    file = open(path, "a+")  # over NFS only what may be written can be locked
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    try:
        fcntl.flock(file, kind if wait else kind | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    except OSError as error:
        file.close()
        if error.errno not in WITHOUT_LOCKS:
            raise
        return _own(path, shared, wait)
    return file


def is_locked(path: Path, by_one: bool = False) -> bool:
    """Whether a process that lives holds a file locked; ``by_one``: for itself alone, which a reader may ask."""
    if not path.exists():
        return False
    try:
        with open(path, "r" if by_one else "a+") as file:
            fcntl.flock(file, (fcntl.LOCK_SH if by_one else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    except OSError as error:
        return error.errno in WITHOUT_LOCKS and any(map(_holds, _owners(path, by_one)))


@contextlib.contextmanager
def staged(parent: Path) -> Iterator[Path]:
    """A hidden folder for what is not whole yet, removed at the end, as are now those of processes that have died."""
    parent.mkdir(parents=True, exist_ok=True)
    for folder in parent.glob(".staged-*"):
        with contextlib.suppress(OSError):  # it is another user's, or has just gone
            _remove_of_dead(folder)
    while True:
        with tempfile.TemporaryDirectory(prefix=".staged-", dir=parent, ignore_cleanup_errors=True) as name:
            path = Path(name, "held")
            try:
                held = lock(path, wait=True)
            except FileNotFoundError:  # another process took it for that of a dead one
                continue
            with contextlib.closing(held):
                if path.exists() and os.fstat(held.fileno()).st_nlink:  # nor has it been taken since
                    yield path.parent
                    return


def _remove_of_dead(folder: Path) -> None:
    """Remove a staged folder that nobody holds, and hold it meanwhile: who has just made it then makes another."""
    path = folder / "held"
    if folder.is_symlink() or is_locked(path, by_one=True):
        return
    if held := lock(path):
        shutil.rmtree(folder, ignore_errors=True)
        held.close()


class Owner:
    """A file that names the process that holds another file, on a file system without locks."""

    def __init__(self, path: Path):
        self.path, self.file = path, open(path)
        self.fileno = self.file.fileno

    def close(self) -> None:
        self.path.unlink(missing_ok=True)
        self.file.close()


def _own(path: Path, shared: bool, wait: bool) -> Owner | None:
    """Hold a file by .NAME.owner beside it, or as one of several by .NAME.owner-HOST-NUMBER."""
    name = f"{os.uname().nodename}-{os.getpid()}"
    owner = path.with_name(f".{path.name}.owner" + (f"-{name}" if shared else ""))
    draft = path.with_name(f".{path.name}.{name}")
    draft.write_text(f"{os.uname().nodename} {name_of_this_process()}")
    try:
        while True:
            held = [_holds(other) for other in _owners(path, by_one=shared) if other != owner or not shared]
            if not any(held):
                if shared or held:  # an earlier process of our number, or the last owner has died
                    owner.unlink(missing_ok=True)
                with contextlib.suppress(FileExistsError):  # another process was faster
                    os.link(draft, owner)  # with its content, or not at all
                    return Owner(owner)
            if not wait:
                return None
            time.sleep(0.2)
    finally:
        draft.unlink(missing_ok=True)


def _owners(path: Path, by_one: bool) -> list[Path]:
    """The files that name an owner of a file; ``by_one``: only who holds it for itself alone."""
    one = path.with_name(f".{path.name}.owner")
    several = [] if by_one else list(path.parent.glob(f"{one.name}-*"))
    return [owner for owner in (one, *several) if owner.exists()]


def _holds(owner: Path) -> bool:
    """Whether the process that a file names lives; of one on another host we cannot know, and say what to do."""
    try:
        host, boot, space, number = owner.read_text().split()
    except (OSError, ValueError):
        return False
    ours = name_of_this_process().split()
    if host == os.uname().nodename:
        return boot == ours[0] and (space != ours[1] or lives(int(number)))
    sys.stderr.write(f"energynn: {owner} says that {host} holds it; if nothing of it runs there, delete this file\n")
    return True
