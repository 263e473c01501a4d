"""The runs on images: the paper's numbers, the laptop's, names for the plan, contradicting settings."""

from __future__ import annotations

from typing import Any

import pytest

from experiments.base.cluster import Cluster, parse_cluster
from experiments.images.runs import EPOCH, find_amoebanet
from experiments.planning.problem import estimated_costs
from experiments.planning.request import plan_request
from experiments.registry import find, resolve
from suite.errors import PlanError, SettingError
from suite.pipeline.model.layers import count_parameters
from suite.pipeline.planning.devices import GIB
from tests.experiments.planning.works import LAPTOP


def test_the_papers_run_has_the_papers_numbers() -> None:
    run = find("amoebanet_imagenet")
    assert (run.model.layers, run.model.filters, run.model.classes) == (18, 512, 1000)
    assert (run.images.size, run.pipeline.stages, run.scale) == (480, 4, "paper")
    assert count_parameters(run.build()[0]) == pytest.approx(481e6, rel=2e-3)
    optimizer = run.optimizer
    assert (optimizer.name, optimizer.beta1, optimizer.beta2, optimizer.epsilon) == ("rmsprop", 0.9, 0.9, 1.0)
    assert optimizer.lr_decay_steps / EPOCH == pytest.approx(2.4, rel=1e-3)
    assert optimizer.warmup_steps / EPOCH == pytest.approx(3, rel=1e-3)
    assert run.shrunk == ()


def test_its_laptop_scale_keeps_the_depth_and_lists_every_change() -> None:
    paper = find("amoebanet_imagenet")
    small, line = resolve("amoebanet_imagenet", "laptop", LAPTOP)
    assert small.model.layers == 18
    assert small.pipeline.stages == 2
    assert small.shrunk == tuple(small.changes_from(paper))
    for change in ("model.filters 512 -> 32", "images.source ILSVRC/imagenet-1k -> fashion", "images.size 480 -> 28"):
        assert change in line
    assert small.with_settings("") == small


def test_a_run_for_a_laptop_stays_unchanged() -> None:
    run = find("amoebanet_fashion")
    for scale in ("auto", "laptop"):
        chosen, line = resolve("amoebanet_fashion", scale, LAPTOP)  # type: ignore[arg-type]
        assert chosen == run
        assert line == ""
    changed, _ = resolve("amoebanet_fashion", "auto", LAPTOP, "train.steps=7 images.source=mnist")
    assert (changed.train.steps, changed.data) == (7, "mnist")
    with pytest.raises(SettingError, match="has no scale paper; omit SCALE"):
        resolve("amoebanet_fashion", "paper", LAPTOP)


def test_a_cosine_ends_with_the_run() -> None:
    run = find("amoebanet_fashion")
    assert run.optimizer.warmup_steps + run.optimizer.lr_decay_steps == run.train.steps
    assert run.with_settings("train.steps=90 optimizer.warmup_steps=20").optimizer.lr_decay_steps == 70
    assert run.with_settings("train.steps=90 optimizer.lr_decay_steps=5").optimizer.lr_decay_steps == 5
    assert run.with_settings("optimizer.lr_decay=inverse_sqrt train.steps=90").optimizer.lr_decay_steps == 570
    assert run.with_settings("train.steps=90 optimizer.lr_decay=linear").optimizer.lr_decay_steps == 60


def test_a_decay_that_was_set_stays_in_a_longer_run() -> None:
    begin = find("amoebanet_fashion").with_settings("optimizer.lr_decay_steps=10000")  # of a long cosine
    assert begin.with_settings("train.steps=2000").optimizer.lr_decay_steps == 10_000
    assert begin.with_settings("optimizer.warmup_steps=50").optimizer.lr_decay_steps == 10_000
    assert begin.with_settings("train.steps=90 optimizer.lr_decay=cosine").optimizer.lr_decay_steps == 60
    stable = begin.with_settings("optimizer.lr_decay=wsd optimizer.lr_stable_steps=10 optimizer.lr_decay_steps=20")
    assert stable.with_settings("train.steps=2000").optimizer.lr_stable_steps == 10


