"""Measured layer costs: seconds of layers that sleep, bytes counted by hand or estimated, what is measured once."""

from dataclasses import asdict, replace

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from experiments.tables import sleeping
from experiments.tables.sleeping import SyntheticLayer
from suite.pipeline.planning import measure as measuring
from suite.pipeline.planning.costs import check_costs
from suite.pipeline.planning.devices import DEVICES
from suite.pipeline.planning.estimate import estimate
from suite.pipeline.planning.measure import LEAST_ROUNDS, WARM_UPS, measure
from suite.pipeline.planning.sample import Sample
from suite.settings import OptimizerSettings
from suite.training.stage_optimizer import single_device_update
from tests.suite.pipeline.planning.costs import MEASURED_BYTES, without_bytes
from tests.suite.pipeline.planning.test_estimate import Product, rows
from tests.suite.pipeline.toy import SquareLoss

CPU = torch.device("cpu")
FLOAT = 4


class Clock:
    """Goes on by what is slept alone, so that what is measured is known."""

    now = 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def perf_counter(self) -> float:
        return self.now


class SlowAtFirst(nn.Module):
    """Sleeps longer while it is run for the first few times, but not so long that such a round is left out."""

    runs = 0

    def forward(self, x: Tensor) -> Tensor:
        if not x.is_meta:
            SlowAtFirst.runs += 1
            measuring.time.sleep(0.05 if SlowAtFirst.runs <= 1 + 2 * WARM_UPS else 0.04)
        return torch.relu(x)


class Warm(nn.Module):
    """Sleeps twice as long if another layer ran before it."""

    last: type

    def forward(self, x: Tensor) -> Tensor:
        if not x.is_meta:
            measuring.time.sleep(0.01 if getattr(Warm, "last", None) is type(self) else 0.02)
            Warm.last = type(self)
        return torch.relu(x)


class WarmOther(Warm):
    pass


class Halved(nn.Module):
    """x (rows, width) -> (rows, width / 2)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(()))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).unflatten(1, (-1, 2)).sum(2)

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    monkeypatch.setattr(measuring, "SECONDS_A_LAYER", 0.0)


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(measuring, "time", clock)
    monkeypatch.setattr(sleeping, "time", clock)
    return clock


def measured(layers, typical, largest=None, make_update=lambda module: lambda: None, meet=bool, known=None, **limits):
    """Returns measured costs: seconds and bytes are those that the measurement finds, or with ``known`` estimates at
    least their bytes."""
    with torch.device("meta"):
        made = layers()
    sample = Sample(typical, largest or typical)
    estimated = known or without_bytes(estimates(made, sample.largest))
    costs = measure(estimated, made, SquareLoss(), sample, CPU, "fp32", make_update, meet, **limits)
    check_costs(costs)
    assert len(costs) == len(made)
    return costs


def estimates(layers, micro_batch):
    return estimate(layers, SquareLoss(), micro_batch, DEVICES["TPUv3"], OptimizerSettings())


def test_seconds_are_those_slept(clock):
    """Of the second, timed with the copy after it, those of one."""
    costs = measured(lambda: [SyntheticLayer(0.01, 0.01, 0.01) for _ in range(4)], rows(1, 1))
    for cost in costs:
        assert cost.forward_s == pytest.approx(0.01)
        assert cost.recompute_s == pytest.approx(0.01)
        assert cost.backward_s == pytest.approx(0.02)
        assert cost.weight_grad_s == pytest.approx(0.01)
        assert cost.update_s == 0


def test_seconds_are_those_of_all_layers_together(clock, monkeypatch):
    """Each takes twice as long after another one. A pass that is slow or takes much of the memory is not timed: then
    they are as alone."""
    for cost in measured(lambda: [Warm(), WarmOther()], rows(1, 1)):
        assert (cost.forward_s, cost.recompute_s) == pytest.approx((0.02, 0.02))
    of_both = sum(cost.activation_bytes for cost in measured(lambda: [Warm(), WarmOther()], rows(1, 1)))
    alone = measured(lambda: [Warm(), WarmOther()], rows(1, 1), memory_bytes=4 * of_both)
    monkeypatch.setattr(measuring, "LONGEST_PASS_S", 0.03)
    for cost in (*alone, *measured(lambda: [Warm(), WarmOther()], rows(1, 1))):
        assert (cost.forward_s, cost.recompute_s) == pytest.approx((0.01, 0.01))


def test_an_update_is_timed_on_its_own(clock):
    (cost,) = measured(lambda: [Product(2, 2)], rows(1, 2), make_update=lambda module: lambda: clock.sleep(0.02))
    assert cost.update_s == pytest.approx(0.02)
    assert cost.seconds == 0


def test_the_first_rounds_do_not_count(clock):
    """Once to see what leaves the layer, then a forward and a recompute in each round."""
    (cost,) = measured(lambda: [SlowAtFirst()], rows(1, 1))
    assert (cost.forward_s, cost.recompute_s) == pytest.approx((0.04, 0.04))


def test_bytes_of_a_product_by_hand():
    """Weight (w, w), x and y (n, w)."""
    count, width = 32, 16
    x, weight = count * width * FLOAT, width * width * FLOAT
    costs = measured(lambda: [*(Product(width, width) for _ in range(3)), nn.ReLU()], rows(count, width))
    first, second, third, _ = costs
    assert first.parameters == second.parameters == width * width
    assert (first.boundary_bytes, first.gradient_bytes) == (x, 0)
    assert (second.boundary_bytes, second.gradient_bytes) == (x, x)
    for cost in (first, second, third):
        assert cost.activation_bytes == x  # y; what the backward needs of x is x itself
        assert (cost.forward_peak_bytes, cost.graph_peak_bytes) == (x, x)
        assert cost.update_peak_bytes == 0
    assert first.backward_peak_bytes == weight  # before it is added to the gradient that stands
    assert second.backward_peak_bytes == weight + x


def test_an_update_needs_room_but_its_state_stands_already():
    """AdamW's moments are made by the first update; what is counted is the norm's squares in fp64."""
    settings = OptimizerSettings()
    cost = measured(
        lambda: [Product(64, 64), nn.ReLU()], rows(2, 64), make_update=lambda m: single_device_update(m, settings)
    )[0]
    assert cost.update_peak_bytes == pytest.approx(2 * FLOAT * 64 * 64, abs=64)
    assert cost.update_s > 0


class Buffered(nn.ReLU):
    """Writes to a buffer of its own, which is allocated by the first forward with values: an estimate sees none."""

    def forward(self, x: Tensor) -> Tensor:
        if not x.is_meta and not isinstance(x, FakeTensor):
            self.buffer = torch.zeros(100 * x.numel())
            self.buffer[: x.numel()] = x.detach().flatten()
        return torch.relu(x)


def test_a_layers_own_buffer_that_the_estimate_does_not_see_is_added():
    def layers():
        return [Product(4, 4), nn.ReLU(), Buffered(), Product(4, 4)]

    with torch.device("meta"):
        known = estimates(layers(), rows(8, 4))
    assert known[2] == known[1], "the estimate sees the buffer"
    plain, buffered = measured(layers, rows(8, 4), known=known)[1:3]
    x = 8 * 4 * FLOAT
    assert plain.forward_peak_bytes == x
    assert 100 * x <= buffered.forward_peak_bytes <= 102 * x
    assert 100 * x <= buffered.graph_peak_bytes <= 102 * x


def sizes(costs):
    return [{name: size for name, size in asdict(cost).items() if name.endswith("_bytes")} for cost in costs]


def test_a_measurement_that_reads_less_lowers_no_byte():
    def layers():
        return [Product(4, 4), nn.ReLU(), Product(4, 4)]

    with torch.device("meta"):
        less = estimates(layers(), rows(8, 4))
    more = [replace(cost, **{name: 1000 + getattr(cost, name) for name in MEASURED_BYTES}) for cost in less]
    assert sizes(measured(layers, rows(8, 4), known=more)) == sizes(more)


class Hoarding(nn.ReLU):
    """Frees what it has kept after every second forward, which kept more each time."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.kept = 0, []

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.kept.append(torch.empty(2**12 * self.calls))
        if self.calls % 2 == 0:
            self.kept.clear()
        return torch.relu(x)


