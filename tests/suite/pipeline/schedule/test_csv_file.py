"""Schedules from CSV files, torch's own among them."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from suite.errors import SettingError
from suite.pipeline.model.cells import CellPlacement, v_shaped
from suite.pipeline.schedule import csv_file
from suite.pipeline.schedule.action import Action, virtual_stages_of
from suite.pipeline.schedule.config import ScheduleConfig, pipeline_errors
from suite.pipeline.schedule.csv_file import cell_to_stage_of, parse_rows, read_rows, shape
from suite.pipeline.schedule.validate import validate
from suite.settings import PipelineSettings
from tests.suite.pipeline.torch_schedules import KINDS, dump

PICTURE = "0F0,0F1,,0B1,0B0\n,1F0,1F1,1B1,1B0\n"


def as_csv(schedule, cell_to_stage=()):
    """Writes a schedule as torch does."""
    placement = CellPlacement(len(schedule), cell_to_stage)
    lines = [
        [f"{action.cell(k, placement)}{action.kind}{action.micro_batch}" for action in actions]
        for k, actions in enumerate(schedule)
    ]
    return "".join(",".join(line) + "\n" for line in lines)


def test_reads_actions_and_skips_idle_time(tmp_path):
    for encoding in ("utf-8", "utf-8-sig"):  # spreadsheets write a byte order mark, and empty lines at the end
        (tmp_path / "own.csv").write_text(f"{PICTURE}\n,,\n", encoding=encoding)
        rows = read_rows(tmp_path / "own.csv")
        assert rows == ("0F0 0F1 0B1 0B0", "1F0 1F1 1B1 1B0")
    assert parse_rows(rows) == [[Action("F", 0), Action("F", 1), Action("B", 1), Action("B", 0)]] * 2
    assert shape(rows) == {"stages": 2, "micro_batches": 2, "virtual_stages": 1}


def test_the_example_in_the_docs_runs(tmp_path):
    lines = [line.split()[0] for line in csv_file.__doc__.splitlines() if re.match(r" +\dF", line)]
    (tmp_path / "own.csv").write_text("\n".join(lines))
    assert shape(read_rows(tmp_path / "own.csv")) == {"stages": 2, "micro_batches": 2, "virtual_stages": 2}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 4), (4, 8)])
def test_runs_what_torch_writes(kind, stages, micro_batches, tmp_path):
    rows = read_rows(dump(kind, tmp_path / "torch.csv", stages, micro_batches))
    assert cell_to_stage_of(rows) == (v_shaped(stages) if "V" in kind else ())
    assert shape(rows) == {"stages": stages, "micro_batches": micro_batches, "virtual_stages": 2}
    for count in (1, stages + 1, micro_batches):  # mini-batches with fewer micro-batches run in the same order
        actions = ScheduleConfig("csv", (1,), 2, rows).actions(stages, count)
        assert {action.micro_batch for action in actions[0]} == set(range(count))


@settings(max_examples=40)
@given(
    name=st.sampled_from(["fill_drain", "1f1b", "zero_bubble", "interleaved"]), stages=st.integers(1, 5),
    micro_batches=st.integers(1, 9), virtual_stages=st.integers(1, 3),
)  # fmt: skip
def test_every_own_schedule_reads_back(name, stages, micro_batches, virtual_stages, tmp_path_factory):
    if name in ("fill_drain", "1f1b"):
        virtual_stages = 1
    if name == "interleaved":
        virtual_stages += 1
    if stages == 1 and virtual_stages > 1:
        return
    schedule = ScheduleConfig(name, virtual_stages=virtual_stages).base_schedule(stages, micro_batches)
    path = tmp_path_factory.mktemp("own") / "own.csv"
    path.write_text(as_csv(schedule))
    rows = read_rows(path)
    assert parse_rows(rows) == schedule
    assert virtual_stages_of(schedule) == shape(rows)["virtual_stages"]
    validate(schedule, micro_batches)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "is empty; it needs a line of actions for each stage"),
        ("0F0,0B0\n1F0\n", "stage 1 never runs B0"),
        ("0F0,0X0\n1F0,1B0\n", "line 1 has '0X0', which is no action; actions look like 0F3, 0B3, 0I3 or 0W3"),
        ("0F0,0SEND_F0,0B0\n1F0,1B0\n", "line 1 has '0SEND_F0', a message; save only the computations"),
        ("1F0,1B0\n0F0,0B0\n", "cell 0 is in line 2; it must be in the first, so change the order of lines"),
        ("0F0,1F0,1B0,0B0\n1F1,1B1\n", "cell 1 is in lines 1 and 2; a cell belongs to one stage"),
        ("0F0,0B0\n2F0,2B0\n", "no line has cell 1, and there are cells up to 2; leave none out"),
        ("0F0,0B0\n\n1F0,1B0\n", "the lines have 1, 0, 1 cells; every stage needs equally many, one at least"),
        ("4000000000F0,0B0\n1F0,1B0\n", "line 1 has '4000000000F0', which is no action"),
        ("0F0,0B0\n999999999F0,1B0\n", "no line has cell 2, and there are cells up to 999999999; leave none out"),
        ("0F0,0F999999999,0B0\n", "there are 1,000,000,000 micro-batches, and no stage has more than 3 actions"),
        ("0F0,(1F0;1B0)OVERLAP,0B0\n", "line 1 has '(1F0;1B0)OVERLAP', which is no action"),
    ],
)
def test_says_what_is_wrong_with_a_file(text, sentence, tmp_path):
    (tmp_path / "own.csv").write_text(text)
    with pytest.raises(SettingError) as caught:
        read_rows(tmp_path / "own.csv")
    assert sentence in str(caught.value)
    assert str(tmp_path / "own.csv") in str(caught.value)


def test_an_overlapped_pair_runs_one_after_the_other(tmp_path):
    (tmp_path / "own.csv").write_text("0F0,(0F1;0B0)OVERLAP_F_B,0B1\n1F0,1B0,1F1,1B1\n")
    assert read_rows(tmp_path / "own.csv")[0] == "0F0 0F1 0B0 0B1"


def test_names_a_file_that_is_missing_or_no_text(tmp_path):
    with pytest.raises(SettingError, match=r"no\.csv cannot be read: No such file"):
        read_rows(tmp_path / "no.csv")
    (tmp_path / "bytes.csv").write_bytes(b"\xff\xfe0F0")
    with pytest.raises(SettingError, match=r"bytes\.csv cannot be read: 'utf-8' codec"):
        read_rows(tmp_path / "bytes.csv")


def test_the_file_determines_k_m_and_cells(tmp_path):
    (tmp_path / "own.csv").write_text(PICTURE)
    rows = read_rows(tmp_path / "own.csv")
    fitting = PipelineSettings(schedule="csv", schedule_rows=rows, stages=2, micro_batches=2)
    assert pipeline_errors(fitting, 5) == []
    assert pipeline_errors(fitting.model_copy(update={"micro_batches": 4}), 5) == [
        "pipeline.micro_batches is 4, the schedule's file has 2; leave it out, or set another pipeline.schedule"
    ]
    assert "has 2 cells, the model has 1 layers" in pipeline_errors(fitting, 1)[0]
    assert "csv without a file" in pipeline_errors(PipelineSettings(schedule="csv"), 5)[0]
