"""A small model with everything a boundary can carry: floats, ids and masks, a tie, dropout, an input nobody uses."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, WORDS = 6, 11


class Enter(nn.Module):
    """ids (batch, time) -> x, ids, mask, idle; the idle tensor carries a gradient that never comes."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.empty(WORDS, WIDTH))
        self.idle = nn.Parameter(torch.empty(WIDTH))
        self.gpipe_ties = {"table": "words"}

    def reset_parameters(self):
        nn.init.normal_(self.table)
        nn.init.ones_(self.idle)

    def forward(self, ids: Tensor):
        return F.embedding(ids, self.table), ids, ids != 0, self.idle.expand(ids.shape[0], WIDTH) * 2


class Block(nn.Module):
    """Mixes, drops, and hands ids and mask on."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)

    def reset_parameters(self):
        self.mix.reset_parameters()

    def forward(self, x: Tensor, ids: Tensor, mask: Tensor, idle: Tensor):
        x = x + F.dropout(torch.tanh(self.mix(x)), 0.3, self.training) * mask.unsqueeze(-1)
        return x, ids, mask, idle


class Middle(Block):
    """Looks the ids up again in the tied table."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.empty(WORDS, WIDTH))
        self.gpipe_ties = {"table": "words"}

    def reset_parameters(self):
        super().reset_parameters()
        nn.init.zeros_(self.table)  # the first copy's values must win

    def forward(self, x: Tensor, ids: Tensor, mask: Tensor, idle: Tensor):
        return super().forward(x + F.embedding(ids, self.table).cumsum(1), ids, mask, idle)


class Leave(nn.Module):
    """x -> scores (batch, time, words)."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(WIDTH, WORDS)

    def forward(self, x: Tensor, ids: Tensor, mask: Tensor, idle: Tensor):
        return self.out(x)


class Weighted(nn.Module):
    """Passes its input and weights of its own to a function."""

    def __init__(self, function, *shapes):
        super().__init__()
        self.function = function
        self.weights = nn.ParameterList(nn.Parameter(torch.empty(shape)) for shape in shapes)

    def reset_parameters(self):
        for weight in self.weights:
            nn.init.normal_(weight, std=0.4)

    def forward(self, x: Tensor):
        return self.function(x, *self.weights)


class SumLoss(nn.Module):
    """Summed cross entropy over labels that are not 0."""

    def forward(self, scores: Tensor, labels: Tensor):
        loss = F.cross_entropy(scores.flatten(0, 1), labels.flatten(), ignore_index=0, reduction="sum")
        return loss, loss.detach()


class SquareLoss(nn.Module):
    """The sum of squares of the outputs: any loss works where nothing is learned."""

    def forward(self, x: Tensor, target: Tensor):
        objective = x.square().sum()
        return objective, objective.detach()


def toy_layers(dtype: torch.dtype = torch.float32) -> list[nn.Module]:
    with torch.device("meta"):
        layers = [Enter(), Block(), Block(), Middle(), Block(), Leave()]
    return [layer.to(dtype) for layer in layers]


def toy_batch(examples: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """ids and labels (batch, time), with skewed padding: example i has i % 4 padded places."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, WORDS, (examples, 5), generator=generator)
    labels = torch.randint(1, WORDS, (examples, 5), generator=generator)
    for i in range(examples):
        pad = i % 4
        if pad:
            ids[i, -pad:] = labels[i, -pad:] = 0
    return ids, labels
