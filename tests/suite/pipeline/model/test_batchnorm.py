"""BatchNorm over micro-batches: gradients of each, moving averages of all; whatever K, M, remat, R and raggedness."""

import itertools
import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import nn
from torch.utils.checkpoint import checkpoint

from launch.backends.processes import run_processes
from launch.worker.build import PartitionedModel
from models import amoebanet
from suite.errors import SettingError
from suite.pipeline.model.batchnorm import MicroBatchNorm, RunningStats, by_micro_batch, merge
from suite.pipeline.model.microbatch import ReplicaBatch
from suite.pipeline.model.topology import RankCoord
from suite.pipeline.runtime.executor import LossSums
from suite.pipeline.schedule.config import ScheduleConfig
from suite.pipeline.schedule.remat import MAX_LIVE_GRAPHS, UNLIMITED
from suite.settings import OptimizerSettings
from tests.marks import slow_but_for
from tests.micro_batches import split
from tests.suite.pipeline.build import alone, assemble, build, differences, join, run, unpartitioned, whole
from tests.suite.pipeline.skipping import SumOfErrors, skipping_batch, skipping_layers

EXAMPLES = 7  # ragged for M = 2, 5
MICRO_BATCHES = (1, 2, 5)
REMATS = ("always", "except_last")
SMALL = amoebanet.AmoebaNetShape(3, 8, classes=3, channels=2, stem="small")


def amoeba_layers():
    with torch.device("meta"):
        return [layer.double() for layer in amoebanet.layers(SMALL)]


def skips_layers():
    return skipping_layers(torch.float64)


def images(seed, size):
    generator = torch.Generator().manual_seed(seed)
    found = torch.randn(EXAMPLES, 2, size, size, generator=generator, dtype=torch.float64) * 2 + 1
    return found, torch.randint(0, 3, (EXAMPLES,), generator=generator)


MODELS = {
    "skips": (skips_layers, lambda seed: skipping_batch(EXAMPLES, seed, torch.float64)),
    "amoebanet": (amoeba_layers, lambda seed: images(seed, 5)),  # odd sizes: 5, 3, 2
}


def mini_batch(model, seed, micro_batches):
    inputs, labels = MODELS[model][1](seed)
    return ReplicaBatch(split([inputs], micro_batches), split([labels], micro_batches), float(len(labels)))


def all_values(layers, batch, step):
    """Returns what each BatchNorm of the whole model saw in all micro-batches: {(layer, name): (values, channels)}."""
    made, seen = whole(layers), {}
    for index, layer in enumerate(made):
        for name, module in layer.named_modules():
            if isinstance(module, nn.BatchNorm2d):
                module.register_forward_pre_hook(
                    lambda _, given, key=(index, name): seen.setdefault(key, []).append(given[0].detach())
                )
    for i, inputs in enumerate(batch.inputs):
        run(made, inputs, step, batch.offset + i)
    return {key: torch.cat([x.transpose(0, 1).flatten(1).T for x in parts]) for key, parts in seen.items()}


class SelfRecomputing(nn.Module):
    """Recomputes its norm in its own backward."""

    def __init__(self, recomputes):
        super().__init__()
        self.norm, self.mix, self.recomputes = nn.BatchNorm2d(2), nn.Conv2d(2, 2, 1), recomputes

    def forward(self, x):
        return checkpoint(self.parts, x, use_reentrant=False) if self.recomputes else self.parts(x)

    def parts(self, x):
        return self.mix(self.norm(x))

    def reset_parameters(self):
        self.norm.reset_parameters(), self.mix.reset_parameters()


@pytest.mark.parametrize("rows", ["0F0 0F1 0F2 0B2 0B1 0B0", "0F0 0F1 0B0 0F2 0B1 0B2"])
def test_a_layer_that_recomputes_itself_counts_each_micro_batch_once(rows):
    found = []
    for recomputes in (False, True):
        with torch.device("meta"):
            layers = [SelfRecomputing(recomputes), nn.Conv2d(2, 3, 5), nn.Flatten()]
        executor = alone(layers, SumOfErrors(), ScheduleConfig("csv", (UNLIMITED,), rows=(rows,)))
        inputs, labels = images(3, 5)
        batch = ReplicaBatch(split([inputs.float()], 3), split([labels], 3), float(EXAMPLES))
        executor.train(batch, 0)
        executor.stage.running_stats.update(True)
        found.append(executor.stage.by_index[0].norm)
    assert torch.equal(found[0].running_mean, found[1].running_mean)
    assert torch.equal(found[0].running_var, found[1].running_var)


