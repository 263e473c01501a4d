"""Fingerprints: of one tensor, of a run at every K, R and schedule, and of engines with a planted fault."""

import contextlib
import re

import pytest
import torch
from torch import nn

from launch.backends.processes import run_processes
from launch.diff.compare import compare
from suite.errors import SettingError
from suite.pipeline.model import ties
from suite.pipeline.runtime import executor, p2p, stage
from suite.pipeline.schedule.config import ScheduleConfig
from suite.pipeline.schedule.remat import UNLIMITED
from suite.training import stage_optimizer
from suite.training.fingerprints import PART, Fingerprint, RunFingerprints
from tests.suite.pipeline.build import join
from tests.suite.training.work import trained

IN_ORDER = ScheduleConfig("1f1b", (UNLIMITED,))
STEPS = 2


@pytest.mark.parametrize("shape", [(), (0,), (7,), (33, 5), (PART + 3,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_equal_bits_have_equal_fingerprints_and_one_other_bit_does_not(shape, dtype):
    tensor = torch.randn(shape).to(dtype)
    found = Fingerprint.of(tensor)
    assert found == Fingerprint.of(tensor.clone())
    assert found.norm == pytest.approx(float(tensor.double().norm()))
    if tensor.numel():
        other = tensor.clone().reshape(-1)
        bits = other.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[other.element_size()])
        bits[-1] ^= 1
        assert Fingerprint.of(other.reshape(shape)).digest != found.digest


def test_a_negative_zero_is_a_zero_and_the_order_in_memory_does_not_matter():
    assert Fingerprint.of(torch.tensor([0.0, 1.0])) == Fingerprint.of(torch.tensor([-0.0, 1.0]))
    image = torch.randn(2, 3, 4, 5)
    assert Fingerprint.of(image) == Fingerprint.of(image.contiguous(memory_format=torch.channels_last))


def test_sketches_estimate_how_far_two_tensors_are_apart():
    """32 sums: a relative standard error of the squared norm of sqrt(2 / 32) = 0.25, of the norm half of it."""
    ratios = []
    for seed in range(200):
        generator = torch.Generator().manual_seed(seed)
        one = torch.randn(999, generator=generator)
        change = torch.randn(999, generator=generator) * (torch.rand(999, generator=generator) < 0.2)
        ratios.append(Fingerprint.of(one).distance(Fingerprint.of(one + change)) / float(change.norm()))
    assert sum(ratios) / 200 == pytest.approx(1.0, abs=0.05)
    assert max(ratios) < 1.6
    assert min(ratios) > 0.5


def test_a_difference_of_equal_values_is_estimated_as_well():
    ratios = []
    for count in range(20, 1020):
        one = torch.randn(count, generator=torch.Generator().manual_seed(count))
        ratios.append(Fingerprint.of(one).distance(Fingerprint.of(one + 1.0)) / count**0.5)
    assert min(ratios) > 0.6
    assert max(ratios) < 1.4


@pytest.mark.parametrize("shape", [(64, 64), (500, 30), (48, 1000), (3000, 31), (33, 2079)])
@pytest.mark.parametrize("is_column", [True, False])
def test_a_difference_in_one_row_or_column_is_estimated_as_well(shape, is_column):
    ratios = []
    for seed in range(200):
        one = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        other = one.clone()
        changed = other[:, seed % shape[1]] if is_column else other[seed % shape[0]]
        changed += 1.0
        ratios.append(Fingerprint.of(one).distance(Fingerprint.of(other)) / len(changed) ** 0.5)
    assert min(ratios) > 0.4
    assert max(ratios) < 1.8


def test_a_record_of_another_version_is_refused(tmp_path):
    """Its hashes are others: all its tensors would seem to differ."""
    (tmp_path / "0-0.jsonl").write_text('{"step": 0, "layers": {}, "ties": [], "micro_batches": 1, "device": "cpu"}\n')
    with pytest.raises(SettingError, match="another version, whose hashes differ; train the run again"):
        RunFingerprints.read(tmp_path)


# ---------------------------------------------------------------------------------------------------------------------
# planted faults; each is one line in the engine of a worker


class Patches(contextlib.ExitStack):
    """Wraps methods until its end."""

    def wrap(self, owner, name, wrapped):
        """Replaces a function by ``wrapped(the function, *its arguments)``."""
        original = getattr(owner, name)
        setattr(owner, name, lambda *args, **kwargs: wrapped(original, *args, **kwargs))
        self.callback(setattr, owner, name, original)


def scaled_loss_gradient(patches):
    patches.wrap(stage.Stage, "backward", lambda f, s, m, g: f(s, m, g if s.loss is None else (2 * g[0],)))


def dropped_micro_batch(patches):
    def backward(original, own, micro_batch, gradients):
        before = [None if p.grad is None else p.grad.clone() for p in own.layers.parameters()]
        found = original(own, micro_batch, gradients)
        if micro_batch.index == 2:
            for parameter, grad in zip(own.layers.parameters(), before, strict=True):
                parameter.grad = grad
        return found

    patches.wrap(stage.Stage, "backward", backward)


def another_seed(patches):
    patches.wrap(stage, "layer_seed", lambda f, run, step, i, layer: f(run, step, i + (layer == 4), layer))


def another_seed_in_recomputes(patches):
    patches.wrap(stage, "layer_seed", lambda f, run, step, i, layer: f(run, step, i + torch.is_grad_enabled(), layer))


def stale_receive(patches):
    last = {}

    def recv(original, own, i):
        found = original(own, i)
        stale, last[id(own)] = last.get(id(own), found), found
        return stale if "activations" in own._what else found

    patches.wrap(p2p.RecvQueue, "recv", recv)


def rounded_boundary(patches):
    patches.wrap(
        executor, "cast_to_boundary",
        lambda f, tensors, specs: tuple(
            t.bfloat16().to(t.dtype) if t.is_floating_point() else t for t in f(tensors, specs)
        ),
    )  # fmt: skip


def swapped_gradients(patches):
    def recv(original, own, i):
        found = original(own, i)
        return tuple(t.flip(0) for t in found) if "gradients" in own._what else found

    patches.wrap(p2p.RecvQueue, "recv", recv)


def shifted_targets(patches):
    def targets(original, own, state, action):
        return tuple(target.roll(1) for target in original(own, state, action))

    patches.wrap(executor.Executor, "_targets", targets)


def loss_averaged_over_micro_batches(patches):
    def forward(original, own, micro_batch, targets=()):
        outputs, metric = original(own, micro_batch, targets)
        return ((outputs[0] / targets[0].numel(),), metric) if metric is not None else (outputs, metric)

    patches.wrap(stage.Stage, "forward", forward)


def copies_not_summed(patches):
    patches.wrap(ties.TiedParameters, "sum_gradients", lambda f, own: None)


def gradients_kept(patches):
    patches.wrap(stage_optimizer.StageOptimizer, "clear", lambda f, own: None)


def skipped_parameter(patches):
    def step(original, own, *args):
        kept = own._trainable[4, "mix.bias"].detach().clone() if (4, "mix.bias") in own._trainable else None
        found = original(own, *args)
        if kept is not None:
            own._trainable[4, "mix.bias"].data.copy_(kept)
        return found

    patches.wrap(stage_optimizer.StageOptimizer, "update", step)


def late_learning_rate(patches):
    patches.wrap(stage_optimizer, "learning_rate", lambda f, step, settings: f(step + 1, settings))


def not_clipped(patches):
    patches.wrap(stage_optimizer, "_clip", lambda f, *args: None)


def other_initial_weights(patches):
    patches.wrap(stage, "initial_seed", lambda f, seed, layer: f(seed, layer + (layer == 2)))


def no_dropout(patches):
    patches.wrap(nn.functional, "dropout", lambda f, x, p, training: x)


def weight_gradient_twice(patches):
    def hook(original, own, micro_batch, targets=()):
        found = original(own, micro_batch, targets)
        for index, layer in zip(own.indices, own.layers, strict=True):
            if index == 1 and layer.mix.weight.grad is not None and micro_batch.index == 3:
                layer.mix.weight.grad *= 2
        return found

    patches.wrap(stage.Stage, "forward_with_graph", hook)


def summed_twice(patches):
    def finish(original, own):
        found = original(own)
        for _, gradient in found:
            gradient.mul_(2)
        return found

    patches.wrap(stage_optimizer.StageOptimizer, "finish_reduction", finish)


FAULTS = {
    scaled_loss_gradient: r"layer 5 \(Leave\), micro-batch 0, gradient of",
    dropped_micro_batch: "layer 0 .*whole gradient of",
    another_seed: r"layer 4 \(Block\), micro-batch 0, random state",
    stale_receive: r"layer 3 \(Middle\), micro-batch 1, output",
    rounded_boundary: r"layer 3 \(Middle\), micro-batch 0, output",
    swapped_gradients: r"layer 2 \(Block\), micro-batch 0, gradient of",
    shifted_targets: r"layer 5 \(Leave\), micro-batch 0, loss",
    loss_averaged_over_micro_batches: r"layer 5 \(Leave\), micro-batch 0, gradient of",
    copies_not_summed: r"layer 0 \(Enter\), whole gradient of table",
    gradients_kept: "step 2, layer 0 .*whole gradient of",
    skipped_parameter: r"layer 4 \(Block\), updated mix.bias",
    late_learning_rate: "layer . .*updated",
    not_clipped: "layer . .*updated",
    other_initial_weights: r"layer 2 \(Block\), initial",
    no_dropout: r"layer 1 \(Block\), micro-batch 0, random state",
    weight_gradient_twice: r"layer 1 \(Block\), whole gradient of mix.weight",
}
"""Planted faults, and what is found first."""


def record(rank, world, rendezvous, folder, cases):
    """Trains once for each case of (name, stages, replicas, schedule, planted fault)."""
    join(rank, world, rendezvous)
    for name, stages, replicas, schedule_config, fault in cases:
        with Patches() as patches:
            if fault is not None:
                fault(patches)
            trained(
                rank, stages, replicas, STEPS, schedule_config=schedule_config, optimizer="adamw",
                fingerprints=folder / name,
            )  # fmt: skip


SAME = {
    "1f1b": (2, 1, IN_ORDER),
    "recomputed": (2, 1, ScheduleConfig("1f1b", (0,))),
    "zero bubble": (2, 1, ScheduleConfig("zero_bubble", (UNLIMITED,))),
    "interleaved": (2, 1, ScheduleConfig("interleaved", (UNLIMITED,), 2)),
    "in a V": (2, 1, ScheduleConfig("zbv", (UNLIMITED,), 2)),
    "fill-drain": (2, 1, ScheduleConfig("fill_drain", (1,))),
    "two replicas": (1, 2, IN_ORDER),
}
"""Right pipelines."""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fingerprints")
    run_processes(record, 1, folder, [("alone", 1, 1, IN_ORDER, None)])
    cases = [(name, *how, None) for name, how in SAME.items()]
    cases += [(fault.__name__, 2, 1, IN_ORDER, fault) for fault in FAULTS]
    reverse = ScheduleConfig("fill_drain", (1,))
    cases += [(f"{fault.__name__}, sums in reverse", 2, 1, reverse, fault) for fault in FAULTS]
    cases += [("seed in recomputes", 2, 1, ScheduleConfig("1f1b", (0,)), another_seed_in_recomputes)]
    cases += [("summed twice", 1, 2, IN_ORDER, summed_twice)]
    run_processes(record, 2, folder, cases)
    return lambda name: RunFingerprints.read(folder / name)


@pytest.mark.parametrize("name", SAME)
def test_right_pipelines_are_the_same_or_explained_by_rounding(recorded, name):
    found = compare(recorded("alone"), recorded(name), "fp32")
    assert found.is_explained, list(found.lines())
    is_same = not found.differences
    assert is_same == (name not in ("fill-drain", "two replicas")), list(found.lines())
    outputs = [key for key in recorded(name).tensors if key[3].startswith("output")]
    assert len(outputs) == STEPS * 4 * (2 * 5 + 1), "x and idle of five layers, and the scores"


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_planted_fault_is_found_where_it_is(recorded, fault):
    found = compare(recorded("alone"), recorded(fault.__name__), "fp32")
    text = "\n".join(found.lines())
    assert not found.is_explained, text
    (first,) = re.findall("the first that differs by more than rounding:\n(.*)", text)
    assert re.search(FAULTS[fault], first), text


BEHIND_GRADIENTS = gradients_kept, skipped_parameter, late_learning_rate, not_clipped
IN_ANY_ORDER = [fault for fault in FAULTS if fault is not weight_gradient_twice]  # it needs a gradient before B3


@pytest.mark.parametrize("fault", IN_ANY_ORDER, ids=lambda fault: fault.__name__)
def test_a_planted_fault_is_not_taken_for_another_order_of_sums(recorded, fault):
    """One in an update or a later step is: they are judged only where all gradients are equal to the bit."""
    found = compare(recorded("alone"), recorded(f"{fault.__name__}, sums in reverse"), "fp32")
    assert found.is_explained == (fault in BEHIND_GRADIENTS), list(found.lines())


def test_a_recompute_from_another_seed_is_named_as_one(recorded):
    found = compare(recorded("alone"), recorded("seed in recomputes"), "fp32")
    assert not found.is_explained
    assert "recomputes differ from their forwards, the first in b: step 1, layer 0" in next(found.lines())


def test_a_sum_over_replicas_that_is_twice_as_large_is_found(recorded):
    found = compare(recorded("alone"), recorded("summed twice"), "fp32")
    assert not found.is_explained
    assert "layer 0 (Enter), whole gradient of" in "\n".join(found.lines())
