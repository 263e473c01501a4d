"""Prepares a corpus for training, once; later runs use the cache (``suite.data.cache``)."""

from __future__ import annotations

import json
import re
import shutil
import time
from hashlib import sha256
from pathlib import Path
from typing import Any

from datasets import Dataset

from suite.data.cache import cached, save_rows
from suite.data.text.cleaning import Sentences, clean
from suite.data.text.corpora import CATALOGUES, DJANGO, REQUIREMENTS, check_corpus, read_corpus
from suite.data.text.hub import read_hub
from suite.data.text.parallel import is_parallel_folder, read_parallel_folder
from suite.data.text.splitting import SPLITS, TRAIN, split
from suite.data.text.store import token_table
from suite.data.text.text import INFO_FILE, TOKENIZER, TextData
from suite.data.text.tokenizer import train_tokenizer
from suite.data.user_files import fingerprint
from suite.data.wheels import UnreachableError
from suite.errors import DataError, SettingError, nearest
from suite.log import Log
from suite.settings import TextSettings

Built = tuple[list[str], dict[str, list[int]]]
"""Languages in sorted order, and {split: number of pairs of each language}."""

VERSION = 3
"""Version of cleaning, splitting and tokenising. Raise it when one changes; otherwise old caches stay in use."""


def prepare(settings: TextSettings, cache: Path, log: Log) -> TextData:
    """Returns the text for ``settings``; builds it unless the cache has a valid copy. ``log`` gets progress.

    When ``catalogues`` cannot be fetched, logs this and prepares ``django``; ``TextData.corpus`` names the corpus used.
    Raises DataError for an unknown or unreadable corpus, or when another process holds the cache too long; SettingError
    when the vocabulary size does not fit the text.
    """
    check_corpus(settings.corpus)
    if not settings.clean and not is_parallel_folder(settings.corpus):
        raise SettingError(f"text.clean=false is for a folder of your own text, and {settings.corpus} is none")
    local = settings.corpus in (CATALOGUES, DJANGO) or is_parallel_folder(settings.corpus)
    if settings.corpus_languages and not local:
        raise SettingError(
            f"text.corpus_languages is for {CATALOGUES}, {DJANGO} and folders of your own text, and "
            f"{settings.corpus} is from the Hugging Face hub; set text.languages"
        )
    try:
        return _prepare(settings, cache, log)
    except UnreachableError as error:
        log(f"cannot fetch {CATALOGUES}: {error}; using the smaller corpus {DJANGO}, which needs no download")
        return _prepare(settings.model_copy(update={"corpus": DJANGO}), cache, log)


def folder_of(settings: TextSettings, cache: Path) -> Path:
    """Returns the cache folder of these settings. Its name has a digest of everything that the content depends on."""
    source: Any = REQUIREMENTS.read_text() if settings.corpus == CATALOGUES else settings.corpus
    if is_parallel_folder(settings.corpus):
        source = [source, settings.clean, fingerprint(Path(settings.corpus))]
    parts = [VERSION, source, settings.vocabulary, settings.max_length]
    parts += [sorted(settings.corpus_languages)] if settings.corpus_languages else []
    slug = re.sub(r"\W+", "-", settings.corpus)
    return cache / f"text-{slug}-{settings.vocabulary}-{sha256(json.dumps(parts).encode()).hexdigest()[:12]}"


def _prepare(settings: TextSettings, cache: Path, log: Log) -> TextData:
    folder = folder_of(settings, cache)
    cached(folder, lambda building: _build(settings, building, cache, log), log)
    return TextData.open(folder)


