"""Writing systems: checks that a translation is in the script of its language.

The script of a language is the most frequent script of its letters. It is counted and not looked up, so languages with
two scripts (Serbian, Uzbek) get the more frequent one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

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


def script_of(texts: Sequence[str]) -> str:
    """Returns the most frequent script of the letters in ``texts``; Latin without letters."""
    joined = "".join(texts)
    counts = {script: len(letter.findall(joined)) for script, letter in _LETTERS.items()}
    return max(counts, key=lambda script: counts[script])


class ScriptCheck:
    """Checks whether a text may be in a language of one script.

    The text must have a letter of that script, and not more letters of foreign scripts than of that one. Latin is never
    foreign, because names and technical words are Latin in every language.
    """

    def __init__(self, script: str) -> None:
        self._own = _LETTERS[script]
        others = "".join(ranges for name, ranges in _RANGES.items() if name not in {script, "Latin"})
        self._foreign = re.compile(f"[{others}]")

    def __call__(self, text: str) -> bool:
        if not self._own.search(text):
            return False
        if text.isascii() or not self._foreign.search(text):
            return True
        return len(self._foreign.findall(text)) <= len(self._own.findall(text))
