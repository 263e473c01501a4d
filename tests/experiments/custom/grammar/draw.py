"""Draws a TrainSpec: ``draw:seed_7`` of some productions, ``draw:alone_slots`` of one, in a random pipeline."""

import random
from functools import partial

import torch
from torch import nn

from suite import TrainSpec
from suite.pipeline.schedule.config import pipeline_errors
from suite.settings import PipelineSettings
from tests.experiments.custom.grammar import (
    PRODUCTIONS,
    W,
    autograd,
    modules,
    refused,
    refused_parts,
    several_layers,
    tensors,
)

assert autograd, (modules, refused, refused_parts, several_layers, tensors)  # each has registered its productions
MOST_LAYERS = 6
TRAINED = sorted(name for name, made in PRODUCTIONS.items() if not made.refused)
REFUSED = sorted(name for name, made in PRODUCTIONS.items() if made.refused)
SCHEDULES = [(name, 1) for name in ("fill_drain", "1f1b", "zero_bubble")] + [
    (name, 2) for name in ("interleaved", "zero_bubble", "zbv", "v_half", "v_min")
]
SGD = (
    "optimizer.name=sgd optimizer.beta1=0 optimizer.learning_rate=0.05 optimizer.warmup_steps=1 "
    "optimizer.lr_decay=constant optimizer.max_grad_norm=none tracking.wandb=disabled train.threads=1"
)


def names_of(source):
    """Returns the productions of a source's model."""
    kind, _, what = source.rpartition(":")[2].partition("_")
    if kind == "alone":
        return [what]
    dice = random.Random(int(what))
    names = dice.sample(TRAINED, dice.randint(1, 3))
    if {"hooks_its_output", "computes_forces_in_a_checkpoint"} <= {*names}:
        names.remove(
            "hooks_its_output"
        )  # a gradient that the next layer takes itself meets the hook, but not over a cut
    return names if dice.random() < 0.8 else [*names[1:], dice.choice(REFUSED)]


def layers_of(names, dice, is_alone):
    """Returns 3 to 6 layers of some productions, at least one of them plain; for one alone no more than two stages
    need."""
    parts = [PRODUCTIONS[name].make() for name in names if not PRODUCTIONS[name].changes]
    while sum(map(_count, parts)) >= MOST_LAYERS:
        parts.pop()
    count = sum(map(_count, parts))
    rest = max(1, 2 - count) if is_alone else dice.randint(max(1, 3 - count), MOST_LAYERS - count)
    parts += [[nn.Linear(W, W) if at == 0 else dice.choice((nn.Tanh, nn.Softsign))()] for at in range(rest)]
    chunks = []
    while any(parts):  # each production keeps its order
        chunks.append(dice.choice([part for part in parts if part]).pop(0))
    layers = [layer for chunk in chunks for layer in (chunk if isinstance(chunk, tuple) else (chunk,))]
    linears = [module for layer in layers for module in layer.modules() if type(module) is nn.Linear]
    for name in names:
        if PRODUCTIONS[name].changes:
            PRODUCTIONS[name].make(dice.choice(linears))
    if not any(parameter.requires_grad for layer in layers for parameter in layer.parameters()):
        layers[-1] = nn.Linear(W, W)
    return layers


def _count(chunks):
    return sum(len(chunk) if isinstance(chunk, tuple) else 1 for chunk in chunks)


def pipeline_of(dice, layers, most_replicas):
    """Returns a pipeline of any named schedule that fits."""
    fitting = []
    for stages in (1, 2, 3):
        for schedule, virtual_stages in SCHEDULES:
            made = PipelineSettings(stages=stages, schedule=schedule, virtual_stages=virtual_stages)
            if stages <= layers and not pipeline_errors(made, layers):
                fitting.append(made)
    stages = dice.choice((1, 2, 2, 3))
    chosen = dice.choice([made for made in fitting if made.stages == stages])
    return chosen.model_copy(
        update={
            "replicas": dice.randint(1, most_replicas),
            "micro_batches": dice.choice((1, 2, 4)),
            "remat": dice.choice(("always", "except_last", "never")),
        }
    )


def rates(name, parameter):
    return (0.1 if getattr(parameter, "slow", False) else 1.0), 1.0


def batch(rows, step):
    x = torch.randn(rows, W, generator=torch.Generator().manual_seed(step))
    return x, x[:, :3].argmax(1)


def spec(source):
    """Returns the TrainSpec of a source."""
    names, dice, is_alone = names_of(source), random.Random(source), ":alone_" in source
    layers = layers_of(names, dice, is_alone)
    replicas = min(PRODUCTIONS[name].replicas for name in names)
    if is_alone:
        chosen = PipelineSettings(stages=2, replicas=replicas, micro_batches=2, schedule="zero_bubble")
    else:
        chosen = pipeline_of(dice, len(layers), replicas)
    rows = dice.randint(8, 11)
    settings = " ".join(f"pipeline.{name}={getattr(chosen, name)}" for name in ("schedule", "virtual_stages", "remat"))
    return TrainSpec(
        layers=layers, loss=nn.CrossEntropyLoss(), train=partial(batch, rows), batch_size=rows, steps=3,
        stages=chosen.stages, micro_batches=chosen.micro_batches, replicas=chosen.replicas, param_groups=rates,
        settings=f"{SGD} {settings}",
    )  # fmt: skip


def __getattr__(name):
    if not name.startswith(("seed_", "alone_")):
        raise AttributeError(name)
    return partial(spec, f"{__name__}:{name}")
