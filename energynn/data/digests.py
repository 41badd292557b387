"""SHA-256 or MD5 of many large files, several at a time."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from energynn.progress import meter

THREADS = 8
BATCH = 1024  # pieces before the threads: of a million, each would wait in memory
Piece = tuple[str, int, int]  # path, offset, bytes; -1 bytes are the whole file


def verify_tree(
    root: Path,
    checksums: dict[str, str],
    progress: Callable[[str], None] = print,
    pieces: dict[str, Piece] | None = None,
    algorithm: str = "sha256",
) -> None:
    """Check the files below ``root`` (name -> hex digest), or the pieces that hold these names.

    Raises ValueError naming the first file that is missing or differs.
    """
    pieces = pieces or {name: (f"{root}/{name}", 0, -1) for name in checksums}
    for name, digest in digests(pieces, progress, algorithm):
        if digest != checksums[name]:
            raise ValueError(
                f"{pieces[name][0]}: {name} differs from its {algorithm} {checksums[name]}"
            )


def digests(
    pieces: dict[str, Piece], progress: Callable[[str], None] = print, algorithm: str = "sha256"
) -> Iterator[tuple[str, str]]:
    """Compute name and hex digest of pieces of files, in their order. Raises ValueError for a missing file."""
    advance = meter(algorithm, len(pieces), "files", progress)
    names = list(pieces)
    with ThreadPoolExecutor(THREADS) as pool:
        for start in range(0, len(names), BATCH):
            batch = names[start : start + BATCH]
            values = pool.map(lambda name: _digest(*pieces[name], algorithm), batch)
            for name, value in zip(batch, values, strict=True):
                advance(1)
                yield name, value


def _digest(path: str, offset: int, size_B: int, algorithm: str) -> str:
    try:
        with open(path, "rb") as file:
            if size_B < 0:
                return hashlib.file_digest(file, algorithm).hexdigest()
            file.seek(offset)
            return hashlib.new(algorithm, file.read(size_B)).hexdigest()
    except (FileNotFoundError, IsADirectoryError) as error:
        raise ValueError(f"{path} is missing; copy it again") from error
