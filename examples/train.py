"""A script as anybody has one (docs/own.md): DEVICES processes share the work of SAMPLES."""

import multiprocessing
import os
import sys

os.environ["OMP_NUM_THREADS"] = "1"  # a process is one core

import numpy as np


def train(samples: int) -> None:
    weights = np.random.default_rng(0).normal(size=(128, 128))
    for _ in range(samples):
        weights = np.tanh(weights @ weights.T / 128)


if __name__ == "__main__":
    devices, samples = map(int, sys.argv[1:])
    with multiprocessing.Pool(devices) as pool:
        pool.map(train, [samples // devices] * devices)
