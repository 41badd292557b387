"""Commands that verify, describe and prepare data: manifest, imagenet, era5."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from energynn.cli.options import add_command, count, tell


def add_manifest(commands) -> None:
    text = "verify the data sets, or describe one anew"
    parser = add_command(commands, manifest, text, "energynn manifest verify photographs")
    parser.add_argument("action", choices=["verify", "build"], help="compare with the checksums, or write them")
    parser.add_argument("dataset", nargs="*", help="default: those that come with the project")
    parser.add_argument("--source", type=Path, help="build era5_ensemble: the NetCDF file it is packed from")
    parser.add_argument("--root", type=Path, help="where imagenet (tree, archives or store) or era5 (store) lies")


def manifest(options) -> int:
    from energynn.data import describe, manifests
    from energynn.reading import one_fault

    for dataset in options.dataset or manifests.DATASETS:
        with one_fault(dataset):
            if options.action == "build":
                describe.build(dataset, options.root or options.source)
            root = manifests.verify(dataset, folder=options.root, every_byte=True)
        message = f"{dataset}: every file is there and has its SHA-256"
        if (root / "train.ppm").is_file():
            message += ", but for a prepared store's pixels, of which none is known"
        tell(f"{message} ({root})")
    return 0


def add_imagenet(commands) -> None:
    text = "write ImageNet as uint8 pixels, so that training decodes no JPEG"
    parser = add_command(commands, imagenet, text, "energynn imagenet prepare --root imagenet --out store")
    parser.add_argument("action", choices=["prepare"], help="the only one")
    parser.add_argument("--out", type=Path, required=True, help="folder of the store")
    parser.add_argument("--root", type=Path, required=True, help="ImageNet's folder tree or the official archives")
    parser.add_argument(
        "--shorter-side", type=_pixels, default=256, help="pixels; 0 keeps the original size (default 256)"
    )


def _pixels(text: str) -> int:
    return count(text) if int(text) else 0


def imagenet(options) -> int:
    from energynn.data import imagenet
    from energynn.measure import energy

    options.out.mkdir(parents=True, exist_ok=True)
    with _sampled(options.out):
        bad = imagenet.prepare(options.root, options.out, options.shorter_side)
    cost = energy.cost_so_far(options.out)
    written_GB = sum(path.stat().st_size for path in options.out.glob("*.ppm")) / 1e9
    used_kWh = cost["energy_total_J"] / energy.JOULE_PER_KWH
    tell(
        f"{options.out}: {written_GB:.3g} GB in {cost['seconds']:.1f} s with {used_kWh:.3g} kWh "
        f"({cost['energy_total_provenance']}); "
        "other pixels than the originals', so training with them is another experiment"
    )
    for line in bad:
        print(f"cannot be decoded: {line}")
    return 1 if bad else 0


@contextlib.contextmanager
def _sampled(folder: Path) -> Iterator[None]:
    """Sample the power of this machine once a second into a new file of the folder."""
    import time

    from energynn.measure import machine, sensors

    backends, problems = sensors.find(machine.CPU_MODEL)
    sampler = sensors.Sampler(folder / f"samples-{time.time_ns()}.jsonl", backends, 1.0, problems)
    sampler.start()
    try:
        yield
    finally:
        sampler.stop()


def add_era5(commands) -> None:
    text = "write the store that FourCastNet trains on at full size; resumable"
    parser = add_command(commands, era5, text, "energynn era5 prepare --source fourcastnet_hdf5 --out store")
    parser.add_argument("action", choices=["prepare"], help="the only one")
    parser.add_argument("--out", type=Path, required=True, help="folder of the store")
    parser.add_argument("--source", required=True, help="FourCastNet's HDF5 folder, or a Zarr store or NetCDF files")
    parser.add_argument("--years", default="1979-2017,2019", help="default: those of the paper, %(default)s")
    parser.add_argument("--workers", type=count, default=4, help="states that are read at the same time")


def era5(options) -> int:
    from energynn.data import era5_store

    era5_store.prepare(options.source, options.out, era5_store.parse_years(options.years), options.workers)
    tell(f"{options.out}: complete; `energynn manifest build era5 --root {options.out}` describes it")
    return 0
