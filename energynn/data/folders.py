"""The files of a data set's folder, as it is described, verified and trained on."""

import contextlib
import os
from collections.abc import Callable, Collection, Iterator
from functools import partial
from multiprocessing.pool import ThreadPool
from pathlib import Path

from energynn.host.files import hash_file
from energynn.host.progress import progress_meter

DIGEST_THREADS = 8
# what macOS, Windows and Synology put beside pictures, as they hide it
LEFTOVERS = (
    "__MACOSX",
    "Thumbs.db",
    "desktop.ini",
    "@eaDir",
    "lost+found",
    "System Volume Information",
)


def list_files(root: Path, remarks: dict[str, str], folder: str = "") -> Iterator[str]:
    """Give the names below ``root`` of its files, or of those in ``folder``, as "train/".

    Links are followed. Left out is what is hidden, and what leads nowhere or back; ``remarks``
    tells of it, and of files that are there twice within a class (two folders down): name ->
    reason. Raises OSError for a folder that may not be read.
    """
    above = [root.absolute().parent]
    if folder:
        above.append(root.resolve())
    return _walk_folder(root, folder, above, {}, remarks)


def _walk_folder(
    root: Path, folder: str, above: list[Path], seen: dict, remarks: dict[str, str]
) -> Iterator[str]:
    """Go through a folder; ``above``: real paths of those that led here, ``seen``: first names of
    the files of its class.
    """
    real = (root / folder).resolve()
    if any(path.is_relative_to(real) for path in above):
        remarks[folder[:-1]] = "left out, a link back into its own path"
        return
    if folder.count("/") <= 2:
        seen = {}
    device = real.stat().st_dev
    with os.scandir(real) as entries:
        by_name = sorted(entries, key=lambda entry: entry.name)
    if not by_name:
        remarks[folder[:-1]] = "left out, an empty folder"
    for entry in by_name:
        name = folder + entry.name
        kind = _kind_of_entry(entry)
        if kind == "folder":
            yield from _walk_folder(root, f"{name}/", [*above, real], seen, remarks)
        elif kind == "file":
            # a scan knows the number of a file, without a question for each of a million
            identity = device, entry.inode()
            if entry.is_symlink():
                identity = entry.stat().st_dev, entry.stat().st_ino
            if seen.setdefault(identity, name) != name:
                remarks[name] = (
                    "used, though another name of its class is the same file"
                )
            yield name
        else:
            remarks[name] = kind


def _kind_of_entry(entry: os.DirEntry) -> str:
    """Return "file", "folder", or why it is left out."""
    if entry.name.startswith(".") or entry.name in LEFTOVERS:
        return "left out, hidden"
    # a list of checksums has one name a line
    if "\n" in entry.name or "\r" in entry.name:
        return "left out, a line break in its name"
    with contextlib.suppress(OSError):  # a link to itself
        if entry.is_dir():
            return "folder"
        if entry.is_file():
            return "file"
    kind = "link to anything" if entry.is_symlink() else "regular file"
    return f"left out, no {kind}"


# ------------------------------------------------------------------------------------- checksums


def verify_tree(
    root: Path, checksums: dict[str, str], algorithm: str = "sha256"
) -> None:
    """Check the files below ``root`` (name -> hex digest).

    Raises ValueError naming the first file that is missing or differs.
    """
    for name, digest in compute_digests(
        checksums, partial(digest_of_file, root, algorithm=algorithm)
    ):
        if digest != checksums[name]:
            raise ValueError(
                f"{root}/{name} differs from its {algorithm} {checksums[name]}"
            )


def compute_digests(
    names: Collection, digest_of: Callable[..., str]
) -> Iterator[tuple]:
    """Compute name (or number) and digest of each, some at the same time, in their order."""
    advance = progress_meter("checksums", len(names), "files")
    with ThreadPool(DIGEST_THREADS) as pool:
        for name, digest in zip(names, pool.imap(digest_of, names), strict=True):
            advance(1)
            yield name, digest


def digest_of_file(root: Path, name: str, algorithm: str = "sha256") -> str:
    """Compute the hex digest of a file below ``root``. Raises ValueError if it is missing."""
    try:
        return hash_file(root / name, algorithm)
    except (FileNotFoundError, IsADirectoryError) as error:
        raise ValueError(f"{root / name} is missing; copy it again") from error
