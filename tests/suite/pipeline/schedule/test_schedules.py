"""Schedules as pictures, and what the validator refuses."""

import re
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from suite.errors import SettingError
from suite.pipeline.schedule import remat, schedules
from suite.pipeline.schedule.action import Action, last_grad_actions, virtual_stages_of
from suite.pipeline.schedule.config import V_SHAPED, ScheduleConfig, pipeline_errors
from suite.pipeline.schedule.remat import UNLIMITED
from suite.pipeline.schedule.schedules import fill_drain as bare_fill_drain
from suite.pipeline.schedule.validate import draw
from suite.settings import PipelineSettings
from tests.suite.pipeline.schedule_helpers import fill_drain, validate


def parse(lines):
    return [[Action.parse(cell) for cell in line.split()] for line in lines]


def test_fill_drain_is_the_papers_picture():
    assert bare_fill_drain(2, 2) == parse(["F0 F1 B1 B0"] * 2)
    assert fill_drain(2, 3, "except_last") == parse(["F0 F1 F2 B2 R1 B1 R0 B0"] * 2)
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


def test_with_equal_costs_a_stage_recomputes_before_its_gradient_arrives():
    timeline = validate(fill_drain(3, 4, "except_last"), 4)
    assert draw(timeline).splitlines() == [
        "stage 0   F0 F1 F2 F3 .  .  .  .  B3 R2 B2 R1 B1 R0 B0",
        "stage 1   .  F0 F1 F2 F3 .  .  B3 R2 B2 R1 B1 R0 B0 . ",
        "stage 2   .  .  F0 F1 F2 F3 B3 R2 B2 R1 B1 R0 B0 .  . ",
    ]


GENERATORS = {
    "fill_drain": schedules.fill_drain, "1f1b": schedules.one_forward_one_backward,
    "zero_bubble": schedules.zero_bubble, "interleaved": schedules.interleaved, **V_SHAPED,
}  # fmt: skip
ACTION = r"(?:[FRIBW]\d+(?:\.\d+)?|\.)"


def pictures(text):
    """Returns the pictures in a text, each a list of rows of actions and dots."""
    found, before = [], None
    for at, line in enumerate(text.splitlines()):
        row = re.match(rf" *stage (\d+) +({ACTION}(?: +{ACTION})*)(?: |$)", line)
        if row is None or set(row[2]) <= {".", " "}:  # other pictures have stages too
            continue
        if row[1] == "0":
            found.append([])
        assert row[1] == "0" or before == at - 1, line
        found[-1].append(row[2])
        before = at
    return found


def played(name, stages, micro_batches, virtual_stages, graphs):
    """Returns the rows of a schedule in equal units of time."""
    schedule_config = ScheduleConfig(name, (graphs,), virtual_stages)
    actions, cell_to_stage = schedule_config.actions(stages, micro_batches), schedule_config.cell_to_stage(stages)
    return [
        line[len("stage 0   ") :]
        for line in draw(validate(actions, micro_batches, cell_to_stage=cell_to_stage)).splitlines()
    ]


def without_end(row):
    """Returns a row without the dots behind its last action."""
    return row.rstrip(" .")


def check_picture(name, rows):
    actions = [Action.parse(cell) for cell in rows[0].split() if cell != "."]
    micro_batches = len({action.micro_batch for action in actions})
    virtual_stages, graphs = (
        virtual_stages_of([actions]),
        1 if any(action.kind == "R" for action in actions) else UNLIMITED,
    )
    expected = played(name, len(rows), micro_batches, virtual_stages, graphs)
    assert list(map(without_end, rows)) == list(map(without_end, expected))


@pytest.mark.parametrize("name", GENERATORS)
def test_schedules_are_the_pictures_over_them(name):
    found = pictures(GENERATORS[name].__doc__)
    assert len(found) == (2 if name == "zero_bubble" else 1)
    for rows in found:
        check_picture(name, rows)


def test_one_micro_batch_at_a_time_is_the_picture_over_it():
    (rows,) = pictures(schedules.one_by_one.__doc__)
    drawn = draw(validate(schedules.one_by_one(2, 2, 2, recomputes=True), 2)).splitlines()
    for row, line in zip(rows, drawn, strict=True):
        assert line.split()[2:][: len(row.split())] == row.split()


