"""Lines that a full disk rejects, and lines after the step that a run resumes from."""

import json
import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from suite.training.jsonl import last_line, reopen

FULL = """
import resource, signal, sys
from pathlib import Path
from suite.training.jsonl import JsonLinesFile

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
lines = JsonLinesFile(Path(sys.argv[1]))
for step in range(30):
    limit = 100 if 5 <= step < 20 else resource.RLIM_INFINITY  # in the middle of a line
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    lines.write({"step": step, "loss": step / 7})
lines.close()
"""


def test_lines_of_a_full_disk_are_written_when_there_is_room(tmp_path):
    path = tmp_path / "metrics.jsonl"
    done = subprocess.run([sys.executable, "-c", FULL, str(path)], capture_output=True, text=True, check=True)
    assert done.stderr.count("cannot write metrics.jsonl, lines stay in memory") == 1
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"step": step, "loss": step / 7} for step in range(30)
    ]


@given(
    st.lists(st.text(max_size=30), max_size=9), st.sampled_from(["", "not json\n", "[1]\n"]),
    st.text(alphabet="{}1\\", max_size=20),
)  # fmt: skip
def test_the_last_line_is_that_of_all_whole_lines(tmp_path_factory, texts, damaged, torn):
    path = tmp_path_factory.getbasetemp() / "system.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts) + damaged + torn)
    assert last_line(path) == ({"text": texts[-1]} if texts else None)


def test_the_last_line_a_key_is_found_from_the_end_across_blocks(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert last_line(path, "valid/nll") is None
    lines = [{"step": at, "train/loss": 1.0, "long": "x" * 5000} for at in range(100)]
    lines.insert(30, {"step": 30, "valid/nll": 4.0})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 100, "train/loss": 1')
    assert last_line(path, "train/loss")["step"] == 99
    assert last_line(path, "valid/nll") == {"step": 30, "valid/nll": 4.0}  # 350 KB before the end
    assert last_line(path, "valid/acc") is None
    path.write_text('{"valid/nll": 1.0}\n')
    assert last_line(path, "valid/nll") == {"valid/nll": 1.0}  # the first line


def test_a_damaged_line_in_the_middle_does_not_cost_those_after_it(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [b'{"step": 1}\n', b'{"step": "\xff"}\n', b"\0\0\n", b'{"step": 2}\n', b'{"step": 3}\n', b'{"step": 4}\n']
    path.write_bytes(b"".join(lines) + b'{"step"')
    reopen(path, 3).close()
    assert path.read_bytes() == b"".join(lines[:5])
    reopen(path, 0).close()
    assert path.read_bytes() == b""


@given(st.lists(st.integers(1, 3000), max_size=200), st.integers(0, 210))
def test_reopening_keeps_all_lines_up_to_the_step(tmp_path_factory, sizes, start):
    path = tmp_path_factory.getbasetemp() / "layers.jsonl"
    lines = [json.dumps({"step": step, "text": "x" * size}) + "\n" for step, size in enumerate(sizes, 1)]
    path.write_text("".join(lines) + '{"step": 1')
    reopen(path, start).close()
    assert path.read_text() == "".join(lines[:start])
