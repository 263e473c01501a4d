"""``transformer_<L>``: the sizes and stages of Table 1, and invalid names."""

from __future__ import annotations

from dataclasses import replace

import pytest

from experiments.base.cluster import Cluster
from experiments.language_model.runs import find_transformer, language_model
from experiments.registry import find, resolve
from suite.errors import SettingError
from suite.pipeline.model.layers import count_parameters
from tests.experiments.planning.works import LAPTOP
from tests.experiments.stored import stored


# Table 1 of the paper: K, and 282.2M, 785.8M, 5.3B, 21.0B, 83.9B. All blocks of a model are alike.
@pytest.mark.parametrize(
    ("layers", "stages", "printed"),
    [(3, 1, 282.2e6), (13, 1, 785.8e6), (103, 8, 5.3e9), (415, 32, 21.0e9), (1663, 128, 83.9e9)],
)
def test_parameters_and_stages_are_those_of_table_1(layers: int, stages: int, printed: float) -> None:
    run = find(f"transformer_{layers}")
    first, block, last = run.model_copy(update={"model": replace(run.model, blocks_per_stack=1)}).build()[0]
    assert count_parameters([first, last]) + layers * count_parameters([block]) == pytest.approx(printed, rel=0.005)
    assert (run.name, run.list_length) == (f"transformer_{layers}", layers + 2)
    assert (run.pipeline.stages, run.pipeline.micro_batches, run.pipeline.replicas) == (stages, 32, 1)
    assert run.batch == 32 * 1024
    assert stored(run) == run


def test_the_papers_sizes_train_in_bf16_and_are_counted_in_fp32() -> None:
    """Table 1 of the paper is about fp32, and on a laptop results stay those of fp32."""
    run = find("transformer_13")
    assert run.optimizer.precision == "bf16"
    assert resolve("transformer_13", "laptop", LAPTOP)[0].optimizer.precision == "fp32"
    assert language_model(run.model, run.pipeline).optimizer.precision == "fp32"


@pytest.mark.parametrize(
    "name",
    ["transformer_0", "transformer_-3", "transformer_03", "transformer_", "transformer", "transformer_3b",
     "transformer_3 ", "transformer_1.5", "Transformer_3", "transformer_1663_", "transformer_1234567", ""],
)  # fmt: skip
def test_other_names_are_not_language_models(name: str) -> None:
    assert find_transformer(name) is None
    with pytest.raises(SettingError, match="there is no experiment" if name else "which experiment"):
        find(name)


@pytest.mark.parametrize("name", ["transformer_<L>", "amoebanet_<L>x<D>"])
def test_the_name_of_all_sizes_is_no_experiment(name: str) -> None:
    with pytest.raises(SettingError, match="stands for models of any size; write numbers: transformer_13"):
        find(name)


def test_a_laptop_keeps_the_depth_that_it_can_train_and_divides_all_widths_by_one_number() -> None:
    small, line = resolve("transformer_13", "laptop", LAPTOP)
    model = small.model
    shape = model.blocks_per_stack, model.width, model.feed_forward, model.heads
    assert (*shape, model.vocabulary, model.context_length) == (13, 64, 256, 2, 1000, 128)
    assert "model.width 2048 -> 64" in line
    assert "model.blocks_per_stack 1663 -> 128" in resolve("transformer_1663", "laptop", LAPTOP)[0].shrunk


def test_a_laptop_uses_both_cores_as_stages_or_else_as_replicas() -> None:
    for name, cluster, expected in (
        ("transformer_13", LAPTOP, (1, 2, 1)),
        ("transformer_103", LAPTOP, (2, 1, 4)),
        ("transformer_13", Cluster(1, 2**34, "cpu"), (1, 1, 1)),
    ):
        pipeline = resolve(name, "laptop", cluster)[0].pipeline
        assert (pipeline.stages, pipeline.replicas, pipeline.micro_batches) == expected


def test_the_text_sets_the_models_vocabulary_and_length() -> None:
    run = find("transformer_3").with_settings("text.vocabulary=500 text.length=64")
    assert (run.model.vocabulary, run.model.context_length, run.batch) == (500, 64, 32 * 64)
    with pytest.raises(SettingError, match=r"model\.context_length is 9 and text.length 1024; set only text.length"):
        find("transformer_3").with_settings("model.context_length=9")
