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
    from h5py import h5d, h5g, h5l, h5o  # below h5py's names for people, which take ten times as long

    groups, seen, values = [("", h5o.open(file.id, b"/"))], set(), 0
    while groups:
        path, group = groups.pop()
        for name in group:
            where = f"{path}/{name.decode(errors='replace')}"
            if group.links.get_info(name).type != h5l.TYPE_HARD:
                raise ValueError(f"{where}: is a link, and links are not followed")
            member = h5o.open(group, name)
            if member in seen:  # by a second name, as of a group that lies in itself
                continue
            seen.add(member)
            if isinstance(member, h5g.GroupID):
                groups.append((where, member))
            elif isinstance(member, h5d.DatasetID):
                values += _plain_values(where, member, most_values)
            if values > most_values:
                raise ValueError(f"declares more than {most_values:.3g} values")


def _plain_values(where: str, dataset, most_values: float) -> int:
    """Number of values of a data set; ValueError where they are no numbers or lie in another file."""
    from h5py import h5d

    made = dataset.get_create_plist()
    if made.get_external_count() or made.get_layout() == h5d.VIRTUAL:
        raise ValueError(f"{where}: lies in another file, which is not followed")
    if dataset.dtype.kind not in "iufb":
        raise ValueError(f"{where}: is of type {dataset.dtype}, no real numbers")
    if made.get_layout() == h5d.CHUNKED and math.prod(made.get_chunk()) > most_values:
        raise ValueError(f"{where}: has chunks of more than {most_values:.3g} values")
    return 0 if dataset.shape is None else math.prod(dataset.shape)
