import importlib.util
from concurrent.futures import ThreadPoolExecutor

import pytest

from energynn.data import photographs
from tests.processes import refused


@pytest.fixture(scope="module")
def crops(tmp_path_factory):
    root = tmp_path_factory.mktemp("data") / "photographs"
    photographs.write_crops(root)
    return root


def test_crops_are_the_same_each_time_and_for_two_at_once(crops, tmp_path):
    target = tmp_path / "photographs"
    with ThreadPoolExecutor() as pool:
        list(pool.map(photographs.write_crops, [target] * 2))
    # no temporary folder is left
    assert [path.name for path in tmp_path.iterdir()] == ["photographs"]
    files = [path.relative_to(crops) for path in sorted(crops.rglob("*.jpg"))]
    assert len(files) == 1250
    assert all(
        (crops / file).read_bytes() == (target / file).read_bytes() for file in files
    )


def test_missing_package_names_the_remedy(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    refused(
        "skimage.*install", photographs.photograph_path, "skimage", "data/astronaut.png"
    )
