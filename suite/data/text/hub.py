"""Prepares a translation set of the Hugging Face hub, or a folder with its layout, one chunk of pairs at a time.

parquet --stream--> <draft>/<split>/<language>.arrow --sample--> tokenizer
        clean train        (English, translation)    --chunks--> rows of token ids

The text stays on disk. Memory holds one or two chunks, the held-out pairs of a language, the keys of all English
sentences of the validation and test splits, and a digest of each training pair of the current language: about 75 bytes
per pair, so 75 MB for a language with a million pairs.

The set's own validation and test splits stay unchanged, so that scores compare with published ones. Training pairs
whose English side is in one of them, in any language (suite.data.text.splitting.group_key), are dropped.
"""

from __future__ import annotations

import errno
import math
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
from transformers import PreTrainedTokenizerFast

from suite.data.text.cleaning import FEWEST, Sentences, clean_pairs, script_check
from suite.data.text.languages import canonical
from suite.data.text.sampling import temperature_weights
from suite.data.text.splitting import SPLITS, TEST, TRAIN, VALID, group_key
from suite.data.text.store import token_table
from suite.data.text.tokenizer import MOST_TEXTS, TEMPERATURE
from suite.errors import DataError
from suite.log import Log

CHUNK = 50_000
"""Pairs read at a time."""

SCRIPT_PAIRS = 10_000
"""Usable pairs that decide the script of a language; all of them if there are fewer."""

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)

_NAMES = {TRAIN: "train", VALID: "validation", TEST: "test"}
_TEXT = pa.schema([("english", pa.string()), ("translation", pa.string())])

Pairs = list[tuple[str, str]]

Source = tuple[str, Mapping[str, Any]]
"""A language pair of the set: the other language's code in its rows, and its splits, not read yet."""


