"""Data sets and what proves that they are what they are said to be: data_manifests/<dataset>/."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from pathlib import Path

import msgspec

from energynn.config import FourCastNetConfig, checksum_file
from energynn.data import era5_store, imagenet, photographs
from energynn.data.digests import verify_tree
from energynn.files import DATA_MANIFESTS, IS_CHECKOUT, REPOSITORY

EMBEDDED = ("era5_ensemble", "synthetic")  # their files lie beside their manifests
DATASETS = ("era5_ensemble", "photographs")
PHOTOGRAPHS = ("photographs", photographs.LARGE)
# The variable with the folder of data that do not ship; it is no part of a run's configuration.
VARIABLES = {"era5": "ENERGYNN_ERA5", "imagenet": "ENERGYNN_IMAGENET"}
RESTORE = "`git checkout data_manifests` restores it" if IS_CHECKOUT else "install energynn again"
GENERATED = REPOSITORY / "build" / "data"


class File(msgspec.Struct):
    """Name a file of a data set, or an archive that others publish."""

    name: str
    contentSize: str = ""  # the name is Croissant's


class Manifest(msgspec.Struct):
    """Hold what is read of a manifest.json; ``splits`` are ImageNet's."""

    distribution: list[File]
    made_with: str = msgspec.field(name="energynn:made_with", default="")
    splits: dict[str, imagenet.Summary] = msgspec.field(
        name="energynn:splits", default_factory=dict
    )


def read(dataset: str) -> Manifest:
    """Read the data set's manifest.json. Raises ValueError if there is none or it is damaged."""
    path = checksum_file(dataset, DATA_MANIFESTS).with_name("manifest.json")
    try:
        return msgspec.json.decode(path.read_bytes(), type=Manifest)
    except (ValueError, OSError) as error:
        raise ValueError(f"{dataset}: {path} is damaged ({error}); {RESTORE}") from error


def checksums(dataset: str) -> dict[str, str]:
    """Read file name -> SHA-256 of a data set from the list that ``sha256sum -c`` reads too."""
    path = checksum_file(dataset, DATA_MANIFESTS)
    digests = {}
    for line in path.read_text(errors="replace").splitlines():
        digest, _, name = line.partition("  ")
        if not name or len(digest) != 64:
            raise ValueError(f"{dataset}: {path} is damaged; {RESTORE}")
        digests[name] = digest
    return digests


def root(dataset: str) -> Path:
    """Find where a data set's files lie: beside its manifest if they are embedded, else below build/data/.

    What does not ship lies where its environment variable says; raises ValueError if that says nothing.
    """
    if variable := VARIABLES.get(dataset):
        if not os.environ.get(variable):
            raise ValueError(
                f"{dataset}: does not ship; set {variable} to the folder with it (docs/run.md says more)"
            )
        return Path(os.environ[variable])
    return (DATA_MANIFESTS if dataset in EMBEDDED else GENERATED) / dataset


def verify(
    dataset: str,
    progress: Callable[[str], None] = print,
    folder: Path | None = None,
    every_byte: bool = False,
    config: FourCastNetConfig | None = None,
) -> Path:
    """Check a data set against its manifest and return its folder; photographs are made at first use.

    ``folder`` is where a data set lies that does not ship, if not where its variable says. Such data are large: without
    ``every_byte`` only names (ImageNet) or notes and sizes (ERA5) are compared, which takes seconds. Of ERA5 only the
    years of ``config`` have to be there. Raises ValueError naming data set, file and remedy: no manifest, missing or
    unlisted file, other size or SHA-256.
    """
    sums = checksums(dataset)
    if dataset in PHOTOGRAPHS and not root(dataset).is_dir():
        _make_photographs(dataset)
    folder = (dataset in VARIABLES and folder) or root(dataset)
    if dataset == "imagenet":
        _verify_imagenet(folder, sums, progress, every_byte)
    elif dataset == "era5":
        if config:
            names = era5_store.files_read(config)
            sums = {name: digest for name, digest in sums.items() if name in names}
        _check_sizes(folder, sums)
        small = {name: sums[name] for name in sums if every_byte or name.endswith(".json")}
        verify_tree(folder, small, progress)
    else:
        remade = f"delete {folder}, it is made anew at the next use"
        _verify_small(dataset, folder, RESTORE if dataset == "era5_ensemble" else remade)
    return folder


def _make_photographs(dataset: str) -> None:
    """Make the crops; raises ValueError if they come out otherwise than in the manifest."""
    remedy = (
        f"the manifest's crops were made with {read(dataset).made_with}, here is "
        f"{photographs.made_with()}: install the versions of requirements.lock, or "
        f"`energynn data describe {dataset}` describes your own"
    )
    photographs.make_crops(root(dataset), lambda fresh: _verify_small(dataset, fresh, remedy))


def _verify_small(dataset: str, folder: Path, remedy: str) -> None:
    """Check every byte of a data set, and that its folder holds nothing else: ImageFolder would train on it."""
    sums = checksums(dataset)
    try:
        verify_tree(folder, sums)
    except ValueError as error:
        raise ValueError(f"{dataset}: {error}; {remedy}") from error
    if dataset not in EMBEDDED:  # these share their folder with the manifest
        present = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
        if unlisted := sorted(present - sums.keys()):
            raise ValueError(f"{dataset}: {folder / unlisted[0]} is not in the manifest; {remedy}")


def _check_sizes(folder: Path, names: Collection[str]) -> None:
    """Raise ValueError naming a file of ERA5's store that has another size than in the manifest."""
    for entry in read("era5").distribution:
        path = folder / entry.name
        if entry.name in names and f"{path.stat().st_size} B" != entry.contentSize:
            raise ValueError(f"{path}: has not {entry.contentSize}; copy or prepare it again")


def _verify_imagenet(
    folder: Path, sums: dict[str, str], progress: Callable[[str], None], every_byte: bool
) -> None:
    """Check names of all images; with ``every_byte`` the archives' MD5 and every image's SHA-256, too.

    The pixels of a prepared store have no published digest: only its names are checked.
    """
    manifest, listings = read("imagenet"), imagenet.list_images(folder, progress)
    for split, listing in zip(imagenet.SPLITS, listings, strict=True):
        expected, present = manifest.splits[split], imagenet.summary(listing)
        if present != expected:
            classes = sorted(
                {name for name, _ in present.classes.items() ^ expected.classes.items()}
            )
            raise ValueError(
                f"imagenet: {listing.place}: images of {split} are others than in the manifest, "
                f"with another number in {', '.join(classes[:3]) or 'no class'}; copy them again"
            )
    if every_byte:
        check_archives(folder, progress)
        if not imagenet.is_store(folder):
            verify_tree(folder, sums, progress, imagenet.pieces(listings))


def check_archives(folder: Path, progress: Callable[[str], None]) -> None:
    """Raise ValueError if one of ImageNet's archives in this folder has another MD5 than the published one."""
    present = {name: md5 for name, md5 in imagenet.ARCHIVES.items() if (folder / name).is_file()}
    verify_tree(folder, present, progress, algorithm="md5")
