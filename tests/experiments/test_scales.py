"""Names, the paper's numbers, the rule that shrinks them, and the choice between the two."""

from __future__ import annotations

import pytest

from experiments.cluster import GIB, Cluster
from experiments.footprint import bytes_needed, bytes_per_parameter, layer_bytes
from experiments.registry import experiments, find, resolve
from experiments.scales import changes
from suite.errors import PlacementError, SettingError
from suite.pipeline.layers import count_parameters
from suite.settings import OptimizerSettings

LAPTOP = Cluster(devices=2, bytes_per_device=12 * GIB, kind="cpu")
FARM = Cluster(devices=128, bytes_per_device=16 * GIB, kind="gpu")
NAMES = ["t12_400m", "t24_1_3b_wide", "t48_1_3b_deep", "t64_3b", "t128_6b"]


def test_the_five_runs_of_section_5_are_there() -> None:
    assert list(experiments()) == NAMES
    assert all(find(name).name == name for name in NAMES)


# L, H, A, K as printed in section 5; for 400M no K is printed.
@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        ("t12_400m", (6, 8192, 16, 1)),
        ("t24_1_3b_wide", (12, 16384, 32, 2)),
        ("t48_1_3b_deep", (24, 8192, 16, 4)),
        ("t64_3b", (32, 16384, 32, 8)),
        ("t128_6b", (64, 16384, 32, 16)),
    ],
)
def test_paper_scale_has_the_papers_numbers(name: str, numbers: tuple[int, int, int, int]) -> None:
    run = find(name)
    assert (run.model.layers, run.model.feed_forward, run.model.heads, run.pipeline.stages) == numbers
    assert (run.model.width, run.text.vocabulary, run.train.batch_tokens) == (1024, 64_000, 4_000_000)
    assert (run.text.temperature, run.model.dropout, run.model.label_smoothing) == (5.0, 0.1, 0.1)
    assert run.optimizer.name == "adafactor"
    assert run.optimizer.learning_rate * run.optimizer.warmup_steps**0.5 == pytest.approx(3.0)
    assert run.pipeline.micro_batches >= 4 * run.pipeline.stages
    assert run.shrunk == ()


@pytest.mark.parametrize("name", NAMES)
def test_laptop_keeps_depth_and_says_every_change(name: str) -> None:
    paper = find(name)
    small, line = resolve(name, "laptop", LAPTOP)
    assert small.scale == "laptop"
    assert len(small.build()[0]) == len(paper.build()[0])
    assert small.pipeline.stages == min(paper.pipeline.stages, 2)
    assert small.pipeline.replicas == 1
    assert small.shrunk == tuple(changes(paper, small))
    assert "model.width 1024 -> 64" in small.shrunk
    assert "model.width 1024 -> 64" in line
    assert "\n" not in line
    assert small.with_settings("") == small  # the rule's result agrees with itself
    assert count_parameters(small.build()[0]) < 20e6


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


def test_laptop_uses_the_cores_there_are_but_stays_a_pipeline() -> None:
    for cores, stages in ((1, 2), (2, 2), (4, 4), (64, 16)):
        small, _ = resolve("t128_6b", "laptop", Cluster(cores, GIB, "cpu"))
        assert small.pipeline.stages == stages


def test_one_gpu_gets_one_stage() -> None:
    small, _ = resolve("t128_6b", "auto", Cluster(1, 80 * GIB, "gpu"))
    assert (small.scale, small.pipeline.stages) == ("laptop", 1)


def test_what_a_person_sets_is_what_is_said_and_recorded() -> None:
    small, line = resolve("t128_6b", "auto", LAPTOP, "train.steps=7 text.corpus=django")
    assert "train.steps 100000 -> 7" in line
    assert "train.steps 100000 -> 7" in small.shrunk
    assert any(change.endswith("-> django") for change in small.shrunk)


def test_auto_takes_settings_that_only_the_small_scale_allows() -> None:
    small, line = resolve("t128_6b", "auto", LAPTOP, "pipeline.cells=65,66")
    assert small.pipeline.cells == (65, 66)
    assert "as at scale paper pipeline.cells names 2 cells" in line
    with pytest.raises(SettingError, match="names 2 cells"):
        resolve("t128_6b", "paper", FARM, "pipeline.cells=65,66")
    with pytest.raises(SettingError, match="no_such"):
        resolve("t128_6b", "auto", LAPTOP, "train.no_such=1")


