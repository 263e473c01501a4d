"""DeepSpeed's PipelineEngine: 1F1B, with and without activation checkpointing."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from experiments.benchmark.peers.cell import Cell
from experiments.benchmark.peers.peer import BenchContext, Gradients
from suite.pipeline.model.layers import Tensors
from suite.pipeline.model.microbatch import split
from suite.pipeline.planning.partition import cell_ranges


class DeepSpeedPipeline:
    """``train_batch`` without its last instruction, the optimizer's step."""

    def __init__(self, context: BenchContext, recompute: bool = False) -> None:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        os.environ["LOCAL_RANK"] = "0"  # a missing one is an assertion error
        import deepspeed
        from deepspeed.pipe import LayerSpec, PipelineModule
        from deepspeed.runtime.pipe import schedule
        from deepspeed.runtime.pipe.topology import ProcessTopology

        deepspeed.utils.logger.setLevel(logging.ERROR)
        deepspeed.init_distributed("gloo", dist_init_required=False)
        work, place = context.work, context.coord
        layers, loss = work.build()
        cells = cell_ranges(context.cells[place.stages], len(layers))
        mean = context.objective(loss)
        # DeepSpeed takes the mean of micro-batches and of replicas; the objective here is one part of a mean already
        parts = work.micro_batches * work.replicas
        module = PipelineModule(
            layers=[LayerSpec(Cell, layers, cell) for cell in cells],  # one a stage, so that the cells are ours
            topology=ProcessTopology(axes=["data", "pipe"], dims=[work.replicas, work.stages]),
            loss_fn=lambda outputs, targets: mean(outputs, targets) * parts,
            partition_method="uniform",
        )
        self._engine: Any
        self._engine, *_ = deepspeed.initialize(
            model=module, model_parameters=list(module.parameters()),
            config={
                "train_micro_batch_size_per_gpu": work.rows_each,
                "gradient_accumulation_steps": work.micro_batches,
                "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
                "zero_allow_untested_optimizer": True,
                "steps_per_print": 10**9,
                # the reentrant kind fails on a stage whose inputs carry no gradient, such as ids
                "pipeline": {"activation_checkpoint_interval": int(recompute), "use_reentrant": False},
            },
        )  # fmt: skip
        skipped = {schedule.OptimizerStep: lambda engine, **_: None}
        self._engine._INSTRUCTION_MAP = {**self._engine._INSTRUCTION_MAP, **skipped}
        self._cell = next(child for child in module.children() if isinstance(child, Cell))
        one = len(context.inputs) == 1
        self._batches: list[tuple[Tensor | Tensors, Tensor]] = [
            (inputs[0] if one else inputs, targets)
            for inputs, (targets,) in zip(
                split(context.inputs, work.micro_batches), split([context.targets], work.micro_batches), strict=True
            )
        ]

    def step(self) -> None:
        """Forward, backward and reduction of a mini-batch."""
        self._engine.train_batch(self._data())

    def _data(self) -> Iterator[tuple[Tensor | Tensors, Tensor]]:
        return iter(self._batches)

    def gradients(self) -> Gradients:
        """Of this stage's cell."""
        return self._cell.gradients()

    def clear(self) -> None:
        """Drops them."""
        self._cell.clear()
