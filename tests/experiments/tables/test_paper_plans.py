"""The table of the paper's plans: with the paper's K, and the fastest."""

from __future__ import annotations

import pytest

from experiments.tables.paper_plans import HEADINGS, paper_plans_table
from experiments.translation.experiment import TranslationExperiment
from experiments.translation.runs import t12_400m
from suite.pipeline.planning import schedule_choice
from tests.experiments.tables.test_tables import silent


def small() -> TranslationExperiment:
    return t12_400m().with_settings(
        "model.layers=2 model.width=256 model.feed_forward=1024 model.heads=4 text.vocabulary=2000 "
        "pipeline.stages=2 train.batch_tokens=65536"
    )


@pytest.mark.slow
def test_each_run_has_the_papers_plan_or_why_it_does_not_fit_and_the_fastest_below(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(schedule_choice, "SEARCH_S", 0.1)
    table = paper_plans_table(silent, [small], ["4x16GiB", "4x0.05GiB", "2x0.001GiB"])
    rows = [dict(zip(HEADINGS, row, strict=True)) for row in table.rows]
    assert [str(row["plan"]).partition(":")[0] for row in rows] == [
        "the paper's", "fastest", "does not fit", "fastest", "does not fit", "none fits",
    ]  # fmt: skip
    assert (rows[0]["K"], rows[0]["R"], rows[0]["devices used"]) == (2, 2, 4)
    assert "GiB" in str(rows[2]["plan"])
    assert rows[2]["M"] is None
    assert rows[1]["hours, least (simulated)"] <= rows[0]["hours, least (simulated)"]
    for row in (rows[0], rows[1], rows[3]):
        assert row["K"] * row["R"] == row["devices used"] <= 4
        assert row["M"] * row["R"] * row["tokens a micro-batch"] <= row["tokens a step"]
        assert row["fullest device GiB (computed)"] <= row["limit GiB"]
        assert 0 < row["hours, least (simulated)"] < row["hours, most (simulated)"]
