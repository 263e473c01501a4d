"""Cleans raw catalogue messages into sentence pairs to train on.

Removes markup, keyboard accelerators and odd spaces from both sides and NFKC-normalises them. Drops a pair when a side
is empty, has no letter or is a program's key; when the placeholders differ; when the translation equals the English or
is not in the script of its language; and when the language already has the pair.

The script of a language is the most frequent script of its letters. It is counted and not looked up, so languages with
two scripts (Serbian, Uzbek) get the more frequent one.
"""

from __future__ import annotations

import html
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from unicodedata import is_normalized, normalize

from suite.data.text.catalogues import Pair

Sentences = dict[str, list[tuple[str, str]]]
"""{language: [(English, translation), ...]}, languages and pairs in sorted order."""

FEWEST = 100
"""Languages with fewer pairs are dropped: temperature sampling would repeat each pair thousands of times."""
LONGEST = 1000
"""Characters per side; longer texts are licences and help pages."""

_PRINTF = r"%(?:\([^()]*\)|\d+\$)?[-#0+]*\d*(?:\.\d+)?[diouxXeEfgGcrsa]\b"
PLACEHOLDER = re.compile(rf"{_PRINTF}|[$#%]?\{{+[^{{}}]*\}}+")
_BREAK = re.compile(r"<\s*/?\s*(?:br|p|div|li|ul|ol|tr|td|h\d)\b[^<>]*>", re.IGNORECASE)
_TAG = re.compile(r"<\s*/?\s*[A-Za-z][^<>]*>|<!--.*?-->")
_ENTITY = re.compile(r"&#?\w+;")
_INVISIBLE = re.compile(
    "[\u0000-\u0008\u000e-\u001b\u007f\u00ad\u200b\u200e\u200f\u202a-\u202e\u2060\u2066-\u2069\ufeff\ufffd]"
)
_LETTER = re.compile(r"[^\W\d_]")
_KEY = re.compile(r"\S*[a-z0-9]_[a-z0-9]\S*|[a-z0-9]+(?:[.-][a-z0-9]+){2,}|[\w.+-]+@[\w.-]+|\w+://\S*")
_BRACKETED_MARK = re.compile(r"\s*\(\s*[_&]\w\s*\)")
_MARK = re.compile(rf"(?P<keep>{PLACEHOLDER.pattern})|(?<!_)_(?=[^\W_])|(?<!\w)&(?=\w)")

_RANGES = {
    "Latin": "A-Za-z\u00c0-\u024f\u1e00-\u1eff",
    "Greek": "\u0370-\u03ff\u1f00-\u1fff",
    "Cyrillic": "\u0400-\u052f",
    "Armenian": "\u0530-\u058f",
    "Hebrew": "\u0590-\u05ff",
    "Arabic": "\u0600-\u06ff\u0750-\u077f\u08a0-\u08ff\ufb50-\ufdff\ufe70-\ufefe",
    "Thaana": "\u0780-\u07bf",
    "Devanagari": "\u0900-\u097f",
    "Bengali": "\u0980-\u09ff",
    "Gurmukhi": "\u0a00-\u0a7f",
    "Gujarati": "\u0a80-\u0aff",
    "Oriya": "\u0b00-\u0b7f",
    "Tamil": "\u0b80-\u0bff",
    "Telugu": "\u0c00-\u0c7f",
    "Kannada": "\u0c80-\u0cff",
    "Malayalam": "\u0d00-\u0d7f",
    "Sinhala": "\u0d80-\u0dff",
    "Thai": "\u0e00-\u0e7f",
    "Lao": "\u0e80-\u0eff",
    "Tibetan": "\u0f00-\u0fff",
    "Myanmar": "\u1000-\u109f",
    "Georgian": "\u10a0-\u10ff\u1c90-\u1cbf",
    "Ethiopic": "\u1200-\u137f",
    "Khmer": "\u1780-\u17ff",
    "Mongolian": "\u1800-\u18af",
    "Tifinagh": "\u2d30-\u2d7f",
    "Hangul": "\u1100-\u11ff\u3130-\u318f\uac00-\ud7af",
    "Han": "\u3040-\u30ff\u3400-\u9fff\U00020000-\U0003ffff",  # with kana: Japanese mixes them in one word
    "Persian": "\U000103a0-\U000103df",
}
_LETTERS = {script: re.compile(f"[{ranges}]") for script, ranges in _RANGES.items()}


