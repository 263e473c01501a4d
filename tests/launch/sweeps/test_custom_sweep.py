"""A sweep of somebody's own file: trained, reported, interrupted and continued, with real workers."""

import json
import shutil

import pytest
from rich.console import Console

from experiments.custom_sweeps import find_sweep
from experiments.registry import find
from launch.sweeps.command import report, sweep
from suite.errors import DataError

OWN = """
from functools import partial
import torch
from torch import nn
from suite import SweepRun, SweepSpec, TrainSpec

def small(width=4):
    x = torch.randn(40, 3)
    rows = list(zip(x, (x.sum(1) > 0).long()))
    return TrainSpec(
        layers=nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 2)),
        loss=nn.CrossEntropyLoss(weight=torch.tensor([0.2, 0.5])), train=rows[:32], valid=rows[32:],
        batch_size=8, micro_batches=2, steps=6,
        settings="tracking.wandb=disabled train.checkpoint_every=3 train.threads=1",
    )

def widths():
    \"\"\"Does width help?\"\"\"
    wide = SweepRun("width 16: wide", partial(small, 16), "optimizer.learning_rate=0.01")
    return SweepSpec(runs=[SweepRun("narrow", small), wide], seeds=2)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def swept(name="own.py:widths"):
    with Console(width=200, record=True) as console:
        assert sweep(name, "auto", "local", console) == []
    return console.export_text()


def test_a_sweep_of_ones_own_is_trained_reported_and_continued(folder):
    shown = swept()
    assert "0 of 4 members are already finished" in shown
    runs = folder / "runs/widths"
    records = {path.parent.name: json.loads(path.read_text()) for path in runs.glob("*/record.json")}
    assert set(records) == {"narrow-0", "narrow-1", "width-16-wide-0", "width-16-wide-1"}
    assert len({record["valid_loss"] for record in records.values()}) == 4, "another width or seed, another result"
    assert {record["parameters"] for record in records.values()} == {3 * 4 + 4 + 10, 3 * 16 + 16 + 34}
    assert {record["rows"] for record in records.values()} == {6 * 8}, "class weights divide the loss, not the rows"
    page = (runs / "report.md").read_text()
    assert "Does width help?" in page
    means = [
        sum(records[f"{name}-{seed}"]["valid_loss"] for seed in (0, 1)) / 2 for name in ("narrow", "width-16-wide")
    ]
    for label, mean in zip(("narrow", "width 16: wide"), means, strict=True):
        assert f"| {label} | loss | {mean:.4g} ± " in page
    assert "report-loss.png" in page
    assert "<table" in (runs / "report.html").read_text()

    # what an interrupt leaves: one run without its end, one that never began
    (runs / "narrow-0/record.json").unlink()
    for path in (runs / "narrow-0/checkpoints").iterdir():
        if path.name.lstrip("0") == "6":
            shutil.rmtree(path)
    (runs / "narrow-0/published.json").write_text('{"step": 3}')
    shutil.rmtree(runs / "narrow-1")
    report("own.py:widths", "auto", Console(quiet=True))
    assert (
        "Not finished, and excluded from all numbers: widths/narrow-0, widths/narrow-1."
        in (runs / "report.md").read_text()
    )
    assert "2 of 4 members are already finished" in swept()
    assert "resumed at step 3" in (runs / "logs/widths-narrow-0.log").read_text()
    for name in ("narrow-0", "narrow-1"):
        again = json.loads((runs / name / "record.json").read_text())
        assert again["loss_last"] == records[name]["loss_last"], name


def test_a_member_is_a_run_by_its_own_name(folder):
    """A worker finds it by its source, and so does anybody."""
    member = find_sweep("own.py:widths").members("", cluster(), folder)[1]
    assert member.experiment.source == f"{folder}/own.py:widths[width 16: wide]"
    assert find(member.experiment.source).spec.layers[0].out_features == 16
    alone = find("own.py:small").with_settings("train.seed=3").spec.layers[0].weight
    assert find("own.py:widths[narrow]").with_settings("train.seed=3").spec.layers[0].weight.equal(alone)


def test_an_installed_sweep_that_cannot_be_loaded_is_named_and_the_others_are_reported(folder, monkeypatch):
    for module in ("experiments.custom_sweeps", "launch.sweeps.command"):
        monkeypatch.setattr(f"{module}.installed_sweeps", lambda: {"broken": "own.py:depths", "mine": "own.py:widths"})
    (folder / "runs/mine/narrow-0").mkdir(parents=True)
    (folder / "runs/mine/narrow-0/record.json").write_text("{}")
    written = []
    monkeypatch.setattr("launch.sweeps.command.write_report", lambda family, *others: written.append(family.name))
    with Console(width=400, record=True) as console:
        report("", "auto", console)
    assert (
        "the sweep broken of an installed package has no report: there is no function depths" in console.export_text()
    )
    assert written == ["mine"]


def test_a_sweep_whose_runs_do_not_compare_is_named_and_the_others_are_reported(folder, monkeypatch):
    for module in ("experiments.custom_sweeps", "launch.sweeps.command"):
        monkeypatch.setattr(f"{module}.installed_sweeps", lambda: dict.fromkeys(("one", "two"), "own.py:widths"))
    for name in ("one", "two"):
        (folder / f"runs/{name}/narrow-0").mkdir(parents=True)
        (folder / f"runs/{name}/narrow-0/record.json").write_text("{}")
    written = []

    def write(family, *others):
        if family.name == "one":
            raise DataError("a and b were scored on different test pairs")
        written.append(family.name)

    monkeypatch.setattr("launch.sweeps.command.write_report", write)
    with Console(width=400, record=True) as console:
        report("", "auto", console)
    assert "no report of one: a and b were scored on different test pairs" in console.export_text()
    assert written == ["two"]
    with pytest.raises(DataError, match="different test pairs"):
        report("one", "auto", Console(quiet=True))


def cluster():
    from experiments.base.cluster import Cluster

    return Cluster(2, 2**30, "cpu")