def _build(settings: TextSettings, building: Path, cache: Path, log: Log) -> None:
    start = time.monotonic()
    build = _build_hub
    if settings.corpus in (CATALOGUES, DJANGO):
        build = _build_catalogues
    elif is_parallel_folder(settings.corpus):
        build = _build_folder
    languages, sizes = build(settings, building, cache, log)
    info = {
        "corpus": settings.corpus, "languages": languages, "sizes": sizes,
        "settings": settings.model_dump(include={"corpus", "vocabulary", "max_length", "clean", "corpus_languages"}),
    }  # fmt: skip
    (building / INFO_FILE).write_text(json.dumps(info, indent=1))
    totals = {name: sum(sizes[name]) for name in SPLITS}
    log(
        f"prepared {totals['train']} training, {totals['valid']} validation and {totals['test']} test pairs "
        f"in {time.monotonic() - start:.0f} s"
    )


def _build_catalogues(settings: TextSettings, building: Path, cache: Path, log: Log) -> Built:
    pairs = read_corpus(settings.corpus, cache, log)
    log(f"reading and cleaning {settings.corpus}")
    sentences = clean(pairs)
    if not sentences:
        raise DataError(f"no language of {settings.corpus} has enough usable pairs; use another corpus")
    count = sum(map(len, sentences.values()))
    log(f"{settings.corpus}: {count} pairs in {len(sentences)} languages after cleaning")
    return _build_tokens(split(sentences), settings, building, log)


def _build_folder(settings: TextSettings, building: Path, cache: Path, log: Log) -> Built:
    log(f"reading the parallel text in {settings.corpus}")
    return _build_tokens(read_parallel_folder(settings.corpus, settings.clean, log), settings, building, log)


def _build_tokens(parts: dict[str, Sentences], settings: TextSettings, building: Path, log: Log) -> Built:
    parts = _kept_languages(parts, settings)
    tokenizer = train_tokenizer(parts[TRAIN], settings.vocabulary)
    log(f"learned a vocabulary of {len(tokenizer)} entries from {len(parts[TRAIN])} languages; tokenising")
    tokenizer.save_pretrained(building / TOKENIZER)
    sizes = {}
    for name in SPLITS:
        table, sizes[name] = token_table(parts[name], tokenizer, settings.max_length, with_text=name != TRAIN)
        save_rows(Dataset(table), building / name)
        _log_dropped(sum(map(len, parts[name].values())) - sum(sizes[name]), name, settings, log)
    return sorted(parts[TRAIN]), sizes


def _log_dropped(count: int, name: str, settings: TextSettings, log: Log) -> None:
    if count:
        log(f"dropped {count} {name} pairs longer than text.max_length={settings.max_length}")


def _kept_languages(parts: dict[str, Sentences], settings: TextSettings) -> dict[str, Sentences]:
    if settings.corpus_languages is None:
        return parts
    for language in settings.corpus_languages:
        if language not in parts[TRAIN]:
            raise SettingError(
                f"text.corpus_languages has {language}, which is not one of the {len(parts[TRAIN])} languages of "
                f"{settings.corpus}; {nearest(language, parts[TRAIN])}"
            )
    return {name: {code: parts[name][code] for code in settings.corpus_languages} for name in SPLITS}


def _build_hub(settings: TextSettings, building: Path, cache: Path, log: Log) -> Built:
    text = read_hub(settings.corpus, building / "draft", log)
    tokenizer = train_tokenizer(text.sample(), settings.vocabulary, text.sizes[TRAIN])
    log(f"learned a vocabulary of {len(tokenizer)} entries from {len(text.sizes[TRAIN])} languages; tokenising")
    tokenizer.save_pretrained(building / TOKENIZER)
    sizes = {}
    for name in SPLITS:
        draft = building / "draft" / f"{name}.tokens"
        rows, sizes[name] = text.write_rows(name, tokenizer, settings.max_length, draft)
        save_rows(rows, building / name)
        draft.unlink()
        read = sum(text.sizes[name].get(language, 0) for language in text.sizes[TRAIN])
        _log_dropped(read - sum(sizes[name]), name, settings, log)
    shutil.rmtree(building / "draft")
    return list(text.sizes[TRAIN]), sizes
