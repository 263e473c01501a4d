"""Compares the gradients of stages on a GPU with those of the same stages on the CPU, parameter by parameter.

Two stages run in one process without communication: forward without graph, recomputation, and backward from the last
micro-batch to the first, as in fill-drain. There is no dropout, because the generators of two devices differ.

Tolerance. The two devices add the same numbers in different orders. A sum of n products has a relative error of about
sqrt(n) u (u is the unit roundoff), like a random walk. A gradient passes through P products in sequence, with
independent errors. The measure is the largest deviation of any entry of a parameter's gradient, divided by its largest
entry; the largest of some millions of deviations is about five standard deviations:

    tolerance = 5 sqrt(P n) u        P = 2 (6 L + 10 L + 1): an encoder layer has 6 products in a row, a decoder layer
                                     10, the head 1, and backward as many as forward
                                     n = the longest sum: vocabulary, width, H, 64A, or the tokens of the mini-batch

A ReLU whose input is closer to zero than its error may be active on one device only, which changes a whole term of a
gradient. So the check uses the one of several random batches whose ReLU inputs are farthest from zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from launch.gpu_check.work import Sizes
from models import embedding
from models.blocks import FeedForward
from models.loss import TranslationLoss
from models.shape import PADDING, TransformerShape
from models.transformer import layers
from suite.device import MULTIPLIES_BF16_INTO_FP32
from suite.pipeline.model.layers import Tensors
from suite.pipeline.model.microbatch import MiniBatch, split
from suite.pipeline.runtime.boundary import CutSpec, cast_to_boundary
from suite.pipeline.runtime.skip import SkipLayout, find_skips
from suite.pipeline.runtime.stage import CellMicroBatch, Stage
from suite.pipeline.runtime.weight_grad import weight_grad_sum

Gradients = dict[tuple[int, str], Tensor]

CPU = torch.device("cpu")
DTYPES = (torch.float64, torch.float32)
DRAWS = 8


@dataclass(frozen=True)
class Difference:
    """A parameter's largest deviation, divided by the largest entry of its gradient on the CPU."""

    layer: int
    name: str
    error: float


@dataclass(frozen=True)
class Comparison:
    """All parameters in one dtype. ``margin`` is the smallest absolute value of a ReLU's input."""

    dtype: str
    differences: tuple[Difference, ...]
    tolerance: float
    margin: float

    @property
    def worst(self) -> Difference:
        """The parameter with the largest deviation."""
        return max(self.differences, key=lambda one: (not math.isfinite(one.error), one.error))

    @property
    def equal(self) -> bool:
        """Whether all deviations are within the tolerance."""
        return self.worst.error <= self.tolerance  # false for what is not a number

    @property
    def fault(self) -> str | None:
        """The fault, as a clause; None if there is none."""
        if self.equal:
            return None
        worst, count = self.worst, sum(not one.error <= self.tolerance for one in self.differences)
        return (
            f"{self.dtype} gradients of this device differ from the CPU's in {count} of {len(self.differences)} "
            f"parameters, most in layer {worst.layer}, {worst.name}: by {worst.error:.2g} of its largest entry, "
            f"with {self.tolerance:.2g} allowed"
        )

    def record(self) -> dict[str, Any]:
        """Returns what goes into the JSON."""
        return {
            "dtype": self.dtype, "equal": self.equal, "parameters": len(self.differences),
            "worst": f"layer {self.worst.layer}, {self.worst.name}",
            "measured": {"error": self.worst.error, "least_rectifier_input": self.margin},
            "computed": {"tolerance": self.tolerance},
        }  # fmt: skip


def compare_all(sizes: Sizes, device: torch.device) -> list[Comparison]:
    """Returns the comparisons in fp64 and in fp32, with products in full precision, and that of a sum in bf16."""
    batch, margin = choose_batch(sizes)
    compared = [compare(sizes.gradients, dtype, device, batch, margin) for dtype in DTYPES]
    return [*compared, compare_sum(sizes.gradients.width, device)]


def compare_sum(width: int, device: torch.device) -> Comparison:
    """Compares a weight's gradient that a product of bf16 factors adds to an fp32 sum, as in a run, with the exact."""
    generator = torch.Generator().manual_seed(0)
    total = torch.randn(width, width, generator=generator)
    x, gradient = (torch.randn(width, width, generator=generator).bfloat16() for _ in range(2))
    exact = total.double() + gradient.double().t() @ x.double()
    found = weight_grad_sum(total.to(device), x.to(device), gradient.to(device), torch.float32)
    allowed = torch.finfo(torch.bfloat16).eps  # the product is rounded once
    if device.type in MULTIPLIES_BF16_INTO_FP32:
        allowed = 5 * math.sqrt(width) * torch.finfo(torch.float32).eps / 2
    difference = Difference(0, "sum of products", _deviation(found.cpu(), exact))
    return Comparison("bfloat16", (difference,), allowed, 0.0)


def choose_batch(sizes: Sizes) -> tuple[MiniBatch, float]:
    """Returns the batch whose ReLU inputs are farthest from zero, and how far."""
    batches = [_make_batch(sizes, seed) for seed in range(DRAWS)]
    margins = [_rectifier_margin(sizes.gradients, batch) for batch in batches]
    return batches[margins.index(max(margins))], max(margins)


def compare(
    shape: TransformerShape, dtype: torch.dtype, device: torch.device, batch: MiniBatch, margin: float
) -> Comparison:
    """Runs the batch on the CPU and on the device with the same weights."""
    with exact():
        here = stages_of(shape, dtype, CPU)
        there = stages_of(shape, dtype, device)
        for one, other in zip(here, there, strict=True):
            other.layers.load_state_dict(one.layers.state_dict())  # each device's generator draws its own
        expected, found = run_batch(shape, here, batch), run_batch(shape, there, batch)
    return difference(expected, found, shape, dtype, batch, margin)


