"""Replicas on several kinds of devices: each has devices of one kind, and a slower one gets fewer micro-batches.

    8xH100+8xP100   K = 4, R = 4, M = 16      replicas 0-1 on P100: 1 each      replicas 2-3 on H100: 31 each

The micro-batches of a mini-batch, with their seeds, are those that equal replicas would have; their gradients are only
summed in another order. All replicas have the same cells, because each stage adds its gradients over replicas, and one
schedule: a plan tries what is best for each kind, and takes what fits all. With ``remat=auto`` each kind keeps as many
graphs as it can.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice

from experiments.base.cluster import Cluster
from experiments.base.experiment import Experiment
from experiments.planning.memory_limits import within_memory
from experiments.planning.model_facts import costs_of_run, model_facts
from experiments.planning.network import across_nodes, network_notes
from experiments.planning.plan_report import LayerCosts, PlanReport
from experiments.planning.unequal import with_seconds_of
from suite.errors import PlanError
from suite.pipeline.planning.devices import GIB, StageDevice
from suite.pipeline.planning.fit import MemoryFit
from suite.pipeline.planning.memory import bytes_per_parameter
from suite.pipeline.planning.placement import Placement, place
from suite.pipeline.planning.plan import Plan, assemble, make_plan
from suite.pipeline.schedule.config import FROM_ROWS, ReplicaShare
from suite.settings import PipelineSettings


def shares_of(seconds: Sequence[float], stages: int, micro_batches: int) -> list[int]:
    """Returns how many of ``micro_batches`` each replica gets, one at least, so that the last backward ends as early as
    possible. ``seconds`` are those of a micro-batch on each replica; m of them take m + K - 1 times as long (paper,
    section 2.3)."""
    shares = [1] * len(seconds)
    ends = [(each * (1 + stages), at) for at, each in enumerate(seconds)]
    heapq.heapify(ends)
    for _ in range(micro_batches - len(seconds)):
        at = ends[0][1]
        shares[at] += 1
        heapq.heapreplace(ends, (seconds[at] * (shares[at] + stages), at))
    return shares


@dataclass(frozen=True)
class _ReplicaGroup:
    """The replicas on one kind of devices."""

    kind: Cluster
    shares: Sequence[int]
    """Micro-batches of each of them."""
    costs: LayerCosts
    parameter_bytes: float
    """As ``bytes_per_parameter`` returns them."""
    placement: Placement

    def plan(self, pipeline: PipelineSettings) -> Plan:
        """Returns the plan that is best for this kind. Raises PlanError if none fits."""
        return make_plan(self.costs.costs, self._with_micro_batches(pipeline), self.parameter_bytes, self.costs.machine)

    def plan_like(self, other: Plan) -> Plan:
        """Returns the plan with the cells and the actions of another; recomputes are its own if the plan chooses them.
        Raises PlanError if it does not fit."""
        fit = MemoryFit(
            self.costs.costs, self._with_micro_batches(other.pipeline), self.parameter_bytes, self.costs.machine
        )
        ranges, config = [range(cell.begin, cell.end) for cell in other.cells], other.schedule_config
        if other.pipeline.remat == "auto":
            config = replace(config, max_live_graphs=fit.max_live_graphs(ranges))
        plan = assemble(fit, ranges, config)
        fullest, limit = max(plan.cells, key=lambda cell: cell.peak_bytes), self.costs.machine.memory_limit_bytes
        if fullest.peak_bytes > limit:
            stage = f"the stage of layers {fullest.begin}-{fullest.end - 1} needs {fullest.peak_bytes / GIB:.2f} GiB"
            raise PlanError([f"{stage}, the {self.kind.label} has {limit / GIB:.2f} GiB"])
        return plan

    def _with_micro_batches(self, pipeline: PipelineSettings) -> PipelineSettings:
        return pipeline.model_copy(update={"micro_batches": max(self.shares)})


def with_unequal_replicas(
    work: Experiment,
    cluster: Cluster,
    used: Sequence[tuple[Cluster, int]],
    found: Mapping[str, LayerCosts],
    whole: LayerCosts,
) -> PlanReport:
    """Returns the fastest plan with so many replicas on each kind that is ``used``. ``found`` are the costs of each
    kind, ``whole`` those of the cluster. Raises PlanError if none fits."""
    pipeline = work.pipeline
    tries: list[list[tuple[Plan, _ReplicaGroup]]] = []
    groups = _groups(work, cluster, used, found, whole)
    seconds = [found[group.kind.label].seconds for group in groups]
    for _ in range(2):  # the second time with the recomputes that the first plans chose
        groups = _with_shares(groups, seconds, pipeline)
        try:
            plans = _plans(groups, pipeline)
        except PlanError:
            if not tries:
                raise
            break
        tries.append(list(zip(plans, groups, strict=True)))
        seconds = [plan.step_s / (max(group.shares) + pipeline.stages - 1) for plan, group in tries[-1]]
    fastest = min(tries, key=lambda pairs: max(plan.step_s for plan, _ in pairs))
    # the slowest is replica 0, with which a run's trace is compared
    ranked = sorted(fastest, key=lambda pair: -pair[0].step_s)
    (slowest, first), placement = ranked[0], _joined([group.placement for _, group in ranked])
    device = StageDevice(first.kind.label, slowest.machine.memory_limit_bytes, first.costs.costs)
    plan = replace(
        slowest,
        pipeline=slowest.pipeline.model_copy(update={"micro_batches": pipeline.micro_batches}),
        machine=replace(slowest.machine, stages=(device,) * pipeline.stages),
    )
    shares = tuple(
        ReplicaShare(group.kind.label, share, each.schedule_config.max_live_graphs)
        for each, group in ranked
        for share in group.shares
    )
    notes = (*network_notes(placement, cluster, [kind.label for kind, _ in used]), *_notes(ranked))
    parameters = model_facts(work).parameters
    return PlanReport(work, cluster, found, first.costs, plan, parameters, notes, placement, shares=shares)


def _plans(groups: Sequence[_ReplicaGroup], pipeline: PipelineSettings) -> list[Plan]:
    """Returns the plan of each kind, with the cells and actions that are best for one of them: for the one with which
    the slowest is fastest. Raises PlanError if none fits all."""
    tries, faults = [], []
    for leader in groups:
        try:
            best = leader.plan(pipeline)
            if best.pipeline.schedule in FROM_ROWS:
                raise PlanError(["only a searched schedule fits, which is of as many micro-batches in all replicas"])
            best = replace(best, pipeline=best.pipeline.model_copy(update={"remat": pipeline.remat}))
            tries.append([best if group is leader else group.plan_like(best) for group in groups])
        except PlanError as error:
            faults += [f"replicas on {leader.kind.label}: {fault}" for fault in error.errors]
    if not tries:
        raise PlanError(faults)
    return min(tries, key=lambda plans: max(plan.step_s for plan in plans))


def replicas_of_kinds(
    cluster: Cluster, pipeline: PipelineSettings, found: Mapping[str, LayerCosts]
) -> list[tuple[Cluster, int]]:
    """Returns how many replicas are on which kind, as many as possible on faster ones. Empty if one kind holds them
    all, if there are too few devices, and for a schedule given as rows, which are of M micro-batches."""
    if pipeline.schedule in FROM_ROWS:
        return []
    used, missing = [], pipeline.replicas
    for kind in sorted(cluster.parts, key=lambda kind: found[kind.label].seconds):
        count = min(missing, sum(node.free for node in kind.nodes) // pipeline.stages)
        used += [(kind, count)] if count else []
        missing -= count
    return used if len(used) > 1 and not missing else []


def _groups(
    work: Experiment,
    cluster: Cluster,
    used: Sequence[tuple[Cluster, int]],
    found: Mapping[str, LayerCosts],
    whole: LayerCosts,
) -> list[_ReplicaGroup]:
    """Returns the replicas of each kind, without micro-batches, and with the links of all that are used."""
    pipeline = work.pipeline
    each = bytes_per_parameter(work.optimizer, pipeline.replicas)
    placements = [place(kind.nodes, pipeline.stages, count) for kind, count in used]
    together, links, groups = _joined(placements), {kind.label: found[kind.label] for kind, _ in used}, []
    for (kind, _), placement in zip(used, placements, strict=True):
        costs = costs_of_run(with_seconds_of(whole, kind.label, links), work, kind)
        machine = within_memory(replace(costs.machine, memory_limit_bytes=kind.bytes_per_device), work, kind, placement)
        reduce = across_nodes(machine, together, cluster).reduce_bytes_per_s
        machine = replace(across_nodes(machine, placement, kind), reduce_bytes_per_s=reduce)
        groups.append(_ReplicaGroup(kind, (), replace(costs, machine=machine), each, placement))
    return groups


def _with_shares(
    groups: Sequence[_ReplicaGroup], seconds: Sequence[float], pipeline: PipelineSettings
) -> list[_ReplicaGroup]:
    """Returns the replicas with their micro-batches, of which one takes ``seconds`` on each kind."""
    counts = [group.placement.replicas for group in groups]
    of_replicas = [each for each, count in zip(seconds, counts, strict=True) for _ in range(count)]
    shares = iter(shares_of(of_replicas, pipeline.stages, pipeline.replicas * pipeline.micro_batches))
    return [replace(group, shares=list(islice(shares, count))) for group, count in zip(groups, counts, strict=True)]


def _joined(placements: Sequence[Placement]) -> Placement:
    return Placement(tuple(chain.from_iterable(each.nodes for each in placements)), placements[0].stages)


def _notes(groups: Sequence[tuple[Plan, _ReplicaGroup]]) -> Iterator[str]:
    """Yields what the replicas of each kind do."""
    first = 0
    for plan, group in groups:
        last, most = first + len(group.shares) - 1, max(group.shares)
        which = f"replica {first}" if first == last else f"replicas {first}-{last}"
        share = f"{most:,}" if min(group.shares) == most else f"{most - 1:,} or {most:,}"
        recomputed, forwards = plan.recomputes
        peak = max(cell.peak_bytes for cell in plan.cells) / GIB
        yield (
            f"{which} on {group.kind.label}: {share} micro-batch{'es' * (most > 1)}, {recomputed:,} of "
            f"{forwards:,} forwards recomputed, "
            f"bubble {plan.timeline.bubble:.1%}, largest stage {peak:.2f} of "
            f"{group.costs.machine.memory_limit_bytes / GIB:.2f} GiB"
        )
        first = last + 1
