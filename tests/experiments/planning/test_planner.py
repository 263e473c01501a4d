"""Plans of real models over declared devices: bytes, faults, shared cores, several nodes."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from experiments.base.cluster import Cluster, parse_cluster
from experiments.base.workload import Measurable
from experiments.planning.choose import try_plan
from experiments.planning.problem import LayerCosts, estimated_costs, row_errors
from experiments.planning.request import least_memory, plan_request
from experiments.registry import find
from suite import TrainSpec
from suite.errors import BusyError, PlanError
from suite.pipeline.model.layers import count_parameters
from suite.pipeline.planning.devices import COLLECTIVE_BYTES, DEVICES, GIB, GPU_PROCESS_BYTES, P2P_BYTES
from suite.pipeline.planning.estimate import OperatorRecorder, estimate
from suite.pipeline.planning.memory import bytes_per_parameter
from suite.pipeline.planning.placement import Node
from suite.pipeline.planning.simulate import Link
from suite.pipeline.runtime.gradient_reducer import ACCELERATOR_BUCKET_BYTES
from suite.training.adafactor import BATCH_BYTES, BATCH_COPIES
from suite.training.update_rule import make_optimizer
from tests.experiments.planning.works import LAPTOP, ROOMY, LinearModel, linear, peaks, refused, translation


def test_bytes_of_stages_follow_parameters_micro_batches_and_remat() -> None:
    work = linear("pipeline.stages=2")
    plain, kept, fine = (
        peaks(work.with_settings(settings)) for settings in ("", "pipeline.remat=never", "pipeline.micro_batches=16")
    )
    assert len(plain) == 2
    assert sum(plain) > 16 * count_parameters(work.build()[0])
    assert all(more > less for more, less in zip(kept, plain, strict=True))
    assert all(less < more for less, more in zip(fine, plain, strict=True))


def test_activations_of_a_feed_forward_layer_are_those_counted_by_hand() -> None:
    run = translation("model.dropout=0.1 pipeline.stages=1")
    encoder = estimated_costs(run, LAPTOP).costs[1]
    rows = -(-run.train.batch_tokens // (run.pipeline.micro_batches * run.text.max_length))
    tokens, width, hidden, attention, heads = rows * run.text.max_length, 64, 128, 32, 1
    # two LayerNorms' results and two statistics each; q, k, v; the attention's result, the logarithm of a sum for each
    # head, and its mask as numbers, one for each key; hidden; two dropout masks; what each half of the layer adds up to
    keys = run.text.max_length
    floats = 2 * width + 4 + 3 * attention + attention + heads + keys + hidden + 2 * width + 2 * width
    assert encoder.activation_bytes == tokens * 4 * floats
    assert encoder.boundary_bytes == tokens * (4 * width + 4 + 8)
    assert encoder.gradient_bytes == tokens * 4 * width  # neither the sentences' numbers nor the ids carry one
    matrices = 3 * attention * width + attention * width + 2 * hidden * width
    assert encoder.parameters == matrices + (3 * attention + width + hidden + width) + 4 * width


def test_a_plan_counts_adafactors_state_and_has_room_for_its_batches_as_they_are_allocated() -> None:
    """The state is small for matrices and as large as the parameter for vectors. A batch may hold parameters of all
    layers of a stage, so a layer by itself does not show it."""
    settings = "pipeline.stages=1 model.width=64 text.vocabulary=500"
    adafactor, adamw = linear(f"{settings} optimizer.name=adafactor"), linear(settings)
    parameters = [list(layer.to_empty(device="cpu").parameters()) for layer in adafactor.build()[0]]
    every = [parameter for several in parameters for parameter in several]
    optimizer = make_optimizer(every, adafactor.optimizer)
    for parameter in every:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # which makes the state
    with OperatorRecorder() as recorder:
        optimizer.step()
    expected = [
        sum(
            value.nbytes
            for parameter in several
            for name, value in optimizer.state[parameter].items()
            if name != "step" and value is not None
        )
        for several in parameters
    ]
    costs = try_plan(adafactor, LAPTOP, estimated_costs).problem.costs
    assert [cost.state_bytes for cost in costs] == expected
    assert all(0 < size < 4 * cost.parameters for size, cost in zip(expected, costs, strict=True))
    assert 0 < recorder.peak <= max(cost.update_peak_bytes for cost in costs)
    batch = min(BATCH_BYTES, 4 * try_plan(adafactor, LAPTOP, estimated_costs).parameters)
    assert min(cost.update_peak_bytes for cost in costs) == BATCH_COPIES * batch
    plain = try_plan(adamw, LAPTOP, estimated_costs).problem.costs
    assert {cost.state_bytes for cost in plain} == {0}
    assert [cost.update_peak_bytes for cost in plain] == [
        8 * max(parameter.numel() for parameter in several) for several in parameters
    ]


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(40, 6, dtype=torch.float64), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.narrow(self.wide(x).float()).double()


def doubles() -> TrainSpec:
    x = torch.randn(8, 6, dtype=torch.float64)
    frozen = nn.Linear(40, 40, dtype=torch.float64).requires_grad_(False)
    layers = [nn.Linear(6, 40, dtype=torch.float64), frozen, Mixed()]
    return TrainSpec(layers=layers, loss=nn.MSELoss(), train=list(zip(x, x, strict=True)), batch_size=8)


@pytest.mark.parametrize("replicas", [1, 4])
def test_parameters_in_fp64_are_counted_with_gradients_and_moments_in_fp64(replicas: int) -> None:
    """Weight, gradient and two moments, none of them sharded; a frozen one is a weight alone."""
    settings = f"pipeline.stages=1 pipeline.replicas={replicas} pipeline.micro_batches=1"
    work = find(f"{__file__}:doubles").with_settings(settings)
    assert work.optimizer.name == "adamw"
    each = bytes_per_parameter(work.optimizer, replicas)
    first, frozen, mixed = try_plan(work, LAPTOP, estimated_costs).problem.costs
    assert first.state_bytes + each * first.parameters == 4 * 8 * (6 * 40 + 40)
    assert frozen.state_bytes + 4 * frozen.frozen == 8 * (40 * 40 + 40)
    assert mixed.state_bytes + each * mixed.parameters == 4 * 8 * (40 * 6 + 6) + 4 * 4 * (6 * 6 + 6)


def test_a_plan_for_gpus_keeps_bytes_for_every_communicator() -> None:
    """Two stages and two replicas: all workers, the replicas of a stage, the two stages with the vocabulary's matrix,
    and one for each direction between the stages; a bucket of gradients, and the process. A TPU has none of these."""
    work = linear("pipeline.stages=2 pipeline.replicas=2 pipeline.layers_per_cell=3,4 model.width=64")
    costs = estimated_costs(work, LAPTOP).costs

    def priced(work: Measurable, cluster: Cluster) -> LayerCosts:
        """The layers and the messages under way are those of one kind of devices."""
        found = estimated_costs(work, cluster)
        return replace(found, costs=costs, machine=replace(found.machine, transport="nccl"))

    def peaks_on(cluster: Cluster) -> list[int]:
        return [cell.peak_bytes for cell in try_plan(work, cluster, priced).plan.cells]

    gpus, tpus = peaks_on(Cluster(4, 16 * GIB, "gpu")), peaks_on(parse_cluster("4x16GiB", LAPTOP))
    gradients = 4 * count_parameters(work.build()[0])
    assert gradients < ACCELERATOR_BUCKET_BYTES
    expected = 3 * COLLECTIVE_BYTES + 2 * P2P_BYTES + gradients + GPU_PROCESS_BYTES
    assert [gpu - tpu for gpu, tpu in zip(gpus, tpus, strict=True)] == [expected, expected]


def test_a_plan_counts_logits_as_its_devices_compute_them() -> None:
    """A GPU of 80 GB keeps the logits of a micro-batch of 2,048 tokens, in bf16; a device of 16 GiB recomputes them."""
    work = find("t128_6b").with_settings("model.blocks_per_stack=1 pipeline.stages=1")
    large, small = (
        estimated_costs(work, parse_cluster(f"128x{device}", LAPTOP)).costs[-1] for device in ("H100", "V100")
    )
    logits = 2048 * 64_000 * 2
    assert small.activation_bytes < logits < large.activation_bytes
    assert small.backward_s / small.forward_s > large.backward_s / large.forward_s


def test_layer_costs_do_not_depend_on_the_memory_of_a_device() -> None:
    """So that plans share them."""
    work = linear()
    layers, loss = work.build()
    small, large = (
        estimate(layers, loss, work.sample().largest, replace(DEVICES["H100"], memory_bytes=size), work.optimizer)
        for size in (GIB, 79 * GIB)
    )
    assert small == large


def unpriced(work: Measurable, cluster: Cluster) -> LayerCosts:
    raise AssertionError("priced")


def test_too_few_devices_and_too_few_rows_are_told_at_once_before_anything_is_measured() -> None:
    work = linear("pipeline.stages=2 pipeline.replicas=3 pipeline.micro_batches=800")
    said: list[str] = []
    with pytest.raises(PlanError) as fault:
        plan_request(work, replace(ROOMY, devices=5), unpriced, log=said.append)
    devices, rows = fault.value.errors
    assert devices.startswith("K = 2 stages x R = 3 replicas need 6 devices, there are 5 GPUs")
    assert rows.startswith("R = 3 x M = 800 micro-batches are more than the 32 examples")
    assert str(fault.value).startswith(f"2 faults:\n- {devices}\n- {rows}\nthe nearest plan that fits: ")
    assert said[0] == devices
    (settings,) = re.findall(r'--set "([^"]+)"', fault.value.remedy)
    assert row_errors(work.with_settings(settings)) == []


class Frozen(LinearModel):
    """Every parameter is frozen."""

    def build(self) -> tuple[list[nn.Module], nn.Module]:
        layers, loss = super().build()
        return [layer.requires_grad_(False) for layer in layers], loss

    def key(self) -> str:
        return f"frozen {super().key()}"


def test_a_model_that_is_frozen_whole_is_refused_before_anything_is_priced() -> None:
    fault = refused(Frozen.validated(linear("pipeline.stages=2").model_dump()), ROOMY, unpriced)
    assert re.match(r"all \d+ parameters of the model are frozen", str(fault))
    assert fault.remedy == ""


@pytest.mark.slow
def test_the_least_memory_of_a_run_fits_it_and_a_tenth_of_a_gib_less_does_not() -> None:
    work, cluster = find("t128_6b"), parse_cluster("128xH100", LAPTOP)
    least = least_memory(work, cluster)
    assert least is not None
    assert least < 79 * GIB
    assert estimated_costs(work, cluster).machine.reduce_latency_s == DEVICES["H100"].link_latency_s > 0
    assert try_plan(work, replace(cluster, bytes_per_device=least), estimated_costs).plan.layers_per_cell
    with pytest.raises(PlanError):
        try_plan(work, replace(cluster, bytes_per_device=least - GIB // 10), estimated_costs)


def instant(work: Measurable, cluster: Cluster) -> LayerCosts:
    """Estimates, with messages that take no time."""
    found = estimated_costs(work, cluster)
    return replace(found, machine=replace(found.machine, link=Link()))


def test_workers_that_take_turns_share_cores_and_memory() -> None:
    """One core and 24 GiB: seven workers compute one after the other, with a seventh of the memory each."""
    core = Cluster(1, 24 * GIB, "cpu")
    one, seven = (plan_request(linear(f"pipeline.stages={k}"), core, instant) for k in (1, 7))
    for planned, memory in ((one, 24 * GIB), (seven, 24 * GIB // 7)):
        assert planned.plan.machine.memory_limit_bytes == memory - int(0.3 * memory)
    assert one.step_s == one.plan.step_s
    assert seven.step_s == pytest.approx(sum(seven.plan.timeline.busy(k) for k in range(7)))
    assert seven.step_s == seven.plan.step_s > 1.1 * seven.plan.timeline.seconds
    assert "take turns" in "".join(seven.notes)
    assert "take turns" not in "".join(one.notes)


def test_declared_devices_take_no_turns_but_the_cores_at_hand_do() -> None:
    work = linear("pipeline.stages=4")
    assert plan_request(work, LAPTOP, estimated_costs).plan.layers_per_cell
    declared = replace(parse_cluster("2x16GiB", LAPTOP), kind="cpu")
    assert "need 4 devices" in refused(work, declared).errors[0]


def test_the_papers_6b_fits_its_own_devices() -> None:
    planned = try_plan(find("t128_6b"), parse_cluster("128x16GiB", LAPTOP), estimated_costs)
    assert planned.parameters == 6_040_979_968
    assert all(4 * GIB < stage.peak_bytes < 16 * GIB for stage in planned.plan.cells)


SLOW = Link(0.0, 1e6)


def step_over(nodes: tuple[int, ...], work: Measurable, link: Link, reduction: Link | None = None) -> float:
    """Returns the seconds of a step on H100s of nodes with so many each."""
    held = tuple(Node(str(at), f"node {at}", count, count) for at, count in enumerate(nodes))
    cluster = Cluster(4, 79 * GIB, "gpu", held, parse_cluster("4xH100", LAPTOP).device, link, reduction)
    return plan_request(work, cluster, estimated_costs).step_s


def test_a_plan_over_nodes_says_where_workers_go_and_plays_the_network_at_the_cuts() -> None:
    work = linear("pipeline.stages=4 pipeline.micro_batches=4")
    inside = plan_request(work, parse_cluster("4xH100", LAPTOP), estimated_costs).step_s
    four, eight, three, ones = (step_over(nodes, work, SLOW) for nodes in ((4,), (8,), (3, 1), (1, 1, 1, 1)))
    assert inside == four == eight < three < ones
    planned = plan_request(work, parse_cluster("2x2xH100", LAPTOP), estimated_costs)
    assert "  replica 0: stages 0-1 on node 0, stages 2-3 on node 1" in planned.lines()
    assert planned.as_dict()["nodes"] == ["node 0", "node 0", "node 1", "node 1"]


def test_workers_of_one_node_of_cpus_share_its_memory() -> None:
    work = linear("pipeline.stages=2 pipeline.micro_batches=2")
    one, two = (Node("a", "a", 4, 4),), (Node("a", "a", 1, 4), Node("b", "b", 1, 4))
    for nodes, memory in ((one, 2 * GIB), (two, 4 * GIB)):
        machine = plan_request(work, Cluster(4, GIB, "cpu", nodes), estimated_costs).plan.machine
        assert (machine.memory_limit_bytes, machine.reserve) == (memory - int(0.3 * memory), int(0.3 * memory))


def test_a_reduction_between_nodes_takes_what_was_measured_of_one_and_inside_a_node_what_the_device_has() -> None:
    work = linear("pipeline.stages=1 pipeline.replicas=2 pipeline.micro_batches=4")
    inside, unmeasured, within, between = (
        step_over(nodes, work, Link(0.0, 1e9), reduction) for reduction in (None, SLOW) for nodes in ((2,), (1, 1))
    )
    assert within == inside < unmeasured < between


def test_devices_that_others_hold_are_no_fault_of_the_plan() -> None:
    def busy(work: Any, cluster: Cluster) -> LayerCosts:
        raise BusyError("others measure")

    with pytest.raises(BusyError, match="others measure"):
        plan_request(linear("pipeline.stages=2"), LAPTOP, busy)
