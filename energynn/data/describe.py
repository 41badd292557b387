"""Make a data set's files anew and write what describes them, data_manifests/<dataset>/; for those who maintain one."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path

from energynn.config import FOLDER_NAME, IMAGENET_IMAGES, suggestion
from energynn.data import era5, era5_store, imagenet, manifests, photographs
from energynn.data.digests import digests
from energynn.files import require_place, sha256, shipped

DESCRIPTIONS = shipped("data_manifests") / "descriptions.json"  # what ``build`` says of each in words
ENCODINGS = {
    ".jpg": "image/jpeg",
    ".nc": "application/netcdf",
    ".json": "application/json",
}
PACKAGES = {"skimage": "scikit-image", "sklearn": "scikit-learn"}
Description = tuple[dict[str, str], dict, list[dict]]  # name -> SHA-256, what is particular, the files as Croissant


def build(dataset: str, source: Path | None = None, progress: Callable[[str], None] = print) -> None:
    """Make a data set's files anew and write the manifest that describes them.

    ``source`` is the file that era5_ensemble is packed from, or the folder of what does not ship, which is described as
    it is. Any other name is that of data of one's own, all files of build/data/<dataset>. Raises ValueError where
    these are missing, or ``source`` is where it is needed.
    """
    folder = manifests.DATA_MANIFESTS / dataset
    require_place(folder / "SHA256SUMS")
    describe = BUILDERS.get(dataset, partial(_own, dataset))
    sums, details, distribution = describe(source, progress)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "SHA256SUMS").write_text("".join(f"{digest}  {name}\n" for name, digest in sums.items()))
    texts = json.loads(DESCRIPTIONS.read_text())
    manifest = {**texts["all"], "name": dataset, **texts.get(dataset, {}), **details}
    manifest |= {"energynn:files": len(sums), "distribution": distribution}
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1, ensure_ascii=False) + "\n")
    print(f"{dataset}: wrote {folder / 'manifest.json'} and SHA256SUMS for {len(sums)} files", file=sys.stderr)


def _era5_ensemble(source: Path | None, _progress) -> Description:
    if source is None or not source.is_file():
        raise ValueError(
            "era5_ensemble: give --source, the file era5-levels-members.nc of cfgrib's source distribution"
        )
    folder = manifests.root("era5_ensemble")
    folder.mkdir(parents=True, exist_ok=True)
    errors = era5.pack_ensemble(source, folder / "era5_ensemble.nc")
    origin = {
        "package": "cfgrib (source distribution)",
        "version": "0.9.15.1",
        "file": "tests/sample-data/era5-levels-members.nc",
        "sha256": sha256(source),
    }
    details = {
        "energynn:attribution": era5.ATTRIBUTION,
        "energynn:largest_packing_error": errors,
        "energynn:sources": [origin],
    }
    sums = _sums(folder, ".nc")
    return sums, details, _file_objects(folder, sums)


def _photographs(dataset: str, _source, _progress) -> Description:
    folder = manifests.root(dataset)
    shutil.rmtree(folder, ignore_errors=True)
    photographs.make_crops(folder)
    sources = []
    for name, (package, file, licence) in photographs.PHOTOGRAPHS.items():
        source = {"class": name, "package": package, "version": version(PACKAGES[package]), "file": file}
        source |= {"license": licence, "sha256": sha256(photographs.source_path(package, file))}
        sources.append(source)
    sums = _sums(folder, ".jpg")
    details = {"energynn:made_with": photographs.made_with(), "energynn:sources": sources}
    return sums, details, _file_objects(folder, sums)


def _own(dataset: str, _source, _progress) -> Description:
    folder = manifests.root(dataset)
    if not re.match(FOLDER_NAME, dataset) or not folder.is_dir():
        near = suggestion(dataset, BUILDERS)
        raise ValueError(f"{dataset}: {folder} is no folder; put its files into it, or link it there{near}")
    sums = _sums(folder, "")
    return sums, {}, _file_objects(folder, sums)


def _era5(source: Path | None, _progress) -> Description:
    folder = source or manifests.root("era5")
    sums, details = era5_store.describe(folder)
    return sums, details, _file_objects(folder, sums)


def _imagenet(source: Path | None, progress: Callable[[str], None]) -> Description:
    folder = source or manifests.root("imagenet")
    listings = imagenet.list_images(folder, progress)
    manifests.check_archives(folder, progress)
    sums = dict(digests(folder, imagenet.pieces(listings), progress))
    splits = dict(zip(imagenet.SPLITS, listings, strict=True))
    details = {
        "energynn:complete": all(len(listing) == IMAGENET_IMAGES[split] for split, listing in splits.items()),
        "energynn:splits": {split: imagenet.summary(listing) for split, listing in splits.items()},
        "energynn:subsets": {split: imagenet.subsets(listing) for split, listing in splits.items()},
    }
    return sums, details, _official_archives()


BUILDERS = {"era5_ensemble": _era5_ensemble, "era5": _era5, "imagenet": _imagenet}
BUILDERS |= {dataset: partial(_photographs, dataset) for dataset in manifests.PHOTOGRAPHS}


def _official_archives() -> list[dict]:
    """ImageNet's archives with their published MD5, and the images of each split in one of them."""
    entries = []
    for name, md5 in imagenet.ARCHIVES.items():
        entry = {"@type": "cr:FileObject", "@id": name, "name": name, "md5": md5, "encodingFormat": "application/x-tar"}
        entries.append(entry | {"contentUrl": f"https://image-net.org/data/ILSVRC/2012/{name}"})
    archives = (imagenet.TRAINING_ARCHIVE, imagenet.VALIDATION_ARCHIVE)
    for split, archive in zip(imagenet.SPLITS, archives, strict=True):
        entry = {"@type": "cr:FileSet", "@id": f"{split}-images", "name": f"{split} images", "includes": "*.JPEG"}
        entries.append(entry | {"containedIn": {"@id": archive}, "encodingFormat": "image/jpeg"})
    return entries


def _sums(folder: Path, suffix: str) -> dict[str, str]:
    """Name -> SHA-256 of the files below a folder that end so."""
    paths = sorted(path for path in folder.rglob("*") if path.name.endswith(suffix) and path.is_file())
    return {str(path.relative_to(folder)): sha256(path) for path in paths}


def _file_objects(folder: Path, sums: dict[str, str]) -> list[dict]:
    """Files as the Croissant vocabulary describes them."""
    entries = []
    for name, digest in sums.items():
        entry = {"@type": "cr:FileObject", "@id": name, "name": name, "contentUrl": name}
        entry |= {"contentSize": f"{(folder / name).stat().st_size} B", "sha256": digest}
        entries.append(entry | {"encodingFormat": ENCODINGS.get(Path(name).suffix, "application/octet-stream")})
    return entries
