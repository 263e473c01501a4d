"""Names, the paper's numbers, the rule that shrinks them, and the choice between the two."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from torch import nn

from experiments.base.cluster import Cluster
from experiments.registry import experiments, find, resolve
from suite.errors import PlacementError, SettingError
from suite.pipeline.model.layers import count_parameters
from suite.pipeline.planning.devices import GIB
from tests.experiments.planning.works import LAPTOP
from tests.marks import slow_but_for

FARM = Cluster(devices=128, bytes_per_device=16 * GIB, kind="gpu")
PRINTED = {
    "t12_400m": (6, 8192, 16, 1),
    "t24_1_3b_wide": (12, 16384, 32, 2),
    "t48_1_3b_deep": (24, 8192, 16, 4),
    "t64_3b": (32, 16384, 32, 8),
    "t128_6b": (64, 16384, 32, 16),
}
"""L, H, A, K as printed in section 5; for 400M no K is printed."""
NAMES = [*PRINTED]


def test_there_are_five_runs_of_section_5_one_of_use_three_of_table_1_and_two_on_images() -> None:
    language_models = ["transformer_13", "transformer_103", "transformer_1663"]
    assert list(experiments()) == [
        *NAMES, "romance_strings", *language_models, "amoebanet_fashion", "amoebanet_imagenet"
    ]  # fmt: skip


def test_the_run_for_two_cores_is_not_shrunk() -> None:
    chosen, line = resolve("romance_strings", "auto", LAPTOP)
    assert line == ""
    assert chosen == find("romance_strings")
    assert all(find(name).name == name for name in experiments())


@pytest.mark.slow
def test_a_run_whose_plan_may_choose_k_and_r_has_the_papers_sizes_where_some_fit() -> None:
    small, two = "train.batch_tokens=8192", Cluster(2, 80 * GIB, "gpu")
    for settings, pipeline_auto, scale in (
        (small, True, "paper"), (f"{small} pipeline.replicas=8", True, "laptop"), (small, False, "laptop")
    ):  # fmt: skip
        assert resolve("t12_400m", "auto", two, settings, pipeline_auto)[0].scale == scale
    with pytest.raises(PlacementError, match="paper of t12_400m does not fit with any K, R and M: "):
        resolve("t12_400m", "paper", Cluster(1, GIB, "gpu"), small, True)


@pytest.mark.parametrize("name", NAMES)
def test_paper_scale_has_the_papers_numbers(name: str) -> None:
    run = find(name)
    numbers = (run.model.blocks_per_stack, run.model.feed_forward, run.model.heads, run.pipeline.stages)
    assert numbers == PRINTED[name]
    assert (run.model.width, run.text.vocabulary, run.train.batch_tokens) == (1024, 64_000, 4_000_000)
    assert (run.text.temperature, run.model.dropout, run.model.label_smoothing) == (5.0, 0.1, 0.1)
    assert run.optimizer.name == "adafactor"
    assert run.optimizer.learning_rate * run.optimizer.warmup_steps**0.5 == pytest.approx(3.0)
    assert run.pipeline.micro_batches >= 4 * run.pipeline.stages
    assert run.shrunk == ()


@pytest.mark.parametrize("name", NAMES)
def test_laptop_keeps_depth_and_lists_every_change(name: str) -> None:
    paper = find(name)
    small, line = resolve(name, "laptop", LAPTOP)
    assert small.scale == "laptop"
    assert len(small.build()[0]) == len(paper.build()[0])
    assert small.pipeline.stages == min(paper.pipeline.stages, 2)
    assert small.pipeline.replicas == 1
    assert small.shrunk == tuple(small.changes_from(paper))
    assert "model.width 1024 -> 64" in small.shrunk
    assert "model.width 1024 -> 64" in line
    assert "\n" not in line
    assert small.with_settings("") == small  # the rule's result agrees with itself
    assert count_parameters(small.build()[0]) < 20e6


@pytest.mark.parametrize("name", [*NAMES, "transformer_13", "transformer_103"])
def test_blocks_of_shrunk_text_runs_move_by_depth_and_the_papers_do_not(name: str) -> None:
    assert find(name).model.residual_scale is None
    laptop, _ = resolve(name, "laptop", LAPTOP)
    scale = 1 if name in NAMES else 2
    assert laptop.model.residual_scale == scale
    assert f"model.residual_scale none -> {scale}" in laptop.shrunk
    factors = laptop.update_factors("1.attention.outward.weight", nn.Parameter(torch.ones(1)))
    assert factors == pytest.approx(
        (scale / (2 * laptop.model.blocks_per_stack), 2 * laptop.model.blocks_per_stack / scale)
    )
    assert name not in NAMES or resolve(name, "slice", LAPTOP)[0].model.residual_scale is None
    rates = laptop.optimizer
    assert rates.lr_decay == ("linear" if name in NAMES else "cosine")
    assert rates.warmup_steps + rates.lr_decay_steps == laptop.train.steps


def test_one_rule_keeps_the_runs_proportions() -> None:
    small = [resolve(name, "laptop", LAPTOP)[0].model for name in NAMES]
    paper = [find(name).model for name in NAMES]
    assert {a.feed_forward / b.feed_forward for a, b in zip(paper, small, strict=True)} == {64}
    assert {a.heads / b.heads for a, b in zip(paper, small, strict=True)} == {16}
    assert {shape.head_width for shape in small} == {32}
    wide, deep = (count_parameters(find(name).build()[0]) for name in ("t24_1_3b_wide", "t48_1_3b_deep"))
    assert wide == pytest.approx(deep, rel=1e-3)
    wide, deep = (count_parameters(resolve(name, "laptop", LAPTOP)[0].build()[0]) for name in NAMES[1:3])
    assert wide == pytest.approx(deep, rel=1e-2)


@pytest.mark.parametrize("name", NAMES)
def test_slice_keeps_widths_vocabulary_update_and_precision(name: str) -> None:
    paper = find(name)
    small, line = resolve(name, "slice", LAPTOP)
    assert small.scale == "slice"
    assert small.model == replace(paper.model, blocks_per_stack=4)
    assert small.text == paper.text.model_copy(update={"corpus": "catalogues"})
    update = (small.optimizer.name, small.optimizer.precision, small.optimizer.max_grad_norm)
    assert update == ("adafactor", "bf16", None)
    assert small.pipeline.stages == min(paper.pipeline.stages, 2)
    assert f"model.blocks_per_stack {paper.model.blocks_per_stack} -> 4" in line
    assert small.shrunk == tuple(small.changes_from(paper))
    assert count_parameters(small.build()[0]) < 510e6


@pytest.mark.parametrize("name", ["romance_strings", "amoebanet_imagenet", "transformer_13"])
def test_only_translation_runs_of_the_paper_have_a_slice(name: str) -> None:
    with pytest.raises(SettingError, match=f"{name} has no scale slice, which is for the paper's translation runs"):
        resolve(name, "slice", LAPTOP)


@pytest.mark.parametrize(
    ("scale", "devices", "kind", "stages"),
    [
        *[("laptop", cores, "cpu", stages) for cores, stages in ((1, 2), (2, 2), (4, 4), (64, 16))],
        *[("laptop", 1, "gpu", 1), ("slice", 64, "cpu", 2), ("slice", 8, "gpu", 2)],
    ],
)
def test_laptop_uses_the_devices_but_stays_a_pipeline_on_cores_and_slice_has_two_stages(scale, devices, kind, stages):
    assert resolve("t128_6b", scale, Cluster(devices, 80 * GIB, kind))[0].pipeline.stages == stages


@pytest.mark.parametrize(
    ("settings", "shape"),
    [
        ("", (1, 2, 1)),
        ("pipeline.stages=2", (2, 1, 2)),
        ("pipeline.stages=4", (4, 1, 2)),
        ("pipeline.stages=2 pipeline.micro_batches=8", (2, 1, 8)),
        ("pipeline.stages=2 pipeline.replicas=2", (2, 2, 1)),
    ],
)
def test_the_replicas_of_a_scale_are_those_that_the_devices_hold_at_the_given_stages(settings, shape) -> None:
    pipeline = resolve("transformer_13", "laptop", Cluster(2, 8 * GIB, "cpu"), settings)[0].pipeline
    assert (pipeline.stages, pipeline.replicas, pipeline.micro_batches) == shape


def test_auto_takes_settings_that_only_the_small_scale_allows() -> None:
    small, line = resolve("t128_6b", "auto", LAPTOP, "pipeline.layers_per_cell=65,66")
    assert small.pipeline.layers_per_cell == (65, 66)
    assert "because at scale paper pipeline.layers_per_cell has 2 cells" in line
    with pytest.raises(SettingError, match="has 2 cells"):
        resolve("t128_6b", "paper", FARM, "pipeline.layers_per_cell=65,66")
    with pytest.raises(SettingError, match="no_such"):
        resolve("t128_6b", "auto", LAPTOP, "train.no_such=1")


def test_an_unknown_name_is_refused_with_the_closest() -> None:
    with pytest.raises(SettingError, match="there is no experiment t128_b6; did you mean t128_6b"):
        resolve("t128_b6", "auto", LAPTOP)


@pytest.mark.parametrize("name", slow_but_for(NAMES[:1], NAMES[:2]))
def test_auto_takes_paper_where_it_fits_and_laptop_elsewhere(name: str) -> None:
    large, line = resolve(name, "auto", FARM)
    assert large == find(name)
    assert "nothing shrunk" in line
    for cluster in (Cluster(7, 16 * GIB, "gpu"), Cluster(128, 4 * GIB, "gpu")):
        small, line = resolve(name, "auto", cluster)
        assert small.scale == "laptop"
        assert f"there are {cluster}" in line


def test_paper_without_devices_is_refused_with_numbers() -> None:
    with pytest.raises(PlacementError) as fault:
        resolve("t12_400m", "paper", LAPTOP)
    message = str(fault.value)
    assert "needs 8 GPUs (K = 1 stages x R = 8 replicas) with " in message
    assert "there are 2 CPU cores with 12.0 GiB each" in message
    assert "--scale laptop" in message


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "cluster", "expected"),
    [
        ("t24_1_3b_wide", Cluster(5, 80 * GIB, "gpu"), "pipeline.stages=1 pipeline.replicas=5"),
        ("t64_3b", Cluster(1024, 11 * GIB, "gpu"), "pipeline.schedule=1f1b"),
        ("t64_3b", Cluster(1024, 9 * GIB, "gpu"), "pipeline.micro_batches=1024 pipeline.schedule=1f1b"),
    ],
)
def test_the_advice_of_a_refusal_works(name: str, cluster: Cluster, expected: str) -> None:
    with pytest.raises(PlacementError, match=f"there are {cluster}") as fault:
        resolve(name, "paper", cluster)
    advice = str(fault.value).split('"')[1]
    assert advice.startswith(expected)
    assert resolve(name, "paper", cluster, advice)[0].scale == "paper"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "settings"), [("t128_6b", ""), ("t12_400m", "pipeline.micro_batches=100")])
def test_the_devices_that_a_refusal_names_are_enough(name: str, settings: str) -> None:
    _, line = resolve(name, "auto", LAPTOP, settings)
    count, size = re.search(r"needs (\d+) GPUs .*? with (\d+\.\d) GiB each", line).groups()  # type: ignore[union-attr]
    enough = Cluster(int(count), int(float(size) * GIB), "gpu")
    assert resolve(name, "auto", enough, settings)[0].scale == "paper"
    fewer = Cluster(enough.devices - 1, enough.bytes_per_device, "gpu")
    assert resolve(name, "auto", fewer, settings)[0].scale == "laptop"


def test_settings_apply_before_the_choice_and_after_the_shrinking() -> None:
    quarter = Cluster(2, 16 * GIB, "gpu")
    large, _ = resolve("t12_400m", "auto", quarter, "pipeline.replicas=2 pipeline.micro_batches=1024")
    assert (large.scale, large.pipeline.replicas) == ("paper", 2)
    small, line = resolve("t24_1_3b_wide", "laptop", LAPTOP, "train.steps=7 model.width=32")
    assert (small.train.steps, small.model.width) == (7, 32)
    assert "train.steps 100000 -> 7" in line
    assert "train.steps 100000 -> 7" in small.shrunk
