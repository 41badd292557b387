"""Stage-in unpacks what a run reads, no file more, and the trainer finds in it the samples of the whole data set."""

import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from energynn import cli, config, files
from energynn.data import digests, imagenet, manifests, stage_in
from energynn.train import fourcastnet, resnet50
from energynn.train.distributed import World
from tests.data.test_era5_stores import SMALL, prepared

ALONE = World(0, 1, 0, torch.device("cpu"), "h")
SYNSETS = {"n01": 4, "n02": 2, "n03": 5}
SOME = dict(training_samples=5, validation_samples=4)
ALL = dict(training_samples=0, validation_samples=0)


@pytest.fixture
def manifest(tmp_path, monkeypatch):
    """A function that describes a folder as a data set; the manifest is of this test alone."""
    monkeypatch.setattr(manifests, "DATA_MANIFESTS", tmp_path / "data_manifests")
    monkeypatch.setattr(digests, "VERIFIED", tmp_path / "verified")

    def build(dataset, folder):
        assert cli.main(["data", "describe", dataset, "--root", str(folder)]) == 0
        return folder

    return build


@pytest.fixture
def tree(tmp_path, manifest):
    """Eleven images to train on and six to validate on."""
    for synset, count in SYNSETS.items():
        for split, number in (("train", count), ("val", 2)):
            (tmp_path / "tree" / split / synset).mkdir(parents=True)
            for k in range(number):
                (tmp_path / "tree" / split / synset / f"{synset}_{k}.JPEG").write_text(f"{split} {synset} {k}")
    return manifest("imagenet", tmp_path / "tree")


def packed(folder, ending=".tar"):
    archive = Path(f"{folder}{ending}")
    subprocess.run(["tar", "-C", folder, "-caf", archive, "."], check=True)
    return archive


def unpacked(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("ending", [".tar", ".tar.gz", ".tar.zst"])
@pytest.mark.parametrize("selection, told", [(SOME, "9 of 17 files"), (ALL, "17 of 17 files")])
def test_the_images_of_a_run_are_unpacked_and_are_those_that_it_reads_of_the_tree(
    tree, tmp_path, monkeypatch, ending, selection, told
):
    run, node = config.make("resnet50", dataset="imagenet", **selection), tmp_path / "node"
    assert stage_in.unpack(packed(tree, ending), node, run).startswith(told)
    assert len(unpacked(node)) == int(told.split()[0]) + 1 and imagenet.ALL_NAMES in unpacked(node)

    def samples(folder):
        monkeypatch.setenv("ENERGYNN_IMAGENET", str(folder))
        found = []
        for images in resnet50.load_images(run, ALONE):
            found += [
                (images.listing.read(k), images.listing.labels[k], images.listing.classes) for k in images.indices
            ]
        return found

    assert samples(node) == samples(tree) and len(samples(node)) == int(told.split()[0])


def test_a_prepared_store_is_unpacked_whole(tree, tmp_path, monkeypatch):
    imagenet.prepare(tree, tmp_path / "store")
    run = config.make("resnet50", dataset="imagenet", image_loading="store", **SOME)
    assert stage_in.unpack(packed(tmp_path / "store"), tmp_path / "node", run).startswith("5 of 5 files")
    monkeypatch.setenv("ENERGYNN_IMAGENET", str(tmp_path / "node"))
    assert len(resnet50.load_images(run, ALONE)[0]) == 5


def test_of_era5_the_years_of_a_run_are_unpacked_and_suffice_for_it(tmp_path, manifest, monkeypatch):
    store = manifest("era5", prepared(tmp_path, y2014=4, y2015=9, y2016=8, y2017=4, y2019=39))
    run, node = config.make(**SMALL), tmp_path / "node"
    assert stage_in.unpack(packed(store), node, run).startswith("9 of 15 files")
    assert {name for name in unpacked(node) if "2014" in name or "2017" in name} == set()
    splits = []
    for folder in (store, node):
        monkeypatch.setenv("ENERGYNN_ERA5", str(folder))
        monkeypatch.setattr(fourcastnet.distributed, "require_same_data", lambda *_: None)
        splits.append(fourcastnet.load_splits(run, ALONE))
    for whole, staged in zip(*splits, strict=True):
        assert len(whole.sequences) == len(staged.sequences) > 0
        assert np.array_equal(whole.sequences[0], staged.sequences[0]) and np.array_equal(whole.std, staged.std)


def test_a_file_that_a_run_reads_and_the_archive_has_not_got_is_named_in_one_line(tree, tmp_path, capsys):
    run = config.make("resnet50", dataset="imagenet", **SOME)
    files.write_json(tmp_path / "run.json", config.to_dict(run))
    read = manifests.files_read(run)
    unread = next(name for name in manifests.checksums("imagenet") if name not in read)
    (tree / unread).unlink()
    assert stage_in.main(tmp_path / "run.json", packed(tree), tmp_path / "node") == 0
    assert "9 of 16 files" in capsys.readouterr().out
    (tree / read[0]).unlink()
    assert stage_in.main(tmp_path / "run.json", packed(tree), tmp_path / "node") == 1
    assert (
        capsys.readouterr().err
        == f"{stage_in.FAILED}{tree}.tar has no {read[0]}, which the run reads; pack the data again\n"
    )
    Path(f"{tree}.tar").write_bytes(b"no archive")
    assert stage_in.main(tmp_path / "run.json", Path(f"{tree}.tar"), tmp_path / "node") == 1
    assert capsys.readouterr().err.startswith(stage_in.FAILED)


def test_of_what_the_manifest_does_not_list_no_name_leads_out_of_the_folder(tree, tmp_path):
    (tmp_path / "secret").write_text("not yours")
    subprocess.run(["tar", "-C", tree, "-Pcf", tmp_path / "bad.tar", "train", "val", "../secret"], check=True)
    (tmp_path / "secret").unlink()
    stage_in.unpack(tmp_path / "bad.tar", tmp_path / "node", config.make("resnet50", dataset="imagenet", **ALL))
    assert not (tmp_path / "secret").exists() and len(unpacked(tmp_path / "node")) == 18
