"""Trains what the grammar makes by the engine and by plain PyTorch, and compares gradients and weights."""

import random
from collections import defaultdict
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from experiments.custom.experiment import find_custom
from launch.backends.processes import run_processes
from launch.diff.plain_training import backward, build_layers, forward
from launch.worker.build import PartitionedModel, make_executor, make_stage_optimizer
from suite.errors import SettingError
from suite.pipeline.model.topology import RankCoord
from suite.pipeline.planning.partition import cell_ranges
from suite.pipeline.runtime.p2p import MessageTimeout
from suite.pipeline.runtime.worker_status import WorkerStatus
from suite.pipeline.schedule.config import ScheduleConfig
from suite.settings import PipelineSettings
from tests.suite.pipeline.build import CPU, join
from tests.suite.pipeline.runtime.test_random_gradients import leave

STEPS, TOLERANCE, AT_ONCE = 3, 2e-5, 25


def refusal(source):
    """Returns what is said about a model before a worker starts, empty if nothing; or raises."""
    try:
        said = find_custom(source).trial_errors()
    except SettingError as error:
        said = [str(error)]
    return said[0] if said else ""


def trained(source, rank):
    """Returns the gradients and weights of each step of this worker's stage."""
    chosen, dice, found = find_custom(source), random.Random(source), {}
    pipeline, config = chosen.pipeline, ScheduleConfig.from_settings(chosen.pipeline)
    coord = RankCoord(rank, pipeline.stages, pipeline.replicas, config.cell_to_stage(pipeline.stages))
    layers, loss = chosen.build()
    cuts = sorted(dice.sample(range(1, len(layers)), pipeline.stages * pipeline.virtual_stages - 1))
    sizes = [end - begin for begin, end in zip([0, *cuts], [*cuts, len(layers)], strict=True)]
    model = PartitionedModel(layers, loss, cell_ranges(sizes, len(layers)), config)
    status = WorkerStatus(MessageTimeout(60.0))
    executor, groups = make_executor(coord, model, CPU, chosen.optimizer.precision, chosen.train.seed, status)
    optimizer = make_stage_optimizer(executor, groups, model, chosen.optimizer, True, chosen.update_factors)
    parameters, data = executor.stage.named_parameters(), chosen.data_source(Path(), coord)
    for step in range(STEPS):
        if step == 1:  # leaves no trace
            executor.evaluate(data.batch(step), step)
        sums = executor.train(data.batch(step), step)

        optimizer.on_gradients = partial(_keep_gradients, optimizer, parameters, found, step)
        assert optimizer.update(sums, step).applied
        found |= {(step, "weight", key): parameter.detach().clone().numpy() for key, parameter in parameters.items()}
    dist.barrier()
    leave(groups)
    return found


def _keep_gradients(optimizer, parameters, found, step):
    for key, parameter in parameters.items():
        if parameter.requires_grad:
            found[step, "gradient", key] = optimizer.gradient(key).detach().clone().numpy()


def train_all(rank, world, rendezvous, sources):
    join(rank, world, rendezvous)
    return [trained(source, rank) for source in sources]


def plainly(source):
    """Returns the same of the whole model, of the user's own objects, in plain PyTorch."""
    chosen, found = find_custom(source), {}
    count = chosen.pipeline.micro_batches * chosen.pipeline.replicas
    chosen = chosen.with_pipeline(PipelineSettings(micro_batches=count))
    layers, loss = build_layers(chosen, CPU)
    named = {(index, name): p for index, layer in enumerate(layers) for name, p in layer.named_parameters()}
    distinct = {id(p): (p, chosen.update_factors("{}.{}".format(*key), p)[0]) for key, p in reversed(named.items())}
    data = chosen.data_source(Path(), RankCoord(0, 1, 1))
    groups = [{"params": [p], "lr": chosen.optimizer.learning_rate * factor} for p, factor in distinct.values()]
    optimizer = torch.optim.SGD(groups)
    for step in range(STEPS):
        batch = data.batch(step)
        for i in range(len(batch)):
            backward(forward(layers, loss, batch, i, chosen, step, CPU), batch.divisor)
        for key, p in named.items():
            if p.requires_grad:
                found[step, "gradient", key] = (torch.zeros_like(p) if p.grad is None else p.grad.clone()).numpy()
        optimizer.step()
        optimizer.zero_grad()
        found |= {(step, "weight", key): p.detach().clone().numpy() for key, p in named.items()}
    return found


def differences(found, wanted):
    """Returns what of the stages' tensors is not, up to rounding, what it is in plain PyTorch."""
    told = []
    for key, tensor in wanted.items():
        others = [stage[key] for stage in found if key in stage]
        if not others:
            told.append(f"{key} is on no stage")
        for other in others:
            off = float(abs(other.astype(float) - tensor).max(initial=0))
            norm = float((tensor.astype(float) ** 2).sum() ** 0.5)
            if not off <= TOLERANCE * norm + 1e-7:
                told.append(f"{key} is off by {off:.3g}, its norm is {norm:.3g}")
    told += [f"{key} is not in plain PyTorch" for stage in found for key in stage if key not in wanted]
    return told


def outcomes(sources):
    """Returns by source "trained", "refused: " and the sentence, or what is wrong."""
    found, by_world = {}, defaultdict(list)
    torch.set_num_threads(1)
    for source in sources:
        try:
            said = refusal(source)
        except Exception as error:
            found[source] = f"DEFECT: {type(error).__name__}: {error}"
            continue
        if said:
            is_sentence = "\n" not in said and len(said) < 1000 and "defect of the suite" not in said
            found[source] = f"refused: {said}" if is_sentence else f"NO SENTENCE: {said}"
        else:
            pipeline = find_custom(source).pipeline
            by_world[pipeline.stages * pipeline.replicas].append(source)
    for world, several in by_world.items():
        for at in range(0, len(several), AT_ONCE):
            found |= _compared(several[at : at + AT_ONCE], world)
    return found


def _compared(sources, world):
    try:
        stages = run_processes(train_all, world, sources)
    except Exception as error:
        if len(sources) > 1:  # one of them fails
            half = len(sources) // 2
            return _compared(sources[:half], world) | _compared(sources[half:], world)
        return {sources[0]: f"FAILS: {error}"}
    found = {}
    for source, *of_source in zip(sources, *stages, strict=True):
        try:
            told = differences(of_source, plainly(source))
        except Exception as error:
            told = [f"plain PyTorch fails: {type(error).__name__}: {error}"]
        found[source] = f"DIFFERS: {'; '.join(told[:3])}" if told else "trained"
    return found
