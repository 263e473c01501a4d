"""Members of a sweep differ only in what is compared, at every scale."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from experiments.registry import find
from experiments.sweeps.batch_size import EQUAL_STEPS, EQUAL_TOKENS, label
from experiments.sweeps.members.scales import MODELS, RULES
from experiments.sweeps.multilingual import baseline, model
from experiments.sweeps.registry import SWEEPS, find_scale, find_sweep
from suite.errors import SettingError
from suite.pipeline.model.layers import count_parameters
from tests.experiments.stored import stored
from tests.experiments.sweeps.finished import LAPTOP

SMALL = ["laptop", "tiny"]
TEXT = [
    (name, scale)
    for name, sweep in SWEEPS.items()
    if name not in ("low_resource", "romance", "trainability", "transfer")
    for scale in sweep.scales
]


def members(name, scale):
    return SWEEPS[name].members(scale, LAPTOP, Path("runs"))


def by_label(name, scale):
    return {member.label: member.experiment for member in members(name, scale)}


@pytest.mark.parametrize(("name", "scale"), [(name, scale) for name, each in SWEEPS.items() for scale in each.scales])
def test_every_member_is_the_run_that_its_record_says(name, scale):
    for member in {member.experiment: member for member in members(name, scale)}.values():
        assert stored(member.experiment) == member.experiment


@pytest.mark.parametrize(("name", "scale"), TEXT)
def test_members_with_one_label_differ_in_their_seed_and_one_folder_holds_one_run(name, scale):
    by_folder, groups = {}, {}
    for member in members(name, scale):
        assert by_folder.setdefault(member.folder, member.experiment) == member.experiment
        if member.scoring is not None:
            groups.setdefault(member.label, []).append(member.experiment)
    for runs in groups.values():
        assert [run.train.seed for run in runs] == list(range(RULES[scale].seeds))
        train = runs[0].train
        assert {run.model_copy(update={"train": train}).to_toml() for run in runs} == {runs[0].to_toml()}


@pytest.mark.parametrize("scale", RULES)
def test_the_models_share_text_optimizer_and_steps_and_the_wide_one_has_half_the_depth_of_the_deep(scale):
    runs = by_label("depth_width", scale)
    models = [runs[name] for name in RULES[scale].models or MODELS]
    for run in models:
        assert (run.text, run.optimizer, run.train) == (models[0].text, models[0].optimizer, models[0].train)
        assert run.scale == scale.removesuffix("_long")
    small, wide, deep, *larger = (run.model for run in models)
    assert (wide.feed_forward, wide.heads) == (2 * deep.feed_forward, 2 * deep.heads)
    assert deep.blocks_per_stack == 2 * wide.blocks_per_stack
    assert small.blocks_per_stack <= wide.blocks_per_stack
    assert all(wide.blocks_per_stack < model.blocks_per_stack for model in larger)
    sizes = [count_parameters(run.build()[0]) for run in models]
    assert sizes[2] == pytest.approx(sizes[1], rel=0.02)
    assert sizes[0] < min(sizes[1:3])
    assert max(sizes[1:3]) < min(sizes[3:], default=math.inf)
    assert sizes[3:] == sorted(sizes[3:])


@pytest.mark.parametrize("scale", SMALL)
def test_a_baseline_is_the_smallest_model_on_one_language(scale):
    many = model("t12_400m", scale, LAPTOP, 0)
    for language in RULES[scale].baselines:
        assert language in many.text.corpus_languages
        own = [limit for limit in many.text.train_pairs if limit.startswith(language)]
        alone = baseline(language, scale, LAPTOP, 0)
        assert alone.text.languages == (language,)
        assert alone.text.train_pairs == (tuple(own) or None)
        text = {"languages": None, "train_pairs": many.text.train_pairs}
        assert not alone.model_copy(update={"text": alone.text.model_copy(update=text)}).changes_from(many)


@pytest.mark.parametrize("scale", SWEEPS["batch_size"].scales)
def test_batches_keep_the_papers_ratios_at_equal_steps_and_at_equal_tokens(scale):
    runs = by_label("batch_size", scale)
    for kind in (EQUAL_STEPS, EQUAL_TOKENS):
        small, middle, large = (runs[label(share, kind)].train for share in RULES[scale].batches)
        assert small.batch_tokens / middle.batch_tokens == pytest.approx(0.26, rel=0.02)
        assert large.batch_tokens == 4 * middle.batch_tokens
        assert {train.patience for train in (small, middle, large)} == {None}
        if kind == EQUAL_STEPS:
            assert small.steps == middle.steps == large.steps
        else:
            for one in (small, large):
                assert one.steps * one.batch_tokens == pytest.approx(middle.steps * middle.batch_tokens, rel=0.05)
    folders = [member.folder for member in members("batch_size", scale)]
    assert len(set(folders)) == 5 * RULES[scale].seeds  # the middle one is one run


def test_sweeps_share_their_common_runs():
    depth, capacity, bilingual, temperature = (
        {member.folder for member in members(name, "laptop")}
        for name in ("depth_width", "capacity", "bilingual", "temperature")
    )
    smallest = {f"depth_width-laptop/t12_400m-{seed}" for seed in range(RULES["laptop"].seeds)}
    assert capacity < depth
    assert depth & bilingual == depth & temperature == smallest


def test_temperature_members_differ_only_in_the_temperature():
    runs = {name: run for name, run in by_label("temperature", "laptop").items() if "bilingual" not in name}
    assert sorted(run.text.temperature for run in runs.values()) == [1.0, 5.0, 100.0]
    base = runs["t12_400m"]
    for run in runs.values():
        assert run.changes_from(base) in ([], [f"text.temperature 5 -> {run.text.temperature:g}"])


def test_the_bilingual_models_beside_romance_strings_have_one_language_on_one_core_and_a_quarter_of_the_steps():
    many, *alone = members("romance", "laptop")
    assert many.experiment == find("romance_strings")
    assert [member.label for member in alone] == [f"bilingual {code}" for code in many.experiment.text.corpus_languages]
    for member in alone:
        code = member.label.removeprefix("bilingual ")
        assert member.experiment.changes_from(many.experiment) == [
            "pipeline.stages 2 -> 1", "pipeline.micro_batches 8 -> 1", "optimizer.lr_decay_steps 4800 -> 1050",
            "train.steps 5000 -> 1250", "train.checkpoint_every 500 -> 250", "train.validate_every 250 -> 125",
            f"text.languages none -> {(code,)}",
        ]  # fmt: skip


def test_pipelines_of_the_paper_stay_pipelines_and_others_run_on_one_core():
    stages = {name: run.pipeline.stages for name, run in by_label("depth_width", "laptop").items()}
    assert {stages[name] for name in MODELS[1:]} == {2}
    assert stages[MODELS[0]] == 1
    assert {run.pipeline.stages for run in by_label("bilingual", "laptop").values()} == {1}


def test_the_long_scale_compares_three_models_on_one_core_each_with_attention_as_wide_as_the_papers():
    runs = by_label("depth_width", "laptop_long")
    assert list(runs) == list(MODELS[:3])
    for name, run in runs.items():
        paper = find(name).model
        assert run.pipeline.stages == 1
        # the paper's ratio of attention width to model width: 1 for the smallest and the deep model, 2 for the wide one
        assert run.model.heads * run.model.head_width / run.model.width == paper.heads * 64 / paper.width
    assert "laptop_long" not in SWEEPS["batch_size"].scales


def test_an_unknown_sweep_or_scale_is_refused_with_the_closest():
    with pytest.raises(SettingError, match="there is no sweep 'depth'"):
        find_sweep("depth")
    assert find_scale(SWEEPS["capacity"], "auto") == "laptop"
    assert find_scale(SWEEPS["transfer"], "auto") == ""
    with pytest.raises(SettingError, match="no scale 'tinny'; did you mean tiny"):
        find_scale(SWEEPS["capacity"], "tinny")
