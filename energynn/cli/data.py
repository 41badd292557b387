"""Commands that verify, describe and prepare data."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from energynn.cli.options import group, tell

data = group("Verify, describe and prepare data sets.")
Root = Annotated[
    Path | None,
    Option(metavar="DIR", help="where imagenet or the store of era5 lies"),
]
Store = Annotated[Path, Option(metavar="DIR", help="folder of the store")]


@data.command()
def verify(
    datasets: Annotated[
        list[str], Argument(metavar="DATASET", help="default: those that ship")
    ] = (),
    root: Root = None,
) -> None:
    """Compare every byte of data sets with their checksums."""
    from energynn.data import manifests
    from energynn.host.reading import one_fault

    for dataset in datasets or manifests.DATASETS:
        with one_fault(dataset):
            folder = manifests.verify(dataset, folder=root, every_byte=True)
        tell(
            f"{dataset}: every file of its manifest is there and has its SHA-256 ({folder})"
        )


@data.command()
def describe(
    dataset: Annotated[str, Argument(metavar="DATASET")],
    root: Root = None,
) -> None:
    """Write the checksums and the manifest of a data set."""
    from energynn.data import describe
    from energynn.host.reading import one_fault

    with one_fault(dataset):
        found = describe.build(dataset, root)
    for line in found:
        tell(f"{dataset}: {line}")
    verify([dataset], root)


@data.command()
def imagenet(
    root: Annotated[
        Path, Option(metavar="DIR", help="folder tree or official archives")
    ],
    out: Store,
) -> None:
    """Write ImageNet as uint8 pixels, 256 on the shorter side: training decodes no JPEG."""
    from energynn.data import imagenet

    imagenet.prepare(root, out)
    tell(f"{out}: complete; other pixels than the originals: another experiment")


@data.command()
def era5(
    source: Annotated[
        str,
        Option(help="FourCastNet's HDF5 folder, a Zarr store or NetCDF files"),
    ],
    out: Store,
    years: Annotated[
        str, Option(help="those of the paper by default")
    ] = "1979-2017,2019",
) -> None:
    """Write the store that FourCastNet trains on at full size; resumable."""
    from energynn.data import era5_store
    from energynn.experiment.config import parse_years

    remarks = era5_store.prepare(source, out, parse_years(years))
    for remark in remarks:
        tell(remark)
    state = "written" if remarks else "complete"
    tell(f"{out}: {state}; `energynn data describe era5 --root {out}` describes it")
