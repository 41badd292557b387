import pytest

from energynn.data.imagenet import stratified_prefix

# 3 classes with 5, 2 and 4 samples, in an order of folders that must not matter.
SAMPLES = [(f"/anywhere/{label}/{k}.jpg", label) for label, count in enumerate((5, 2, 4)) for k in range(count)]


def test_prefixes_are_balanced_and_nested():
    prefixes = [stratified_prefix(SAMPLES, count) for count in range(1, 12)]
    for smaller, larger in zip(prefixes, prefixes[1:], strict=False):
        assert larger[: len(smaller)] == smaller and len(larger) == len(smaller) + 1
    assert sorted(prefixes[-1]) == list(range(11))
    labels = [SAMPLES[index][1] for index in prefixes[-1]]
    assert labels == [0, 1, 2, 0, 1, 2, 0, 2, 0, 2, 0]  # class 1 is exhausted after two


def test_choice_depends_on_names_and_seed_not_on_the_place():
    elsewhere = [(path.replace("/anywhere", "/else/where"), label) for path, label in SAMPLES]
    assert stratified_prefix(elsewhere, 6) == stratified_prefix(SAMPLES, 6)
    assert any(stratified_prefix(SAMPLES, 3, seed) != stratified_prefix(SAMPLES, 3) for seed in range(1, 5))


def test_zero_is_all_and_too_many_are_refused():
    assert stratified_prefix(SAMPLES, 0) == list(range(11))
    with pytest.raises(ValueError, match="12.*11"):
        stratified_prefix(SAMPLES, 12)
