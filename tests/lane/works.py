"""The models of the lane, each with a small mini-batch: the tests', the experiments', other people's, examples."""

import random
import shutil
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from experiments.custom.batches import SpecBatches
from experiments.custom.layers import all_on_meta, tie_shared
from experiments.custom.loading import load_spec
from experiments.custom.loss import SummedLoss
from experiments.custom.spec_check import layers_of
from experiments.custom.spec_model import build
from experiments.registry import find
from models.chunked_loss import set_logits_bytes
from models.loss import TranslationLoss
from models.shape import BEGIN, END
from models.transformer import TransformerShape
from models.transformer import layers as transformer_layers
from suite import TrainSpec
from suite.data.images import rows as image_rows
from suite.device import generator_of
from suite.pipeline.model.microbatch import ReplicaBatch
from tests.lane.cases import OTHER_PEOPLES
from tests.lane.standin import DEVICE
from tests.lane.train import Work
from tests.micro_batches import split
from tests.suite.pipeline.toy import SumLoss, toy_batch, toy_layers

ROOT = Path(__file__).parents[2]


def mini_batch(inputs, targets, micro_batches):
    """Splits tensors into micro-batches; the divisor does not matter."""
    return ReplicaBatch(split(inputs, micro_batches), split(targets, micro_batches), float(len(inputs[0])))


def toy():
    """Ties, ids and masks between layers, dropout, an input that nobody uses."""
    ids, labels = toy_batch(7)
    return Work(toy_layers(), SumLoss(), mini_batch([ids], [labels], 2))


class Draws(nn.Module):
    """Draws from every generator, and insists that a recompute repeats the draws of its forward."""

    def __init__(self):
        super().__init__()
        self.linear, self.drawn = nn.Linear(6, 6, device="meta"), {}

    def reset_parameters(self):
        self.linear.reset_parameters()

    def forward(self, x):
        if x.is_meta:
            return self.linear(x)
        with unset_fake_temporarily():
            generator = generator_of(DEVICE)
            seed = generator.initial_seed()
            own = float(torch.rand((), generator=generator))
            draws = float(torch.rand(())), own, random.random(), np.random.random()
        if self.training:
            assert self.drawn.setdefault(seed, draws) == draws, "a recompute drew other numbers"
            assert len(set(draws)) == len(draws) - (torch.initial_seed() == seed)
        return F.dropout(self.linear(x), 0.1, self.training)


class Squares(nn.Module):
    """A sum of squares."""

    def forward(self, x, labels):
        loss = (x - labels).square().sum()
        return loss, loss.detach()


def draws():
    """Layers that draw from every generator."""
    layers = [Draws() for _ in range(4)]
    return Work(layers, Squares(), mini_batch([torch.randn(8, 6)], [torch.randn(8, 6)], 4))


def packed_text():
    """Two sentences in a row, clipped logits, dropout, and a head that computes its loss in chunks."""
    with torch.device("meta"):
        layers = transformer_layers(TransformerShape(1, 16, 24, 2, 40, head_width=8, dropout=0.1))
    source = torch.tensor([[5, 6, END, 7, END, 0], [8, 9, 10, 11, END, 0]] * 2)
    target = torch.tensor([[BEGIN, 5, 6, BEGIN, 7], [BEGIN, 9, 10, 11, 0]] * 2)
    return Work(layers, TranslationLoss(0.1), mini_batch([source, target], [target], 2))


def chunked_text():
    """The same with logits for three positions at once."""
    work = packed_text()
    set_logits_bytes(work.layers, 4 * 40 * 3)
    return work


SMALL = {
    "t12_400m": "model.blocks_per_stack=1 model.width=16 model.feed_forward=24 model.heads=2 text.vocabulary=300 "
    "text.max_length=16 train.batch_tokens=64",
    "transformer_2": "model.width=16 model.feed_forward=24 model.heads=2 text.vocabulary=300 text.length=16 "
    "train.batch_sequences=4",
    "amoebanet_fashion": "model.filters=4 images.size=12 train.batch_images=6",
}
"""A model of each task of the experiments, small."""


def experiment(name):
    """A model of the experiments, with their sample."""
    run = find(name).with_settings(f"{SMALL[name]} pipeline.micro_batches=2 pipeline.replicas=1")
    sample, (layers, loss) = run.sample().largest, run.build()
    return Work(layers, loss, ReplicaBatch([sample.inputs] * 2, [sample.targets] * 2, 8.0))


def custom(spec, rows=4):
    """A TrainSpec as its experiment builds it, with its own data."""
    layers, loss = build(spec)
    return Work(layers, loss, SpecBatches(spec, rows, seed=0).batch(0, 0, 1, 2))


def other_peoples(name):
    """One of the models of ``tests/experiments/custom/models.py``, in fp32."""
    from tests.experiments.custom import models  # here, as others do not need what it imports

    assert set(OTHER_PEOPLES) == {model.__name__ for model in models.MODELS}
    torch.manual_seed(0)
    spec = getattr(models, name)()
    layers = [layer.float() for layer in layers_of(spec)]
    tie_shared(layers)
    if isinstance(spec.loss, nn.Module):
        spec.loss.float()
    batch = SpecBatches(spec, models.ROWS, seed=0).batch(0, 0, 1, 2)
    parts = (
        [tuple(t.float() if t.dtype == torch.float64 else t for t in tensors) for tensors in part]
        for part in (batch.inputs, batch.targets)
    )
    return Work(all_on_meta(layers), SummedLoss(spec, targets=1), ReplicaBatch(*parts, divisor=batch.divisor))


def example(name):
    """A model of ``examples/``."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from tests.examples.test_examples import Noise

    image_rows.ImageRows = Noise
    file, _, function = name.partition(":")
    folder = Path(_folder.name) / name
    copy = folder / "examples" / file
    shutil.copytree(ROOT / "examples", copy.parent, ignore=shutil.ignore_patterns("llama"))
    (folder / "docs").mkdir()
    (folder / "docs/page.md").write_text("One word has one meaning. " * 100)
    if function == "llama":
        config = LlamaConfig(
            vocab_size=256,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            bos_token_id=0,
            eos_token_id=0,
        )
        LlamaForCausalLM(config).save_pretrained(copy.with_name("llama"))
    return custom(load_spec(f"{copy}:{function}", seed=0))


_folder = tempfile.TemporaryDirectory()
"""For copies of the examples; a stage reads the weights of a Llama only when it is built."""


def share_of_true(scores, labels):
    """A metric of a user."""
    return (scores.argmax(1) == labels).float().mean()


def weighted():
    """Images and a BatchNorm; a user's cross entropy with weights of the classes, ignored labels, and a metric."""
    labels = torch.tensor([0, 1, -100, 2] * 2)
    rows = torch.utils.data.TensorDataset(torch.randn(8, 1, 4, 4), labels)
    loss = nn.CrossEntropyLoss(weight=torch.tensor([0.5, 1.0, 2.0]))
    layers = [nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 3)]
    return custom(TrainSpec(layers=layers, loss=loss, metric=share_of_true, train=rows, batch_size=8), 8)
