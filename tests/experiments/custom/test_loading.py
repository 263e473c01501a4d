"""``NAME=path.py:function``: the experiment that it makes, and errors in one sentence."""

import inspect
from dataclasses import fields
from importlib.metadata import EntryPoint

import pytest
from rich.console import Console

from experiments import names, registry
from experiments.custom.experiment import find_custom
from experiments.custom.loading import ROOT, absolute, description, digest, load_spec
from experiments.registry import find
from launch import catalog
from suite import TrainSpec
from suite.errors import SettingError
from tests.experiments.stored import stored

GOOD = """
import torch
from torch import nn
from helper import WIDTH
from suite import TrainSpec

def small():
    \"\"\"Two layers.

    More.\"\"\"
    rows = [(torch.ones(WIDTH), 0), (torch.zeros(WIDTH), 1)]
    return TrainSpec(
        layers=nn.Sequential(nn.Linear(WIDTH, 4), nn.Linear(4, 2)), loss=nn.CrossEntropyLoss(), train=rows,
        batch_size=2, stages=2, micro_batches=1, steps=7, settings="optimizer.learning_rate=0.5 trace=true",
    )

def number():
    return 3

def raising():
    raise KeyError("x")
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "helper.py").write_text("WIDTH = 3\n")
    (tmp_path / "own.py").write_text(GOOD)
    (tmp_path / "broken.py").write_text("import torch\n\ndef small(:\n")
    (tmp_path / "missing.py").write_text("import torch\nimport no_such_package\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_a_file_that_the_file_imports_is_a_part_of_it(folder):
    before = digest(absolute("own.py:small"))
    (folder / "helper.py").write_text("WIDTH = 3  # the same\n")
    assert digest(absolute("own.py:small")) != before
    (folder / "helper.py").write_text("WIDTH = 3\n")
    (folder / "other.py").write_text("WIDTH = 4\n")
    assert digest(absolute("own.py:small")) == before


def test_a_run_whose_function_now_returns_other_layers_is_refused(folder):
    experiment = find("own.py:small").model_copy(update={"layer_count": 3})
    with pytest.raises(SettingError, match="small returns 2 layers, and this run has 3; change it back, or"):
        experiment.build()


def test_help_of_a_spec_describes_its_fields():
    text = inspect.getdoc(TrainSpec)
    assert [field.name for field in fields(TrainSpec) if f"\n{field.name}: " not in text] == []


@pytest.mark.parametrize(
    ("metric", "name"),
    [("None", "loss"), ("nn.functional.l1_loss", "l1_loss"), ("lambda out, labels: out.mean()", "metric"),
     ("nn.L1Loss()", "metric"), ("loss", "metric"), ("seconds", "metric"), ("lr", "metric")],
)  # fmt: skip
def test_a_metric_has_the_name_of_its_function_but_of_no_other_metric(folder, metric, name):
    taken = "".join(f"def {taken}(out, labels): return out.mean()\n" for taken in ("loss", "seconds", "lr"))
    (folder / "own.py").write_text(taken + GOOD.replace("steps=7", f"steps=7, metric={metric}"))
    assert find("own.py:small").metric_name == name


def test_a_function_of_a_file_is_an_experiment(folder):
    experiment = find("own.py:small")
    assert experiment.source == f"{folder}/own.py:small"
    assert (experiment.name, experiment.layer_count) == ("small", 2)
    assert (experiment.pipeline.stages, experiment.train.steps) == (2, 7)
    assert (experiment.pipeline.schedule, find("t12_400m").pipeline.schedule) == ("auto", "fill_drain")
    assert (experiment.optimizer.learning_rate, experiment.trace, experiment.train.batch_rows) == (0.5, True, 2)
    assert stored(experiment) == experiment
    assert experiment.title == "small"  # a run of one's own has no scales, and nothing is said of them


def test_a_function_of_a_module_is_an_experiment(folder):
    assert find("own:small").source == "own:small"


def test_the_seed_decides_the_initial_values(folder):
    def weight(settings):
        return find_custom("own.py:small").with_settings(settings).spec.layers[0].weight

    assert weight("train.seed=1").equal(weight("train.seed=1 train.steps=3"))
    assert not weight("train.seed=1").equal(weight("train.seed=2"))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("own.py:smal", "there is no function smal in .*own.py; did you mean small"),
        ("own.py", "own.py is a file; name the function in it: own.py:function"),
        ("own.py:", "'own.py:' names no function; write path.py:function, such as my_run.py:digits"),
        ("none.py:small", "there is no file none.py, looked for small in it"),
        ("own.py:number", "own.py:number returned an object of type int; it must return a suite.TrainSpec"),
        ("own.py:raising", "own.py:raising failed at line 21: KeyError: 'x'"),
        ("broken.py:small", "broken.py cannot be imported at line 3: SyntaxError"),
        ("missing.py:small", "missing.py cannot be imported at line 2: ModuleNotFoundError: No module named 'no_such"),
        ("no_such_module:small", "no_such_module cannot be imported: ModuleNotFoundError"),
    ],
)
def test_a_wrong_name_is_told_in_one_sentence(folder, name, message):
    with pytest.raises(SettingError, match=message) as raised:
        find(name)
    assert "\n" not in str(raised.value)


def test_a_model_of_one_layer_has_one_stage(folder):
    (folder / "one.py").write_text(GOOD.replace("nn.Linear(WIDTH, 4), nn.Linear(4, 2)", "nn.Linear(WIDTH, 2)"))
    with pytest.raises(SettingError, match=r"pipeline.stages is 2, the model has 1 layer; use 1 stage"):
        find("one.py:small")


@pytest.mark.slow
def test_an_installed_package_adds_its_experiments_to_the_list(folder, monkeypatch):
    installed = [EntryPoint(name, f"own:{function}", "gpipe.experiments") for name, function in
                 (("tiny", "small"), ("t128_6b", "small"), ("bad", "number"))]  # fmt: skip
    for module in (registry, names):
        monkeypatch.setattr(module, "entry_points", lambda group: installed)
    monkeypatch.setattr(names, "experiment_names", names.experiment_names.__wrapped__)  # without its cache
    assert (find("tiny").name, find("tiny").source) == ("tiny", "own:small")
    assert find("t128_6b").list_length > 100, "the suite's own runs keep their names"
    with Console(width=100, record=True) as console:
        console.print(catalog.experiments_table())
    shown = console.export_text()
    assert "tiny (own:small): Two layers." in shown
    assert "bad cannot be used: own:number returned an object of type int" in shown


def test_a_file_of_the_suite_is_named_from_its_folder(monkeypatch, tmp_path):
    """A job on a cluster runs from a copy, whose place differs by node and by job."""
    monkeypatch.chdir(tmp_path)
    assert absolute(f"{ROOT}/examples/digits.py:digits") == "examples/digits.py:digits"
    assert description("examples/digits.py:digits") == "Digits of 8 x 8 pixels."


@pytest.mark.parametrize(
    "source",
    ["runs/t/1/own.py:small", "runs/t/1/deep/own.py:small", "link.py:small", "runs.t.1.own:small", "runs.t.1:small"],
)
def test_code_in_a_run_folder_is_never_executed(folder, source):
    run = folder / "runs" / "t" / "1"
    for file in (run / "own.py", run / "deep" / "own.py", run / "__init__.py"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"open({str(folder / 'executed')!r}, 'w')\n{GOOD}")
    (folder / "link.py").symlink_to(run / "own.py")
    (run / "experiment.toml").write_text("")
    with pytest.raises(SettingError, match=r"is in the run folder .*runs/t/1, .*copy it elsewhere and start a new run"):
        find(source)
    assert not (folder / "executed").exists()


def test_a_file_that_is_gone_is_named(tmp_path):
    with pytest.raises(SettingError, match=f"{tmp_path}/own.py is gone, and it has the function; put it back"):
        load_spec(f"{tmp_path}/own.py:small", 0)


def test_a_wrong_field_of_a_spec_leads_to_those_that_there_are(folder):
    (folder / "own.py").write_text(GOOD.replace("steps=7", "steps=7, lr=0.1"))
    with pytest.raises(SettingError, match=r"unexpected keyword argument 'lr'; its fields are layers, .*, settings"):
        find("own.py:small")
