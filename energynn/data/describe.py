"""Write what describes a data set, data_manifests/<dataset>/, for those who maintain one."""

import json
import mimetypes
import os
import re
from collections import Counter
from functools import partial
from pathlib import Path

from energynn.data import imagenet, manifests, photographs
from energynn.data.folders import compute_digests, digest_of_file, list_files
from energynn.host.files import atomic_write, write_json
from energynn.host.texts import group_by_reason

# what is said of each in words
DESCRIPTIONS_FILE = manifests.DATA_MANIFESTS / "descriptions.json"


CLASS_FOLDER_PATTERN = re.compile("(train|val)/.*/")
MAX_COUNTED_CLASSES = 20  # of which each is counted
MAX_NAMED_FILES = 5  # files of which one thing is said


def build_manifest(dataset: str, source: Path | None = None) -> list[str]:
    """Write the manifest that describes a data set as it lies there; photographs are made if they
    are not there.

    ``source`` is the folder of what does not ship, if not where its variable says. Any other name
    is that of data of one's own, all files of build/data/<dataset>. Returns what was found and left
    out, in lines for people. Raises ValueError where files are missing, or images lie in other
    folders than those of their classes; a manifest that is there stays then as it is.
    """
    if dataset in manifests.EMBEDDED_SETS:
        raise ValueError(
            f"{dataset}: comes with its description; {manifests.RESTORE_REMEDY}"
        )
    folder = manifests.root(dataset, source)
    details = {}
    remarks = {}
    if dataset == "imagenet":
        listings = imagenet.list_images(folder, remarks)
        descriptions = [_count_images(listing) for listing in listings]
        sums = {
            os.fsdecode(listing.names[index]): digest
            for listing in listings
            for index, digest in compute_digests(range(len(listing)), listing.digest)
        }
        files = []  # a million of them
    else:
        if dataset in manifests.PHOTOGRAPH_DATASETS:
            manifests.make_photographs(folder)
            details = {"energynn:sources": photographs.PHOTOGRAPH_SOURCES}
        names = folder.is_dir() and list(list_files(folder, remarks))
        if not names:
            raise ValueError(f"{dataset}: {folder} has no files; put its files into it")
        descriptions = _describe_images(folder, names, remarks)
        if dataset == "era5" and any(folder.glob("*.part")):
            raise ValueError(
                f"era5: a year of {folder} is not complete; "
                "`energynn data era5` goes on with it"
            )
        sums = dict(compute_digests(names, partial(digest_of_file, folder)))
        files = _croissant_files(folder, sums)
    texts = json.loads(DESCRIPTIONS_FILE.read_text())
    manifest = {
        **texts["all"],
        "name": dataset,
        **texts.get(dataset, {}),
        **details,
        "energynn:files": len(sums),
        "distribution": files,
    }
    target = manifests.DATA_MANIFESTS / dataset
    lines = (f"{digest}  {name}\n" for name, digest in sums.items())
    with atomic_write(target / "SHA256SUMS") as file:
        file.write(os.fsencode("".join(lines)))
    write_json(target / "manifest.json", manifest)
    told = {
        imagenet.printable_file_name(os.fsencode(name)): remarks[name]
        for name in sorted(remarks)
    }
    return [*descriptions, *group_by_reason(told, MAX_NAMED_FILES)]


def _describe_images(
    folder: Path, names: list[str], remarks: dict[str, str]
) -> list[str]:
    """Tell of the images, if there are any, as a training of ResNet50 would find them.

    Images for another training may lie otherwise, which is said. Raises MisplacedImagesError where
    one split has folders of classes, and the other or these folders are a slip.
    """
    images = list(filter(imagenet.is_image, names))
    if not images:
        return []
    try:
        return list(map(_count_images, imagenet.list_images(folder, remarks)))
    except ValueError as fault:
        in_classes = any(map(CLASS_FOLDER_PATTERN.match, images))
        if in_classes and isinstance(fault, imagenet.MisplacedImagesError):
            raise
        return [f"ResNet50 cannot train on it: {fault}"]


def _count_images(listing: imagenet.ImageListing) -> str:
    """Count the images of a split by kind and, where there are few, by class."""
    kinds = Counter()
    for name in listing.names:
        path = Path(imagenet.printable_file_name(name))
        folder = path.parts[1] if len(listing.classes) <= MAX_COUNTED_CLASSES else "*"
        kinds[f"{folder}/*{path.suffix.lower()}"] += 1
    counted = ", ".join(f"{kind} {count}" for kind, count in sorted(kinds.items()))
    classes = len(listing.classes)
    return f"{path.parts[0]}: {len(listing)} images of {classes} classes: {counted}"


def _croissant_files(folder: Path, sums: dict[str, str]) -> list[dict]:
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
