"""Measured costs are kept and found again; what cannot be measured here is estimated, and says so."""

import json
import re
import time
from dataclasses import replace

import pytest

from experiments.cluster import GIB, Cluster, parse_cluster
from experiments.language import LanguageModel
from experiments.planning import estimated_price, make
from launch import pricing
from launch.measure import Measured
from launch.runs import RunFolder
from launch.step_check import StepCheck
from models.language_model import LanguageModelShape
from suite.pipeline.costs import LayerCost
from suite.pipeline.devices import DEVICES
from suite.pipeline.plan import Machine
from suite.pipeline.simulate import Link
from suite.settings import PipelineSettings

THIS = Cluster(2, 4 * GIB, "cpu")
TINY = LanguageModelShape(3, width=16, feed_forward=32, heads=2, vocabulary=50, time=8)
COST = LayerCost(1e-3, 1.5e-3, 3e-3, 1e-4, 5_000, 4096, 4096, 20_000, 1000, 2000, 3000, 400, spread=1.2)
COSTS = (replace(COST, gradient=0), *[COST] * 3, replace(COST, parameters=7_000))


def work(stages=2, shape=TINY, **pipeline):
    return LanguageModel(shape, PipelineSettings(stages=stages, micro_batches=4, **pipeline))


@pytest.fixture
def measured(monkeypatch):
    """Returns the calls of what would start processes to measure; it gives numbers of its own instead."""
    calls = []

    def run(target, workers, work, threads, use_gpu, log):
        calls.append((workers, threads))
        return [Measured(COSTS, Link(2e-4, 1.5e9), 300_000_000, load=3.5)] * workers

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
    assert first.source.endswith(", 2 at once, 1 threads each, load 3.5, spread 1.20")
    assert second.source == f"{first.source}; kept"
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
    assert all(1 < cost.spread < 100 for cost in costs)
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


def test_what_an_earlier_process_measured_is_measured_again_once_where_that_is_asked(measured, tmp_path, monkeypatch):
    said = []
    price = pricing.pricer(tmp_path, said.append)
    price(work(), THIS)
    monkeypatch.setattr(pricing, "STARTED", time.time())
    monkeypatch.setenv("REMEASURE", "0")
    price(work(), THIS)
    assert len(measured) == 1
    monkeypatch.setenv("REMEASURE", "1")
    assert not price(work(), THIS).source.endswith("; kept")
    assert price(work(), THIS).source.endswith("; kept")
    assert len(measured) == 2
    assert said[1].startswith("measuring the layers again, as REMEASURE asks, on ")


@pytest.fixture
def begun(measured, tmp_path):
    """Returns a function that plans with what is kept, and lets a run's steps take so many times what the plan says;
    it returns what was said."""
    run = RunFolder(tmp_path)

    def begin(factor, steps=range(1, 8)):
        said = []
        planned = make(work(), THIS, pricing.pricer(tmp_path / "costs", said.append))
        check = StepCheck(run, lambda: planned, said.append)
        for step in steps:
            check.step(step, planned.step_s * (9 if step < 3 else factor))
        return said

    return begin


@pytest.mark.parametrize("factor", [1.5, 0.2])
def test_costs_that_the_first_steps_disagree_with_are_measured_again(begun, measured, monkeypatch, factor):
    assert len(begun(1.25)) == 1  # measured for the first time, and nothing else
    assert begun(0.8) == []
    (told,) = begun(factor)
    assert re.match(
        r"a step takes .* \(median of 5\), the plan says .* load 3.5, spread 1.20; the next plan meas", told
    )
    other = Measured(tuple(replace(cost, backward_s=9e-3) for cost in COSTS), Link(2e-4, 1.5e9), 0)
    monkeypatch.setattr("launch.spawn.run_processes", lambda *_: [other])
    again, times = begun(1.0)
    assert again.startswith("measuring the layers again, as the first steps of a run disagreed with what was kept, on ")
    assert times == "they take 57.50 ms a micro-batch, and took 27.50 ms before"
    assert begun(1.0) == []
    assert "the next plan measures them again" in begun(factor)[0]


def test_costs_that_come_out_the_same_on_a_calm_machine_are_not_measured_once_more(begun, measured, monkeypatch):
    begun(1.5)
    assert begun(1.5)[2].endswith("the next plan measures them again")  # a load of 3.5 on two cores proves nothing
    assert len(measured) == 2
    calm = Measured(COSTS, Link(2e-4, 1.5e9), 300_000_000, load=0.4)
    monkeypatch.setattr("launch.spawn.run_processes", lambda *_: [calm])
    measuring, _, told = begun(1.5)
    assert "again" in measuring
    assert told.endswith("twice and with the same result, so they are not measured again: something else differs")
    monkeypatch.setattr("launch.spawn.run_processes", lambda *_: pytest.fail("measured once more"))
    assert "twice" in begun(1.5)[0]


def test_the_lines_of_before_a_resume_are_not_its_first_steps(begun, measured, tmp_path):
    begun(1.0)
    (tmp_path / "metrics.jsonl").write_text('{"step": 20}\n')
    assert begun(9.0, range(1, 21)) == []
    assert begun(9.0, range(1, 27)) == []
    assert len(begun(9.0, range(1, 28))) == 1
