"""Data sets and what proves that they are what they are said to be: data_manifests/<dataset>/."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from importlib.metadata import version
from pathlib import Path

from energynn.config import checksum_file
from energynn.data import era5, era5_store, imagenet, photographs
from energynn.files import DATA_MANIFESTS, REPOSITORY, sha256
from energynn.progress import meter

DATASETS = ("era5_ensemble", "photographs")
# Data that do not ship: the variable with their folder. A path is no part of a run, staged-in data lie elsewhere in
# each job.
VARIABLES = {"era5": "ENERGYNN_ERA5", "imagenet": "ENERGYNN_IMAGENET"}
ENCODINGS = {".jpg": "image/jpeg", ".nc": "application/netcdf", ".json": "application/json",
             ".npy": "application/octet-stream"}  # fmt: skip
DESCRIPTIONS = DATA_MANIFESTS / "descriptions.json"  # what ``build`` says of each in words
GENERATED = REPOSITORY / "build" / "data"
VERIFIED = REPOSITORY / "build" / "verified"  # what ``digests`` need not read again
HASHING_THREADS = 8
BLOCK_B = 1 << 20


def root(dataset: str) -> Path:
    """Where a data set's files lie: beside its manifest if they are embedded, else below build/data/.

    What does not ship lies where its environment variable says; raises ValueError if that says nothing.
    """
    if variable := VARIABLES.get(dataset):
        if not os.environ.get(variable):
            raise ValueError(f"{dataset}: does not ship; set {variable} to the folder with it (docs/run.md says more)")
        return Path(os.environ[variable])
    return DATA_MANIFESTS / dataset if dataset in ("era5_ensemble", "synthetic") else GENERATED / dataset


def verify(
    dataset: str, progress: Callable[[str], None] = print, folder: Path | None = None, every_byte: bool = False
) -> Path:
    """Check a data set against its manifest and return its folder; it is made at first use if it can be.

    ``folder`` is where one that does not ship lies, if not where its variable says. Of these, what takes seconds is
    compared at a run's start: ImageNet's names, ERA5's notes (times, statistics) and sizes. ``every_byte`` reads it
    all, and goes on where an interrupted call stopped. Raises ValueError naming the data set, the file and the remedy:
    no manifest, missing or unlisted file, other size or SHA-256.
    """
    if dataset not in VARIABLES:
        folder = prepare(dataset, progress)
        _check(dataset, folder, progress, _remedy(dataset))
        return folder
    manifest, sums, folder = read(dataset), checksums(dataset), folder or root(dataset)
    if dataset == "imagenet":
        listings = imagenet.list_images(folder, progress)
        _check_names(manifest, listings)
        if every_byte:
            _verify_images(folder, manifest, listings, sums, progress)
    else:
        _check_sizes(dataset, folder, "copy or prepare it again")
        verify_tree(folder, {name: sums[name] for name in sums if every_byte or name.endswith(".json")}, progress)
    return folder


def prepare(dataset: str, progress: Callable[[str], None] = print) -> Path:
    """Return the folder of a data set, after making the photographs' crops if there are none yet.

    Raises ValueError if the crops come out otherwise than in the manifest, for example with another JPEG encoder;
    nothing is left behind then.
    """
    expected = checksums(dataset)
    folder = root(dataset)
    if dataset == "photographs" and not folder.is_dir():
        manifest = read(dataset)
        verify_sources(dataset)
        remedy = (
            f"the manifest's crops were made with {manifest['energynn:made_with']}, here is {photographs.made_with()}: "
            "install the versions of requirements.lock, or `energynn manifest build photographs` describes your own"
        )
        photographs.make_crops(folder, lambda fresh: _check(dataset, fresh, progress, remedy))
        progress(f"{dataset}: made {len(expected)} crops in {folder}")
    return folder


def _check(dataset: str, folder: Path, progress: Callable[[str], None], remedy: str) -> None:
    """Raise ValueError at the first file in the folder that is not as the manifest says."""
    expected = checksums(dataset)
    _check_sizes(dataset, folder, remedy)
    advance = meter(dataset, len(expected), "files", progress)
    for name, digest in expected.items():
        if sha256(folder / name) != digest:
            raise ValueError(f"{dataset}: {folder / name} differs from its SHA-256 in the manifest; {remedy}")
        advance(1)
    if folder.is_relative_to(DATA_MANIFESTS):
        return  # an embedded data set shares its folder with the manifest
    # An image too many would be trained on, because ImageFolder takes what it finds.
    unlisted = sorted({str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} - set(expected))
    if unlisted:
        raise ValueError(f"{dataset}: {folder / unlisted[0]} is not in the manifest; {remedy}")


def _check_sizes(dataset: str, folder: Path, remedy: str) -> None:
    for entry in read(dataset)["distribution"]:
        path, size = folder / entry["name"], entry["contentSize"]
        if not path.is_file():
            raise ValueError(f"{dataset}: {path} is missing; {remedy}")
        if f"{path.stat().st_size} B" != size:
            raise ValueError(f"{dataset}: {path} has {path.stat().st_size} B, not {size}; {remedy}")


def verify_tree(
    root: Path, checksums: dict[str, str], progress=print, pieces: dict | None = None, algorithm: str = "sha256"
) -> None:
    """Check the files below ``root`` (name -> hex digest); goes on where an interrupted call stopped (``digests``).

    Raises ValueError naming the first file that is missing or differs.
    """
    pieces = pieces or {name: (f"{root}/{name}", 0, -1) for name in checksums}
    with closing(digests(root, pieces, progress, algorithm)) as found:  # closed at an error, not when it is collected
        for name, digest in found:
            if digest != checksums[name]:
                raise ValueError(f"{pieces[name][0]}: {name} differs from its {algorithm} {checksums[name]}")


def digests(
    root: Path, pieces: dict[str, tuple[str, int, int]], progress=print, algorithm: str = "sha256"
) -> Iterator[tuple[str, str]]:
    """Name and hex digest of pieces of files, each a path, an offset and bytes (-1: to the end), in their order.

    Every digest is noted in build/verified/ with size and modification time of the file as soon as it is known; while
    these stay as they are, the piece is not read again. Raises ValueError naming a file that is missing.
    """
    key = hashlib.sha256(str(Path(root).resolve()).encode()).hexdigest()[:16]
    VERIFIED.mkdir(parents=True, exist_ok=True)
    sidecar = VERIFIED / f"{key}.{algorithm}"
    lines = sidecar.read_text().splitlines() if sidecar.is_file() else []
    known = {fields[0]: (*fields[1:3], fields[3]) for line in lines if len(fields := line.split("\t")) == 5}
    stamps = {}
    for name, (path, offset, size) in pieces.items():
        try:
            found = os.stat(path)
        except FileNotFoundError:
            raise ValueError(f"{path} is missing; copy it again") from None
        stamps[name] = (str(found.st_size - offset if size < 0 else size), str(found.st_mtime_ns))
    new = [name for name, stamp in stamps.items() if known.get(name, ())[:2] != stamp]
    advance = meter(f"{algorithm} of {root}", sum(int(stamps[name][0]) for name in new) / 1e9, "GB", progress)
    stop = threading.Event()

    def digest_of(name: str) -> str:
        path, offset, _ = pieces[name]
        left, result = int(stamps[name][0]), hashlib.new(algorithm)
        with open(path, "rb") as file:
            file.seek(offset)
            while left > 0 and (block := file.read(min(left, BLOCK_B))) and not stop.is_set():
                left -= len(block)
                result.update(block)
                advance(len(block) / 1e9)
        return result.hexdigest()

    names, todo = list(pieces), set(new)
    with ThreadPoolExecutor(HASHING_THREADS) as pool, open(sidecar, "a", buffering=1) as file:
        file.write("\n")  # ends the line at which an interrupted call stopped
        try:
            for start in range(0, len(names), 1024):  # a batch at a time: a pool keeps all that it is given in memory
                batch = names[start : start + 1024]
                fresh = pool.map(digest_of, [name for name in batch if name in todo])
                for name in batch:
                    digest = next(fresh) if name in todo else known[name][2]
                    if name in todo:
                        file.write("\t".join([name, *stamps[name], digest, "end"]) + "\n")
                    yield name, digest
        finally:
            stop.set()  # the threads leave large files at once


def _verify_images(folder: Path, manifest: dict, listings, sums: dict[str, str], progress) -> None:
    """Subsets, the archives' MD5, and every image's SHA-256.

    The pixels of a prepared store have no published digest: only its names and subsets are checked.
    """
    _check_archives(folder, progress)
    for split, listing in zip(imagenet.SPLITS, listings, strict=True):
        if imagenet.subsets(listing) != manifest["energynn:subsets"][split]:
            raise ValueError(f"imagenet: subsets of {split} differ from the manifest; it was made by another rule")
    if listings[0].place.suffix == ".ppm":
        progress(f"imagenet: {folder} is a prepared store; its names were checked, its pixels cannot be")
    else:
        verify_tree(folder, sums, progress, _pieces(listings))


def _check_names(manifest: dict, listings: tuple[imagenet.Listing, ...]) -> None:
    """Raise ValueError naming a class that has other images than in the manifest."""
    for split, listing in zip(imagenet.SPLITS, listings, strict=True):
        expected, found = manifest["energynn:splits"][split], imagenet.summary(listing)
        if found["digest"] != expected["digest"]:
            for name in sorted(set(expected["classes"]) | set(found["classes"])):
                wanted, there = (counts["classes"].get(name, 0) for counts in (expected, found))
                if wanted != there:
                    raise ValueError(f"imagenet: {listing.place}: {split}/{name} has {there} images, not {wanted}")
            raise ValueError(f"imagenet: {listing.place}: images of {split} have other names than in the manifest")


def _check_archives(folder: Path, progress: Callable[[str], None]) -> None:
    there = {name: md5 for name, md5 in imagenet.ARCHIVES.items() if (folder / name).is_file()}
    verify_tree(folder, there, progress, algorithm="md5")


def _pieces(listings: tuple[imagenet.Listing, ...]) -> dict[str, tuple[str, int, int]]:
    return {name.decode(): listing.piece(index) for listing in listings for index, name in enumerate(listing.names)}


def read(dataset: str) -> dict:
    """The data set's manifest.json. Raises ValueError if there is none or it is damaged."""
    path = checksum_file(dataset, DATA_MANIFESTS).with_name("manifest.json")
    try:
        return json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(
            f"{dataset}: {path} is damaged ({error}); `git checkout data_manifests` restores it"
        ) from error


