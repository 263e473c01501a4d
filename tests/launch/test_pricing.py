"""Measured costs are kept and found again; what cannot be measured here is estimated, and says so."""

import json
from dataclasses import replace

import pytest

from experiments.cluster import GIB, Cluster, parse_cluster
from experiments.language import LanguageModel
from experiments.planning import estimated_price, make
from launch import pricing
from launch.measure import Measured
from models.language_model import LanguageModelShape
from suite.pipeline.costs import LayerCost
from suite.pipeline.devices import DEVICES
from suite.pipeline.plan import Machine
from suite.pipeline.simulate import Link
from suite.settings import PipelineSettings

THIS = Cluster(2, 4 * GIB, "cpu")
TINY = LanguageModelShape(3, width=16, feed_forward=32, heads=2, vocabulary=50, time=8)
COST = LayerCost(1e-3, 1.5e-3, 3e-3, 1e-4, 5_000, 4096, 4096, 20_000, 1000, 2000, 3000, 400)
COSTS = (replace(COST, gradient=0), *[COST] * 3, replace(COST, parameters=7_000))


def work(stages=2, shape=TINY, **pipeline):
    return LanguageModel(shape, PipelineSettings(stages=stages, micro_batches=4, **pipeline))


@pytest.fixture
def measured(monkeypatch):
    """Returns the calls of what would start processes to measure; it gives numbers of its own instead."""
    calls = []

    def run(target, workers, work, threads, use_gpu, log):
        calls.append((workers, threads))
        return [Measured(COSTS, Link(2e-4, 1.5e9), 300_000_000)] * workers

    monkeypatch.setattr("launch.spawn.run_processes", run)
    monkeypatch.setattr(pricing, "cores", lambda: 2)
    monkeypatch.setattr(pricing, "this_device", lambda memory: replace(DEVICES["H100"], memory=memory, attained=1.0))
    return calls


def ignore(text):
    """Takes what is said to the person at the terminal."""


def test_a_second_price_comes_from_the_file(measured, tmp_path):
    said = []
    price = pricing.pricer(tmp_path / "costs", said.append)
    first, second = price(work(), THIS), price(work(remat="never"), THIS)
    assert measured == [(2, 1)]
    assert second.costs == first.costs == COSTS
    assert second.machine == first.machine
    assert first.measured
    assert second.measured
    assert (first.source.endswith("; kept"), second.source.endswith("; kept")) == (False, True)
    assert len(said) == 1
    assert said[0].startswith("measuring the layers on this machine's ")
    assert "2 at once, 1 threads each" in said[0]


def test_other_work_or_other_company_is_measured_anew(measured, tmp_path):
    price = pricing.pricer(tmp_path, ignore)
    for asked in (
        work(),
        work(stages=1),  # alone, with both cores
        work(replicas=2),  # smaller micro-batches
        work(shape=replace(TINY, feed_forward=64)),
        work().with_settings("optimizer.name=adafactor"),
    ):
        price(asked, THIS)
    assert measured == [(2, 1), (1, 2), (2, 1), (2, 1), (2, 1)]
    price(work(stages=4), THIS)  # more workers than cores take turns: two at once as before
    assert len(measured) == 5


def test_what_was_kept_is_planned_with_the_memory_there_is_now(measured, tmp_path):
    price = pricing.pricer(tmp_path, ignore)
    price(work(), THIS)
    found = price(work(), replace(THIS, bytes_per_device=3 * GIB))
    assert len(measured) == 1
    assert found.machine.limit == 3 * GIB
    assert make(work(), replace(THIS, bytes_per_device=3 * GIB), price).as_dict()["device_bytes"] == 3 * GIB


@pytest.mark.parametrize(
    "harm",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: "null",
        lambda text: text.replace("backward_s", "sideways_s"),
        lambda text: text.replace('"link"', '"chain"'),
        lambda text: json.dumps({**json.loads(text), "costs": 3}),
    ],
)
def test_a_damaged_file_is_measured_again_and_mended(measured, tmp_path, harm):
    price = pricing.pricer(tmp_path, ignore)
    first = price(work(), THIS)
    (path,) = tmp_path.glob("*.json")
    path.write_text(harm(path.read_text()))
    assert price(work(), THIS) == first
    assert len(measured) == 2
    assert price(work(), THIS).costs == COSTS
    assert len(measured) == 2


def test_a_worker_alone_whose_link_has_no_bound_is_kept_too(monkeypatch, tmp_path, measured):
    monkeypatch.setattr("launch.spawn.run_processes", lambda *_: [Measured(COSTS, Link(), 0)])
    price = pricing.pricer(tmp_path, ignore)
    assert price(work(1), THIS).machine == price(work(1), THIS).machine == Machine(4 * GIB, 0, Link(), float("inf"))


