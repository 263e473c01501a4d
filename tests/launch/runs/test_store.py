"""Run folders: new ones never collide, existing ones are found by path, name or id."""

import pytest

from experiments.base.hints import command, option
from launch.runs import store as runs
from suite.errors import SettingError


@pytest.fixture(autouse=True)
def here(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


def make(name):
    run = runs.new_run(name)
    run.experiment.write_text("")
    return run


def test_two_runs_in_one_second_get_folders_of_their_own():
    assert len({make("t12_400m").path for _ in range(3)}) == 3


def test_a_run_is_found_by_path_by_name_and_id_by_id_and_by_a_folder_of_one_run():
    with pytest.raises(SettingError, match="there are no runs"):
        runs.find_run("x")
    run = make("t12_400m")
    name = f"t12_400m/{run.path.name}"
    for asked in (str(run.path), name, run.path.name, f"runs/{name}/", "t12_400m", "runs/t12_400m"):
        assert runs.find_run(asked) == run
    with pytest.raises(SettingError, match=f"did you mean {name}"):
        runs.find_run(name[:-1])
    make("t12_400m")
    with pytest.raises(SettingError, match="holds 2 runs; choose one of them"):
        runs.find_run("t12_400m")


def test_resume_and_sync_commands_are_for_the_submitting_machine(monkeypatch):
    run = runs.RunFolder(runs.RUNS / "t12_400m" / "1")
    monkeypatch.delenv("GPIPE_JOB", raising=False)
    monkeypatch.setattr(runs, "STORAGE", "/shared")  # as an image or Slurm has it
    assert runs.resume_command(run) == f"gpipe resume {run.path}"
    assert runs.sync_command(run) == f"gpipe sync {run.path}"
    monkeypatch.setenv("GPIPE_JOB", "j")
    assert runs.resume_command(run) == "gpipe submit --run t12_400m/1 --storage /shared"
    assert runs.sync_command(run) == f"wandb sync --include-offline {run.path}/wandb/offline-run-* (on the job's node)"


def test_commands_have_arguments_and_the_options_that_are_given(monkeypatch):
    run = runs.RunFolder(runs.Path("/runs/t12_400m/1"))
    assert runs.resume_command(run, "train.steps=9") == 'gpipe resume /runs/t12_400m/1 --set "train.steps=9"'
    assert command("report", RUN="a b") == "gpipe report --run 'a b'"
    assert command("submit", NAME="n", STORAGE="", ADDRESS="http://h:1") == "gpipe submit n --address http://h:1"
    assert (option("CLUSTER"), option("NAME")) == ("--cluster", "NAME")
    monkeypatch.setenv("GPIPE_JOB", "j")
    monkeypatch.setenv("GPIPE_ADDRESS", "http://head:8265")
    monkeypatch.setattr(runs, "STORAGE", "/shared")
    assert runs.resume_command(run) == "gpipe submit --run t12_400m/1 --storage /shared --address http://head:8265"
    monkeypatch.setenv("GPIPE_SOURCE", "/home/me/own.py:net")
    assert runs.resume_command(run).startswith("gpipe submit /home/me/own.py:net --run t12_400m/1 --storage")


def test_an_ambiguous_id_is_rejected_with_the_runs_names():
    for name in ("small", "large", "small-2"):
        run = runs.named_run(name, "t12_400m-0")
        run.experiment.write_text("")
    message = "3 runs have the id 't12_400m-0': large/t12_400m-0, small-2/t12_400m-0, small/t12_400m-0; choose one"
    with pytest.raises(SettingError, match=message):
        runs.find_run("t12_400m-0")
    assert runs.find_run("small-2/t12_400m-0") == run
