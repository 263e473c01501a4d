"""From a corpus' name to text ready to train on, once; then from the cache (``suite.data.cache``)."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

from suite.data.cache import cached, save_rows
from suite.data.cleaning import clean
from suite.data.corpora import CATALOGUES, DJANGO, REQUIREMENTS, check_corpus, read_corpus
from suite.data.hub import read_hub
from suite.data.splitting import SPLITS, TRAIN, split
from suite.data.store import tokenised
from suite.data.text import FACTS, TOKENIZER, TextData
from suite.data.tokenizer import train_tokenizer
from suite.data.wheels import UnreachableError
from suite.errors import DataError
from suite.settings import TextSettings

Say = Callable[[str], None]

Built = tuple[list[str], dict[str, list[int]]]
"""Languages in sorted order, and {split: pairs of each language}."""

VERSION = 2
"""Of cleaning, splitting and tokenising. Raise it when one of them changes, or old caches stay in use."""


def prepare(settings: TextSettings, cache: Path, say: Say) -> TextData:
    """Returns the text that ``settings`` asks for, built if the cache does not have it whole. ``say`` gets progress.

    When ``catalogues`` cannot be fetched, that is said and ``django`` is prepared; ``TextData.corpus`` is the one used.
    Raises DataError for an unknown corpus, one that cannot be read, or when another process holds the cache too long;
    SettingError when the vocabulary does not fit the text.
    """
    check_corpus(settings.corpus)
    try:
        return _prepare(settings, cache, say)
    except UnreachableError as error:
        say(f"no {CATALOGUES}: {error}; going on with the smaller corpus {DJANGO}, which needs no fetch")
        return _prepare(settings.model_copy(update={"corpus": DJANGO}), cache, say)


def folder_of(settings: TextSettings, cache: Path) -> Path:
    """Returns where the text of these settings is kept: a name with a digest of all that its content depends on."""
    source = REQUIREMENTS.read_text() if settings.corpus == CATALOGUES else settings.corpus
    parts = json.dumps([VERSION, source, settings.vocabulary, settings.max_tokens])
    slug = re.sub(r"\W+", "-", settings.corpus)
    return cache / f"text-{slug}-{settings.vocabulary}-{sha256(parts.encode()).hexdigest()[:12]}"


def _prepare(settings: TextSettings, cache: Path, say: Say) -> TextData:
    folder = folder_of(settings, cache)
    cached(folder, lambda building: _build(settings, building, cache, say), say)
    return TextData.open(folder)


def _build(settings: TextSettings, building: Path, cache: Path, say: Say) -> None:
    start = time.monotonic()
    build = _build_catalogues if settings.corpus in (CATALOGUES, DJANGO) else _build_hub
    languages, sizes = build(settings, building, cache, say)
    facts = {
        "corpus": settings.corpus, "languages": languages, "sizes": sizes,
        "settings": settings.model_dump(exclude={"languages"}),  # a run's own choice of what it draws
    }  # fmt: skip
    (building / FACTS).write_text(json.dumps(facts, indent=1))
    kept = {name: sum(sizes[name]) for name in SPLITS}
    say(
        f"prepared {kept['train']} training, {kept['valid']} validation and {kept['test']} test pairs "
        f"in {time.monotonic() - start:.0f} s"
    )


def _build_catalogues(settings: TextSettings, building: Path, cache: Path, say: Say) -> Built:
    pairs = read_corpus(settings.corpus, cache, say)
    say(f"reading and cleaning {settings.corpus}")
    sentences = clean(pairs)
    if not sentences:
        raise DataError(f"no language of {settings.corpus} has enough usable pairs; take another corpus")
    count = sum(map(len, sentences.values()))
    say(f"{settings.corpus}: {count} pairs in {len(sentences)} languages after cleaning")
    parts = split(sentences)
    del sentences
    tokenizer = train_tokenizer(parts[TRAIN], settings.vocabulary)
    say(f"learned a vocabulary of {len(tokenizer)} from {len(parts[TRAIN])} languages; tokenising")
    tokenizer.save_pretrained(building / TOKENIZER)
    sizes = {}
    for name in SPLITS:
        rows, sizes[name] = tokenised(parts[name], tokenizer, settings.max_tokens, with_text=name != TRAIN)
        save_rows(rows, building / name)
    return sorted(parts[TRAIN]), sizes


def _build_hub(settings: TextSettings, building: Path, cache: Path, say: Say) -> Built:
    text = read_hub(settings.corpus, building / "draft", say)
    tokenizer = train_tokenizer(text.sample(), settings.vocabulary, text.sizes[TRAIN])
    say(f"learned a vocabulary of {len(tokenizer)} from {len(text.sizes[TRAIN])} languages; tokenising")
    tokenizer.save_pretrained(building / TOKENIZER)
    sizes = {}
    for name in SPLITS:
        draft = building / "draft" / f"{name}.tokens"
        rows, sizes[name] = text.write_rows(name, tokenizer, settings.max_tokens, draft)
        save_rows(rows, building / name)
        draft.unlink()
        left_out = sum(text.sizes[name].get(language, 0) for language in text.sizes[TRAIN]) - sum(sizes[name])
        if left_out:
            say(f"{left_out} {name} pairs are longer than text.max_tokens={settings.max_tokens} and left out")
    shutil.rmtree(building / "draft")
    return list(text.sizes[TRAIN]), sizes
