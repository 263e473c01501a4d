"""Damaged folders of a user's own data are read, or refused in one sentence."""

from __future__ import annotations

import random

import pytest

from suite.data.documents.prepare import prepare_documents
from suite.data.images.prepare import prepare_images
from suite.data.text.prepare import prepare
from suite.errors import SuiteError
from suite.settings import DocumentSettings, ImageSettings, TextSettings
from tests.suite.data.mutations import mutate, write_documents, write_images, write_parallel


def read_pairs(corpus, cache, log):
    prepare(TextSettings(corpus=corpus, vocabulary=345, max_length=60, clean=False), cache, log)


def read_documents(corpus, cache, log):
    prepare_documents(DocumentSettings(corpus=corpus, vocabulary=300, length=32), cache, log)


def read_images(source, cache, log):
    settings = ImageSettings(source=source, size=8, fit="resize")
    data = prepare_images(settings, 1, 2, cache, log)
    for split, count in data.info.counts.items():
        data.pixels(split, range(count), settings)


READERS = {"pairs": (write_parallel, read_pairs), "documents": (write_documents, read_documents),
           "images": (write_images, read_images)}  # fmt: skip


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("kind", READERS)
def test_a_damaged_folder_is_read_or_refused_in_one_sentence(tmp_path, kind, seed):
    write, read = READERS[kind]
    chosen = random.Random(f"{kind} {seed}")
    (tmp_path / "own").mkdir()
    write(tmp_path / "own", chosen)
    for _ in range(chosen.choice([1, 1, 2, 3])):
        mutate(tmp_path / "own", chosen)
    message = ""
    try:
        read(str(tmp_path / "own"), tmp_path / "cache", print)
    except SuiteError as error:
        message = str(error)
    assert "\n" not in message
