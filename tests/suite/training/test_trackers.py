"""Records: a line of JSON a step, and event files for TensorBoard."""

import json
import struct

from tensorboardX.proto.event_pb2 import Event, SessionLog

from suite.training.jsonl import read_lines
from suite.training.trackers import MetricsFile, TensorBoard


def test_a_line_a_step_is_on_disk_at_once_and_a_resumed_run_drops_what_came_after_its_checkpoint(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": s, "train/loss": s}) + "\n" for s in range(1, 6)) + '{"step": 6, "lo')
    tracker = MetricsFile(path, 3)
    tracker.log(4, {"train/loss": 2.5})
    tracker.log(5, {"train/loss": float("nan")})
    assert [line["train/loss"] for line in read_lines(path)] == [1, 2, 3, 2.5, None]
    assert path.read_text().endswith('{"step": 5, "train/loss": null}\n')
    tracker.finish({})


def events(path):
    """Yields the events of a file: records of length, checksum, bytes, checksum."""
    data = path.read_bytes()
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        yield Event.FromString(data[12 : 12 + length])
        data = data[16 + length :]


def test_a_resumed_run_tells_tensorboard_which_steps_it_repeats(tmp_path):
    for start, last in ((0, 3), (2, 4)):
        board = TensorBoard(tmp_path / str(start), start, log=print)
        for step in range(start + 1, last + 1):
            board.log(step, {"train/loss": float(step), "valid/accuracy": float("nan")})
        board.finish({})
    for start, steps in ((0, [1, 2, 3]), (2, [3, 4])):
        (path,) = (tmp_path / str(start)).iterdir()
        found = list(events(path))
        begins = [event.step for event in found if event.session_log.status == SessionLog.START]
        assert begins == [start + 1]  # TensorBoard drops what earlier files have from this step on
        values = [(event.step, value.tag, value.simple_value) for event in found for value in event.summary.value]
        assert [(step, value) for step, tag, value in values if tag == "train/loss"] == [(s, float(s)) for s in steps]
        assert {tag for _, tag, _ in values} == {"train/loss", "valid/accuracy"}


def test_events_that_cannot_be_written_are_said_once_and_end_no_training(tmp_path):
    (tmp_path / "tensorboard").write_text("a file")
    said = []
    board = TensorBoard(tmp_path / "tensorboard", 0, said.append)
    board.log(1, {"train/loss": 1.0})
    board.finish({})
    assert len(said) == 1
    assert said[0].startswith("TensorBoard's events cannot be written (")
