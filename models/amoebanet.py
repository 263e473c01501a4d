"""AmoebaNet-D (L, D), the image model of the paper's Tables 1 to 3, as a list of layers.

    stem | reduction reduction | L/3 normal | reduction | L/3 normal | reduction | L/3 normal | classifier
           D/2        D          D            2D          2D           4D          4D             filters a state

A layer is a cell of the network (Real et al., 2018). Its inputs are the outputs of the two previous layers: the last
one as its input, the one before as a skip, by name (``gpipe_pops``, ``gpipe_stashes``).

    states 0, 1: those two, projected to the cell's width and size
    states 2..6: each the sum of two operations on earlier states (``NORMAL``, ``REDUCTION``)
    output:      some of the states concatenated (``NORMAL_OUTPUT``, ``REDUCTION_OUTPUT``)
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Annotated, Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from models.shape import SHAPE_CONFIG, Share


@dataclass(frozen=True, config=SHAPE_CONFIG)
class AmoebaNetShape:
    """The numbers that define one AmoebaNet-D."""

    layers: Annotated[int, Field(ge=3, multiple_of=3)]
    """L: normal cells, in three equal groups."""
    filters: Annotated[int, Field(ge=4, multiple_of=4)]
    """D: filters of the first group."""
    classes: Annotated[int, Field(ge=2)] = 1000
    """Classes of the image set."""
    channels: Annotated[int, Field(ge=1)] = 3
    """Color channels."""
    stem: Literal["photographs", "small"] = "photographs"
    """photographs divides height and width by 8 first, small does not."""
    label_smoothing: Share = 0.1
    """Probability spread over all classes in the training loss."""
    norm_decay: Share = 0.9997
    """Decay of BatchNorm's moving averages."""

    def __post_init__(self) -> None:
        if self.stem == "photographs" and self.filters < 8:
            raise ValueError(f"filters must be 8 at least with this stem, not {self.filters}")

    @property
    def list_length(self) -> int:
        """Length of the layer list: stem, cells, classifier."""
        return self.layers + 4 + (2 if self.stem == "photographs" else 0)

    def last_size(self, size: int) -> int:
        """Returns the height and width of the classifier's input for images of ``size``: halved, rounded up."""
        for _ in range(5 if self.stem == "photographs" else 2):
            size = -(-size // 2)
        return size


def layers(shape: AmoebaNetShape) -> list[nn.Module]:
    """Returns the layers of AmoebaNet-D (L, D)."""
    photographs = shape.stem == "photographs"
    third = shape.layers // 3
    # (reduces?, filters a state) of each cell
    plan = [(True, shape.filters // 2), (True, shape.filters)] if photographs else []
    plan += [(False, shape.filters)] * third
    for doubled in (2, 4):
        plan += [(True, shape.filters * doubled)] + [(False, shape.filters * doubled)] * third
    width = shape.filters // 4 if photographs else shape.filters
    made: list[Stem | Cell] = [Stem(shape.channels, width, 2 if photographs else 1)]
    before = previous = Source(width, reduced=False)
    for at, (reduces, filters) in enumerate(plan):
        cell = Cell(before, previous, filters, reduces)
        cell.gpipe_pops = (f"output {at - 1}",) if at else ()
        made[-1].gpipe_stashes = (f"output {at}",) if at + 1 < len(plan) else ()
        made.append(cell)
        before, previous = previous, Source(cell.width, reduces)
    for norm_module in (module for layer in made for module in layer.modules() if isinstance(module, nn.BatchNorm2d)):
        norm_module.momentum = 1 - shape.norm_decay
    return [*made, Classifier(previous.width, shape.classes)]


class Source(NamedTuple):
    """An input of a cell: its channels, and whether the cell that computed it halved the size."""

    width: int
    reduced: bool


class _ChannelsLast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.contiguous(memory_format=torch.channels_last)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.contiguous(memory_format=torch.channels_last)


def channels_last(x: Tensor) -> Tensor:
    """Returns images in torch's ``channels_last`` memory format; their gradients too.

    A cell's forward then takes a third of the time on CPUs, and convolutions can use tensor cores. Every cell converts
    its inputs and outputs, so that kernels round equally at every K.
    """
    return _ChannelsLast.apply(x)


def norm(width: int) -> nn.BatchNorm2d:
    """Returns BatchNorm with the epsilon of the authors' code; ``layers`` sets its momentum."""
    return nn.BatchNorm2d(width, eps=1e-3)


class ImageLayer(nn.Module):
    """A layer that initialises its convolutions, linear layers and norms, in the order of the module tree."""

    def reset_parameters(self) -> None:
        for child in self.modules():
            if isinstance(child, nn.Conv2d):
                nn.init.kaiming_normal_(child.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(child, nn.Linear):
                nn.init.normal_(child.weight, std=0.01)
                nn.init.zeros_(child.bias)
            elif isinstance(child, nn.BatchNorm2d):
                child.reset_parameters()


class Stem(ImageLayer):
    """Images (batch, channels, height, width) -> (batch, width, height / stride, width / stride)."""

    gpipe_stashes: tuple[str, ...] = ()

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(channels, width, 3, stride=stride, padding=1, bias=False)
        self.norm = norm(width)

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        output = channels_last(self.norm(self.convolution(images)))
        return (output,) * (1 + len(self.gpipe_stashes))


class Classifier(ImageLayer):
    """Mean over places, then scores of the classes; initial scores are near zero."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.scores = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.scores(x.mean((2, 3)))


def relu_convolutions(*steps: tuple[int, int, tuple[int, int], tuple[int, int]]) -> nn.Sequential:
    """Returns ReLU, convolution and norm for each (from, to, kernel, stride)."""
    parts: list[nn.Module] = []
    for narrow, wide, kernel, stride in steps:
        padding = (kernel[0] // 2, kernel[1] // 2)
        parts += [nn.ReLU(), nn.Conv2d(narrow, wide, kernel, stride, padding, bias=False), norm(wide)]
    return nn.Sequential(*parts)


def bottleneck(width: int, *steps: tuple[tuple[int, int], tuple[int, int]]) -> nn.Sequential:
    """Returns a convolution for each (kernel, stride) at a quarter of the width, between two of 1 x 1."""
    narrow, one = width // 4, (1, 1)
    inner = [(narrow, narrow, kernel, stride) for kernel, stride in steps]
    return relu_convolutions((width, narrow, one, one), *inner, (narrow, width, one, one))


def conv_1x1(width: int, stride: int) -> nn.Module:
    return relu_convolutions((width, width, (1, 1), (stride, stride)))


def conv_3x3(width: int, stride: int) -> nn.Module:
    return bottleneck(width, ((3, 3), (stride, stride)))


def conv_1x7_7x1(width: int, stride: int) -> nn.Module:
    return bottleneck(width, ((1, 7), (1, stride)), ((7, 1), (stride, 1)))


def max_pool_2x2(width: int, stride: int) -> nn.Module:
    """Rounded up, so that odd sizes fit the other operations; at stride 1 it needs a row and column more."""
    return nn.MaxPool2d(2, stride, ceil_mode=True)


def max_pool_3x3(width: int, stride: int) -> nn.Module:
    return nn.MaxPool2d(3, stride, padding=1)


def avg_pool_3x3(width: int, stride: int) -> nn.Module:
    """A 3 x 3 mean, over fewer values at the edge."""
    return nn.AvgPool2d(3, stride, padding=1, count_include_pad=False)


def identity(width: int, stride: int) -> nn.Module:
    """The state itself."""
    assert stride == 1, "a state of the cell's inputs must be made smaller"
    return nn.Identity()


class HalfSize(nn.Module):
    """Halves height and width without dropping three of four positions: two strided convolutions, one shifted."""

    def __init__(self, narrow: int, wide: int) -> None:
        super().__init__()
        self.even = nn.Conv2d(narrow, wide // 2, 1, stride=2, bias=False)
        self.odd = nn.Conv2d(narrow, wide - wide // 2, 1, stride=2, bias=False)
        self.norm = norm(wide)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(x)
        shifted = F.pad(x[:, :, 1:, 1:], (0, 1, 0, 1))
        return self.norm(torch.cat((self.even(x), self.odd(shifted)), dim=1))


Operation = Callable[[int, int], nn.Module]

# Two (state, operation) for each new state. Of the outputs that were published for the normal cell, these alone give
# the sizes that the GPipe paper prints (Table 1).
NORMAL: tuple[tuple[tuple[int, Operation], tuple[int, Operation]], ...] = (
    ((1, conv_1x1), (1, max_pool_3x3)),
    ((1, identity), (0, conv_1x7_7x1)),
    ((0, conv_1x1), (0, conv_1x7_7x1)),
    ((2, max_pool_3x3), (2, identity)),
    ((1, avg_pool_3x3), (5, conv_1x1)),
)
NORMAL_OUTPUT = (0, 3, 4, 6)

REDUCTION: tuple[tuple[tuple[int, Operation], tuple[int, Operation]], ...] = (
    ((0, max_pool_2x2), (0, max_pool_3x3)),
    ((2, identity), (1, conv_3x3)),
    ((2, conv_1x7_7x1), (2, max_pool_3x3)),
    ((3, identity), (1, max_pool_2x2)),
    ((2, avg_pool_3x3), (3, conv_1x1)),
)
REDUCTION_OUTPUT = (4, 5, 6)


class Cell(ImageLayer):
    """(previous output, the one before it) -> output, also stashed as a skip if a later cell pops it."""

    gpipe_pops: tuple[str, ...] = ()
    gpipe_stashes: tuple[str, ...] = ()

    def __init__(self, before: Source, previous: Source, filters: int, reduces: bool) -> None:
        super().__init__()
        table = list(chain.from_iterable(REDUCTION if reduces else NORMAL))
        self.output: tuple[int, ...] = REDUCTION_OUTPUT if reduces else NORMAL_OUTPUT
        self.width = filters * len(self.output)
        self.first = relu_convolutions((previous.width, filters, (1, 1), (1, 1)))
        self.second: nn.Module = nn.Identity()
        if previous.reduced:
            self.second = HalfSize(before.width, filters)
        elif before.width != filters:
            self.second = relu_convolutions((before.width, filters, (1, 1), (1, 1)))
        self.sources = tuple(source for source, _ in table)
        self.operations = nn.ModuleList(make(filters, 2 if reduces and source < 2 else 1) for source, make in table)

    def forward(self, previous: Tensor, before: Tensor | None = None) -> tuple[Tensor, ...]:
        previous = channels_last(previous)
        states = [self.first(previous), self.second(previous if before is None else channels_last(before))]
        for at in range(0, len(self.sources), 2):
            one, other = (self.operations[i](states[self.sources[i]]) for i in (at, at + 1))
            states.append(one + other)
        output = channels_last(torch.cat([states[at] for at in self.output], dim=1))
        return (output,) * (1 + len(self.gpipe_stashes))
