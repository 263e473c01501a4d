"""A real training run of the toy model in the processes of a test: executor, DeepSpeed, checkpoints."""

from pathlib import Path

import torch

from suite.pipeline.topology import Place
from suite.pipeline.transport import Deadline
from suite.settings import OptimizerSettings, TrainSettings
from suite.training import checkpoint
from suite.training.loop import Progress, Worker, train
from suite.training.optimizer import StageOptimizer
from tests.pipeline.build import CPU, build, join, mini_batch
from tests.pipeline.toy import SumLoss, toy_batch, toy_layers


class Losses:
    """A tracker that remembers."""

    def __init__(self):
        self.seen = []

    def log(self, step, values):
        self.seen.append((values["loss"], values["norm"]))

    def finish(self, summary):
        pass


def run(
    rank, world, rendezvous, stages, replicas, until, folder=None, resume=False, optimizer="adamw", spoil=(), total=4
):
    """Returns ([(loss, norm)] of the speaking worker, {(layer, name): final value}) of this worker.

    ``total`` counts micro-batches over all replicas. ``spoil`` are steps in which one label's loss is made infinite.
    """
    join(rank, world, rendezvous)
    place = Place(rank, stages, replicas)
    layers = toy_layers()
    executor, ties, named, groups = build(place, layers, SumLoss(), "except_last")
    progress = Progress()
    found = None
    if resume:
        found = checkpoint.newest_valid(Path(folder), executor.stage.indices, print)
        checkpoint.load_values(found, executor.stage)
        progress.step = found.step
    settings = OptimizerSettings(name=optimizer, learning_rate=0.02, warmup_steps=5, clip_norm=0.2, weight_decay=0.01)
    update = StageOptimizer(executor.stage.layers, named, len(layers), ties, place, groups, CPU, settings)
    if found is not None:
        checkpoint.load_optimizer(found, executor.stage, update)

    def batches(step):
        share = -(-total // replicas)
        batch = mini_batch(*toy_batch(8, seed=100 + step), share, place.replica, replicas, total)
        if step in spoil and place.last and executor.stage.loss is not None:
            executor.stage.loss = Spoiled()
        elif executor.stage.loss is not None:
            executor.stage.loss = SumLoss()
        return batch

    def save(step, tokens):
        if folder is not None:
            checkpoint.save(Path(folder), step, executor.stage, update, place, {"tokens": tokens})

    losses = Losses()
    transport = executor.ways[0].transport
    deadline = transport.deadline if transport else Deadline(60)
    worker = Worker(executor, update, deadline, batches, save, [losses] if place.speaks else [])
    train(worker, TrainSettings(steps=until, checkpoint_every=20, bad_steps_allowed=2), progress)
    return losses.seen, {key: p.detach().clone().numpy() for key, p in named.items()}


class Spoiled(SumLoss):
    def forward(self, scores, labels):
        objective, measure = super().forward(scores, labels)
        return objective * torch.inf, measure


def merge(results):
    """Returns (losses, weights) of a run; weights of a layer held twice, by replicas, must be equal to the bit."""
    losses = next(seen for seen, _ in results if seen)
    weights = {}
    for _, held in results:
        for key, value in held.items():
            assert key not in weights or (weights[key] == value).all(), key
            weights[key] = value
    return losses, weights
