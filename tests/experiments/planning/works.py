"""Small workloads and clusters to plan."""

from __future__ import annotations

from typing import Any

import pytest

from experiments.base.cluster import Cluster
from experiments.language_model.experiment import LanguageModelExperiment
from experiments.language_model.runs import language_model
from experiments.planning.problem import estimated_costs
from experiments.planning.request import plan_request
from experiments.registry import resolve
from experiments.translation.experiment import TranslationExperiment
from models.language_model import LanguageModelShape
from suite.errors import PlanError
from suite.pipeline.planning.devices import GIB
from suite.settings import PipelineSettings

MIB = 2**20
LAPTOP = Cluster(2, 12 * GIB, "cpu")
ROOMY = Cluster(8, 12 * GIB, "gpu")


def translation(settings: str = "") -> TranslationExperiment:
    """T(2, 128, 1) of 7 layers at the laptop's scale, scheduled and recomputed as the paper does, with 8 micro-batches,
    where nothing else is said."""
    usual = ("pipeline.remat=except_last", "pipeline.schedule=fill_drain", "pipeline.micro_batches=8")
    added = [setting for setting in usual if setting.partition("=")[0] not in settings]
    return resolve("t12_400m", "laptop", LAPTOP, " ".join(["model.blocks_per_stack=2", *added, settings]))[0]


def language(stages: int = 4, blocks: int = 10) -> LanguageModelExperiment:
    shape = LanguageModelShape(blocks, width=64, feed_forward=256, heads=4, vocabulary=100, context_length=32)
    return language_model(shape, PipelineSettings(stages=stages, micro_batches=8))


def refused(work: Any, cluster: Cluster, pricer: Any = estimated_costs) -> PlanError:
    with pytest.raises(PlanError) as fault:
        plan_request(work, cluster, pricer)
    return fault.value


def peaks(work: Any) -> list[int]:
    """Returns the bytes of each stage where there is room enough."""
    return [stage.peak_bytes for stage in plan_request(work, ROOMY, estimated_costs).plan.cells]
