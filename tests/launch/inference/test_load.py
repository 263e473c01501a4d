"""``suite.load``: the trained model of a run in this process, and runs that start from its weights."""

import pytest
import torch
from rich.console import Console
from torch.nn import functional as F

import suite
from experiments.custom.loading import load_spec
from launch.train.command import start
from suite.errors import CheckpointError, SettingError
from suite.paths import read_json

OWN = """
import torch
from torch import nn
from torch.nn import functional as F
from suite import TrainSpec

class Embed(nn.Module):
    gpipe_stashes = ("ids",)
    def __init__(self, table):
        super().__init__()
        self.table = table
        self.register_buffer("scale", torch.tensor([0.5]), persistent=False)
    def forward(self, ids):
        return F.embedding(ids, self.table) * self.scale, ids

class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), nn.Dropout(0.5))
    def forward(self, x):
        return torch.tanh(self.inner(x.mT[..., None])[..., 0].mT)

class Mix(nn.Module):
    gpipe_pops = ("ids",)
    def forward(self, x, ids):
        return x + ids[..., None] / 100

class Scores(nn.Module):
    def __init__(self, table):
        super().__init__()
        self.out = nn.Linear(8, len(table))
        self.out.weight = table
    def forward(self, x):
        return self.out(x.mean(1))

def accuracy(scores, labels):
    return (scores.argmax(1) == labels).float().mean()

def data(rows, classes):
    ids = torch.randint(0, 12, (rows, 5), generator=torch.Generator().manual_seed(rows))
    return torch.utils.data.TensorDataset(ids, ids[:, 0] % classes)

def spec(last, classes, table):
    return TrainSpec(
        layers=[Embed(table), Norm(), nn.Linear(8, 8), Mix(), last], loss=nn.CrossEntropyLoss(), metric=accuracy,
        train=data(64, classes), valid=data(30, classes), batch_size=16, steps=6, stages=2,
        settings="pipeline.schedule=1f1b train.validate_every=2 tracking.wandb=disabled train.threads=1")

def tied():
    table = nn.Parameter(torch.randn(12, 8))
    return spec(Scores(table), 12, table)

def fewer_classes():
    table = nn.Parameter(torch.randn(12, 8))
    return spec(nn.Sequential(nn.Flatten(), nn.Linear(40, 3)), 3, table)

def wider():
    table = nn.Parameter(torch.randn(12, 8))
    return TrainSpec(layers=[Embed(table), Norm(), nn.Linear(8, 8, bias=False), Mix(), Scores(table)],
                     loss=nn.CrossEntropyLoss(), train=data(64, 12))
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder, a file with models, and a run of one of them with a skip and a tie from the first stage to the last."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("load")
        patch.chdir(folder)
        (folder / "own.py").write_text(OWN)
        yield folder, train(folder, "tied")


def barely(run):
    """Settings of a run that starts from another one and hardly changes its weights."""
    return f"train.init_from={run} train.steps=1 train.validate_every=none optimizer.learning_rate=1e-12"


def train(folder, name, settings=""):
    return start(f"{folder}/own.py:{name}", "auto", settings, "local", Console(quiet=True)).path


def values(run, step):
    return suite.load(run, step).state_dict()


def test_a_loaded_model_has_the_validated_score(trained):
    folder, run = trained
    model, record = suite.load(run), read_json(run / "record.json")
    valid = load_spec(f"{folder}/own.py:tied", 0).valid
    with torch.no_grad():
        scores, labels = model(valid.tensors[0]), valid.tensors[1]
    assert not model.training
    assert record["best_valid_loss"] == pytest.approx(F.cross_entropy(scores, labels).item(), rel=1e-5)
    with torch.no_grad():
        last = suite.load(str(run), "latest")(valid.tensors[0])
    assert record["valid_accuracy"] == pytest.approx((last.argmax(1) == labels).float().mean().item(), abs=1e-6)


def test_ties_are_one_parameter(trained):
    model = suite.load(trained[1])
    assert model.layers[0].table is model.layers[-1].out.weight
    assert len(list(model.parameters())) == 8


def test_a_checkpoint_is_chosen(trained):
    with pytest.raises(CheckpointError, match="has no checkpoint of step 99; it has those of steps"):
        suite.load(trained[1], 99)
    with pytest.raises(SettingError, match="unknown checkpoint 'bets'; choose best, latest or the number"):
        suite.load(trained[1], "bets")
    with pytest.raises(SettingError, match="no run 'tide'"):
        suite.load("tide")


def test_a_changed_file_is_said(trained):
    folder, run = trained
    own = folder / "own.py"
    own.write_text(f"{OWN}# more")
    with pytest.warns(UserWarning, match="own.py:tied has changed since the run; its layers are as they are now"):
        suite.load(run)
    own.write_text(OWN)


def test_a_run_starts_from_the_weights_of_another(trained):
    folder, run = trained
    again, before = train(folder, "tied", barely(run)), values(run, None)
    matrices = {name: value for name, value in values(again, 1).items() if value.dim() > 1}
    assert {"layers.0.table", "layers.1.inner.0.weight", "layers.2.weight"} <= matrices.keys()
    assert all(torch.allclose(value, before[name], atol=1e-6) for name, value in matrices.items())


@pytest.mark.slow
def test_a_last_layer_of_another_shape_starts_anew(trained):
    folder, run = trained
    other, before = train(folder, "fewer_classes", barely(run)), values(run, None)
    found = values(other, 1)
    assert torch.allclose(found["layers.2.weight"], before["layers.2.weight"], atol=1e-6)
    assert found["layers.4.1.weight"].shape == (3, 40)
    messages = (other / "messages.log").read_text()
    assert f"layer 4, the last one, starts anew; it is not that of {run}: out.bias is extra" in messages


def test_a_run_of_another_model_that_cannot_start_from_another_is_refused(trained):
    folder, run = trained
    message = "layer 2 of .* does not match this model: bias is extra; change the model"
    with pytest.raises(CheckpointError, match=message):
        train(folder, "wider", f"train.init_from={run}")
    with pytest.raises(SettingError, match="no run 'tide'"):
        train(folder, "tied", "train.init_from=tide")
