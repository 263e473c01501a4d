"""Measured costs are cached; costs that cannot be measured are estimated and marked."""

import re
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from experiments.base.cluster import Cluster, parse_cluster
from experiments.language_model.runs import language_model
from experiments.planning.problem import estimated_costs
from experiments.planning.request import plan_request
from launch.planning import layer_costs
from launch.planning.layer_costs import MeasuredCosts
from launch.runs.store import RunFolder
from launch.train.step_check import StepCheck
from launch.worker.measure import LayerMeasurements
from models.chunked_loss import CPU_LOGITS_BYTES
from models.language_model import LanguageModelShape
from suite.pipeline.planning.costs import LayerCost
from suite.pipeline.planning.devices import DEVICES, GIB, Machine
from suite.pipeline.planning.placement import Node
from suite.pipeline.planning.simulate import Link
from suite.settings import PipelineSettings

THIS = Cluster(2, 4 * GIB, "cpu")
TINY = LanguageModelShape(3, width=16, feed_forward=32, heads=2, vocabulary=50, context_length=8)
COST = LayerCost(1e-3, 1.5e-3, 3e-3, 1e-4, 5_000, 4096, 4096, 20_000, 1000, 2000, 3000, 400, relative_spread=1.2)
COSTS = (replace(COST, gradient_bytes=0), *[COST] * 3, replace(COST, parameters=7_000))
FAST = replace(DEVICES["H100"], efficiency=1.0, is_cuda=False)


RUN_PROCESSES = "launch.backends.processes.run_processes"


def work(stages=2, shape=TINY, **pipeline):
    return language_model(shape, PipelineSettings(stages=stages, micro_batches=4, **pipeline))


@pytest.fixture
def measured(monkeypatch):
    """Replaces the measuring processes by fixed numbers; returns the list of calls."""
    calls = []

    def run(target, workers, work, estimated, threads, use_gpu, log, logits_bytes, memory_bytes):
        expected = False, CPU_LOGITS_BYTES, len(work.build()[0])
        assert (use_gpu, logits_bytes, len(estimated), memory_bytes > 0) == (*expected, True)
        calls.append((workers, threads))
        return [LayerMeasurements(COSTS, Link(2e-4, 1.5e9), 300_000_000, load=3.5)] * workers

    monkeypatch.setattr(RUN_PROCESSES, run)
    monkeypatch.setattr(layer_costs, "cpu_limit", lambda: 2)
    monkeypatch.setattr(layer_costs, "LOAD", 3.5)
    monkeypatch.setattr(layer_costs, "this_device", lambda memory: replace(FAST, memory_bytes=memory))
    return calls


def ignore(text):
    """A log function that discards its messages."""


def test_costs_are_measured_once_and_then_read_from_the_cache_with_the_current_memory_limit(measured, tmp_path):
    said = []
    model = MeasuredCosts(tmp_path / "costs", said.append)
    first, second = model(work(), THIS), model(work(remat="never"), replace(THIS, bytes_per_device=3 * GIB))
    assert measured == [(2, 1)]
    assert second.costs == first.costs == COSTS
    assert second.machine == replace(first.machine, memory_limit_bytes=3 * GIB)
    assert (first.measured, second.measured) == (True, True)
    assert first.source.endswith(", 2 processes, 1 thread each, load 3.5, spread 1.20")
    assert second.source == f"{first.source}; cached"
    (line,) = said
    assert line.startswith("measuring the layers on this machine's ")
    assert "2 processes, 1 thread each" in line


def test_other_workloads_and_worker_counts_are_measured_separately(measured, tmp_path):
    model = MeasuredCosts(tmp_path, ignore)
    for asked in (
        work(),
        work(stages=1),  # alone, with both cores
        work(replicas=2),  # smaller micro-batches
        work(shape=replace(TINY, feed_forward=64)),
        work().with_settings("optimizer.name=adafactor"),
    ):
        model(asked, THIS)
    assert measured == [(2, 1), (1, 2), (2, 1), (2, 1), (2, 1)]
    model(work(stages=4), THIS)  # more workers than cores take turns: two at once as before
    assert len(measured) == 5


