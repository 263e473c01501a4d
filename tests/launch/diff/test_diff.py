"""``gpipe diff``: what is said about two runs, what is refused, and two real runs of a model with one fault."""

import re
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from launch.diff.compare import compare
from suite import TrainSpec
from suite.errors import SettingError
from suite.training.fingerprints import Fingerprint, RunFingerprints
from tests.launch.command_line import call, refusal

COUNT = 4


class Remembers(nn.Linear):
    """Adds how often it has been called in a worker: outside of them, where a layer is tried before a run, never."""

    calls = 0

    def forward(self, x):
        Remembers.calls += dist.is_initialized()
        return super().forward(x) + 1e-3 * Remembers.calls


class Breaks(nn.Linear):
    """Breaks in a worker."""

    def forward(self, x):
        if dist.is_initialized():
            raise RuntimeError("it broke")
        return super().forward(x)


def spec(layer):
    torch.manual_seed(3)
    x = torch.randn(16, 6)
    return TrainSpec(
        layers=[nn.Linear(6, 5), nn.Tanh(), layer(5, 5), nn.Tanh(), nn.Linear(5, 6)], loss=nn.MSELoss(),
        train=list(zip(x, x, strict=True)), batch_size=8, steps=2, stages=1, micro_batches=4,
        settings="pipeline.schedule=1f1b",
    )  # fmt: skip


def right():
    return spec(nn.Linear)


def remembers():
    return spec(Remembers)


def breaks():
    return spec(Breaks)


def diff(folder, name, a, b, *more):
    return call("diff", f"{__file__}:{name}", "--a", a, "--b", b, *more, folder=folder)


def test_plain_torch_and_two_stages_are_the_same_to_the_bit_and_other_micro_batches_up_to_rounding(tmp_path):
    """Also with split backwards, for which linear layers become a class of the suite's own."""
    code, out, errors = diff(tmp_path, "right", "plain", "pipeline.stages=2 pipeline.schedule=zero_bubble")
    assert (code, errors) == (0, "")
    assert re.search(
        r"\na: /\S+, plain\nb: /\S+, K = 2, M = 4, zero_bubble\nall \d{3} tensors are the same to the bit\n$", out
    ), out
    runs = sorted(str(run) for run in tmp_path.glob(".cache/short_runs/*/*"))
    assert not list(tmp_path.glob(".cache/short_runs/*/*/checkpoints/0*")), "nobody reads them"
    assert "has no valid checkpoint; short trainings save none" in refusal("diff", "--run", runs[1], folder=tmp_path)
    code, again, _ = call("diff", "--run", " ".join(runs), folder=tmp_path)
    assert (code, again.splitlines()[-1]) == (0, out.splitlines()[-1])
    saving = "pipeline.micro_batches=2 train.checkpoint_every=1"
    code, out, _ = diff(tmp_path, "right", saving, "pipeline.micro_batches=4", "--steps", "1")
    assert code == 0
    assert len(list(tmp_path.glob(".cache/short_runs/*/*/checkpoints/00000001/manifest.json"))) == 1
    assert "a has 2 micro-batches and b 4: their layers see other rows" in out
    assert "rounding explains it" in out


def test_a_layer_that_remembers_calls_is_named(tmp_path):
    """Both its forwards and its recomputes count."""
    settings = "pipeline.schedule=fill_drain pipeline.remat="
    code, out, _ = diff(tmp_path, "remembers", f"{settings}never", f"{settings}always", "--steps", "1")
    assert code == 1, out
    first = "recomputes differ from their forwards, the first in b: step 1, layer 2 (Remembers), micro-batch 0"
    assert f"{first}, recomputed output 0\n" in out
    assert "keeps state that is no buffer" in out


def test_a_plain_training_that_fails_leaves_no_run(tmp_path):
    code, _, errors = diff(tmp_path, "breaks", "plain", "pipeline.stages=2")
    assert code == 2
    where = rf"\({re.escape(__file__)}, line \d+\)"
    assert re.fullmatch(rf"error: plain PyTorch cannot train breaks: RuntimeError: it broke {where}\n", errors), errors
    assert not list(tmp_path.glob("runs/*")) + list(tmp_path.glob(".cache/short_runs/*"))


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ((), ["give an experiment with --a and --b, or one or two runs with --run ..."]),
        (("t12_400m", "--run", "one two"), ["give an experiment with --a and --b, or one or two runs"]),
        (("--run", "one two", "--a", "train.seed=1"), ["give an experiment with --a and --b, or one"]),
        (("--run", "one two three"), ["3 runs are given; give one or two"]),
        (
            ("t12_400m", "--a", "plain", "--b", "plain"),
            ["both are plain PyTorch; give one of them"],
        ),
        (("t12_400n",), ["t12_400n", "did you mean t12_400m"]),
    ],
)
def test_what_cannot_be_compared_is_refused(tmp_path, arguments, parts):
    found = refusal("diff", *arguments, folder=tmp_path)
    assert all(part in found for part in parts), found