def plain(text: str) -> str:
    """Returns ``text`` without markup and invisible characters, NFKC-normalised, with single spaces."""
    if "&" in text:
        text = _ENTITY.sub(lambda entity: html.unescape(entity.group()), text)
    if "<" in text:
        text = _TAG.sub("", _BREAK.sub(" ", text))
    if not text.isascii() and not is_normalized("NFKC", text):
        text = normalize("NFKC", text)
    if not text.isprintable():
        text = _INVISIBLE.sub("", text)
    return " ".join(text.split())


def placeholders(text: str) -> tuple[str, ...]:
    """Returns the placeholders of a message (``%s``, ``%(name)d``, ``{name}``, ``${name}``), sorted."""
    if "%" not in text and "{" not in text:
        return ()
    return tuple(sorted(PLACEHOLDER.findall(text)))


def without_marks(english: str, translation: str) -> tuple[str, str]:
    """Removes the keyboard accelerators of a pair: ``_File`` and ``&File`` become ``File``, ``文件(_F)`` ``文件``.

    A word that is equal on both sides (``R&D``, ``file_name``) is a name and stays unchanged.
    """
    names = set(english.split()) & set(translation.split())

    def unmark(text: str) -> str:
        words = _BRACKETED_MARK.sub("", text).split(" ")
        return " ".join(w if w in names else _MARK.sub(lambda mark: mark["keep"] or "", w) for w in words)

    return unmark(english), unmark(translation)


def clean(pairs: Iterable[Pair], fewest: int = FEWEST) -> Sentences:
    """Returns the usable pairs of each language. Drops languages with fewer than ``fewest`` pairs."""
    in_script: Sentences = {}
    for language, cleaned in sorted(clean_pairs(pairs).items()):
        ordered = sorted(cleaned)
        in_script[language] = list(filter(script_check(ordered), ordered))
    return {language: usable for language, usable in in_script.items() if len(usable) >= fewest}


def clean_pairs(pairs: Iterable[Pair]) -> defaultdict[str, set[tuple[str, str]]]:
    """Returns the cleaned pairs of each language, before the script check."""
    english_of = cache(_english)
    cleaned: defaultdict[str, set[tuple[str, str]]] = defaultdict(set)
    for language, raw, translation in set(pairs):
        if not translation or len(translation) > LONGEST:
            continue
        english, expected = english_of(raw)
        pair = english, plain(translation) if english else ""
        if placeholders(pair[1]) != expected:
            continue
        if "_" in english or "&" in english:
            pair = without_marks(*pair)
        if all(pair) and pair[0].casefold() != pair[1].casefold() and not _KEY.fullmatch(pair[1]):
            cleaned[language].add(pair)
    return cleaned


def _english(raw: str) -> tuple[str, tuple[str, ...]]:
    """Returns the cleaned English side and its placeholders; an empty text if it is unusable."""
    text = plain(raw)
    if len(text) > LONGEST or _KEY.fullmatch(text) or not _LETTER.search(PLACEHOLDER.sub("", text)):
        return "", ()
    return text, placeholders(text)


def script_check(pairs: Sequence[tuple[str, str]]) -> Callable[[tuple[str, str]], bool]:
    """Returns a check whether a pair's translation is in the main script of ``pairs``. Placeholders do not count.

    A translation must have a letter of that script, and not more letters of foreign scripts than of that one. Latin is
    never foreign, because names and technical words are Latin in every language.
    """
    characters = Counter("".join(_without_placeholders(translation) for _, translation in pairs))
    distinct = "".join(characters)
    counts = {script: sum(map(characters.__getitem__, of.findall(distinct))) for script, of in _LETTERS.items()}
    script = max(counts, key=lambda script: counts[script])  # the first one, Latin, without letters
    own = _LETTERS[script]
    foreign = re.compile(f"[{''.join(ranges for name, ranges in _RANGES.items() if name not in {script, 'Latin'})}]")

    def is_in_script(pair: tuple[str, str]) -> bool:
        text = _without_placeholders(pair[1])
        if not own.search(text):
            return False
        if text.isascii() or not foreign.search(text):
            return True
        return len(foreign.findall(text)) <= len(own.findall(text))

    return is_in_script


def _without_placeholders(text: str) -> str:
    return PLACEHOLDER.sub("", text) if "%" in text or "{" in text else text
