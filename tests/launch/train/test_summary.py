"""Scores in the record and in words."""

import math

import pytest

from launch.runs.record import perplexity
from launch.train.summary import describe_losses, describe_scores


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
