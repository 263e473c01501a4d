"""No schedule stops on NCCL, whichever cells skips connect; what would stop is refused."""

from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from suite.errors import SettingError
from suite.pipeline.schedule.action import Action
from suite.pipeline.schedule.config import V_SHAPED, ScheduleConfig
from suite.pipeline.schedule.csv_file import read_rows
from suite.pipeline.schedule.validate import validate
from tests.suite.pipeline.schedule.nccl_proof import launched, with_neighbours
from tests.suite.pipeline.torch_schedules import dump

CASES = [
    ("fill_drain", 1),
    ("1f1b", 1),
    *(("zero_bubble", cells) for cells in (1, 2, 3, 4)),
    *(("interleaved", cells) for cells in (2, 3, 4)),
]
ON_A_V = [(name, 2) for name in V_SHAPED]
SHAPES = ((2, 1), (2, 5), (3, 2), (4, 16), (8, 5), (16, 3))
"""K and M."""


@pytest.mark.parametrize(("name", "virtual_stages"), CASES + ON_A_V)
def test_no_generated_schedule_stops(name, virtual_stages):
    """With one cell a stage not even if every launch waits for an idle device; with several, after the warm-up."""
    after_warm_up = {"idle_waits": "first launch", "warms_up": True}
    rules = [after_warm_up, *([{"idle_waits": "every launch"}] if virtual_stages == 1 else [])]
    for stages, micro_batches in SHAPES:
        config = ScheduleConfig(name, (micro_batches % 3,), virtual_stages, transport="nccl")
        cell_to_stage = config.cell_to_stage(stages)
        for rule in rules:
            schedule = config.actions(stages, micro_batches)
            assert launched(schedule, cell_to_stage=cell_to_stage, **rule).circle() == [], (stages, rule)
        schedule = config.actions(stages, micro_batches, train=False)
        assert launched(schedule, cell_to_stage=cell_to_stage, **after_warm_up).circle() == [], stages


pairs_of_cells = st.tuples(st.integers(0, 11), st.integers(0, 11)).map(sorted).map(tuple)


@settings(max_examples=30)
@given(st.sampled_from(CASES), st.integers(2, 4), st.integers(1, 12), st.sets(pairs_of_cells, max_size=12))
def test_skips_of_any_length_stop_nothing(case, stages, micro_batches, skips):
    name, virtual_stages = case
    pairs = with_neighbours(skips, stages * virtual_stages)
    schedule = ScheduleConfig(name, (1,), virtual_stages).build(stages, micro_batches)
    assert launched(schedule, None, pairs, idle_waits="first launch", warms_up=True).circle() == []


@pytest.mark.parametrize(("name", "virtual_stages"), CASES)
def test_on_gloo_skips_between_all_cells_find_room(name, virtual_stages):
    for stages, micro_batches in ((2, 1), (3, 7), *([(9, 18)] if virtual_stages == 2 else [])):
        pairs = tuple(combinations(range(stages * virtual_stages), 2))
        config = ScheduleConfig(name, (1,), virtual_stages, pairs=pairs)
        schedule = config.actions(stages, micro_batches)
        assert launched(schedule, config.flow_control(stages), pairs).circle() == []


@pytest.mark.parametrize("name", ["Interleaved1F1B", "InterleavedZeroBubble"])
def test_schedules_of_torch_from_a_file_do_not_stop(name, tmp_path):
    rows = read_rows(dump(name, tmp_path / "torch.csv", 4, 8))
    assert ScheduleConfig("csv", (1,), 2, rows, "nccl").actions(4, 8)


def test_a_replica_without_micro_batches_has_nothing_to_run():
    """Its empty schedule looks like one cell a stage, yet the pairs, which hold for all replicas, name four cells."""
    assert validate([[], []], 0, pairs=((0, 1), (1, 2), (2, 3))) == [[], []]


STOPS_WITH_A_SKIP = tuple(
    " ".join(f"{k}{kind}{i}" for begin, end in pairwise(edges) for kind in "FB" for i in range(begin, end))
    for k, edges in enumerate(((0, 13), (0, 9, 13), (0, 6, 9, 13)))
)
"""Stage 2 sends stage 0 six gradients of a skip before stage 0 takes one; five may be in flight."""


def test_a_schedule_that_stops_with_a_skip_alone_is_refused_with_it_alone():
    config = ScheduleConfig("csv", rows=STOPS_WITH_A_SKIP, transport="nccl")
    assert config.actions(3, 13)
    with pytest.raises(SettingError, match="deadlocks: stage 0 at"):
        replace(config, pairs=((0, 1), (0, 2), (1, 2))).actions(3, 13)


SECOND_RECEIVE_TOO_LATE = (
    "0F1 0F0 0F5 1F1 0F4 0F2 0F6 1F0 1F5 1F4 0F3 1F2 1F6 1F3 1B0 0I0 0W0 1I1 1W1 0I1 0W1 1I2 1I3 0B2 0B3 1W2 1W3 1B4 "
    "0I4 0W4 1B5 0I5 0W5 1I6 0I6 0W6 1W6",
    "2F1 3F1 2F0 2F5 2F4 2F2 2F6 2F3 3F0 3F5 3I0 3I1 2I0 3F4 3W0 3F2 3B2 3F6 3W1 3F3 3I3 3I4 3I5 2W0 3I6 3W3 2I1 2W1 "
    "3W4 2I2 2I3 3W5 2W2 2I4 3W6 2I5 2I6 2W3 2W4 2W5 2W6",
)
"""Cell 1 posts the receive of cell 3's gradient when cell 2's has arrived; cell 3 sends too many before."""


def test_a_cell_posts_the_receive_of_a_second_message_when_the_first_has_arrived():
    config = ScheduleConfig("csv", (99,), 2, SECOND_RECEIVE_TOO_LATE, "nccl")
    assert config.actions(2, 7)
    with pytest.raises(SettingError, match="deadlocks: stage 0 at"):
        replace(config, pairs=((1, 2), (1, 3))).actions(2, 7)


def test_metadata_counts_among_the_messages_in_flight():
    """Stage 1 runs four forwards of cell 1 before stage 0 comes to cell 2: the fifth message in flight is the last."""

    def check(micro_batches):
        actions = [Action("F", i, virtual_stage) for virtual_stage in (0, 1) for i in range(micro_batches)]
        validate([actions] * 2, micro_batches, train=False)

    check(10)
    with pytest.raises(SettingError, match=r"deadlocks: stage 0 at F0\.1, stage 1 at F4 wait"):
        check(11)


def test_a_cell_receives_nothing_before_the_cell_before_it_has_begun():
    """Cell 2 waits for the metadata of cell 1, begun on stage 0 when six messages of a skip from cell 0 are sent."""

    def schedule(micro_batches):
        cells = [[f"{cell}F{i}" for i in range(micro_batches)] for cell in range(4)]
        back = [[f"{cell}B{i}" for i in range(micro_batches)] for cell in range(4)]
        rows = (" ".join(cells[0] + cells[1] + back[1] + back[0]), " ".join(cells[2] + cells[3] + back[3] + back[2]))
        return ScheduleConfig("csv", (99,), 2, rows, pairs=((0, 2), (1, 2)))

    assert schedule(5).actions(2, 5)
    with pytest.raises(SettingError, match=r"deadlocks: stage 0 at F0\.1, stage 1 at F0 wait"):
        schedule(6).actions(2, 6)
