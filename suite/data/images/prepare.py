"""Prepares and checks an image set for training, once; later runs use the cache (``suite.data.cache``)."""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import datasets
import numpy as np

from suite.data.cache import cache_folder, cached, save_rows, slug
from suite.data.images.class_folder import is_class_folder, read_class_folder
from suite.data.images.sets import (
    FASHION,
    FASHION_HUB,
    TRAIN,
    Images,
    check_source,
    is_local,
    read_hub,
    read_images,
)
from suite.data.images.transforms import INFO_FILE, ImageData, ImageSetInfo, decode_images, fingerprints, image_name
from suite.data.packages import UnreachableError
from suite.data.user_files import fingerprint
from suite.errors import DataError
from suite.log import Log
from suite.settings import ImageSettings

VERSION = 3
"""Version of a prepared folder's content. Raise it when that changes, otherwise old caches stay in use."""

CHANNEL_SAMPLE = 256
"""Evenly spaced images of a set that decide its number of channels."""

STATISTICS_SAMPLE = 10_000
"""Evenly spaced training images that give mean and deviation."""

SIZE_ERRORS = "errors.json"
"""The file of images of another size, in a cache folder of its own."""


def prepare_images(settings: ImageSettings, channels: int, classes: int, cache: Path, log: Log) -> ImageData:
    """Returns the images for ``settings``; builds them unless the cache has a valid copy.

    When Debian's package of ``fashion`` is not available, logs this and uses the hub's copy. Raises DataError for an
    unknown or damaged set, and for one that does not fit the model, with all reasons: ``channels``, labels not below
    ``classes``, ``settings.size``.
    """
    check_source(settings.source)
    try:
        data = _prepare(settings, cache, log)
    except UnreachableError as error:
        if settings.source != FASHION:
            raise
        log(f"no Debian package of {FASHION}: {error}; using {FASHION_HUB} from the hub, which has the same images")
        settings = settings.model_copy(update={"source": FASHION_HUB})
        data = _prepare(settings, cache, log)
    faults = _image_errors(data, settings, channels, classes)
    if settings.fit == "exact":
        faults += _size_errors(data, settings, cache, log)
    if faults:
        raise DataError(f"{settings.source} does not fit the model: {'; '.join(faults)}")
    return data


def folder_of_images(settings: ImageSettings, cache: Path) -> Path:
    """Returns the cache folder of these images. Augmentation settings do not change it."""
    parts = [VERSION, settings.source]
    if settings.source.startswith(("/", ".")):
        parts += fingerprint(Path(settings.source))
    return cache_folder(cache, f"images-{slug(settings.source).strip('-')}", parts)


def _prepare(settings: ImageSettings, cache: Path, log: Log) -> ImageData:
    folder = folder_of_images(settings, cache)
    cached(folder, lambda building: _build(settings.source, building, cache, log), log)
    return ImageData(folder)


def _build(source: str, building: Path, cache: Path, log: Log) -> None:
    start = time.monotonic()
    if is_local(source):
        is_folder = is_class_folder(source)
        splits = read_class_folder(source, building, log) if is_folder else _tables(read_images(source, cache, log))
        image_column, label_column = "image", "label"
        for name, rows in splits.items():
            save_rows(rows, building / name)
        shutil.rmtree(building / "draft", ignore_errors=True)
    else:
        log(f"reading {source} from the hub")
        splits, image_column, label_column = read_hub(source)
    info = _inspect(source, splits, image_column, label_column)
    (building / INFO_FILE).write_text(json.dumps(asdict(info), indent=1))
    counts = " and ".join(f"{count:,} {name}" for name, count in info.counts.items())
    log(f"prepared {counts} images of {source} in {time.monotonic() - start:.0f} s")


def _tables(splits: dict[str, Images]) -> dict[str, Any]:
    """Returns splits as tables of ``datasets``, which stores images as lossless PNG."""
    classes = 1 + max(int(split.labels.max(initial=0)) for split in splits.values())
    kinds = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=[str(at) for at in range(classes)])}
    )
    tables = {}
    for name, split in splits.items():
        rows = {"image": list(split.images), "label": split.labels.tolist()}
        tables[name] = datasets.Dataset.from_dict(rows, features=kinds)
    return tables


