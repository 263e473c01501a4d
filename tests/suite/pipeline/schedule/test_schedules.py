"""Schedules as pictures, and what the validator refuses."""

import re
import time
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from suite.errors import SettingError
from suite.pipeline.schedule import schedules
from suite.pipeline.schedule.action import Action, last_grad_actions, virtual_stages_of
from suite.pipeline.schedule.config import V_SHAPED, ScheduleConfig, pipeline_errors
from suite.pipeline.schedule.remat import UNLIMITED
from suite.pipeline.schedule.validate import draw
from suite.settings import PipelineSettings
from tests.suite.pipeline.schedule_helpers import fill_drain, parse, validate


def test_fill_drain_is_the_papers_picture():
    assert fill_drain(1, 3, "always") == parse(["F0 F1 F2 R2 B2 R1 B1 R0 B0"])
    assert fill_drain(1, 3, "never") == parse(["F0 F1 F2 B2 B1 B0"])
    assert ScheduleConfig().forward_only(2, 2) == parse(["F0 F1"] * 2)


def test_the_last_actions_that_add_to_weight_gradients_are_found_for_each_cell():
    for row, last in (
        ("F0 F1 B1 B0", "B0"),
        ("F0 I0 F1 I1 W0 W1", "W1"),
        ("F0 F0.1 B0.1 B0 F1 F1.1 B1.1 B1", "B1.1 B1"),
    ):
        ((actions,), (expected,)) = parse([row]), parse([last])
        assert last_grad_actions(actions) == {*expected}


GENERATORS = {
    "fill_drain": schedules.fill_drain, "1f1b": schedules.one_forward_one_backward,
    "zero_bubble": schedules.zero_bubble, "interleaved": schedules.interleaved, **V_SHAPED,
}  # fmt: skip
ACTION = r"(?:[FRIBW]\d+(?:\.\d+)?|\.)"


def pictures(text):
    """Returns the pictures in a text, each a list of rows of actions and dots."""
    found = []
    for line in text.splitlines():
        row = re.match(rf" *stage (\d+) +({ACTION}(?: +{ACTION})*)(?: |$)", line)
        if row and set(row[2]) - {".", " "}:  # other pictures have stages too
            found += [[]] if row[1] == "0" else []
            found[-1].append(row[2].rstrip(" ."))
    return found


def drawn(name, stages, micro_batches, virtual_stages=1, graphs=UNLIMITED):
    """Returns the rows of a schedule in equal units of time, as in a picture."""
    config = ScheduleConfig(name, (graphs,), virtual_stages)
    actions, cell_to_stage = config.actions(stages, micro_batches), config.cell_to_stage(stages)
    lines = draw(validate(actions, micro_batches, cell_to_stage=cell_to_stage)).splitlines()
    return [line.removeprefix(f"stage {k}").strip().rstrip(" .") for k, line in enumerate(lines)]


def check_picture(name, rows):
    actions = [Action.parse(cell) for cell in rows[0].split() if cell != "."]
    micro_batches = len({action.micro_batch for action in actions})
    graphs = 1 if any(action.kind == "R" for action in actions) else UNLIMITED
    assert rows == drawn(name, len(rows), micro_batches, virtual_stages_of([actions]), graphs)


@pytest.mark.parametrize("name", GENERATORS)
def test_schedules_are_the_pictures_over_them(name):
    found = pictures(GENERATORS[name].__doc__)
    assert len(found) == (2 if name == "zero_bubble" else 1)
    for rows in found:
        check_picture(name, rows)


def test_one_micro_batch_at_a_time_is_the_picture_over_it():
    (rows,) = pictures(schedules.one_by_one.__doc__)
    lines = draw(validate(schedules.one_by_one(2, 2, 2, recomputes=True), 2)).splitlines()
    for row, line in zip(rows, lines, strict=True):
        assert line.split()[2:][: len(row.split())] == row.split()


def test_the_pictures_of_the_documentation_are_those_of_the_schedules():
    text = (Path(__file__).parents[4] / "docs/architecture.md").read_text()
    (rows,) = pictures(text)
    check_picture("fill_drain", rows)
    for name, *shape in (("1f1b", 3, 5), ("zero_bubble", 3, 5), ("interleaved", 2, 4, 2)):
        ((line, goes_on),) = re.findall(rf"^{name} +({ACTION}(?: +{ACTION})*)(\s+\.\.\.)?(?: |$)", text, re.MULTILINE)
        row, expected = line.split(), drawn(name, *shape)[0].split()
        assert len(row) > 8
        assert row == (expected[: len(row)] if goes_on else expected)


