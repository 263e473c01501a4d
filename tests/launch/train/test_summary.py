"""Scores in the record and in words."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest

from experiments.planning.step_parts import slower_than_planned
from launch.runs.record import perplexity
from launch.train.summary import describe_losses, describe_scores, describe_step, describe_wall_time
from suite.pipeline.schedule.timeline import Span, Timeline
from suite.training.metrics import STEP_S


def test_a_language_model_that_diverged_has_an_infinite_perplexity_and_no_error():
    assert perplexity(2.0) == pytest.approx(math.exp(2.0))
    assert perplexity(2550.4) == math.inf
    record = {
        "measure": "nll", "valid_nll": 2550.4, "baseline_nll": 5.0, "baselines": {"bigram model": 5.0},
        "bytes_per_token": 3.0,
    }  # fmt: skip
    assert describe_scores(record).startswith("validation: 2550.400 nats per token (perplexity inf, ")


def test_a_run_whose_last_step_was_skipped_has_no_last_loss():
    assert describe_losses({"loss_first": 7.25, "loss_last": None}) == "loss 7.250 -> not finite"


def test_each_metric_of_ones_own_and_the_largest_parts_of_the_time_are_told():
    record = {"measure": "accuracy", "valid_rows": 90, "valid_accuracy": 0.5, "valid_recall": 0.25}
    assert describe_scores(record) == "held-out data: accuracy 0.5000, recall 0.2500"
    parts = {"data": 0.01, "planning": 30.0, "training": 40.0}
    assert describe_wall_time(parts) == ["wall time: 1.2 minutes: planning 30.00 s, training 40.00 s"]
    assert describe_wall_time({}) == []


STEP = Timeline(
    (
        (Span("F", 0, 0.0, 1.0), Span("B", 0, 4.0, 6.0), Span("U", -1, 6.0, 6.5)),
        (Span("F", 0, 1.0, 2.0), Span("B", 0, 2.0, 4.0), Span("U", -1, 6.0, 6.5)),
    )
)


def stretched(timeline, **factors):
    """Each kind of action takes a factor longer; all spans move apart alike."""
    whole = factors.pop("whole", 1.0)
    return Timeline(
        tuple(
            tuple(
                replace(s, start=s.start * whole, end=s.start * whole + s.seconds * factors.get(s.kind, 1.0))
                for s in row
            )
            for row in timeline.rows
        )
    )


@pytest.mark.parametrize(
    ("measured", "step_s", "said"),
    [
        (STEP, 6.9, "(+6%)"),
        (stretched(STEP, F=2.0, B=2.0, whole=2.0), 13.0, "(+100%); the largest difference: forwards and backwards"),
        (stretched(STEP, whole=2.0), 12.5, "(+92%); the largest difference: messages, waiting for data, and"),
        (STEP, 8.0, "(+23%); the largest difference: work before and after a step's actions"),
        (stretched(STEP, F=0.5, B=0.5, whole=0.5), 3.5, "(-46%); the largest difference: forwards and backwards"),
    ],
)
def test_the_summary_names_the_part_that_differs_most_from_the_plan(measured, step_s, said):
    planned = SimpleNamespace(step_s=6.5, kind="simulated", plan=SimpleNamespace(timeline=STEP, cell_to_stage=()))
    (line,) = describe_step(planned, [measured], [{STEP_S: 99.0}, {STEP_S: 99.0}, {STEP_S: step_s}])
    assert said in line
    assert line.startswith(f"step: {step_s:.2f} s measured (median), 6.50 s simulated")
    differences = slower_than_planned(STEP, [measured], step_s)
    assert sum(differences.values()) == pytest.approx(step_s - 6.5)


def test_without_a_trace_nothing_is_compared_with_the_plan():
    planned = SimpleNamespace(step_s=6.5, kind="simulated", plan=SimpleNamespace(timeline=STEP, cell_to_stage=()))
    assert describe_step(planned, [], [{STEP_S: 7.0}] * 5) == []
    assert describe_step(planned, [STEP], [{STEP_S: 7.0}] * 2) == []
