"""The numbers that define a Transformer of the GPipe paper: T(L, H, A) of section 5, Transformer-L of section 3."""

from __future__ import annotations

from typing import Annotated

from annotated_types import Unit
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

PADDING = 0
"""Token id that fills the right end of rows; no token attends to it, and it is never scored."""

SHAPE_CONFIG = ConfigDict(extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)
"""A shape checks its numbers when it is made, and raises ValueError naming the field."""

Count = Annotated[int, Field(ge=1, le=1_000_000)]
"""Three of them multiplied are still a size that torch knows."""

Even = Annotated[Count, Field(multiple_of=2)]

Share = Annotated[float, Field(ge=0, lt=1)]

Scale = Annotated[float | None, Field(ge=1e-6, le=1e6)]
"""These bounds give its square a finite inverse, the factor of a decay."""

BEGIN, END = 2, 3
"""Token ids before each target sentence and after each source sentence. They separate the sentences of a packed row."""


@dataclass(frozen=True, config=SHAPE_CONFIG)
class TransformerShape:
    """An encoder-decoder Transformer T(L, H, A).

    T(64, ...) is the paper's 128-layer model. The attention width is ``head_width * heads`` whatever ``width`` is: the
    only reading of the paper that gives its 3B and 6B.
    """

    blocks_per_stack: Count
    """L: blocks of the encoder, and as many of the decoder; each has attention and feed-forward branches."""
    width: Even
    """Width of the residual stream."""
    feed_forward: Count
    """H: hidden width of a feed-forward branch."""
    heads: Count
    """A: attention heads."""
    vocabulary: Annotated[Count, Unit("tokens")]
    """Follows text.vocabulary."""
    head_width: Count = 64
    """Width of an attention head."""
    dropout: Share = 0.1
    """Dropout probability."""
    label_smoothing: Share = 0.1
    """Probability spread over the vocabulary in the training loss."""
    logit_clip: Annotated[float | None, Field(gt=0)] = 30.0
    """Bound of the logits' magnitude."""
    depth_scaled_init: bool = True
    """Whether feed-forward output matrices start divided by model.blocks_per_stack."""
    residual_scale: Scale = None
    """Output matrices of branches start and learn times this / (2 x blocks_per_stack); none: as depth_scaled_init says
    (docs/depth.md)."""

    def __post_init__(self) -> None:
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
        """Factors of the start of the output matrices of attention and of feed-forward branches."""
        paper = (1.0, 1 / self.blocks_per_stack if self.depth_scaled_init else 1.0)
        scale = output_scale(self)
        return paper if scale is None else (scale, scale)

    @property
    def list_length(self) -> int:
        """Length of the layer list: both stacks, an embedding before each, and the head."""
        return 2 * self.blocks_per_stack + 3


@dataclass(frozen=True, config=SHAPE_CONFIG)
class LanguageModelShape:
    """A Transformer-L; the defaults are the paper's (section 3), which names no dropout."""

    blocks_per_stack: Count
    """L: blocks, which are one stack."""
    width: Even = 2048
    """Width of the model."""
    feed_forward: Count = 8192
    """Width of the feed-forward layers."""
    heads: Count = 32
    """Attention heads, which divide the width."""
    vocabulary: Annotated[Count, Unit("tokens")] = 32_000
    """Follows text.vocabulary."""
    context_length: Annotated[Count, Unit("tokens")] = 1024
    """Follows text.length."""
    dropout: Share = 0.0
    """Dropout probability."""
    residual_scale: Scale = None
    """Output matrices of branches start and learn times this / (2 x blocks_per_stack); none: they start divided by
    model.blocks_per_stack."""

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"heads must divide the width, {self.width}, evenly, which {self.heads} does not")

    @property
    def output_scales(self) -> tuple[float, float]:
        """Factors of the start of the output matrices of attention and of feed-forward branches.

        Feed-forward starts as in the Transformer of section 5, and attention too: there a last LayerNorm bounds the
        input of the softmax. Here there is none, and with L plain attentions the residual stream and the initial logits
        would grow as sqrt(L).
        """
        scale = output_scale(self) or 1 / self.blocks_per_stack
        return scale, scale

    @property
    def head_width(self) -> int:
        return self.width // self.heads

    @property
    def attention_width(self) -> int:
        """Columns of all heads together: the width."""
        return self.width

    @property
    def list_length(self) -> int:
        """Length of the layer list: the blocks, the embedding before and the head after them."""
        return self.blocks_per_stack + 2


BlockShape = TransformerShape | LanguageModelShape
"""What the embedding and the blocks of both Transformers need."""


def output_scale(shape: BlockShape) -> float | None:
    """Returns the factor of the start and of the step of every branch's output matrix; None without a residual scale.

    What a branch, attention or feed-forward, adds to the residual stream is proportional to its output matrix. AdamW
    moves every weight by the rate, whatever its size, and a stack of L blocks has about 2L branches. So one step moves
    the stream 2L times as far as with one branch, and with ``residual_scale / 2L`` equally far at every depth.
    """
    return None if shape.residual_scale is None else shape.residual_scale / (2 * shape.blocks_per_stack)