@pytest.mark.parametrize(
    "harm",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: text.replace("backward_s", "sideways_s"),
        lambda text: text.replace('"link"', '"chain"'),
    ],
)
def test_a_damaged_file_is_measured_again_and_replaced(measured, tmp_path, harm):
    model = MeasuredCosts(tmp_path, ignore)
    first = model(work(), THIS)
    (path,) = tmp_path.glob("*.json")
    path.write_text(harm(path.read_text()))
    assert model(work(), THIS) == first
    assert model(work(), THIS).costs == COSTS
    assert len(measured) == 2


def test_the_unlimited_link_of_a_single_worker_is_cached_too(monkeypatch, tmp_path, measured):
    monkeypatch.setattr(RUN_PROCESSES, lambda *_: [LayerMeasurements(COSTS, Link(), 0)])
    model = MeasuredCosts(tmp_path, ignore)
    assert model(work(1), THIS).machine == model(work(1), THIS).machine == Machine(4 * GIB, 0, Link(), float("inf"))


def test_a_declared_device_is_never_measured(measured, tmp_path):
    cluster = parse_cluster("2xH100", THIS)
    found = MeasuredCosts(tmp_path / "costs", pytest.fail)(work(), cluster)
    assert measured == []
    assert not (tmp_path / "costs").exists()
    assert not found.measured
    assert found == estimated_costs(work(), cluster)


def test_costs_that_would_take_too_long_on_the_clusters_device_are_estimated_and_marked(measured, tmp_path):
    paper = language_model(LanguageModelShape(13), PipelineSettings(stages=2, micro_batches=32))
    slow = replace(DEVICES["H100"], memory_bytes=64 * GIB, fp32=1e9)  # this machine's is fast
    backend = SimpleNamespace(on_free_devices=lambda *_: slow, prepare_processes=lambda: None)
    model = MeasuredCosts(tmp_path, pytest.fail, backend)
    planned = plan_request(paper, Cluster(2, 64 * GIB, "cpu"), model)
    assert measured == []
    assert not planned.layer_costs.measured
    # a block's 24 d^2 + 4 T d operations a token, four times over, at half of 1e9 a second: 7 rounds of 8 copies
    block_s = 4 * 1024 * (24 * 2048**2 + 4 * 1024 * 2048) / 0.5e9
    seconds = int(planned.layer_costs.source.rpartition("take ")[2].removesuffix(" s"))
    assert 7 * 8 * block_s < seconds < 1.5 * 7 * 8 * block_s
    assert "because measuring would take" in planned.lines()[0]
    assert "estimated layer costs" in planned.lines()[0]
    assert "estimated" in planned.kind


@pytest.mark.parametrize(("layers", "fits"), [(1, True), (8, False)])
def test_layers_that_do_not_fit_together_are_not_measured_together(measured, tmp_path, layers, fits):
    """Up to eight equal layers are measured together: 16 bytes for each of a block's 12 d^2 + 13 d values, times 8."""
    shape = LanguageModelShape(layers, width=256, feed_forward=1024, heads=4, vocabulary=50, context_length=8)
    block = 16 * (12 * 256**2 + 13 * 256)
    found = MeasuredCosts(tmp_path, ignore)(work(shape=shape), Cluster(2, 4 * block, "cpu"))
    assert (found.measured, len(measured)) == (fits, int(fits))
    assert found.source.endswith("a layer is too large to be measured") != fits


