"""From an image set's name to images ready to train on, checked before anything starts; then from the cache."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from suite.data.cache import cached, save_rows
from suite.data.image_sets import (
    FASHION,
    FASHION_HUB,
    TEST,
    TRAIN,
    Images,
    check_source,
    is_local,
    read_hub,
    read_images,
)
from suite.data.images import Facts, ImageData, decoded, prints_of
from suite.data.wheels import UnreachableError
from suite.errors import DataError
from suite.settings import ImageSettings

Say = Callable[[str], None]

VERSION = 2
"""Of what a prepared folder holds. Raise it when that changes, or old caches stay in use."""

LOOKED_AT = 256
"""Images of a hub's set whose channels are looked at before the first step, spread over the split."""

MEASURED = 10_000
"""Training images that mean and deviation are taken of, spread over the split."""


def prepare_images(settings: ImageSettings, channels: int, classes: int, cache: Path, say: Say) -> ImageData:
    """Returns the images that ``settings`` asks for, built if the cache does not have them whole.

    Where Debian's package of ``fashion`` cannot be had, the hub's copy is taken, and that is said. Raises DataError for
    an unknown or damaged set, and with every way in which it is not what the model takes: ``channels``, labels below
    ``classes``, ``settings.size``.
    """
    check_source(settings.source)
    try:
        data = _prepare(settings, cache, say)
    except UnreachableError as error:
        if settings.source != FASHION:
            raise
        say(f"no Debian package of {FASHION}: {error}; going on with {FASHION_HUB} from the hub, the same images")
        settings = settings.model_copy(update={"source": FASHION_HUB})
        data = _prepare(settings, cache, say)
    faults = find_faults(data, settings, channels, classes)
    if faults:
        raise DataError(f"{settings.source} is not what the model takes: {'; '.join(faults)}")
    return data


def folder_of_images(settings: ImageSettings, cache: Path) -> Path:
    """Returns where these images are kept; how they are shown makes no difference."""
    parts = [VERSION, settings.source]
    if settings.source.startswith(("/", ".")):
        files = sorted(Path(settings.source).glob("*ubyte*"))
        parts += [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    slug = re.sub(r"\W+", "-", settings.source).strip("-")
    return cache / f"images-{slug}-{sha256(json.dumps(parts).encode()).hexdigest()[:12]}"


def _prepare(settings: ImageSettings, cache: Path, say: Say) -> ImageData:
    folder = folder_of_images(settings, cache)
    cached(folder, lambda building: _build(settings.source, building, cache, say), say)
    return ImageData.open(folder)


def _build(source: str, building: Path, cache: Path, say: Say) -> None:
    start = time.monotonic()
    if is_local(source):
        splits, image_column, label_column = _tables(read_images(source, cache, say)), "image", "label"
        for name, rows in splits.items():
            save_rows(rows, building / name)
    else:
        say(f"reading {source} from the hub")
        splits, image_column, label_column = read_hub(source)
    facts = _facts(source, splits, image_column, label_column)
    ImageData(facts, splits).write_facts(building)
    counts = " and ".join(f"{count:,} {name}" for name, count in facts.counts.items())
    say(f"prepared {counts} images of {source} in {time.monotonic() - start:.0f} s")


def _tables(found: dict[str, Images]) -> dict[str, Any]:
    """Returns splits as ``datasets`` keeps images: PNG, which loses nothing."""
    import datasets

    classes = 1 + max(int(split.labels.max(initial=0)) for split in found.values())
    kinds = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=[str(at) for at in range(classes)])}
    )
    tables = {}
    for name, split in found.items():
        rows = {"image": list(split.images), "label": split.labels.tolist()}
        tables[name] = datasets.Dataset.from_dict(rows, features=kinds)
    return tables


def _facts(source: str, splits: dict[str, Any], image_column: str, label_column: str) -> Facts:
    labels = {name: np.array(rows[label_column][:]) for name, rows in splits.items()}
    for name, values in labels.items():
        if len(values) == 0:
            raise DataError(f"{source} has no {name} images; take another set")
    classes = 1 + max(int(values.max()) for values in labels.values())
    looked_at = decoded(splits[TRAIN], image_column, _spread(len(splits[TRAIN]), LOOKED_AT), "train image")
    deep = [image.mode for image in looked_at if image.mode in ("I", "I;16", "F")]
    if deep:
        raise DataError(f"{source} has images of mode {deep[0]}, more than 8 bits a value; make them 8 bits first")
    colour = sum(image.mode not in ("L", "1") for image in looked_at)
    channels = 3 if 2 * colour > len(looked_at) else 1
    sums, squares, count = np.zeros(channels), np.zeros(channels), 0
    for image in splits[TRAIN].select(_spread(len(splits[TRAIN]), MEASURED))[image_column]:
        values = (
            np.asarray(image.convert("L" if channels == 1 else "RGB"), dtype=np.float64).reshape(-1, channels) / 255
        )
        sums, squares, count = sums + values.sum(0), squares + (values**2).sum(0), count + len(values)
    mean = sums / count
    deviation = np.sqrt(np.maximum(squares / count - mean**2, 1e-6))
    of_class = np.bincount(labels[TEST][labels[TEST] >= 0], minlength=classes)
    return Facts(
        source, not is_local(source), image_column, label_column, channels, classes,
        {name: len(values) for name, values in labels.items()}, prints_of(splits),
        tuple((of_class / of_class.sum()).tolist()), tuple(mean.tolist()), tuple(deviation.tolist()),
    )  # fmt: skip


def _spread(count: int, most: int) -> list[int]:
    return list(range(0, count, max(1, -(-count // most))))


def find_faults(data: ImageData, settings: ImageSettings, channels: int, classes: int) -> list[str]:
    """Returns each way in which the images are not what a model takes."""
    facts, faults = data.facts, []
    if facts.channels != channels:
        faults.append(f"its images have {facts.channels} channels, model.channels is {channels}; make them equal")
    for name, rows in data.splits.items():
        labels = np.array(rows[facts.label_column][:])
        wrong = np.flatnonzero((labels < 0) | (labels >= classes))
        if len(wrong):
            faults.append(
                f"{name} image {wrong[0]} has the label {labels[wrong[0]]}, and {len(wrong) - 1} others have one "
                f"outside 0 to {classes - 1}; "
                + (f"set model.classes={facts.classes}" if labels.min() >= 0 else "below 0 there is no class")
            )
        if settings.fit == "exact":
            faults += _sizes(rows, facts.image_column, name, settings.size)
    if settings.cutout >= 2 * settings.size:
        faults.append(f"images.cutout={settings.cutout} makes all of an image of {settings.size} grey; make it smaller")
    return faults


def _sizes(rows: Any, column: str, split: str, size: int) -> list[str]:
    """Returns the fault of images that have another size than they must have; all are looked at."""
    wrong = []
    for begin in range(0, len(rows), LOOKED_AT):
        some = range(begin, min(len(rows), begin + LOOKED_AT))
        images = decoded(rows, column, some, f"{split} image")
        wrong += [(at, image.size) for at, image in zip(some, images, strict=True) if image.size != (size, size)]
    if not wrong:
        return []
    at, (width, height) = wrong[0]
    return [
        f"{split} image {at} is {height} x {width} pixels, and {len(wrong) - 1} others are not {size} x {size}; "
        f"set images.size, or images.fit=resize to have every image made {size} x {size}"
    ]
