"""SHA-256 or MD5 of many large files, several at a time."""

import hashlib
from collections.abc import Callable, Collection, Iterator
from functools import partial
from multiprocessing.pool import ThreadPool
from pathlib import Path

from energynn.host.progress import meter

THREADS = 8


def verify_tree(
    root: Path, checksums: dict[str, str], algorithm: str = "sha256"
) -> None:
    """Check the files below ``root`` (name -> hex digest).

    Raises ValueError naming the first file that is missing or differs.
    """
    digest_of = partial(of_file, root, algorithm=algorithm)
    for name, digest in digests(checksums, digest_of):
        if digest != checksums[name]:
            raise ValueError(
                f"{root}/{name} differs from its {algorithm} {checksums[name]}"
            )


def digests(names: Collection, digest_of: Callable[..., str]) -> Iterator[tuple]:
    """Compute name (or number) and digest of each, some at the same time, in their order."""
    advance = meter("checksums", len(names), "files")
    with ThreadPool(THREADS) as pool:
        for name, digest in zip(names, pool.imap(digest_of, names), strict=True):
            advance(1)
            yield name, digest


def of_file(root: Path, name: str, algorithm: str = "sha256") -> str:
    """Compute the hex digest of a file below ``root``. Raises ValueError if it is missing."""
    try:
        with open(root / name, "rb") as file:
            return hashlib.file_digest(file, algorithm).hexdigest()
    except (FileNotFoundError, IsADirectoryError) as error:
        raise ValueError(f"{root / name} is missing; copy it again") from error
