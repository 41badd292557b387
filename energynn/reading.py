"""Files that anybody may have written or changed, read within bounds; what is wrong with one is a ValueError."""

from __future__ import annotations

import contextlib
import math
import os
import stat
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import msgspec

LARGEST_B = 64 * 2**20  # of a JSON or TOML file; the record of a run on 1,000 devices has 3 MB
# What readers of plain values raise where these are of another type or size than they should be.
ILL_TYPED = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError, MemoryError, OSError)


def require_file(path: Path, most_B: float = math.inf) -> None:
    """Raise ValueError for what is no regular file (a pipe would wait for ever), or a larger one than ``most_B``."""
    found = os.stat(path)
    if not stat.S_ISREG(found.st_mode):
        raise ValueError(f"{path}: is no regular file")
    if found.st_size > most_B:
        raise ValueError(f"{path}: has {found.st_size} bytes, at most {most_B:.0f} are read")


def json_table(path: Path) -> dict:
    """Read the JSON object of a file; every number in it is finite. Raises ValueError."""
    require_file(path, LARGEST_B)
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path.name} is no JSON object: {error}") from error


def json_or_nothing(path: Path) -> dict:
    """The same; empty where there is no such file, or none that can be read."""
    with contextlib.suppress(OSError, ValueError):
        return json_table(path)
    return {}


def toml_table(path: Path) -> dict:
    """The tables of a TOML file. Raises ValueError for anything else."""
    require_file(path, LARGEST_B)
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path.name} is not TOML: {error}") from error


@contextlib.contextmanager
def one_fault(of: str | Path, faults: list[str] | None = None) -> Iterator[None]:
    """Whatever ill-typed files raise within becomes one ValueError of one line that names the run they belong to.

    With ``faults`` that line is added there instead. numpy's warnings stay unsaid: what does not follow from the files
    is a fault of its own.
    """
    import numpy as np

    try:
        with np.errstate(all="ignore"):
            yield
    except ILL_TYPED as error:
        kind = "" if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: "
        text = " ".join(str(error).split())
        where = "" if text.startswith(str(of)) else f"{of}: "
        if faults is None:
            raise ValueError(f"{where}{kind}{text}") from error
        faults.append(f"{where}{kind}{text}")


@dataclass(eq=False)
class Hdf5:
    """A group or data set in an open HDF5 file. h5py's lower layer opens it when it is needed, in a tenth of the time.

    path: in the file; root: h5py's; members: of a group, by name.
    """

    path: bytes
    root: object
    members: dict[str, Hdf5] = field(default_factory=dict)

    @cached_property
    def id(self):
        """What h5py's lower layer calls it."""
        from h5py import h5o

        return h5o.open(self.root, self.path)

    @cached_property
    def shape(self) -> tuple[int, ...] | None:
        """Of a data set; None of one that is null."""
        return self.id.shape

    def __str__(self) -> str:
        return self.path.decode(errors="replace")


def require_plain_hdf5(file, most_values: float = math.inf) -> Hdf5:
    """What an open HDF5 file of plain numbers holds; ``file`` is what h5py's lower layer calls it.

    ``most_values``: of all its data sets together, and of one chunk, which is read as a whole. Raises ValueError for
    more than that, and for what such a file has not: links, parts in other files, other types.
    """
    from h5py import h5d, h5g, h5l, h5o

    root_id = h5o.open(file, b"/")
    root, values = Hdf5(b"/", root_id), 0
    groups, known = {b"": root}, {h5o.get_info(root_id).addr: root}
    for path, kind, address in _links(root_id):
        if kind != h5l.TYPE_HARD:
            raise ValueError(f"/{path.decode(errors='replace')}: is a link, and links are not followed")
        group, _, name = path.rpartition(b"/")
        if (member := known.get(address)) is None:  # a group may lie in itself
            member = known[address] = Hdf5(b"/" + path, root_id)
        groups[path] = groups[group].members[name.decode(errors="replace")] = member
    for member in known.values():
        if member.members or h5g.get_objinfo(root_id, member.path).type == h5g.GROUP:
            continue  # to ask takes a third of the time of opening it
        if isinstance(member.id, h5d.DatasetID):
            values += _plain_values(member, most_values)
        if values > most_values:
            raise ValueError(f"declares more than {most_values:.3g} values")
    return root


def _links(group) -> list[tuple[bytes, int, int]]:
    """Path and type of each link below a group, and the place in the file that it leads to, if it is a hard one."""
    found = []
    group.links.visit(lambda path, link: found.append((path, link.type, link.u)), info=True)
    return found


def _plain_values(dataset: Hdf5, most_values: float) -> int:
    """Number of values of a data set; ValueError where they are no numbers or lie in another file."""
    from h5py import h5d

    if (kind := dataset.id.dtype).kind not in "iufb":
        raise ValueError(f"{dataset}: is of type {kind}, no real numbers")
    if dataset.id.get_offset() is None:  # where its values lie in this file, if they do in one piece
        made = dataset.id.get_create_plist()
        layout = made.get_layout()
        if made.get_external_count() or layout == h5d.VIRTUAL:
            raise ValueError(f"{dataset}: lies in another file, which is not followed")
        if layout == h5d.CHUNKED and math.prod(made.get_chunk()) > most_values:
            raise ValueError(f"{dataset}: has chunks of more than {most_values:.3g} values")
    return 0 if dataset.shape is None else math.prod(dataset.shape)
