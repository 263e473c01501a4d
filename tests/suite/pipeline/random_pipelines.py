"""Random pipelines: layers with skips of any length, some parameters frozen, cut into any cells, any schedule."""

import itertools
import random
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from suite.errors import SettingError
from suite.pipeline.model.microbatch import ReplicaBatch
from suite.pipeline.schedule.config import WITH_VIRTUAL_STAGES, ScheduleConfig
from suite.pipeline.schedule.csv_file import cell_to_stage_of, parse_rows
from suite.pipeline.schedule.remat import UNLIMITED
from suite.pipeline.schedule.validate import validate
from tests.micro_batches import split

WIDTH = 3
KINDS = ("output", "apart", "input", "signs")
"""What a layer may give: its output itself, another tensor, what it got itself, integers that have no gradient."""
SECOND = ("same", "apart")
"""What the second output of a layer with two may be."""


@dataclass(frozen=True)
class Pipeline:
    """All that a case is made of; ``skips`` are (giver, taker, kind), ``frozen`` are (layer, parameter)."""

    seed: int
    stages: int
    schedule_config: ScheduleConfig
    cells: tuple[int, ...]
    skips: tuple[tuple[int, int, str], ...]
    frozen: frozenset[tuple[int, str]]
    examples: int
    micro_batches: int
    seconds: tuple[tuple[int, str], ...] = ()
    """(layer, kind) of the layers with a second output."""

    def layers(self) -> list[nn.Module]:
        """Returns the model's layers on the meta device, in fp64."""
        made, seconds = [], dict(self.seconds)
        with torch.device("meta"):
            for at in range(sum(self.cells)):
                takes = tuple(name(skip) for skip in self.skips if skip[1] == at)
                given = [skip for skip in self.skips if skip[0] == at]
                kinds = tuple(kind for _, _, kind in given)
                made.append(Mixing(takes, tuple(map(name, given)), kinds, seconds.get(at)).double())
        for at, parameter in self.frozen:
            made[at].get_parameter(parameter).requires_grad_(False)
        return made

    def batch(self) -> ReplicaBatch:
        """Returns the mini-batch, the last micro-batch smaller where they do not come out even."""
        generator = torch.Generator().manual_seed(self.seed)
        shape = self.examples, WIDTH
        inputs, wanted = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
        return ReplicaBatch(
            split([inputs], self.micro_batches), split([wanted], self.micro_batches), float(self.examples)
        )


def name(skip: tuple[int, int, str]) -> str:
    """Returns a skip's name."""
    return f"{skip[2]} {skip[0]} to {skip[1]}"


class Mixing(nn.Module):
    """Mixes its input with what it takes, and drops some of it."""

    def __init__(
        self, pops: tuple[str, ...], stashes: tuple[str, ...], kinds: tuple[str, ...], second: str | None
    ) -> None:
        super().__init__()
        self.gpipe_pops, self.gpipe_stashes, self.kinds, self.second = pops, stashes, kinds, second
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.empty(WIDTH))

    def reset_parameters(self) -> None:
        self.linear.reset_parameters()
        nn.init.normal_(self.scale, 1.0, 0.2)

    def forward(self, x: Tensor, *taken: Tensor):
        mixed = x
        for at, skip in enumerate(taken):
            mixed = mixed + skip * (0.3 + 0.2 * at)
        dropped = nn.functional.dropout(torch.tanh(self.linear(mixed)), 0.2, self.training)
        out = 0.7 * mixed + self.scale * dropped
        given = {"output": out, "apart": torch.sin(out), "input": x, "signs": (mixed > 0).to(torch.int64)}
        seconds = [] if self.second is None else [out if self.second == "same" else torch.cos(out)]
        return (out, *seconds, *[given[kind] for kind in self.kinds])


class SquaredError(nn.Module):
    def forward(self, out: Tensor, wanted: Tensor):
        loss = (out - wanted).square().sum()
        return loss, loss.detach()


