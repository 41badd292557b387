"""Commands that verify, describe and prepare data."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from energynn.cli.options import make_command_group, print_answer

data = make_command_group("Verify, describe and prepare data sets.")
RootOption = Annotated[
    Path | None,
    Option(metavar="DIR", help="where imagenet or the store of era5 lies"),
]
StoreOption = Annotated[Path, Option(metavar="DIR", help="folder of the store")]


@data.command()
def verify(
    datasets: Annotated[
        list[str], Argument(metavar="DATASET", help="default: those that ship")
    ] = (),
    root: RootOption = None,
) -> None:
    """Compare every byte of data sets with their checksums."""
    from energynn.data import manifests
    from energynn.host.reading import join_faults

    for dataset in datasets or manifests.VERIFIABLE_DATASETS:
        with join_faults(dataset):
            folder = manifests.verify(dataset, folder=root, every_byte=True)
        how = "no pixel is checked" if [*folder.glob("*.ppm")] else "has its SHA-256"
        print_answer(
            f"{dataset}: every file of its manifest is there and {how} ({folder})"
        )


@data.command()
def describe(
    dataset: Annotated[str, Argument(metavar="DATASET")],
    root: RootOption = None,
) -> None:
    """Write the checksums and the manifest of a data set."""
    from energynn.data import describe
    from energynn.host.reading import join_faults

    with join_faults(dataset):
        lines = describe.build_manifest(dataset, root)
    for line in lines:
        print_answer(f"{dataset}: {line}")
    verify([dataset], root)


@data.command()
def imagenet(
    root: Annotated[
        Path, Option(metavar="DIR", help="folder tree or official archives")
    ],
    out: StoreOption,
) -> None:
    """Write ImageNet as uint8 pixels, 256 on the shorter side: training decodes no JPEG."""
    from energynn.data import imagenet

    imagenet.write_ppm_store(root, out)
    print_answer(
        f"{out}: complete; other pixels than the originals: another experiment"
    )


@data.command()
def era5(
    source: Annotated[
        str,
        Option(help="FourCastNet's HDF5 folder, a Zarr store or NetCDF files"),
    ],
    out: StoreOption,
    years: Annotated[
        str, Option(help="those of the paper by default")
    ] = "1979-2017,2019",
) -> None:
    """Write the store that FourCastNet trains on at full size; resumable."""
    from energynn.data import era5_store
    from energynn.experiment.config import parse_years

    remarks = era5_store.write_store(source, out, parse_years(years))
    for remark in remarks:
        print_answer(remark)
    state = "written" if remarks else "complete"
    print_answer(
        f"{out}: {state}; years that were there stayed; `energynn data describe era5 --root "
        f"{out}` describes it"
    )
