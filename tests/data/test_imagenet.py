"""ImageNet's three places (tree, archives, prepared store) hold the same images; subsets; broken
images.
"""

import hashlib
import io
import os
import tarfile

import numpy as np
import pytest
from PIL import Image
from scipy.io import savemat

from energynn.data import imagenet
from energynn.data.imagenet import list_images, select_stratified_subset
from energynn.data.images import decode, load_with_pillow
from tests.processes import answer, refused

# 3 classes with 5, 2 and 4 samples, in an order of folders that must not matter.
SAMPLES = [
    (f"/anywhere/{label}/{k}.jpg", label)
    for label, count in enumerate((5, 2, 4))
    for k in range(count)
]
NAMES, LABELS = zip(*SAMPLES, strict=True)
SYNSETS = {"n03": 5, "n01": 2, "n02": 4}  # training images


def jpeg(seed: int, mode="RGB") -> bytes:
    data = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(
        0, 256, (4, 5, len(mode)), dtype=np.uint8
    )
    Image.fromarray(pixels.squeeze(), mode).resize((50, 38)).save(data, "JPEG")
    return data.getvalue()


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A tree, and the same images in archives as image-net.org has them: synset ids are not in
    alphabetical order.
    """
    monkeypatch.setattr(imagenet, "INDEX_FOLDER", tmp_path / "index")
    root, official = tmp_path / "tree", tmp_path / "official"
    official.mkdir()
    with tarfile.open(official / imagenet.TRAINING_ARCHIVE, "w") as outer:
        for synset, count in SYNSETS.items():
            (root / "train" / synset).mkdir(parents=True)
            (root / "val" / synset).mkdir(parents=True)
            inner = io.BytesIO()
            with tarfile.open(fileobj=inner, mode="w") as archive:
                for k in range(count):
                    data = jpeg(100 * count + k)
                    (root / "train" / synset / f"{synset}_{k}.JPEG").write_bytes(data)
                    add(archive, f"{synset}_{k}.JPEG", data)
            add(outer, f"{synset}.tar", inner.getvalue())
    with tarfile.open(official / imagenet.VALIDATION_ARCHIVE, "w") as archive:
        for k, synset in enumerate(["n02", "n01", "n03", "n01", "n02", "n03"], start=1):
            data, name = jpeg(k), f"ILSVRC2012_val_{k:08d}.JPEG"
            (root / "val" / synset / name).write_bytes(data)
            add(archive, name, data)
    meta = io.BytesIO()
    names = ("ILSVRC2012_ID", "WNID", "words", "num_children")
    rows = [
        (1, "n03", "cat", 0),
        (2, "n01", "dog", 0),
        (3, "n02", "cow", 0),
        (4, "n00", "animal", 3),
    ]
    fields = [(name, "O") for name in names]
    savemat(meta, {"synsets": np.array(rows, dtype=fields)})
    truth = "ILSVRC2012_validation_ground_truth.txt"
    with tarfile.open(official / imagenet.DEVELOPMENT_KIT, "w:gz") as kit:
        add(kit, f"{imagenet.DEVELOPMENT_KIT_FOLDER}/meta.mat", meta.getvalue())
        add(kit, f"{imagenet.DEVELOPMENT_KIT_FOLDER}/{truth}", b"3\n2\n1\n2\n3\n1\n")
    return root


def add(archive, name, data):
    member = tarfile.TarInfo(name)
    member.size = len(data)
    archive.addfile(member, io.BytesIO(data))


def test_the_rule_as_facts_data_md_states_it():
    expected = []
    columns = [
        sorted(
            (hashlib.sha256(f"0|{k}.jpg".encode()).hexdigest(), label, k)
            for k in range(count)
        )
        for label, count in enumerate((5, 2, 4))
    ]
    for turn in range(5):
        expected += [column[turn][1:] for column in columns if turn < len(column)]
    for count in (5, 11):
        found = select_stratified_subset(NAMES, LABELS, count)
        samples = [(LABELS[index], int(NAMES[index][-5])) for index in found]
        assert samples == expected[:count]


def test_archives_are_read_in_place_and_are_the_same_listing(tree):
    for _ in range(2):  # the second time from the index
        for here, there in zip(
            list_images(tree), list_images(tree.parent / "official"), strict=True
        ):
            assert here.classes == there.classes and (here.labels == there.labels).all()
            assert (here.names == there.names).all()
            assert [here.read(k) for k in range(len(here))] == [
                there.read(k) for k in range(len(there))
            ]
    assert len(list((tree.parent / "index").iterdir())) == 2
    assert "img_train.tar: train/n01/n01_0.JPEG" in list_images(
        tree.parent / "official"
    )[0].place_of_image(0)


def test_an_archive_that_is_missing_is_named(tree):
    official = tree.parent / "official"
    (official / imagenet.DEVELOPMENT_KIT).unlink()
    refused("devkit", list_images, official)


def test_an_archive_cut_between_or_within_images_or_with_hidden_files(tree):
    official = tree.parent / "official"
    whole = [listing.names.tolist() for listing in list_images(official)]
    archives = [official / name for name in list(imagenet.ARCHIVE_MD5_DIGESTS)[:2]]
    for archive in archives:
        with tarfile.open(archive, "a") as file:
            hidden = ("._n01.tar", ".DS_Store", "x/._ILSVRC2012_val_00000001.JPEG")
            for name in (*hidden, "README.txt", "Thumbs.db"):
                add(file, name, b"Mac OS X")
    assert [listing.names.tolist() for listing in list_images(official)] == whole
    for archive in archives:
        data = archive.read_bytes()
        with tarfile.open(archive) as file:
            ends = file.getmembers()[1].offset, 6000
        for end in ends:
            archive.write_bytes(data[:end])
            refused(f"^images: {archive}: ", list_images, official)
        archive.write_bytes(data)


@pytest.mark.parametrize(
    "name, members, says",
    [
        (imagenet.TRAINING_ARCHIVE, [], "no images"),
        (imagenet.TRAINING_ARCHIVE, ["train/n01/a.JPEG"], "no images"),
        (imagenet.VALIDATION_ARCHIVE, ["val_0.JPEG"], "val_0.JPEG"),
        (imagenet.VALIDATION_ARCHIVE, ["val_99.JPEG"], "val_99.JPEG"),
        (imagenet.VALIDATION_ARCHIVE, ["n01/a.JPEG"], "a.JPEG"),
        (imagenet.DEVELOPMENT_KIT, ["data/meta.mat"], "KeyError"),
    ],
)
def test_an_archive_of_other_members_is_named(tree, name, members, says):
    archive = tree.parent / "official" / name
    with tarfile.open(archive, "w") as file:
        for member in members:
            add(file, member, b"")
    refused(f"^images: .*{archive}.*{says}", list_images, archive.parent)
    archive.write_bytes(b"rubbish" * 99)
    refused(f"^images: .*{archive}", list_images, archive.parent)


def test_missing_folders_are_named(tree):
    (tree / "val" / "n02").rename(tree / "n02")
    refused("class n02 is in one split only", list_images, tree)
    refused("neither train/.*nor ILSVRC2012_img_train.tar", list_images, tree.parent)


@pytest.mark.parametrize("mode", ["L", "CMYK"])
def test_grey_and_cmyk_become_rgb_as_pillow_does_it(mode):
    data = jpeg(3, mode=mode)
    pixels = decode(data)
    assert pixels.shape == (3, 38, 50)
    assert (pixels.permute(1, 2, 0).numpy() == np.asarray(load_with_pillow(data))).all()


def test_a_prepared_store_is_the_same_listing_with_other_pixels(
    tree, tmp_path, monkeypatch
):
    monkeypatch.setattr(imagenet, "SHORTER_SIDE_PIXELS", 20)
    broken, out = tree / "train" / "n02" / "n02_3.JPEG", tmp_path / "store"
    sound = broken.read_bytes()
    broken.write_bytes(b"broken")
    words = f"data imagenet --root {tree} --out {out}"
    assert "n02_3.JPEG is broken" in answer(words, status=2)
    assert not list(out.iterdir())
    broken.write_bytes(sound)
    answer(words)
    for here, there in zip(list_images(tree), list_images(out), strict=True):
        assert (here.names == there.names).all() and (here.labels == there.labels).all()
    data = list_images(out)[0].read(0)
    assert decode(data).shape == (3, 20, 26)
    assert (decode(data).permute(1, 2, 0).numpy() == load_with_pillow(data)).all()
    (out / "train").mkdir()
    refused("keep one of train/ and train.ppm", list_images, out)
    (out / "train").rmdir()
    os.truncate(out / "train.ppm", 999)  # as a copy that was interrupted
    refused("train.ppm ends before its last image", list_images, out)
    of_before = data.replace(b"P6\n", b"P6\n# 50 38\n", 1)  # with the original's size
    assert (decode(of_before) == decode(data)).all()


def test_a_training_counts_broken_images(tree, tmp_path, train):
    """Through the trainer, in a process of its own, with workers; only the manifest is left out."""
    for name in ("n02_1.JPEG", "n02_2.JPEG"):
        (tree / "train" / "n02" / name).write_bytes(b"")
    settings = dict(
        workload="resnet50",
        local_batch_size=3,
        epochs=2,
        image_size=32,
        training_samples=11,
        validation_samples=6,
        loader_workers=2,
        evaluate_training_set=True,
        on_bad_image="skip",
    )
    patch = "import pathlib, sys\nfrom energynn.data import manifests\n"
    patch += f"manifests.verify = lambda *_, **named: pathlib.Path({str(tree)!r})\n"
    run = train(tmp_path / "run", patch=patch, **settings)
    last = run.events()[-1]
    assert last["event"] == "bad_images" and last["images_skipped"] == 2
    assert all("n02_" in path for path in last["first"])
    (end,) = run.of_kind("training_end")
    assert end["samples_trained"] == 2 * 9  # counts are those of a sound data set
    patch += "(pathlib.Path(sys.argv[1]) / '.stop').touch()"
    run = train(tmp_path / "stopped", patch=patch, is_refused=True, **settings)
    names = [event["event"] for event in run.events()]
    assert "interrupted: " in run.output and "training_end" not in names
    assert names[-1] == "bad_images"  # of this segment
