"""Verification of the data sets, on copies that the tests may damage."""

import json
import shutil
import subprocess
import time

import pytest

from energynn import config, manifests
from energynn.data import photographs


@pytest.fixture
def copies(tmp_path, monkeypatch):
    """Manifests and generated data of this test alone."""
    shutil.copytree(config.DATA_MANIFESTS, tmp_path / "data_manifests")
    monkeypatch.setattr(manifests, "DATA_MANIFESTS", tmp_path / "data_manifests")
    monkeypatch.setattr(manifests, "GENERATED", tmp_path / "build" / "data")
    return tmp_path


def silent(line):
    pass


def test_both_data_sets_verify_quickly(copies):
    assert manifests.verify("era5_ensemble", silent) == copies / "data_manifests" / "era5_ensemble"
    root = manifests.verify("photographs", silent)  # made here
    assert root == copies / "build" / "data" / "photographs"
    begun = time.monotonic()
    manifests.verify("photographs", silent)
    manifests.verify("era5_ensemble", silent)
    assert time.monotonic() - begun < 1
    for dataset, folder in (("photographs", root), ("era5_ensemble", copies / "data_manifests" / "era5_ensemble")):
        sums = copies / "data_manifests" / dataset / "SHA256SUMS"
        subprocess.run(["sha256sum", "-c", "--quiet", sums], cwd=folder, check=True)


def test_damage_is_named_with_its_remedy(copies):
    root = manifests.verify("photographs", silent)
    victim = root / "train" / "coffee" / "007.jpg"
    sound = victim.read_bytes()
    for damaged, message in ((sound[:-1] + b"\0", "SHA-256"), (sound[:100], "100 B"), (b"", "0 B")):
        victim.write_bytes(damaged)
        with pytest.raises(ValueError, match=f"photographs.*coffee/007.jpg.*{message}.*delete"):
            manifests.verify("photographs", silent)
    victim.unlink()
    with pytest.raises(ValueError, match="photographs.*coffee/007.jpg is missing.*delete"):
        manifests.verify("photographs", silent)
    victim.write_bytes(sound)
    (victim.parent / "extra.jpg").write_bytes(sound)
    with pytest.raises(ValueError, match="photographs.*extra.jpg is not in the manifest"):
        manifests.verify("photographs", silent)
    shutil.rmtree(root)  # the remedy
    manifests.verify("photographs", silent)

    states = copies / "data_manifests" / "era5_ensemble" / "era5_ensemble.nc"
    content = bytearray(states.read_bytes())
    content[1_000_000] ^= 1
    states.write_bytes(content)
    with pytest.raises(ValueError, match="era5_ensemble.nc differs.*git checkout"):
        manifests.verify("era5_ensemble", silent)


def test_missing_and_damaged_manifests_are_named(copies):
    with pytest.raises(ValueError, match="imagenet: no manifest.*era5_ensemble, photographs"):
        manifests.verify("imagenet", silent)
    folder = copies / "data_manifests" / "era5_ensemble"
    (folder / "SHA256SUMS").write_text("not a checksum\n")
    with pytest.raises(ValueError, match="SHA256SUMS is damaged"):
        manifests.verify("era5_ensemble", silent)
    (folder / "manifest.json").write_text("{")
    with pytest.raises(ValueError, match="manifest.json is damaged"):
        manifests.verify("era5_ensemble", silent)
    (folder / "SHA256SUMS").unlink()
    with pytest.raises(ValueError, match="no manifest"):
        manifests.verify("era5_ensemble", silent)


def test_another_photograph_is_refused(copies):
    path = copies / "data_manifests" / "photographs" / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["energynn:sources"][2]["sha256"] = "0" * 64
    path.write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match="coffee.png is not the photograph of skimage"):
        manifests.verify("photographs", silent)
    assert not (copies / "build").exists()


def test_another_jpeg_encoder_is_explained_and_can_be_described(copies, monkeypatch):
    monkeypatch.setattr(photographs, "JPEG_QUALITY", 80)
    monkeypatch.setattr(photographs, "made_with", lambda: "Pillow 99")
    with pytest.raises(ValueError, match=r"made with Pillow \d.*here is Pillow 99.*manifest build photographs"):
        manifests.verify("photographs", silent)
    assert not (copies / "build" / "data" / "photographs").exists()
    manifests.build("photographs")
    manifests.verify("photographs", silent)
    assert manifests.read("photographs")["energynn:made_with"] == "Pillow 99"


def test_manifests_say_what_is_needed():
    for dataset in ("photographs", "era5_ensemble"):
        manifest = manifests.read(dataset)
        for key in ("@type", "name", "description", "license", "citeAs", "url", "energynn:rule", "energynn:split"):
            assert manifest[key], (dataset, key)
        assert {entry["name"]: entry["sha256"] for entry in manifest["distribution"]} == manifests.checksums(dataset)
        assert manifest["energynn:files"] == len(manifest["distribution"])
        assert (config.DATA_MANIFESTS / dataset / "README.md").is_file()


def test_build_needs_its_source():
    with pytest.raises(ValueError, match="era5-levels-members.nc"):
        manifests.build("era5_ensemble")
    with pytest.raises(ValueError, match="not known"):
        manifests.build("cats")