def difference(
    expected: Gradients, found: Gradients, shape: TransformerShape, dtype: torch.dtype, batch: MiniBatch, margin: float
) -> Comparison:
    """Compares the gradients of two devices, or of two pipelines."""
    differences = tuple(Difference(*key, _deviation(found[key], gradient)) for key, gradient in expected.items())
    return Comparison(str(dtype).removeprefix("torch."), differences, tolerance(shape, dtype, batch), margin)


def tolerance(shape: TransformerShape, dtype: torch.dtype, batch: MiniBatch) -> float:
    """Returns 5 sqrt(P n) u; see the module's docstring."""
    tokens = sum(tensors[0].numel() for tensors in batch.inputs)
    longest = max(shape.vocabulary, shape.width, shape.feed_forward, shape.attention_width, tokens)
    products = 2 * (16 * shape.layers + 1)
    return 5 * math.sqrt(products * longest) * torch.finfo(dtype).eps / 2


def stages_of(shape: TransformerShape, dtype: torch.dtype, device: torch.device) -> list[Stage]:
    """Returns the encoder's stage and the decoder's."""
    made, loss = model(shape, dtype)
    encoder, decoder = cells_of(shape)
    return [
        Stage(made, [encoder], None, device, "fp32", seed=0),
        Stage(made, [decoder], loss, device, "fp32", seed=0),
    ]


def run_batch(shape: TransformerShape, stages: Sequence[Stage], batch: MiniBatch) -> Gradients:
    """Runs forward, recomputation and backward of a mini-batch through both stages; returns gradients on the CPU."""
    made, _ = model(shape, torch.float64)
    first, last = (SkipLayout(find_skips(made), cells_of(shape), k) for k in range(2))
    encoder, decoder = stages
    saved = []
    for i, (inputs, targets) in enumerate(zip(batch.inputs, batch.targets, strict=True)):
        inputs, targets = (tuple(t.to(encoder.device) for t in tensors) for tensors in (inputs, targets))
        cut = CutSpec.of(inputs)
        between = encoder.infer_output(cut)
        leaving = first.output_boundary(between)
        encoded = CellMicroBatch(inputs, first.input_boundary(cut), leaving, index=i)
        with torch.no_grad():
            outputs, _ = encoder.forward(encoded)
            sent = cast_to_boundary(outputs, leaving.tensors)
            decoded = CellMicroBatch(sent, last.input_boundary(between), output_boundary=None, index=i)
            decoder.forward(decoded, targets)
        saved.append((encoded, decoded, targets))
    for encoded, decoded, targets in reversed(saved):
        (objective,), _ = decoder.forward_with_graph(decoded, targets)
        returned = decoder.backward(decoded, (torch.full_like(objective, 1 / batch.weight),))
        encoder.forward_with_graph(encoded)
        encoder.backward(encoded, returned)
    return gradients_of(stages)


def gradients_of(stages: Sequence[Stage]) -> Gradients:
    """Returns copies of the gradients of all stages, on the CPU."""
    return {
        key: torch.zeros_like(p, device=CPU) if p.grad is None else p.grad.to(CPU, copy=True)
        for stage in stages
        for key, p in stage.named_parameters().items()
    }


def model(shape: TransformerShape, dtype: torch.dtype) -> tuple[list[nn.Module], nn.Module]:
    """Returns the layers on the meta device, and the loss."""
    with torch.device("meta"):
        return [layer.to(dtype) for layer in layers(shape)], TranslationLoss(shape.label_smoothing)


def cells_of(shape: TransformerShape) -> list[range]:
    """Returns the encoder's layers and the decoder's."""
    return [range(shape.layers + 1), range(shape.layers + 1, shape.list_length)]


def _make_batch(sizes: Sizes, seed: int) -> MiniBatch:
    """Returns sentence pairs of uneven length, so that masks matter."""
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


def _rectifier_margin(shape: TransformerShape, batch: MiniBatch) -> float:
    """Returns the smallest absolute value of all ReLU inputs."""
    stages, distances = stages_of(shape, torch.float64, CPU), []

    def record_distance(module: nn.Module, inputs: Tensors, output: Tensor) -> None:
        distances.append(float(output.detach().abs().min()))

    for stage in stages:
        for module in stage.layers.modules():
            if isinstance(module, FeedForward):
                module.inward.register_forward_hook(record_distance)
    run_batch(shape, stages, batch)
    return min(distances)


def _deviation(found: Tensor, expected: Tensor) -> float:
    largest = float(expected.abs().max())
    deviation = float((found - expected).abs().max())
    return deviation / largest if largest else deviation


@contextmanager
def exact() -> Iterator[None]:
    """A context in which two devices compute the same up to rounding."""
    with _full_precision(), _cpu_positions():
        yield


@contextmanager
def _full_precision() -> Iterator[None]:
    """Turns TF32 off, whose factors have 10 mantissa bits."""
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]


@contextmanager
def _cpu_positions() -> Iterator[None]:
    """Uses the CPU's position encodings on both devices: the fp32 sines of two devices differ by far more than fp64
    products."""
    original: Callable[[int, int, Tensor, int], Tensor] = embedding.sinusoids

    def on_cpu(length: int, width: int, like: Tensor, start: int = 0) -> Tensor:
        return original(length, width, torch.empty(0, dtype=like.dtype), start).to(like.device)

    embedding.sinusoids = on_cpu
    try:
        yield
    finally:
        embedding.sinusoids = original  # type: ignore[assignment]
