"""The position-wise feed-forward block and its depth-scaled initialisation."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from models.attention import reset_linear
from models.shape import BlockShape


class FeedForward(nn.Module):
    """width -> H, ReLU, H -> width.

    The paper (section 5) makes deep models trainable by scaling down the initialisation of every feed-forward layer by
    the number of layers, without saying of which matrix. Here: both matrices start Glorot-uniform, and the second, the
    one that writes to the residual stream, is divided by L, the number of layers of its stack. So the block's output
    starts L times smaller. The sum of L independent blocks then deviates by 1/sqrt(L) of what one plain block does,
    where it would be sqrt(L): the stream does not grow with depth. The first matrix is left alone: dividing it too
    would make the output L squared times smaller (4096 at L = 64) without further use, and hold back an optimizer
    whose step follows the size of the weights (Adafactor). ``depth_scaled_init=false`` leaves both as they are.
    """

    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        self.depth = shape.layers if shape.depth_scaled_init else 1
        self.inward = nn.Linear(shape.width, shape.feed_forward)
        self.outward = nn.Linear(shape.feed_forward, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, time, width) -> (batch, time, width)."""
        out: Tensor = self.outward(F.relu(self.inward(x)))
        return out

    def reset_parameters(self) -> None:
        """See the class; biases zero."""
        reset_linear(self.inward)
        reset_linear(self.outward, scale=1 / self.depth)
