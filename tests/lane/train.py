"""Runs one worker of K x R on the stand-in: the worker's own engine and loop, with fake messages."""

from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from launch.worker.build import PartitionedModel, make_executor, make_stage_optimizer
from suite.pipeline.model.microbatch import ReplicaBatch
from suite.pipeline.model.topology import RankCoord
from suite.pipeline.planning.partition import cell_ranges, partition
from suite.pipeline.runtime.boundary import CutSpec
from suite.pipeline.runtime.metadata import BoundaryMetadata
from suite.pipeline.runtime.p2p import P2PCommunicator
from suite.pipeline.runtime.shape_inference import ShapeInference
from suite.pipeline.runtime.skip import SkipLayout, find_skips
from suite.pipeline.runtime.worker_status import WorkerStatus
from suite.settings import LoopSettings
from suite.training.checkpoint import load_optimizer
from suite.training.loop import Progress, TrainingSetup, train
from suite.training.validation import Criterion, HeldOut, Validation, ValidationState
from tests.lane.distributed import worker
from tests.lane.mode import StandinMode, WrongDeviceError
from tests.lane.standin import COUNT, DEVICE
from tests.suite.pipeline.build import Engine, parameters_of

SENTINEL = 77


@dataclass(frozen=True)
class Work:
    """A model on the meta device, its loss, and a replica's share of a mini-batch."""

    layers: Sequence[nn.Module]
    loss: nn.Module
    batch: ReplicaBatch


class Unsaved:
    """In place of checkpoints, for the cases that are about something else."""

    def on_step_end(self, step, applied):
        assert applied

    def save(self, step, units, best=False):
        pass

    def wait(self):
        pass

    def finish(self, step, units, best=False):
        pass


class Recorded:
    """A tracker that keeps what the metrics rank records."""

    def __init__(self):
        self.steps = {}

    def log(self, step, values):
        self.steps.setdefault(step, {}).update(values)


def cells_of(work, stages, virtual_stages=1):
    """Returns cells of about equal weight."""
    counts = partition([parameters_of(layer) for layer in work.layers], stages * virtual_stages)
    return cell_ranges(counts, len(work.layers))


def train_worker(
    work,
    schedule_config,
    optimizer,
    stages=1,
    stage=0,
    replicas=1,
    replica=0,
    saver=None,
    load_weights=lambda stage: None,
    steps=1,
    layer_stats=None,
    trace=None,
):
    """Trains a worker and returns the waits of its host, after checking where everything is.

    It validates after each step. ``saver``, ``layer_stats`` and ``trace`` make these parts of the loop from the engine.
    """
    coord, mode = RankCoord(replica * stages + stage, stages, replicas), StandinMode()
    cells = cells_of(work, stages, schedule_config.virtual_stages)
    batch = work.batch if coord.is_first or coord.has_loss else None
    with worker(coord.rank, stages * replicas), known_metadata(work, cells, optimizer.precision), mode:
        model = PartitionedModel(work.layers, work.loss, cells, schedule_config)
        status = WorkerStatus()
        executor, groups = make_executor(coord, model, DEVICE, optimizer.precision, 0, status)
        loaded = load_weights(executor.stage)
        engine = Engine(executor, make_stage_optimizer(executor, groups, model, optimizer))
        if loaded is not None:
            load_optimizer(loaded, engine.optimizer)
        start = loaded.step if loaded is not None else 0
        check_devices(engine)
        torch.manual_seed(SENTINEL)
        mode.status = status
        mode.waits.clear()
        settings = LoopSettings(steps=start + steps, validate_every=1, checkpoint_every=1)
        validation = Validation(
            engine.executor, lambda: HeldOut([batch]), ("metric",), Criterion("loss"), settings, ValidationState()
        )
        recorded = Recorded()
        setup = TrainingSetup(
            engine.executor,
            engine.optimizer,
            lambda step: batch,
            saver(engine, start) if saver else Unsaved(),
            [recorded] if coord.is_metrics_rank else [],
            validation=validation,
            layer_stats=layer_stats(engine) if layer_stats else None,
            trace=trace(engine) if trace else None,
        )
        train(setup, settings, Progress(start))
        check_devices(engine)
    check_generators()
    if coord.is_metrics_rank:
        assert len(recorded.steps) == steps
    return mode.waits


def check_devices(engine):
    """Raises WrongDeviceError for a parameter, buffer or state of the optimizer that is elsewhere."""
    stage, optimizer = engine.executor.stage, engine.optimizer
    tensors = {**stage.named_parameters(), **dict(stage.layers.named_buffers())}
    if stage.loss is not None:
        tensors |= {("loss", name): tensor for name, tensor in stage.loss.named_buffers()}
    for key in stage.named_parameters():
        tensors |= {(*key, name): value for name, value in optimizer.state(key).items() if value.ndim}
    for name, tensor in tensors.items():
        if tensor.device != DEVICE:
            raise WrongDeviceError(f"{name} is on {tensor.device}")


def check_generators():
    """Raises WrongDeviceError unless the worker seeded the host's generator and its own device's, and no other."""
    seeds = [torch.standin.default_generators[index].initial_seed() for index in range(COUNT)]
    if any(seeds[index] != SENTINEL for index in range(COUNT) if index != DEVICE.index):
        raise WrongDeviceError("the generator of another device was seeded")
    if SENTINEL in (seeds[DEVICE.index], torch.initial_seed()):
        raise WrongDeviceError("the generator of the device or of the host was not seeded")


@contextmanager
def known_metadata(work, cells, precision):
    """A context in which a cell knows the metadata that the cell before it would send."""
    inference = ShapeInference(work.layers, precision == "bf16")
    cuts = [inference.infer_all(CutSpec.of(inputs)) for inputs in work.batch.inputs]
    skips, original = find_skips(work.layers), P2PCommunicator.recv_metadata

    def recv_metadata(self, names):
        sender = SkipLayout(skips, cells, self.cell - 1)
        before = cells[self.cell].start
        return BoundaryMetadata(tuple(sender.next_cut(of_one[before]) for of_one in cuts), work.batch.offset)

    P2PCommunicator.recv_metadata = recv_metadata
    try:
        yield
    finally:
        P2PCommunicator.recv_metadata = original
