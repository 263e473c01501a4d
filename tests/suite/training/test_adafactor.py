"""Adafactor in batches: torch's values, the bits of each parameter by itself, and no wait of the host."""

import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from suite.pipeline.planning.estimate import OperatorRecorder
from suite.training import adafactor
from suite.training.adafactor import BATCH_COPIES, Adafactor

SHAPES = ((64, 192), (64, 64), (2000, 64), (40000, 1), (64,), (1, 64), (3, 5, 7), (33, 1), ())


@pytest.fixture(autouse=True)
def _threads_as_before():  # not ``threads``: a parameter of that name would replace it
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def draw(shapes, seed, dtype=torch.float32):
    """Returns a tensor of each shape; one with a million times smaller values follows one with ordinary ones."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(shape, generator=generator, dtype=torch.float64) * 10.0 ** (-6 * (at % 2))).to(dtype)
        for at, shape in enumerate(shapes)
    ]


def parameters_of(values):
    return [torch.nn.Parameter(value.clone()) for value in values]


def walk(optimizer, parameters, gradients):
    """Takes a step with each list of gradients."""
    for of_step in gradients:
        for parameter, gradient in zip(parameters, of_step, strict=True):
            parameter.grad = None if gradient is None else gradient.clone()
        optimizer.step()


def results(parameters, optimizer):
    """Returns the values and the states of the parameters."""
    return [(p.detach(), dict(optimizer.state[p])) for p in parameters]


def trained(values, gradients, **settings):
    parameters = parameters_of(values)
    optimizer = Adafactor(parameters, lr=0.02, **settings)
    walk(optimizer, parameters, gradients)
    return results(parameters, optimizer)


def assert_same_bits(one, other):
    for (value, state), (other_value, other_state) in zip(one, other, strict=True):
        assert torch.equal(value, other_value)
        assert state.keys() == other_state.keys()
        assert all(torch.equal(state[name], other_state[name]) for name in state)


def beside_torchs(groups, steps=4):
    """Trains two copies of the same groups, by torch and by ours; returns the results of both."""
    found = []
    for make in (torch.optim.Adafactor, Adafactor):
        own = copy.deepcopy(groups)
        parameters = [parameter for group in own for parameter in group["params"]]
        optimizer = make(own)
        shapes = [parameter.shape for parameter in parameters]
        walk(optimizer, parameters, [draw(shapes, 100 + step, torch.float64) for step in range(steps)])
        found.append(results(parameters, optimizer))
    return found


def assert_close(expected, found):
    for (value, state), (own_value, own_state) in zip(expected, found, strict=True):
        torch.testing.assert_close(own_value, value, rtol=1e-12, atol=1e-14)
        kept = {name: tensor for name, tensor in state.items() if tensor is not None}
        assert own_state.keys() == kept.keys()
        for name, tensor in kept.items():
            assert own_state[name].dtype == tensor.dtype
            assert own_state[name].device == tensor.device
            torch.testing.assert_close(own_state[name], tensor, rtol=1e-12, atol=0)  # the shape too


def test_values_and_states_are_those_of_torch_with_a_rate_and_a_decay_of_each_group():
    """Three of each shape, so that batches have one, two and all three of them."""

    def group(**settings):
        values = [value for shape in SHAPES for value in draw([shape] * 3, len(shape), torch.float64)]
        return {"params": parameters_of(values), **settings}

    groups = [group(), group(lr=0.5, weight_decay=0.1), group(lr=0.0, weight_decay=0.3)]
    assert_close(*beside_torchs(groups))


def test_gradients_of_zeros_keep_parameters():
    """All roots are at their lower bound then; torch's rule does the same."""
    values = draw(SHAPES, 0)
    for (value, _), before in zip(trained(values, [[torch.zeros_like(v) for v in values]] * 2), values, strict=True):
        assert torch.equal(value, before)


