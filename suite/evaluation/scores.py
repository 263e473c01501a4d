"""BLEU and chrF as sacreBLEU computes them, a direction at a time, and their plain averages over languages.

BLEU is sacreBLEU's default, tokenised by 13a, whatever the language: of scripts that put no blanks between words
(Chinese, Japanese, Thai) it says little, and chrF, which counts characters, is what to read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF

from suite.evaluation.thirds import THIRDS, Third

FEWEST_PAIRS = 50
"""Test pairs of a language that is reported: with fewer a score is noise."""


@dataclass(frozen=True)
class Scores:
    """Of one direction, from 0 to 100."""

    bleu: float
    chrf: float


def one_line(text: str) -> str:
    """Returns a text with single blanks and no line breaks, so that a file has a line a sentence."""
    return " ".join(text.split())


def score(written: Sequence[str], references: Sequence[str]) -> tuple[Scores, dict[str, str]]:
    """Returns the scores of translations, a line each, and the signature of each: {"bleu": ..., "chrf": ...}."""
    bleu, chrf = BLEU(), CHRF()
    found = Scores(*(measure.corpus_score(written, [references]).score for measure in (bleu, chrf)))
    return found, {"bleu": str(bleu.get_signature()), "chrf": str(chrf.get_signature())}


def macro(found: Mapping[str, Scores], third_of: Mapping[str, Third]) -> dict[str, dict[str, float | None]]:
    """Returns {"bleu": {"all", "high", "middle", "low"}, "chrf": ...}: means over directions, each as much as another.

    ``third_of`` is by direction. None where a third has none.
    """
    means: dict[str, dict[str, float | None]] = {}
    for measure in ("bleu", "chrf"):
        values = {direction: getattr(one, measure) for direction, one in found.items()}
        means[measure] = {"all": _mean(list(values.values()))} | {
            third: _mean([value for direction, value in values.items() if third_of[direction] == third])
            for third in THIRDS
        }
    return means


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
