"""Floating point operations of T(L, H, A): what utilisation is a share of.

A product of (n, k) and (k, m) is 2nkm operations. A token passes each matrix once forward (2 operations a parameter)
and twice backward (4), so of parameters in products come

    6 x parameters in products x tokens

With w = 64A, source tokens S and target tokens T a row, the products of one layer hold, each with the tokens it sees:

    encoder layer    4dw + 2dH on the source
    decoder layer    6dw + 2dH on the target; 2dw (keys and values) on the source
    head             dV on the target
    embedding        none: it looks up

Attention has no parameters. Queries times keys and weights times values are 4 x Q x K x w operations a row forward and
twice that backward: 12 x Q x K x w. Causal attention counts whole, as is usual (PaLM, appendix B) though half would
do: at 128 tokens a row this is below one part in a hundred. Norms, softmax, masks and updates count nothing.

*Model* operations are these, once for each micro-batch. A recomputation does the forward's operations again: *hardware*
operations count it, so their utilisation says how busy the products keep the device, and the other how far training
gets.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from models.shape import TransformerShape
from models.transformer import DecoderLayer, EncoderLayer, Head


@dataclass(frozen=True)
class Rows:
    """A micro-batch of ``count`` pairs of ``source`` and ``target`` tokens, padding included: it is computed too."""

    count: int
    source: int
    target: int


def forward_flops(layers: Iterable[nn.Module], shape: TransformerShape, rows: Rows) -> float:
    """Returns the operations of one forward of these layers of a T(L, H, A) on one micro-batch."""
    return float(rows.count * sum(_row(layer, shape, rows.source, rows.target) for layer in layers))


def model_flops(forward: float, micro_batches: int) -> float:
    """Returns the operations of a step: forward and, twice that, backward of each micro-batch."""
    return 3 * forward * micro_batches


def hardware_flops(forward: float, micro_batches: int, recomputed: int) -> float:
    """Returns the same with the forwards of ``recomputed`` micro-batches that are run again."""
    return (3 * micro_batches + recomputed) * forward


def _row(layer: nn.Module, shape: TransformerShape, source: int, target: int) -> int:
    """Operations of one row forward."""
    width, inner, attention = shape.width, shape.feed_forward, shape.attention_width
    if isinstance(layer, EncoderLayer):
        products = (4 * width * attention + 2 * width * inner) * source
        return 2 * products + 4 * source * source * attention
    if isinstance(layer, DecoderLayer):
        products = (6 * width * attention + 2 * width * inner) * target + 2 * width * attention * source
        return 2 * products + 4 * (target * target + target * source) * attention
    return 2 * width * shape.vocabulary * target if isinstance(layer, Head) else 0
