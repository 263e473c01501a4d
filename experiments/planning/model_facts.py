"""What a plan needs of a model beside the costs of its layers, and what follows for its bytes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import lru_cache

from experiments.base.cluster import Cluster
from experiments.base.workload import Measurable
from suite.pipeline.model.layers import check_frozen, count_parameters, ties_of, trainable
from suite.pipeline.planning.communicators import P2P_BYTES, collective_bytes
from suite.pipeline.planning.costs import LayerCost
from suite.pipeline.planning.devices import Machine
from suite.pipeline.runtime.gradient_reducer import ACCELERATOR_BUCKET_BYTES
from suite.settings import OptimizerSettings
from suite.training.adafactor import BATCH_BYTES, BATCH_COPIES
from suite.training.update_rule import state_shapes


@dataclass(frozen=True)
class KeyedWork:
    """A workload that compares equal to others with the same costs."""

    work: Measurable = field(compare=False)
    key: str


@dataclass(frozen=True)
class ModelFacts:
    parameters: int
    """Without copies of tied ones."""
    tied: int
    """Parameters that several layers share."""
    state_bytes: tuple[int, ...]
    """Of each layer, the optimizer's state that has not a value per parameter value: Adafactor's rows and columns."""


def model_facts(work: Measurable) -> ModelFacts:
    """Returns the facts of a workload's model. Raises SettingError for wrongly frozen parameters (``check_frozen``)."""
    return _model_facts(KeyedWork(work, work.key()))


@lru_cache(maxsize=64)
def _model_facts(keyed: KeyedWork) -> ModelFacts:
    """Cached, because building a large model takes seconds."""
    layers, _ = keyed.work.build()
    check_frozen(layers)
    ties = {tie for layer in layers for tie in ties_of(layer).values()}
    shapes = [[tuple(parameter.shape) for parameter in trainable(layer)] for layer in layers]
    state_bytes = tuple(sum(_state_bytes(shape, keyed.work.optimizer) for shape in of_layer) for of_layer in shapes)
    return ModelFacts(count_parameters(layers), len(ties), state_bytes)


def _state_bytes(shape: tuple[int, ...], optimizer: OptimizerSettings) -> int:
    per_value = {*optimizer.state_names, "step"}
    return sum(4 * math.prod(of) for name, of in state_shapes(shape, optimizer).items() if name not in per_value)


def with_optimizer_state(costs: tuple[LayerCost, ...], work: Measurable) -> tuple[LayerCost, ...]:
    """Returns the costs with the optimizer's state that ``bytes_per_parameter`` does not count, and with room for the
    batches in which Adafactor updates small parameters of a stage: those of a layer by itself may be smaller."""
    facts = model_facts(work)
    batches = BATCH_COPIES * min(BATCH_BYTES, 4 * facts.parameters) if work.optimizer.name == "adafactor" else 0
    return tuple(
        replace(
            cost,
            state_bytes=size,
            update_peak_bytes=max(cost.update_peak_bytes, batches if cost.parameters > cost.frozen else 0),
        )
        for cost, size in zip(costs, facts.state_bytes, strict=True)
    )


def with_communicators(machine: Machine, work: Measurable, cluster: Cluster) -> Machine:
    """Returns the machine with the bytes that communication takes on a GPU."""
    if cluster.kind != "gpu" or (cluster.device is not None and not cluster.device.is_cuda):
        return machine
    pipeline = work.pipeline
    facts = model_facts(work)
    collectives = collective_bytes(pipeline.stages, pipeline.replicas, facts.tied)
    # a bucket that is reduced is less than twice as large as one that is full, beside the gradients that it replaces
    bucket = min(2 * ACCELERATOR_BUCKET_BYTES, 4 * facts.parameters) if pipeline.replicas > 1 else 0
    return replace(machine, p2p_bytes=P2P_BYTES, process_bytes=machine.process_bytes + collectives + bucket)
