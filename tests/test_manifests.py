"""Verification of the data sets, on copies that the tests may damage."""

import hashlib
import json
import shutil
import subprocess
import time

import pytest

from energynn import cli, files, progress
from energynn.data import describe, digests, era5_sources, manifests, photographs


@pytest.fixture
def copies(tmp_path, monkeypatch):
    """Manifests and generated data of this test alone."""
    shutil.copytree(files.DATA_MANIFESTS, tmp_path / "data_manifests")
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
    (folder / "manifest.json").write_text("{")
    with pytest.raises(ValueError, match="manifest.json is damaged"):
        manifests.verify("era5_ensemble", silent)
    (folder / "SHA256SUMS").write_text("not a checksum\n")
    with pytest.raises(ValueError, match="SHA256SUMS is damaged"):
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
    describe.build("photographs")
    manifests.verify("photographs", silent)
    assert manifests.read("photographs")["energynn:made_with"] == "Pillow 99"


def test_manifests_say_what_is_needed():
    for dataset in ("photographs", "era5_ensemble"):
        manifest = manifests.read(dataset)
        for key in ("@type", "name", "description", "license", "citeAs", "url", "energynn:rule", "energynn:split"):
            assert manifest[key], (dataset, key)
        assert {entry["name"]: entry["sha256"] for entry in manifest["distribution"]} == manifests.checksums(dataset)
        assert manifest["energynn:files"] == len(manifest["distribution"])
        assert (files.DATA_MANIFESTS / dataset / "README.md").is_file()
    texts = json.loads(describe.DESCRIPTIONS.read_text())
    rule = texts["photographs"]["energynn:rule"]
    for constant in (
        f"{photographs.CROPS['train']} training crops of {photographs.CROP_PIXELS} x {photographs.CROP_PIXELS} pixels",
        f"left {photographs.TRAIN_SHARE:.0%}",
        f"{photographs.CROPS['val']} validation crops",
        f"[{photographs.SEED}, class index]",
        f"JPEG quality {photographs.JPEG_QUALITY}",
    ):
        assert constant in rule
    assert ", ".join(era5_sources.CHANNELS) in texts["era5"]["description"]


def test_build_needs_its_source():
    with pytest.raises(ValueError, match="era5-levels-members.nc"):
        describe.build("era5_ensemble")
    with pytest.raises(ValueError, match="cats is no folder; put its files into it"):
        describe.build("cats")


@pytest.fixture
def imagenet_tree(copies, monkeypatch):
    """Three classes of few files; verification does not decode them."""
    monkeypatch.setattr(digests, "VERIFIED", copies / "verified")
    for split, counts in (("train", (5, 2, 4)), ("val", (1, 1, 1))):
        for label, count in enumerate(counts):
            folder = copies / "imagenet" / split / f"n{label}"
            folder.mkdir(parents=True)
            for k in range(count):
                (folder / f"n{label}_{k}.JPEG").write_bytes(f"{split} {label} {k}".encode())
    return copies / "imagenet"


def test_imagenet_is_described_and_verified(imagenet_tree, copies, monkeypatch, capsys):
    assert cli.main(["data", "describe", "imagenet", "--root", str(imagenet_tree)]) == 0
    manifest = manifests.read("imagenet")
    assert manifest["energynn:splits"]["train"]["classes"] == {"n0": 5, "n1": 2, "n2": 4}
    assert [s["count"] for s in manifest["energynn:subsets"]["train"]][:9] == [11 * 2**k // 256 for k in range(9)]
    assert not manifest["energynn:complete"] and len(manifests.checksums("imagenet")) == 14
    sums = copies / "data_manifests" / "imagenet" / "SHA256SUMS"
    subprocess.run(["sha256sum", "-c", "--quiet", sums], cwd=imagenet_tree, check=True)

    with pytest.raises(ValueError, match="set ENERGYNN_IMAGENET"):
        manifests.verify("imagenet")
    monkeypatch.setenv("ENERGYNN_IMAGENET", str(imagenet_tree))
    assert manifests.verify("imagenet", silent) == imagenet_tree
    victim = imagenet_tree / "train" / "n2" / "n2_3.JPEG"
    victim.write_bytes(b"TRAIN 2 3")
    assert manifests.verify("imagenet", silent) == imagenet_tree  # names only
    capsys.readouterr()
    assert cli.main(["data", "verify", "imagenet", "--root", str(imagenet_tree)]) == 2
    assert "train/n2/n2_3.JPEG differs from its sha256" in capsys.readouterr().err
    victim.unlink()
    with pytest.raises(ValueError, match="train/n2 has 3 images, not 4"):
        manifests.verify("imagenet", silent)
    victim.with_name("n2_9.JPEG").write_bytes(b"")
    with pytest.raises(ValueError, match="images of train have other names"):
        manifests.verify("imagenet", silent)


def test_known_archives_are_checked(imagenet_tree):
    describe.build("imagenet", imagenet_tree, silent)
    (imagenet_tree / "ILSVRC2012_img_val.tar").write_bytes(b"other")
    with pytest.raises(ValueError, match="img_val.tar differs from its md5 29b22e"):
        manifests.verify("imagenet", silent, imagenet_tree, every_byte=True)


def test_an_interrupted_verification_goes_on(imagenet_tree, copies, monkeypatch):
    sums = {str(p.relative_to(imagenet_tree)): files.sha256(p) for p in imagenet_tree.rglob("*.JPEG")}
    found = digests.digests(imagenet_tree, {name: (imagenet_tree / name, 0, -1) for name in sums}, silent)
    first = [next(found)[0] for _ in range(6)]
    found.close()  # as an interruption does
    (sidecar,) = (copies / "verified").iterdir()
    with open(sidecar, "a") as file:
        file.write("train/n1/n1_0.JPEG\t9\t17")  # the process died within a line
    hashed = []
    monkeypatch.setattr(digests.hashlib, "new", lambda algorithm: hashed.append(1) or hashlib.sha256())
    digests.verify_tree(imagenet_tree, sums, silent)
    assert len(hashed) == len(sums) - 6
    digests.verify_tree(imagenet_tree, sums, silent)
    assert len(hashed) == len(sums) - 6  # all is known
    (imagenet_tree / first[0]).write_bytes(b"changed")
    with pytest.raises(ValueError, match=f"{first[0]} differs"):
        digests.verify_tree(imagenet_tree, sums, silent)
    (imagenet_tree / first[0]).unlink()
    with pytest.raises(ValueError, match=f"{first[0]} is missing"):
        digests.verify_tree(imagenet_tree, sums, silent)


def test_progress_tells_rate_and_time_left(monkeypatch):
    lines, clock = [], iter([0.0, 0.0, 1.0, 4.0, 5.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    advance = progress.meter("hash", 10, "GB", lines.append)
    for _ in range(3):
        advance(1)
    assert lines == ["hash: 2 of 10 GB, 0.5 GB/s, 16 s left"]
