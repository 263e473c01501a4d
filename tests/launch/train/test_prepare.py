"""What a command does before a run is planned."""

from pathlib import Path

import pytest
from rich.console import Console

from experiments.registry import find
from experiments.translation.experiment import TranslationExperiment
from launch.backends.backend import Backend
from launch.train import command
from suite.errors import SettingError


@pytest.mark.parametrize("has_data", [False, True])
def test_processes_import_while_data_are_prepared_for_the_first_time(tmp_path: Path, monkeypatch, has_data: bool):
    calls = []

    class Recording(Backend):
        def prepare_processes(self, preload=()):
            calls.append(["import", *preload])

    def prepare_data(self, cache, log):
        calls.append(["prepare"])
        return self.data

    monkeypatch.setattr(command, "CACHE", tmp_path)
    monkeypatch.setattr(TranslationExperiment, "prepare_data", prepare_data)
    experiment = find("t12_400m")
    if has_data:
        experiment.data_folder(tmp_path).mkdir(parents=True)
    assert command.prepare(experiment, Recording(), Console(quiet=True)) == experiment
    assert calls == [*([] if has_data else [["import", "datasets", "transformers"]]), ["prepare"]]


def test_a_run_that_is_refused_leaves_the_cluster(monkeypatch):
    """The next one of a script connects again, which Ray refuses to a process that is still connected."""
    closed = []

    class Recording(Backend):
        def close(self):
            closed.append(True)

    monkeypatch.setattr(command, "select_backend", lambda launcher: Recording())
    with pytest.raises(SettingError, match=r"pipeline\.stages"):
        command.start("t12_400m", "laptop", "pipeline.stages=0", "ray", Console(quiet=True))
    assert closed == [True]
