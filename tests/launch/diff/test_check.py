"""``gpipe check``: a model that trains in pipelines as in plain PyTorch, one that does not, and what is refused."""

import re
from dataclasses import replace

import pytest
from torch import nn

from experiments.base.cluster import Cluster
from experiments.registry import find
from launch.diff import check as checking
from launch.diff import plain_training, short_training
from suite.errors import PlacementError
from suite.settings import PipelineSettings
from tests.launch.command_line import call, refusal
from tests.launch.diff.test_diff import Remembers, spec


def right():
    return spec(nn.Linear)


def remembers():
    return spec(Remembers)


class Counts(nn.Linear):
    """Its output grows with each call."""

    calls_of_layer = 0

    def forward(self, x):
        self.calls_of_layer += 1
        return super().forward(x) * self.calls_of_layer


def counts():
    return spec(Counts)


class MixesRows(nn.Linear):
    def forward(self, x):
        return super().forward(x).softmax(0)


def mixes_rows():
    return spec(MixesRows)


def summed_loss():
    """BatchNorm keeps the pipelines with other micro-batches from being tried."""
    return replace(spec(Images), loss=lambda outputs, targets: ((outputs - targets) ** 2).sum())


class Images(nn.Sequential):
    def __init__(self, width, _):
        super().__init__(nn.Unflatten(1, (width, 1, 1)), nn.BatchNorm2d(width), nn.Flatten())


@pytest.fixture
def check(tmp_path, monkeypatch):
    """Runs one step of ``gpipe check`` with these pipelines, or with two of its own."""
    own = checking._shapes

    def run(name, *shapes):
        monkeypatch.setattr(checking, "_shapes", lambda *given: ([*shapes] or own(*given)[0][2::3], []))
        return call("check", f"{__file__}:{name}", "--steps", "1", folder=tmp_path)

    return run


def test_a_right_model_is_the_same_in_each_shape_and_leaves_no_runs(tmp_path, check):
    code, out, errors = check("right")
    assert (code, errors) == (0, ""), out
    assert "  stages=2 schedule=zero_bubble remat=never: same to the bit, " in out
    assert " replicas=2 schedule=1f1b: same up to rounding; " in out
    assert out.endswith("all 2 are the same training as plain PyTorch\n")
    assert not list(tmp_path.glob("runs/*")) + list(tmp_path.glob(".cache/short_runs/*"))


SHAPES = [
    "stages=1 remat=never", "stages=2 schedule=fill_drain remat=always", "stages=2 schedule=zero_bubble remat=never",
    "stages=2 schedule=zbv virtual_stages=2 remat=auto", "stages=4 schedule=1f1b",
    "stages=2 micro_batches=2 replicas=2 schedule=1f1b", "micro_batches=2",
]  # fmt: skip


@pytest.mark.parametrize(
    ("micro_batches", "layers", "depends_on_split", "labels", "left_out"),
    [
        (4, 5, False, SHAPES, ""),
        (4, 5, True, SHAPES[:-1], "other micro-batches, because layers named above"),
        (4, 3, False, SHAPES[:3] + SHAPES[5:], "stages=4, because the model has 3 layers"),
        (4, 1, False, [SHAPES[0], "micro_batches=2 replicas=2", SHAPES[-1]], "stages=4"),
        (3, 5, False, SHAPES[:5], "replicas=2 and other micro-batches, because 3 cannot be halved"),
    ],
)
def test_the_shapes_of_a_check_are_those_that_a_model_allows(micro_batches, layers, depends_on_split, labels, left_out):
    shapes, reasons = checking._shapes(micro_batches, layers, depends_on_split)
    assert [checking._label(shape, micro_batches) for shape in shapes] == labels
    assert left_out in "".join(reasons)
    assert bool(left_out) == bool(reasons)


def test_a_layer_that_mixes_rows_is_named_at_the_end(check):
    code, out, _ = check("mixes_rows", PipelineSettings(stages=1, micro_batches=4))
    assert code == 0, out
    result, question = out.splitlines()[-2:]
    assert result.endswith("are the same training as plain PyTorch")
    assert question == (
        "is this meant? layer 2: MixesRows has rows that depend on the other rows of their micro-batch; "
        "mix no rows, or other micro-batches train another model"
    )


def test_a_loss_that_is_a_sum_is_named_and_buffers_are_said_once(check):
    code, out, _ = check("summed_loss", PipelineSettings(stages=2, micro_batches=4))
    assert code == 1, out
    result, question = out.splitlines()[-2:]
    assert result == (
        "all 2 are the same training as plain PyTorch, but for 3 buffers (layer 2), which evaluation may use"
    )
    assert re.fullmatch(
        r"is this meant\? layer 4: Linear ends in a loss that is no mean over rows: its sums are [\d.]+ for 2 rows, "
        r"[\d.]+ and [\d.]+ for their halves; return a mean over rows, or give units \(docs/own-model.md\)",
        question,
    )


def test_a_layer_that_remembers_calls_is_named_and_the_runs_are_kept(tmp_path, check):
    """Plain PyTorch shows the same each time, because the layer counts in workers."""
    code, out, _ = check("remembers", PipelineSettings(stages=2, schedule="1f1b", remat="always"))
    assert code == 1, out
    assert "plain PyTorch again: same to the bit" in out
    assert "stages=2 schedule=1f1b remat=always: DIFFERS" in out
    assert "step 1, layer 2 (Remembers), micro-batch 0, recomputed output 0" in out
    assert out.count(str(tmp_path)) == 2
    assert len(list(tmp_path.glob(".cache/short_runs/*/*"))) == 2
    assert not list(tmp_path.glob("runs/*"))


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        (f"{__file__}:counts", ["layer 2 (Counts) returns other values", "it changes its attribute calls_of_layer"]),
        ("t12_400n", ["did you mean t12_400m"]),
    ],
)
def test_what_no_pipeline_can_train_is_refused(tmp_path, name, parts):
    found = refusal("check", name, folder=tmp_path)
    assert all(part in found for part in parts), found


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_what_a_model_lacks_in_one_process_is_said_with_numbers(monkeypatch, kind):
    """All cores share the memory; a process has one GPU. Weights and gradients take 4 bytes each; Adafactor's rows and
    columns are not counted."""
    gib = 8 * 408_209_920 / 2**30
    machine = Cluster(2, 2 << 30, "gpu") if kind == "gpu" else Cluster(2, 1 << 30, "cpu")
    monkeypatch.setattr(plain_training, "this_machine", lambda: machine)
    said = f"408,209,920 parameters with gradients and optimizer take {gib:.1f} GiB and there are 2.0; use a machine"
    with pytest.raises(PlacementError, match=re.escape(said)):
        plain_training.check_fits(find("t12_400m"))
    monkeypatch.setattr(plain_training, "this_machine", lambda: Cluster(2, 2 << 30, "cpu"))
    plain_training.check_fits(find("t12_400m"))


@pytest.mark.parametrize(
    ("kind", "there", "devices", "gib"),
    [("gpu", 1, 4, 20), ("gpu", 2, 4, 40), ("gpu", 3, 6, 40), ("gpu", 8, 8, 80), ("cpu", 2, 2, 80)],
)
def test_the_workers_of_a_check_share_gpus_of_which_there_are_fewer(monkeypatch, kind, there, devices, gib):
    monkeypatch.setattr(short_training, "this_machine", lambda: Cluster(there, 80 << 30, kind))
    assert short_training.shared_devices() == Cluster(devices, gib << 30, kind)
