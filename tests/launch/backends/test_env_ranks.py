"""LAUNCHER=env: the processes that torchrun has started are the workers, and train the same bits as LAUNCHER=local."""

import json
import subprocess
import sys
import threading
from dataclasses import dataclass

import pytest
from torch.distributed import DistNetworkError, TCPStore

from experiments.base.hints import command
from experiments.registry import find
from launch.backends import env_ranks
from launch.backends.env_ranks import EnvBackend, RankLauncher, Ranks
from launch.runs.store import RunFolder
from launch.supervision.attempt_log import read_attempt_lines
from launch.supervision.watchdog import Watchdog
from launch.worker.attempt import Attempt
from launch.worker.run_plan import RunPlan
from suite import errors
from suite.errors import PlacementError, ProgramError, SettingError, SuiteError, WorkerDiedError, WorkerError
from suite.pipeline.schedule.config import ScheduleConfig
from tests.faults.injection import hook
from tests.launch.command_line import environment, gpipe_here

OWN = """
import torch
from torch import nn
from suite import TrainSpec

def small():
    rows = [(torch.randn(4), at % 2) for at in range(16)]
    return TrainSpec(
        layers=[nn.Linear(4, 4), nn.Linear(4, 2)], loss=nn.CrossEntropyLoss(), train=rows, batch_size=8, stages=2,
        micro_batches=2, steps=6, settings="train.checkpoint_every=2 tracking.wandb=disabled",
    )
"""


def torchrun(folder, *arguments, **variables):
    """Runs a command in a folder, in two processes of torchrun; returns (exit code, standard error)."""
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*start, "-m", "launch.cli", *arguments, "--launcher", "env"], cwd=folder, capture_output=True, text=True,
        check=False, timeout=200, env=environment() | variables,
    )  # fmt: skip
    return done.returncode, " ".join(done.stderr.split())


def trained(folder, but=None):
    """Returns the run in a folder, not ``but``, and what it trained: losses, and the files of the last checkpoint."""
    (run,) = (RunFolder(path) for path in (folder / "runs/small").iterdir() if but is None or path != but.path)
    lines = map(json.loads, run.metrics.read_text().splitlines())
    files = [path.read_bytes() for path in sorted((run.checkpoints / "00000006").glob("layer-*"))]
    assert len(files) == 2
    return run, ([line["train/loss"] for line in lines], files)


