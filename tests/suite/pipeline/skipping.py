"""A small model of skips and BatchNorm: short and long skips, an output as a skip, one of integers, one unused."""

import torch
from torch import Tensor, nn

WIDTH = 4


class Enter(nn.Module):
    """Images (batch, 2, 3, 3) -> (batch, WIDTH, 3, 3); gives its output, that squashed, the signs, idle ones."""

    gpipe_stashes = ("output 0", "far", "signs", "idle")

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(2, WIDTH, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(WIDTH, momentum=0.3)
        self.idle = nn.Parameter(torch.empty(2))

    def reset_parameters(self) -> None:
        self.convolution.reset_parameters()
        self.norm.reset_parameters()
        nn.init.ones_(self.idle)

    def forward(self, images: Tensor):
        out = self.norm(self.convolution(images))
        return out, out, out.tanh(), (images[:, :1] > 0).to(torch.int64), self.idle * 3


class Middle(nn.Module):
    """Mixes its input with the skips it takes; drops some of it."""

    def __init__(self, pops: tuple[str, ...] = (), stashes: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.gpipe_pops, self.gpipe_stashes = pops, stashes
        self.convolution = nn.Conv2d(WIDTH, WIDTH, 1)
        self.norm = nn.BatchNorm2d(WIDTH, momentum=0.3)

    def forward(self, x: Tensor, *skips: Tensor):
        for at, skip in enumerate(skips):
            if skip.is_floating_point() and skip.ndim > 1:
                x = x + skip * (0.3 + at)
            elif skip.ndim > 1:
                x = x * (1 + 0.1 * skip)
        out = torch.relu(self.norm(self.convolution(x)))
        out = nn.functional.dropout(out, 0.2, self.training) + x
        return (out, *[out for _ in self.gpipe_stashes])


class Leave(nn.Module):
    """(batch, WIDTH, 3, 3) -> scores (batch, 3)."""

    gpipe_pops = ("far",)

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, far: Tensor):
        return self.scores((x + far).mean((2, 3)))


def skipping_layers(dtype: torch.dtype = torch.float32) -> list[nn.Module]:
    """Layer 0 gives to layers 2, 3, 4 and 5; layers 1 and 2 give to those two after them."""
    with torch.device("meta"):
        layers = [
            Enter(),
            Middle(stashes=("output 1",)),
            Middle(pops=("output 0", "signs"), stashes=("output 2",)),
            Middle(pops=("output 1",)),
            Middle(pops=("output 2", "idle")),
            Leave(),
        ]
    return [layer.to(dtype) for layer in layers]


class SumOfErrors(nn.Module):
    def forward(self, scores: Tensor, labels: Tensor):
        loss = nn.functional.cross_entropy(scores, labels, reduction="sum")
        return loss, (scores.argmax(1) == labels).sum().to(loss.dtype)


def skipping_batch(examples: int, seed: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(examples, 2, 3, 3, generator=generator, dtype=torch.float64) * 2 + 1
    return images.to(dtype), torch.randint(0, 3, (examples,), generator=generator)