def test_a_name_that_no_schedule_has_is_refused():
    with pytest.raises(SettingError, match="no schedule is called 'gpipe'; use fill_drain, 1f1b"):
        ScheduleConfig("gpipe").actions(2, 3)


@given(
    st.sampled_from(list(GENERATORS)), st.integers(1, 7), st.integers(0, 17),
    st.integers(1, 3), st.sampled_from([0, 1, 2, 5, UNLIMITED]),
)  # fmt: skip
def test_every_schedule_is_valid_for_any_k_and_m(name, stages, micro_batches, virtual_stages, graphs):
    """Also where M is no multiple of K, or less."""
    virtual_stages = max(2, virtual_stages) if name == "interleaved" else virtual_stages
    virtual_stages = 2 if name in V_SHAPED else virtual_stages
    if name in ("interleaved", *V_SHAPED) or (name == "zero_bubble" and virtual_stages > 1):
        stages = max(2, stages)
    elif name != "zero_bubble":
        virtual_stages = 1
    schedule_config = ScheduleConfig(name, (graphs,), virtual_stages)
    for k, actions in enumerate(schedule_config.actions(stages, micro_batches)):
        counts = {kind: sum(a.kind == kind for a in actions) for kind in "FRIBW"}
        split = name in ("zero_bubble", *V_SHAPED)
        assert counts["F"] == counts["I" if split else "B"] == micro_batches * virtual_stages
        assert counts["B" if split else "I"] == 0
        assert counts["W"] == (counts["F"] if split else 0)
        ahead = 2 * (stages - 1) + (virtual_stages - 1) * stages + 1
        if name not in ("fill_drain", *V_SHAPED):
            assert most_ahead(actions, "IB") <= (stages - k if virtual_stages == 1 else ahead - 2 * k)
        if name == "zero_bubble":
            assert most_ahead(actions, "W") <= (stages if virtual_stages == 1 else ahead)
    schedule_config.actions(stages, micro_batches, train=False)


def most_ahead(actions, of):
    """Returns how many forwards run ahead of other kinds at most."""
    ahead = most = 0
    for action in actions:
        ahead += (action.kind == "F") - (action.kind in of)
        most = max(most, ahead)
    return most


@pytest.mark.parametrize(
    ("name", "virtual_stages", "kinds", "fill"),
    [("zero_bubble", 1, 3, 1), ("zero_bubble", 2, 3, 1), ("zero_bubble", 3, 3, 1), ("interleaved", 2, 2, 2)],
)
@pytest.mark.parametrize("stages", [2, 3, 8])
def test_no_stage_waits_beyond_what_fills_the_pipeline(name, virtual_stages, kinds, fill, stages):
    """In equal units: F, I and W, or F and B, of all cells. Before them pass K - 1 forwards of a cell; where backwards
    are whole, as many of them pass after all others."""
    for micro_batches in (2 * stages, *([2 * stages - 1, 2 * stages + 20] if virtual_stages == 1 else [])):
        schedule = ScheduleConfig(name, (UNLIMITED,), virtual_stages).actions(stages, micro_batches)
        length = kinds * micro_batches * virtual_stages + fill * (stages - 1)
        assert len(validate(schedule, micro_batches)[0]) == length


