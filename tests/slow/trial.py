"""A tiny run under a plan of faults: made in a moment, trained by the real parts, supervised as every run is."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from experiments.base.cluster import Cluster
from experiments.registry import find
from launch.backends.processes import LocalLauncher
from launch.runs.store import RunFolder
from launch.supervision.supervisor import Supervisor
from launch.worker.attempt import run_logger
from suite.data.text.prepare import folder_of, prepare
from suite.pipeline.planning.partition import partition
from suite.training.jsonl import read_lines
from suite.training.metrics import is_step, read_steps
from tests.faults.injection import VARIABLE, hook
from tests.launch.records import write_records
from tests.suite.pipeline.build import parameters_of
from tests.suite.training.checkpoint.saves import layer_files

TINY = (
    "text.corpus=django text.vocabulary=600 text.max_length=24 model.blocks_per_stack=2 model.width=16 model.heads=2 "
    "model.feed_forward=32 model.dropout=0.1 train.batch_tokens=120 train.valid_pairs=8 train.threads=1 "
    "tracking.wandb=disabled pipeline.stages=3 pipeline.micro_batches=4 pipeline.schedule=fill_drain "
    "pipeline.remat=except_last "
)


@dataclass(frozen=True)
class Trial:
    """What came of a run."""

    run: RunFolder
    error: Exception | None
    published: list[int]
    """The newest checkpoint that was whole when each attempt began, by its step."""

    @property
    def attempts(self):
        """The lines of the supervisor."""
        return [json.loads(line) for line in self.run.attempts.read_text().splitlines()]

    @property
    def ends(self):
        return [line for line in self.attempts if "outcome" in line]

    @property
    def recovered(self):
        """Seconds from the failure's notice to the next attempt's first step."""
        return [line["recovered_s"] for line in self.attempts if "recovered_s" in line]

    @property
    def said(self):
        return self.run.messages.read_text()

    @property
    def losses(self):
        return [line["train/loss"] for line in read_steps(self.run.metrics)]

    @property
    def validations(self):
        """The lines of the validations, without their seconds."""
        lines = [line for line in read_lines(self.run.metrics) if not is_step(line)]
        return [{name: value for name, value in line.items() if name != "valid/seconds"} for line in lines]

    @property
    def state(self):
        """Weights and optimizer state of the newest checkpoint, by layer file and name."""
        newest = max(self.run.checkpoints.glob("[0-9]*"))
        files = layer_files(newest)
        return {(name, key): value for name, path in files.items() for key, value in load_file(path).items()}


class Watched(LocalLauncher):
    """Processes as they are, and a look before each attempt."""

    def __init__(self, each) -> None:
        self._each = each
        self.published = []

    def run(self, attempt, experiment, watch):
        self.published.append(newest(attempt.run))
        self._each()
        super().run(attempt, experiment, watch)


def newest(run: RunFolder) -> int:
    """Returns the step of the newest checkpoint that has its manifest, written last; 0 without one."""
    return max((int(path.parent.name) for path in run.checkpoints.glob("*/manifest.json")), default=0)


class Trials:
    """Makes trials below a folder, or with their runs below another one, all on one text."""

    def __init__(self, root: Path, runs: Path | None = None) -> None:
        self.root, self.runs = root, runs or root
        self._count = 0

    def experiment(self, settings: str):
        return (
            find("t24_1_3b_wide").at_laptop_scale(Cluster(2, 2**33, "cpu")).with_settings(TINY).with_settings(settings)
        )

    def job(self, settings: str):
        """Returns the records of a new run."""
        experiment = self.experiment(settings)
        prepare(experiment.text, self.root / "cache", lambda _: None)
        self._count += 1
        run = RunFolder(self.runs / f"run-{self._count}")
        run.path.mkdir()
        return self.job_of(run, experiment)

    def job_of(self, run, experiment, resume=False):
        layers, _ = experiment.build()
        count = experiment.pipeline.stages * experiment.pipeline.virtual_stages
        cells = partition([parameters_of(layer) for layer in layers], count)
        data = folder_of(experiment.text, self.root / "cache")
        return experiment, *write_records(run, experiment, cells, data, resume)

    def train(self, monkeypatch, settings: str, faults=(), each=lambda: None):
        """Runs to the end under a plan of faults; calls ``each`` before every attempt."""
        experiment, plan, attempt = self.job(settings)
        monkeypatch.setenv(VARIABLE, hook(faults))
        messages = run_logger(attempt.run.messages)
        error, launcher = None, Watched(each)
        try:
            Supervisor(experiment, plan, attempt, launcher, None, messages).run()
        except Exception as raised:
            error = raised
        return Trial(attempt.run, error, launcher.published)


def assert_same(one: Trial, other: Trial) -> None:
    """Two runs have the same losses, weights and optimizer state, to the bit."""
    assert one.losses == other.losses
    assert one.validations == other.validations
    first, second = one.state, other.state
    assert first.keys() == second.keys()
    for key, value in first.items():
        assert np.array_equal(value, second[key]), key
