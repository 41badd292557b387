"""Data sets and what proves that they are what they are said to be: data_manifests/<dataset>/."""

import os
import re
from pathlib import Path

from energynn.data import imagenet, photographs
from energynn.data.folders import list_files, verify_tree
from energynn.experiment.config import NAME_PATTERN, ResNet50Config, RunConfig
from energynn.host import reading
from energynn.host.files import (
    DATA_MANIFESTS,
    IS_CHECKOUT,
    REPOSITORY,
    require_writable_path,
)

# their files lie beside their manifests
EMBEDDED_SETS = (
    "era5_ensemble",
    "others",
    "synthetic",
)
VERIFIABLE_DATASETS = ("era5_ensemble", "photographs", "others")
PHOTOGRAPH_DATASETS = ("photographs", photographs.LARGE_SET)
# The variable with the folder of data that do not ship; it is no part of a run's configuration.
FOLDER_VARIABLES = {"era5": "ENERGYNN_ERA5", "imagenet": "ENERGYNN_IMAGENET"}
RESTORE_REMEDY = (
    "`git checkout data_manifests` restores it"
    if IS_CHECKOUT
    else "install energynn again"
)
GENERATED_DATA_FOLDER = REPOSITORY / "build" / "data"


def read_checksums(dataset: str) -> dict[str, str]:
    """Read file name -> SHA-256 of a data set from the list that ``sha256sum -c`` reads too.

    Raises ValueError if there is none, or if it is damaged.
    """
    path = DATA_MANIFESTS / dataset / "SHA256SUMS"
    if not path.is_file():
        raise ValueError(
            f"dataset {dataset}: no checksums in {path.parent}; put files into its folder, then "
            f"`energynn data describe {dataset}` makes them; of a workload that makes its own data "
            "the dataset is synthetic"
        )
    try:
        return reading.read_checksums(path)
    except ValueError as error:
        raise ValueError(
            f"{dataset}: {error}; {RESTORE_REMEDY}, or `energynn data describe {dataset}` makes it "
            "anew"
        ) from error


def root(dataset: str, given: Path | None = None) -> Path:
    """Find where a data set's files lie: beside its manifest if they are embedded, else below
    build/data/.

    What does not ship lies where a person says, else its environment variable; raises ValueError if
    neither does, and for a path instead of a name: a manifest would be written there.
    """
    if not re.match(NAME_PATTERN, dataset):
        raise ValueError(
            f"dataset: {dataset!r} is no name; link {GENERATED_DATA_FOLDER}/NAME to it"
        )
    if variable := FOLDER_VARIABLES.get(dataset):
        place = given or os.environ.get(variable)
        if not place:
            raise ValueError(
                f"{dataset}: does not ship; set {variable} to its folder (docs/data.md says more)"
            )
        return Path(place)
    if given:
        raise ValueError(
            f"--root: is for {' and '.join(FOLDER_VARIABLES)}; link "
            f"{GENERATED_DATA_FOLDER / dataset} to it"
        )
    return (
        DATA_MANIFESTS if dataset in EMBEDDED_SETS else GENERATED_DATA_FOLDER
    ) / dataset


def verify(dataset: str, folder: Path | None = None, every_byte: bool = False) -> Path:
    """Check a data set against its manifest and return its folder; photographs are made at first
    use.

    ``folder`` is where a data set lies that does not ship, if not where its variable says. Such
    data are large: without ``every_byte`` only names (ImageNet) or notes (ERA5) are compared,
    which takes seconds. Raises ValueError naming data set, file and remedy: no manifest, missing
    or unlisted file, other SHA-256.
    """
    sums = read_checksums(dataset)
    folder = root(dataset, folder)
    if dataset == "imagenet":
        _verify_imagenet(folder, sums, every_byte)
    elif dataset == "era5":
        if unlisted := sorted(
            {each.name for each in folder.glob("[!.]*.json")} - {*sums}
        ):
            raise ValueError(
                f"era5: {folder / unlisted[0]} is not in the manifest; `energynn data describe "
                f"era5 --root {folder}`"
            )
        verify_tree(
            folder,
            {name: sums[name] for name in sums if every_byte or name.endswith(".json")},
        )
    else:
        if dataset in PHOTOGRAPH_DATASETS:
            make_photographs(folder)
        _verify_small_dataset(dataset, folder, sums)
    return folder


def make_photographs(folder: Path) -> None:
    """Make photographs at first use."""
    if not folder.is_dir():
        require_writable_path(folder)
        photographs.write_crops(folder)


def verify_data_of_run(config: RunConfig) -> None:
    """Verify a run's data, and that there are as many images as it asks for. Raises ValueError.

    ImageNet has enough, and its images are slow to list. ResNet50 halves images five times: a
    batch of one pixel has no variance, by which batch norm divides.
    """
    is_alone = isinstance(config, ResNet50Config) and config.local_batch_size == 1
    if is_alone and config.image_size <= 32:
        raise ValueError(
            "local_batch_size: batch norm needs two values; take 2, or an image_size above 32"
        )
    folder = verify(config.dataset)
    if isinstance(config, ResNet50Config) and config.dataset != "imagenet":
        imagenet.select_images_of_run(imagenet.list_images(folder), config)


def _verify_small_dataset(dataset: str, folder: Path, sums: dict[str, str]) -> None:
    """Check every byte of a data set, and that its folder holds nothing else: ImageFolder would
    train on it.
    """
    remedy = RESTORE_REMEDY
    if dataset not in EMBEDDED_SETS:
        remedy = (
            f"crops: delete {folder}, and install the versions of requirements.lock; "
            f"data of your own: restore it, or `energynn data describe {dataset}`"
        )
    try:
        verify_tree(folder, sums)
        if dataset not in EMBEDDED_SETS:  # these share their folder with the manifest
            if unlisted := sorted(set(list_files(folder, {})) - sums.keys()):
                raise ValueError(f"{folder / unlisted[0]} is not in the manifest")
    except ValueError as error:
        raise ValueError(f"{dataset}: {error}; {remedy}") from error


def _verify_imagenet(folder: Path, sums: dict[str, str], every_byte: bool) -> None:
    """Check names of all images; with ``every_byte`` the MD5 of archives, the SHA-256 of files.

    The pixels of a prepared store have no published digest: only its names are checked.
    """
    present = set()
    for listing in imagenet.list_images(folder):
        present.update(map(os.fsdecode, listing.names))
    if different := sorted(present ^ sums.keys()):
        raise ValueError(
            f"imagenet: {folder}: {len(different)} images are only there or only in the manifest, "
            f"the first is {different[0]}; copy them again"
        )
    if every_byte:
        archives = imagenet.ARCHIVE_MD5_DIGESTS
        verify_tree(
            folder,
            {name: archives[name] for name in archives if (folder / name).is_file()},
            algorithm="md5",
        )
        verify_tree(
            folder,
            {name: sums[name] for name in sums if (folder / name).parent.is_dir()},
        )