@pytest.mark.slow
@pytest.mark.parametrize("stages", [14, 16, 24, 48, 64])
@pytest.mark.parametrize("name", ["interleaved", "zero_bubble"])
def test_stages_of_several_cells_do_not_deadlock_where_there_are_many(stages, name):
    for micro_batches in (stages + 1, 3 * stages // 2, 2 * stages):
        for virtual_stages in (2, 3):
            rows = ScheduleConfig(name, (1,), virtual_stages).actions(
                stages, micro_batches
            )  # played before it is given out
            for row in rows:
                assert sum(action.kind == "F" for action in row) == virtual_stages * micro_batches
            assert len(rows) == stages


def fits(pipeline, layers):
    """Whether each cell can have a layer, and a stage as many cells as its schedule has."""
    several = {"interleaved": pipeline.virtual_stages > 1, "zero_bubble": True}
    several |= dict.fromkeys(V_SHAPED, pipeline.virtual_stages == 2)
    is_possible = pipeline.virtual_stages == 1 or 1 < pipeline.stages <= layers // pipeline.virtual_stages
    return is_possible and several.get(pipeline.schedule, pipeline.virtual_stages == 1)


@given(st.sampled_from(list(GENERATORS)), st.integers(1, 5), st.integers(1, 6), st.integers(1, 24))
def test_a_schedule_that_does_not_fit_is_refused_with_the_nearest_that_does(name, stages, virtual_stages, layers):
    assume(stages <= layers)
    asked = PipelineSettings(schedule=name, stages=stages, virtual_stages=virtual_stages)
    faults = pipeline_errors(asked, layers)
    assert len(faults) == (not fits(asked, layers))
    for fault in faults:
        remedy = fault.partition("; use ")[2].partition(" or ")[0].replace("pipeline.", "")
        better = PipelineSettings(**asked.model_dump() | dict(one.split("=") for one in remedy.split()))
        fitting = [cells for cells in range(1, 7) if fits(asked.model_copy(update={"virtual_stages": cells}), layers)]
        assert fits(better, layers)
        assert better.schedule == (name if fitting else "1f1b")
        assert not fitting or better.virtual_stages == max([n for n in fitting if n < virtual_stages], default=2)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["F0 B0", "F0"], "stage 1 never runs B0"),
        (["F0 B0 W0"], "stage 0 never runs I0"),
        (["F0 W0 I0"], "out of order"),
        (["F0 F0 B0"], "stage 0 runs F0 more than once"),
        (["F0 B0 F2 B2"], "runs F2, but there are 1"),
        (["B0 F0"], "out of order: it must be F0, then R0"),
        (["F0 F1 B0 B1", "F1 F0 B0 B1"], r"disagree on the order of activations: \[0, 1\] against \[1, 0\]"),
        (["F0 F1 B0 B1", "F0 F1 B1 B0"], "disagree on the order of gradients"),
        (["F0 B0 F1 B1", "F0 F1 B0 B1"], r"deadlocks: stage 0 at B0, stage 1 at F1 wait for each other\nstage 0   F0"),
    ],
)
def test_faulty_schedules_are_refused_with_stage_and_action(lines, message):
    micro_batches = 2 if any("1" in line for line in lines) else 1
    with pytest.raises(SettingError, match=message):
        validate(parse(lines), micro_batches)


def test_the_picture_of_a_big_deadlock_is_cut_to_where_it_happens():
    stages, micro_batches = 40, 60
    schedule = [[Action(kind, i) for kind in "FB" for i in range(micro_batches)] for _ in range(stages)]
    schedule[24].remove(Action("B", 0))
    schedule[24].insert(micro_batches - 1, Action("B", 0))  # before the forward that stage 25 needs to send it
    with pytest.raises(SettingError) as caught:
        validate(schedule, micro_batches)
    first, *rows = str(caught.value).splitlines()
    assert "stage 24 at B0, stage 25 at F59" in first
    assert first.endswith("and 24 other stages wait for each other; "
                          "shown are stages 17 to 32 of 40 and their last 40 units of time")  # fmt: skip
    assert [row.split()[1] for row in rows] == [str(k) for k in range(17, 33)]
    assert {len(row.split()) for row in rows} == {2 + 40}
    assert len(str(caught.value)) < 5_000


@pytest.mark.slow
@pytest.mark.parametrize("one_at_a_time", [False, True])
def test_validating_a_schedule_takes_as_long_as_it_has_actions(one_at_a_time):
    def took(micro_batches):
        schedule = fill_drain(128, micro_batches, "always")
        if one_at_a_time:
            schedule = [[Action(kind, i) for i in range(micro_batches) for kind in "FRB"] for _ in range(128)]
        start = time.process_time()
        validate(schedule, micro_batches)
        return time.process_time() - start

    assert took(512) < 10 * min(took(128) for _ in range(3))  # four times the actions; sixteen times their square


@pytest.mark.parametrize("text", ["", "F", "X3", "F-1", "F3 ", "f3", "F3.", "F3.0", "F3.-1"])
def test_what_is_no_action_is_refused(text):
    with pytest.raises(SettingError, match="no action"):
        Action.parse(text)