def test_the_pictures_of_the_documentation_are_those_of_the_schedules():
    text = (Path(__file__).parents[4] / "docs/architecture.md").read_text()
    (rows,) = pictures(text)
    check_picture("fill_drain", rows)
    for name, stages, micro_batches, virtual_stages in (
        ("1f1b", 3, 5, 1),
        ("zero_bubble", 3, 5, 1),
        ("interleaved", 2, 4, 2),
    ):
        (line,) = re.findall(rf"^{name} +({ACTION}(?: +{ACTION})*)(\s+\.\.\.)?(?: |$)", text, re.MULTILINE)
        row, whole = line[0].split(), not line[1]
        expected = played(name, stages, micro_batches, virtual_stages, UNLIMITED)[0].split()
        assert len(row) > 8
        assert row == (expected[: len(row)] if not whole else without_end(" ".join(expected)).split())


def test_recomputation_is_as_in_the_picture_of_remat():
    heads, rows = (line.split("   ") for line in remat.__doc__.splitlines()[2:4])
    settings, rows_of_actions = ([part.strip() for part in parts if part.strip()] for parts in (heads[1:], rows[1:]))
    assert [setting.split()[0] for setting in settings][-4:] == ["0", "1", "2", "M"]
    for graphs, row in zip((0, 1, 2, 4), rows_of_actions[-4:], strict=True):
        (actions,) = ScheduleConfig("fill_drain", (graphs,)).actions(1, 4)
        assert " ".join(map(str, actions[4:])).startswith(row.removesuffix("..").strip())


def test_a_name_that_no_schedule_has_is_refused():
    with pytest.raises(SettingError, match="no schedule is called 'gpipe'; use fill_drain, 1f1b"):
        ScheduleConfig("gpipe").actions(2, 3)
    with pytest.raises(SettingError, match="no schedule is called 'auto'"):
        ScheduleConfig("auto").actions(2, 3)


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


