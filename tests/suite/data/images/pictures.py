"""Small folders of images in MNIST's layout: a class is a bright stripe's place."""

import gzip
import struct
from pathlib import Path

import numpy as np

SIZE = 8


def images(count, seed, size=SIZE, classes=4):
    generator = np.random.default_rng(seed)
    labels = (np.arange(count) % classes).astype(np.uint8)
    found = generator.integers(0, 60, (count, size, size)).astype(np.uint8)
    for at, label in enumerate(labels):
        found[at, :, 2 * label : 2 * label + 2] = 220
    return found, labels


def write_idx(path: Path, values: np.ndarray) -> None:
    head = bytes((0, 0, 8, values.ndim)) + struct.pack(f">{values.ndim}I", *values.shape)
    path.write_bytes(gzip.compress(head + values.tobytes()))


def write_folder(folder: Path, train=64, test=20, size=SIZE, classes=4) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, count, seed in (("train", train, 0), ("t10k", test, 1)):
        pixels, labels = images(count, seed, size, classes)
        write_idx(folder / f"{name}-images-idx3-ubyte.gz", pixels)
        write_idx(folder / f"{name}-labels-idx1-ubyte.gz", labels)
    return folder
