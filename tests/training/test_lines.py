"""Lines that a full disk does not take, and lines of a future that was given up."""

import json
import subprocess
import sys

from suite.training.lines import read_lines, reopened

FULL = """
import resource, signal, sys
from pathlib import Path
from suite.training.lines import Lines

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
lines = Lines(Path(sys.argv[1]))
for step in range(30):
    limit = 100 if 5 <= step < 20 else resource.RLIM_INFINITY  # in the middle of a line
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    lines.write({"step": step, "loss": step / 7})
lines.close()
"""


def test_lines_of_a_full_disk_are_written_when_there_is_room(tmp_path):
    path = tmp_path / "metrics.jsonl"
    done = subprocess.run([sys.executable, "-c", FULL, str(path)], capture_output=True, text=True, check=True)
    assert done.stderr.count("metrics.jsonl waits to be written") == 1
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"step": step, "loss": step / 7} for step in range(30)
    ]


def test_what_comes_after_the_step_of_a_resume_is_dropped_and_a_torn_line_too(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for start, steps in ((0, [1, 2, 3]), (2, [3, 4]), (9, [10])):
        lines = reopened(path, start)
        for step in steps:
            lines.write({"step": step, "of": start})
        lines.close()
        path.write_text(path.read_text() + '{"step"')
    lines = reopened(path, 9)
    lines.close()
    assert [(line["step"], line["of"]) for line in read_lines(path)] == [(1, 0), (2, 0), (3, 2), (4, 2)]
