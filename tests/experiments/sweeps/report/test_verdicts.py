"""Verdicts and reports, from hand-made scores."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.base.cluster import Cluster
from experiments.report.table import readable
from experiments.sweeps.batch_size import batch_table
from experiments.sweeps.members.scales import MODELS
from experiments.sweeps.registry import SWEEPS
from experiments.sweeps.report.figures import against_bilingual
from experiments.sweeps.report.margins import Difference, difference
from experiments.sweeps.report.results import CHRF, is_scored, read_results
from experiments.sweeps.report.verdicts import DEPTH_BEATS_WIDTH, Comparison, combined_outcome
from experiments.sweeps.text_base import still_improving
from suite.errors import DataError
from suite.evaluation.bootstrap import PairedTest
from suite.pipeline.planning.devices import GIB
from tests.experiments.sweeps.finished import write_scores

LAPTOP = Cluster(devices=2, bytes_per_device=12 * GIB, kind="cpu")
THIRDS = {"de": "high", "es": "high", "it": "middle", "nl": "middle", "da": "low", "gl": "low"}
PAIRS = {"de": 17_000, "es": 18_000, "it": 3000, "nl": 3000, "da": 500, "gl": 500}
GOOD = {"t12_400m": 10.0, "t24_1_3b_wide": 12.0, "t48_1_3b_deep": 15.0, "t64_3b": 17.0, "t128_6b": 19.0}


def finish(runs: Path, member, bleu):
    """Leaves what a member leaves when it is trained and scored; ``bleu`` is of its languages' two directions. The
    other scores follow from it."""
    folder = runs / member.folder
    folder.mkdir(parents=True, exist_ok=True)
    experiment = member.experiment
    (folder / "experiment.toml").write_text(experiment.to_toml())
    record = {
        "name": experiment.name, "data": "catalogues", "K": 1, "parameters": 445_104,
        "steps": experiment.train.steps, "best_step": experiment.train.steps, "tokens": 10_240,
        "seconds": 2.0, "tokens_per_second": 5120.0, "loss_last": 3.5, "valid_nll": 3.0, "best_valid_nll": 8 - bleu / 5,
        "shrunk": ["model.width 1 -> 2"],
    }  # fmt: skip
    (folder / "record.json").write_text(json.dumps(record))
    lines = [
        json.dumps({"step": at + 1, "train/tokens": 1024 * (at + 1), "train/loss": 7 - at / 3}) for at in range(10)
    ]
    (folder / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 10, "valid/nll": 3.0}']) + "\n")
    languages = experiment.text.languages or experiment.text.corpus_languages
    directions = {
        way: {"train_pairs": PAIRS[code], "bleu": share * bleu, "chrf": 2 * share * bleu, "nll": 8 - share * bleu / 5}
        for code in languages
        for way, share in ((f"en-{code}", 0.9), (f"{code}-en", 1.1))
    }
    thirds = {code: THIRDS[code] for code in languages}
    if member.scoring is not None:
        write_scores(folder, directions, bleu / 25, step=experiment.train.steps, max_pairs=300, thirds=thirds)


def members(name, runs=Path("runs")):
    return SWEEPS[name].members("laptop", LAPTOP, runs)


def depth_width(runs: Path, good, alone=6.0, noise=0.1, leave_out=()):
    for member in members("depth_width"):
        if member.label not in leave_out:
            finish(runs, member, good[member.label] + noise * member.experiment.train.seed)
    for _ in range(2):  # tuning, then the tuned ones
        for member in members("bilingual", runs):
            if member.label.startswith("bilingual") and member.label not in leave_out:
                better = 0 if member.scoring is not None or "half-the-size" in member.folder else -1
                finish(runs, member, max(0.0, alone + better + noise * member.experiment.train.seed))


def words(runs: Path, name="depth_width"):
    table = SWEEPS[name].report("laptop", LAPTOP, runs).tables[0]
    return {row[0].partition(": ")[0]: row[2] for row in table.rows if row[0]}, table


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
    depth_width(tmp_path, GOOD)
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


def test_a_difference_that_the_test_pairs_do_not_show_is_undecided(tmp_path):
    depth_width(tmp_path, GOOD)
    for seed in range(3):
        for name in ("da-en", "en-da", "gl-en", "en-gl"):
            deep, wide = (tmp_path / f"depth_width-laptop/{label}-{seed}/scores/{name}.hyp" for label in MODELS[2:0:-1])
            deep.write_text(wide.read_text())
    result, table = words(tmp_path)
    assert result["at equal size depth beats width on low-resource languages"] == "undecided"
    assert third_row(table, "depth beats width")[2] == "0 of 3"


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
    assert Difference(1.0, math.nan).outcome == "undecided"
    assert NOTHING.outcome == "no runs"


def test_a_finding_about_all_thirds_is_refuted_by_one():
    better, worse, unclear = compared(0.3, 2.0, [0.001] * 3), compared(-0.3, -5.0, [0.001] * 3), compared(0.3, 2, [0.4])
    assert combined_outcome([better, better]) == "confirmed"
    assert combined_outcome([better, worse, unclear]) == "contradicted"
    assert combined_outcome([better, unclear]) == "undecided"
    assert combined_outcome([better, NOTHING]) == "undecided"


def test_a_model_with_one_seed_among_three_decides_nothing(tmp_path):
    for member in members("depth_width"):
        if member.label != "t24_1_3b_wide" or member.experiment.train.seed == 0:
            finish(tmp_path, member, GOOD[member.label] + 0.1 * member.experiment.train.seed)
    result, table = words(tmp_path)
    assert result["at equal size depth beats width on low-resource languages"] == "undecided"
    assert third_row(table, "depth beats width")[2] == "1 of 3"


def test_one_seed_decides_nothing(tmp_path):
    for member in members("depth_width"):
        if member.experiment.train.seed == 0:
            finish(tmp_path, member, GOOD.get(member.label, 9.0))
    result, table = words(tmp_path)
    assert list(result.values()) == ["undecided"] * 4 + ["no runs"] * 2  # of the bilingual ones
    assert all("one seed" in row[4] for row in table.rows[:4])


def test_missing_members_are_named_and_the_rest_is_reported(tmp_path):
    depth_width(tmp_path, GOOD, leave_out=("t128_6b", "bilingual gl"))
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


def test_scores_with_other_settings_are_excluded_and_named(tmp_path):
    depth_width(tmp_path, GOOD)
    folder = tmp_path / "depth_width-laptop" / "t128_6b-1"
    scores = json.loads((folder / "scores.json").read_text())
    (folder / "scores.json").write_text(json.dumps(scores | {"beam": 1}))
    results = read_results("laptop", members("depth_width"), tmp_path)
    assert [member.folder for member in results.missing] == ["depth_width-laptop/t128_6b-1"]
    assert list(results.by_seed("t128_6b", ["de"], CHRF)) == [0, 2]
    page = SWEEPS["depth_width"].report("laptop", LAPTOP, tmp_path).page
    assert "excluded from all numbers: depth_width-laptop/t128_6b-1" in page.markdown()


def test_the_page_is_self_contained_and_has_all_models(tmp_path):
    depth_width(tmp_path, GOOD)
    page = SWEEPS["depth_width"].report("laptop", LAPTOP, tmp_path).page
    html_file, markdown_file = page.write(tmp_path / "out")
    html = html_file.read_text()
    assert html.count("<svg") == 4
    assert not re.search(r'(src|href)="(?!data:|#)', html)
    assert all(name in html for name in MODELS)
    text = markdown_file.read_text()
    pictures = re.findall(r"!\[.*\]\((.*)\)", text)
    assert len(pictures) == 4
    assert all((tmp_path / "out" / picture).read_bytes().startswith(b"\x89PNG") for picture in pictures)
    # both directions and three seeds in the mean: 30.2 of the deep one, and its difference from the baselines' 12.2
    assert "30.2 ± 0.5" in text
    assert re.search(r"\+18\.00 ± 0\.\d\d", text)
    assert (
        "Best at the largest number of steps, so more steps could improve them further: t12_400m (3 of 3 runs)" in text
    )
    assert "copying the source" in text
    # 15.1 BLEU in the mean, 0.9 times as much out of English and 1.1 times into it; chrF is twice that
    assert "| t48_1_3b_deep | 5.282 ± 0.045 | 4.678 ± 0.055 | 27.18 ± 0.45 | 33.22 ± 0.55 |" in text
    assert "| bilingual es, de, it, nl, da, gl | 6.902 ± 0.045 | 6.658 ± 0.055 | 10.98 ± 0.45 | 13.42 ± 0.55 |" in text


def test_the_figure_beside_bilingual_models_has_margins(tmp_path):
    depth_width(tmp_path, GOOD)
    results = read_results("laptop", [*members("depth_width"), *members("bilingual", tmp_path)], tmp_path)
    axis = against_bilingual(results)[0].figure.axes[0]
    assert [bar.get_label() for bar in axis.containers] == list(MODELS)
    for bar in axis.containers:
        (segments,) = bar.lines[2]
        heights = [upper[1] - lower[1] for lower, upper in segments.get_segments()]
        # seeds of all models are 0, 0.2 and 0.4 chrF apart: s = 0.2, t(95%, 12) = 2.179
        assert heights == pytest.approx([2 * 2.1788128 * 0.2 * (2 / 3) ** 0.5] * 6)


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


def test_a_page_escapes_its_text(tmp_path):
    depth_width(tmp_path, GOOD)
    folder = tmp_path / members("depth_width")[0].folder
    record = json.loads((folder / "record.json").read_text()) | {"data": "<script>alert(1)</script>"}
    (folder / "record.json").write_text(json.dumps(record))
    assert "<script>" not in SWEEPS["depth_width"].report("laptop", LAPTOP, tmp_path).page.html()


def test_table_5_has_the_papers_columns(tmp_path):
    for member in members("batch_size"):
        tokens = member.experiment.train.batch_tokens
        finish(tmp_path, member, 10 + tokens / 500 + 0.01 * member.experiment.train.seed)
    table = batch_table(read_results("laptop", members("batch_size"), tmp_path))
    *rows, copied = [dict(zip(table.headings, row, strict=True)) for row in table.rows]
    shown = {heading: value for heading, value in copied.items() if value is not None}
    assert shown == {
        "batch (paper)": "copying the source",
        **{f"{measure}, {kind}": value for kind in ("equal steps", "equal tokens")
           for measure, value in (("chrF", "26"), ("BLEU", "14"))},
    }  # fmt: skip
    assert [row["batch (paper)"] for row in rows] == [260_000, 1_000_000, 4_000_000]
    assert [row["BLEU (paper)"] for row in rows] == [30.92, 31.86, 32.71]
    middle = members("batch_size")[1].experiment.train.batch_tokens
    assert [row["batch (here)"] for row in rows] == [round(0.26 * middle), middle, 4 * middle]
    from_german = 1.1 * (10 + 4 * middle / 500 + 0.01)
    assert rows[2]["BLEU, equal steps"] == f"{readable(from_german)} ± 0.027"
    assert rows[1]["BLEU, equal steps"] == rows[1]["BLEU, equal tokens"]
    result, findings = words(tmp_path, "batch_size")
    assert set(result.values()) == {"confirmed"}
    gain = 2 * 1.1 * (4 * middle - round(0.26 * middle)) / 500  # into English alone
    assert all(row[5].startswith(f"+{gain:.2f} ±") for row in findings.rows)
    text = SWEEPS["batch_size"].report("laptop", LAPTOP, tmp_path).page.markdown()
    assert "15 runs are finished and scored" in text  # the middle batch is one run in both comparisons


NUMBERS = st.floats(-100, 100)


@given(st.lists(st.lists(NUMBERS, min_size=1, max_size=4), min_size=2, max_size=6))
def test_the_margin_is_students_and_the_verdict_is_antisymmetric(groups):
    more, less = groups[:2]
    one, other = difference(more, less, groups), difference(less, more, groups)
    assert one.value == pytest.approx(-other.value)
    assert (one.margin is None) == all(len(group) == 1 for group in groups)
    turned = {"confirmed": "contradicted", "contradicted": "confirmed", "undecided": "undecided"}
    assert other.outcome == turned[one.outcome]


def test_the_margin_of_two_and_two_seeds_by_hand():
    # deviations 1 and 1 about both means: s^2 = (2 + 2) / 2, two degrees of freedom
    result = difference([3.0, 5.0], [0.0, 2.0], [[3.0, 5.0], [0.0, 2.0]])
    assert result.value == 3.0
    assert result.margin == pytest.approx(4.3026527 * 2**0.5)  # t(95%, 2)
    assert result.outcome == "undecided"
    assert difference([], [1.0], []) is None


def test_the_margin_pools_the_deviations_of_all_models():
    # five models of three seeds, each with variance 1: ten degrees of freedom, t(95%, 10) = 2.228
    groups = [[at - 1.0, float(at), at + 1.0] for at in range(5)]
    result = difference(groups[4], groups[0], groups)
    assert (result.value, result.margin) == (4.0, pytest.approx(2.2281389 * (1 / 3 + 1 / 3) ** 0.5))
    assert result.outcome == "confirmed"
