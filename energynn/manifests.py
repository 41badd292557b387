"""Data sets and what proves that they are what they are said to be: data_manifests/<dataset>/."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

from energynn.config import DATA_MANIFESTS, REPOSITORY
from energynn.data import era5, era5_store, photographs
from energynn.records import sha256

DATASETS = ("era5_ensemble", "photographs")
ENCODINGS = {".jpg": "image/jpeg", ".nc": "application/netcdf", ".json": "application/json",
             ".npy": "application/octet-stream"}  # fmt: skip
GENERATED = REPOSITORY / "build" / "data"
CONTEXT = {
    "@language": "en", "@vocab": "https://schema.org/", "citeAs": "cr:citeAs", "conformsTo": "dct:conformsTo",
    "cr": "http://mlcommons.org/croissant/", "dct": "http://purl.org/dc/terms/", "energynn": "urn:energynn:",
    "sc": "https://schema.org/",
}  # fmt: skip


def root(dataset: str) -> Path:
    """Where a data set's files lie: beside its manifest if they are embedded, else below build/data/."""
    return DATA_MANIFESTS / dataset if dataset == "era5_ensemble" else GENERATED / dataset


def verify(dataset: str, progress: Callable[[str], None] = print, data_root: str | Path = "") -> Path:
    """Check every file of a data set against its manifest and return its folder; made at first use if it can be.

    ``data_root`` is the folder of a data set that is neither embedded nor made here: "era5".
    Raises ValueError naming the data set, the file and the remedy: no manifest, missing or unlisted file, other size
    or SHA-256.
    """
    if dataset == "era5":
        if not data_root:
            raise ValueError("era5: name the folder of the prepared store (data_root, or --root on the command line)")
        era5_store.verify_files(Path(data_root), checksums(dataset), progress)
        return Path(data_root)
    folder = prepare(dataset, progress)
    _check(dataset, folder, progress, _remedy(dataset))
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
    sizes = {entry["name"]: entry["contentSize"] for entry in read(dataset)["distribution"]}
    begun = last = time.monotonic()
    for index, (name, digest) in enumerate(expected.items()):
        path = folder / name
        if not path.is_file():
            raise ValueError(f"{dataset}: {path} is missing; {remedy}")
        if f"{path.stat().st_size} B" != sizes.get(name):
            raise ValueError(f"{dataset}: {path} has {path.stat().st_size} B, not {sizes.get(name)}; {remedy}")
        if sha256(path) != digest:
            raise ValueError(f"{dataset}: {path} differs from its SHA-256 in the manifest; {remedy}")
        now = time.monotonic()
        if now - last > 2:
            last, rate = now, (index + 1) / (now - begun)
            progress(f"{dataset}: {index + 1} of {len(expected)} files, {(len(expected) - index) / rate:.0f} s left")
    if folder.is_relative_to(DATA_MANIFESTS):
        return  # an embedded data set shares its folder with the manifest
    # An image too many would be trained on, because ImageFolder takes what it finds.
    unlisted = sorted({str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} - set(expected))
    if unlisted:
        raise ValueError(f"{dataset}: {folder / unlisted[0]} is not in the manifest; {remedy}")


def read(dataset: str) -> dict:
    """The data set's manifest.json. Raises ValueError if there is none or it is damaged."""
    path = DATA_MANIFESTS / dataset / "manifest.json"
    if not path.is_file() or not path.with_name("SHA256SUMS").is_file():
        known = sorted(found.parent.name for found in DATA_MANIFESTS.glob("*/manifest.json"))
        raise ValueError(
            f"dataset {dataset}: no manifest in {path.parent}; known are {', '.join(known) or 'none'}; "
            "`git checkout data_manifests` restores them, `energynn manifest build` describes data of your own"
        )
    try:
        return json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{dataset}: {path} is damaged ({error}); `git checkout data_manifests` restores it"
        ) from error


def checksums(dataset: str) -> dict[str, str]:
    """File name -> SHA-256 of a data set, from the list that ``sha256sum -c`` reads too."""
    read(dataset)
    path = DATA_MANIFESTS / dataset / "SHA256SUMS"
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