def norms(stage):
    return {
        (index, name): module
        for index, layer in zip(stage.indices, stage.layers, strict=True)
        for name, module in layer.named_modules()
        if isinstance(module, MicroBatchNorm)
    }


def compare(rank: int, world: int, rendezvous: str, model: str, virtual_stages: int):
    """Returns, for each case, the largest difference of each gradient and of each moving average."""
    join(rank, world, rendezvous)
    layers, loss = MODELS[model][0](), SumOfErrors()
    schedule = "fill_drain" if virtual_stages == 1 else "interleaved"
    executor, _, named, _ = build(
        RankCoord(rank, world, 1), layers, loss, ScheduleConfig(schedule, (1,), virtual_stages)
    )
    found = []
    for step, (micro_batches, remat) in enumerate(itertools.product(MICRO_BATCHES, REMATS)):
        batch = mini_batch(model, step, micro_batches)
        executor.schedule_config = ScheduleConfig(schedule, (MAX_LIVE_GRAPHS[remat],), virtual_stages)
        for parameter in named.values():
            parameter.grad = None
        before = {key: (n.running_mean.clone(), n.running_var.clone()) for key, n in norms(executor.stage).items()}
        sums = executor.train(batch, step)
        executor.stage.running_stats.update(applied=True)
        objective, expected = unpartitioned(layers, loss, batch, step)
        case = (micro_batches, remat)
        found += [(*case, key, difference) for key, difference in differences(named, expected).items()]
        seen = all_values(layers, batch, step)
        for key, norm in norms(executor.stage).items():
            for average, old, wanted in zip(
                (norm.running_mean, norm.running_var), before[key], (seen[key].mean(0), seen[key].var(0)), strict=True
            ):
                moved = old + norm.momentum * (wanted - old)
                found.append((*case, (*key, "average"), float((average - moved).abs().max())))
        if executor.coord.has_loss:
            found.append((*case, "objective", abs(sums.objective - objective) / objective))
    return found


CASES = [
    ("skips", 1, 1),
    ("skips", 2, 1),
    ("amoebanet", 2, 1),
    ("skips", 4, 1),
    ("amoebanet", 3, 1),
    ("amoebanet", 2, 3),  # its skips go from a stage's cell to its next: they stay on the device
]


@pytest.mark.parametrize(("model", "stages", "virtual_stages"), slow_but_for(CASES[:2], CASES))
def test_gradients_and_averages_equal_the_unpartitioned_model(model, stages, virtual_stages):
    found = [case for results in run_processes(compare, stages, model, virtual_stages) for case in results]
    layers = MODELS[model][0]()
    each = sum(1 for layer in layers for _ in layer.parameters()) + 1
    each += 2 * sum(isinstance(module, nn.BatchNorm2d) for layer in layers for module in layer.modules())
    assert len(found) == each * len(MICRO_BATCHES) * len(REMATS)
    wrong = [case for case in found if not case[-1] <= 1e-11]
    assert not wrong, wrong[:5]
    moved = {str(case[2]) for case in found if "average" in str(case[2])}
    assert len(moved) == sum(isinstance(m, nn.BatchNorm2d) for layer in layers for m in layer.modules())


@given(st.integers(1, 6), st.integers(0, 1000), st.sampled_from([0.0, 1e6, -1e8]))
def test_merging_is_as_exact_as_all_values_at_once(parts, seed, offset):
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(1, 9, (parts,), generator=generator).tolist()
    values = [torch.randn(size, 3, generator=generator, dtype=torch.float64) + offset for size in sizes]
    each = [(len(v), v.mean(0), (v - v.mean(0)).square().sum(0)) for v in values]
    counts, means, sums = zip(*each, strict=True)
    total, mean, squares = merge(counts, torch.stack(means), torch.stack(sums))
    whole_of_it = torch.cat(values)
    assert total == len(whole_of_it)
    torch.testing.assert_close(mean, whole_of_it.mean(0), rtol=1e-12, atol=1e-12)
    # a variance as E[x^2] - E[x]^2 would have no digit right at an offset of 1e8
    torch.testing.assert_close(
        squares, (whole_of_it - whole_of_it.mean(0)).square().sum(0), rtol=1e-6, atol=1e-9 + abs(offset) * 1e-14
    )


