"""The least step of the smallest pipelines, by trying all lists of actions, against the dynamic program."""

from dataclasses import replace
from itertools import product

import pytest

from suite.errors import SettingError
from suite.pipeline.planning.simulate import simulate
from suite.pipeline.planning.stage_bytes import peak_bytes
from suite.pipeline.schedule.action import Action
from suite.pipeline.schedule.flow_control import GLOO
from tests.suite.pipeline.planning.exhaustive import least_step_s
from tests.suite.pipeline.planning.search_cases import random_case


def all_lists(cells, micro_batches):
    """Yields the lists of actions of a stage: each cell takes its micro-batches in order."""

    def continued(actions, of_cells):
        if all(done == (micro_batches, micro_batches, ()) for done in of_cells):
            yield actions
        for cell, (forwards, backwards, deferred) in enumerate(of_cells):
            nexts = [("F", forwards, (forwards + 1, backwards, deferred))] if forwards < micro_batches else []
            if backwards < forwards:
                for kind, left in (("B", deferred), ("I", (*deferred, backwards))):
                    nexts.append((kind, backwards, (forwards, backwards + 1, left)))
            if deferred:
                nexts.append(("W", deferred[0], (forwards, backwards, deferred[1:])))
            for kind, i, after in nexts:
                rest = (*of_cells[:cell], after, *of_cells[cell + 1 :])
                yield from continued([*actions, Action(kind, i, cell)], rest)

    yield from continued([], ((0, 0, ()),) * cells)


def with_recomputes(actions):
    """Returns the list without recomputes, and with one anywhere between some forwards and their backwards."""
    lists = [actions]
    for forward in [action for action in actions if action.kind == "F"]:
        recompute = replace(forward, kind="R")
        for one in list(lists):
            begin = one.index(forward) + 1
            backward = [replace(forward, kind=kind) for kind in "BI"]
            end = next(at for at, each in enumerate(one) if each in backward)
            lists += [[*one[:place], recompute, *one[place:]] for place in range(begin, end + 1)]
    return lists


def least_by_trying_all(case, cells):
    """Returns the least step time of all schedules that run and fit the memory."""
    least, stages = float("inf"), []
    for own in case.stage_bytes:
        fitting = []
        for actions in all_lists(cells, case.micro_batches):
            for one in with_recomputes(actions):
                fitting += [one] if peak_bytes(one, own, GLOO) <= case.limit_bytes else []
        stages.append(fitting)
    for schedule in product(*stages):
        try:
            least = min(least, simulate(schedule, case.costs, cell_to_stage=case.cell_to_stage).seconds)
        except SettingError:
            continue
    return least


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("stages", "micro_batches", "cells"), [(1, 1, 1), (1, 2, 1), (2, 1, 1), (1, 1, 2)])
def test_the_dynamic_program_finds_the_least_step_of_all_lists(stages, micro_batches, cells, seed):
    case = random_case(stages, micro_batches, cells, seed)
    assert least_step_s(case, float("inf")) == least_by_trying_all(case, cells)
