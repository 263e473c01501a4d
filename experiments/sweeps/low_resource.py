"""Transfer to a low-resource language: alone, with relatives, with unrelated languages, by its number of pairs.

This is the paper's claim that one multilingual model beats bilingual ones on low-resource languages (section 5, figure
6), tested with a rule for the budget that favours neither: docs/sweeps.md.
"""

from __future__ import annotations

from pathlib import Path

from experiments.base.cluster import Cluster
from experiments.report.page import Page, Section
from experiments.report.table import Table
from experiments.sweeps.members.base import Member
from experiments.sweeps.members.low_resource import (
    NAME,
    RULES,
    Case,
    alone,
    cases,
    low_resource_members,
)
from experiments.sweeps.members.tuning import SETTINGS, tuning_table
from experiments.sweeps.report.low_resource import (
    CHRF,
    TEST_NLL,
    budget_table,
    dose_response,
    read_runs,
    score_table,
    verdicts,
)
from experiments.sweeps.report.results import Results, read_results
from experiments.sweeps.report.score_tables import by_direction
from experiments.sweeps.text_base import missing, still_improving, text_page


class LowResource:
    """The sweep on a low-resource language."""

    name = NAME
    scales: tuple[str, ...] = tuple(RULES)

    def members(self, scale: str, cluster: Cluster, runs: Path) -> list[Member]:
        """Returns the runs that are known by now: the bilingual ones follow once they are tuned."""
        return low_resource_members(scale, cluster, runs)

    def page(self, scale: str, cluster: Cluster, runs: Path) -> Page:
        """Returns the report of the finished runs."""
        results, compared = self._results(scale, cluster, runs), cases(scale)
        found = read_runs(results, compared)
        pictures = [
            picture
            for group in RULES[scale].groups
            for measure in (TEST_NLL, CHRF)
            if (picture := dose_response([case for case in compared if case.group == group], found, measure))
        ]
        return text_page(
            "Transfer to a low-resource language",
            scale,
            [*_about(scale), *still_improving(results), *missing(results)],
            results,
            verdicts(compared, results),
            Section(
                "Scores",
                tables=[score_table(compared, found), _directions(compared, results), budget_table(compared, found)],
                pictures=pictures,
            ),
            [_tuning(compared, scale, cluster, runs)],
        )

    def tables(self, scale: str, cluster: Cluster, runs: Path) -> list[Table]:
        """Returns the scores and the three budgets."""
        results, compared = self._results(scale, cluster, runs), cases(scale)
        found = read_runs(results, compared)
        return [score_table(compared, found), budget_table(compared, found)]

    def _results(self, scale: str, cluster: Cluster, runs: Path) -> Results:
        scored = [member for member in self.members(scale, cluster, runs) if member.scoring is not None]
        return read_results(scale, scored, runs)


def _about(scale: str) -> list[str]:
    rule = RULES[scale]
    groups = "; ".join(
        f"{group.language} with its relatives {', '.join(group.relatives)}, "
        + (f"or with {', '.join(group.unrelated)}, " if group.unrelated else "")
        + f"{group.pairs:,} pairs of each"
        for group in rule.groups
    )
    counts = ", ".join("all" if count is None else str(count) for count in rule.counts)
    return [
        f"One language cut to {counts} training pairs, drawn anew for each of {rule.seeds} seeds: {groups}. Both "
        "directions are trained. All models of a language have one vocabulary, one split and one test text.",
        f"Every run validates every {rule.validate_every} steps and ends after {rule.patience} validations without "
        f"improvement, or after {rule.text.steps:,} steps of {rule.text.batch_tokens:,} tokens. Its best checkpoint is "
        f"scored. The bilingual models are tuned over {len(SETTINGS)} settings on validation text with seed 0; only "
        "the chosen one is scored. The multilingual models are not tuned.",
    ]


def _directions(compared: list[Case], results: Results) -> Table:
    labels = [(case, case.label(model)) for case in compared for model in case.models]
    return by_direction(results, [(label, label, [case.group.language]) for case, label in labels])


def _tuning(compared: list[Case], scale: str, cluster: Cluster, runs: Path) -> Table:
    return tuning_table([(case.title, alone(case, scale, cluster)) for case in compared], runs)


SWEEP = LowResource()
