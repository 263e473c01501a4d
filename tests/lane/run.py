"""Runs the cases of the lane: a worker's code on the stand-in. Each returns the waits of its host."""

import tempfile
from collections import Counter
from pathlib import Path

import torch

from suite.pipeline.schedule.config import ScheduleConfig
from suite.settings import OptimizerSettings
from suite.training.checkpoint import Saver, Storage, load_values, newest_valid
from suite.training.layer_stats import LayerStats
from suite.training.trace import TraceWriter
from tests.lane import works
from tests.lane.cases import CASES, SCHEDULES
from tests.lane.decode import decode
from tests.lane.standin import DEVICE
from tests.lane.train import train_worker


def one_stage(work, schedule="fill_drain", optimizer="adamw", precision="fp32", **others):
    """Trains one worker. ``work`` names a function of ``tests.lane.works``, with an argument if it is a pair."""
    function, *arguments = (work,) if isinstance(work, str) else work
    name, graphs, *rest = SCHEDULES[schedule]
    settings = OptimizerSettings(name=optimizer, precision=precision, max_grad_norm=0.1)
    return train_worker(
        getattr(works, function)(*arguments), ScheduleConfig(name, (graphs,), *rest), settings, **others
    )


def every_stage(**settings):
    """Trains both stages of the first replica in turn."""
    return one_stage(stages=2, stage=0, **settings) + one_stage(stages=2, stage=1, **settings)


def recorded():
    """Trains with statistics of layers and a trace."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        return one_stage(
            "toy",
            layer_stats=lambda engine: LayerStats(engine.executor, 1, 0, path / "layers.jsonl"),
            trace=lambda engine: TraceWriter(path, engine.executor.coord, DEVICE, 0, every_step=True),
        )


def checkpoint(replicas):
    """Trains, saves, and resumes from the files."""
    with tempfile.TemporaryDirectory() as folder:
        count, waits = len(works.toy().layers), Counter()

        def saver(engine, start):
            saver = Saver(Storage(folder), engine.optimizer, lambda units: {}, print, start)
            saver._own, saver._writers = {*range(count)}, [0]  # no other replica is there to write its layers
            return saver

        def load_weights(stage):
            loaded = newest_valid(folder, stage.indices, count, print)
            if loaded is not None:
                load_values(loaded, stage)
            return loaded

        for _ in range(2):
            waits += one_stage("toy", saver=saver, load_weights=load_weights, replicas=replicas)
        assert sorted(path.name for path in Path(folder).iterdir()) == ["00000001", "00000002", "owner.json"]
        return waits


FUNCTIONS = {function.__name__: function for function in (one_stage, every_stage, recorded, checkpoint, decode)}


def run(name):
    """Runs a case; returns its waits as a list of (place, what, whether in an action)."""
    torch.manual_seed(0)
    function, arguments = CASES[name]
    return sorted(FUNCTIONS[function](**arguments))
