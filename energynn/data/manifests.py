"""Data sets and what proves that they are what they are said to be: data_manifests/<dataset>/."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from pathlib import Path

from energynn.config import FourCastNetConfig, ResNet50Config, RunConfig, checksum_file
from energynn.data import era5_store, imagenet, photographs
from energynn.data.digests import verify_tree
from energynn.files import DATA_MANIFESTS, IS_CHECKOUT, REPOSITORY, sha256
from energynn.progress import meter
from energynn.reading import json_table

EMBEDDED = ("era5_ensemble", "synthetic")  # their files lie beside their manifests
DATASETS = ("era5_ensemble", "photographs")
PHOTOGRAPHS = ("photographs", photographs.LARGE)
# The variable with the folder of data that do not ship. The folder is no part of a run: jobs copy such data elsewhere.
VARIABLES = {"era5": "ENERGYNN_ERA5", "imagenet": "ENERGYNN_IMAGENET"}
RESTORE = "`git checkout data_manifests` restores it" if IS_CHECKOUT else "install energynn again"
GENERATED = REPOSITORY / "build" / "data"


def root(dataset: str) -> Path:
    """Where a data set's files lie: beside its manifest if they are embedded, else below build/data/.

    What does not ship lies where its environment variable says; raises ValueError if that says nothing.
    """
    if variable := VARIABLES.get(dataset):
        if not os.environ.get(variable):
            raise ValueError(f"{dataset}: does not ship; set {variable} to the folder with it (docs/run.md says more)")
        return Path(os.environ[variable])
    return (DATA_MANIFESTS if dataset in EMBEDDED else GENERATED) / dataset


def files_read(config: RunConfig) -> list[str]:
    """The files of its data set that a run reads, by the functions with which its trainer chooses them."""
    names = list(checksums(config.dataset))
    if config.dataset == "imagenet" and isinstance(config, ResNet50Config):
        listings = [imagenet.listing_of(names, split) for split in imagenet.SPLITS]
        chosen = zip(listings, imagenet.images_read(listings, config), strict=True)
        return [os.fsdecode(name) for listing, indices in chosen for name in listing.names[indices]]
    if config.dataset == "era5" and isinstance(config, FourCastNetConfig):
        splits = [era5_store.parse_years(text) for text in era5_store.splits_read(config)]
        return [name for years in splits for year in years for name in era5_store.files_of(year)]
    return names


def verify(
    dataset: str,
    progress: Callable[[str], None] = print,
    folder: Path | None = None,
    every_byte: bool = False,
    config: RunConfig | None = None,
) -> Path:
    """Check a data set against its manifest and return its folder; it is made at first use if it can be.

    ``folder`` is where a data set lies that does not ship, if not where its variable says. Such data are large: without
    ``every_byte`` only names (ImageNet) or notes and sizes (ERA5) are compared, which takes seconds. With it all is
    read; a call that was interrupted goes on where it stopped. Of ERA5 only the years of ``config`` have to be there.
    Raises ValueError naming the data set, the file and the
    remedy: no manifest, missing or unlisted file, other size or SHA-256.
    """
    if dataset not in VARIABLES:
        folder = prepare(dataset, progress)
        made_anew = f"delete {folder}, it is made anew at the next use"
        _check(dataset, folder, progress, RESTORE if dataset == "era5_ensemble" else made_anew)
        return folder
    manifest, sums, folder = read(dataset), checksums(dataset), folder or root(dataset)
    if dataset == "imagenet":
        listings = imagenet.list_images(folder, progress)
        _check_names(manifest, listings)
        if every_byte:
            _verify_images(folder, manifest, listings, sums, progress)
    else:
        if config:
            names = files_read(config)
            sums = {name: digest for name, digest in sums.items() if name in names}
        _check_sizes(dataset, folder, "copy or prepare it again", sums)
        chosen = {name: digest for name, digest in sums.items() if every_byte or name.endswith(".json")}
        verify_tree(folder, chosen, progress)
    return folder


def prepare(dataset: str, progress: Callable[[str], None] = print) -> Path:
    """Return the folder of a data set, after making the photographs' crops if there are none yet.

    Raises ValueError if the crops come out otherwise than in the manifest, for example with another JPEG encoder;
    nothing is left behind then.
    """
    expected = checksums(dataset)
    folder = root(dataset)
    if dataset in PHOTOGRAPHS and not folder.is_dir():
        manifest = read(dataset)
        verify_sources(dataset)
        remedy = (
            f"the manifest's crops were made with {manifest['energynn:made_with']}, here is {photographs.made_with()}: "
            f"install the versions of requirements.lock, or `energynn data describe {dataset}` describes your own"
        )
        photographs.make_crops(folder, lambda fresh: _check(dataset, fresh, progress, remedy))
        progress(f"{dataset}: made {len(expected)} crops in {folder}")
    return folder


def _check(dataset: str, folder: Path, progress: Callable[[str], None], remedy: str) -> None:
    """Raise ValueError at the first file in the folder that is not as the manifest says."""
    expected = checksums(dataset)
    _check_sizes(dataset, folder, remedy, expected)
    advance = meter(dataset, len(expected), "files", progress)
    for name, digest in expected.items():
        if sha256(folder / name) != digest:
            raise ValueError(f"{dataset}: {folder / name} differs from its SHA-256 in the manifest; {remedy}")
        advance(1)
    if folder.is_relative_to(DATA_MANIFESTS):
        return  # an embedded data set shares its folder with the manifest
    present = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    if unlisted := sorted(present - set(expected)):  # ImageFolder would train on them
        raise ValueError(f"{dataset}: {folder / unlisted[0]} is not in the manifest; {remedy}")


def _check_sizes(dataset: str, folder: Path, remedy: str, names: Collection[str]) -> None:
    for entry in [entry for entry in read(dataset)["distribution"] if entry["name"] in names]:
        path, size = folder / entry["name"], entry["contentSize"]
        if not path.is_file():
            raise ValueError(f"{dataset}: {path} is missing; {remedy}")
        if f"{path.stat().st_size} B" != size:
            raise ValueError(f"{dataset}: {path} has {path.stat().st_size} B, not {size}; {remedy}")


def _verify_images(folder: Path, manifest: dict, listings, sums: dict[str, str], progress) -> None:
    """Subsets, the archives' MD5, and every image's SHA-256.

    The pixels of a prepared store have no published digest: only its names and subsets are checked.
    """
    check_archives(folder, progress)
    for split, listing in zip(imagenet.SPLITS, listings, strict=True):
        if imagenet.subsets(listing) != manifest["energynn:subsets"][split]:
            raise ValueError(f"imagenet: subsets of {split} differ from the manifest; it was made by another rule")
    if listings[0].place.suffix == ".ppm":
        progress(f"imagenet: {folder} is a prepared store; its names were checked, its pixels cannot be")
    else:
        verify_tree(folder, sums, progress, imagenet.pieces(listings))


def _check_names(manifest: dict, listings: tuple[imagenet.Listing, ...]) -> None:
    """Raise ValueError naming a class that has other images than in the manifest."""
    for split, listing in zip(imagenet.SPLITS, listings, strict=True):
        expected, present = manifest["energynn:splits"][split], imagenet.summary(listing)
        if present["digest"] == expected["digest"]:
            continue
        for name in sorted(expected["classes"].keys() | present["classes"].keys()):
            wanted, count = expected["classes"].get(name, 0), present["classes"].get(name, 0)
            if wanted != count:
                raise ValueError(f"imagenet: {listing.place}: {split}/{name} has {count} images, not {wanted}")
        raise ValueError(f"imagenet: {listing.place}: images of {split} have other names than in the manifest")


def check_archives(folder: Path, progress: Callable[[str], None]) -> None:
    """Raise ValueError if one of ImageNet's archives in this folder has another MD5 than the published one."""
    present = {name: md5 for name, md5 in imagenet.ARCHIVES.items() if (folder / name).is_file()}
    verify_tree(folder, present, progress, algorithm="md5")


def read(dataset: str) -> dict:
    """The data set's manifest.json. Raises ValueError if there is none or it is damaged."""
    path = checksum_file(dataset, DATA_MANIFESTS).with_name("manifest.json")
    try:
        return json_table(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"{dataset}: {path} is damaged ({error}); {RESTORE}") from error


def checksums(dataset: str) -> dict[str, str]:
    """File name -> SHA-256 of a data set, from the list that ``sha256sum -c`` reads too."""
    path = checksum_file(dataset, DATA_MANIFESTS)
    digests = {}
    for line in path.read_text().splitlines():
        digest, separator, name = line.partition("  ")
        if not separator or len(digest) != 64:
            raise ValueError(f"{dataset}: {path} is damaged; {RESTORE}")
        digests[name] = digest
    return digests


def verify_sources(dataset: str) -> None:
    """Check the installed photographs that crops are made from; raises ValueError if one is not the manifest's."""
    for source in read(dataset)["energynn:sources"]:
        path = photographs.source_path(source["package"], source["file"])
        if sha256(path) != source["sha256"]:
            raise ValueError(
                f"{dataset}: {path} is not the photograph of {source['package']} {source['version']}; "
                "install that version (requirements.lock)"
            )
