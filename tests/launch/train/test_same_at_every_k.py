"""The real T(L, H, A) on real text with dropout: the result does not depend on K, remat or R."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import load_file

from experiments.base.cluster import Cluster
from experiments.registry import find
from launch.backends.processes import LocalLauncher
from launch.runs.store import RunFolder
from suite.data.text.prepare import folder_of, prepare
from suite.pipeline.planning.partition import partition
from suite.training.metrics import read_steps
from tests.launch.records import write_records
from tests.suite.pipeline.build import parameters_of
from tests.suite.training.checkpoint.saves import layer_files

BASE = (
    "text.corpus=django text.vocabulary=1200 text.max_length=32 model.blocks_per_stack=2 model.dropout=0.1 "
    "train.steps=20 train.batch_tokens=240 train.valid_pairs=40 train.checkpoint_every=20 train.threads=1 "
    "tracking.wandb=disabled "
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory, cache):
    """Returns a function from settings to (losses and norms, valid NLL, weights and optimizer state by layer file).

    A run has 20 steps; one that is to ``stop`` after some of them is resumed."""
    root = tmp_path_factory.mktemp("same")
    done = {}

    def train(settings, stop=None):
        # a run's own are the plan's to say
        usual = ("pipeline.remat=except_last", "pipeline.schedule=fill_drain", "pipeline.micro_batches=8")
        for setting in usual:
            if setting.partition("=")[0] not in settings:
                settings += f" {setting}"
        if (settings, stop) not in done:
            experiment = find("t48_1_3b_deep").at_laptop_scale(Cluster(2, 2**33, "cpu")).with_settings(BASE + settings)
            prepare(experiment.text, cache, print)
            run = RunFolder(root / str(len(done)))
            run.path.mkdir()
            for resume, steps in ((False, stop), (True, 20)) if stop else ((False, 20),):
                each = experiment.with_settings(f"train.steps={steps}")
                data = folder_of(experiment.text, cache)
                _, attempt = write_records(run, each, cells_of(experiment), data, resume)
                LocalLauncher().run(attempt, each, SimpleNamespace(should_stop=False))
            lines = read_steps(run.metrics)
            newest = max(run.checkpoints.glob("0*"))
            files = {name: load_file(path) for name, path in layer_files(newest).items()}
            record = json.loads(run.record.read_text())
            done[settings, stop] = (
                [(line["train/loss"], line["train/grad_norm"]) for line in lines],
                record["valid_nll"],
                files,
            )
        return done[settings, stop]

    return train


def cells_of(experiment):
    """Returns the cells by hand or a cut by parameters; a run takes its own from measured costs."""
    layers, _ = experiment.build()
    pipeline = experiment.pipeline
    return tuple(
        pipeline.layers_per_cell
        or partition([parameters_of(layer) for layer in layers], pipeline.stages * pipeline.virtual_stages)
    )


ALONE = "pipeline.stages=1 pipeline.micro_batches=4"
TWO = "pipeline.stages=2 pipeline.micro_batches=4"
INTERLEAVED = (
    f"{TWO} pipeline.schedule=interleaved pipeline.virtual_stages=2 pipeline.remat=never "
    "pipeline.layers_per_cell=2,2,2,1"
)
ZERO_BUBBLE = f"{TWO} pipeline.schedule=zero_bubble pipeline.remat=never"


@pytest.mark.parametrize(
    ("settings", "others", "stop"),
    [
        (ALONE, TWO, None),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (ALONE, "pipeline.stages=4 pipeline.micro_batches=4 pipeline.remat=always", None),
                (ALONE, f"{TWO} pipeline.remat=never pipeline.layers_per_cell=6,1", None),
                (f"{ALONE} pipeline.schedule=1f1b", INTERLEAVED, None),  # which add micro-batches in one order
                (f"{ALONE} pipeline.schedule=zero_bubble", ZERO_BUBBLE, None),
                (INTERLEAVED, INTERLEAVED, 10),
                (ZERO_BUBBLE, ZERO_BUBBLE, 10),
            )
        ),
    ],
)
def test_twenty_steps_are_bit_equal_at_every_k_and_after_an_interrupt(trained, settings, others, stop):
    losses, valid, files = trained(settings)
    assert len(losses) == 20
    assert losses[-1][0] < losses[0][0]
    other_losses, other_valid, other_files = trained(others, stop)
    assert other_losses == losses
    assert other_valid == valid
    assert other_files.keys() == files.keys()
    for name, tensors in files.items():
        for key, value in tensors.items():
            assert np.array_equal(other_files[name][key], value), (name, key)


@pytest.mark.slow
def test_two_replicas_train_like_one(trained):
    losses, valid, files = trained(ALONE)
    other_losses, other_valid, other_files = trained("pipeline.stages=2 pipeline.micro_batches=2 pipeline.replicas=2")
    np.testing.assert_allclose(other_losses, losses, rtol=1e-6)
    assert other_valid == pytest.approx(valid, rel=1e-6)
    # Adam divides a gradient by its own size: where a rare token's is as good as zero, rounding alone decides the
    # entry's step. So single entries of the weights may differ by more; the losses above do not.
    pairs = [(value, other_files[n][k]) for n, ts in files.items() for k, value in ts.items() if k.startswith("value/")]
    off = sum(int((abs(one - other) > 1e-6).sum()) for one, other in pairs)
    assert off < 1e-3 * sum(one.size for one, _ in pairs)


@pytest.mark.slow
def test_bf16_trains_close_to_fp32(trained):
    losses, _, _ = trained(ALONE)
    mixed, _, _ = trained(f"{TWO} optimizer.precision=bf16")
    assert mixed != losses
    np.testing.assert_allclose([loss for loss, _ in mixed], [loss for loss, _ in losses], rtol=0.01)
