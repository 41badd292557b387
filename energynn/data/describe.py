"""Write what describes a data set, data_manifests/<dataset>/, for those who maintain one."""

from __future__ import annotations

import hashlib
import json
import mimetypes
import shutil
from functools import partial
from pathlib import Path

from energynn.data import imagenet, manifests, photographs
from energynn.data.digests import digests, of_file
from energynn.files import shipped, write_json

# what is said of each in words
DESCRIPTIONS = shipped("data_manifests") / "descriptions.json"


def build(dataset: str, source: Path | None = None) -> None:
    """Write the manifest that describes a data set as it lies there; photographs are made anew.

    ``source`` is the folder of what does not ship, if not where its variable says. Any other name
    is that of data of one's own, all files of build/data/<dataset>. Raises ValueError where these
    are missing.
    """
    if dataset in manifests.EMBEDDED:
        raise ValueError(f"{dataset}: comes with its description; {manifests.RESTORE}")
    folder = (dataset in manifests.VARIABLES and source) or manifests.root(dataset)
    details: dict = {}
    if dataset == "imagenet":
        sums = _imagenet(folder)
        files = []  # a million of them
    else:
        if dataset in manifests.PHOTOGRAPHS:
            shutil.rmtree(folder, ignore_errors=True)
            photographs.make_crops(folder)
            details = {"energynn:sources": photographs.PHOTOGRAPHS}
        paths = sorted(path for path in folder.rglob("*") if path.is_file())
        names = [str(path.relative_to(folder)) for path in paths]
        if not names:
            raise ValueError(f"{dataset}: {folder} has no files; put its files into it")
        if dataset == "era5" and any(folder.glob("*.part")):
            remedy = "`energynn data era5` goes on with it"
            raise ValueError(f"era5: a year of {folder} is not complete; {remedy}")
        sums = dict(digests(names, partial(of_file, folder)))
        files = _file_objects(folder, sums)
    texts = json.loads(DESCRIPTIONS.read_text())
    manifest = {**texts["all"], "name": dataset, **texts.get(dataset, {}), **details}
    manifest |= {"energynn:files": len(sums), "distribution": files}
    target = manifests.DATA_MANIFESTS / dataset
    target.mkdir(parents=True, exist_ok=True)
    lines = (f"{digest}  {name}\n" for name, digest in sums.items())
    (target / "SHA256SUMS").write_text("".join(lines))
    write_json(target / "manifest.json", manifest)


def _imagenet(folder: Path) -> dict[str, str]:
    """Compute SHA-256 of every image, also of those in archives."""
    images = {}
    for listing in imagenet.list_images(folder):
        for index, name in enumerate(listing.names):
            images[name.decode()] = partial(listing.read, index)

    def digest_of(name: str) -> str:
        return hashlib.sha256(images[name]()).hexdigest()

    return dict(digests(images, digest_of))


def _file_objects(folder: Path, sums: dict[str, str]) -> list[dict]:
    """List files as the Croissant vocabulary describes them."""
    entries = []
    for name, digest in sums.items():
        encoding = mimetypes.guess_type(name)[0] or "application/octet-stream"
        entry = {
            "@type": "cr:FileObject",
            "@id": name,
            "name": name,
            "contentUrl": name,
            "contentSize": f"{(folder / name).stat().st_size} B",
            "sha256": digest,
            "encodingFormat": encoding,
        }
        entries.append(entry)
    return entries