def draw_pipeline(seed: int, stages: int) -> Pipeline:
    """Returns the pipeline of a seed."""
    dice = random.Random(seed * 10 + stages)
    schedule = dice.choice(["fill_drain", "1f1b", "zero_bubble", "csv", *(["interleaved"] if stages > 1 else [])])
    several = (schedule in WITH_VIRTUAL_STAGES or schedule == "csv") and stages > 1
    virtual_stages = dice.randint(2 if schedule == "interleaved" else 1, 4) if several else 1
    count = stages * virtual_stages
    graphs = tuple(dice.choice((0, 1, 2, UNLIMITED)) for _ in range(count if dice.random() < 0.3 else 1))
    layers = count + dice.randint(0, 4)
    cuts = [0, *sorted(dice.sample(range(1, layers), count - 1)), layers]
    pairs = [(giver, taker) for giver in range(layers) for taker in range(giver + 1, layers)]
    chosen = dice.sample(pairs, min(len(pairs), dice.randint(0, 6)))
    skips = tuple(sorted((giver, taker, dice.choice(KINDS)) for giver, taker in chosen))
    share = dice.choice((0.0, 0.0, 0.3, 0.7))
    parameters = [(at, parameter) for at in range(layers) for parameter in ("linear.weight", "linear.bias", "scale")]
    kept = dice.choice(parameters)  # with nothing to train a stage is refused
    begin = dice.choice((0, 0, cuts[1]))  # sometimes the first cell sends activations that need no gradient
    frozen = frozenset(one for one in parameters if (dice.random() < share or one[0] < begin) and one != kept)
    cells = tuple(end - begin for begin, end in itertools.pairwise(cuts))
    examples = dice.randint(1, 9)
    micro_batches = dice.randint(1, min(examples, 7))
    rows = draw_rows(dice, draw_cell_to_stage(dice, stages, virtual_stages), micro_batches) if schedule == "csv" else ()
    schedule_config = ScheduleConfig(schedule, graphs, virtual_stages, rows)  # type: ignore[arg-type]
    two = [at for at in range(layers - 1) if dice.random() < 0.4]  # the last one ends with the loss
    seconds = tuple((at, dice.choice(SECOND)) for at in two)
    return Pipeline(seed, stages, schedule_config, cells, skips, frozen, examples, micro_batches, seconds)


def draw_cell_to_stage(dice: random.Random, stages: int, virtual_stages: int) -> tuple[int, ...]:
    """Returns the stage of each cell: any that gives each stage equally many, the first cell to stage 0."""
    rest = list(range(stages)) * virtual_stages
    rest.remove(0)
    dice.shuffle(rest)
    return (0, *rest)


def draw_rows(dice: random.Random, cell_to_stage: tuple[int, ...], micro_batches: int) -> tuple[str, ...]:
    """Returns a schedule as a file has it, in which some backwards are split: I where B was, W anywhere after it."""
    while True:
        rows = _draw_order(dice, cell_to_stage, micro_batches)
        for row in rows:
            for action in [action for action in row if "B" in action]:
                if dice.random() < 0.5:
                    at = row.index(action)
                    row[at] = action.replace("B", "I")
                    row.insert(dice.randint(at + 1, len(row)), action.replace("B", "W"))
        texts = tuple(map(" ".join, rows))
        with suppress(SettingError):  # too many messages in flight
            validate(parse_rows(texts), micro_batches, cell_to_stage=cell_to_stage_of(texts))
            return texts


def _draw_order(dice: random.Random, cell_to_stage: tuple[int, ...], micro_batches: int) -> list[list[str]]:
    """Returns each stage's part of a random order of all actions, in which no action waits for a later one."""
    cells = range(len(cell_to_stage))
    path = [(cell, "F") for cell in cells] + [(cell, "B") for cell in reversed(cells)]
    done = [0] * micro_batches
    rows: list[list[str]] = [[] for _ in range(1 + max(cell_to_stage))]
    while min(done) < len(path):
        first = dice.random() < 0.5  # else any that may go on; none overtakes the one before it
        may = [i for i, at in enumerate(done) if at < len(path) and (i == 0 or done[i - 1] > at)]
        i = may[0] if first else dice.choice(may)
        cell, kind = path[done[i]]
        rows[cell_to_stage[cell]].append(f"{cell}{kind}{i}")
        done[i] += 1
    return rows
