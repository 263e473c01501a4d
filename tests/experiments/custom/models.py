"""Seven models as one writes them without this suite, each small: a TrainSpec with fp64 data of 13 rows."""

import torch
from torch import nn
from torch.utils.data import TensorDataset
from transformers import ResNetConfig, ResNetForImageClassification

from experiments.huggingface.causal_lm import causal_lm_layers
from suite import TrainSpec
from tests.experiments.huggingface import mutations

ROWS = 13
"""Not a multiple of 4: the micro-batches are ragged."""


def spec(layers, inputs, targets, loss, **others):
    """Returns the spec in fp64; embeddings of ids stay integers."""
    double = [layer.double() for layer in layers]
    inputs = [tensor.double() if tensor.is_floating_point() else tensor for tensor in inputs]
    rows = TensorDataset(*inputs, targets)
    return TrainSpec(layers=double, loss=loss, train=rows, collate=pair, batch_size=ROWS, micro_batches=4, **others)


def pair(rows):
    *inputs, targets = (torch.stack(column) for column in zip(*rows, strict=True))
    return tuple(inputs), targets


def images(size=16, channels=3):
    return torch.randn(ROWS, channels, size, size), torch.randint(0, 5, (ROWS,))


class Lambda(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *inputs):
        return self.function(*inputs)


class First(nn.Module):
    """The first of a module's outputs."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *inputs):
        output = self.module(*inputs)
        return output if isinstance(output, torch.Tensor) else output[0]


def resnet_18():
    """transformers' ResNet of basic blocks with BatchNorm, block by block."""
    config = ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16, 16, 16], depths=[2, 2, 2, 2], layer_type="basic", num_labels=5
    )
    model = ResNetForImageClassification(config)
    blocks = [block for stage in model.resnet.encoder.stages for block in stage.layers]
    layers = [
        First(model.resnet.embedder),
        *blocks,
        model.resnet.pooler,
        nn.Sequential(nn.Flatten(), model.classifier[1]),
    ]
    x, y = images(32)
    return spec(layers, [x], y, nn.CrossEntropyLoss())


def language(model):
    """Token ids, the last of a row padded with -100 in the labels."""
    ids = torch.randint(0, 50, (ROWS, 9))
    labels = ids[:, 1:].clone()
    labels[::2, 5:] = -100
    layers = causal_lm_layers(model)
    return spec(layers, [ids[:, :-1]], labels, TokenLoss(), units=lambda labels: (labels != -100).sum())


class TokenLoss(nn.Module):
    """The mean over tokens that are not padding."""

    def forward(self, logits, labels):
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def gpt2():
    """GPT-2, whose embedding is its output projection too."""
    return language(mutations.gpt2(n_layer=3, attn_pdrop=0, embd_pdrop=0, resid_pdrop=0))


def llama():
    """Llama, with rotary positions and grouped keys."""
    return language(mutations.llama(num_hidden_layers=3))


def lstm_stack():
    """LSTMs, each returning its outputs alone, and a loss that is a sum."""
    layers = [First(nn.LSTM(8, 8, batch_first=True)) for _ in range(3)]
    head = nn.Sequential(Lambda(lambda x: x[:, -1]), nn.Linear(8, 5))
    return spec(
        [*layers, head], [torch.randn(ROWS, 6, 8)], torch.randint(0, 5, (ROWS,)), nn.CrossEntropyLoss(reduction="sum")
    )


class Down(nn.Module):
    def __init__(self, channels, width, name):
        super().__init__()
        self.convolution, self.gpipe_stashes = nn.Conv2d(channels, width, 3, padding=1), (name,)

    def forward(self, x):
        x = self.convolution(x).relu()
        return nn.functional.avg_pool2d(x, 2), x


class Up(nn.Module):
    def __init__(self, channels, width, name):
        super().__init__()
        self.convolution, self.gpipe_pops = nn.Conv2d(channels, width, 3, padding=1), (name,)

    def forward(self, x, skip):
        x = nn.functional.interpolate(x, scale_factor=2)
        return self.convolution(torch.cat([x, skip], 1)).relu()


def u_net():
    """Two levels; skips bypass the layers between. The loss is a function."""
    layers = [
        Down(3, 4, "outer"), Down(4, 8, "inner"), nn.Conv2d(8, 8, 3, padding=1), Up(16, 4, "inner"), Up(8, 4, "outer"),
        nn.Conv2d(4, 1, 1),
    ]  # fmt: skip
    x, _ = images(8)
    return spec(layers, [x], torch.rand(ROWS, 1, 8, 8).double(), nn.functional.mse_loss)


def frozen():
    """An MLP whose first half is frozen, and classes of different weights."""
    layers = [nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 5)]
    for layer in layers[:3]:
        layer.requires_grad_(False)
    weighted = nn.CrossEntropyLoss(weight=torch.rand(5).double() + 0.1)
    return spec(layers, [torch.randn(ROWS, 8)], torch.randint(0, 5, (ROWS,)), weighted)


class Merge(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(8, 12), nn.Embedding(20, 12)

    def forward(self, x, ids):
        return self.left(x) + self.right(ids).mean(1), ids.sum(1, keepdim=True).to(x.dtype)


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(12, 12)

    def forward(self, x, count):
        return torch.tanh(self.linear(x)) * (1 + 0.01 * count), count


class Last(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(12, 3)

    def forward(self, x, count):
        return self.linear(x)


def two_inputs():
    """Numbers and ids; layers pass two tensors on. One layer runs twice, and shares weight and bias with itself."""
    (x, ids), twice = (torch.randn(ROWS, 8), torch.randint(0, 20, (ROWS, 4))), Pair()
    return spec([Merge(), twice, twice, Last()], [x, ids], torch.randn(ROWS, 3).double(), nn.SmoothL1Loss())


MODELS = (resnet_18, gpt2, llama, lstm_stack, u_net, frozen, two_inputs)
BATCH_NORM = (resnet_18,)
"""Their micro-batches are normalised one by one, so the reference passes them one by one too."""
