"""A model of transformers: a small vision transformer on Fashion-MNIST, block by block.

gpipe experiment examples/vision_transformer.py:fashion
"""

from torch import Tensor, nn
from transformers import ViTConfig, ViTForImageClassification

from suite import TrainSpec
from suite.data.images.rows import ImageRows


class Patches(nn.Module):
    """Images to patch embeddings."""

    def __init__(self, embeddings: nn.Module) -> None:
        super().__init__()
        self.embeddings = embeddings

    def forward(self, images: Tensor) -> Tensor:
        """(rows, 1, 28, 28) -> (rows, 50, width)."""
        return self.embeddings(images)


class Head(nn.Module):
    """The class token's scores."""

    def __init__(self, norm: nn.Module, classifier: nn.Module) -> None:
        super().__init__()
        self.norm, self.classifier = norm, classifier

    def forward(self, hidden: Tensor) -> Tensor:
        """(rows, 50, width) -> (rows, 10)."""
        return self.classifier(self.norm(hidden)[:, 0])


def accuracy(scores: Tensor, labels: Tensor) -> Tensor:
    """The share of rows whose largest score is their label's."""
    return (scores.argmax(1) == labels).float().mean()


def fashion() -> TrainSpec:
    """Four blocks of width 64 over two stages."""
    model = ViTForImageClassification(
        ViTConfig(image_size=28, patch_size=4, num_channels=1, hidden_size=64, num_hidden_layers=4,
                  num_attention_heads=4, intermediate_size=128, num_labels=10)
    )  # fmt: skip
    blocks = model.vit.layers
    return TrainSpec(
        layers=[Patches(model.vit.embeddings), *blocks, Head(model.vit.layernorm, model.classifier)],
        loss=nn.CrossEntropyLoss(),
        metric=accuracy,
        train=ImageRows("fashion", "train"),
        valid=ImageRows("fashion", "test"),
        batch_size=64,
        stages=2,
        steps=200,
        settings="optimizer.learning_rate=2e-3 optimizer.lr_decay=cosine train.valid_rows=2000",
    )
