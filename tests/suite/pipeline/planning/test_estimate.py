"""Estimated layer costs: operations by hand, bytes against those measured, no memory taken."""

import resource
import tracemalloc
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from models import blocks, transformer
from models.loss import ClassificationLoss, TranslationLoss
from suite.pipeline.planning import measure as measuring
from suite.pipeline.planning.costs import LayerCost, SkipInput, check_costs
from suite.pipeline.planning.devices import Device
from suite.pipeline.planning.estimate import estimate
from suite.pipeline.planning.measure import measure
from suite.pipeline.planning.sample import MicroBatch, Sample
from suite.settings import OptimizerSettings
from suite.training import adafactor
from suite.training.stage_optimizer import single_device_update
from tests.models import resnet
from tests.suite.pipeline.freezing import FREEZES, freeze
from tests.suite.pipeline.planning.costs import on_meta, without_bytes
from tests.suite.pipeline.skipping import SumOfErrors, skipping_batch, skipping_layers
from tests.suite.pipeline.toy import SquareLoss, SumLoss, toy_batch, toy_layers

INFINITY = float("inf")
PRODUCTS = Device(
    "counts products", 0, 1 << 34, fp32=2.0, bf16=4.0, bandwidth=INFINITY, link=1.0, link_name="", efficiency=0.5
)
TRAFFIC = replace(PRODUCTS, name="counts traffic", fp32=INFINITY, bf16=INFINITY, bandwidth=1.0)
ADAMW, BF16 = OptimizerSettings(), OptimizerSettings(precision="bf16")

ALIVE = ("activation_bytes", "cast_bytes")
PEAKS = ("forward_peak_bytes", "graph_peak_bytes", "backward_peak_bytes")
SIZES = ALIVE + PEAKS
"""Estimated and measured."""


class Product(nn.Module):
    """x (rows, inputs) -> (rows, outputs); counts how often any of its kind is run."""

    runs = 0

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))

    def forward(self, x: Tensor) -> Tensor:
        Product.runs += 1
        return F.linear(x, self.weight)

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)


class Through(nn.Module):
    """Hands on what it takes; ends a list whose last layer should not count."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 1.0


def rows(count, width):
    return MicroBatch((torch.zeros(count, width),), (torch.zeros(1),))


def estimated(make, loss, data, device=PRODUCTS, optimizer=ADAMW):
    costs = estimate(on_meta(make), loss, data, device, optimizer)
    check_costs(costs)
    return costs


def measured(make, loss, data, monkeypatch, optimizer=ADAMW):
    for name, least in {"SECONDS_A_LAYER": 0.0, "WARM_UPS": 0, "LEAST_ROUNDS": 2}.items():  # its bytes are compared
        monkeypatch.setattr(measuring, name, least)
    return measure(
        without_bytes(estimated(make, loss, data, optimizer=optimizer)),
        on_meta(make),
        loss,
        Sample(data, data),
        torch.device("cpu"),
        optimizer.precision,
        lambda module: single_device_update(module, optimizer),
    )


def sizes(cost: LayerCost, names=SIZES):
    return {name: getattr(cost, name) for name in names}


def test_the_operations_of_a_product():
    """2 each element's factors; the backward makes two products, but of the first layer's inputs needs no gradient."""
    first, second, _ = estimated(lambda: [Product(3, 5), Product(5, 7), Through()], SquareLoss(), rows(11, 3))
    once = 2 * 11 * 3 * 5
    assert (first.forward_s, first.recompute_s, first.backward_s) == (once, once, once)
    once = 2 * 11 * 5 * 7
    assert (second.forward_s, second.recompute_s, second.backward_s) == (once, once, 2 * once)
    assert second.update_s == 0


def test_bf16_halves_the_time_of_products():
    def make():
        return [Product(4, 4), Product(4, 4), Through()]

    _, slow, _ = estimated(make, SquareLoss(), rows(8, 4))
    _, fast, _ = estimated(make, SquareLoss(), rows(8, 4), optimizer=BF16)
    assert [fast.forward_s, fast.recompute_s, fast.backward_s] == [
        slow.forward_s / 2, slow.recompute_s / 2, slow.backward_s / 2
    ]  # fmt: skip
    assert fast.parameters == slow.parameters


def test_where_traffic_is_what_counts():
    """Read x and the weight, write y; all in fp32. The update moves its bytes for each parameter."""
    first, _, last = estimated(lambda: [Product(3, 5), Through(), Through()], SquareLoss(), rows(11, 3), TRAFFIC)
    assert first.forward_s == 4 * (11 * 3 + 3 * 5 + 11 * 5)
    assert first.update_s == 32 * 15
    assert last.update_s == 0


class Traffic(TorchDispatchMode):
    """Counts the bytes that operators read and write; of each a tensor is read once."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        read = {id(leaf): leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)}
        written = [leaf for leaf in tree_leaves(args[0] if out is None else out) if isinstance(leaf, Tensor)]
        storages = {leaf.untyped_storage().data_ptr() for leaf in read.values()}
        if func._schema.is_mutable or not storages & {leaf.untyped_storage().data_ptr() for leaf in written}:  # no view
            self.bytes += sum(leaf.nbytes for leaf in (*read.values(), *written))
        return out


