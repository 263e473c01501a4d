"""Whether stages on a GPU return the gradients that the same stages return on the CPU, parameter by parameter.

Two stages in one process, the messages between them handed over: forward without graph, rebuild, backward from the last
micro-batch to the first, as fill-drain walks. No dropout, because the generators of two devices draw unlike numbers.

Tolerance. The two devices add the same numbers in another order. A sum of n products is off by about sqrt(n) u of its
size, u the unit roundoff, as a random walk is; P products stand one behind the other on the way of a gradient, and
their errors are independent. What is measured is the largest deviation of all entries of a parameter's gradient, over
its largest entry; the largest of some millions of deviations is about five of them:

    tolerance = 5 sqrt(P n) u        P = 2 (6 L + 10 L + 1): an encoder layer has 6 products in a row, a decoder layer
                                     10, the head 1, and backward as many as forward
                                     n = the longest sum: vocabulary, width, H, 64A, or the tokens of the mini-batch

A rectifier whose input is as near to zero as it is off may open on one device and not on the other: a whole term of a
gradient, not a rounding. So of several draws that one is taken whose rectifiers stand farthest from their corner.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from launch.gpu.work import Sizes
from models import embedding
from models.feed_forward import FeedForward
from models.loss import TranslationLoss
from models.shape import PADDING, TransformerShape
from models.transformer import layers
from suite.pipeline.boundary import Front, TensorSpec, announced
from suite.pipeline.layers import Tensors
from suite.pipeline.microbatch import MiniBatch, split
from suite.pipeline.skip import Cargo, Routes, find_skips
from suite.pipeline.stage import Kept, Stage
from suite.training.optimizer import named_parameters

Gradients = dict[tuple[int, str], Tensor]

CPU = torch.device("cpu")
DTYPES = (torch.float64, torch.float32)
DRAWS = 8


@dataclass(frozen=True)
class Difference:
    """One parameter: its largest deviation over the largest entry of its gradient on the CPU."""

    layer: int
    name: str
    error: float


@dataclass(frozen=True)
class Comparison:
    """All parameters in one dtype. ``corner`` is the least distance of a rectifier's input from zero."""

    dtype: str
    differences: tuple[Difference, ...]
    tolerance: float
    corner: float

    @property
    def worst(self) -> Difference:
        """The parameter that deviates most."""
        return max(self.differences, key=lambda one: (not math.isfinite(one.error), one.error))

    @property
    def equal(self) -> bool:
        """Whether all are within the tolerance."""
        return self.worst.error <= self.tolerance  # false for what is not a number

    @property
    def fault(self) -> str | None:
        """What is wrong, in a sentence without its end; None if nothing is."""
        if self.equal:
            return None
        worst, beyond = self.worst, sum(not one.error <= self.tolerance for one in self.differences)
        return (
            f"{self.dtype} gradients of this device differ from the CPU's in {beyond} of {len(self.differences)} "
            f"parameters, most in layer {worst.layer}, {worst.name}: by {worst.error:.2g} of its largest entry where "
            f"{self.tolerance:.2g} is allowed"
        )


def compare_all(sizes: Sizes, device: torch.device) -> list[Comparison]:
    """Returns the comparison in fp64 and in fp32, products in full precision."""
    batches = [_pairs(sizes, seed) for seed in range(DRAWS)]
    corners = [_corner(sizes.gradients, batch) for batch in batches]
    corner = max(corners)
    batch = batches[corners.index(corner)]
    return [compare(sizes.gradients, dtype, device, batch, corner) for dtype in DTYPES]


def compare(
    shape: TransformerShape, dtype: torch.dtype, device: torch.device, batch: MiniBatch, corner: float
) -> Comparison:
    """Walks the batch on the CPU and on the device, from the same weights."""
    with _full_precision(), _positions_of_the_cpu():
        here = stages_of(shape, dtype, CPU)
        there = stages_of(shape, dtype, device)
        for one, other in zip(here, there, strict=True):
            other.layers.load_state_dict(one.layers.state_dict())  # each device's generator draws its own
        wanted, found = walk(shape, here, batch), walk(shape, there, batch)
    differences = tuple(Difference(*key, _deviation(found[key], gradient)) for key, gradient in wanted.items())
    return Comparison(str(dtype).removeprefix("torch."), differences, tolerance(shape, dtype, batch), corner)


def tolerance(shape: TransformerShape, dtype: torch.dtype, batch: MiniBatch) -> float:
    """Returns 5 sqrt(P n) u, see above."""
    tokens = sum(tensors[0].numel() for tensors in batch.inputs)
    longest = max(shape.vocabulary, shape.width, shape.feed_forward, shape.attention_width, tokens)
    products = 2 * (16 * shape.layers + 1)
    return 5 * math.sqrt(products * longest) * torch.finfo(dtype).eps / 2


def stages_of(shape: TransformerShape, dtype: torch.dtype, device: torch.device) -> list[Stage]:
    """Returns the encoder's stage and the decoder's."""
    made, loss = _model(shape, dtype)
    encoder, decoder = _cells(shape)
    return [
        Stage(made, [encoder], None, device, "fp32", seed=0),
        Stage(made, [decoder], loss, device, "fp32", seed=0),
    ]