def checksums(dataset: str) -> dict[str, str]:
    """File name -> SHA-256 of a data set, from the list that ``sha256sum -c`` reads too."""
    path = checksum_file(dataset, DATA_MANIFESTS)
    digests = {}
    for line in path.read_text().splitlines():
        digest, separator, name = line.partition("  ")
        if not separator or len(digest) != 64:
            raise ValueError(f"{dataset}: {path} is damaged; `git checkout data_manifests` restores it")
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


def _remedy(dataset: str) -> str:
    if dataset == "era5_ensemble":
        return "`git checkout data_manifests` restores it"
    return f"delete {root(dataset)}, it is made anew at the next use"


def build(dataset: str, source: Path | None = None, progress: Callable[[str], None] = print) -> None:
    """Make a data set's files anew and write the manifest that describes them; for those who maintain one.

    ``source`` is the file that era5_ensemble is packed from, or the folder of what does not ship, which is described as
    it is. Raises ValueError for an unknown data set, or where ``source`` is needed and missing.
    """
    folder = DATA_MANIFESTS / dataset
    place, sums = source if dataset in VARIABLES and source else root(dataset), {}
    if dataset == "photographs":
        shutil.rmtree(place, ignore_errors=True)
        photographs.make_crops(place)
        details = _describe_photographs()
    elif dataset == "era5_ensemble":
        if source is None or not source.is_file():
            raise ValueError(
                "era5_ensemble: give --source, the file era5-levels-members.nc of cfgrib's source distribution"
            )
        folder.mkdir(parents=True, exist_ok=True)
        errors = era5.pack_ensemble(source, folder / "era5_ensemble.nc")
        details = _describe_ensemble(source, errors)
    elif dataset == "era5":
        sums, details = era5_store.describe(place)
    elif dataset == "imagenet":
        listings = imagenet.list_images(place, progress)
        _check_archives(place, progress)
        sums, details = dict(digests(place, _pieces(listings), progress)), _describe_imagenet(listings)
    else:
        raise ValueError(f"dataset: {dataset!r} is not known; choose {', '.join([*DATASETS, *VARIABLES])}")
    files = () if sums else sorted(path for path in place.rglob("*") if path.suffix in (".jpg", ".nc"))
    sums = sums or {str(path.relative_to(place)): sha256(path) for path in files}
    distribution = details.pop("distribution", None) or [
        {"@type": "cr:FileObject", "@id": name, "name": name, "contentUrl": name,
         "contentSize": f"{(place / name).stat().st_size} B", "sha256": digest,
         "encodingFormat": ENCODINGS[Path(name).suffix]}
        for name, digest in sums.items()
    ]  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "SHA256SUMS").write_text("".join(f"{digest}  {name}\n" for name, digest in sums.items()))
    texts = json.loads(DESCRIPTIONS.read_text())
    manifest = {**texts["all"], "name": dataset, **texts[dataset], **details, "energynn:files": len(sums),
                "distribution": distribution}  # fmt: skip
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1, ensure_ascii=False) + "\n")
    print(f"{dataset}: wrote {folder / 'manifest.json'} and SHA256SUMS for {len(sums)} files", file=sys.stderr)