def test_the_traffic_of_adafactor_is_that_of_its_operators():
    """Of a large matrix, beside which its rows, columns and norms are few."""
    settings = OptimizerSettings(name="adafactor", max_grad_norm=None)
    matrix = nn.Linear(1024, 2048, bias=False)
    matrix.weight.grad = torch.ones_like(matrix.weight)
    update = single_device_update(matrix, settings)
    update()
    with Traffic() as seen:
        update()
    planned = estimated(lambda: [Product(3, 5)], SquareLoss(), rows(11, 3), TRAFFIC, settings)[0].update_s / 15
    assert seen.bytes / matrix.weight.numel() == pytest.approx(planned, rel=0.01)


def test_the_operations_of_an_encoder_layer():
    """Projections, and attention: two products of (time, 64) a head forward, five backward (one made again)."""
    batch, time, width, heads, hidden = 3, 8, 32, 2, 48
    shape = transformer.TransformerShape(1, width, hidden, heads, vocabulary=50)
    ids = torch.ones(batch, time, dtype=torch.int64)
    costs = estimated(lambda: transformer.layers(shape), TranslationLoss(0.1), MicroBatch((ids, ids), (ids,)))
    across = 64 * heads
    linear = 2 * batch * time * (width * 3 * across + across * width + 2 * width * hidden)
    product = 2 * batch * heads * time * time * 64
    encoder = costs[1]
    assert encoder.forward_s == encoder.recompute_s == linear + 2 * product
    assert encoder.backward_s == 2 * linear + 5 * product


@pytest.mark.parametrize("optimizer", [ADAMW, BF16], ids=["fp32", "bf16"])
def test_bytes_of_transformer_layers_are_those_measured(optimizer, monkeypatch):
    """In fp32 to the byte; under autocast the CPU's own products take room that no operator shows, and its norms keep a
    mean and a deviation a row in fp32 where the shape inference has them in bf16. Its attention is not in fp32 here.
    An estimate counts the masks in each layer, a measured layer has those of its forward before."""
    monkeypatch.setattr(blocks, "_is_slow_in_bf16", lambda query: False)
    shape = transformer.TransformerShape(1, 64, 128, 2, vocabulary=100, head_width=32)
    ids = torch.randint(4, 100, (4, 16), generator=torch.Generator().manual_seed(0))
    args = (lambda: transformer.layers(shape), TranslationLoss(0.1), MicroBatch((ids, ids), (ids,)))
    found, real = estimated(*args, optimizer=optimizer), measured(*args, monkeypatch, optimizer=optimizer)
    encoder, target_embedding, decoder = 1, 2, 3
    rows, norms = ids.numel(), {0: 0, encoder: 2, target_embedding: 1, decoder: 3, 4: 1}
    masks = {encoder: 1, decoder: 2}  # of 4 rows of 16 places
    for at, one in enumerate(found):
        of_norms = rows * norms[at] * 4 if optimizer is BF16 else 0
        of_masks = masks.get(at, 0) * 4 * 16 * 16 * (2 if optimizer is BF16 else 4)
        found[at] = replace(
            one,
            activation_bytes=one.activation_bytes + of_norms - of_masks,
            graph_peak_bytes=one.graph_peak_bytes - of_masks,
        )
    for at in (encoder, target_embedding, decoder):
        names = SIZES if optimizer is ADAMW else ALIVE
        assert sizes(found[at], names) == sizes(real[at], names)
        assert found[at].update_peak_bytes == pytest.approx(real[at].update_peak_bytes, abs=64)
        assert 0 <= real[at].deferred_bytes - found[at].deferred_bytes <= found[at].boundary_bytes
        assert (found[at].deferred_bytes > 0) == (at != target_embedding)  # which has no matrix product
    products = {0: 0, encoder: 4 * 64 * 64 + 2 * 64 * 128 + 4 * 64 + 128 + 64}
    for at, values in products.items():
        assert found[at].cast_bytes == (2 * values if optimizer is BF16 else 0)
    embedding, head = 0, 4  # the kernels of the loss take room of their own, so peaks of the head differ
    for at in (embedding, head):
        assert sizes(found[at], ALIVE) == sizes(real[at], ALIVE)


def test_bytes_of_convolutions_are_those_measured_but_for_the_kernels_own(monkeypatch):
    images = MicroBatch((torch.randn(4, 3, 16, 16),), (torch.zeros(4, dtype=torch.int64),))
    args = (lambda: resnet.layers(8, 2, 10), ClassificationLoss(0.0), images)
    for found, real in zip(estimated(*args), measured(*args, monkeypatch), strict=True):
        assert found.activation_bytes == real.activation_bytes
        for name in PEAKS:
            assert 0 < getattr(found, name) <= getattr(real, name)


