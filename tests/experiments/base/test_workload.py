"""Workloads: equal keys for equal costs, and samples of the run's own text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from experiments.base.cluster import Cluster
from experiments.base.workload import FIRST_WORD, random_ids
from experiments.language_model.runs import language_model
from experiments.registry import find, resolve
from experiments.translation.experiment import TranslationExperiment
from models.language_model import LanguageModelShape
from suite.data.text.batching import TranslationBatches
from suite.data.text.prepare import folder_of, prepare
from suite.data.text.text import TextData
from suite.pipeline.planning.costs import LayerCost
from suite.pipeline.planning.devices import DEVICES
from suite.pipeline.planning.estimate import estimate
from suite.pipeline.planning.sample import MicroBatch
from suite.settings import PipelineSettings

LAPTOP = Cluster(2, 2**33, "cpu")
SHAPE = LanguageModelShape(5, width=16, feed_forward=32, heads=2, vocabulary=50, context_length=12)


def translation(settings: str = "", text: Path | None = None) -> TranslationExperiment:
    """T(2, 128, 1) on Django's texts."""
    base = (
        "model.blocks_per_stack=2 text.corpus=django text.vocabulary=1200 text.max_length=32 train.batch_tokens=600 "
        "pipeline.micro_batches=8"
    )
    experiment, _ = resolve("t12_400m", "laptop", LAPTOP, base)
    run = experiment.with_settings(settings)
    return run if text is None else run.with_prepared(text)


@pytest.fixture(scope="module")
def text(cache: Path) -> Path:
    settings = translation().text
    prepare(settings, cache, print)
    return folder_of(settings, cache)


def language(micro_batches: int = 8, **pipeline: Any) -> Any:
    return language_model(SHAPE, PipelineSettings(micro_batches=micro_batches, **pipeline))


WORKS = {"translation": translation, "language model": language}
SAME_COSTS = (
    "pipeline.stages=3",
    "pipeline.remat=never",
    "pipeline.stages=2 pipeline.layers_per_cell=3,4",
    "pipeline.micro_batches=4 pipeline.replicas=2",  # the same 8 micro-batches
    "train.steps=7 train.checkpoint_every=2",
    "trace=true tracking.wandb=disabled",
)
OTHER_COSTS = (
    "pipeline.micro_batches=4",
    "pipeline.replicas=2",
    "optimizer.name=adafactor",
    "optimizer.precision=bf16",
    "model.feed_forward=256",
    "model.dropout=0.1",
    "model.blocks_per_stack=3",
    "text.vocabulary=1201",
)
OTHER_ROWS = {
    "translation": ("train.batch_tokens=1200", "text.max_length=16"),
    "language model": ("train.batch_sequences=64", "text.length=16"),
}


@pytest.mark.parametrize("name", WORKS)
def test_keys_are_equal_for_equal_costs_alone(name: str) -> None:
    work = WORKS[name]()
    assert {work.with_settings(settings).key() for settings in SAME_COSTS} == {work.key()}
    for settings in (*OTHER_COSTS, *OTHER_ROWS[name]):
        assert work.with_settings(settings).key() != work.key(), settings


@pytest.mark.slow
def test_works_of_equal_keys_have_equal_costs() -> None:
    def costs(work: TranslationExperiment) -> list[LayerCost]:
        """Estimated anew: what a plan asks for is kept by key."""
        layers, loss = work.build()
        return estimate(layers, loss, work.sample().largest, DEVICES["TPUv3"], work.optimizer)

    expected = costs(translation())
    assert all(costs(translation(settings)) == expected for settings in SAME_COSTS)


def test_real_text_and_rows_of_full_length_have_different_keys(text: Path) -> None:
    assert translation(text=text).key() != translation().key()


def test_a_language_model_is_sampled_by_full_sequences() -> None:
    sample = language(micro_batches=5, replicas=2).sample()  # 32 sequences in 10 micro-batches: four at most
    assert [tensor.shape for tensor in (*sample.typical.inputs, *sample.typical.targets)] == [(4, 12), (4, 12)]
    assert sample.largest is sample.typical


def test_a_share_of_a_mini_batch_names_its_setting() -> None:
    model, setting = language().with_batch_fraction(0.25)
    assert (model.min_rows, model.batch, setting) == (8, 8 * 12, "train.batch_sequences=8")
    assert language().with_settings(setting) == model
    work, setting = translation().with_batch_fraction(0.5)
    assert (work.batch, setting) == (300, "train.batch_tokens=300")
    assert translation().with_settings(setting) == work


def test_without_text_the_sample_has_rows_of_full_length() -> None:
    paper = find("t128_6b").sample()
    # 4,000,000 tokens in 8 x 256 micro-batches: 1953.1 each, which 16 rows of 128 hold
    assert paper.largest.inputs[0].shape == paper.largest.inputs[1].shape == (16, 128)
    assert paper.largest.targets[0].shape == (16, 128)
    assert find("t128_6b").min_rows == 4_000_000 // 128


def test_random_ids_are_words_and_always_the_same() -> None:
    ids = random_ids(50, 40, 20)
    assert ids.dtype == torch.int64
    assert (int(ids.min()), int(ids.max())) == (FIRST_WORD, 19)
    assert torch.equal(ids, random_ids(50, 40, 20))


def places(one: MicroBatch) -> int:
    return sum(tensor.numel() for tensor in one.inputs)


def test_a_sample_of_real_text_has_typical_and_largest_micro_batches(text: Path) -> None:
    work = translation(text=text)
    train, pipeline = work.train, work.pipeline
    batches = TranslationBatches(TextData(text), work.text, train, 1, pipeline.micro_batches)
    seen = [sum(tensor.numel() for tensor in inputs) for step in range(16) for inputs in batches.batch(step, 0).inputs]
    sample = work.sample()
    assert len(seen) == 16 * 8
    assert min(seen) < max(seen)
    assert places(sample.largest) == max(seen)
    mean = sum(seen) / len(seen)
    assert abs(places(sample.typical) - mean) == min(abs(size - mean) for size in seen)
    assert abs(places(sample.typical) - mean) < 0.1 * mean
    for one in (sample.typical, sample.largest):
        source, target = one.inputs
        assert one.targets[0].shape == target.shape
        assert source.shape[0] == target.shape[0]
        assert int(target.max()) < 1200


def test_a_sample_covers_all_replicas_and_not_only_the_first(text: Path) -> None:
    one = translation("pipeline.micro_batches=8", text).sample()
    several = translation("pipeline.micro_batches=2 pipeline.replicas=4", text).sample()
    for name in ("typical", "largest"):
        expected, found = getattr(one, name), getattr(several, name)
        assert all(torch.equal(a, b) for a, b in zip(found.inputs, expected.inputs, strict=True))
