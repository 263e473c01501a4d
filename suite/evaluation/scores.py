"""BLEU and chrF by sacreBLEU for each direction, and their macro averages over languages and over thirds of them.

Thirds by the size of a language's text stand for the paper's high- and low-resource languages.

BLEU uses sacreBLEU's default tokenizer 13a for every language. For scripts without spaces between words (Chinese,
Japanese, Thai) it means little; use chrF there, which counts characters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF

Third = Literal["high", "middle", "low"]
THIRDS: tuple[Third, ...] = ("high", "middle", "low")

FEWEST_PAIRS = 50
"""Fewest test pairs of a reported language; with fewer a score is noise."""


@dataclass(frozen=True)
class Scores:
    """Scores of one direction, from 0 to 100."""

    bleu: float
    chrf: float


def thirds(sizes: Mapping[str, int]) -> dict[str, Third]:
    """Returns the third of each language, sorted by descending number of training pairs, then by name.

    If three does not divide the number of languages, the first thirds get one more.
    """
    order = sorted(sizes, key=lambda language: (-sizes[language], language))
    base, extra = divmod(len(order), 3)
    third_of: dict[str, Third] = {}
    for at, third in enumerate(THIRDS):
        start = at * base + min(at, extra)
        third_of |= dict.fromkeys(order[start : start + base + (at < extra)], third)
    return third_of


def one_line(text: str) -> str:
    """Returns a text with single spaces and no line breaks, so that a file has one sentence per line."""
    return " ".join(text.split())


def score(translations: Sequence[str], references: Sequence[str]) -> tuple[Scores, dict[str, str]]:
    """Returns the scores of translations, and sacreBLEU's signatures: {"bleu": ..., "chrf": ...}."""
    bleu, chrf = BLEU(), CHRF()
    scores = Scores(*(metric.corpus_score(translations, [references]).score for metric in (bleu, chrf)))
    return scores, {"bleu": str(bleu.get_signature()), "chrf": str(chrf.get_signature())}


def scores_beside_copies(
    sources: Sequence[str], translations: Sequence[str], references: Sequence[str], plain: Sequence[int]
) -> dict[str, Any]:
    """Returns the record of one direction. The texts have one order; ``plain`` has the places without a placeholder.

        {"pairs", "bleu", "chrf", "copy": {"bleu", "chrf"},            all pairs; copy scores the sources themselves
         "plain": {"pairs", "bleu", "chrf", "copy": {"bleu", "chrf"}}}   only those

    Names and placeholders stay the same in a translation, so even a copied source scores well. Without pairs the
    scores are None.
    """
    parts = [[texts[at] for at in plain] for texts in (sources, translations, references)]
    return {**_beside_copy(sources, translations, references), "plain": _beside_copy(*parts)}


def _beside_copy(sources: Sequence[str], translations: Sequence[str], references: Sequence[str]) -> dict[str, Any]:
    if not references:
        nothing: dict[str, Any] = {"bleu": None, "chrf": None}
        return {"pairs": 0, **nothing, "copy": nothing}
    own, copied = (asdict(score(texts, references)[0]) for texts in (translations, sources))
    return {"pairs": len(references), **own, "copy": copied}


def paired_bootstrap(
    first: Sequence[str], second: Sequence[str], references: Sequence[str], metric: Literal["bleu", "chrf"]
) -> float:
    """Returns the p-value of the difference between two translations of the same sentences, by sacreBLEU's paired
    bootstrap (Koehn, 2004): 1,000 samples of the sentences, always the same ones."""
    from sacrebleu.significance import PairedTest

    measure = {"bleu": BLEU, "chrf": CHRF}[metric](references=[references])
    _, results = PairedTest([("first", first), ("second", second)], {metric: measure}, None, "bs")()
    ((_, result),) = (values for name, values in results.items() if name != "System")
    assert not isinstance(result, str)
    assert result.p_value is not None
    return float(result.p_value)


def macro_average(scores: Mapping[str, Scores], third_of: Mapping[str, Third]) -> dict[str, dict[str, float | None]]:
    """Returns {"bleu": {"all", "high", "middle", "low"}, "chrf": ...}: unweighted means over directions.

    ``third_of`` maps directions to thirds. The mean of an empty third is None.
    """
    means: dict[str, dict[str, float | None]] = {}
    for metric in ("bleu", "chrf"):
        values = {direction: getattr(result, metric) for direction, result in scores.items()}
        means[metric] = {"all": _mean(list(values.values()))} | {
            third: _mean([value for direction, value in values.items() if third_of[direction] == third])
            for third in THIRDS
        }
    return means


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
