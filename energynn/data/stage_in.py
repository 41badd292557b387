"""Stage-in: what a run reads is unpacked from a tar file to a node's own storage, and nothing else.

``python -m energynn.data.stage_in PARAMETERS.json ARCHIVE FOLDER``
"""

from __future__ import annotations

import contextlib
import json
import os
import posixpath
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

from energynn import config as configuration
from energynn.config import RunConfig
from energynn.data import imagenet, manifests

FAILED = "stage-in: failed: "
BLOCK_B = 2**24  # copied at once, at most


def unpack(archive: Path, folder: Path, config: RunConfig) -> str:
    """Unpack the files of a data set that the run reads, and whatever its manifest does not list; returns how many.

    Beside the images of a tree stand the names of all of them, those left out, too. Raises ValueError naming a file
    that the run reads and the archive has not got.
    """
    listed, wanted = manifests.checksums(config.dataset).keys(), dict.fromkeys(manifests.files_read(config))
    names, files, files_B, all_B = [], 0, 0, 0
    folder.mkdir(parents=True, exist_ok=True)
    with _opened(archive) as tar:
        while member := tar.next():
            tar.members.clear()  # of a million, each would stay in memory
            name = posixpath.normpath(member.name)
            if not member.isfile() or name.startswith(("/", "..")):
                continue
            names.append(name)
            all_B += member.size
            if name in listed and name not in wanted:
                continue
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "wb") as file:
                shutil.copyfileobj(tar.extractfile(member), file, min(BLOCK_B, member.size + 1))
            files, files_B = files + 1, files_B + member.size
    missing = wanted.keys() - names
    for split in imagenet.SPLITS:
        if not imagenet.whole_splits(split).isdisjoint(names):
            missing = {name for name in missing if not name.startswith(f"{split}/")}
    if missing:
        raise ValueError(f"{archive} has no {min(missing)}, which the run reads; pack the data again")
    (folder / imagenet.ALL_NAMES).write_text("".join(f"{name}\n" for name in names))
    return f"{files:,} of {len(names):,} files, {files_B / 1e9:.3g} of {all_B / 1e9:.3g} GB"


@contextlib.contextmanager
def _opened(archive: Path) -> Iterator[tarfile.TarFile]:
    """An archive to be read once from its begin to its end; Python itself does not know zstd."""
    if archive.suffix != ".zst":
        with tarfile.open(archive) as tar:
            yield tar
        return
    with (
        subprocess.Popen(["zstd", "-dcq", archive], stdout=subprocess.PIPE) as unpacking,
        tarfile.open(fileobj=unpacking.stdout, mode="r|") as tar,
    ):
        yield tar


def main(parameters: Path, archive: Path, folder: Path) -> int:
    """Unpack for the run of these parameters, and say what was done; returns 1 where something is wrong."""
    try:
        config = configuration.from_dict(json.loads(parameters.read_text()))
        told = unpack(archive, folder, config)
    except (OSError, EOFError, ValueError, tarfile.TarError) as error:
        print(f"{FAILED}{' '.join(str(error).split())}", file=sys.stderr, flush=True)
        return 1
    print(f"stage-in: {os.uname().nodename}: {told}, from {archive} to {folder}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:])))
