"""ImageNet's folder tree: one folder per class, and subsets of it that are nested, balanced and reproducible."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import chain, zip_longest
from pathlib import Path


def stratified_prefix(samples: Sequence[tuple[str, int]], count: int, seed: int = 0) -> list[int]:
    """Indices of the first ``count`` samples (0: all) in an order that takes one sample of each class in turn.

    ``samples`` are ImageFolder's pairs of path and class index. Inside a class the order is that of
    sha256("seed|file name"), so that a larger subset contains every smaller one on any machine; a class without
    samples left is skipped. Raises ValueError if there are fewer than ``count`` samples.
    """
    if count > len(samples):
        raise ValueError(f"asked for {count} samples, the data set has {len(samples)}; ask for fewer, or 0 for all")
    if count == 0:
        return list(range(len(samples)))
    by_class: dict[int, list[tuple[str, int]]] = {}
    for index, (path, label) in enumerate(samples):
        key = hashlib.sha256(f"{seed}|{Path(path).name}".encode()).hexdigest()
        by_class.setdefault(label, []).append((key, index))
    columns = [sorted(by_class[label]) for label in sorted(by_class)]
    in_turn = (entry[1] for entry in chain.from_iterable(zip_longest(*columns)) if entry is not None)
    return [index for index, _ in zip(in_turn, range(count), strict=False)]