def _describe_photographs() -> dict:
    packages = {"skimage": "scikit-image", "sklearn": "scikit-learn"}
    return {
        "energynn:made_with": photographs.made_with(),
        "energynn:sources": [
            {"class": name, "package": package, "version": version(packages[package]), "file": file, "license": licence,
             "sha256": sha256(photographs.source_path(package, file))}
            for name, (package, file, licence) in photographs.PHOTOGRAPHS.items()
        ],
    }  # fmt: skip


def _describe_ensemble(source: Path, errors: dict[str, float]) -> dict:
    return {
        "energynn:attribution": era5.ATTRIBUTION,
        "energynn:largest_packing_error": errors,
        "energynn:sources": [{"package": "cfgrib (source distribution)", "version": "0.9.15.1",
                              "file": "tests/sample-data/era5-levels-members.nc", "sha256": sha256(source)}],
    }  # fmt: skip


def _describe_imagenet(listings: tuple[imagenet.Listing, ...]) -> dict:
    splits = dict(zip(imagenet.SPLITS, listings, strict=True))
    archives = dict(zip(imagenet.SPLITS, imagenet.ARCHIVES, strict=False))
    return {
        "energynn:complete": all(len(listing) == imagenet.SAMPLES[split] for split, listing in splits.items()),
        "energynn:splits": {split: imagenet.summary(listing) for split, listing in splits.items()},
        "energynn:subsets": {split: imagenet.subsets(listing) for split, listing in splits.items()},
        "distribution": [
            *({"@type": "cr:FileObject", "@id": name, "name": name, "md5": md5, "encodingFormat": "application/x-tar",
               "contentUrl": f"https://image-net.org/data/ILSVRC/2012/{name}"}
              for name, md5 in imagenet.ARCHIVES.items()),
            *({"@type": "cr:FileSet", "@id": f"{split}-images", "name": f"{split} images", "includes": "*.JPEG",
               "containedIn": {"@id": archive}, "encodingFormat": "image/jpeg"}
              for split, archive in archives.items()),
        ],
    }  # fmt: skip
