"""Schedules on a V of cells: no longer than the papers' and torch's, in no more memory, and valid."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from suite.pipeline.planning.simulate import CellCost, simulate
from suite.pipeline.schedule import v_schedules
from suite.pipeline.schedule.config import V_SHAPED, ScheduleConfig
from suite.pipeline.schedule.csv_file import read_rows
from suite.pipeline.schedule.remat import UNLIMITED
from tests.suite.pipeline.schedule.test_schedules import most_ahead
from tests.suite.pipeline.torch_schedules import dump

PERIOD = 6
"""F, I and W of a micro-batch in both cells of a stage, a unit of time each."""


def published_memory(name, stages):
    """Returns the paper's peak of a stage, in micro-batches of a whole stage (2405.15362)."""
    return {"zbv": stages, "v_half": (stages + 2) // 2, "v_min": (stages + 4) // 3}[name]


def published_idle(name, stages):
    """Returns the paper's idle time in units of a cell's action, for large M (2405.15362)."""
    return {"zbv": 0, "v_half": 3 * stages, "v_min": 4 * stages}[name]


def spans(schedule_config, stages, micro_batches):
    """Returns the spans of each stage where F, I and W of a cell take a unit of time each, and B two; cells of a stage
    with one cell are twice as large."""
    schedule = schedule_config.actions(stages, micro_batches)
    unit = 2 / schedule_config.virtual_stages
    costs = [CellCost(unit, unit, 2 * unit, weight_grad_s=unit)] * (stages * schedule_config.virtual_stages)
    flow, cell_to_stage = schedule_config.flow_control(stages), schedule_config.cell_to_stage(stages)
    return simulate(schedule, costs, flow=flow, cell_to_stage=cell_to_stage).rows


def idle(rows):
    """Returns how many units of time a stage is idle in a step: all have the same work."""
    return int(max(row[-1].end for row in rows) - sum(span.end - span.start for span in rows[0]))


def most_held(rows):
    """Returns the most micro-batches that a stage's cells hold together, each from its F to its W or B."""
    return max(most_ahead(actions, "WB") for actions in rows)


def unlimited(name):
    return ScheduleConfig(name, (UNLIMITED,), 2)


@pytest.mark.parametrize("name", V_SHAPED)
@settings(max_examples=12)
@given(stages=st.integers(2, 8), micro_batches=st.integers(1, 20))
def test_none_is_idle_longer_or_holds_more_than_in_the_papers(name, stages, micro_batches):
    """Nor less: the last stage to begin, K - 1, begins after K - 1 forwards."""
    rows = spans(unlimited(name), stages, micro_batches)
    assert most_held(rows) <= 2 * published_memory(name, stages)
    if micro_batches >= 2 * stages - 1:
        assert stages - 1 <= idle(rows) <= max(published_idle(name, stages), stages - 1)


BLOCKS = {"v_half": v_schedules._v_half_block, "v_min": v_schedules._v_min_block}


@pytest.mark.parametrize("name", V_SHAPED)
@pytest.mark.parametrize("stages", [2, 5])
def test_more_micro_batches_do_not_add_idle_time(name, stages):
    """No stage waits between the first micro-batches and the last."""
    assert len({idle(spans(unlimited(name), stages, count * stages)) for count in (2, 4)}) == 1


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_repeat_without_conflict_in_the_papers_memory(name):
    for stages in range(2, 65):
        block = BLOCKS[name](stages)
        way = [cells[0] for cells in block] + [cells[1] for cells in reversed(block)]
        times = [cell["F"] for cell in way] + [cell["I"] for cell in reversed(way)]
        assert times == sorted(set(times)), "an action is not later than what it waits for"
        for cells in block:
            assert {unit % PERIOD for cell in cells for unit in cell.values()} == set(range(PERIOD))
            assert all(cell["I"] < cell["W"] for cell in cells)
        limits = v_schedules._held(block)
        assert limits.in_stage == 2 * published_memory(name, stages)
        assert max(map(max, limits.in_cells)) < limits.in_stage, "a full cell shuts the other one out"


def test_the_block_is_its_picture():
    rows = re.findall(r"stage \d   (.*?)(?:  +K = 2.*)?\n", v_schedules._building_block.__doc__)
    for cells, row in zip(v_schedules._building_block(2, 1, 1, 1), rows, strict=True):
        drawn = {action: unit for unit, action in enumerate(row.split()) if action != "."}
        assert drawn == {
            kind + virtual_stage: unit
            for virtual_stage, cell in zip(("", ".1"), cells, strict=True)
            for kind, unit in cell.items()
        }


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 2), (3, 10), (4, 7), (8, 16)])
def test_zbv_is_never_behind_torchs(stages, micro_batches, tmp_path):
    rows = read_rows(dump("ZBVZeroBubble", tmp_path / "zbv.csv", stages, micro_batches))
    torchs = spans(ScheduleConfig("csv", (UNLIMITED,), 2, rows), stages, micro_batches)
    own = spans(unlimited("zbv"), stages, micro_batches)
    assert idle(own) <= idle(torchs)
    assert most_held(own) <= most_held(torchs)
