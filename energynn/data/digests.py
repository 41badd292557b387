"""SHA-256 or MD5 of many large files, several at a time."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from multiprocessing.pool import ThreadPool
from pathlib import Path

from energynn.progress import meter

THREADS = 8
Piece = tuple[str, int, int]  # path, offset, bytes; -1 bytes are the whole file


def verify_tree(
    root: Path,
    checksums: dict[str, str],
    pieces: dict[str, Piece] | None = None,
    algorithm: str = "sha256",
) -> None:
    """Check the files below ``root`` (name -> hex digest), or the pieces that hold these names.

    Raises ValueError naming the first file that is missing or differs.
    """
    pieces = pieces or {name: (f"{root}/{name}", 0, -1) for name in checksums}
    for name, digest in digests(pieces, algorithm):
        if digest != checksums[name]:
            raise ValueError(
                f"{pieces[name][0]}: {name} differs from its {algorithm} {checksums[name]}"
            )


def digests(
    pieces: dict[str, Piece], algorithm: str = "sha256"
) -> Iterator[tuple[str, str]]:
    """Compute name and hex digest of pieces of files, in their order. Raises ValueError for a
    missing file.
    """
    advance = meter(algorithm, len(pieces), "files")
    with ThreadPool(THREADS) as pool:
        values = pool.imap(lambda piece: _digest(*piece, algorithm), pieces.values())
        for name, value in zip(pieces, values, strict=True):
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