def test_an_unknown_name_gets_the_nearest() -> None:
    with pytest.raises(SettingError, match="no experiment is called t128_b6; did you mean t128_6b"):
        resolve("t128_b6", "auto", LAPTOP)


@pytest.mark.parametrize("name", NAMES)
def test_auto_takes_paper_where_it_fits_and_laptop_elsewhere(name: str) -> None:
    large, line = resolve(name, "auto", FARM)
    assert large == find(name)
    assert "nothing shrunk" in line
    for cluster in (LAPTOP, Cluster(0, 0, "gpu"), Cluster(7, 16 * GIB, "gpu"), Cluster(128, 4 * GIB, "gpu")):
        small, line = resolve(name, "auto", cluster)
        assert small.scale == "laptop"
        assert f"there are {cluster}" in line


def test_paper_without_devices_is_refused_with_numbers() -> None:
    with pytest.raises(PlacementError) as fault:
        resolve("t128_6b", "paper", LAPTOP)
    message = str(fault.value)
    assert "needs 128 GPUs (K = 16 stages x R = 8 replicas) with " in message
    assert "there are 2 CPU cores with 12.0 GiB each" in message
    assert "SCALE=laptop" in message


def test_the_advice_of_a_refusal_is_good() -> None:
    for cluster, expected in (
        (Cluster(40, 80 * GIB, "gpu"), "pipeline.replicas=2 pipeline.micro_batches=1024"),
        (Cluster(40, 16 * GIB, "gpu"), "pipeline.replicas=2 train.batch_tokens=1000000"),
        (Cluster(256, 10 * GIB, "gpu"), "pipeline.stages="),
    ):
        with pytest.raises(PlacementError, match=f"there are {cluster}") as fault:
            resolve("t128_6b", "paper", cluster)
        advice = str(fault.value).split('"')[1]
        assert advice.startswith(expected)
        assert resolve("t128_6b", "paper", cluster, advice)[0].scale == "paper"


def test_settings_count_before_the_choice_and_after_the_shrinking() -> None:
    quarter = Cluster(32, 80 * GIB, "gpu")
    large, _ = resolve("t128_6b", "auto", quarter, "pipeline.replicas=2 pipeline.micro_batches=1024")
    assert (large.scale, large.pipeline.replicas) == ("paper", 2)
    small, _ = resolve("t128_6b", "auto", LAPTOP, "train.steps=7 model.width=32")
    assert (small.train.steps, small.model.width) == (7, 32)


def test_bytes_of_stages_follow_parameters_micro_batches_and_remat() -> None:
    run = resolve("t48_1_3b_deep", "laptop", LAPTOP)[0]
    plain = bytes_needed(run)
    assert len(plain) == 2
    assert sum(plain) > 16 * count_parameters(run.build()[0])
    kept = bytes_needed(run.with_settings("pipeline.remat=never"))
    assert all(more > less for more, less in zip(kept, plain, strict=True))
    fine = bytes_needed(run.with_settings("pipeline.micro_batches=16"))
    assert all(less < more for less, more in zip(fine, plain, strict=True))


def test_kept_activations_of_a_feed_forward_layer_are_those_counted_by_hand() -> None:
    run = resolve("t12_400m", "laptop", LAPTOP)[0].with_settings("model.dropout=0.1")
    encoder = layer_bytes(run)[1]
    rows = -(-run.train.batch_tokens // (run.pipeline.micro_batches * run.text.max_tokens))
    tokens, width, hidden, attention = rows * run.text.max_tokens, 64, 128, 32
    # two LayerNorms' inputs and results and two statistics each; q, k, v; the attention's result; hidden; two dropout
    # masks
    floats = 4 * width + 4 + 3 * attention + attention + hidden + 2 * width
    assert encoder.activations == tokens * 4 * floats
    assert encoder.boundary == tokens * (4 * width + 1 + 8)


@pytest.mark.parametrize(
    ("name", "precision", "replicas", "each"),
    [("adamw", "fp32", 1, 16), ("adamw", "fp32", 4, 12), ("adamw", "bf16", 4, 14), ("adafactor", "bf16", 8, 10)],
)
def test_bytes_of_a_parameter(name: str, precision: str, replicas: int, each: float) -> None:
    assert bytes_per_parameter(OptimizerSettings(name=name, precision=precision), replicas) == each
