"""A run that validates often and stops early, killed at ten random moments: the same best checkpoint, the same bits."""

import json
import random

from tests.slow.trial import assert_same
from tests.suite.training.checkpoint.saves import layer_files

# 120 pairs: it overfits after step 27
SETTINGS = (
    "train.steps=48 train.checkpoint_every=7 train.validate_every=3 train.patience=2 train.max_restarts=20 "
    "optimizer.learning_rate=0.05 optimizer.warmup_steps=4 optimizer.lr_decay=inverse_sqrt model.residual_scale=none "
    "text.languages=de text.train_pairs=de:120"
)


def test_ten_kills_change_neither_the_best_checkpoint_nor_a_bit(trials, monkeypatch):
    undisturbed = trials.train(monkeypatch, SETTINGS)
    assert undisturbed.error is None, undisturbed.said
    record = json.loads(undisturbed.run.record.read_text())
    end, best = record["steps"], record["best_step"]
    assert best < end < 48
    assert record["stopped_early"]
    saved = {line["step"] for line in undisturbed.validations if line["step"] <= best}  # each was an improvement
    rng = random.Random(8)
    faults = [
        {"fault": "kill", "attempt": attempt, "stage": rng.randrange(3), "step": step - 1, **_moment(step, saved, rng)}
        for attempt, step in enumerate(sorted(rng.sample(range(2, end + 1), 10)), 1)
    ]
    assert {"validate", "save"} <= {fault["action"] for fault in faults}
    killed = trials.train(monkeypatch, SETTINGS, faults)
    assert killed.error is None, killed.said
    assert len(killed.ends) == 11, killed.ends
    other = json.loads(killed.run.record.read_text())
    for name in ("steps", "best_step", "best_valid_nll", "stopped_early", "valid_nll"):
        assert other[name] == record[name], name
    assert_same(killed, undisturbed)
    for trial in (undisturbed, killed):
        marked = max(trial.run.checkpoints.glob("*/best"))
        assert int(marked.parent.name) == best
    first, second = (layer_files(trial.run.checkpoints / f"{best:08d}") for trial in (undisturbed, killed))
    assert first.keys() == second.keys()
    assert all(path.read_bytes() == second[name].read_bytes() for name, path in first.items())


def _moment(step, saved, rng):
    """Returns an action of a step, which is counted from 1."""
    often = ["validate", "validate", *(["save", "save"] if step in saved else [])] if step % 3 == 0 else []
    return {"action": rng.choice(["F1", "B0", "update", *often])}