def test_a_declared_device_is_never_measured(measured, tmp_path):
    cluster = parse_cluster("2xH100", THIS)
    found = pricing.pricer(tmp_path / "costs", pytest.fail)(work(), cluster)
    assert measured == []
    assert not (tmp_path / "costs").exists()
    assert not found.measured
    assert found == estimated_price(work(), cluster)


def test_measuring_that_would_take_too_long_is_not_begun_and_that_is_said(measured, tmp_path, monkeypatch):
    monkeypatch.setattr(pricing, "this_device", lambda memory: replace(DEVICES["H100"], memory=memory, fp32=1e9))
    paper = LanguageModel(LanguageModelShape(13), PipelineSettings(stages=2, micro_batches=32))
    price = pricing.pricer(tmp_path, pytest.fail)
    planned = make(paper, Cluster(2, 64 * GIB, "cpu"), price)
    assert measured == []
    assert not planned.price.measured
    # a block's 24 d^2 + 4 T d operations a token, four times over, at half of 1e9 a second: 7 rounds of 8 copies
    block_s = 4 * 1024 * (24 * 2048**2 + 4 * 1024 * 2048) / 0.5e9
    seconds = int(planned.price.source.rpartition("take ")[2].removesuffix(" s"))
    assert 7 * 8 * block_s < seconds < 1.5 * 7 * 8 * block_s
    assert "as measuring would take" in planned.lines()[0]
    assert "estimated layer costs" in planned.lines()[0]
    assert "estimated" in planned.kind


@pytest.mark.parametrize(("layers", "fits"), [(1, True), (8, False)])
def test_layers_that_do_not_fit_together_are_not_measured_together(measured, tmp_path, layers, fits):
    """Equal layers are measured eight at once: 16 bytes for each of a block's 12 d^2 + 13 d values, eight times."""
    shape = LanguageModelShape(layers, width=256, feed_forward=1024, heads=4, vocabulary=50, time=8)
    block = 16 * (12 * 256**2 + 13 * 256)
    found = pricing.pricer(tmp_path, ignore)(work(shape=shape), Cluster(2, 4 * block, "cpu"))
    assert (found.measured, len(measured)) == (fits, int(fits))
    assert found.source.endswith("a layer does not fit to be measured") != fits


def test_processes_that_measured_at_once_are_one_cost_their_mean_seconds_and_most_bytes():
    other = replace(COST, forward_s=3e-3, update_s=3e-4, activations=30_000, graph_peak=100)
    joined = pricing._joined((COST, other))
    assert (joined.forward_s, joined.rebuild_s) == pytest.approx((2e-3, 1.5e-3))
    assert joined.update_s == pytest.approx(2e-4)
    assert (joined.activations, joined.graph_peak, joined.parameters) == (30_000, 2000, 5000)


def test_layers_are_measured_in_processes_of_this_machine(tmp_path):
    """The real thing, small: two processes, the link between them, and a plan of it."""
    price = pricing.pricer(tmp_path, ignore)
    planned = make(work(), THIS, price)
    assert planned.price.measured
    assert "simulated from measured layer costs" in planned.lines()[0]
    costs, machine = planned.price.costs, planned.price.machine
    block = 4 * (16 * 16 + 16) + (2 * 16 * 32 + 32 + 16) + 4 * 16  # attention, feed-forward, norms
    assert [cost.parameters for cost in costs] == [50 * 16, block, block, block, 50 * 17]
    assert all(cost.forward_s > 0 and cost.rebuild_s > 0 for cost in costs)
    # 32 sequences in 4 micro-batches: 8 rows of 8 ids of 8 bytes arrive first, then 16 fp32 columns
    assert [cost.boundary for cost in costs] == [8 * 8 * 8, *[8 * 8 * 16 * 4] * 4]
    assert 50e6 < machine.process < 4 * GIB
    assert 0 < machine.link.latency_s < 1
    assert machine.link.bytes_per_s > 0
    assert price(work(), THIS).costs == costs


def test_what_measuring_would_take_is_judged_by_the_clusters_device_not_this_machines(measured, tmp_path):
    slow = replace(DEVICES["H100"], fp32=1e3, bf16=1e3)
    price = pricing.pricer(tmp_path, ignore, look=lambda cluster: slow)
    assert not price(work(), THIS).measured
    assert not measured
    assert pricing.pricer(tmp_path, ignore, look=lambda cluster: DEVICES["H100"])(work(), THIS).measured