@pytest.mark.slow
def test_two_processes_of_torchrun_train_the_same_bits_also_after_a_killed_worker(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    out = gpipe_here(tmp_path, "experiment", "own.py:small", "--launcher", "local")
    assert f"whether it trains as in plain PyTorch: {command('check', NAME='own.py:small')}\n" in out
    spawned, expected = trained(tmp_path)
    killed = hook([{"fault": "kill", "stage": 1, "step": 3}])
    code, shown = torchrun(tmp_path, "experiment", "own.py:small", GPIPE_WORKER_HOOK=killed)
    assert code == 0, shown
    run, bits = trained(tmp_path, but=spawned)
    assert bits == expected
    assert [attempt["outcome"] for attempt in read_attempt_lines(run.attempts).values()] == ["failed", "done"]


def test_an_error_of_rank_0_is_the_exit_code_of_all_ranks(monkeypatch):
    """That torchrun shows one sentence is in tests/slow."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setattr(Ranks, "join", staticmethod(lambda: Ranks(0, 2, 0, store, "")))
    codes = []
    other = threading.Thread(target=lambda: codes.append(Ranks(1, 2, 1, store, "").serve()))
    other.start()

    def fail():
        raise SettingError("no")

    with pytest.raises(SettingError):
        env_ranks.run_command("env", fail)
    other.join(60)
    assert codes == [2]


def test_there_must_be_a_rank_for_each_worker(monkeypatch):
    monkeypatch.setattr(EnvBackend, "ranks", Ranks(0, 3, 0, None, ""), raising=False)
    with pytest.raises(SettingError, match=r"K x R is 4 workers, and WORLD_SIZE is 3 processes; start 4 of them"):
        EnvBackend().check_workers(find("t12_400m").with_settings("pipeline.stages=2 pipeline.replicas=2"))


def test_without_the_variables_of_torchrun_or_srun_one_sentence_names_them(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "SLURM_NTASKS"):
        monkeypatch.setenv(name, "")
    monkeypatch.delenv("RANK")
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("MASTER_PORT", "1")
    with pytest.raises(SettingError, match="LAUNCHER=env reads WORLD_SIZE, LOCAL_RANK, MASTER_ADDR from the environ"):
        Ranks.join()


@dataclass(frozen=True)
class WithoutProcess(Ranks):
    """A rank whose worker ends at once, or runs until it is ended."""

    result: SuiteError | None = None

    def run_worker(self, number, attempt, should_stop):
        while self.result is None:
            if should_stop():
                return WorkerError("the workers were ended")
        return self.result


@pytest.fixture
def attempt(tmp_path):
    """Returns (store, attempt, experiment, watchdog)."""
    experiment = find("t12_400m").with_settings("pipeline.stages=2")
    attempt = Attempt(tmp_path, tmp_path, 2, working_dir=tmp_path, checkpoint_step=4)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return store, attempt, experiment, Watchdog(attempt, experiment, RunPlan((1, 2), ScheduleConfig()))


def test_an_error_of_another_rank_ends_all_and_arrives_as_it_was(attempt):
    store, first, experiment, watchdog = attempt
    assert env_ranks._ATTEMPT.validate_json(env_ranks._ATTEMPT.dump_json(first)) == first
    where = errors.FailureLocation(0, 1, 3, "F2", 7, "host", "log")
    error = ProgramError("stage 1: ValueError: no", "ValueError", where)
    codes = []
    other = threading.Thread(target=lambda: codes.append(WithoutProcess(1, 2, 1, store, "", result=error).serve()))
    other.start()
    with pytest.raises(ProgramError) as raised:
        RankLauncher(WithoutProcess(0, 2, 0, store, "")).run(first, experiment, watchdog)
    assert raised.value.args == error.args
    store.set("end", "2")
    other.join(60)
    assert codes == [2]


def test_the_others_say_that_rank_0_is_lost():
    class Gone:
        def check(self, keys):
            raise DistNetworkError("Failed to recv, got 0 bytes")

    with pytest.raises(PlacementError, match="rank 0 is lost, at node-7 29500; start all again, with gpipe resume"):
        Ranks(1, 2, 0, Gone(), "node-7 29500").serve()


@pytest.mark.parametrize(
    ("variables", "world", "local"),
    [
        ({}, 4, 4),
        ({"SLURM_NNODES": "2"}, 4, 2),
        ({"SLURM_NNODES": "2"}, 3, None),
        ({"SLURM_NNODES": "4"}, 2, None),
        ({"SLURM_NNODES": "4", "LOCAL_WORLD_SIZE": "2"}, 4, 2),  # torchrun on two of four nodes
        ({"LOCAL_WORLD_SIZE": "3"}, 4, None),
    ],
)
def test_each_node_has_equally_many_processes(monkeypatch, variables, world, local):
    for name in ("SLURM_NNODES", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if local is None:
        with pytest.raises(SettingError, match="start equally many on each"):
            env_ranks._ranks_per_node(world)
    else:
        assert env_ranks._ranks_per_node(world) == local


def test_a_rank_that_is_lost_ends_the_attempt_and_the_run(attempt, monkeypatch):
    store, first, experiment, watchdog = attempt
    monkeypatch.setattr(env_ranks, "LOST_S", 0.5)
    launcher = RankLauncher(WithoutProcess(0, 2, 0, store, ""))
    with pytest.raises(WorkerDiedError, match="worker 1 gave no result: its rank was silent for"):
        launcher.run(first, experiment, watchdog)
    with pytest.raises(PlacementError, match=r"rank 1 of 2 is lost; start all again"):
        launcher.available_devices(2)
