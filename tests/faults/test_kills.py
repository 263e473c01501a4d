"""SIGKILL of every stage at every action of a step: the run goes on by itself, to the undisturbed run's last bit."""

import re
import statistics
from pathlib import Path

import pytest

from experiments.table import Table
from suite.pipeline.recipe import Recipe
from tests.faults.trial import assert_same

SETTINGS = "train.steps=6 train.checkpoint_every=2"
STEP = 3
ACTIONS = [[str(action) for action in row] + ["update", "save"] for row in Recipe().actions(3, 4)]
CASES = [(stage, action) for stage, row in enumerate(ACTIONS) for action in row]

seconds = {}
"""From the blow to the first step after it, by (stage, action)."""


@pytest.fixture(scope="module")
def undisturbed(trials):
    with pytest.MonkeyPatch.context() as patch:
        return trials.train(patch, SETTINGS)


def struck_at(trial, stage):
    """Returns the time of day at which the fault fell, from the worker's log."""
    return float(re.search(r"fault \w+ at .*, ([\d.]+)$", trial.run.log(0, stage).read_text(), re.MULTILINE)[1])


@pytest.mark.parametrize(("stage", "action"), CASES)
def test_a_kill_costs_no_bit(trials, undisturbed, monkeypatch, stage, action):
    fault = {"fault": "kill", "stage": stage, "step": STEP, "action": action}
    trial = trials.train(monkeypatch, SETTINGS, [fault])
    assert trial.error is None, trial.said
    first, last = trial.ends
    assert (first["kind"], first["stage"], first["step"], first["action"]) == ("death", stage, STEP, action)
    assert last["outcome"] == "done"
    assert [line["start"] for line in trial.ends] == trial.published
    assert last["start"] in ((0, 2, 4) if action == "save" else (0, 2))  # one is written while the next steps are done
    assert_same(trial, undisturbed)
    noticed = first["ended"] - struck_at(trial, stage)
    seconds[stage, action] = noticed + trial.recovered[0]
    assert seconds[stage, action] < 60


def test_how_long_recovery_took():
    assert len(seconds) == len(CASES)
    found = sorted(seconds.values())
    row = (len(seconds), len(found), round(statistics.median(found), 1), round(found[-1], 1))
    table = Table(
        "recovery", "SIGKILL of each stage at each action, K = 3, M = 4",
        ("kills", "recovered with the same bits", "seconds to the next step, median", "worst"), [row],
        ["from the blow to the end of the first step after it; two cores, plain processes"],
    )  # fmt: skip
    print(table.markdown())
    table.write(Path(".cache/faults"))
