"""Read files that anybody may have written or changed, within bounds; a bad one is a ValueError."""

import contextlib
import math
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

# of a JSON or TOML file; the record of a run on 1,000 devices has 3 MB
MAX_FILE_SIZE_B = 64 * 2**20


def require_file(path: Path, most_B: float = math.inf) -> None:
    """Raise ValueError for a file that is too large, or none: a pipe would wait for ever."""
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{path}: is no regular file")
    if status.st_size > most_B:
        raise ValueError(
            f"{path}: has {status.st_size} bytes, at most {most_B:.0f} are read"
        )


def read_json(path: Path) -> dict:
    """Read the JSON object of a file; every number in it is finite. Raises ValueError."""
    return _read_table(path, msgspec.json.decode, "no JSON object")


def read_toml(path: Path) -> dict:
    """Read the tables of a TOML file. Raises ValueError for anything else."""
    return _read_table(path, msgspec.toml.decode, "not TOML")


def read_checksums(path: Path) -> dict[str, str]:
    """Read file name -> SHA-256 from a list that ``sha256sum -c`` reads, too. Raises ValueError."""
    digests = {}
    for line in path.read_bytes().splitlines():
        digest, _, name = os.fsdecode(line).partition("  ")
        if not name or len(digest) != 64:
            raise ValueError(f"{path} is damaged")
        digests[name] = digest
    return digests


def _read_table(path: Path, decode: Callable, fault: str) -> dict:
    require_file(path, MAX_FILE_SIZE_B)
    try:
        return decode(path.read_bytes(), type=dict)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path.name} is {fault}: {error}") from error


@contextlib.contextmanager
def join_faults(subject: str | Path, faults: list[str] | None = None) -> Iterator[None]:
    """Turn whatever ill-typed files raise into one ValueError of one line that names the run.

    With ``faults`` that line is added there instead.
    """
    try:
        yield
    except Exception as error:
        kind = (
            ""
            if isinstance(error, ValueError | OSError)
            else f"{type(error).__name__}: "
        )
        text = " ".join(str(error).split())
        line = text if text.startswith(str(subject)) else f"{subject}: {kind}{text}"
        if faults is None:
            raise ValueError(line) from error
        faults.append(line)


def require_plain_hdf5(
    file, most_values: float = math.inf, texts: bool = False
) -> None:
    """Raise ValueError where an open h5py.File holds more than plain numbers of its own.

    Refuses links, data in other files, other types (``texts`` lets texts be), and more than
    ``most_values`` numbers.
    """
    import h5py

    links = []
    file.visititems_links(lambda name, link: links.append((name, link)))
    values = 0
    for name, link in links:
        if not isinstance(link, h5py.HardLink):
            raise ValueError(f"/{name}: is a link, and links are not followed")
        member = file[name]
        if not isinstance(member, h5py.Dataset):
            continue
        text = texts and h5py.check_string_dtype(member.dtype)
        if member.dtype.kind not in "iufb" and not text:
            raise ValueError(f"{name}: is of type {member.dtype}, no real numbers")
        if member.is_virtual or member.external:
            raise ValueError(f"{name}: lies in another file, which is not followed")
        values += member.size or 0
    if values > most_values:
        raise ValueError(f"declares more than {most_values:.3g} values")
