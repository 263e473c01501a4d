"""Transfer to a low-resource language: alone, with relatives, with unrelated languages, by its number of pairs.

This is the paper's claim that one multilingual model beats bilingual ones on low-resource languages (section 5, figure
6), tested with a rule for the budget that favours neither: docs/sweeps.md.
"""

from __future__ import annotations

from experiments.sweeps.members.few_pairs import NAME, RULES, alone, cases, low_resource_members
from experiments.sweeps.members.tuning import SETTINGS
from experiments.sweeps.report.few_pairs import budget_table, direction_table, dose_response, score_table, verdicts
from experiments.sweeps.report.results import Results
from experiments.sweeps.text_base import text_sweep


def _about(results: Results) -> list[str]:
    rule = RULES[results.scale]
    group = rule.group
    control = f"or with {', '.join(group.unrelated)}, " if group.unrelated else ""
    counts = ", ".join("all" if count is None else str(count) for count in rule.counts)
    return [
        f"One language cut to {counts} training pairs, drawn anew for each of {rule.seeds} seeds: {group.language} "
        f"with its relatives {', '.join(group.relatives)}, {control}{group.pairs:,} pairs of each. Both "
        "directions are trained. All models of a language have one vocabulary, one split and one test text.",
        f"Every run validates every {rule.validate_every} steps and ends after {rule.patience} validations without "
        f"improvement, or after {rule.text.steps:,} steps of {rule.text.batch_tokens:,} tokens. Its best checkpoint is "
        f"scored. The bilingual models are tuned over {len(SETTINGS)} settings on validation text with seed 0; only "
        "the chosen one is scored. The multilingual models are not tuned.",
    ]


SWEEP = text_sweep(
    NAME,
    "Transfer to a low-resource language",
    _about,
    low_resource_members,
    (verdicts,),
    own_tables=(score_table, direction_table, budget_table),
    own_pictures=dose_response,
    tuned=lambda scale, cluster: [(case.title, alone(case, scale, cluster)) for case in cases(scale)],
    scales=tuple(RULES),
)
