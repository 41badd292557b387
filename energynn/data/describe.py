"""Write what describes a data set, data_manifests/<dataset>/, for those who maintain one."""

import json
import mimetypes
import os
import re
import tempfile
from collections import Counter
from functools import partial
from pathlib import Path

from energynn.data import imagenet, manifests, photographs
from energynn.data.folders import digests, list_files, of_file
from energynn.host.files import atomic_write, shipped, write_json

# what is said of each in words
DESCRIPTIONS = shipped("data_manifests") / "descriptions.json"


IN_CLASS = re.compile("(train|val)/.*/")
MAX_CLASSES = 20  # of which each is counted
MAX_NAMED = 5  # files of which one thing is said


def build(dataset: str, source: Path | None = None) -> list[str]:
    """Write the manifest that describes a data set as it lies there; photographs are made anew,
    beside what was there.

    ``source`` is the folder of what does not ship, if not where its variable says. Any other name
    is that of data of one's own, all files of build/data/<dataset>. Returns what was found and left
    out, in lines for people. Raises ValueError where files are missing, or images lie in other
    folders than those of their classes; a manifest that is there stays then as it is.
    """
    if dataset in manifests.EMBEDDED:
        raise ValueError(f"{dataset}: comes with its description; {manifests.RESTORE}")
    folder = manifests.root(dataset, source)
    details = {}
    remarks = {}
    if dataset == "imagenet":
        listings = imagenet.list_images(folder, remarks)
        found = [_counts(listing) for listing in listings]
        sums = {
            os.fsdecode(listing.names[index]): digest
            for listing in listings
            for index, digest in digests(range(len(listing)), listing.digest)
        }
        files = []  # a million of them
    else:
        if dataset in manifests.PHOTOGRAPHS:
            if os.path.lexists(folder):  # who knows what else lies in it
                before = tempfile.mkdtemp(
                    prefix=f"{dataset}-before-", dir=folder.parent
                )
                folder.rename(Path(before) / dataset)
            photographs.make_crops(folder)
            details = {"energynn:sources": photographs.PHOTOGRAPHS}
        names = folder.is_dir() and list(list_files(folder, remarks))
        if not names:
            raise ValueError(f"{dataset}: {folder} has no files; put its files into it")
        found = _images(folder, names, remarks)
        if dataset == "era5" and any(folder.glob("*.part")):
            raise ValueError(
                f"era5: a year of {folder} is not complete; "
                "`energynn data era5` goes on with it"
            )
        sums = dict(digests(names, partial(of_file, folder)))
        files = _file_objects(folder, sums)
    texts = json.loads(DESCRIPTIONS.read_text())
    about = {**texts["all"], "name": dataset, **texts.get(dataset, {}), **details}
    manifest = {**about, "energynn:files": len(sums), "distribution": files}
    target = manifests.DATA_MANIFESTS / dataset
    lines = (f"{digest}  {name}\n" for name, digest in sums.items())
    with atomic_write(target / "SHA256SUMS") as file:
        file.write(os.fsencode("".join(lines)))
    write_json(target / "manifest.json", manifest)
    return [*found, *_summary(remarks)]


def _images(folder: Path, names: list[str], remarks: dict[str, str]) -> list[str]:
    """Tell of the images, if there are any, as a training of ResNet50 would find them.

    Images for another training may lie otherwise, which is said. Raises Misplaced where one split
    has folders of classes, and the other or these folders are a slip.
    """
    images = list(filter(imagenet.is_image, names))
    if not images:
        return []
    try:
        return list(map(_counts, imagenet.list_images(folder, remarks)))
    except ValueError as fault:
        in_classes = any(map(IN_CLASS.match, images))
        if in_classes and isinstance(fault, imagenet.Misplaced):
            raise
        return [f"ResNet50 cannot train on it: {fault}"]


def _counts(listing: imagenet.Listing) -> str:
    """Count the images of a split by kind and, where there are few, by class."""
    kinds = Counter()
    for name in listing.names:
        path = Path(imagenet.shown(name))
        folder = path.parts[1] if len(listing.classes) <= MAX_CLASSES else "*"
        kinds[f"{folder}/*{path.suffix.lower()}"] += 1
    counted = ", ".join(f"{kind} {count}" for kind, count in sorted(kinds.items()))
    classes = len(listing.classes)
    return f"{path.parts[0]}: {len(listing)} images of {classes} classes: {counted}"


def _summary(remarks: dict[str, str]) -> list[str]:
    """Tell each reason once, with the first names."""
    names = {}
    for name, reason in sorted(remarks.items()):
        names.setdefault(reason, []).append(imagenet.shown(os.fsencode(name)))
    return [
        f"{len(these)} {reason}: {', '.join(these[:MAX_NAMED])}"
        + ", ..." * (len(these) > MAX_NAMED)
        for reason, these in names.items()
    ]


def _file_objects(folder: Path, sums: dict[str, str]) -> list[dict]:
    """List files as the Croissant vocabulary describes them."""
    return [
        {
            "@type": "cr:FileObject",
            "@id": name,
            "name": name,
            "contentUrl": name,
            "contentSize": f"{(folder / name).stat().st_size} B",
            "sha256": digest,
            "encodingFormat": mimetypes.guess_type(name)[0]
            or "application/octet-stream",
        }
        for name, digest in sums.items()
    ]
