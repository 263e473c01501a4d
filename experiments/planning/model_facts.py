"""What a plan needs of a model beside the costs of its layers, and what follows for its bytes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import lru_cache

import torch

from experiments.base.cluster import Cluster
from experiments.base.workload import Measurable
from experiments.planning.plan_report import LayerCosts
from suite.pipeline.model.layers import check_frozen, count_parameters, ties_of, trainable
from suite.pipeline.planning.devices import P2P_BYTES, collective_bytes
from suite.pipeline.planning.memory import FROZEN_BYTES, bytes_per_parameter
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
    """Of each layer, the optimizer's state that has not a value per parameter value: Adafactor's rows and columns; and
    what frozen parameters take more than in fp32."""
    not_fp32: tuple[tuple[int, int], ...]
    """Of each layer, the values of its trained parameters that are not fp32, and their bytes."""


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
    state_bytes = tuple(
        sum(_state_bytes(shape, keyed.work.optimizer) for shape in of_layer)
        + sum(each.nbytes - FROZEN_BYTES * each.numel() for each in layer.parameters() if not each.requires_grad)
        for layer, of_layer in zip(layers, shapes, strict=True)
    )
    others = [[each for each in trainable(layer) if each.dtype != torch.float32] for layer in layers]
    not_fp32 = tuple((sum(each.numel() for each in own), sum(each.nbytes for each in own)) for own in others)
    return ModelFacts(count_parameters(layers), len(ties), state_bytes, not_fp32)


def _state_bytes(shape: tuple[int, ...], optimizer: OptimizerSettings) -> int:
    per_value = {*optimizer.state_names, "step"}
    return sum(4 * math.prod(of) for name, of in state_shapes(shape, optimizer).items() if name not in per_value)


def costs_of_run(layer_costs: LayerCosts, work: Measurable, cluster: Cluster) -> LayerCosts:
    """Returns the costs with the optimizer's state that ``bytes_per_parameter`` does not count, with room for the
    batches in which Adafactor updates small parameters of a stage (those of a layer by itself may be smaller), and on a
    GPU with the bytes that communication takes.

    A trained parameter that is not fp32 has a gradient and a state of its own type, and its stage no ZeRO. Then ZeRO is
    counted for no stage.
    """
    facts = model_facts(work)
    whole, counted = (bytes_per_parameter(work.optimizer, count) for count in (1, work.pipeline.replicas))
    batches = BATCH_COPIES * min(BATCH_BYTES, 4 * facts.parameters) if work.optimizer.name == "adafactor" else 0
    all_trained = [cost.parameters - cost.frozen for cost in layer_costs.costs]
    all_words = [
        trained - others + other_bytes / 4
        for trained, (others, other_bytes) in zip(all_trained, facts.not_fp32, strict=True)
    ]
    has_others = any(others for others, _ in facts.not_fp32)
    costs = tuple(
        replace(
            cost,
            state_bytes=size + (math.ceil(whole * words - counted * trained) if has_others else 0),
            update_peak_bytes=max(cost.update_peak_bytes, batches if cost.parameters > cost.frozen else 0),
        )
        for cost, size, trained, words in zip(layer_costs.costs, facts.state_bytes, all_trained, all_words, strict=True)
    )
    machine, pipeline = layer_costs.machine, work.pipeline
    if cluster.kind == "gpu" and cluster.transport == "nccl":
        collectives = collective_bytes(pipeline.stages, pipeline.replicas, facts.tied)
        # a bucket that is reduced is less than twice as large as one that is full, beside the gradients it replaces
        bucket = min(2 * ACCELERATOR_BUCKET_BYTES, 4 * facts.parameters) if pipeline.replicas > 1 else 0
        machine = replace(machine, p2p_bytes=P2P_BYTES, process_bytes=machine.process_bytes + collectives + bucket)
    return replace(layer_costs, costs=costs, machine=machine)
