"""The numbers that define one T(L, H, A) of section 5 of the GPipe paper, and the protocol of all shapes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Protocol

from annotated_types import Unit

PADDING = 0
"""Token id that fills the right end of rows; no token attends to it, and it is never scored."""

LARGEST = 1_000_000
"""Of each number of a shape."""

BEGIN, END = 2, 3
"""Token ids before each target sentence and after each source sentence. They separate the sentences of a packed row."""


class BlockShape(Protocol):
    """The numbers that the embedding and the blocks of both Transformers need."""

    @property
    def layers(self) -> int: ...
    @property
    def width(self) -> int: ...
    @property
    def feed_forward(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def head_width(self) -> int: ...
    @property
    def attention_width(self) -> int: ...
    @property
    def vocabulary(self) -> int: ...
    @property
    def dropout(self) -> float: ...
    @property
    def residual_scale(self) -> float | None: ...
    @property
    def output_scales(self) -> tuple[float, float]: ...


def output_scale(shape: BlockShape) -> float | None:
    """Returns the factor of the start and of the step of every block's output matrix; None without a residual scale.

    What a block adds to the residual stream is proportional to its output matrix. AdamW moves every weight by the rate,
    whatever its size, and a stack of L layers has about 2L blocks. So one step moves the stream 2L times as far as with
    one block, and with ``residual_scale / 2L`` equally far at every depth.
    """
    return None if shape.residual_scale is None else shape.residual_scale / (2 * shape.layers)


def check_numbers(shape: BlockShape, counts: Iterable[str], shares: Iterable[str]) -> None:
    """Raises ValueError, naming the field, for a count below 1 or above a million (three of them multiplied are still
    a size that torch knows), an odd width, a share outside [0, 1), or a residual scale outside [1e-6, 1e6]."""
    for name in counts:
        if getattr(shape, name) < 1:
            raise ValueError(f"{name} must be at least 1, not {getattr(shape, name)}")
        if getattr(shape, name) > LARGEST:
            raise ValueError(f"{name} must be at most {LARGEST:,}, not {getattr(shape, name)}")
    if shape.width % 2:
        raise ValueError(f"width must be even, half of it sines and half cosines, not {shape.width}")
    for name in shares:
        if not 0 <= getattr(shape, name) < 1:
            raise ValueError(f"{name} must be at least 0 and below 1, not {getattr(shape, name)}")
    # these bounds give its square a finite inverse, the factor of a decay
    if shape.residual_scale is not None and not 1e-6 <= shape.residual_scale <= 1e6:
        raise ValueError(
            f"residual_scale must be from 1e-6 to 1e6, or none for the paper's start, not {shape.residual_scale}"
        )


@dataclass(frozen=True)
class TransformerShape:
    """An encoder-decoder Transformer T(L, H, A).

    ``layers`` (L) is the number of encoder layers and also the number of decoder layers, so T(64, ...) is the paper's
    128-layer model. The attention width is ``head_width * heads`` whatever ``width`` is: the only reading of the paper
    that gives its 3B and 6B.

    Raises ValueError, naming the field, for an impossible number.
    """

    layers: int
    """L: encoder layers, and as many decoder layers."""
    width: int
    """Width of the residual stream; even."""
    feed_forward: int
    """H: hidden width of a feed-forward block."""
    heads: int
    """A: attention heads."""
    vocabulary: Annotated[int, Unit("tokens")]
    """Size of the vocabulary; follows text.vocabulary."""
    head_width: int = 64
    """Width of an attention head."""
    dropout: float = 0.1
    """Dropout probability."""
    label_smoothing: float = 0.1
    """Probability spread over the vocabulary in the training loss."""
    logit_clip: float | None = 30.0
    """Bound of the logits' magnitude."""
    depth_scaled_init: bool = True
    """Whether feed-forward output matrices start divided by model.layers."""
    residual_scale: float | None = None
    """Output matrices of blocks start and learn times this / (2 x layers); none: as depth_scaled_init says
    (docs/depth.md)."""

    def __post_init__(self) -> None:
        counts = ("layers", "width", "feed_forward", "heads", "vocabulary", "head_width")
        check_numbers(self, counts, shares=("dropout", "label_smoothing"))
        if self.logit_clip is not None and not self.logit_clip > 0:
            raise ValueError(f"logit_clip must be above 0, or none for no bound, not {self.logit_clip}")
        if self.residual_scale is not None and not self.depth_scaled_init:
            raise ValueError(
                f"depth_scaled_init=false has no effect with residual_scale={self.residual_scale:g}; set "
                "residual_scale=none, too"
            )

    @property
    def attention_width(self) -> int:
        """Columns of all heads together, 64 * A."""
        return self.head_width * self.heads

    @property
    def output_scales(self) -> tuple[float, float]:
        """Factors of the start of the output matrices of attention and of feed-forward blocks."""
        paper = (1.0, 1 / self.layers if self.depth_scaled_init else 1.0)
        scale = output_scale(self)
        return paper if scale is None else (scale, scale)

    @property
    def list_length(self) -> int:
        """Length of the layer list: both stacks, an embedding before each, and the head."""
        return 2 * self.layers + 3
