"""Your own layers: a residual MLP on scikit-learn's digits, 22 layers over two stages.

gpipe experiment examples/digits.py:digits
gpipe experiment examples/digits.py:digits --set "pipeline.stages=4 pipeline.schedule=1f1b"
"""

from torch import Tensor, nn

from suite import TrainSpec
from suite.data.images.rows import ImageRows


class Block(nn.Module):
    """x + a small MLP of x."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))

    def forward(self, x: Tensor) -> Tensor:
        """(rows, width), the same."""
        return x + self.mlp(x)


def accuracy(scores: Tensor, labels: Tensor) -> Tensor:
    """The share of rows whose largest score is their label's."""
    return (scores.argmax(1) == labels).float().mean()


def digits() -> TrainSpec:
    """Digits of 8 x 8 pixels."""
    first = nn.Sequential(nn.Flatten(), nn.Linear(64, 128))
    return TrainSpec(
        layers=[first, *[Block(128) for _ in range(20)], nn.Linear(128, 10)],
        loss=nn.CrossEntropyLoss(),
        metric=accuracy,
        train=ImageRows("digits", "train", size=8),
        valid=ImageRows("digits", "test", size=8),
        batch_size=64,
        stages=2,
        micro_batches=4,
        steps=200,
    )
