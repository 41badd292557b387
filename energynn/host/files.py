"""Where this project's own files lie, and files that are written whole or not at all."""

import contextlib
import datetime
import errno
import fcntl
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import BinaryIO, TextIO

PACKAGE_FOLDER = Path(__file__).resolve().parents[1]
# pyproject.toml puts it into a wheel; a checkout has none
SHIPPED_FOLDER = PACKAGE_FOLDER / "shipped"
IS_CHECKOUT = not SHIPPED_FOLDER.is_dir()
# What the package writes of itself lies below REPOSITORY / "build"; an installed package writes to
# the working folder.
REPOSITORY = PACKAGE_FOLDER.parent if IS_CHECKOUT else Path.cwd()
# torch, perun and MPI
INSTALLATION = "`make train-env`" if IS_CHECKOUT else "`pip install 'energynn[train]'`"


def shipped_path(name: str) -> Path:
    """Find what comes with the project, as "systems": in the checkout or the installed package."""
    return (REPOSITORY if IS_CHECKOUT else SHIPPED_FOLDER) / name


DATA_MANIFESTS = shipped_path("data_manifests")
# What file systems say that have no locks.
NO_LOCK_ERRORS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)


def require_writable_path(path: Path) -> None:
    """Raise ValueError where a file cannot be written; ask before anything expensive."""
    _require_file_name(path)
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError(
            f"{path}: {folder} is no folder that you may write to; give another name, or work in "
            "a clone of your own"
        )


def _require_file_name(path: Path) -> None:
    if path.exists() and not path.is_file():
        raise ValueError(
            f"{path}: is a directory, a device or a pipe, which no file may replace; "
            "give another name"
        )


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """Open a binary file to write, of which others see the old or the new one, never a part.

    Its folder is made. Raises ValueError where something else has its name: a device that is
    replaced is gone for all.
    """
    _require_file_name(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, "w+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def remove_matching(folder: Path, pattern: str, kept: Collection[str] = ()) -> None:
    """Remove the files of a folder that have names of ours, and the folder where that was all.

    pattern: of whole names; what its first group says is not removed where it is among ``kept``.
    Other things stay, and so does what a link leads to.
    """
    for path in folder.iterdir():
        name = re.fullmatch(pattern, path.name)
        if name and name[1] not in kept and (path.is_symlink() or path.is_file()):
            path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        folder.rmdir()


def checkpoint_folder(run_dir: Path) -> Path:
    """Say where a run has its checkpoints; behind a link, which runs may share, apart."""
    folder = run_dir / "checkpoint"
    if not folder.is_symlink():
        return folder
    digest = hashlib.sha256(os.fsencode(run_dir.resolve())).hexdigest()
    return folder.resolve() / f"{run_dir.name}-{digest[:8]}"


def newest_checkpoint_name(run_dir: Path) -> str:
    """Name the checkpoint from which a run goes on that is started again; "": it begins anew."""
    marks = checkpoint_folder(run_dir).glob("*.sha256")
    return max((path.stem for path in marks), default="")


def write_json(path: Path, value) -> None:
    """Write a JSON file, whole or not at all."""
    with atomic_write(path) as file:
        file.write(json.dumps(value, indent=1, allow_nan=False).encode() + b"\n")


def sync_to_disk(path: Path) -> None:
    """Force to disk what any process of this host has written to a file."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        os.fsync(file.fileno())


def default_runs_dir() -> Path:
    """Return the folder of the records where nobody names one."""
    return Path(os.path.expanduser(os.environ.get("ENERGYNN_RUNS") or "runs"))


def hash_file(path: Path | str, algorithm: str = "sha256") -> str:
    """Hash a file: hex SHA-256, or MD5."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, algorithm).hexdigest()


def utc_time_text() -> str:
    """Return the time as ISO 8601 in UTC, with milliseconds."""
    return (
        datetime.datetime.now(datetime.UTC)
        .isoformat(timespec="milliseconds")
        .replace("+00:00", "Z")
    )


@contextlib.contextmanager
def staging_folder(parent: Path) -> Iterator[Path]:
    """Make a hidden folder for what is not whole yet, and remove it at the end."""
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".staged-", dir=parent) as name:
        yield Path(name)


def lock(path: Path, shared: bool = False) -> TextIO | None:
    """Open a file that this process holds locked until it is closed; None where another holds it.

    ``shared``: several processes may hold it, and one waits until who holds it alone has let go.
    Raises ValueError with the remedy on a file system without locks.
    """
    file = open(path, "a+")  # over NFS only what may be written can be locked
    if _try_flock(file, fcntl.LOCK_SH if shared else fcntl.LOCK_EX | fcntl.LOCK_NB):
        return file
    file.close()
    return None


def is_locked(path: Path) -> bool:
    """Tell whether a process holds a file locked alone; several may ask at once."""
    if not path.is_file():  # a pipe would wait for who writes it
        return False
    with open(path) as file:
        return not _try_flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)


def _try_flock(file: TextIO, operation: int) -> bool:
    """Lock an open file; False where another process holds it."""
    try:
        fcntl.flock(file, operation)
        return True
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in NO_LOCK_ERRORS:
            raise
        raise ValueError(
            f"{file.name}: its file system has no locks; "
            "mount it with locks (Lustre: -o flock), or put the runs elsewhere"
        ) from error