@pytest.mark.parametrize("stages", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("more", [0, 1, 2, 7, 20])
def test_zero_bubble_is_as_short_as_can_be(stages, more):
    """In equal units the last stage begins after K - 1 forwards and never stops."""
    micro_batches = 2 * stages - 1 + more
    timeline = validate(ScheduleConfig("zero_bubble", (UNLIMITED,)).actions(stages, micro_batches), micro_batches)
    assert len(timeline[0]) == 3 * micro_batches + stages - 1


@pytest.mark.parametrize("stages", [2, 3, 4, 8])
def test_interleaving_shortens_what_fills_and_drains(stages):
    """A stage's forward takes two units here, a cell's one: (M V + K - 1) (F + B), not (M + K - 1) V (F + B)."""
    micro_batches = 2 * stages
    timeline = validate(ScheduleConfig("interleaved", (UNLIMITED,), 2).actions(stages, micro_batches), micro_batches)
    assert len(timeline[0]) == 2 * (2 * micro_batches + stages - 1)


@pytest.mark.parametrize("stages", [2, 3, 4, 8])
@pytest.mark.parametrize("virtual_stages", [2, 3])
def test_interleaved_zero_bubble_is_as_short_as_can_be(stages, virtual_stages):
    """In equal units, a cell's: F, I and W of all cells, and what the first forward takes to the last stage."""
    micro_batches = 2 * stages
    timeline = validate(
        ScheduleConfig("zero_bubble", (UNLIMITED,), virtual_stages).actions(stages, micro_batches), micro_batches
    )
    assert len(timeline[0]) == 3 * micro_batches * virtual_stages + stages - 1


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


def test_too_many_sends_in_flight_are_a_deadlock_too():
    """Stage 0 sends nine micro-batches; stage 1 wants the first one a second time before it takes the second."""
    first, second = ([f"F{i}{virtual_stage}" for i in range(9)] for virtual_stage in ("", ".1"))
    validate(parse([" ".join(first + second)] * 2), 9, train=False)
    late = [" ".join(first + second), " ".join([first[0], second[0], *first[1:], *second[1:]])]
    with pytest.raises(SettingError, match="more than 4 messages would be in flight"):
        validate(parse(late), 9, train=False)


INTERLEAVED = {"schedule": "interleaved", "stages": 4}


@pytest.mark.parametrize(
    ("settings", "layers", "message"),
    [
        (INTERLEAVED, 8, "pipeline.virtual_stages is 1; use pipeline.virtual_stages=2"),
        (INTERLEAVED, 7, "pipeline.virtual_stages is 1; use pipeline.schedule=1f1b"),
        (
            INTERLEAVED | {"stages": 1, "virtual_stages": 2},
            8,
            "2 stages or more, there is 1; use pipeline.schedule=1f1b",
        ),
        (INTERLEAVED | {"virtual_stages": 5}, 18, "need 20 layers, the model has 18; use pipeline.virtual_stages=4"),
        (INTERLEAVED | {"virtual_stages": 5}, 7, "need 20 layers, the model has 7; use pipeline.schedule=1f1b"),
        (
            {"schedule": "zero_bubble", "stages": 4, "virtual_stages": 3},
            8,
            "need 12 layers, the model has 8; use pipeline.virtual_stages=2",
        ),
        (
            {"schedule": "zero_bubble", "stages": 4, "virtual_stages": 3},
            7,
            "need 12 layers, the model has 7; use pipeline.virtual_stages=1",
        ),
        (
            {"schedule": "zero_bubble", "stages": 1, "virtual_stages": 2},
            7,
            "2 stages or more, there is 1; use pipeline.virtual_stages=1",
        ),
        ({"schedule": "1f1b", "virtual_stages": 2}, 8, "a stage of 1f1b holds one cell; use pipeline.virtual_stages=1"),
    ],
)
def test_a_schedule_that_does_not_fit_is_refused_with_the_nearest_that_does(settings, layers, message):
    (fault,) = pipeline_errors(PipelineSettings(**settings), layers)
    assert message in fault
    assert pipeline_errors(PipelineSettings(stages=4, schedule="interleaved", virtual_stages=2), 8) == []


@given(st.integers(1, 6), st.integers(0, 9), st.sampled_from(["always", "except_last", "never"]))
def test_every_fill_drain_is_valid_and_complete(stages, micro_batches, remat):
    schedule = fill_drain(stages, micro_batches, remat)
    timeline = validate(schedule, micro_batches)
    for actions, row in zip(schedule, timeline, strict=True):
        assert [cell for cell in row if cell != "."] == [str(action) for action in actions]
    assert sum(a.kind == "R" for a in schedule[0]) == {
        "always": micro_batches, "except_last": max(0, micro_batches - 1), "never": 0
    }[remat]  # fmt: skip
    validate(ScheduleConfig().forward_only(stages, micro_batches), micro_batches, train=False)


@given(st.integers(1, 5), st.integers(1, 5), st.data())
def test_a_shuffled_stage_is_valid_only_if_each_order_holds(stages, micro_batches, data):
    """Whatever a shuffle does, the validator either refuses or returns a timeline with every action once."""
    schedule = fill_drain(stages, micro_batches, "always")
    schedule[0] = data.draw(st.permutations(schedule[0]))
    try:
        timeline = validate(schedule, micro_batches)
    except SettingError:
        return
    for i in range(micro_batches):
        at = [timeline[0].index(f"{kind}{i}") for kind in "FRB"]
        assert at == sorted(at)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["F0 B0", "F0"], "stage 1 never runs B0"),
        (["F0 I0"], "stage 0 never runs W0"),
        (["F0 B0 W0"], "stage 0 never runs I0"),
        (["F0 I0 B0 W0"], "out of order"),
        (["F0 W0 I0"], "out of order"),
        (["F0 F0 B0"], "stage 0 runs F0 more than once"),
        (["F0 B0 F2 B2"], "runs F2, but there are 1"),
        (["B0 F0"], "out of order: it must be F0, then R0"),
        (["R0 F0 B0"], "out of order"),
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


def test_an_evaluation_has_no_backward():
    with pytest.raises(SettingError, match="in an evaluation"):
        validate(parse(["F0 B0"]), 1, train=False)


@pytest.mark.parametrize("text", ["", "F", "X3", "F-1", "F3 ", "f3", "F3.", "F3.0", "F3.-1"])
def test_what_is_no_action_is_refused(text):
    with pytest.raises(SettingError, match="no action"):
        Action.parse(text)
