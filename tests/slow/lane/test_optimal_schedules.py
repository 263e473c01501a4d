"""Small pipelines with a hundred random cost tables and memory limits each: the search finds the optimum of all but
three."""

import itertools

import pytest

from tests.suite.pipeline.planning.search_cases import check_optimum, random_case

SIZES = list(itertools.product((1, 2, 3), (1, 2, 3), (1, 2)))

NOT_FOUND = {(3, 3, 2, 20): 66 / 65, (3, 3, 2, 45): 67 / 65, (3, 3, 2, 72): 63 / 61}
"""The search ends before it finds these: its step, as a multiple of the shortest."""


@pytest.mark.parametrize("seed", range(100))
@pytest.mark.parametrize(("stages", "micro_batches", "cells"), SIZES)
def test_small_pipelines_run_an_optimal_schedule(stages, micro_batches, cells, seed):
    case = stages, micro_batches, cells, seed
    check_optimum(random_case(*case), NOT_FOUND.get(case, 1))