def _inspect(source: str, splits: dict[str, Any], image_column: str, label_column: str) -> ImageSetInfo:
    labels = {name: np.array(rows[label_column][:]) for name, rows in splits.items()}
    for name, values in labels.items():
        if len(values) == 0:
            raise DataError(f"{source} has no {name} images; use another set")
    classes = 1 + max(int(values.max()) for values in labels.values())
    sample = decode_images(splits[TRAIN], image_column, _spread(len(splits[TRAIN]), CHANNEL_SAMPLE), TRAIN)
    deep = [image.mode for image in sample if image.mode in ("I", "I;16", "F")]
    if deep:
        raise DataError(
            f"{source} has images of mode {deep[0]}, more than 8 bits per value; convert them to 8 bits first"
        )
    colour = sum(image.mode not in ("L", "1") for image in sample)
    channels = 3 if 2 * colour > len(sample) else 1
    sums, squares, count = np.zeros(channels), np.zeros(channels), 0
    for image in splits[TRAIN].select(_spread(len(splits[TRAIN]), STATISTICS_SAMPLE))[image_column]:
        image = image.convert("L" if channels == 1 else "RGB")
        values = np.asarray(image, dtype=np.float64).reshape(-1, channels) / 255
        sums, squares, count = sums + values.sum(0), squares + (values**2).sum(0), count + len(values)
    mean = sums / count
    deviation = np.sqrt(np.maximum(squares / count - mean**2, 1e-6))
    counts = {name: len(values) for name, values in labels.items()}
    columns, moments = (image_column, label_column), (tuple(mean.tolist()), tuple(deviation.tolist()))
    return ImageSetInfo(
        source, not is_local(source), *columns, channels, classes, counts, fingerprints(splits), *moments
    )


def _spread(count: int, limit: int) -> list[int]:
    """Returns at most ``limit`` evenly spaced indices."""
    return list(range(0, count, max(1, -(-count // limit))))


def _image_errors(data: ImageData, settings: ImageSettings, channels: int, classes: int) -> list[str]:
    """Returns each reason but their sizes why the images do not fit a model."""
    info, faults = data.info, []
    if info.channels != channels:
        faults.append(f"its images have {info.channels} channels, model.channels is {channels}; make them equal")
    for name, rows in data.splits.items():
        labels = np.array(rows[info.label_column][:])
        wrong = np.flatnonzero((labels < 0) | (labels >= classes))
        if len(wrong):
            faults.append(
                f"{name} image {wrong[0]} has the label {labels[wrong[0]]}, and {len(wrong) - 1} others have a label "
                f"outside 0 to {classes - 1}; "
                + (f"set model.classes={info.classes}" if labels.min() >= 0 else "labels must not be negative")
            )
    if settings.cutout >= 2 * settings.size:
        faults.append(f"images.cutout={settings.cutout} covers a whole image of size {settings.size}; make it smaller")
    return faults


def _size_errors(data: ImageData, settings: ImageSettings, cache: Path, log: Log) -> list[str]:
    """Returns for each split which images have another size; found once, because each image must be decoded."""
    content = [folder_of_images(settings, cache).name, data.info.prints, settings.size]
    folder = cache_folder(cache, "image-sizes", content)

    def build(building: Path) -> None:
        splits, column = data.splits.items(), data.info.image_column
        faults = [_wrong_sizes(rows, column, name, settings.size) for name, rows in splits]
        (building / SIZE_ERRORS).write_text(json.dumps([fault for fault in faults if fault]))

    cached(folder, build, log)
    return json.loads((folder / SIZE_ERRORS).read_text())


def _wrong_sizes(rows: Any, column: str, split: str, size: int) -> str:
    """Names an image of another size, and counts all; empty if there is none."""
    wrong = []
    for begin in range(0, len(rows), CHANNEL_SAMPLE):
        some = range(begin, min(len(rows), begin + CHANNEL_SAMPLE))
        images = decode_images(rows, column, some, split)
        wrong += [(at, image.size) for at, image in zip(some, images, strict=True) if image.size != (size, size)]
    if not wrong:
        return ""
    at, (width, height) = wrong[0]
    return (
        f"{image_name(rows, at, split)} is {height} x {width} pixels, and {len(wrong) - 1} others are not {size} x "
        f"{size}; set images.size, or images.fit=resize to resize every image to {size} x {size}"
    )
