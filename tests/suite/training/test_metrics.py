"""How metrics.jsonl is read."""

import json
import subprocess
import sys

import pytest

from suite.errors import RunFileError
from suite.training.jsonl import last_line
from suite.training.metrics import MOST, check_metrics, read_history, read_steps

# a child's ru_maxrss begins at its parent's
READ = r"""
import re, sys
from pathlib import Path
from suite.training.jsonl import last_line, reopen
from suite.training.metrics import check_metrics, read_history

path = Path(sys.argv[1])
check_metrics(path)
reopen(path, 999_990).close()
read_history(path)
last_line(path, "train/loss")
print(1024 * int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1]))
"""


@pytest.mark.slow
def test_a_resume_a_page_and_a_list_read_a_million_steps_in_little_memory(tmp_path):
    row = {"train/loss": 5.123456789, "train/nll": 4.987654321, "train/tokens": 123456789, "throughput/step_s": 0.1}
    rest, path, validated = json.dumps(row)[1:] + "\n", tmp_path / "metrics.jsonl", 777_777
    with path.open("w") as file:
        file.writelines(f'{{"step": {step}, {rest}' for step in range(1, validated + 1))
        file.write(f'{{"step": {validated}, "valid/nll": 4.0}}\n')
        file.writelines(f'{{"step": {step}, {rest}' for step in range(validated + 1, 1_000_001))
    done = subprocess.run([sys.executable, "-c", READ, str(path)], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 200 * 2**20
    assert last_line(path)["step"] == 999_990
    history = read_history(path)
    numbers = [step["step"] for step in history.steps]
    assert MOST <= len(numbers) < 2 * MOST + 2
    assert numbers == sorted(set(numbers))
    assert (numbers[0], numbers[-1]) == (1, 999_990)
    assert validated in numbers
    assert history.validations == [{"step": validated, "valid/nll": 4.0}]


def test_a_damaged_line_is_named_but_not_the_torn_end_and_steps_are_read_without_it_and_validations(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert read_steps(path) == []
    lines = [{"step": 1, "train/loss": 2.0}, {"step": 1, "valid/nll": 3.0}, {"step": 2, "train/loss": 1.0}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"step": 3')
    check_metrics(path)
    for line in (b'{"step": 0, "train/loss": "\xff"}\n', b"\0\0\0\n", b'{"step"{"step": 0}\n', b'{"\0": 1}\n'):
        path.write_bytes(line + whole)
        assert read_steps(path) == [lines[0], lines[2]]
        if b'{"step"{' not in line:
            with pytest.raises(RunFileError, match=r"line 1 of .*metrics.jsonl is damaged; .*sed -i 1d"):
                check_metrics(path)