def test_a_mini_batch_that_is_not_applied_leaves_the_averages_and_is_forgotten():
    layer = by_micro_batch(nn.Sequential(nn.BatchNorm2d(2)))
    averages, norm = RunningStats(layer), layer[0]
    for value, applied in ((100.0, False), (2.0, True)):
        for i in range(2):
            averages.begin(i)
            layer(torch.full((1, 2, 1, 2), value))
        averages.update(applied)
        assert norm.recorded == {}
    assert norm.running_mean.tolist() == pytest.approx([0.2, 0.2])


def updated(rank: int, world: int, rendezvous: str):
    """Returns whether the averages moved in a step that is applied, and in one whose loss is not finite."""
    join(rank, world, rendezvous)
    coord = RankCoord(rank, world, 1)
    layers = skips_layers()
    cells = [range(3), range(3, 6)]
    model = PartitionedModel(layers, SumOfErrors(), cells, ScheduleConfig())
    engine = assemble(coord, model, OptimizerSettings())
    moved = []
    for step, factor in enumerate((1.0, math.inf)):
        before = {key: norm.running_mean.clone() for key, norm in norms(engine.executor.stage).items()}
        batch = mini_batch("skips", step, 4)
        sums = engine.executor.train(batch, step)
        outcome = engine.optimizer.update(LossSums(sums.objective * factor, sums.metrics), step)
        assert outcome.applied == math.isfinite(factor)
        after = norms(engine.executor.stage)
        moved.append({not norm.running_mean.equal(before[key]) for key, norm in after.items()})
        assert all(norm.recorded == {} for norm in after.values())
    return moved


def test_averages_move_with_the_update_and_not_without_it():
    assert run_processes(updated, 2) == [[{True}, {False}]] * 2


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(3), nn.BatchNorm2d(3, momentum=None)])
def test_a_norm_that_cannot_be_kept_over_micro_batches_is_refused(norm):
    with pytest.raises(SettingError, match="does not work with micro-batches; use BatchNorm2d"):
        by_micro_batch(nn.Sequential(norm))


def test_evaluation_uses_the_averages_and_notes_nothing():
    layer = by_micro_batch(nn.Sequential(nn.BatchNorm2d(2, eps=0.0))).eval()
    layer[0].running_mean.fill_(1.0)
    layer[0].running_var.fill_(4.0)
    assert layer(torch.full((1, 2, 1, 1), 5.0)).flatten().tolist() == [2.0, 2.0]
    assert layer[0].recorded == {}


def all_replicas(rank: int, world: int, rendezvous: str):
    join(rank, world, rendezvous)
    return {(over, first): replicas(RankCoord(rank, 2, 2), over, first) for over in (True, False) for first in (3, 5)}


def replicas(coord: RankCoord, over: bool, first: int):
    """Runs one step of two replicas of two stages, the ``first`` of five micro-batches on the first replica and the
    rest on the other; returns this stage's averages after it."""
    executor, _, _, groups = build(coord, skips_layers(), SumOfErrors(), "always")
    everything = mini_batch("skips", 3, 5)
    mine = slice(0, first) if coord.replica == 0 else slice(first, 5)
    batch = ReplicaBatch(everything.inputs[mine], everything.targets[mine], everything.divisor, first * coord.replica)
    executor.train(batch, 3)
    executor.stage.running_stats.update(True, groups.data_parallel if over else None)
    return {key: (n.running_mean.tolist(), n.running_var.tolist()) for key, n in norms(executor.stage).items()}


def test_averages_over_replicas_are_those_of_the_whole_mini_batch_and_others_those_of_the_replicas_share():
    averages = run_processes(all_replicas, 4)
    seen = all_values(skips_layers(), mini_batch("skips", 3, 5), 3)
    for first in (3, 5):
        found = [worker[True, first] for worker in averages]
        for one, other in zip(found[:2], found[2:], strict=True):
            assert one == other
            for key, of_norm in one.items():
                wanted = (0.3 * seen[key].mean(0), 0.7 + 0.3 * seen[key].var(0))
                for own, value in zip(of_norm, wanted, strict=True):
                    assert own == pytest.approx(value.tolist(), rel=1e-11, abs=1e-11)
        alone = [worker[False, first] for worker in averages]
        assert all(mean != alone[2][key][0] for key, (mean, _) in alone[0].items())
    # the other replica saw nothing: its averages are those it began with
    assert all(set(mean) == {0.0} and set(variance) == {1.0} for mean, variance in alone[2].values())
