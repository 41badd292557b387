"""SHA-256 or MD5 of many large files, several at a time; what has not changed since is not read again."""

from __future__ import annotations

import hashlib
import os
import stat
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

from energynn.files import REPOSITORY
from energynn.progress import meter

VERIFIED = REPOSITORY / "build" / "verified"  # digests that are known, a file for each folder and algorithm
THREADS = 8
BLOCK_B = 1 << 20
BATCH = 1024  # pieces that the threads have before them: they keep all that they are given in memory
Piece = tuple[str, int, int]  # path, offset, bytes; -1 bytes go to the end of the file
Progress = Callable[[str], None]


def verify_tree(
    root: Path,
    checksums: dict[str, str],
    progress: Progress = print,
    pieces: dict[str, Piece] | None = None,
    algorithm: str = "sha256",
) -> None:
    """Check the files below ``root`` (name -> hex digest); goes on where an interrupted call stopped (``digests``).

    Raises ValueError naming the first file that is missing or differs.
    """
    pieces = pieces or {name: (f"{root}/{name}", 0, -1) for name in checksums}
    with closing(digests(root, pieces, progress, algorithm)) as results:  # closed at an error, not when it is collected
        for name, digest in results:
            if digest != checksums[name]:
                raise ValueError(f"{pieces[name][0]}: {name} differs from its {algorithm} {checksums[name]}")


def digests(
    root: Path, pieces: dict[str, Piece], progress: Progress = print, algorithm: str = "sha256"
) -> Iterator[tuple[str, str]]:
    """Name and hex digest of pieces of files, in their order.

    Every digest is noted in build/verified/ as soon as it is known, with size and modification time of the file. While
    these stay as they are, the piece is not read again. Raises ValueError naming a file that is missing.
    """
    sidecar = _sidecar(root, algorithm)
    known = _read_notes(sidecar)
    stamps = {name: _stamp(*piece) for name, piece in pieces.items()}
    new = {name for name, stamp in stamps.items() if known.get(name, ())[:2] != stamp}
    new_GB = sum(int(stamps[name][0]) for name in new) / 1e9
    advance = meter(f"{algorithm} of {root}", new_GB, "GB", progress)
    stop = threading.Event()

    def digest_of(name: str) -> str:
        path, offset, _ = pieces[name]
        return _digest(path, offset, int(stamps[name][0]), algorithm, advance, stop)

    names = list(pieces)
    with ThreadPoolExecutor(THREADS) as pool, open(sidecar, "a", buffering=1) as notes:
        notes.write("\n")  # ends the line at which an interrupted call stopped
        try:
            for start in range(0, len(names), BATCH):
                batch = names[start : start + BATCH]
                fresh = pool.map(digest_of, [name for name in batch if name in new])
                for name in batch:
                    if name in new:
                        digest = next(fresh)
                        notes.write("\t".join([name, *stamps[name], digest, "end"]) + "\n")
                    else:
                        digest = known[name][2]
                    yield name, digest
        finally:
            stop.set()  # the threads leave large files at once


def _sidecar(root: Path, algorithm: str) -> Path:
    VERIFIED.mkdir(parents=True, exist_ok=True)
    key = hashlib.sha256(str(Path(root).resolve()).encode()).hexdigest()[:16]
    return VERIFIED / f"{key}.{algorithm}"


def _read_notes(sidecar: Path) -> dict[str, tuple[str, str, str]]:
    """Name -> size, modification time and digest; lines that an interruption cut are left out."""
    known = {}
    for line in sidecar.read_text().splitlines() if sidecar.is_file() else []:
        fields = line.split("\t")
        if len(fields) == 5:
            name, size, changed, digest, _end = fields
            known[name] = (size, changed, digest)
    return known


def _stamp(path: str, offset: int, size: int) -> tuple[str, str]:
    """Bytes of a piece, and when its file was changed. Raises ValueError if the file is missing."""
    try:
        facts = os.stat(path)
    except FileNotFoundError:
        raise ValueError(f"{path} is missing; copy it again") from None
    if not stat.S_ISREG(facts.st_mode):
        raise ValueError(f"{path} is no regular file; copy it again")
    return str(facts.st_size - offset if size < 0 else size), str(facts.st_mtime_ns)


def _digest(path: str, offset: int, size: int, algorithm: str, advance: Callable, stop: threading.Event) -> str:
    left, result = size, hashlib.new(algorithm)
    with open(path, "rb") as file:
        file.seek(offset)
        while left > 0 and not stop.is_set() and (block := file.read(min(left, BLOCK_B))):
            left -= len(block)
            result.update(block)
            advance(len(block) / 1e9)
    return result.hexdigest()
