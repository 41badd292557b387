"""Files that anybody may have written or changed, read within bounds; what is wrong with one is a ValueError."""

from __future__ import annotations

import contextlib
import json
import math
import stat
import tomllib
from collections.abc import Iterator
from pathlib import Path

LARGEST_B = 64 * 2**20  # of a JSON or TOML file; the record of a run on 1,000 devices has 3 MB
# What readers of plain values raise where these are of another type or size than they should be.
ILL_TYPED = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError, MemoryError, OSError)


def require_file(path: Path, most_B: float = math.inf) -> None:
    """Raise ValueError for what is no regular file (a pipe would wait for ever), or a larger one than ``most_B``."""
    found = Path(path).stat()
    if not stat.S_ISREG(found.st_mode):
        raise ValueError(f"{path}: is no regular file")
    if found.st_size > most_B:
        raise ValueError(f"{path}: has {found.st_size} bytes, at most {most_B:.0f} are read")


def json_table(path: Path) -> dict:
    """The JSON object of a file; every number in it is finite. Raises ValueError for anything else."""
    require_file(path, LARGEST_B)
    try:
        value = json.loads(path.read_bytes(), parse_constant=_finite, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path.name} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path.name} is no JSON object but of type {type(value).__name__}")
    return value


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text[:20]} is no finite number")
    return value


def toml_table(path: Path) -> dict:
    """The tables of a TOML file. Raises ValueError for anything else."""
    require_file(path, LARGEST_B)
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path.name} is not TOML: {error}") from error


@contextlib.contextmanager
def one_fault(of: str | Path) -> Iterator[None]:
    """Whatever ill-typed files raise within becomes one ValueError of one line that names the run they belong to."""
    try:
        yield
    except ILL_TYPED as error:
        kind = "" if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: "
        text = " ".join(str(error).split())
        where = "" if text.startswith(str(of)) else f"{of}: "
        raise ValueError(f"{where}{kind}{text}") from error


def require_plain_hdf5(file, most_values: float = math.inf) -> None:
    """Raise ValueError for what an open HDF5 file of plain numbers has not: links, parts in other files, other types.

    ``most_values``: of all its data sets together, and of one chunk, which is read as a whole.
    """
    groups, seen, values = [file], set(), 0
    while groups:
        group = groups.pop()
        for name in group:
            if type(group.get(name, getlink=True)).__name__ != "HardLink":
                raise ValueError(f"{group.name.rstrip('/')}/{name}: is a link, and links are not followed")
            member = group[name]
            if member.id in seen:  # by a second name, as of a group that lies in itself
                continue
            seen.add(member.id)
            if hasattr(member, "keys"):
                groups.append(member)
            elif hasattr(member, "shape"):
                values += _plain_values(member, most_values)
            if values > most_values:
                raise ValueError(f"declares more than {most_values:.3g} values")


def _plain_values(dataset, most_values: float) -> int:
    """Number of values of a data set; ValueError where they are no numbers or lie in another file."""
    if dataset.external or dataset.is_virtual:
        raise ValueError(f"{dataset.name}: lies in another file, which is not followed")
    if dataset.dtype.kind not in "iufb":
        raise ValueError(f"{dataset.name}: is of type {dataset.dtype}, no real numbers")
    if math.prod(dataset.chunks or ()) > most_values:
        raise ValueError(f"{dataset.name}: has chunks of more than {most_values:.3g} values")
    return dataset.size or 0
