"""A folder of your own images, one folder a class.

train/cat/1.png  train/dog/7.jpg  ...   test/cat/9.png  ...      or val/ or valid/; without it every fifth image of
                                                                 each class is a test image
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from PIL import Image

from suite.data.images.sets import TEST, TRAIN
from suite.errors import DataError

_TEST_NAMES = (TEST, "val", "valid")

Files = list[tuple[Path, int]]
"""Images with their classes."""


def is_class_folder(source: str) -> bool:
    """Whether ``source`` is a folder with this layout."""
    folder = Path(source) / TRAIN
    return source.startswith(("/", ".")) and folder.is_dir() and any(path.is_dir() for path in folder.iterdir())


def read_class_folder(source: str, building: Path) -> dict[str, Any]:
    """Returns both splits as tables of ``datasets`` that hold the files' bytes; ``building`` is a place for drafts.

    Raises DataError for a class without images, a test class that is not trained on, and a file that is no image.
    """
    import datasets

    folder = Path(source)
    classes = sorted(path.name for path in (folder / TRAIN).iterdir() if path.is_dir())
    files = {TRAIN: _files(folder / TRAIN, classes)}
    held_out = next((folder / name for name in _TEST_NAMES if (folder / name).is_dir()), None)
    if held_out is not None:
        unknown = sorted({path.name for path in held_out.iterdir() if path.is_dir()} - {*classes})
        if unknown:
            raise DataError(f"{held_out} has the class {unknown[0]}, which {folder / TRAIN} does not have")
        files[TEST] = _files(held_out, classes)
    else:
        files = _every_fifth_held_out(files[TRAIN])
    columns = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=classes)})
    return {
        name: datasets.Dataset.from_generator(
            _rows, features=columns, cache_dir=str(building / "draft"), gen_kwargs={"files": own}
        )
        for name, own in files.items()
    }


def _files(folder: Path, classes: list[str]) -> Files:
    files: Files = []
    for label, name in enumerate(classes):
        own = sorted(path for path in (folder / name).rglob("*") if path.is_file()) if (folder / name).is_dir() else []
        if not own and folder.name == TRAIN:
            raise DataError(f"{folder / name} has no images; add some, or remove the folder")
        for path in own:
            try:
                with Image.open(path) as image:
                    image.verify()
            except (OSError, SyntaxError, ValueError) as error:
                raise DataError(f"{path} is no image that can be read ({error}); remove or replace it") from error
        files += [(path, label) for path in own]
    return files


def _every_fifth_held_out(files: Files) -> dict[str, Files]:
    by_class: dict[int, Files] = {}
    for file in files:
        by_class.setdefault(file[1], []).append(file)
    test = {path for own in by_class.values() for path, _ in own[::5]}
    return {
        TRAIN: [file for file in files if file[0] not in test],
        TEST: [file for file in files if file[0] in test],
    }


def _rows(files: Files) -> Iterator[dict[str, Any]]:
    for path, label in files:
        yield {"image": {"bytes": path.read_bytes(), "path": None}, "label": label}
