"""Prepares documents for a language model, once; later runs use the cache (``suite.data.cache``)."""

from __future__ import annotations

import json
import re
import time
from hashlib import sha256
from pathlib import Path
from typing import Any

from suite.data.cache import cached
from suite.data.documents.docstrings import DJANGO, DOCSTRINGS, REQUIREMENTS, read_docstrings
from suite.data.documents.folder import TRAIN, Documents, read_folder
from suite.data.documents.splitting import split
from suite.data.documents.tokenizer import train_tokenizer
from suite.data.documents.tokens import INFO_FILE, TOKENIZER, TokenData, write_tokens
from suite.data.user_files import fingerprint
from suite.data.wheels import UnreachableError
from suite.errors import DataError, nearest
from suite.log import Log
from suite.settings import DocumentSettings

VERSION = 1
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
    try:
        return _prepare(settings, cache, log)
    except UnreachableError as error:
        log(f"cannot fetch {DOCSTRINGS}: {error}; using the smaller corpus {DJANGO}, which needs no download")
        return _prepare(settings.model_copy(update={"corpus": DJANGO}), cache, log)


def folder_of_documents(settings: DocumentSettings, cache: Path) -> Path:
    """Returns the cache folder of these settings. Its name has a digest of everything that the content depends on."""
    source: Any = REQUIREMENTS.read_text() if settings.corpus == DOCSTRINGS else settings.corpus
    if settings.corpus not in (DOCSTRINGS, DJANGO):
        source = [source, fingerprint(Path(settings.corpus))]
    parts = json.dumps([VERSION, source, settings.vocabulary])
    slug = re.sub(r"\W+", "-", settings.corpus)
    return cache / f"documents-{slug}-{settings.vocabulary}-{sha256(parts.encode()).hexdigest()[:12]}"


def _prepare(settings: DocumentSettings, cache: Path, log: Log) -> TokenData:
    folder = folder_of_documents(settings, cache)
    cached(folder, lambda building: _build(settings, building, cache, log), log)
    data = TokenData.open(folder)
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
    documents: dict[str | None, Documents]
    if settings.corpus in (DOCSTRINGS, DJANGO):
        documents = {None: read_docstrings(settings.corpus, cache, log)}
    else:
        documents = read_folder(settings.corpus, log)
    parts = split(documents, log)
    for name, texts in parts.items():
        if not texts:
            raise DataError(
                f"{settings.corpus} has no {name} text after repeated paragraphs are dropped and a twentieth is held "
                "out; use a folder with more documents or lines"
            )
    tokenizer = train_tokenizer(parts[TRAIN], settings.vocabulary)
    tokenizer.save_pretrained(building / TOKENIZER)
    tokens = {name: write_tokens(texts, tokenizer, building / f"{name}.npy") for name, texts in parts.items()}
    info = {"corpus": settings.corpus, "documents": {name: len(texts) for name, texts in parts.items()},
            "tokens": tokens}  # fmt: skip
    (building / INFO_FILE).write_text(json.dumps(info, indent=1))
    counts = ", ".join(
        f"{name} {len(parts[name]):,} documents, {sum(map(len, parts[name])):,} characters, {tokens[name]:,} tokens"
        for name in parts
    )
    log(f"prepared {counts} of {len(tokenizer)} kinds in {time.monotonic() - start:.0f} s")
