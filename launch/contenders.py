"""The suite as a contender of its own benchmark, behind the interface of its peers: one line of data each."""

from __future__ import annotations

from functools import partial

import torch

from experiments.peers.peer import Contender, Gradients, Seat
from experiments.peers.roster import PEERS
from experiments.peers.work import SEED
from launch.engine import assemble
from suite.pipeline.allocation import keep_freed_memory
from suite.pipeline.microbatch import MiniBatch, split
from suite.pipeline.partition import cell_ranges


class Suite:
    """The executor and the reduction of a run, without the update."""

    def __init__(self, seat: Seat, name: str) -> None:
        """Walks the plan of that name, in a process that keeps freed memory as a run's workers do."""
        keep_freed_memory()
        work, place = seat.work, seat.place
        layers, loss = work.build()
        planned, recipe = seat.plans[name]
        cells = cell_ranges(planned, len(layers))
        device = torch.device("cpu")
        self._engine = assemble(place, layers, loss, cells, device, recipe, work.optimizer, SEED)
        count = work.micro_batches
        self._batch = (
            MiniBatch(
                split(seat.inputs, count), split([seat.targets], count), work.weight(), offset=place.replica * count
            )
            if place.first or place.last
            else None
        )

    def step(self) -> None:
        """Forward and backward of the mini-batch, then the reduction over replicas."""
        self._engine.executor.train(self._batch, 0)
        self._engine.optimizer.reduce()

    def gradients(self) -> Gradients:
        """Of this stage; whole, also where a worker holds a shard of them."""
        stage = self._engine.executor.stage
        keys = [
            (index, name)
            for index, layer in zip(stage.indices, stage.layers, strict=True)
            for name, _ in layer.named_parameters()
        ]
        return {key: self._engine.optimizer.gradient(key) for key in keys}

    def clear(self) -> None:
        """Drops them."""
        self._engine.optimizer.clear()


def _suite(name: str, memory_of: str | None = None, **settings: str | int) -> Contender:
    rebuilds = settings["remat"] != "never" and memory_of is None
    given = tuple(settings.items())
    return Contender(name, partial(Suite, name=name), rebuilds, ours=True, settings=given, memory_of=memory_of)


REBUILT, AHEAD = "suite fill-drain, rebuilt", "suite 1F1B"

OURS = (
    _suite(REBUILT, remat="except_last"),
    _suite("suite fill-drain", remat="never"),
    _suite(AHEAD, remat="never", schedule="1f1b"),
    _suite("suite interleaved, rebuilt", remat="except_last", schedule="interleaved", turns=2),
    _suite("suite interleaved", remat="never", schedule="interleaved", turns=2),
    _suite("suite zero-bubble", remat="never", schedule="zero_bubble"),
    _suite("suite interleaved zero-bubble", remat="never", schedule="zero_bubble", turns=2),
    _suite("suite auto", remat="never", schedule="auto"),
    _suite("suite auto in the memory of 1F1B", AHEAD, remat="auto", schedule="auto"),
    _suite("suite auto in the memory of fill-drain rebuilt", REBUILT, remat="auto", schedule="auto"),
)
"""A line more is a contender more: whatever ``PipelineSettings`` knows beside K, M and R."""

CONTENDERS = (*OURS, *PEERS)
