"""Which records a worker reads: the run's, their drafts while a resume starts, or those of fewer devices."""

import json
from dataclasses import replace

import pytest

from launch.worker.attempt import Attempt, draft_of
from launch.worker.run_plan import RunPlan
from suite.errors import RunFileError


def test_drafts_come_before_the_runs_records_and_those_of_fewer_devices_before_both(tmp_path):
    attempt = Attempt(tmp_path, tmp_path / "data", 2)
    run = attempt.run
    assert attempt.input_files == (run.experiment, run.plan_json)
    draft_of(run.experiment).touch()
    draft_of(run.plan_json).touch()
    assert attempt.input_files == (tmp_path / "experiment.draft", tmp_path / "plan.draft")
    assert replace(attempt, on_fewer_devices=True).input_files == (
        tmp_path / "fewer_devices.toml",
        tmp_path / "fewer_devices.json",
    )


@pytest.mark.parametrize("text", [None, "", "[]", '{"cells": ["x"]}', json.dumps({"cells": [1]})])
def test_a_missing_or_damaged_plan_is_one_sentence(tmp_path, text):
    path = tmp_path / "plan.json"
    if text is not None:
        path.write_text(text)
    reason = "missing" if text is None else "damaged: .*"
    with pytest.raises(RunFileError, match=rf"plan\.json is {reason}; resume the run to plan it anew"):
        RunPlan.read(path)
