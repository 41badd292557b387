"""Where this project's own files lie, and files that are written whole or not at all."""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, TextIO

PACKAGE = Path(__file__).resolve().parent
SHIPPED = PACKAGE / "shipped"  # pyproject.toml puts it into a wheel; a checkout has none
IS_CHECKOUT = not SHIPPED.is_dir()
# What the package writes of itself lies below REPOSITORY / "build". An installed package writes to the working folder.
REPOSITORY = PACKAGE.parent if IS_CHECKOUT else Path.cwd()


def shipped(name: str) -> Path:
    """A file or folder that comes with the project, as "systems": in the checkout, or within the installed package."""
    return (REPOSITORY if IS_CHECKOUT else SHIPPED) / name


DATA_MANIFESTS = shipped("data_manifests")


@contextlib.contextmanager
def whole(path: Path) -> Iterator[BinaryIO]:
    """A binary file to write, of which others see the old or the new one, never a part (fsync, rename)."""
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


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def utc_now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def lock(path: Path, shared: bool = False, wait: bool = False) -> TextIO | None:
    """A file that this process holds locked until it is closed; None where another process holds it.

    ``shared``: several processes may hold it. ``wait``: until the others have let go. Raises ValueError where the
    file system has no locks.
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
        raise ValueError(f"{path}: cannot be locked ({error.strerror}); choose a file system with locks") from error
    return file


def is_locked(path: Path) -> bool:
    """Whether a process that lives holds a file locked."""
    if not path.exists():
        return False
    held = lock(path)
    if held:
        held.close()
    return held is None
