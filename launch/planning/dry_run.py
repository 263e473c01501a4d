"""A dry run: one training step of every stage with fake tensors, which have shapes and no values.

    plan -> cells, schedule --> the run's own stage and executor, on fake tensors --> bytes alive at the peak
                                messages: a process group that sends and receives nothing

It checks the bytes of a plan independently of the layer costs that the plan is made of: at the sizes of the paper, on
any machine, because nothing is allocated and nothing is computed.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend "fake"
from torch.utils._python_dispatch import _disable_current_modes

from experiments.base.cluster import parse_cluster
from experiments.planning.plan_report import PlanReport
from experiments.planning.planner import estimated_costs, try_plan
from experiments.registry import find
from experiments.report.table import ReportProgress, Table, Value
from experiments.tasks import workload
from experiments.translation.runs import MULTILINGUAL_RUNS
from launch.worker.devices import this_machine
from suite.pipeline.model.microbatch import MiniBatch
from suite.pipeline.model.topology import RankCoord, make_groups
from suite.pipeline.planning.devices import GIB
from suite.pipeline.planning.estimate import OpCostMode, autocast_of
from suite.pipeline.planning.partition import cell_ranges
from suite.pipeline.runtime.boundary import CutSpec
from suite.pipeline.runtime.executor import CellLinks, Executor
from suite.pipeline.runtime.metadata import BoundaryMetadata
from suite.pipeline.runtime.p2p import Deadline, LocalMessages, P2PCommunicator
from suite.pipeline.runtime.shape_inference import ShapeInference, make_fake
from suite.pipeline.runtime.skip import SkipLayout, communicating_pairs, find_skips
from suite.pipeline.runtime.stage import Stage

CPU = torch.device("cpu")
DEADLINE_S = 60.0


class _Messages(P2PCommunicator):
    """Messages of a cell whose input metadata is known: a receive of fake tensors would bring no values."""

    metadata: BoundaryMetadata

    def recv_metadata(self, names: Sequence[str]) -> BoundaryMetadata:
        return self.metadata


class _Walk(Executor):
    """The executor without the sums of a step's losses, which have no values."""

    def walk(self, batch: MiniBatch | None) -> None:
        """Runs one training step."""
        self.stage.train(True)
        self._run(batch, 0, train=True)


def live_bytes(planned: PlanReport, stage: int) -> int:
    """Returns the peak bytes of the tensors of one stage in a training step without the update: parameters, gradients,
    activations, messages. The plan must have R = 1."""
    work, plan = planned.work, planned.plan
    layers, loss = planned.build()
    stages, count = work.pipeline.stages, work.pipeline.micro_batches
    cells, skips = cell_ranges(plan.layers_per_cell, len(layers)), find_skips(layers)
    is_bf16 = work.optimizer.precision == "bf16"
    coord = RankCoord(stage, stages, 1)
    autocast = autocast_of(planned.layer_costs.device)
    with _fake_processes(stages), FakeTensorMode(allow_non_fake_inputs=True), autocast, CPU:
        sample = work.sample().largest
        inputs, targets = (tuple(map(torch.empty_like, part)) for part in (sample.inputs, sample.targets))
        cuts = ShapeInference(layers, is_bf16).infer_all(CutSpec.of(inputs))
        own = cells[stage::stages]
        model = Stage(
            layers, own, loss if coord.is_last else None, CPU, work.optimizer.precision, 0,
            plan.schedule_config.defers_weight_grads, _fake_layer,
        )  # fmt: skip
        groups = make_groups(coord, DEADLINE_S, communicating_pairs(skips, cells, stages))
        links, local = [], LocalMessages()
        for at, cell in enumerate(own):
            p2p = None
            if stages > 1:
                flow = plan.schedule_config.flow_control(stages)
                p2p = _Messages(coord, groups, CPU, Deadline(DEADLINE_S), local, at, flow)
                p2p.metadata = BoundaryMetadata((cuts[cell.start],) * count, 0)
            links.append(CellLinks(SkipLayout(skips, cells, at * stages + stage), p2p))
        batch = MiniBatch([inputs] * count, [targets] * count, 1.0) if coord.is_first or coord.is_last else None
        with OpCostMode(math.inf, math.inf) as walked:
            _Walk(coord, model, links, plan.schedule_config).walk(batch)
    fixed = (*model.layers.parameters(), *model.layers.buffers())
    return sum(tensor.nbytes for tensor in fixed) + int(walked.peak)


@contextmanager
def _fake_processes(count: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _fake_layer(layer: nn.Module, seed: int, device: torch.device) -> nn.Module:
    """Returns a copy of a layer with fake tensors and without gradients."""
    with _disable_current_modes():
        made = copy.deepcopy(layer)
    make_fake(made)
    return made


MICRO_BATCHES = 6
"""Enough to fill what the runtime keeps in flight."""

HEADINGS = (
    "experiment", "K", "M", "stage", "layers", "planned GiB (computed)", "dry run GiB (computed)", "planned / dry run",
)  # fmt: skip


def dry_run_table(report: ReportProgress) -> Table:
    """Returns the planned bytes of each stage of the five translation runs beside those of a dry run.

    Each has the paper's sizes and the run's own micro-batches on K H100s. R = 1 and M = 6 keep it to minutes. With so
    few micro-batches a plan would keep all activations; they are recomputed, as in the whole run.
    """
    plans = [_plan_of(run.__name__) for run in MULTILINGUAL_RUNS]
    total = sum(planned.work.pipeline.stages for planned in plans)
    rows: list[list[Value]] = []
    for planned in plans:
        pipeline = planned.work.pipeline
        for stage, cell in enumerate(planned.plan.cells):
            report(len(rows), total, f"{planned.work.name}, stage {stage}")
            walked, expected = live_bytes(planned, stage), cell.peak_bytes - cell.process_bytes
            layers = planned.plan.layers_per_cell[stage]
            rows.append(
                [
                    planned.work.name, pipeline.stages, pipeline.micro_batches, stage, layers, expected / GIB,
                    walked / GIB, expected / walked,
                ]
            )  # fmt: skip
    return Table(
        "dry_run", "Planned memory of every stage beside a dry run with fake tensors", HEADINGS, rows,
        [
            "Parameters, gradients, activations and messages. Without the process itself and its communicators. The "
            "plan also counts the state of the optimizer, Adafactor, which the dry run does not have.",
            "The dry run's operators are those of the CPU, with the formats of CUDA's autocast: on a GPU, attention "
            "saves other tensors.",
        ],
    )  # fmt: skip


def _plan_of(name: str) -> PlanReport:
    run = find(name)
    stages, each = run.pipeline.stages, run.batch // (run.pipeline.replicas * run.pipeline.micro_batches)
    settings = (
        f"pipeline.replicas=1 pipeline.micro_batches={MICRO_BATCHES} train.batch_tokens={MICRO_BATCHES * each} "
        "pipeline.remat=except_last"
    )
    return try_plan(
        workload(run.with_settings(settings)), parse_cluster(f"1x{stages}xH100", this_machine()), estimated_costs
    )
