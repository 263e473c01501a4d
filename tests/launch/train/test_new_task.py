"""One folder and its name in the registry add a task, which is planned, trained and resumed like the others."""

import shutil
from pathlib import Path

import pytest

from tests.launch.command_line import ROOT, gpipe_at_once

INIT = """
from experiments.squares.experiment import SquaresExperiment
from experiments.squares.runs import squares

EXPERIMENT, RUNS = SquaresExperiment, (squares,)
"""

EXPERIMENT = '''
from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import nn

from experiments.base.experiment import Experiment
from suite.pipeline.model.microbatch import ReplicaBatch, even_split_sizes, replica_share
from suite.pipeline.planning.sample import MicroBatch, Sample
from suite.settings import LoopSettings, OptimizerSettings, PipelineSettings
from suite.training.validation import Criterion

WIDTH = 4


class Loss(nn.Module):
    def forward(self, outputs, targets):
        square = (outputs - targets).square().sum()
        return square, square.detach()


class Hidden(nn.Linear):
    def forward(self, inputs):
        return super().forward(inputs).tanh()


class Settings(LoopSettings):
    batch_rows: int = Field(8, ge=1)
    """Rows of a mini-batch."""


class SquaresExperiment(Experiment):
    """Learns the square of each of its inputs."""

    unit: ClassVar[str] = "rows"
    metric_name: ClassVar[str] = "square"
    criterion: ClassVar[Criterion] = Criterion("square")
    unchangeable: ClassVar[tuple[str, ...]] = ("task",)
    batch_setting: ClassVar[tuple[str, int]] = ("batch_rows", 1)

    task: Literal["squares"] = "squares"
    train: Settings

    @property
    def list_length(self) -> int:
        return 3

    @property
    def data(self) -> str:
        return "squares"

    @property
    def batch(self) -> int:
        return self.train.batch_rows

    @property
    def min_rows(self) -> int:
        return self.batch

    def build(self):
        with torch.device("meta"):
            return [Hidden(WIDTH, 16), Hidden(16, 16), nn.Linear(16, WIDTH)], Loss()

    def sample(self) -> Sample:
        rows = torch.zeros(-(-self.batch // (self.pipeline.micro_batches * self.pipeline.replicas)), WIDTH)
        micro_batch = MicroBatch((rows,), (rows,))
        return Sample(micro_batch, micro_batch)

    def key(self) -> str:
        return self.cost_key("squares")

    def data_folder(self, cache: Path) -> Path:
        return cache

    def prepare_data(self, cache: Path, log) -> str:
        return self.data

    def data_source(self, data: Path, coord):
        return Source(self, coord)


@dataclass
class Source:
    experiment: SquaresExperiment
    coord: Any
    is_thread_safe, has_held_out = True, False

    def batch(self, step: int) -> ReplicaBatch:
        count = self.experiment.batch
        rows = torch.rand(count, WIDTH, generator=torch.Generator().manual_seed(step))
        pipeline = self.experiment.pipeline
        sizes = even_split_sizes(count, pipeline.replicas * pipeline.micro_batches)
        share = replica_share(len(sizes), self.coord.replica, pipeline.replicas)
        own = rows.split(sizes)[share]
        return ReplicaBatch([(part,) for part in own], [(part.square(),) for part in own], float(count), share.start)

    def notes(self) -> dict[str, Any]:
        return {}

    def counts(self) -> dict[str, int]:
        return {}

    def check(self, notes) -> str:
        return ""

    def baselines(self, held_out) -> dict[str, float]:
        return {}

    def bytes_per_unit(self, held_out) -> None:
        return None
'''

RUNS = '''
from experiments.squares.experiment import Settings, SquaresExperiment
from suite.settings import OptimizerSettings, PipelineSettings


def squares() -> SquaresExperiment:
    """Squares of random numbers."""
    return SquaresExperiment(
        name="squares", scale="laptop", pipeline=PipelineSettings(stages=2, micro_batches=2),
        optimizer=OptimizerSettings(learning_rate=0.03), train=Settings(steps=6, checkpoint_every=3),
    )
'''


@pytest.mark.slow
def test_one_folder_and_its_name_in_the_registry_add_a_task(tmp_path: Path) -> None:
    copy = tmp_path / "experiments"
    shutil.copytree(ROOT / "experiments", copy, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "squares").mkdir()
    (copy / "squares/__init__.py").write_text(INIT)
    (copy / "squares/experiment.py").write_text(EXPERIMENT)
    (copy / "squares/runs.py").write_text(RUNS)
    registry = (copy / "registry.py").read_text()
    added = registry.replace("import custom, images, ", "import custom, images, squares, ").replace(
        "TASK_FOLDERS = (translation,", "TASK_FOLDERS = (squares, translation,"
    )
    assert added.count("squares") == 2
    (copy / "registry.py").write_text(added)
    local = ("--launcher", "local", "--set")
    printed = gpipe_at_once(
        tmp_path,
        ("list",),
        ("settings",),
        ("experiment", "squares", *local, "pipeline.stages=2"),
        ("resume", "squares", *local, "train.steps=8 pipeline.stages=1 pipeline.replicas=2"),
        PYTHONPATH=f"{tmp_path}:{ROOT}",
        WANDB_MODE="disabled",
    )
    assert "squares (squares): Squares of random numbers." in printed
    assert "Task `squares`: more settings" in printed
    assert "done: 6 steps, 48 rows" in printed
    assert "done: 8 steps, 64 rows" in printed
