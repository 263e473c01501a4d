"""How metrics.jsonl is read."""

import json

import pytest

from suite.errors import SettingError
from suite.training.metrics import read_steps


def written(path, *lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_steps_are_read_without_validations(tmp_path):
    step = {"step": 1, "train/loss": 2.0}
    assert read_steps(written(tmp_path / "metrics.jsonl", step, {"step": 1, "valid/nll": 3.0})) == [step]
    assert read_steps(tmp_path / "none.jsonl") == []


def test_a_run_of_an_older_version_is_refused_in_one_sentence(tmp_path):
    path = written(tmp_path / "metrics.jsonl", {"step": 1, "loss": 2.0, "seconds": 1.0})
    with pytest.raises(SettingError, match=r"names of an older version .*, such as loss for train/loss; read it"):
        read_steps(path)