@pytest.mark.parametrize(("threads", "is_host"), [(2, True), (1, False)])
@pytest.mark.parametrize("shape", [(64, 192), (2000, 64), (40000, 1), (64,), (3, 5, 7), ()], ids=str)
def test_a_parameter_has_the_same_bits_alone_and_in_any_batch(shape, threads, is_host, monkeypatch):
    """On a device, with some shapes that are always alone."""
    torch.set_num_threads(threads)
    monkeypatch.setattr(adafactor, "is_host", lambda device: is_host)
    monkeypatch.setattr(adafactor, "BATCH_BYTES", 1 << 20 if is_host else 1 << 15)
    most = 7 if shape in ((2000, 64), (40000, 1)) else 24  # these are large, and have several batches
    values = draw([shape] * most, 1)
    gradients = [draw([shape] * most, 2 + step) for step in range(2)]
    alone = [
        trained([value], [[of_step[at]] for of_step in gradients], weight_decay=0.1)[0]
        for at, value in enumerate(values)
    ]
    for count in sorted({1, 2, 3, 7, most}):
        batch = trained(values[:count], [of_step[:count] for of_step in gradients], weight_decay=0.1)
        assert_same_bits(batch, alone[:count])


def test_gradients_whose_memory_is_ordered_otherwise_change_no_bits():
    values, gradients = draw([(16, 24)] * 3, 5), draw([(16, 24)] * 3, 6)
    turned = [gradient.t().contiguous().t() for gradient in gradients]
    assert_same_bits(trained(values, [gradients]), trained(values, [[turned[0], gradients[1], turned[2]]]))


def test_steps_that_differ_are_those_of_each_parameter():
    """Of three alike, one has no gradient in the first step, and one a state that was loaded."""
    values, gradients = draw([(8, 6)] * 3, 7), [draw([(8, 6)] * 3, 8 + step) for step in range(3)]
    others = trained(values[2:], [[of_step[2]] for of_step in gradients])[0]
    parameters = parameters_of(values)
    optimizer = Adafactor(parameters, lr=0.02)
    parameters[2].data.copy_(others[0])
    optimizer.state[parameters[2]] = {name: value.clone() for name, value in others[1].items()}
    walk(optimizer, parameters, [[gradients[0][0], None, gradients[0][2]], gradients[1]])
    assert [float(optimizer.state[parameter]["step"]) for parameter in parameters] == [2, 1, 5]
    for at, of_each in enumerate(
        ([gradients[0][0], gradients[1][0]], [gradients[1][1]],
         [*(of_step[2] for of_step in gradients), gradients[0][2], gradients[1][2]])
    ):  # fmt: skip
        found = results(parameters, optimizer)[at : at + 1]
        assert_same_bits(found, trained(values[at : at + 1], [[gradient] for gradient in of_each]))


class Waits(TorchDispatchMode):
    """Counts what a host reads of tensors, and what has a shape that depends on values."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        aten = torch.ops.aten
        self.count += func._overloadpacket in (aten._local_scalar_dense, aten.nonzero, aten.masked_select)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("make", "waits"),
    [(Adafactor, 0), (torch.optim.Adafactor, 3)],
    ids=["ours", "torch's"],
)
def test_a_step_reads_no_value(make, waits):
    """torch's reads two norms and the step count of each parameter."""
    parameters = parameters_of(draw(SHAPES * 2, 9))
    optimizer = make(parameters)
    for step in range(2):
        for parameter, gradient in zip(parameters, draw(SHAPES * 2, 10 + step), strict=True):
            parameter.grad = gradient
        with Waits() as seen:
            optimizer.step()
        assert seen.count == waits * len(parameters)


def test_a_large_gradient_is_not_copied_and_small_ones_are_within_the_bytes_planned(monkeypatch):
    monkeypatch.setattr(adafactor, "BATCH_BYTES", 4 * 32 * 16 * 5)
    large, vector, small = (64, 64), (32 * 16,), (32, 16)
    for shape, most in ((large, 4 * 64 * 64), (vector, BATCH_COPIES * 4 * 32 * 16 * 5), (small, 3 * 4 * 32 * 16 * 5)):
        parameters = parameters_of(draw([shape] * 11, 12))
        optimizer = Adafactor(parameters)
        walk(optimizer, parameters, [draw([shape] * 11, 13)])
        with OperatorRecorder() as walked:
            optimizer.step()
        assert most / 2 < walked.peak <= most + 8 * sum(shape) * 5 + 4096
