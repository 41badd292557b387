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
from energynn.reading import require_file

EMBEDDED = ("era5_ensemble", "synthetic")  # their files lie beside their manifests
DATASETS = ("era5_ensemble", "photographs")
PHOTOGRAPHS = ("photographs", photographs.LARGE)
# The variable with the folder of data that do not ship; it is no part of a run's configuration.
VARIABLES = {"era5": "ENERGYNN_ERA5", "imagenet": "ENERGYNN_IMAGENET"}
RESTORE = "`git checkout data_manifests` restores it" if IS_CHECKOUT else "install energynn again"
GENERATED = REPOSITORY / "build" / "data"


class File(msgspec.Struct):
    """A file of a data set, or an archive that others publish."""

    name: str
    contentSize: str = ""  # the name is Croissant's


class Manifest(msgspec.Struct):
    """What is read of a manifest.json; ``splits`` are ImageNet's."""

    distribution: list[File]
    made_with: str = msgspec.field(name="energynn:made_with", default="")
    splits: dict[str, imagenet.Summary] = msgspec.field(
        name="energynn:splits", default_factory=dict
    )


def read(dataset: str) -> Manifest:
    """The data set's manifest.json. Raises ValueError if there is none or it is damaged."""
    path = checksum_file(dataset, DATA_MANIFESTS).with_name("manifest.json")
    try:
        require_file(path)
        return msgspec.json.decode(path.read_bytes(), type=Manifest)
    except Exception as error:
        raise ValueError(f"{dataset}: {path} is damaged ({error}); {RESTORE}") from error


def checksums(dataset: str) -> dict[str, str]:
    """File name -> SHA-256 of a data set, from the list that ``sha256sum -c`` reads too."""
    path = checksum_file(dataset, DATA_MANIFESTS)
    digests = {}
    for line in path.read_text(errors="replace").splitlines():
        digest, _, name = line.partition("  ")
        if not name or len(digest) != 64:
            raise ValueError(f"{dataset}: {path} is damaged; {RESTORE}")
        digests[name] = digest
    return digests


def root(dataset: str) -> Path:
    """Where a data set's files lie: beside its manifest if they are embedded, else below build/data/.

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
        progress(f"{dataset}: made {len(sums)} crops in {root(dataset)}")
    folder = (dataset in VARIABLES and folder) or root(dataset)
    if dataset == "imagenet":
        _verify_imagenet(folder, sums, progress, every_byte)
    elif dataset == "era5":
        if config:
            names = era5_store.files_read(config)
            sums = {name: digest for name, digest in sums.items() if name in names}
        chosen = {name: sums[name] for name in sums if every_byte or name.endswith(".json")}
        _check_sizes(dataset, folder, "copy or prepare it again", sums)
        verify_tree(folder, chosen, progress)
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
    """Every byte of a data set, and that its folder holds nothing else: ImageFolder would train on it."""
    sums = checksums(dataset)
    _check_sizes(dataset, folder, remedy, sums)
    try:
        verify_tree(folder, sums)
    except ValueError as error:
        raise ValueError(f"{dataset}: {error}; {remedy}") from error
    if dataset not in EMBEDDED:  # these share their folder with the manifest
        present = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
        if unlisted := sorted(present - sums.keys()):
            raise ValueError(f"{dataset}: {folder / unlisted[0]} is not in the manifest; {remedy}")


def _check_sizes(dataset: str, folder: Path, remedy: str, names: Collection[str]) -> None:
    for entry in read(dataset).distribution:
        if entry.name in names:
            path = folder / entry.name
            if not path.is_file():
                raise ValueError(f"{dataset}: {path} is missing; {remedy}")
            if f"{path.stat().st_size} B" != entry.contentSize:
                size_B = path.stat().st_size
                raise ValueError(
                    f"{dataset}: {path} has {size_B} B, not {entry.contentSize}; {remedy}"
                )


def _verify_imagenet(
    folder: Path, sums: dict[str, str], progress: Callable[[str], None], every_byte: bool
) -> None:
    """Names of all images; with ``every_byte`` the archives' MD5 and every image's SHA-256, too.

    The pixels of a prepared store have no published digest: only its names are checked.
    """
    manifest, listings = read("imagenet"), imagenet.list_images(folder, progress)
    for split, listing in zip(imagenet.SPLITS, listings, strict=True):
        _check_names(listing, split, manifest.splits[split])
    if every_byte:
        check_archives(folder, progress)
        if not imagenet.is_store(folder):
            verify_tree(folder, sums, progress, imagenet.pieces(listings))


def _check_names(listing: imagenet.Listing, split: str, expected: imagenet.Summary) -> None:
    """Raise ValueError naming a class that has other images than in the manifest."""
    present = imagenet.summary(listing)
    if present.digest == expected.digest:
        return
    for name in sorted(expected.classes.keys() | present.classes.keys()):
        wanted, count = expected.classes.get(name, 0), present.classes.get(name, 0)
        if wanted != count:
            raise ValueError(
                f"imagenet: {listing.place}: {split}/{name} has {count} images, not {wanted}"
            )
    raise ValueError(
        f"imagenet: {listing.place}: images of {split} have other names than in the manifest"
    )


def check_archives(folder: Path, progress: Callable[[str], None]) -> None:
    """Raise ValueError if one of ImageNet's archives in this folder has another MD5 than the published one."""
    present = {name: md5 for name, md5 in imagenet.ARCHIVES.items() if (folder / name).is_file()}
    verify_tree(folder, present, progress, algorithm="md5")
