"""``path.py:function`` of a sweep: its members, and errors in one sentence that name the run."""

from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from rich.console import Console

from experiments import custom_sweeps
from experiments.base.cluster import Cluster
from experiments.custom_sweeps import find_sweep
from experiments.registry import find
from experiments.sweeps.registry import find_scale
from experiments.sweeps.report.margins import mean_and_margin
from launch import catalog
from suite.errors import SettingError

LAPTOP = Cluster(2, 12 * 2**30, "cpu")
OWN = """
import torch
from torch import nn
from suite import SweepRun, SweepSpec, TrainSpec

def small():
    rows = [(torch.ones(3), 0), (torch.zeros(3), 1)]
    return TrainSpec(layers=nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), loss=nn.CrossEntropyLoss(), train=rows)

def good():
    \"\"\"Own and built-in.\"\"\"
    return SweepSpec(runs=[
        SweepRun("own", small), SweepRun("by name", "own.py:small", "train.steps=7"),
        SweepRun("paper", "t12_400m", "train.steps=9"),
    ], seeds=2)

def number(): return 3
def raising(): raise KeyError("x")
def unknown(): return SweepSpec(runs=[SweepRun("a", small), SweepRun("b", "t12_400")])
def typo(): return SweepSpec(runs=[SweepRun("a", small), SweepRun("b", small, "train.step=3")])
def seeded(): return SweepSpec(runs=[SweepRun("a", small, "train.seed=3")])
def equal(): return SweepSpec(runs=[SweepRun("a", small), SweepRun("a", small, "train.steps=3")])
def one_folder(): return SweepSpec(runs=[SweepRun("a b", small), SweepRun("a/b", small)])
def called(): return SweepSpec(runs=[SweepRun("a", small())])
def pairs(): return SweepSpec(runs=[("a", small)])
def none(): return SweepSpec(runs=[])
def seeds(): return SweepSpec(runs=[SweepRun("a", small)], seeds=0)
def transfer(): return SweepSpec(runs=[SweepRun("a", small)])
def wrong_member(): return SweepSpec(runs=[SweepRun("a", number)])
def by_depth(): return SweepSpec(runs=[SweepRun("a", "transformer_26", "train.steps=3")])
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def members(name, scale=""):
    return find_sweep(f"own.py:{name}").members(scale, LAPTOP, Path("runs"))


def test_members_of_one_label_differ_only_in_their_seed(folder):
    sweep = find_sweep("own.py:good")
    assert find_scale(sweep, "auto") == "laptop"
    assert find_sweep("own.py:by_depth").scales == ("laptop", "paper")  # no list has transformer_26
    runs = members("good", "laptop")
    assert [(run.folder, run.experiment.train.steps) for run in runs[:3]] == [
        ("good-laptop/own-0", 100), ("good-laptop/by-name-0", 7), ("good-laptop/paper-0", 9),
    ]  # fmt: skip
    for first, second in zip(runs[:3], runs[3:], strict=True):
        assert first.label == second.label
        train = first.experiment.train.model_copy(update={"seed": 1})
        assert second.experiment == first.experiment.model_copy(
            update={"train": train, "shrunk": second.experiment.shrunk}
        )
    assert runs[2].experiment.shrunk


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("goo", "there is no function goo in .*own.py; did you mean good"),
        ("number", "own.py:number returned an object of type int; it must return a suite.SweepSpec"),
        ("small", "own.py:small returned a TrainSpec, which `gpipe experiment .*own.py:small` trains"),
        ("raising", "own.py:raising failed at line 18: KeyError: 'x'"),
        ("unknown", "run 'b' of the sweep unknown: there is no experiment t12_400; did you mean t12_400m"),
        ("typo", "run 'b' of the sweep typo: train.step is not a setting; did you mean train.steps"),
        ("seeded", "run 'a' of the sweep seeded: train.seed is the sweep's to set; give the number of seeds as seeds="),
        ("equal", "two runs are both called 'a'; give each its own label"),
        ("one_folder", "two runs have one folder: 'a b' and 'a/b'; give each its own label"),
        ("called", r"run 'a' has a TrainSpec; give the function that returns it: digits, not digits\(\)"),
        ("pairs", "run 0 is a tuple; it must be a suite.SweepRun"),
        ("none", "runs is empty; give a list of suite.SweepRun"),
        ("seeds", "seeds is 0; it is the number of seeds of each run, 1 or more"),
        ("transfer", "the suite has a sweep transfer, and both would have one folder; rename the function"),
        (
            "wrong_member",
            r"run 'a' of the sweep wrong_member: .*\[a\] returned an object of type int; it must return a suite",
        ),
    ],
)
def test_a_wrong_sweep_is_refused_in_one_sentence(folder, name, message):
    with pytest.raises(SettingError, match=message) as raised:
        members(name)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "own.py:good",
            "own.py:good returned a SweepSpec, which `gpipe sweep .*own.py:good` runs; a run is a TrainSpec",
        ),
        ("own.py:good[ow]", "the sweep has no function of that label; did you mean own"),
        ("own.py:good[paper]", "the sweep has no function of that label"),
    ],
)
def test_a_sweep_is_no_experiment(folder, name, message):
    with pytest.raises(SettingError, match=message):
        find(name)


def test_an_installed_package_adds_its_sweeps_to_the_list(folder, monkeypatch):
    (folder / "installed_package.py").write_text(OWN)
    monkeypatch.syspath_prepend(folder)
    installed = [EntryPoint(name, f"installed_package:{function}", "gpipe.sweeps") for name, function in
                 (("mine", "equal"), ("theirs", "one_folder"), ("rates", "good"), ("transfer", "good"))]  # fmt: skip
    monkeypatch.setattr(custom_sweeps, "entry_points", lambda group: installed)
    assert find_sweep("rates").members("laptop", LAPTOP, Path("runs"))[0].folder == "rates-laptop/own-0"
    assert find_sweep("transfer") is custom_sweeps.SWEEPS["transfer"], "the suite's own keep their names"
    with Console(width=150, record=True) as console:
        console.print(catalog.sweeps())
    shown = console.export_text()
    assert "rates" in shown
    assert "cannot be used: installed_package:equal: two runs are both called 'a'" in shown


def test_the_margin_is_the_95_percent_interval_of_the_mean():
    assert mean_and_margin([1.0, 2.0, 3.0]) == f"2 ± {4.303 * 1 / 3**0.5:.2g}"
    assert mean_and_margin([0.5]) == "0.5"
    assert mean_and_margin([]) is None