def test_no_measured_size_is_below_zero():
    for cost in measured(lambda: [Product(4, 4), Hoarding(), Product(4, 4), nn.ReLU()], rows(2, 4)):
        assert min(value for name, value in asdict(cost).items() if name.endswith("_bytes")) >= 0


def test_seconds_are_of_the_typical_and_bytes_of_the_largest_micro_batch():
    costs = measured(lambda: [Product(16, 16), nn.ReLU()], rows(3, 16), rows(40, 16))
    assert [cost.boundary_bytes for cost in costs] == [40 * 16 * FLOAT] * 2


class Made(list):
    """Makes updates that do nothing; the numbers of layers that are measured together."""

    def __call__(self, module):
        self.append(len(module))
        return lambda: None


def test_equal_layers_are_measured_once_and_share_their_numbers():
    costs = measured(lambda: [Product(8, 8) for _ in range(6)], rows(4, 8), make_update=(made := Made()))
    assert costs[1] == costs[2] == costs[3] == costs[4]
    assert costs[0] != costs[1]  # its inputs carry no gradient
    # seconds: the first alone, the second and three copies, the last alone; each alone for its bytes; all together
    assert made == [1, 4, 1, 1, 1, 1, 6]


def test_equal_layers_that_change_the_shape_are_each_measured_on_their_own_inputs():
    layers = [Halved, Halved, Halved, lambda: Product(4, 4)]
    costs = measured(lambda: [layer() for layer in layers], rows(3, 32), make_update=(made := Made()))
    assert made == [1] * 8 + [4]
    assert [cost.boundary_bytes for cost in costs] == [3 * width * FLOAT for width in (32, 16, 8, 4)]
    assert [cost.gradient_bytes for cost in costs] == [0, *(3 * width * FLOAT for width in (16, 8, 4))]


def test_processes_measure_while_they_agree_to():
    """Each round is asked for; a process that has enough goes on as long as the others want."""
    wishes = []

    def meet(wish):
        wishes.append(wish)
        return wish or len(wishes) == WARM_UPS + LEAST_ROUNDS + 1

    measured(lambda: [nn.ReLU()], rows(2, 2), meet=meet)
    assert wishes == [True] * (WARM_UPS + LEAST_ROUNDS) + [False, False]


def test_rounds_drawn_out_by_other_work_do_not_count():
    assert measuring._ordinary_mean([1.0, 1.2, 1.4, 9.0, 1.2]) == pytest.approx(1.2)
    assert measuring._ordinary_mean([0.0, 0.0, 1.0]) == 0.0
