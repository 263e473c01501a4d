"""A folder of your own images, one folder a class.

train/cat/1.png  train/dog/7.jpg  ...   test/cat/9.png  ...      or val/ or valid/; without it every fifth image of
                                                                 each class is a test image
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
from PIL import Image, ImageOps

from suite.data.images.sets import TEST, TRAIN
from suite.data.images.transforms import FILE
from suite.data.user_files import log_ignored, printable, visible_files
from suite.errors import DataError, first_line
from suite.log import Log

_TEST_NAMES = (TEST, "val", "valid")

Files = list[tuple[Path, int]]
"""Images with their classes."""


def is_class_folder(source: str) -> bool:
    """Whether ``source`` is a folder with this layout."""
    folder = Path(source) / TRAIN
    return source.startswith(("/", ".")) and folder.is_dir() and bool(_classes(folder))


def read_class_folder(source: str, building: Path, log: Log) -> dict[str, Any]:
    """Returns both splits as tables of ``datasets`` that hold the files' names and bytes; ``building`` is a place for
    drafts. Logs which files are ignored.

    Raises DataError for a class without images, a test class that is not trained on, and a file that is no image.
    """
    folder = Path(source)
    classes = _classes(folder / TRAIN)
    labels = {name: label for label, name in enumerate(classes)}
    held_out = next((name for name in _TEST_NAMES if (folder / name).is_dir()), None)
    unknown = sorted({*_classes(folder / held_out)} - {*classes}) if held_out else []
    if unknown:
        raise DataError(f"{folder}/{held_out} has the class {unknown[0]}, which {folder / TRAIN} does not have")
    found: dict[str | None, Files] = {TRAIN: [], held_out: []}
    others = []
    for path in visible_files(folder, log):
        split, *inner = path.relative_to(folder).parts
        if split in found and len(inner) > 1:
            found[split].append((path, labels[printable(inner[0])]))
        else:
            others.append(path)
    log_ignored(others, folder, f"files in no class of {' or '.join(name for name in found if name)}", log)
    for path, _ in (*found[TRAIN], *found[held_out]):
        _check_image(path)
    files = {TRAIN: found[TRAIN], TEST: found[held_out]} if held_out else _every_fifth_held_out(found[TRAIN])
    if empty := sorted({*labels.values()} - {label for _, label in files[TRAIN]}):
        tested = "" if held_out else ", because the first and every fifth after it are test images"
        raise DataError(f"{folder / TRAIN / classes[empty[0]]} has no images to train on{tested}; add some")
    for split, own in files.items():
        if not own:
            raise DataError(f"{folder} has no {split} images; add some")
    columns = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=classes), FILE: datasets.Value("string")}
    )
    return {
        name: datasets.Dataset.from_generator(
            _rows, features=columns, cache_dir=str(building / "draft"), gen_kwargs={"files": own}
        )
        for name, own in files.items()
    }


def _classes(folder: Path) -> list[str]:
    return sorted(
        {printable(path.name) for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")}
    )


def _check_image(path: Path) -> None:
    """Raises DataError for a file that is no image, that is truncated, or that has more than 8 bits per value."""
    try:
        with Image.open(path) as image:
            image.draft("L", (1, 1))  # reads all of a JPEG, and computes an eighth of its size
            image.load()
            ImageOps.exif_transpose(image)
            mode = image.mode
    except Exception as error:  # Pillow's readers raise errors of many types
        raise DataError(f"{path} is no image that can be read ({first_line(error)}); remove or replace it") from error
    if mode.startswith(("I", "F")):
        raise DataError(f"{path} is of mode {mode}, more than 8 bits per value; convert it to 8 bits first")


def _every_fifth_held_out(files: Files) -> dict[str, Files]:
    splits: dict[str, Files] = {TRAIN: [], TEST: []}
    seen: Counter[int] = Counter()
    for path, label in files:
        splits[TRAIN if seen[label] % 5 else TEST].append((path, label))
        seen[label] += 1
    return splits


def _rows(files: Files) -> Iterator[dict[str, Any]]:
    for path, label in files:
        yield {"image": {"bytes": path.read_bytes(), "path": None}, "label": label, FILE: printable(path)}