@pytest.mark.parametrize(
    ("cluster", "each"),
    [
        (Cluster(2, GIB, "cpu"), GIB),
        (Cluster(1, GIB, "cpu"), GIB // 2),
        (Cluster(8, GIB, "cpu", (Node("a", "a", 4, 4), Node("b", "b", 4, 4))), 2 * GIB),
        (Cluster(1, GIB, "gpu"), GIB),
    ],
)
def test_two_processes_that_measure_share_the_memory_of_their_node(cluster, each):
    assert layer_costs._memory_bytes(cluster, 2) == each


def test_different_devices_are_measured_by_as_many_processes_as_the_smallest_node_has_devices(tmp_path, measured):
    nodes = (Node("a", "a", 8, 8), Node("b", "b", 2, 2))
    for names, processes in (((), 8), (("fast", "slow"), 2)):
        cluster = Cluster(10, GIB, "cpu", nodes, name="slow", device_names=names)
        MeasuredCosts(tmp_path / str(processes), ignore)(work(stages=8), cluster)
        assert measured.pop()[0] == processes


def test_costs_of_several_processes_are_mean_seconds_and_maximum_bytes():
    other = replace(COST, forward_s=3e-3, update_s=3e-4, activation_bytes=30_000, graph_peak_bytes=100)
    joined = layer_costs._combine_layer((COST, other))
    assert (joined.forward_s, joined.recompute_s) == pytest.approx((2e-3, 1.5e-3))
    assert joined.update_s == pytest.approx(2e-4)
    assert (joined.activation_bytes, joined.graph_peak_bytes, joined.parameters) == (30_000, 2000, 5000)


def test_estimates_of_this_machines_gpu_count_a_byte_for_each_value_that_dropout_may_drop(monkeypatch, tmp_path):
    """A block drops values twice: after attention and after its feed-forward layers."""
    given, gpu, asked = [], replace(FAST, is_cuda=True), work(shape=replace(TINY, dropout=0.1))

    def run(target, workers, work, estimated, *_):
        given.extend(estimated)
        return [LayerMeasurements(COSTS, Link(), 0)]

    monkeypatch.setattr(RUN_PROCESSES, run)
    monkeypatch.setattr(layer_costs, "this_device", lambda memory: replace(gpu, memory_bytes=memory))
    MeasuredCosts(tmp_path, ignore)(asked, THIS)
    declared = estimated_costs(asked, replace(THIS, device=replace(gpu, name="declared"))).costs
    assert declared[1].activation_bytes - given[1].activation_bytes == 2 * 3 * 8 * 8 * 16  # of 4 bytes for each value


def test_layers_are_measured_in_processes_of_this_machine(tmp_path):
    """A small real measurement: two processes, the link between them, and a plan from it."""
    model = MeasuredCosts(tmp_path, ignore)
    planned = plan_request(work(), THIS, model)
    assert planned.layer_costs.measured
    assert "simulated from measured layer costs" in planned.lines()[0]
    costs, machine = planned.problem.costs, planned.problem.machine
    block = 4 * (16 * 16 + 16) + (2 * 16 * 32 + 32 + 16) + 4 * 16  # attention, feed-forward, norms
    assert [cost.parameters for cost in costs] == [50 * 16, block, block, block, 50 * 17]
    assert all(cost.forward_s > 0 and cost.recompute_s > 0 for cost in costs)
    assert all(1 < cost.relative_spread < 100 for cost in costs)
    # 32 sequences in 4 micro-batches: 8 rows of 8 ids of 8 bytes arrive first, then 16 fp32 columns
    assert [cost.boundary_bytes for cost in costs] == [8 * 8 * 8, *[8 * 8 * 16 * 4] * 4]
    assert 50e6 < machine.process_bytes < 4 * GIB
    assert 0 < machine.link.latency_s < 1
    assert machine.link.bytes_per_s > 0
    assert model(work(), THIS).costs == costs


def test_remeasure_measures_costs_of_earlier_processes_once_more(measured, tmp_path, monkeypatch):
    said = []
    model = MeasuredCosts(tmp_path, said.append)
    model(work(), THIS)
    monkeypatch.setattr(layer_costs, "STARTED", time.time())
    monkeypatch.setenv("REMEASURE", "0")
    model(work(), THIS)
    assert len(measured) == 1
    monkeypatch.setenv("REMEASURE", "1")
    assert not model(work(), THIS).source.endswith("; cached")
    assert model(work(), THIS).source.endswith("; cached")
    assert len(measured) == 2
    assert said[1].startswith("measuring the layers again, because REMEASURE is set, on ")


@pytest.fixture
def begun(measured, tmp_path):
    """Returns a function that plans with what is kept, and lets a run's steps take so many times what the plan says;
    it returns what was said."""
    run = RunFolder(tmp_path)

    def begin(factor, steps=range(1, 8)):
        said = []
        planned = plan_request(work(), THIS, MeasuredCosts(tmp_path / "costs", said.append))
        check = StepCheck(run, lambda: planned, said.append)
        for step in steps:
            check.step(step, planned.step_s * (9 if step < 3 else factor))
        return said

    return begin


@pytest.mark.parametrize("factor", [1.5, 0.2])
def test_first_steps_that_disagree_with_the_plan_are_one_line_with_what_to_do(begun, measured, factor):
    assert len(begun(1.25)) == 1  # measured for the first time, and nothing else
    assert begun(0.8) == []
    (line,) = begun(factor)
    assert re.fullmatch(
        rf"a step takes .* \(median of 5\), {factor:.2f} times the planned .*; a new run with REMEASURE=1 measures the "
        "layers again",
        line,
    )
    assert len(begun(1.0)) == 0
    assert len(measured) == 1


@pytest.mark.parametrize(
    ("load", "spread", "numbers"),
    [(3.5, 1.2, "load 3.5 on 2 cores, spread 1.20"), (0.4, 1.4, "load 0.4 on 2 cores, spread 1.40"), (2.0, 1.29, None)],
)
def test_a_plan_says_when_its_measurement_was_disturbed(measured, tmp_path, monkeypatch, load, spread, numbers):
    costs = tuple(replace(cost, relative_spread=spread) for cost in COSTS)
    monkeypatch.setattr(RUN_PROCESSES, lambda *_: [LayerMeasurements(costs, Link(2e-4, 1.5e9), 0, load=load)])
    for _ in range(2):  # measured, and cached
        lines = plan_request(work(), THIS, MeasuredCosts(tmp_path, ignore)).lines()
        said = f"  other work disturbed the measurement of the layers ({numbers}); REMEASURE=1 measures them again"
        assert [line for line in lines if "disturbed" in line] == ([said] if numbers else [])


def test_costs_of_a_busy_machine_are_measured_again_once_it_is_idle(begun, measured, monkeypatch):
    assert len(begun(1.0)) == 1
    assert begun(1.0) == []  # still as busy
    monkeypatch.setattr(layer_costs, "LOAD", 0.9)
    (line,) = begun(1.0)  # while it measures, the load is 3.5 again
    assert "measuring the layers again, because the machine was busy before (load 3.5, spread 1.20), on " in line
    assert begun(1.0) == []


def test_a_plan_says_how_the_last_runs_on_the_device_compared(begun, tmp_path):
    def told():
        lines = plan_request(work(), THIS, MeasuredCosts(tmp_path / "costs", ignore)).lines()
        return [line.strip() for line in lines if "on this device" in line]

    assert told() == []
    begun(1.25)
    assert told() == ["the last run on this device took 1.25 times the planned step"]
    for at in range(12):
        begun(0.9 + at / 100)
    (file,) = (tmp_path / "costs").glob("steps-*.jsonl")
    file.write_bytes(file.read_bytes() + b"cut o\xff")
    assert told() == ["the last 10 runs on this device took 0.92 to 1.01 times the planned step"]


def test_metrics_from_before_a_resume_do_not_count_as_first_steps(begun, measured, tmp_path):
    begun(1.0)
    (tmp_path / "metrics.jsonl").write_text('{"step": 20}\n')
    assert begun(9.0, range(1, 21)) == []
    assert begun(9.0, range(1, 27)) == []
    assert len(begun(9.0, range(1, 28))) == 1