def walk(shape: TransformerShape, stages: Sequence[Stage], batch: MiniBatch) -> Gradients:
    """Forward, rebuild and backward of a mini-batch through both stages; returns the gradients, on the CPU."""
    made, _ = _model(shape, torch.float64)
    first, last = (Routes(find_skips(made), _cells(shape), k) for k in range(2))
    encoder, decoder = stages
    flights = []
    for i, (inputs, targets) in enumerate(zip(batch.inputs, batch.targets, strict=True)):
        inputs, targets = (tuple(t.to(encoder.device) for t in tensors) for tensors in (inputs, targets))
        front = Front(tuple(map(TensorSpec.of, inputs)))
        between = encoder.leaving(front)
        entering, leaving, arriving = first.arriving(front), first.leaving(between), last.arriving(between)
        with torch.no_grad():
            outputs, _ = encoder.forward(inputs, entering, leaving, (), 0, i)
            sent = announced(outputs, leaving.boundary)
            decoder.forward(sent, arriving, None, targets, 0, i)
        flights.append((i, Kept(inputs), Kept(sent), (entering, leaving, arriving), targets))
    for i, kept, received, cargo, targets in reversed(flights):
        _back(encoder, decoder, (kept, received), cargo, targets, i, 1 / batch.weight)
    return {
        key: torch.zeros_like(p, device=CPU) if p.grad is None else p.grad.to(CPU)
        for stage in stages
        for key, p in named_parameters(stage.indices, stage.layers).items()
    }


def _back(
    encoder: Stage, decoder: Stage, kept: tuple[Kept, Kept], cargo: tuple[Cargo, Cargo, Cargo], targets: Tensors,
    i: int, scale: float,
) -> None:  # fmt: skip
    entering, leaving, arriving = cargo
    (objective,), _ = decoder.graph(kept[1], arriving, None, targets, 0, i)
    returned = decoder.backward(kept[1], (torch.full_like(objective, scale),), arriving)
    encoder.graph(kept[0], entering, leaving, (), 0, i)
    encoder.backward(kept[0], returned, entering)


def _model(shape: TransformerShape, dtype: torch.dtype) -> tuple[list[nn.Module], nn.Module]:
    with torch.device("meta"):
        return [layer.to(dtype) for layer in layers(shape)], TranslationLoss(shape.label_smoothing)


def _cells(shape: TransformerShape) -> list[range]:
    return [range(shape.layers + 1), range(shape.layers + 1, shape.list_length)]


def _pairs(sizes: Sizes, seed: int) -> MiniBatch:
    """Pairs of uneven length, so that masks hide something."""
    rows, time, vocabulary = sizes.gradient_rows, sizes.gradient_time, sizes.gradients.vocabulary
    generator = torch.Generator().manual_seed(seed)
    source = torch.randint(1, vocabulary, (rows, time), generator=generator)
    target, labels = (torch.randint(1, vocabulary, (rows, max(1, time - 1)), generator=generator) for _ in range(2))
    for row in range(rows):
        hidden = row % max(1, time // 2)
        source[row, time - hidden :] = PADDING
        target[row, max(1, time - 1 - hidden) :], labels[row, max(1, time - 1 - hidden) :] = PADDING, PADDING
    inputs = split([source, target], sizes.gradient_micro_batches)
    return MiniBatch(inputs, split([labels], sizes.gradient_micro_batches), float((labels != PADDING).sum()))


def _corner(shape: TransformerShape, batch: MiniBatch) -> float:
    """Returns the least distance from zero of all that the rectifiers get."""
    stages, distances = stages_of(shape, torch.float64, CPU), []

    def note(module: nn.Module, inputs: Tensors, output: Tensor) -> None:
        distances.append(float(output.detach().abs().min()))

    for stage in stages:
        for module in stage.layers.modules():
            if isinstance(module, FeedForward):
                module.inward.register_forward_hook(note)
    walk(shape, stages, batch)
    return min(distances)


def _deviation(found: Tensor, wanted: Tensor) -> float:
    largest = float(wanted.abs().max())
    deviation = float((found - wanted).abs().max())
    return deviation / largest if largest else deviation


@contextmanager
def _full_precision() -> Iterator[None]:
    """TF32 off: its products have 10 bits."""
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]


@contextmanager
def _positions_of_the_cpu() -> Iterator[None]:
    """Both devices get the CPU's positions: these are sines in fp32, which two devices round unlike, and by far more
    than products in fp64."""
    of_the_device: Callable[[int, int, Tensor, int], Tensor] = embedding.sinusoids

    def of_the_cpu(length: int, width: int, like: Tensor, start: int = 0) -> Tensor:
        return of_the_device(length, width, torch.empty(0, dtype=like.dtype), start).to(like.device)

    embedding.sinusoids = of_the_cpu
    try:
        yield
    finally:
        embedding.sinusoids = of_the_device  # type: ignore[assignment]