@dataclass(frozen=True)
class HubText:
    """The cleaned text of a set on disk: one file per split and language."""

    folder: Path
    sizes: Mapping[str, Mapping[str, int]]
    """{split: {language: number of pairs}}; the training split has all languages."""

    def sample(self) -> Sentences:
        """Returns evenly spaced training pairs of each language, as many as the tokenizer may train on."""
        sizes = self.sizes[TRAIN]
        weights = temperature_weights(list(sizes.values()), TEMPERATURE)
        sentences: Sentences = {}
        for (language, size), weight in zip(sizes.items(), weights, strict=True):
            count = min(size, math.ceil(MOST_TEXTS * float(weight)))
            table = self._table(TRAIN, language).take([at * size // count for at in range(count)])
            sentences[language] = _pairs(table)
        return sentences

    def chunks(self, split: str, language: str) -> Iterator[Pairs]:
        table = self._table(split, language)
        for at in range(0, len(table), CHUNK):
            yield _pairs(table.slice(at, CHUNK))

    def tokenise(
        self, split: str, tokenizer: PreTrainedTokenizerFast, max_length: int
    ) -> tuple[datasets.Dataset, list[int]]:
        """Returns a split's rows in a file, grouped by language in sorted order, and the number of rows of each."""
        draft = self.folder / f"{split}.tokens"
        sizes: list[int] = []
        writer: pa.ipc.RecordBatchStreamWriter | None = None
        with _writing(draft):
            for language in self.sizes[TRAIN]:
                sizes.append(0)
                for pairs in self.chunks(split, language) if self.sizes[split].get(language) else ():
                    table, (count,) = token_table({language: pairs}, tokenizer, max_length, split != TRAIN)
                    writer = writer or pa.ipc.new_stream(str(draft), table.schema)
                    writer.write_table(table)
                    sizes[-1] += count
            if writer is None:
                raise DataError(f"its {_NAMES[split]} split has no pair of a training language")
            writer.close()
        return datasets.Dataset.from_file(str(draft)), sizes

    def _table(self, split: str, language: str) -> pa.Table:
        return pa.ipc.open_stream(pa.memory_map(str(_file(self.folder, split, language)))).read_all()


def read_hub(name: str, folder: Path, log: Log) -> HubText:
    """Reads a set, cleans its training pairs and writes its text into ``folder``.

    Raises DataError for a set that cannot be read, has no language pair with English, or lacks a split; OSError with
    the file's name when text cannot be written.
    """
    with _reading(name):
        configs = _configs(name)
    if not configs:
        raise DataError(
            f"{name} has no language pair with English, such as de-en, and no file such as train.de-en.tsv; use a set "
            "like Helsinki-NLP/opus-100"
        )
    where = "" if Path(name).is_dir() else " from the hub"
    languages = "1 language" if len(configs) == 1 else f"{len(configs)} languages"
    log(f"reading all pairs of {languages} of {name}{where}, {CHUNK:,} at a time")
    with _reading(name):
        sources = {
            language: [(other, datasets.load_dataset(name, config, streaming=True)) for config, other in own.items()]
            for language, own in configs.items()
        }
    return _read(name, sources, folder, log)


@contextmanager
def _reading(name: str) -> Iterator[None]:
    """Converts errors while reading the set into a DataError. A full local disk, where the client caches files, stays
    an OSError."""
    try:
        yield
    except Exception as error:  # the hub's client raises errors of several libraries
        if isinstance(error, OSError) and error.errno in _DISK_FULL:
            raise
        fault = f"{type(error).__name__}: {error}"
        if Path(name).is_dir():
            raise DataError(
                f"the folder {name} could not be read ({fault}); check its files and their names (docs/own-data.md)"
            ) from error
        raise DataError(
            f"{name} could not be read from the hub ({fault}); check the name and the network, "
            "or set text.corpus=catalogues or text.corpus=django"
        ) from error


def _configs(name: str) -> dict[str, dict[str, str]]:
    """Returns {language: {config of a pair with English: the other code}}, languages in sorted order."""
    configs: defaultdict[str, dict[str, str]] = defaultdict(dict)
    for config in datasets.get_dataset_config_names(name):
        codes = config.split("-")
        other = next((code for code in codes if code != "en"), "en")
        language = canonical(other)
        if len(codes) == 2 and "en" in codes and language is not None:
            configs[language][config] = other
    return dict(sorted(configs.items()))


def _read(name: str, sources: Mapping[str, Sequence[Source]], folder: Path, log: Log) -> HubText:
    held_out: set[str] = set()
    sizes: dict[str, dict[str, int]] = {split: {} for split in SPLITS}
    for split in SPLITS:
        (folder / split).mkdir(parents=True)
    for split in (VALID, TEST):
        for language, own in sources.items():
            chunks = [list(filter(all, chunk)) for chunk in _chunks(name, own, split)]
            held_out.update(group_key(english) for pairs in chunks for english, _ in pairs)
            sizes[split][language] = _write(_file(folder, split, language), chunks)
        if not any(sizes[split].values()):
            raise DataError(f"{name} has no {_NAMES[split]} split; use a set with one, like Helsinki-NLP/opus-100")
    for language, own in sources.items():
        count = _write(_file(folder, TRAIN, language), _usable(language, _chunks(name, own, TRAIN), held_out, log))
        log(f"{language}: {count} training pairs after cleaning")
        if count >= FEWEST:
            sizes[TRAIN][language] = count
    if not sizes[TRAIN]:
        raise DataError(f"no language of {name} has {FEWEST} usable training pairs; use another corpus")
    return HubText(folder, sizes)


def _chunks(name: str, sources: Sequence[Source], split: str) -> Iterator[Pairs]:
    """Yields the raw pairs of a language, (English, translation)."""
    with _reading(name):
        for code, splits in sources:
            if _NAMES[split] in splits:
                for table in splits[_NAMES[split]].with_format("arrow").iter(batch_size=CHUNK):
                    texts = table["translation"].combine_chunks()
                    yield list(zip(texts.field("en").to_pylist(), texts.field(code).to_pylist(), strict=True))


def _cleaned(language: str, chunks: Iterator[Pairs]) -> Iterator[Pairs]:
    """Yields chunks of cleaned pairs. The first has at least SCRIPT_PAIRS pairs, if there are as many."""
    first: Pairs | None = []
    for raw in chunks:
        pairs = sorted(clean_pairs((language, e, t) for e, t in raw if e and t)[language])
        if first is not None:
            first += pairs
            if len(first) < SCRIPT_PAIRS:
                continue
            pairs, first = first, None
        yield pairs
    if first:
        yield first


def _usable(language: str, chunks: Iterator[Pairs], held_out: set[str], log: Log) -> Iterator[Pairs]:
    """Yields the cleaned pairs that are new, in the language's script and not held out. Keeps an 8-byte digest of each
    earlier pair in memory, about 75 bytes in a set."""
    seen: set[bytes] = set()
    check, other_script = None, 0
    for pairs in _cleaned(language, chunks):
        check = check or script_check(pairs)
        usable: Pairs = []
        for pair in pairs:
            if not check(pair):
                other_script += 1
                continue
            digest = blake2b("\0".join(pair).encode(), digest_size=8).digest()
            if digest not in seen and group_key(pair[0]) not in held_out:
                seen.add(digest)
                usable.append(pair)
        yield usable
    if other_script > len(seen):
        log(f"{language}: dropped {other_script} training pairs that are not in the script of the first ones")


def _write(path: Path, chunks: Iterable[Pairs]) -> int:
    count = 0
    with _writing(path), pa.ipc.new_stream(str(path), _TEXT) as writer:
        for pairs in chunks:
            columns = ([pair[side] for pair in pairs] for side in range(2))
            writer.write_table(pa.table([pa.array(column, pa.string()) for column in columns], _TEXT))
            count += len(pairs)
    return count


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Adds the file's name to pyarrow's OSErrors, which lack it."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, os.strerror(error.errno), str(path)) from error


def _file(folder: Path, split: str, language: str) -> Path:
    return folder / split / f"{language}.arrow"


def _pairs(table: pa.Table) -> Pairs:
    return list(zip(table["english"].to_pylist(), table["translation"].to_pylist(), strict=True))
