"""The sweep on a low-resource language: what is equal between its runs, tuning on validation alone, its verdicts."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from experiments.sweeps.low_resource import PAPER, RULES, SWEEP, Case, alone, cases, low_resource_members
from experiments.sweeps.members.tuning import SETTINGS
from experiments.sweeps.report.figures import loss_curves
from experiments.sweeps.report.results import read_results
from tests.experiments.sweeps.finished import LAPTOP, write_record, write_scores

CASE = Case("laptop", 500)
BEST = SETTINGS[1]


def train(runs: Path, member, best_nll: float, steps: int = 200):
    """Leaves what a trained member leaves."""
    lines = []
    for step in range(40, steps + 1, 40):
        nll = best_nll + abs(step - 120) / 100
        lines.append({"step": step, "train/tokens": 1000 * step, "train/loss": 4.0})
        lines.append({"step": step, "valid/nll": nll, "valid/nll/gl": nll})
    stopped = {"stopped_early": True, "validations_without_improvement": 3}
    best = {"best_step": 120, "best_valid_nll": best_nll, "valid_nll": best_nll}
    write_record(runs / member.folder, lines, steps=steps, tokens=1000 * steps, **stopped, **best)


def score(runs: Path, member, right: float, nll: float = 4.0):
    """Leaves what scoring leaves."""
    chance, pairs = random.Random(member.folder), 500 if "-500-" in member.folder else 2000
    directions = {}
    for name in ("en-gl", "gl-en"):
        chrf = 100 * right + chance.random()
        directions[name] = {"train_pairs": pairs, "nll": nll, "bleu": chrf / 2, "chrf": chrf}
    write_scores(runs / member.folder, directions, right, step=120, max_pairs=300, thirds={"gl": "middle"})


def tuning(case):
    return alone(case, LAPTOP).tuning()


def tune(runs: Path):
    for case in cases("laptop"):
        for setting, member in zip(SETTINGS, tuning(case), strict=True):
            train(runs, member, 4.0 if setting == BEST else 9.0)


def members(runs: Path):
    return low_resource_members("laptop", LAPTOP, runs)


@pytest.mark.parametrize("scale", RULES)
def test_a_folder_holds_one_run_and_a_label_one_setting_with_every_seed(scale, tmp_path):
    seeds: dict[str, list[int]] = {}
    found = low_resource_members(scale, LAPTOP, tmp_path)
    assert len({member.folder for member in found}) == len(found)
    for member in found:
        if member.scoring is not None:
            seeds.setdefault(member.label, []).append(member.experiment.train.seed)
    rule = RULES[scale]
    models = 1 + bool(rule.unrelated)  # not tuned
    assert len(seeds) == models * len(rule.counts)
    assert all(found == list(range(RULES[scale].seeds)) for found in seeds.values())


def test_runs_with_relatives_and_with_unrelated_languages_differ_in_the_languages_alone(tmp_path):
    found = {member.label: member.experiment for member in members(tmp_path) if member.folder.endswith("-0")}
    _, related, unrelated = CASE.labels
    one, other = found[related], found[unrelated]
    assert other.changes_from(one) == [
        "text.languages ('es', 'gl', 'pt_BR') -> ('fi', 'gl', 'hu')",
        "text.train_pairs ('gl:500', 'es:15000', 'pt_BR:15000') -> ('gl:500', 'fi:15000', 'hu:15000')",
    ]
    bilingual = tuning(CASE)[0].experiment
    assert SETTINGS[0].dropout == one.model.dropout
    assert one.changes_from(bilingual) == [
        "text.languages ('gl',) -> ('es', 'gl', 'pt_BR')",
        "text.train_pairs ('gl:500',) -> ('gl:500', 'es:15000', 'pt_BR:15000')",
    ]


def test_bilingual_runs_follow_tuning_with_the_setting_that_validated_best(tmp_path):
    before = {member.label for member in members(tmp_path)}
    assert not any(label == CASE.labels[0] for label in before)
    tune(tmp_path)
    assert alone(CASE, LAPTOP).chosen(tmp_path) == BEST
    chosen = [member for member in members(tmp_path) if member.label == CASE.labels[0]]
    assert [member.experiment.train.seed for member in chosen] == [0, 1, 2]
    assert {member.experiment.model.dropout for member in chosen} == {0.3}
    assert chosen[0].folder == tuning(CASE)[1].folder  # trained already, now it is scored


def test_tuning_reads_no_scores_and_waits_for_all_settings(tmp_path):
    tune(tmp_path)
    for setting, member in zip(SETTINGS, tuning(CASE), strict=True):
        assert member.scoring is None
        score(tmp_path, member, 0.9 if setting != BEST else 0.1)  # test scores would choose another
    assert alone(CASE, LAPTOP).chosen(tmp_path) == BEST
    (tmp_path / tuning(CASE)[3].folder / "record.json").unlink()
    assert alone(CASE, LAPTOP).chosen(tmp_path) is None


def finish(runs: Path, right, nll):
    """Finishes all runs; ``right`` and ``nll`` are of the models alone, related, unrelated."""
    tune(runs)
    kinds = {label: at for case in cases("laptop") for at, label in enumerate(case.labels)}
    for member in members(runs):
        if (at := kinds.get(member.label)) is not None:
            here = nll[at] + 0.01 * member.experiment.train.seed
            train(runs, member, here + 0.5)  # validation differs from test
            score(runs, member, right[at], here)


def test_losses_of_bilingual_models_alone_are_dashed(tmp_path):
    finish(tmp_path, (0.3, 0.8, 0.5), (4.0, 3.0, 3.5))
    (picture,) = loss_curves(read_results("laptop", members(tmp_path), tmp_path))
    styles = {line.get_label(): line.get_linestyle() for line in picture.figure.axes[0].lines}
    for case in cases("laptop"):
        assert [styles[label] for label in case.labels] == ["--", "-", "-"]


def tables(runs: Path, name: str):
    """Returns the tables of the report that have a name."""
    sections = SWEEP.report("laptop", LAPTOP, runs).page.sections
    return [table for section in sections for table in section.tables if table.name == name]


def outcomes(runs: Path):
    (table,) = tables(runs, "findings")
    return [row[2] for row in table.rows], table


@pytest.mark.parametrize(
    ("right", "nll", "expected"),
    [
        ((0.3, 0.8, 0.5), (4.0, 3.0, 3.5), ["confirmed"] * 4),
        ((0.8, 0.3, 0.5), (3.0, 3.0, 3.6), ["contradicted", "undecided"] * 2),  # only chrF is worse
        ((0.3, 0.8, 0.5), (3.0, 3.5, 3.6), ["undecided", "confirmed"] * 2),  # only NLL is worse
    ],
)
def test_nll_and_chrf_over_seeds_and_test_pairs_decide(tmp_path, right, nll, expected):
    finish(tmp_path, right, nll)
    found, table = outcomes(tmp_path)
    assert found == expected
    assert [row[1] for row in table.rows] == [PAPER, "the paper does not test this"] * 2
    if found[0] == "confirmed":
        where, nats, _, seeds = table.rows[0][3:]
        assert (where, seeds) == ("gl", "3 of 3")
        assert nats.startswith("+1.00 ± 0.0")
        assert table.notes[0].startswith("Findings tested: 4.")


def test_the_tuning_table_tells_a_choice_at_the_edge(tmp_path):
    tune(tmp_path)

    def choices():
        (table,) = tables(tmp_path, "tuning")
        return [row[-1] for row in table.rows if row[0] == CASE.title]

    assert choices() == ["", "chosen", "", "", ""]
    lowest = tuning(CASE)[3]
    train(tmp_path, lowest, 3.0, steps=lowest.experiment.train.steps)
    path = tmp_path / lowest.folder / "record.json"
    assert choices() == ["", "", "", "chosen, lowest rate", ""]
    path.write_text(json.dumps(json.loads(path.read_text()) | {"best_step": lowest.experiment.train.steps}))
    assert choices() == ["", "", "", "chosen, lowest rate, last step", ""]


def test_a_tuning_run_without_a_finite_validation_is_not_chosen(tmp_path):
    tune(tmp_path)
    for setting, member in zip(SETTINGS, tuning(CASE), strict=True):
        path = tmp_path / member.folder / "record.json"
        if setting == BEST:
            without_validation(path)
    chosen = alone(CASE, LAPTOP).chosen(tmp_path)
    assert chosen not in (None, BEST)
    for member in tuning(CASE):
        without_validation(tmp_path / member.folder / "record.json")
    assert alone(CASE, LAPTOP).chosen(tmp_path) is None


def without_validation(path: Path) -> None:
    """A run without a finite validation has no such value in its record."""
    best = ("best_valid_nll", "best_step")
    path.write_text(json.dumps({key: value for key, value in json.loads(path.read_text()).items() if key not in best}))


def test_each_case_has_its_models_the_copied_source_and_both_directions(tmp_path):
    finish(tmp_path, (0.3, 0.8, 0.5), (4.0, 3.0, 3.5))
    path = tmp_path / "low_resource-laptop/gl-500-with-es-pt_BR-0/scores.json"
    scores = json.loads(path.read_text())
    scores["directions"]["gl-en"]["nll"] = 9.01
    path.write_text(json.dumps(scores))
    (table,) = tables(tmp_path, "scores")
    rows = {row[1]: dict(zip(table.headings, row, strict=True)) for row in table.rows if row[0] == CASE.title}
    assert [*rows] == [*CASE.models, "copying the source"]
    assert rows["alone, tuned"]["test NLL"] == "4.01 ± 0.025"
    related = rows["with es, pt_BR"]
    assert related["test NLL, out of English"].startswith("3.01 ±")
    assert related["test NLL, into English"].startswith("5.013 ±")  # the mean of 9.01, 3.01 and 3.02
    copied = rows["copying the source"]
    assert [copied[name] for name in ("test NLL", "chrF", "BLEU", "chrF, no placeholders")] == [None, "26", "14", "25"]


def test_findings_without_runs_say_so_and_the_report_names_those_that_are_missing(tmp_path):
    tune(tmp_path)
    assert set(outcomes(tmp_path)[0]) == {"no runs"}
    assert "gl-500-with-es-pt_BR-0" in SWEEP.report("laptop", LAPTOP, tmp_path).page.markdown()


def test_only_at_scale_tiny_the_report_says_that_it_is_a_smoke_test(tmp_path):
    assert "smoke test" not in SWEEP.report("laptop", LAPTOP, tmp_path).page.markdown()
    page = SWEEP.report("tiny", LAPTOP, tmp_path).page
    assert "> **A smoke test: at scale tiny" in page.markdown()
    assert 'role="alert">A smoke test: at scale tiny' in page.html()