def build(dataset: str, source: Path | None = None, data_root: Path | None = None) -> None:
    """Make a data set's files anew and write the manifest that describes them; for those who maintain one.

    "era5" is not made, only described: the store in ``data_root``.

    Raises ValueError for an unknown data set, or where ``source`` is needed and missing.
    """
    folder, sums = DATA_MANIFESTS / dataset, {}
    if dataset == "era5":
        if data_root is None:
            raise ValueError("era5: give --root, the folder that `energynn era5 prepare` wrote")
        sums, details = era5_store.describe(data_root)
    elif dataset == "photographs":
        shutil.rmtree(root(dataset), ignore_errors=True)
        photographs.make_crops(root(dataset))
        details = _describe_photographs()
    elif dataset == "era5_ensemble":
        if source is None or not source.is_file():
            raise ValueError(
                "era5_ensemble: give --source, the file era5-levels-members.nc of cfgrib's source distribution"
            )
        folder.mkdir(parents=True, exist_ok=True)
        errors = era5.pack_ensemble(source, folder / "era5_ensemble.nc")
        details = _describe_ensemble(source, errors)
    else:
        raise ValueError(f"dataset: {dataset!r} is not known; choose photographs, era5_ensemble or era5")
    data_root = data_root or root(dataset)
    files = sorted(path for path in data_root.rglob("*") if path.suffix in (".jpg", ".nc"))
    sums = sums or {str(path.relative_to(data_root)): sha256(path) for path in files}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "SHA256SUMS").write_text("".join(f"{digest}  {name}\n" for name, digest in sums.items()))
    manifest = {
        "@context": CONTEXT,
        "@type": "sc:Dataset",
        "conformsTo": "http://mlcommons.org/croissant/1.0",
        "name": dataset,
        "version": "1.0.0",
        "datePublished": "2026-11-21",
        **details,
        "energynn:files": len(sums),
        "distribution": [
            {"@type": "cr:FileObject", "@id": name, "name": name, "contentUrl": name,
             "contentSize": f"{(data_root / name).stat().st_size} B", "sha256": digest,
             "encodingFormat": ENCODINGS[Path(name).suffix]}
            for name, digest in sums.items()
        ],
    }  # fmt: skip
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1, ensure_ascii=False) + "\n")
    print(f"{dataset}: wrote {folder / 'manifest.json'} and SHA256SUMS for {len(sums)} files", file=sys.stderr)


def _describe_photographs() -> dict:
    packages = {"skimage": "scikit-image", "sklearn": "scikit-learn"}
    return {
        "description": "Ten-class image set for the path that ImageNet takes: JPEG files in an ImageFolder tree. An "
        "easy task: the class of a crop is the photograph that it was cut from.",
        "license": "as of each photograph, see energynn:sources",
        "url": "https://scikit-image.org/docs/stable/api/skimage.data.html",
        "citeAs": "The scikit-image and scikit-learn developers; photographers as named in energynn:sources",
        "energynn:rule": f"energynn.data.photographs.make_crops: per class {photographs.CROPS['train']} training crops "
        f"of {photographs.CROP_PIXELS} x {photographs.CROP_PIXELS} pixels from the left {photographs.TRAIN_SHARE:.0%} "
        f"of the photograph and {photographs.CROPS['val']} validation crops from the rest, at positions from NumPy's "
        f"default generator seeded with [{photographs.SEED}, class index]; JPEG quality {photographs.JPEG_QUALITY}",
        "energynn:made_with": photographs.made_with(),
        "energynn:split": f"train: left {photographs.TRAIN_SHARE:.0%} of each photograph; val: the rest; "
        "no pixel is in both",
        "energynn:sources": [
            {"class": name, "package": package, "version": version(packages[package]), "file": file, "license": licence,
             "sha256": sha256(photographs.source_path(package, file))}
            for name, (package, file, licence) in photographs.PHOTOGRAPHS.items()
        ],
    }  # fmt: skip


def _describe_ensemble(source: Path, errors: dict[str, float]) -> dict:
    return {
        "description": "ERA5 ensemble: temperature and geopotential at 850 and 500 hPa, 10 members, 4 times 12 h apart "
        "(2017-01-01 00 UTC to 2017-01-02 12 UTC), 3 degrees global, 61 x 120. Members are near copies of each other: "
        "split by time, never by member.",
        "license": "Licence to Use Copernicus Products",
        "url": "https://doi.org/10.24381/cds.bd0915c6",
        "citeAs": "Hersbach et al. 2020, The ERA5 global reanalysis, doi:10.1002/qj.3803",
        "energynn:attribution": era5.ATTRIBUTION,
        "energynn:rule": "energynn.data.era5.pack_ensemble: 16-bit integers with scale and offset per channel, "
        "dimensions member, time, latitude, longitude; nothing regridded or left out",
        "energynn:split": "training: states of the first three times; test: the last time, as a target only",
        "energynn:largest_packing_error": errors,
        "energynn:sources": [{"package": "cfgrib (source distribution)", "version": "0.9.15.1",
                              "file": "tests/sample-data/era5-levels-members.nc", "sha256": sha256(source)}],
    }  # fmt: skip
