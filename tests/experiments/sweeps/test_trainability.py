"""The trainability sweep: how its members differ, and its report of hand-made records."""

import json
import math
from dataclasses import replace

import pytest

from experiments.sweeps.trainability import SEEDS, SWEEP, Case, cases
from tests.experiments.sweeps.finished import LAPTOP

STARTS = {"small steps": (True, 1.0), "scaled start": (True, None), "plain start": (False, None)}
"""Values of ``depth_scaled_init`` and ``residual_scale``."""


@pytest.mark.parametrize("scale", SWEEP.scales)
def test_members_differ_only_in_depth_start_clipping_rate_and_seed(scale, tmp_path):
    members = SWEEP.members(scale, LAPTOP, tmp_path)
    assert len(members) == len({member.folder for member in members}) == sum(cases(scale).values())
    assert len({member.label for member in members}) == len(cases(scale))
    base = members[0].experiment
    for member in members:
        run = member.experiment
        model = replace(
            run.model,
            blocks_per_stack=base.model.blocks_per_stack,
            depth_scaled_init=base.model.depth_scaled_init,
            residual_scale=base.model.residual_scale,
            logit_clip=base.model.logit_clip,
        )
        same = {"name": base.optimizer.name, "learning_rate": base.optimizer.learning_rate}
        optimizer = run.optimizer.model_copy(update=same)
        train = run.train.model_copy(update={"seed": base.train.seed})
        assert run.model_copy(update={"model": model, "optimizer": optimizer, "train": train}) == base
        assert member.priority == run.model.blocks_per_stack
        depth, start = member.label.split(", ")[:2]
        assert depth == f"T({run.model.blocks_per_stack})"
        assert (run.model.depth_scaled_init, run.model.residual_scale) == STARTS[start]
        assert run.model.logit_clip == (None if "not clipped" in member.label else 30.0)
        assert member.folder.endswith(f"-{run.train.seed}")
    assert {run.model.list_length for run in (member.experiment for member in members)} == (
        {"tiny": {5, 7}, "laptop": {15, 35, 67, 131}, "paper": {67, 131}}[scale]  # 131: the paper's 128, and 3
    )


def test_the_paper_s_measures_are_compared_at_both_ends_of_depth_with_both_optimizers():
    found = cases("laptop")
    for start in STARTS:
        for layers in (6, 64):
            assert found[Case(layers, start, "adamw")] == found[Case(layers, start, "adafactor")] == SEEDS
            assert found[Case(layers, start, "adamw", 3.0)] == 1
        assert found[Case(64, start, "adamw", 3.0, clipped=False)] == 1


@pytest.mark.parametrize("scale", SWEEP.scales)
def test_each_optimizer_has_a_rate_of_its_own(scale, tmp_path):
    for member in SWEEP.members(scale, LAPTOP, tmp_path):
        optimizer = member.experiment.optimizer
        own = 3 / 40_000**0.5 if scale == "paper" else {"adamw": 0.01, "adafactor": 0.05}[optimizer.name]
        factor = 3 if "3 x the rate" in member.label else 1
        assert optimizer.learning_rate == pytest.approx(factor * own), member.label
        assert scale != "paper" or optimizer.name == "adafactor"


def write_run(folder, valid, norm, change, depth=6):
    folder.mkdir(parents=True)
    (folder / "record.json").write_text(json.dumps({"valid_nll": valid}))
    lines = [
        {"train/loss": 9 - step / 10, "train/grad_norm": norm, "train/applied": float(step != 3)} for step in range(20)
    ]
    lines.insert(10, {"step": 10, "valid/nll": 7.5})
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    layers = [
        {
            "step": step,
            "norms": [0.1] * (2 * depth + 2) + [norm],
            "kurtosis": [0.5, step] * (depth + 1) + [None],
            "output_rms": [2.0] * (2 * depth + 1) + [8.0, None],
            "change_rms": [9.0] * (depth + 2) + [change] * depth + [None],  # the decoder is before the head
        }
        for step in (1, 10)
    ]
    (folder / "layers.jsonl").write_text("\n".join(map(json.dumps, layers)))


def test_the_report_has_means_over_seeds_and_what_a_step_moves(tmp_path):
    members = [
        member for member in SWEEP.members("laptop", LAPTOP, tmp_path) if member.experiment.model.blocks_per_stack == 6
    ]
    first, second, other = members[0], members[1], members[3]
    assert first.label == second.label != other.label
    write_run(tmp_path / first.folder, 6.25, 0.5, 0.5)
    write_run(tmp_path / second.folder, 6.75, 0.5, 1.0)
    write_run(tmp_path / other.folder, 7.0, None, 0.5)
    (table,) = SWEEP.report("laptop", LAPTOP, tmp_path).tables
    assert [row[:3] for row in table.rows] == [[first.label, 2, 2], [other.label, 1, 1]]
    loss, valid, margin, size, change, middle, largest, sharp = table.rows[0][3:]
    assert math.isclose(loss, 7.55)
    assert valid == 6.5
    assert math.isclose(margin, 12.706 * 0.5 / 2, rel_tol=1e-3)  # t of one degree of freedom, 0.354 / sqrt(2)
    assert size == 8.0 / 2  # of the last decoder layer, relative to the embedding
    assert change == pytest.approx(6 * 1.0 / 2)  # of six decoder layers
    assert (middle, largest, sharp) == (0.5, 0.5, 10)
    assert table.rows[1][5] is None
    assert table.rows[1][8:10] == [None, None]  # no norm was finite
    page = SWEEP.report("laptop", LAPTOP, tmp_path).page
    assert pictures_of(page) == 4
    assert f"Not finished: {sum(cases('laptop').values()) - 3} runs" in page.markdown()


def pictures_of(page):
    return sum(len(section.pictures) for section in page.sections)


def test_the_page_has_figures_of_the_optimizer_of_its_scale(tmp_path):
    member = SWEEP.members("paper", LAPTOP, tmp_path)[0]
    write_run(tmp_path / member.folder, 6.25, 0.5, 0.5, member.experiment.model.blocks_per_stack)
    assert pictures_of(SWEEP.report("paper", LAPTOP, tmp_path).page) == 4
