"""The scales of sweeps on text. Many runs share an hour, so they also divide the depth, by one number for all runs."""

from __future__ import annotations

from dataclasses import dataclass

from experiments.sweeps.members.base import Scoring
from experiments.translation.runs import MULTILINGUAL_RUNS
from experiments.translation.scales import TINY_TEXT, TextRule

MODELS = tuple(run.__name__ for run in MULTILINGUAL_RUNS)
"""The five of section 5, smallest first."""

SMALLEST = MODELS[0]
"""The smallest run, whose shape a baseline has before it is tuned."""


def baseline_label(language: str) -> str:
    return f"bilingual {language}"


@dataclass(frozen=True)
class SweepRule:
    """How a scale shrinks the runs of a sweep on text, and the size of the sweep.

    All compared runs have equal text, optimizer, seeds and largest budget (``batch_tokens`` x ``steps``). Each trains
    until its validations stop improving, and its best checkpoint is scored. Deep and wide models have equal parameters:
    all depths are divided by one number and all widths by one number, so T(24, H, A) and T(12, 2H, 2A) become
    T(24/n, h, a) and T(12/n, 2h, 2a).

    A bilingual baseline has one language in both directions and the shape of T(6, 8192, 16), the smallest of the five
    (the paper's baselines have 350M parameters, its smallest model 400M), or a smaller one: it is tuned
    (``experiments/sweeps/members/tuning.py``).
    """

    text: TextRule | None
    """None: the paper's numbers."""
    baselines: tuple[str, ...]
    """Languages that get a bilingual baseline."""
    seeds: int
    scoring: Scoring
    models: tuple[str, ...] | None = None
    """Names of the runs of section 5 that are compared; None: all five."""
    validate_every: int | None = None
    """Steps between two validations; None: the last checkpoint is scored."""
    patience: int | None = None
    """Validations without improvement that end a run."""
    batches: tuple[float, float, float] = (0.26, 1.0, 4.0)
    """Mini-batches of the batch-size sweep, relative to ``batch_tokens``: the paper's 260K, 1M and 4M."""


RULES = {
    # Two languages of each third, one Romance and one Germanic, all with 300 test pairs or more. The corpus has few
    # test pairs of truly small languages, so Italian and Dutch are cut to 3,000 pairs, Galician and Danish to 500.
    "laptop": SweepRule(
        TextRule(
            blocks_by=6, vocabulary_by=16, corpus_languages=("da", "de", "es", "gl", "it", "nl"),
            train_pairs=("it:3000", "nl:3000", "da:500", "gl:500"), max_length=20, batch_tokens=1024,
            steps=1500, checkpoint_every=500, valid_pairs=600, dropout=0.1, learning_rate=8e-3, warmup_steps=100,
            threads=1,
        ),
        baselines=("da", "de", "es", "gl", "it", "nl"),
        seeds=3,
        validate_every=100,
        patience=4,
        scoring=Scoring(4, 300),
    ),
    # The smallest, the wide and the deep model in six related languages, for more steps. The heads
    # of the deep model are together as wide as the model, those of the wide one twice as wide, as in the paper.
    "laptop_long": SweepRule(
        TextRule(
            blocks_by=6, most_stages=1, heads_by=4, head_width_by=4, vocabulary_by=16,
            corpus_languages=("ca", "es", "fr", "gl", "it", "pt_BR"),
            train_pairs=("fr:3000", "it:3000", "ca:500", "gl:500"), max_length=20, micro_batches=1,
            batch_tokens=1024, steps=3000, checkpoint_every=1000, valid_pairs=600, dropout=0.1, learning_rate=8e-3,
            warmup_steps=100, threads=1,
        ),
        baselines=("ca", "gl"),
        seeds=3,
        models=("t12_400m", "t24_1_3b_wide", "t48_1_3b_deep"),
        validate_every=100,
        patience=8,
        scoring=Scoring(4, 300),
    ),
    # a test of the whole sweep in two minutes; the models learn nothing
    "tiny": SweepRule(
        TINY_TEXT,
        baselines=("de", "nl"),
        seeds=1,
        validate_every=1,
        patience=2,
        scoring=Scoring(1, 3),
    ),
    # its runs have the largest of the three batches
    "paper": SweepRule(
        None, baselines=("de", "fr", "cy", "ka", "gd", "yo"), seeds=1, scoring=Scoring(4, None),
        batches=(0.065, 0.25, 1.0),
    ),
}  # fmt: skip
"""Scales of sweeps on text, by name. A short search chose the rate and its decay (docs/sweeps.md)."""
