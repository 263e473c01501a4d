"""Every setting has a description, and its printed value can be typed again."""

import pytest

from experiments.base.setting_rows import Setting, describe_settings, values
from experiments.registry import TASKS, experiments
from experiments.translation.score_settings import ScoreRecord

RECORDS = (*TASKS.values(), ScoreRecord)


@pytest.mark.parametrize("record", RECORDS)
def test_every_setting_has_a_description_of_sentences(record):
    for row in describe_settings(record):
        assert row.description.endswith("."), row
        assert 8 < len(row.description) < 200, row
        assert "\n" not in row.description


def test_type_default_bounds_and_unit_come_from_the_field():
    rows = {row.name: row for record in RECORDS for row in describe_settings(record)}
    assert rows["train.steps"] == Setting("train.steps", "integer, 1 or more", "100", "steps", "Length of the run.")
    assert rows["optimizer.lr_decay_factor"].type == "number, above 0, 1 or less"
    assert rows["train.layer_stats_every"][1:4] == ("integer, 1 or more, or none", "none", "steps")
    assert rows["train.device_timeout_s"].unit == "seconds"
    assert rows["model.blocks_per_stack"].default == "required"
    assert rows["trace"][1:3] == ("true or false", "false")
    assert rows["score.max_pairs"].unit == "pairs"


def test_the_fields_of_a_dataclass_are_described_by_their_docstrings():
    row = {row.name: row for row in describe_settings(TASKS["translation"])}["model.vocabulary"]
    assert row == ("model.vocabulary", "integer, 1 to 1000000", "required", "tokens", "Follows text.vocabulary.")


@pytest.mark.parametrize("name", experiments())
def test_printed_values_set_the_same_experiment(name):
    experiment = experiments()[name]()
    assert experiment.with_settings(f"{path}={value}" for path, value in values(experiment).items()) == experiment
