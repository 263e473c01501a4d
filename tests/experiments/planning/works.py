"""Small workloads and clusters to plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from experiments.base.cluster import Cluster
from experiments.language_model.experiment import LanguageModelExperiment
from experiments.language_model.runs import language_model
from experiments.planning.choose import try_plan
from experiments.planning.problem import estimated_costs
from experiments.planning.request import plan_request
from experiments.registry import resolve
from experiments.translation.experiment import TranslationExperiment
from models.language_model import LanguageModelShape
from models.loss import TranslationLoss
from suite.errors import PlanError
from suite.pipeline.planning.devices import GIB
from suite.settings import PipelineSettings

MIB = 2**20
LAPTOP = Cluster(2, 12 * GIB, "cpu")
ROOMY = Cluster(8, 12 * GIB, "gpu")
OWN_SCHEDULE = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
"""The lines of a file with a schedule of two stages and two micro-batches."""


class LinearModel(LanguageModelExperiment):
    """A language model of linear layers, whose costs are estimated in a twentieth of the time that blocks take. Its
    embedding is its output matrix, too."""

    def build(self) -> tuple[list[nn.Module], nn.Module]:
        width, words = self.model.width, self.text.vocabulary
        with torch.device("meta"):
            blocks = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(self.model.blocks_per_stack)]
            layers = [nn.Embedding(words, width), *blocks, nn.Linear(width, words)]
        layers[0].gpipe_ties = layers[-1].gpipe_ties = {"weight": "words"}
        return layers, TranslationLoss(label_smoothing=0.0)

    def key(self) -> str:
        return f"linear {super().key()}"


def linear(settings: str = "") -> LinearModel:
    """Seven layers and 32 sequences, scheduled as ``translation``."""
    shape = LanguageModelShape(5, width=1024, feed_forward=1024, heads=1, vocabulary=8000, context_length=1024)
    work = language_model(shape, PipelineSettings())
    return LinearModel.validated(work.model_dump()).with_settings(_as_in_the_paper(settings))


def translation(settings: str = "") -> TranslationExperiment:
    """T(2, 128, 1) of 7 layers at the laptop's scale, scheduled and recomputed as the paper does, with 8 micro-batches,
    where nothing else is said."""
    return resolve("t12_400m", "laptop", LAPTOP, f"model.blocks_per_stack=2 {_as_in_the_paper(settings)}")[0]


def _as_in_the_paper(settings: str) -> str:
    usual = ("pipeline.remat=except_last", "pipeline.schedule=fill_drain", "pipeline.micro_batches=8")
    return " ".join([*(setting for setting in usual if setting.partition("=")[0] not in settings), settings])


def language(stages: int = 4, blocks: int = 10) -> LanguageModelExperiment:
    shape = LanguageModelShape(blocks, width=64, feed_forward=256, heads=4, vocabulary=100, context_length=32)
    return language_model(shape, PipelineSettings(stages=stages, micro_batches=8))


def refused(work: Any, cluster: Cluster, pricer: Any = estimated_costs) -> PlanError:
    with pytest.raises(PlanError) as fault:
        plan_request(work, cluster, pricer)
    return fault.value


def peaks(work: Any) -> list[int]:
    """Returns the bytes of each stage where there is room enough."""
    return [stage.peak_bytes for stage in try_plan(work, ROOMY, estimated_costs).plan.cells]
