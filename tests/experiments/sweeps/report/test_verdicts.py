"""Verdicts and reports, from hand-made scores."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.sweeps.members.scales import MODELS
from experiments.sweeps.registry import SWEEPS
from experiments.sweeps.report.margins import Difference
from experiments.sweeps.report.results import is_scored, read_results
from experiments.sweeps.report.verdicts import DEPTH_BEATS_WIDTH, Comparison, combined_outcome
from experiments.sweeps.text_base import still_improving
from suite.errors import DataError
from suite.evaluation.bootstrap import PairedTest
from tests.experiments.sweeps.finished import GOOD, LAPTOP, depth_width, finish, members, words


def third_row(table, finding, third="low"):
    """The last cells of a third of a finding: nats, chrF and seeds."""
    rows = list(table.rows)
    first = next(at for at, row in enumerate(rows) if finding in row[0])
    where = table.headings.index("where")
    return next(row for row in rows[first : first + 3] if row[where].startswith(f"{third}: "))[where + 1 :]


def test_a_run_that_stopped_early_is_finished_and_scored_at_its_best_step():
    member = members("depth_width")[0]
    train = member.experiment.train.model_copy(update={"validate_every": 10, "patience": 2})
    member = replace(member, experiment=member.experiment.model_copy(update={"train": train}))
    record = {"steps": 70, "best_step": 50, "stopped_early": "...", "validations_without_improvement": 2}
    scores = {"beam": member.scoring.beam, "max_pairs": member.scoring.max_pairs}
    scores["directions"] = dict.fromkeys(f"en-{code}" for code in member.experiment.text.corpus_languages)
    assert is_scored(member, record, {**scores, "step": 50})
    assert not is_scored(member, record, {**scores, "step": 70})
    assert not is_scored(member, {**record, "stopped_early": False}, {**scores, "step": 50})  # interrupted
    assert is_scored(member, {"steps": train.steps}, {**scores, "step": train.steps})
    for other in ({"beam": 1}, {"max_pairs": None}, {"directions": {"en-de": None}}):
        assert not is_scored(member, record, {**scores, "step": 50, **other})


@pytest.mark.slow
def test_findings_are_confirmed_by_clear_scores(tmp_path):
    depth_width(tmp_path, GOOD | {"t12_400m": 8.0}, alone=4.0)  # 8 chrf apart, or more, of 40 sentences
    result, table = words(tmp_path)
    assert set(result.values()) == {"confirmed"}
    assert len(result) == 6
    nats, chrf, seeds = third_row(table, "depth beats width")
    assert re.fullmatch(r"\+0\.60 ± 0\.\d\d", nats)
    assert re.fullmatch(r"\+6\.00 ± 0\.\d\d", chrf)
    assert seeds == "3 of 3"
    assert third_row(table, "depth beats width", "high")[2] is None  # only the low third decides
    assert third_row(table, "(wide) to 6B", "high")[2] == "3 of 3"
    assert table.notes[0].startswith("Findings tested: 6.")


def test_the_margin_is_pooled_over_all_models(tmp_path):
    depth_width(tmp_path, GOOD)
    for member in members("depth_width"):
        if member.label == "t64_3b":
            finish(tmp_path, member, 17.0 + 5 * member.experiment.train.seed)
    # chrF by seed: 0, 10, 20 above the first of t64_3b, 0, 0.2, 0.4 of the others; t(95%, 10) = 2.228
    pooled = (4 * 0.04 + 100) / 5
    margin = 2.228 * (pooled * (1 / 3 + 1 / 3)) ** 0.5
    found = third_row(words(tmp_path)[1], "depth beats width")
    assert found[:2] == ["+0.60 ± 0.81", f"+6.00 ± {margin:.2f}"]


@pytest.mark.parametrize(("pairs", "outcome"), [(150, "confirmed"), (149, "undecided")])
def test_the_test_pairs_of_all_languages_count_together(tmp_path, pairs, outcome):
    depth_width(tmp_path, GOOD)
    for path in tmp_path.glob("depth_width-laptop/*/scores.json"):
        path.write_text(path.read_text().replace('"pairs": 300', f'"pairs": {pairs}'))
    result, table = words(tmp_path)
    assert result["at equal size depth beats width on low-resource languages"] == outcome
    few = "" if pairs == 150 else "; 298 test pairs are too few for a claim"
    assert third_row(table, "depth beats width")[2] == f"3 of 3{few}"


def test_a_seed_that_lacks_a_language_is_left_out(tmp_path):
    depth_width(tmp_path, GOOD)
    results = read_results("laptop", members("depth_width"), tmp_path)
    for run in results.runs:
        if run.folder.name == "t48_1_3b_deep-1":
            del run.scores["directions"]["en-gl"], run.scores["directions"]["gl-en"]
            (run.folder / "scores/gl-en.ref").unlink()
    verdict = DEPTH_BEATS_WIDTH.verdict(results)
    assert verdict.outcome == "undecided"
    ((_, low),) = [part for part in verdict.parts if part[0].startswith("low")]
    assert low.clear_seeds == len(low.tests) == 2


@pytest.mark.slow
def test_the_opposite_is_a_contradiction_and_differences_within_the_margin_are_undecided(tmp_path):
    depth_width(tmp_path / "against", dict(zip(MODELS, (19.0, 15.0, 12.0, 10.0, 8.0), strict=True)), alone=25.0)
    assert set(words(tmp_path / "against")[0].values()) == {"contradicted"}
    depth_width(tmp_path / "noisy", GOOD, noise=20.0)
    assert set(words(tmp_path / "noisy")[0].values()) == {"undecided"}
    depth_width(tmp_path / "zero", dict.fromkeys(MODELS, 0.0), alone=0.0, noise=0.0)
    assert set(words(tmp_path / "zero")[0].values()) == {"undecided"}


def compared(nll, chrf, p_values, seeds=3, pairs=300, gains=None):
    tests = [PairedTest(*test) for test in zip(gains or [chrf] * len(p_values), p_values, strict=True)]
    return Comparison(Difference(nll, 0.1), Difference(chrf, 1.0), tests, seeds, pairs)


NOTHING = Comparison(None, None, (), 3, 0)


def test_a_verdict_needs_both_measures_all_seeds_and_enough_pairs():
    clear = [0.001] * 3
    assert compared(0.3, 2.0, clear).outcome == "confirmed"
    assert compared(-0.3, -2.0, clear).outcome == compared(-0.3, -0.5, clear).outcome == "contradicted"
    assert compared(-0.3, 2.0, clear).outcome == "undecided"  # the measures disagree
    assert compared(0.3, -2.0, clear).outcome == "undecided"
    assert compared(0.05, 2.0, clear).outcome == "undecided"
    assert compared(0.3, 2.0, [0.001, 0.2, 0.001]).outcome == "undecided"
    assert compared(0.3, 2.0, clear, gains=[5.0, 5.0, -4.0]).outcome == "undecided"  # one seed clearly disagrees
    assert compared(-0.3, -2.0, clear, gains=[-5.0, 4.0, -5.0]).outcome == "undecided"
    assert compared(0.3, 2.0, clear[:2]).outcome == "undecided"  # a seed is missing
    assert compared(0.3, 2.0, clear[:1], seeds=1).outcome == "undecided"
    assert compared(0.3, 2.0, clear, pairs=299).outcome == "undecided"
    assert compared(math.nan, 2.0, clear).outcome == "undecided"
    assert Difference(1.0, math.nan).outcome == Difference(1.0, None).outcome == "undecided"
    assert str(Difference(1.0, None)) == "+1.00 (one seed)"
    assert NOTHING.outcome == "no runs"


def test_a_finding_about_all_thirds_is_refuted_by_one():
    better, worse, unclear = compared(0.3, 2.0, [0.001] * 3), compared(-0.3, -5.0, [0.001] * 3), compared(0.3, 2, [0.4])
    assert combined_outcome([better, better]) == "confirmed"
    assert combined_outcome([better, worse, unclear]) == "contradicted"
    assert combined_outcome([better, unclear]) == "undecided"
    assert combined_outcome([better, NOTHING]) == "undecided"


def test_members_that_are_missing_or_scored_otherwise_are_named_and_the_rest_is_reported(tmp_path):
    depth_width(tmp_path, GOOD, leave_out=("t128_6b", "bilingual gl"))
    member = next(member for member in members("depth_width") if member.label == "t128_6b")
    finish(tmp_path, member, 1.0)
    scores = tmp_path / member.folder / "scores.json"
    scores.write_text(json.dumps(json.loads(scores.read_text()) | {"beam": 1}))
    result, _ = words(tmp_path)
    assert result["at equal size depth beats width on low-resource languages"] == "confirmed"
    assert result["1.3B (wide) to 6B is better everywhere"] == "no runs"
    assert result["400M to 1.3B (deep) is better everywhere"] == "confirmed"
    text = SWEEPS["depth_width"].report("laptop", LAPTOP, tmp_path).page.markdown()
    assert "excluded from all numbers: depth_width-laptop/t128_6b-0" in text
    assert result["one multilingual model (one of the baselines' own size, t12_400m) beats the bilingual ones on "
                  "low-resource languages"] == "no runs"  # fmt: skip
    assert "| gl | low | 500 | 300 | 26 | - |" in text  # no baseline
    assert "| da | low | 500 | 300 | 26 | 12.2 ± 0.5 |" in text
    assert "depth_width-laptop/t64_3b-1 |" in text
    empty = SWEEPS["capacity"].report("laptop", LAPTOP, tmp_path / "nothing").page
    assert "No member of this sweep is finished" in empty.markdown()
    assert "no runs" in empty.html()


def test_runs_that_ended_before_or_have_no_validation_are_not_said_to_improve(tmp_path):
    depth_width(tmp_path, GOOD)
    for label, best in (("t64_3b", None), ("t128_6b", 1900)):
        for seed in range(3):
            path = tmp_path / f"depth_width-laptop/{label}-{seed}/record.json"
            path.write_text(json.dumps(json.loads(path.read_text()) | {"best_step": best}))
    sentence = still_improving(read_results("laptop", members("depth_width"), tmp_path))[0]
    assert "t48_1_3b_deep (3 of 3 runs)" in sentence
    assert "t64_3b" not in sentence
    assert "t128_6b" not in sentence


def test_a_sweep_with_fewer_models_or_another_scale_tests_what_it_has():
    findings = {}
    for name, scale in (("capacity", "laptop"), ("depth_width", "laptop_long")):
        table = SWEEPS[name].report(scale, LAPTOP, Path("nothing")).tables[0]
        findings[name, scale] = [row[0].partition(": ")[0] for row in table.rows if row[0]]
    assert findings["capacity", "laptop"] == [
        "400M to 1.3B (wide) is better everywhere", "1.3B (wide) to 6B is better everywhere",
    ]  # fmt: skip
    assert findings["depth_width", "laptop_long"] == [
        "at equal size depth beats width on low-resource languages",
        "400M to 1.3B (wide) is better everywhere", "400M to 1.3B (deep) is better everywhere",
        "one multilingual model (one of the baselines' own size, t12_400m) beats the bilingual ones on low-resource "
        "languages",
    ]  # fmt: skip


def test_models_scored_on_different_test_pairs_are_not_compared(tmp_path):
    depth_width(tmp_path, GOOD)
    path = tmp_path / "depth_width-laptop/t24_1_3b_wide-1/scores/gl-en.ref"
    path.write_text(path.read_text().replace("file", "files"))
    with pytest.raises(DataError, match=r"t48_1_3b_deep-1 and .*t24_1_3b_wide-1 were scored on different .* of gl-en;"):
        words(tmp_path)
