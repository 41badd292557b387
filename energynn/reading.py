"""Files that anybody may have written or changed, read within bounds; what is wrong with one is a ValueError."""

from __future__ import annotations

import contextlib
import json
import math
import stat
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
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


def json_or_nothing(path: Path) -> dict:
    """The same; empty where there is no such file, or none that can be read."""
    try:
        return json_table(path)
    except (OSError, ValueError):
        return {}


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


@dataclass(eq=False)
class Hdf5:
    """A group or data set in an open HDF5 file, as h5py's lower layer has it, which takes a tenth of the time.

    path: in the file; id: h5py's; members: of a group, by name.
    """

    path: str
    id: object
    members: dict[str, Hdf5] = field(default_factory=dict)


def require_plain_hdf5(file, most_values: float = math.inf) -> Hdf5:
    """What an open HDF5 file of plain numbers holds.

    ``most_values``: of all its data sets together, and of one chunk, which is read as a whole. Raises ValueError for
    more than that, and for what such a file has not: links, parts in other files, other types.
    """
    from h5py import h5d, h5g, h5l, h5o

    root = Hdf5("", h5o.open(file.id, b"/"))
    groups, known, values = [root], {h5o.get_info(root.id).addr: root}, 0
    while groups:
        group = groups.pop()
        for name_B, kind, address in _links(group.id):
            name = name_B.decode(errors="replace")
            where = f"{group.path}/{name}"
            if kind != h5l.TYPE_HARD:
                raise ValueError(f"{where}: is a link, and links are not followed")
            if address in known:  # by another name, as a group that lies in itself
                group.members[name] = known[address]
                continue
            member = group.members[name] = known[address] = Hdf5(where, h5o.open(group.id, name_B))
            if isinstance(member.id, h5g.GroupID):
                groups.append(member)
            elif isinstance(member.id, h5d.DatasetID):
                values += _plain_values(where, member.id, most_values)
            if values > most_values:
                raise ValueError(f"declares more than {most_values:.3g} values")
    return root


def _links(group) -> list[tuple[bytes, int, int]]:
    """Name and type of each link in a group, and the place in the file that it leads to, if it is a hard one."""
    found = []

    def take(name: bytes, link) -> None:
        found.append((name, link.type, link.u))

    group.links.iterate(take, info=True)
    return found


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