def test_temporary_bytes_of_adafactor_are_those_of_the_norm(monkeypatch):
    """Of a matrix that is too large for a batch; the batches of a stage are counted by ``experiments.planning``."""
    monkeypatch.setattr(adafactor, "BATCH_BYTES", 4 * 64 * 512)
    args = (lambda: [Product(64, 512), Through()], SquareLoss(), rows(4, 64))
    optimizer = OptimizerSettings(name="adafactor")
    found, real = estimated(*args, optimizer=optimizer)[0], measured(*args, monkeypatch, optimizer)[0]
    assert found.update_peak_bytes == pytest.approx(real.update_peak_bytes, abs=64)


@pytest.mark.parametrize("name", ["nothing", "layers before one of their class", "weights", "biases"])
def test_bytes_of_layers_with_odd_boundaries_and_of_frozen_ones_are_those_measured(name, monkeypatch):
    """The toy layers: ids, masks and an idle input cross with the floats."""
    ids, labels = toy_batch(4)

    def make():
        return freeze(toy_layers(), FREEZES[name])

    args = (make, SumLoss(), MicroBatch((ids,), (labels,)))
    found, real = estimated(*args), measured(*args, monkeypatch)
    for at, layer in enumerate(make()):
        if at > 0:  # the kernels of the embedding take room of their own
            names = ("activation_bytes", "forward_peak_bytes", "backward_peak_bytes")
            assert sizes(found[at], names) == sizes(real[at], names), at
        assert found[at].parameters == sum(p.numel() for p in layer.parameters())
        assert found[at].frozen == sum(p.numel() for p in layer.parameters() if not p.requires_grad)
        assert found[at].update_peak_bytes == pytest.approx(real[at].update_peak_bytes, abs=64)
        assert 0 <= real[at].deferred_bytes - found[at].deferred_bytes <= found[at].boundary_bytes
    # x, ids, mask and the idle tensor of 4 rows, 5 places, width 6; with nothing frozen gradients for the two of floats
    x, idle = 4 * 5 * 6 * 4, 4 * 6 * 4
    assert found[1].boundary_bytes == x + 4 * 5 * 8 + 4 * 5 + idle
    assert name != "nothing" or found[1].gradient_bytes == x + idle


def test_a_frozen_layer_has_no_update_and_no_backward_of_its_weight():
    def layers(*frozen):
        return freeze([Product(4, 4), Product(4, 4), Product(4, 4), Through()], frozen)

    args = SquareLoss(), rows(8, 4), replace(PRODUCTS, bandwidth=1e-3)
    plain, some, between = (estimated(lambda made=made: layers(*made), *args) for made in ((), (0, 1), (1,)))
    assert [cost.update_s > 0 for cost in some] == [False, False, True, False]
    assert [cost.backward_s for cost in some[:2]] == [0, 0]
    assert some[2].backward_s == plain[0].backward_s  # what it takes needs no gradient by now, as the first one's input
    assert between[1].backward_s == between[1].forward_s  # what it takes needs one, its weight does not: one product
    assert [cost.frozen for cost in some] == [16, 16, 0, 0]


def test_what_a_layer_pops_is_among_its_costs():
    """Layer 2 pops the output of layer 0, (2, 4, 3, 3) in fp32, and signs, (2, 1, 3, 3) in int64 without a gradient."""
    images, labels = skipping_batch(2, 0, torch.float32)
    costs = estimated(skipping_layers, SumOfErrors(), MicroBatch((images,), (labels,)))
    assert costs[2].skip_inputs == (SkipInput(2, 288, 288, True), SkipInput(2, 144, 0, False))


def test_equal_layers_are_estimated_once():
    def runs(layers):
        Product.runs = 0
        costs = estimated(lambda: [*(Product(4, 4) for _ in range(layers)), Through()], SquareLoss(), rows(2, 4))
        # the first takes inputs without a gradient, so it is not like the others
        assert all(cost == costs[1] for cost in costs[1:-1])
        assert costs[0] != costs[1]
        return Product.runs

    assert runs(3) == runs(40) > 0


def test_a_layer_of_a_billion_parameters_takes_no_memory():
    width, before = 31_623, resident()
    tracemalloc.start()
    cost = estimated(lambda: [Product(width, width), Through()], SquareLoss(), rows(1, width))[0]
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert cost.parameters == width**2 > 10**9
    assert cost.backward_peak_bytes == 4 * width**2  # the weight's gradient, before it is added to the one that stands
    assert most < 32 << 20
    assert resident() - before < 256 << 20


def resident():
    """The most bytes of this process that were ever in memory."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
