"""Loss spikes: all are found, and nothing else."""

import json
import random

from suite.training.loss_spikes import LEAST, LossSpikes


def values(loss, applied=True):
    return {"train/loss": loss, "train/grad_norm": 1.5, "train/lr": 0.1, "train/applied": float(applied)}


def noted(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_leap_is_noted_at_each_of_its_steps_and_said_once(tmp_path):
    said, draw = [], random.Random(1)
    loss_spikes = LossSpikes(tmp_path / "spikes.jsonl", 0, said.append)
    for step in range(1, 201):
        falling = 5 - step / 400 + draw.gauss(0, 0.05)
        loss_spikes.log(step, values(falling + (3 if step in (80, 81, 150) else 0)))
    assert [line["step"] for line in noted(tmp_path / "spikes.jsonl")] == [80, 81, 150]
    assert len(said) == 2
    assert said[0].startswith("step 80: the loss rose from ")
    assert " to 7." in said[0]
    lines = noted(tmp_path / "spikes.jsonl")
    assert all(line["train/loss"] > line["bound"] and line["train/grad_norm"] == 1.5 for line in lines)


def test_too_few_losses_and_steps_left_out_tell_nothing(tmp_path):
    said = []
    loss_spikes = LossSpikes(tmp_path / "spikes.jsonl", 0, said.append)
    for step in range(LEAST):
        assert loss_spikes.bound() is None
        loss_spikes.log(step, values(1.0 + step % 2))
    loss_spikes.log(LEAST, values(float("nan"), applied=False))
    loss_spikes.log(LEAST, values(1e9, applied=False))
    loss_spikes.log(LEAST, {"valid/nll": 1e9})
    assert said == []
    assert loss_spikes.bound() == 1.5 + 8 * 1.4826 * 0.5


def test_a_loss_that_stands_still_does_not_leap_by_rounding(tmp_path):
    said = []
    loss_spikes = LossSpikes(tmp_path / "spikes.jsonl", 0, said.append)
    for step in range(60):
        loss_spikes.log(step, values(2.0 + 1e-7 * (step % 7 == 0)))
    assert said == []


def test_noise_of_small_mini_batches_does_not_leap(tmp_path):
    said, draw = [], random.Random(1)
    loss_spikes = LossSpikes(tmp_path / "spikes.jsonl", 0, said.append)
    for step in range(1, 2001):  # nearly all examples are learned, few of a mini-batch are not
        loss_spikes.log(step, values(draw.expovariate(20) + 0.01))
    assert said == []


def test_leaps_after_the_step_that_a_run_resumes_from_are_dropped(tmp_path):
    path = tmp_path / "spikes.jsonl"
    path.write_text("".join(json.dumps({"step": step}) + "\n" for step in (3, 7, 9)))
    LossSpikes(path, 7, print).finish({})
    assert [line["step"] for line in noted(path)] == [3, 7]
