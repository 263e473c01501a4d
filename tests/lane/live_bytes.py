"""The bytes alive at the peak of a training step on the stand-in: a check of plans by other means than layer costs.

Nothing is allocated and nothing is computed, so models have any size.
"""

from dataclasses import replace

from experiments.base.cluster import Cluster, parse_cluster
from experiments.planning.choose import try_plan
from experiments.planning.problem import estimated_costs
from experiments.registry import find
from launch.worker.build import PartitionedModel
from models.chunked_loss import set_logits_bytes
from suite.device import fused_by
from suite.pipeline.model.microbatch import ReplicaBatch
from suite.pipeline.model.topology import RankCoord
from suite.pipeline.planning.estimate import OperatorRecorder
from suite.pipeline.planning.memory import UNCOUNTED_BYTES
from suite.pipeline.planning.partition import cell_ranges
from tests.lane.distributed import worker
from tests.lane.mode import StandinMode
from tests.lane.standin import DEVICE
from tests.lane.train import Work, known_metadata
from tests.suite.pipeline.build import assemble


class BytesMode(OperatorRecorder):
    """Counts bytes alone: torch's formulas for operations do not know all operators of a device."""

    def _record(self, *operator):
        pass


def bytes_of_stages(name, settings):
    """Plans a run of R = 1 on H100s and trains a step of each stage. Returns, for each: its layers, the planned bytes
    without the process and its communicators, and the live ones."""
    run = find(name).with_settings(settings)
    stages = run.pipeline.stages
    cluster = parse_cluster(f"1x{stages}xH100", Cluster(stages, 8 << 30, "cpu"))
    assert cluster.device is not None
    # one that never waits for its host, so that a tiny model is cut where a large one is
    cluster = replace(cluster, device=replace(cluster.device, launch_s=0.0))
    planned = try_plan(run, cluster, estimated_costs)
    return [
        (
            sum(planned.plan.layers_per_cell[stage::stages]),
            cell.peak_bytes - cell.process_bytes - UNCOUNTED_BYTES,
            live_bytes(planned, stage),
        )
        for stage, cell in enumerate(planned.plan.cells[:stages])
    ]


def live_bytes(planned, stage):
    """Returns the peak bytes of a stage's tensors in a step without the update: parameters, gradients, activations,
    messages."""
    layers, loss = planned.experiment.build()
    set_logits_bytes(layers, planned.cluster.logits_bytes)
    settings, plan, sample = planned.experiment.pipeline, planned.plan, planned.experiment.sample().largest
    count, coord = settings.micro_batches, RankCoord(stage, settings.stages, 1)
    batch = ReplicaBatch([sample.inputs] * count, [sample.targets] * count, 1.0)
    work, cells = Work(layers, loss, batch), cell_ranges(plan.layers_per_cell, len(layers))
    optimizer = planned.experiment.optimizer
    with worker(stage, settings.stages), known_metadata(work, cells, optimizer.precision), StandinMode():
        model = PartitionedModel(layers, loss, cells, plan.schedule_config)
        engine = assemble(coord, model, optimizer, DEVICE, 0)
        own = batch if coord.is_first or coord.has_loss else None
        with BytesMode() as walked, fused_by(walked.run_fused):
            engine.executor.train(own, 0)
        fixed = (*engine.executor.stage.layers.parameters(), *engine.executor.stage.layers.buffers())
    return sum(tensor.nbytes for tensor in fixed) + int(walked.peak)
