"""A real training run of the toy model in the processes of a test: executor, DeepSpeed, checkpoints."""

from functools import partial
from unittest.mock import Mock

import torch

from launch.backends.processes import run_processes
from suite.pipeline.model.layers import as_tuple
from suite.pipeline.model.topology import RankCoord
from suite.settings import OptimizerSettings, TrainSettings
from suite.training import checkpoint
from suite.training.fingerprints import Fingerprints
from suite.training.loop import Progress, TrainingSetup, train
from suite.training.profiling import step_profiler
from suite.training.stage_optimizer import StageOptimizer
from tests.suite.pipeline.build import build, join, mini_batch
from tests.suite.pipeline.freezing import freeze
from tests.suite.pipeline.toy import SumLoss, toy_batch, toy_layers

SETTINGS = {"learning_rate": 0.02, "warmup_steps": 5, "max_grad_norm": 0.2, "weight_decay": 0.01}
"""Of the optimizer, whichever it is."""


class Losses:
    """A tracker that remembers."""

    def __init__(self):
        self.seen = []

    def log(self, step, values):
        self.seen.append((values["train/loss"], values["train/grad_norm"]))

    def finish(self, summary):
        pass


def run(rank, world, rendezvous, *where, **options):
    """As ``trained``, in a process that has not joined the others yet."""
    join(rank, world, rendezvous)
    return trained(rank, *where, **options)


def trained(
    rank, stages, replicas, until, folder=None, resume=False, optimizer="adamw", spoil=(), total=4, poison=None,
    once=False, schedule_config="except_last", again=None, at=lambda step: None, frozen=(), profile=None,
    factors=lambda *_: (1.0, 1.0), fingerprints=None, dtype=torch.float32, every=20, layers=None, tracker=None,
    validation=lambda executor: None,
):  # fmt: skip
    """Returns ([(loss, norm)] of the speaking worker, {(layer, name): final value}) of this worker.

    ``total`` counts micro-batches over all replicas. ``spoil`` are steps in which one label's loss is made infinite;
    ``poison`` what else is (see ``poisoned``), in all of them. ``once``: not when such a step is walked again.
    What was resumed is saved once more below ``again``, as it was loaded. ``at`` is called before each step. ``frozen``
    is what ``freeze`` takes, ``profile`` a folder and the steps to profile, ``factors`` those of each parameter's
    update, ``fingerprints`` a folder for those of all steps. Every ``every`` steps a checkpoint is due. ``layers`` are
    others than the toy's, ``tracker`` is one instead of the losses', ``validation`` makes one of the executor.
    """
    coord = RankCoord(rank, stages, replicas)
    layers = freeze(layers or toy_layers(dtype), frozen)
    executor, ties, named, groups = build(coord, layers, SumLoss(), schedule_config)
    progress = Progress()
    found = None
    if resume:
        found = checkpoint.newest_valid(folder, executor.stage.indices, len(layers), print)
        checkpoint.load_values(found, executor.stage)
        progress.step = found.step
    settings = OptimizerSettings(name=optimizer, **SETTINGS)
    update = StageOptimizer(executor.stage, len(layers), ties, coord, groups, settings, factors=factors)
    executor.reducer = update.reducer
    if found is not None:
        checkpoint.load_optimizer(found, update)
        if again is not None:
            saver = checkpoint.Saver(checkpoint.Storage(again), update, lambda _: {}, print)
            saver.finish(found.step, 0)

    if poison is not None:
        poisoned(executor, *poison)

    def batches(step):
        at(step)
        share = -(-total // replicas)
        batch = mini_batch(*toy_batch(8, seed=100 + step), share, coord.replica, replicas, total)
        if step in spoil and coord.has_loss and poison is None and executor.stage.loss is not None:
            executor.stage.loss = Spoiled(4 // replicas if once else None)
        elif spoil and executor.stage.loss is not None:
            executor.stage.loss = SumLoss()
        return batch

    saver = Mock()  # saves nothing
    if folder is not None:
        storage = checkpoint.Storage(folder)
        saver = checkpoint.Saver(storage, update, lambda tokens: {"tokens": tokens}, print, progress.step)

    losses = Losses()
    trackers = [tracker or losses] if coord.is_metrics_rank else []
    traces, steps = profile or (None, None)
    loop = TrainSettings(steps=until, checkpoint_every=every, max_nonfinite_steps=2, profile_steps=steps)
    profiler = step_profiler(loop, traces, coord, executor.stage.device)
    recorder = fingerprints and Fingerprints(executor, update, fingerprints, 0, until, total)
    setup = TrainingSetup(
        executor, update, batches, saver, trackers, profiler=profiler, fingerprints=recorder,
        validation=validation(executor),
    )  # fmt: skip
    train(setup, loop, progress)
    buffers = {(at, name): b for at, layer in executor.stage.by_index.items() for name, b in layer.named_buffers()}
    return losses.seen, {key: value.detach().clone().numpy() for key, value in (named | buffers).items()}


def poisoned(executor, kind, layer, micro_batch):
    """Makes an ``activation`` of a layer NaN, the ``gradient`` that it gives to its input, or that of its ``weights``,
    in one micro-batch of every mini-batch."""
    if layer not in executor.stage.indices:
        return
    module = executor.stage.layers[executor.stage.indices.index(layer)]

    def spoil(tensor):
        return tensor * torch.nan if executor.status.action.micro_batch == micro_batch else None

    def on_output(module, inputs, output):
        first, *others = as_tuple(output)
        return (first * torch.nan, *others) if executor.status.action.micro_batch == micro_batch else None

    def on_input(module, inputs):
        first, *others = inputs
        if first.requires_grad:
            first = first.view_as(first)
            first.register_hook(spoil)
        return first, *others

    if kind == "activation":
        module.register_forward_hook(on_output)
    elif kind == "gradient":
        module.register_forward_pre_hook(on_input)
    else:
        next(module.parameters()).register_hook(spoil)


class Spoiled(SumLoss):
    """An infinite loss, for so many calls or for ever."""

    def __init__(self, calls=None):
        super().__init__()
        self._left = calls

    def forward(self, scores, labels):
        objective, measure = super().forward(scores, labels)
        if self._left is not None:
            self._left -= 1
        return objective * torch.inf if self._left is None or self._left >= 0 else objective, measure


def train_in_processes(stages, replicas, until, **options):
    """Returns (losses, weights) of ``trained`` in processes of their own."""
    return merge(run_processes(partial(run, **options), stages * replicas, stages, replicas, until))


def merge(results):
    """Returns (losses, weights) of a run; weights of a layer held twice, by replicas, must be equal to the bit."""
    losses = next(seen for seen, _ in results if seen)
    weights = {}
    for _, held in results:
        for key, value in held.items():
            assert key not in weights or (weights[key] == value).all(), key
            weights[key] = value
    return losses, weights
