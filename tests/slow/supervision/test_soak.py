"""Two thousand steps with a fault every fifty: nothing hangs, no bit is wrong, the driver neither grows nor leaks."""

import gc
import os
import random
import time
from pathlib import Path

from tests.slow.trial import assert_same

STEPS, EVERY = 2000, 50
SETTINGS = (
    f"train.steps={STEPS} train.checkpoint_every=25 train.batch_tokens=60 pipeline.stages=2 pipeline.micro_batches=2"
)
ACTIONS = ("F0", "F1", "B1", "B0", "update")


def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def files():
    """Returns the open files; the watch of an attempt reads small ones now and then, which are no leak."""
    counts = []
    for _ in range(5):
        counts.append(len(os.listdir("/proc/self/fd")))
        time.sleep(0.01)
    return min(counts)


def test_two_thousand_steps_with_a_fault_every_fifty(trials, monkeypatch):
    undisturbed = trials.train(monkeypatch, SETTINGS)
    assert undisturbed.error is None
    chance = random.Random(0)
    plan = [
        {
            "fault": "stop" if at % 10 == 9 else chance.choice(["kill", "exit", "raise"]), "attempt": at + 1,
            "stage": chance.randrange(2), "step": EVERY * (at + 1) - 1 - chance.randrange(20),
            "action": chance.choice(ACTIONS),
        }
        for at in range(STEPS // EVERY)
    ]  # fmt: skip
    seen = []
    trial = trials.train(monkeypatch, SETTINGS, plan, each=lambda: seen.append((gc.collect(), resident(), files())))
    assert trial.error is None, trial.said
    assert len(trial.ends) == STEPS // EVERY + 1
    assert [line["outcome"] for line in trial.ends] == ["failed"] * (STEPS // EVERY) + ["done"]
    assert_same(trial, undisturbed)
    memory, open_files = [one[1] for one in seen], [one[2] for one in seen]
    settled = 5  # attempts after which whatever is imported is imported
    growth = memory[-1] / memory[settled] - 1
    counts = open_files[settled:]
    print(f"{len(seen)} attempts: the driver's memory grew by {growth:.2%}, open files {min(counts)}-{max(counts)}")
    print(f"recovery: {sorted(trial.recovered)[len(trial.recovered) // 2]:.1f} s in the median")
    assert growth < 0.02
    assert max(counts) == min(counts)
