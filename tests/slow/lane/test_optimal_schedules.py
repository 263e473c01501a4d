"""Small pipelines with a hundred random cost tables and memory limits each: the search finds the optimum.

Two cells a stage with more than four micro-batches in all stages together would take hours."""

import itertools

import pytest

from tests.suite.pipeline.planning.search_cases import check_optimum, random_case


@pytest.mark.parametrize("seed", range(100))
@pytest.mark.parametrize(
    ("stages", "micro_batches", "cells"),
    [
        (stages, micro_batches, cells)
        for stages, micro_batches, cells in itertools.product((1, 2, 3), (1, 2, 3), (1, 2))
        if cells == 1 or (stages > 1 and stages * micro_batches <= 4)
    ],
)
def test_small_pipelines_run_an_optimal_schedule(stages, micro_batches, cells, seed):
    check_optimum(random_case(stages, micro_batches, cells, seed), seconds=60.0)
