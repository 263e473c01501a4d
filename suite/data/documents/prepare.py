"""Prepares documents for a language model, once; later runs use the cache (``suite.data.cache``)."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from suite.data.cache import cache_folder, cached, slug
from suite.data.documents.docstrings import DOCSTRINGS, REQUIREMENTS, read_docstrings
from suite.data.documents.folder import TRAIN, read_folder
from suite.data.documents.splitting import split
from suite.data.documents.tokenizer import train_tokenizer
from suite.data.documents.tokens import INFO_FILE, TOKENIZER, TokenData, write_tokens
from suite.data.packages import DJANGO, with_django_instead
from suite.data.user_files import fingerprint
from suite.errors import DataError, nearest
from suite.log import Log
from suite.settings import DocumentSettings

VERSION = 2
"""Version of reading, splitting and tokenizing. Raise it when one changes; otherwise old caches stay in use."""


def check_documents(corpus: str) -> None:
    """Raises DataError when ``corpus`` is neither a known name nor a folder."""
    if corpus not in (DOCSTRINGS, DJANGO) and not Path(corpus).is_dir():
        raise DataError(
            f"there is no folder and no corpus {corpus!r}; {nearest(corpus, (DOCSTRINGS, DJANGO))}; text.corpus takes "
            "a folder with files .txt, .md, .rst, .jsonl or .parquet"
        )


def prepare_documents(settings: DocumentSettings, cache: Path, log: Log) -> TokenData:
    """Returns the tokens for ``settings``; builds them unless the cache has a valid copy. ``log`` gets progress.

    When ``docstrings`` cannot be fetched, logs this and prepares ``django``; ``TokenData.corpus`` names the corpus
    used. Raises DataError for an unknown corpus, one that cannot be read, and one too short for a row; SettingError
    when the vocabulary does not fit the text.
    """
    check_documents(settings.corpus)
    return with_django_instead(lambda text: _prepare(text, cache, log), settings, log)


def folder_of_documents(settings: DocumentSettings, cache: Path) -> Path:
    source: Any = REQUIREMENTS.read_text() if settings.corpus == DOCSTRINGS else settings.corpus
    if settings.corpus not in (DOCSTRINGS, DJANGO):
        source = [source, fingerprint(Path(settings.corpus))]
    name = f"documents-{slug(settings.corpus)}-{settings.vocabulary}"
    return cache_folder(cache, name, [VERSION, source, settings.vocabulary])


def _prepare(settings: DocumentSettings, cache: Path, log: Log) -> TokenData:
    folder = folder_of_documents(settings, cache)
    cached(folder, lambda building: _build(settings, building, cache, log), log)
    data = TokenData(folder)
    for name in (TRAIN, data.held_out):
        if data.counts[name] <= settings.length:
            raise DataError(
                f"{name} of {settings.corpus} has {data.counts[name]:,} tokens, and a row needs {settings.length + 1}: "
                "text.length and the next token; use more text or a smaller text.length"
            )
    return data


def _build(settings: DocumentSettings, building: Path, cache: Path, log: Log) -> None:
    start = time.monotonic()
    log(f"reading the documents of {settings.corpus}")
    is_package = settings.corpus in (DOCSTRINGS, DJANGO)
    parts = split(
        {None: read_docstrings(settings.corpus, cache, log)} if is_package else read_folder(settings.corpus, log), log
    )
    for name, texts in parts.items():
        if not texts:
            raise DataError(
                f"{settings.corpus} has no {name} text after repeated paragraphs are dropped and a twentieth is held "
                "out; use a folder with more documents or lines"
            )
    tokenizer = train_tokenizer(parts[TRAIN], settings.vocabulary)
    if len(tokenizer) < settings.vocabulary:
        log(
            f"text.vocabulary is {settings.vocabulary}, and the text gives {len(tokenizer)} entries: others stay unused"
        )
    tokenizer.save_pretrained(building / TOKENIZER)
    tokens = {name: write_tokens(texts, tokenizer, building / f"{name}.npy") for name, texts in parts.items()}
    info = {"corpus": settings.corpus, "tokens": tokens}
    (building / INFO_FILE).write_text(json.dumps(info, indent=1))
    counts = ", ".join(
        f"{name} {len(parts[name]):,} documents, {sum(map(len, parts[name])):,} characters, {tokens[name]:,} tokens"
        for name in parts
    )
    log(f"prepared {counts} of {len(tokenizer)} kinds in {time.monotonic() - start:.0f} s")
