"""The table of the paper's plans: a run that fits has its hours, one that does not has a plan that fits."""

from __future__ import annotations

from experiments.tables.paper_plans import HEADINGS, paper_plans_table
from experiments.translation.experiment import TranslationExperiment
from experiments.translation.runs import t12_400m
from tests.experiments.tables.test_tables import silent


def small() -> TranslationExperiment:
    return t12_400m().with_settings(
        "model.layers=2 model.width=256 model.feed_forward=1024 model.heads=4 text.vocabulary=2000 "
        "pipeline.stages=2 train.batch_tokens=65536"
    )


def test_a_run_that_fits_has_its_plan_and_one_that_does_not_has_the_suites_suggestion_below() -> None:
    table = paper_plans_table(silent, [small], ["4x16GiB", "4x0.05GiB"])
    rows = [dict(zip(HEADINGS, row, strict=True)) for row in table.rows]
    assert [str(row["fits"]).partition(":")[0] for row in rows] == ["yes", "no", "suggested"]
    assert (rows[0]["K"], rows[0]["R"], rows[0]["devices used"]) == (2, 2, 4)
    assert "GiB" in str(rows[1]["fits"])
    assert rows[1]["M"] is None
    for row in (rows[0], rows[2]):
        assert row["K"] * row["R"] == row["devices used"] <= 4
        assert row["M"] * row["R"] * row["tokens a micro-batch"] <= row["tokens a step"]
        assert row["fullest device GiB (computed)"] <= row["limit GiB"]
        assert 0 < row["hours, least (simulated)"] < row["hours, most (simulated)"]
