"""Your own text: a language model of bytes. Set FILES to your text; here it is the documentation.

gpipe experiment examples/language_model.py:text
"""

import math
from pathlib import Path

import torch
from torch import Tensor, nn

from suite import TrainSpec

LENGTH, WIDTH, LAYERS = 128, 96, 6
FILES = sorted((Path(__file__).parents[1] / "docs").glob("*.md"))


class Embedding(nn.Embedding):
    """Bytes, with sinusoids for their positions."""

    def forward(self, ids: Tensor) -> Tensor:
        """(rows, T) -> (rows, T, width)."""
        angles = torch.arange(ids.shape[1], device=ids.device)[:, None] / 10000 ** (
            torch.arange(0, WIDTH, 2, device=ids.device) / WIDTH
        )
        return super().forward(ids) * math.sqrt(WIDTH) + torch.cat([angles.sin(), angles.cos()], 1)


class Block(nn.TransformerEncoderLayer):
    """A block that sees only what came before."""

    def forward(self, x: Tensor) -> Tensor:
        """(rows, T, width), the same."""
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device, dtype=x.dtype)
        return super().forward(x, mask, is_causal=True)


def bits(logits: Tensor, ids: Tensor) -> Tensor:
    """Bits per byte."""
    return nn.functional.cross_entropy(logits.transpose(1, 2), ids) / math.log(2)


def text() -> TrainSpec:
    """Six blocks over two stages; the last tenth of the text is held out."""
    data = b"".join(path.read_bytes() for path in FILES)
    rows = torch.frombuffer(bytearray(data), dtype=torch.uint8).long().unfold(0, LENGTH + 1, LENGTH)
    pairs = [(row[:-1], row[1:]) for row in rows]
    cut = len(pairs) * 9 // 10
    return TrainSpec(
        layers=[Embedding(256, WIDTH), *[Block(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
                for _ in range(LAYERS)], nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256))],
        loss=bits, train=pairs[:cut], valid=pairs[cut:], batch_size=16, stages=2, steps=300,
        settings="optimizer.learning_rate=2e-3 optimizer.lr_decay=cosine",
    )  # fmt: skip
