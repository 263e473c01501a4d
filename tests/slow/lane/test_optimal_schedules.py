"""All small pipelines with a hundred random cost tables and memory limits each: the search finds the optimum.

With two cells a stage and three micro-batches, ten seconds are not always enough."""

import itertools

import pytest

from tests.suite.pipeline.planning.search_cases import check_optimum, random_case


@pytest.mark.parametrize("seed", range(100))
@pytest.mark.parametrize(
    ("stages", "micro_batches", "cells"),
    [size for size in itertools.product((1, 2, 3), repeat=3) if size[2] < 3],
)
def test_small_pipelines_run_an_optimal_schedule(stages, micro_batches, cells, seed):
    check_optimum(random_case(stages, micro_batches, cells, seed), seconds=60.0)
