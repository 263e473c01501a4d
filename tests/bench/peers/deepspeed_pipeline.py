"""DeepSpeed's PipelineEngine: 1F1B, with and without activation checkpointing."""

from __future__ import annotations

import logging
import os
from typing import Any

from torch import Tensor

from suite.pipeline.model.layers import Tensors
from suite.pipeline.planning.partition import cell_ranges
from suite.training.optimizer import keep_on_the_host
from tests.bench.peers.cell import Cell, CellRunner
from tests.bench.peers.peer import BenchContext


class DeepSpeedPipeline(CellRunner):
    """``PipelineEngine.train_batch`` without its last instruction, the optimizer's step."""

    def __init__(self, context: BenchContext, recompute: bool = False) -> None:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        os.environ["LOCAL_RANK"] = "0"  # DeepSpeed asserts that it is set
        import deepspeed
        from deepspeed.pipe import LayerSpec, PipelineModule
        from deepspeed.runtime.pipe import schedule
        from deepspeed.runtime.pipe.topology import ProcessTopology

        keep_on_the_host()
        deepspeed.utils.logger.setLevel(logging.ERROR)
        deepspeed.init_distributed("gloo", dist_init_required=False)
        work = context.work
        layers, loss = work.build()
        cells = cell_ranges(context.cells[work.stages], len(layers))
        objective = context.objective(loss)
        # DeepSpeed divides by the micro-batches and the replicas; the objective is already divided
        factor = work.micro_batches * work.replicas
        module = PipelineModule(
            layers=[LayerSpec(Cell, layers, cell) for cell in cells],  # one per stage: the stages are the given cells
            topology=ProcessTopology(axes=["data", "pipe"], dims=[work.replicas, work.stages]),
            loss_fn=lambda outputs, targets: objective(outputs, targets) * factor,
            partition_method="uniform",
        )
        self._engine: Any
        self._engine, *_ = deepspeed.initialize(
            model=module,
            model_parameters=list(module.parameters()),
            config={
                "train_micro_batch_size_per_gpu": work.shape[0],
                "gradient_accumulation_steps": work.micro_batches,
                "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
                "zero_allow_untested_optimizer": True,
                "steps_per_print": 10**9,
                # reentrant checkpointing fails on a stage whose inputs have no gradient, such as ids
                "pipeline": {"activation_checkpoint_interval": int(recompute), "use_reentrant": False},
            },
        )
        no_update = {schedule.OptimizerStep: lambda engine, **_: None}
        self._engine._INSTRUCTION_MAP = {**self._engine._INSTRUCTION_MAP, **no_update}
        super().__init__([child for child in module.children() if isinstance(child, Cell)])
        single_input = len(context.inputs) == 1
        self._batches: list[tuple[Tensor | Tensors, Tensor]] = [
            (inputs[0] if single_input else inputs, targets)
            for inputs, (targets,) in zip(context.batch.inputs, context.batch.targets, strict=True)
        ]

    def step(self) -> None:
        self._engine.train_batch(iter(self._batches))
