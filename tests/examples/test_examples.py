"""The examples: each is valid as it stands; those that need no download run from the command line."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from experiments.custom.experiment import find_custom
from suite.data.images import rows
from tests.launch.command_line import environment, gpipe_here

EXAMPLES = Path(__file__).parents[2] / "examples"
FAST = "train.steps=3 train.batch_rows=8 train.threads=1 tracking.wandb=disabled"


class Noise:
    """Rows of the sizes of an image set, which the real one would download."""

    def __init__(self, source, split="train", size=28, channels=1):
        self.shape = channels, size, size

    def __len__(self):
        return 100

    def __getitem__(self, row):
        return torch.randn(self.shape), row % 10


@pytest.mark.parametrize("name", ["digits.py:digits", "vision_transformer.py:fashion"])
def test_its_layers_fit_together(name, monkeypatch):
    monkeypatch.setattr(rows, "ImageRows", Noise)
    work = find_custom(f"{EXAMPLES}/{name}")
    assert not work.trial_errors()
    assert work.pipeline.stages == 2


@pytest.mark.slow
def test_a_language_model_trains_on_text_of_your_own(tmp_path):
    example = (EXAMPLES / "language_model.py").read_text()
    (tmp_path / "book.txt").write_text("One word has one meaning. " * 2000)
    (tmp_path / "own.py").write_text(re.sub(r"FILES = .*", 'FILES = [Path(__file__).with_name("book.txt")]', example))
    shown = gpipe_here(tmp_path, "experiment", "own.py:text", "--launcher", "local", "--set", FAST)
    (record,) = tmp_path.glob("runs/text/*/record.json")
    assert json.loads(record.read_text())["counts"] == {"train": 365, "valid": 41}
    assert "held-out data: loss" in shown


@pytest.mark.slow
def test_a_llama_is_fine_tuned_and_written_back(tmp_path):
    (tmp_path / "examples").mkdir()
    example = tmp_path / "examples/finetune_llama.py"
    example.write_text((EXAMPLES / "finetune_llama.py").read_text())
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/page.md").write_text("One word has one meaning. " * 1000)
    subprocess.run([sys.executable, example], env=environment(), check=True, timeout=200)
    gpipe_here(tmp_path, "experiment", f"{example}:llama", "--launcher", "local", "--set", FAST)
    (run,) = tmp_path.glob("runs/llama/*")
    gpipe_here(tmp_path, "export", run.name)
    folders = example.with_name("llama"), run / "export"
    before, after = (AutoModelForCausalLM.from_pretrained(folder) for folder in folders)
    pairs = zip(before.parameters(), after.parameters(), strict=True)
    moved = [float((new - old).abs().max()) for old, new in pairs]
    assert all(0 < distance < 0.1 for distance in moved), moved