def test_wsd_decays_in_the_last_tenth_of_the_run_unless_set() -> None:
    fashion = find("amoebanet_fashion")

    def phases(settings: str, run: Any = fashion) -> tuple[int, int, int]:
        rates = run.with_settings(settings).optimizer
        return rates.warmup_steps, rates.lr_stable_steps, rates.lr_decay_steps

    assert phases("train.steps=90 optimizer.lr_decay=wsd") == (30, 51, 9)
    assert phases("train.steps=90 optimizer.lr_decay=wsd optimizer.lr_decay_steps=20") == (30, 40, 20)
    begun = fashion.with_settings("train.steps=90 optimizer.lr_decay=wsd optimizer.lr_decay_steps=20")
    assert phases("train.steps=200", begun) == (30, 150, 20)
    assert phases("optimizer.warmup_steps=10", begun) == (10, 60, 20)
    assert phases("optimizer.lr_decay_steps=5", begun) == (30, 55, 5)


@pytest.mark.slow
def test_a_refused_plan_suggests_none_that_batchnorm_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("experiments.planning.problem.GPU_PROCESS_BYTES", 0)
    small = "train.batch_images=16 pipeline.micro_batches=1 images.size=4 pipeline.stages=1 pipeline.remat=always"
    work = find("amoebanet_fashion").with_settings(small)

    def with_micro_batches(count: int) -> Any:
        return work.with_pipeline(work.pipeline.model_copy(update={"micro_batches": count}))

    plan = plan_request(with_micro_batches(8), Cluster(1, 1 << 30, "gpu"), estimated_costs).plan
    enough = int(plan.cells[0].peak_bytes / 0.94)  # with the reserve
    with pytest.raises(PlanError) as error:
        plan_request(work, Cluster(1, enough, "gpu"), estimated_costs)
    assert 'pipeline.micro_batches=8"' in error.value.remedy
    one_each = with_micro_batches(16)
    with pytest.raises(PlanError, match="BatchNorm needs two values per channel"):
        plan_request(one_each, Cluster(1, 1 << 40, "gpu"), estimated_costs)


def test_on_one_gpu_it_has_one_stage_and_reports_this() -> None:
    chosen, line = resolve("amoebanet_fashion", "auto", Cluster(1, 80 * GIB, "gpu"))
    assert chosen.pipeline.stages == 1
    assert line == "amoebanet_fashion, shrunk: pipeline.stages 2 -> 1"


def test_batchnorm_needs_two_values_per_channel() -> None:
    run = find("amoebanet_fashion")
    assert run.with_settings("train.batch_images=4 pipeline.micro_batches=4").setting_errors() == []  # 7 x 7 places
    with pytest.raises(SettingError, match=r"which is 1 x 1 in the last layers.*set pipeline.micro_batches=2 or fewer"):
        run.with_settings("train.batch_images=4 pipeline.micro_batches=4 images.size=4")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("model.layers=4", "model.layers takes an integer, a multiple of 3; it was given 4"),
        ("model.filters=30", "model.filters takes an integer, a multiple of 4; it was given 30"),
        ("model.stem=large", "model.stem takes one of photographs, small"),
        ("text.corpus=django", "text.corpus is not a setting"),
    ],
)
def test_wrong_settings_are_named(setting: str, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        find("amoebanet_fashion").with_settings(setting)


@pytest.mark.slow
def test_any_amoebanet_is_planned_by_name() -> None:
    cluster = parse_cluster("4x8GiB", LAPTOP)
    work = find_amoebanet("amoebanet_18x208", cluster.devices)
    assert work is not None
    planned = plan_request(work, cluster, estimated_costs)
    assert len(planned.plan.layers_per_cell) == 4
    assert planned.as_dict()["images_per_second"] == pytest.approx(128 / planned.step_s)
    assert any("images/s" in line for line in planned.lines())
    assert planned.parameters == 81_505_540


def test_other_names_are_not_amoebanets() -> None:
    assert find_amoebanet("amoebanet_18", 4) is None
    assert find_amoebanet("amoebanet_fashion", 4) is None
    with pytest.raises(SettingError, match=r"model.layers takes .*a multiple of 3; it was given 17"):
        find_amoebanet("amoebanet_17x208", 4)


def test_a_sample_is_as_large_as_the_micro_batches() -> None:
    work = find("amoebanet_fashion").with_settings("train.batch_images=10 pipeline.micro_batches=4")
    sample = work.sample()
    assert sample.largest.inputs[0].shape == (3, 1, 28, 28)
    assert sample.typical.inputs[0].shape[0] in (2, 3)
    assert sample.largest.targets[0].max() < 10
    half, setting = work.with_batch_fraction(0.5)
    assert (half.batch, setting) == (5, "train.batch_images=5")
