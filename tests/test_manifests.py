import json
import shutil
import subprocess

import pytest

from energynn import config, manifests
from energynn.data import photographs

DATASETS = ("era5_ensemble", "photographs")


@pytest.fixture
def copy(tmp_path, monkeypatch):
    """Manifests, embedded bytes and generated files in a folder that a test may damage."""
    manifests.verify("photographs")
    shutil.copytree(config.DATA_MANIFESTS, tmp_path / "data_manifests")
    shutil.copytree(manifests.GENERATED / "photographs", tmp_path / "data" / "photographs")
    monkeypatch.setattr(manifests, "DATA_MANIFESTS", tmp_path / "data_manifests")
    monkeypatch.setattr(manifests, "GENERATED", tmp_path / "data")
    return tmp_path


@pytest.mark.parametrize("dataset", DATASETS)
def test_a_manifest_says_what_its_files_are(dataset):
    manifest = json.loads((config.DATA_MANIFESTS / dataset / "manifest.json").read_text())
    sums = manifests.checksums(dataset)
    root = manifests.verify(dataset)
    files = {entry["name"]: entry for entry in manifest["distribution"]}
    assert set(files) == set(sums) and manifest["energynn:files"] == len(sums)
    for name in list(files)[::50]:
        assert files[name]["sha256"] == sums[name] and files[name]["contentSize"] == f"{(root / name).stat().st_size} B"
    for field in ("license", "citeAs", "description", "energynn:rule", "energynn:sources"):
        assert manifest[field], field


@pytest.mark.parametrize("dataset", DATASETS)
def test_sha256sum_reads_the_list(dataset):
    root = manifests.verify(dataset)
    command = ["sha256sum", "--quiet", "-c", str(config.DATA_MANIFESTS / dataset / "SHA256SUMS")]
    assert subprocess.run(command, cwd=root).returncode == 0


@pytest.mark.parametrize("dataset, name", [("era5_ensemble", "era5_ensemble.nc"), ("photographs", "val/cat/007.jpg")])
def test_a_damaged_or_missing_file_is_named_with_the_remedy(copy, dataset, name):
    path = manifests.root(dataset) / name
    if dataset == "era5_ensemble":
        path = copy / "data_manifests" / dataset / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match=f"{dataset}: .*{name} differs from its SHA-256") as error:
        manifests.verify(dataset)
    assert "git checkout" in str(error.value) or "delete" in str(error.value)
    path.unlink()
    with pytest.raises(ValueError, match=f"{dataset}: .*{name} is missing"):
        manifests.verify(dataset)


def test_a_missing_manifest_names_the_known_ones(copy):
    (copy / "data_manifests" / "era5_ensemble" / "SHA256SUMS").unlink()
    with pytest.raises(ValueError, match="no manifest in .*era5_ensemble.*git checkout"):
        manifests.verify("era5_ensemble")
    with pytest.raises(ValueError, match="known are era5_ensemble, photographs"):
        manifests.verify("imagenet")


def test_crops_are_the_same_whenever_they_are_made(copy):
    shutil.rmtree(copy / "data" / "photographs")
    assert manifests.verify("photographs") == copy / "data" / "photographs"
    assert sorted(p.name for p in (copy / "data").iterdir()) == ["photographs"], "a temporary folder was left"


def test_another_photograph_than_the_manifests_is_refused(copy, monkeypatch):
    shutil.rmtree(copy / "data" / "photographs")
    other = copy / "other.png"
    other.write_bytes(b"not the astronaut")
    find = photographs.source_path
    monkeypatch.setattr(photographs, "source_path", lambda package, file: other if "astronaut" in file else find(package, file))
    with pytest.raises(ValueError, match="not the photograph of skimage"):
        manifests.verify("photographs")
    assert not (copy / "data" / "photographs").exists()


def test_training_and_validation_crops_do_not_overlap():
    from PIL import Image

    for package, file, _licence in photographs.PHOTOGRAPHS.values():
        width = Image.open(photographs.source_path(package, file)).width
        assert width - int(photographs.TRAIN_SHARE * width) >= photographs.CROP_PIXELS
    with pytest.raises(ValueError, match="is not installed"):
        photographs.source_path("no_such_package", "a.png")
