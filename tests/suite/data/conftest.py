"""Django's own translations, prepared once for all tests of the data: no fetch, no network."""

from __future__ import annotations

from pathlib import Path

import pytest

from suite.data.packages import DJANGO
from suite.data.text.catalogues import read_corpus
from suite.data.text.cleaning import Sentences, clean
from suite.data.text.prepare import folder_of, prepare
from suite.data.text.text import TextData
from suite.settings import TextSettings

SETTINGS = TextSettings(corpus=DJANGO, vocabulary=1200, max_length=32)
"""Those of the runs of other tests, so that the text is prepared once for all."""


@pytest.fixture(scope="session")
def sentences(tmp_path_factory: pytest.TempPathFactory) -> Sentences:
    return clean(read_corpus(DJANGO, tmp_path_factory.mktemp("unused"), print))


@pytest.fixture(scope="session")
def settings() -> TextSettings:
    return SETTINGS


@pytest.fixture(scope="session")
def data(settings: TextSettings, cache: Path) -> TextData:
    prepare(settings, cache, print)
    return TextData(folder_of(settings, cache), with_test=True)
