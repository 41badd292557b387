"""Verification of the data sets, on copies that the tests may damage."""

import shutil

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from energynn.data import describe, era5_sources, manifests, photographs
from energynn.host import files
from energynn.host.reading import read_json
from tests.data.test_imagenet import tree  # noqa: F401
from tests.processes import answer, printed, refused


@pytest.fixture
def copies(tmp_path, monkeypatch):
    """Manifests and generated data of this test alone."""
    shutil.copytree(files.DATA_MANIFESTS, tmp_path / "data_manifests")
    monkeypatch.setattr(manifests, "DATA_MANIFESTS", tmp_path / "data_manifests")
    monkeypatch.setattr(manifests, "GENERATED_DATA_FOLDER", tmp_path / "build" / "data")
    return tmp_path


def test_damage_is_named_with_its_remedy(copies):
    root = manifests.verify("photographs")  # made here
    assert root == copies / "build" / "data" / "photographs"
    victim = root / "train" / "coffee" / "007.jpg"
    sound = victim.read_bytes()
    victim.write_bytes(sound[:100])
    refused(
        "photographs.*coffee/007.jpg differs.*delete", manifests.verify, "photographs"
    )
    victim.rename(victim.with_name("extra.jpg"))
    refused(
        "photographs.*coffee/007.jpg is missing.*delete",
        manifests.verify,
        "photographs",
    )
    victim.write_bytes(sound)
    refused(
        "photographs.*extra.jpg is not in the manifest", manifests.verify, "photographs"
    )
    shutil.rmtree(root)  # the remedy
    manifests.verify("photographs")


def test_missing_manifests_are_named(copies):
    refused(
        "imagenet: no checksums.*data describe imagenet", manifests.verify, "imagenet"
    )
    refused("put files into .*dataset is synthetic", manifests.read_checksums, "my-own")
    assert manifests.verify("synthetic")


@given(
    st.binary(max_size=60) | st.text(alphabet='{}[]":,distrbuonam3 ').map(str.encode)
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_listing_is_read_or_refused_in_one_line(copies, content):
    path = copies / "data_manifests" / "photographs" / "SHA256SUMS"
    path.write_bytes(content)
    try:
        assert manifests.read_checksums("photographs") is not None
    except ValueError as error:
        assert "SHA256SUMS" in str(error) and "\n" not in str(error)


def test_another_jpeg_encoder_is_explained_and_can_be_described(copies, monkeypatch):
    monkeypatch.setattr(photographs, "JPEG_QUALITY", 80)
    refused(
        "requirements.lock.*data describe photographs", manifests.verify, "photographs"
    )
    describe.build_manifest("photographs")
    manifests.verify("photographs")


def test_manifests_say_what_is_needed():
    for dataset in ("photographs", "era5_ensemble"):
        folder = files.DATA_MANIFESTS / dataset
        manifest = read_json(folder / "manifest.json")
        for key in ("license", "citeAs", "url", "energynn:rule", "energynn:split"):
            assert manifest[key], (dataset, key)
        listed = {entry["name"]: entry["sha256"] for entry in manifest["distribution"]}
        assert listed == manifests.read_checksums(dataset)
    texts = read_json(describe.DESCRIPTIONS_FILE)
    assert (
        f"JPEG quality {photographs.JPEG_QUALITY}"
        in texts["photographs"]["energynn:rule"]
    )
    assert ", ".join(era5_sources.CHANNELS) in texts["era5"]["description"]


@pytest.mark.parametrize("path", ["", "..", "a/b", "{folder}/pets"])
def test_a_path_is_no_name_and_nothing_is_written_there(tmp_path, path):
    (tmp_path / "pets").mkdir()
    (tmp_path / "pets" / "1.jpg").touch()
    said = answer("data describe", path.format(folder=tmp_path), status=2)
    assert "is no name; link" in said
    assert [each.name for each in tmp_path.rglob("*")] == ["pets", "1.jpg"]


def test_what_cannot_be_described_is_refused():
    refused(
        "era5_ensemble: comes with its description",
        describe.build_manifest,
        "era5_ensemble",
    )
    refused("cats has no files; put its files into it", describe.build_manifest, "cats")


def test_imagenet_is_described_and_verified(tree, copies, monkeypatch):  # noqa: F811
    answer("data describe imagenet --root", tree)
    sums = copies / "data_manifests" / "imagenet" / "SHA256SUMS"
    printed("sha256sum", "-c", sums, cwd=tree)
    manifest = read_json(sums.with_name("manifest.json"))
    assert manifest["energynn:files"] == 11 + 6

    refused("set ENERGYNN_IMAGENET", manifests.verify, "imagenet")
    monkeypatch.setenv("ENERGYNN_IMAGENET", str(tree))
    victim = tree / "train" / "n02" / "n02_3.JPEG"
    sound = victim.read_bytes()
    victim.write_bytes(sound[::-1])
    assert manifests.verify("imagenet") == tree  # names only
    said = answer("data verify imagenet --root", tree, status=2)
    assert "train/n02/n02_3.JPEG differs from its sha256" in said
    victim.unlink()
    refused("1 images are only .* train/n02/n02_3.JPEG", manifests.verify, "imagenet")
    victim.with_name("n02_9.JPEG").write_bytes(b"")
    refused("2 images are only .* train/n02/n02_3.JPEG", manifests.verify, "imagenet")
    victim.with_name("n02_9.JPEG").rename(victim)
    victim.write_bytes(sound)
    (tree / "ILSVRC2012_img_val.tar").write_bytes(b"other")
    refused(
        "img_val.tar differs from its md5 29b22e",
        manifests.verify,
        "imagenet",
        tree,
        every_byte=True,
    )