# ---------------------------------------------------------------------------------------------------------------------
# by hand


def some(value, scale=1.0):
    generator = torch.Generator().manual_seed(value)
    return Fingerprint.of(scale * torch.randn(100, generator=generator))


def recorded(**changes):
    """A step of two layers, ``COUNT`` micro-batches."""
    tensors = {}
    for i in range(COUNT):
        for layer in range(2):
            tensors[1, i, layer, "random state"] = some(1)
            tensors[1, i, layer, "output 0"] = some(10 + i + 4 * layer)
            tensors[1, i, layer, "gradient of weight"] = some(20 + i + 4 * layer)
    for layer in range(2):
        tensors[1, None, layer, "whole gradient of weight"] = some(30 + layer)
        tensors[1, None, layer, "updated weight"] = some(40 + layer)
    return replace(RunFingerprints({0: "Linear", 1: "Head"}, COUNT, tensors), **changes)


def said(own, other):
    return "\n".join(compare(own, other, "fp32").lines())


def changed(*keys):
    run = recorded()
    return replace(run, tensors=run.tensors | dict.fromkeys(keys, some(99)))


@pytest.mark.parametrize(
    ("keys", "first", "cause"),
    [
        (
            [(1, 2, 1, "output 0"), (1, 3, 0, "output 0")],
            "layer 0 (Linear), micro-batch 3, output 0",
            "remembers an earlier call",
        ),
        ([(1, 1, 1, "output 0"), (1, 1, 1, "random state")], "micro-batch 1, random state", "other random numbers"),
        ([(1, 0, 0, "gradient of weight"), (1, 2, 1, "gradient of weight")], "layer 1 (Head)", "its backward differs"),
        (
            [(1, None, 0, "whole gradient of weight"), (1, None, 1, "updated weight")],
            "whole gradient",
            "one is missing",
        ),
        ([(1, None, 1, "updated weight")], "layer 1 (Head), updated weight", "the optimizer differs"),
    ],
)
def test_the_first_difference_is_the_one_that_others_follow_from(keys, first, cause):
    assert not compare(recorded(), changed(*keys), "fp32").is_explained
    text = said(recorded(), changed(*keys))
    assert first in text.splitlines()[1], text
    assert cause in text


@pytest.mark.parametrize(
    ("scale", "in_fp32", "in_bf16"), [(1 + 2e-6, True, True), (1.005, False, True), (1.5, False, False)]
)
def test_rounding_explains_a_few_units_in_the_last_place_and_no_more(scale, in_fp32, in_bf16):
    other = recorded()
    other.tensors[1, 0, 0, "output 0"] = some(10, scale)
    assert compare(recorded(), other, "fp32").is_explained == in_fp32
    assert compare(recorded(), other, "bf16").is_explained == in_bf16


@pytest.mark.parametrize(("units", "is_explained"), [(1, True), (50, False)])
def test_an_update_may_round_a_value_otherwise_and_no_more(units, is_explained):
    values, own, other = torch.linspace(1, 2, 100), recorded(), recorded()
    changed = values.clone()
    changed[7] += units * torch.finfo(torch.float32).eps
    own.tensors[1, None, 1, "updated weight"] = Fingerprint.of(values)
    other.tensors[1, None, 1, "updated weight"] = Fingerprint.of(changed)
    found = compare(own, other, "fp32")
    assert (len(found.differences), found.is_explained) == (1, is_explained)


def test_an_update_that_is_lost_is_no_rounding_however_small_it_is():
    values, own, other = 1e3 * torch.linspace(1, 2, 100), recorded(), recorded()
    moved = values.clone()
    moved[3] += 1e-4
    for run, updated in ((own, moved), (other, values)):
        run.tensors[1, None, 1, "initial weight"] = Fingerprint.of(values)
        run.tensors[1, None, 1, "updated weight"] = Fingerprint.of(updated)
    assert not compare(own, other, "fp32").is_explained


