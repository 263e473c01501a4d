"""A folder of runs of a small translation model: one with random weights, and one without a checkpoint."""

import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from experiments.registry import find
from launch.runs.store import named_run
from suite.data.text.prepare import prepare
from suite.data.text.tokenizer import END_ID
from suite.pipeline.model.layers import materialize, ties_of
from suite.training.checkpoint import Storage
from suite.training.checkpoint.manifest import File, Manifest, digest, layer_file

SETTINGS = (
    "text.corpus=django text.vocabulary=1200 text.max_length=32 model.blocks_per_stack=1 model.width=32 model.heads=1 "
    "model.feed_forward=32 pipeline.stages=1 optimizer.precision=fp32"
)


def made_layers(experiment):
    """Returns the model with random weights."""
    found = []
    for index, layer in enumerate(experiment.build()[0]):
        made = materialize(layer, 0 if ties_of(layer) else index, torch.device("cpu"))
        made.load_state_dict({name: tensor * 3 for name, tensor in made.state_dict().items()})
        if index == 4:
            torch.nn.init.constant_(made.project.bias[END_ID : END_ID + 1], 4.0)  # some texts end before the limit
        found.append(made)
    return found


@pytest.fixture(scope="session")
def folder_of_runs(tmp_path_factory, cache):
    """Its runs are ``made`` and ``bare``."""
    folder = tmp_path_factory.mktemp("scoring")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        Path(".cache").symlink_to(cache)
        experiment = find("t12_400m").with_settings(SETTINGS)
        data = prepare(experiment.text, Path(".cache"), lambda _: None)
        for name in ("made", "bare"):
            named_run("t12_400m", name).experiment.write_text(experiment.to_toml())
        files, storage = {}, Storage(Path("runs/t12_400m/made/checkpoints").resolve())
        for index, layer in enumerate(made_layers(experiment)):
            values = {f"value/{name}": tensor for name, tensor in layer.state_dict().items()}
            files[layer_file(index, "save")] = File(bytes=len(save(values)), sha256=digest(save(values)))
            storage.write(f"00000007/{layer_file(index, 'save')}", save(values))
        notes = {"vocabulary": data.digest}
        manifest = Manifest(step=7, written=time.time(), files=files, notes=notes)
        storage.write("00000007/manifest.json", manifest.encode())
    return folder


@pytest.fixture
def in_folder(folder_of_runs, monkeypatch):
    monkeypatch.chdir(folder_of_runs)
