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
from typing import BinaryIO

REPOSITORY = Path(__file__).resolve().parent.parent
DATA_MANIFESTS = REPOSITORY / "data_manifests"


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


def is_locked(path: Path) -> bool:
    """Whether a process that lives holds a file locked."""
    try:
        with open(path, "r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except FileNotFoundError:
        return False
    except OSError:  # held, or on a file system without locks
        return True