def test_other_buffers_are_said_and_are_no_other_training():
    own, other = recorded(), recorded()
    own.tensors[1, None, 1, "buffer running_mean"] = some(70)
    other.tensors[1, None, 1, "buffer running_mean"] = some(70, 1 + 1e-6)
    assert not compare(own, other, "fp32").other_buffers
    other.tensors[1, None, 1, "buffer running_mean"] = some(71)
    found = compare(own, other, "fp32")
    assert found.is_explained
    expected = "1 buffers differ, which evaluation may use, the first: step 1, layer 1 (Head), buffer running_mean"
    assert next(found.lines()) == expected


def test_a_fault_behind_a_sum_in_another_order_is_the_one_that_is_named():
    other = recorded()
    other.tensors[1, None, 0, "whole gradient of weight"] = some(30, 1 + 1e-7)
    assert compare(recorded(), other, "fp32").is_explained
    other.tensors[1, None, 1, "whole gradient of weight"] = some(31, 0.5)
    found = compare(recorded(), other, "fp32")
    assert not found.is_explained
    assert "layer 1 (Head), whole gradient of weight" in said(recorded(), other)


def test_a_gradient_that_is_nothing_but_rounding_is_judged_by_those_of_its_layer():
    """The gradient of a bias of attention's keys is 0: its rows cancel, and what is left depends on their split."""
    for scale, is_explained in ((1e-7, True), (1e-3, False)):
        other = recorded(micro_batches=2 * COUNT)
        own = recorded()
        for run, seed in ((own, 50), (other, 51)):
            run.tensors[1, None, 0, "whole gradient of bias"] = some(seed, scale)
        assert compare(own, other, "fp32").is_explained == is_explained


def test_a_difference_in_a_tied_parameter_is_named_at_the_layer_that_differs_otherwise():
    own, other = (recorded(ties={(0, "table"): "words", (1, "table"): "words"}) for _ in range(2))
    for layer in range(2):
        own.tensors[1, None, layer, "whole gradient of table"] = some(60)
        other.tensors[1, None, layer, "whole gradient of table"] = some(61)
    assert "layer 0 (Linear), whole gradient of table, with its copies of layer 1\n" in said(own, other)
    other.tensors[1, None, 1, "whole gradient of weight"] = some(62)
    assert "  step 1, layer 1 (Head), whole gradient of" in said(own, other)
    other.tensors[1, None, 0, "whole gradient of weight"] = some(63)
    assert "layer 0 (Linear), whole gradient of table" in said(own, other)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_rounding_explains_no_number_that_is_not_finite(value):
    for key in ((1, 0, 0, "output 0"), (1, None, 0, "whole gradient of weight")):
        other = recorded()
        other.tensors[key] = Fingerprint.of(torch.full((100,), value))
        assert not compare(recorded(), other, "fp32").is_explained


def test_a_tensor_of_one_run_alone_is_a_difference_and_a_deferred_gradient_is_none():
    other = recorded()
    del other.tensors[1, 2, 1, "gradient of weight"]
    assert compare(recorded(), other, "fp32").is_explained
    del other.tensors[1, None, 1, "whole gradient of weight"]
    assert not compare(recorded(), other, "fp32").is_explained
    assert said(recorded(), other).startswith("1 tensors are in one run alone, the first in a: step 1, layer 1 (Head)")


def test_other_numbers_of_micro_batches_are_not_blamed_on_a_sum():
    other = recorded(micro_batches=2 * COUNT)
    other.tensors[1, None, 0, "whole gradient of weight"] = some(30, 1.1)
    assert "one is missing" not in said(recorded(), other)


def test_runs_of_other_models_or_steps_are_refused():
    with pytest.raises(SettingError, match="different models: layer 1 is Head in a and Linear in b"):
        compare(recorded(), recorded(layers={0: "Linear", 1: "Linear"}), "fp32")
    with pytest.raises(SettingError, match="a ran on cpu and b on cuda"):
        compare(recorded(), recorded(device="cuda"), "fp32")
    with pytest.raises(SettingError, match=r"no step in common: a \[1\], b \[5\]"):
        compare(recorded(), recorded(tensors={(5, 0, 0, "output 0"): some(1)}), "fp32")
