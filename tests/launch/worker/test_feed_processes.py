"""Mini-batches made in processes: the same ones, errors that reach the user, and no process left over."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from experiments.base.cluster import Cluster
from experiments.registry import find
from launch.backends.processes import run_processes, run_worker
from launch.runs.store import RunFolder
from launch.worker import feed_processes
from launch.worker.feed_processes import FeedProcesses, FlatBatch, feed_process_count, make_batches
from suite.data.text.prepare import folder_of, prepare
from suite.errors import DataError, ProgramError, SettingError
from suite.pipeline.model.microbatch import ReplicaBatch
from suite.pipeline.model.topology import RankCoord
from suite.training.metrics import read_steps
from tests.launch.records import write_records

SETTINGS = (
    "text.corpus=django text.vocabulary=1200 text.max_length=32 model.blocks_per_stack=2 model.feed_forward=64 "
    "train.steps=6 train.batch_tokens=300 train.valid_pairs=20 train.checkpoint_every=3 train.threads=1 "
    "tracking.wandb=disabled pipeline.micro_batches=3 pipeline.remat=never pipeline.schedule=fill_drain "
    "pipeline.replicas=1 "
)


def nothing(rank, world, rendezvous):
    pass


@pytest.fixture(scope="module", autouse=True)
def _usual_forkserver():
    """Feed processes would start one that has not imported what workers need, and those of all later tests would spend
    four seconds on it."""
    run_processes(nothing, 1)


def experiment_with(settings, cache):
    """Returns an experiment, and the folder of its text."""
    experiment = (
        find("t24_1_3b_wide").at_laptop_scale(Cluster(2, 2**33, "cpu")).with_settings(SETTINGS).with_settings(settings)
    )
    prepare(experiment.text, cache, lambda _: None)
    return experiment, folder_of(experiment.text, cache)


def assert_same(one: ReplicaBatch, other: ReplicaBatch):
    assert (one.divisor, one.offset, one.rows, one.groups) == (other.divisor, other.offset, other.rows, other.groups)
    for mine, theirs in zip((*one.inputs, *one.targets), (*other.inputs, *other.targets), strict=True):
        assert len(mine) == len(theirs)
        for tensor, expected in zip(mine, theirs, strict=True):
            assert tensor.dtype == expected.dtype
            assert torch.equal(tensor, expected)


@pytest.mark.parametrize("coord", [RankCoord(0, 1, 1), RankCoord(0, 2, 2), RankCoord(3, 2, 2)], ids=str)
def test_processes_make_the_mini_batches_of_the_source(cache, coord):
    settings = f"pipeline.stages={coord.stages} pipeline.replicas={coord.replicas}"
    experiment, data = experiment_with(settings, cache)
    source, before = experiment.data_source(data, coord), torch.get_rng_state()
    made = FeedProcesses(experiment, data, coord, range(2, 7), 2)
    assert len(made._batches._workers) == 2, "started by the thread that has set the device, which pins memory for it"
    for step in range(2, 7):
        assert_same(made(step), source.batch(step))
    assert torch.equal(torch.get_rng_state(), before), "layers draw dropout from this generator"
    for process in made._batches._workers:
        process.terminate()  # as its worker does at the end
        process.join(10)
        assert process.exitcode is not None


OWN = """
import os, torch
from torch import nn
from suite import TrainSpec

class Rows:
    def __len__(self):
        return 12

    def __getitem__(self, row):
        if row == 7 and os.path.exists({trouble!r}):
            raise OSError("the disk is gone")
        return torch.full((3,), float(row)), torch.tensor([row, 2 * row], dtype=torch.int16).float()

def own():
    return TrainSpec(layers=nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.1), nn.Linear(4, 2)), loss=nn.MSELoss(),
                     train=Rows(), valid=Rows(), batch_size=6, stages=2, micro_batches=3, steps=6, prefetch=True,
                     settings="train.validate_every=1 train.threads=1 tracking.wandb=disabled "
                              "pipeline.remat=never pipeline.schedule=fill_drain train.max_restarts=0")
"""


def own(folder):
    (folder / "own.py").write_text(OWN.format(trouble=str(folder / "trouble")))
    return find(f"{folder / 'own.py'}:own")


@pytest.mark.parametrize(("task", "ahead"), [("translation", True), ("custom", False)])
def test_the_prefetch_thread_runs_no_layer_of_the_users(task, ahead):
    """To infer shapes, it would run beside the layers of the main thread, and may draw the numbers that they miss."""
    shapes = []
    executor = SimpleNamespace(
        coord=RankCoord(0, 2, 1), stage=SimpleNamespace(device=torch.device("cpu")), prefetch_shapes=shapes.append
    )
    experiment = SimpleNamespace(task=task, train=SimpleNamespace(steps=2))
    source = SimpleNamespace(batch=lambda step: f"batch {step}", is_thread_safe=True)
    assert make_batches(experiment, None, source, executor, 0)(1) == "batch 1"
    assert bool(shapes) == ahead


def test_data_of_your_own_comes_through_processes(tmp_path):
    coord = RankCoord(0, 2, 1)
    experiment = own(tmp_path)
    source, made = experiment.data_source(tmp_path, coord), FeedProcesses(experiment, tmp_path, coord, range(4), 1)
    for step in range(4):
        batch = made(step)
        assert set(batch.targets) == {()}, "the first stage has no loss"
        assert_same(batch, source.batch(step))


def test_a_sentence_of_the_data_reaches_the_user_as_it_is(cache, tmp_path):
    experiment, data = experiment_with("pipeline.replicas=2 pipeline.stages=1 train.batch_tokens=16", cache)
    few = experiment.model_copy(update={"pipeline": experiment.pipeline.model_copy(update={"replicas": 64})})
    with pytest.raises(SettingError, match=r"^the mini-batch of step 1 has \d+ pairs for 64 replicas; raise train"):
        FeedProcesses(few, data, RankCoord(0, 1, 64), range(3), 1)(0)
    (tmp_path / "trouble").touch()
    made = FeedProcesses(own(tmp_path), tmp_path, RankCoord(0, 2, 1), range(3), 1)
    with pytest.raises(DataError, match=r"^the mini-batch of rows .* cannot be read: OSError: the disk is gone$"):
        [made(step) for step in range(3)]


@pytest.mark.slow
@pytest.mark.parametrize("error", [EOFError(), ConnectionResetError(104, "Connection reset by peer")])
def test_a_broken_pipe_to_a_process_is_its_death(cache, error):
    """Which of them DataLoader raises depends on what the process was doing when it died."""

    def broken():
        raise error
        yield

    experiment, data = experiment_with("pipeline.stages=1", cache)
    made = FeedProcesses(experiment, data, RankCoord(0, 1, 1), range(3), 1)
    made._batches = broken()
    with pytest.raises(ChildProcessError, match=r"died, perhaps .* small: (EOFError|.*reset by peer)$"):
        made(0)


SCRIPT = """
import sys, time, resource
from pathlib import Path
from launch.worker.feed_processes import FeedProcesses
from suite.pipeline.model.topology import RankCoord
from experiments.registry import read_experiment_file

if __name__ == "__main__":
    if sys.argv[3] != "0":
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]), int(sys.argv[3])))
    experiment = read_experiment_file(Path(sys.argv[1]))
    made = FeedProcesses(experiment, Path(sys.argv[2]), RankCoord(0, 1, 1), range(9), 2)
    made(0)
    print(*(process.pid for process in made._batches._workers), flush=True)
    time.sleep(600)
"""


def start(cache, folder, settings="", limit=0):
    """Starts a process that has feed processes."""
    experiment, data = experiment_with(f"pipeline.stages=1 {settings}", cache)
    (folder / "experiment.toml").write_text(experiment.to_toml())
    (folder / "script.py").write_text(SCRIPT)
    command = [sys.executable, "script.py", "experiment.toml", str(data), str(limit)]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.slow
def test_processes_end_with_a_worker_that_was_killed(cache, tmp_path):
    worker_process = start(cache, tmp_path)
    pids = [int(pid) for pid in worker_process.stdout.readline().split()]
    assert len(pids) == 2
    assert all(_is_running(pid) for pid in pids)
    worker_process.kill()
    worker_process.wait()
    until = time.monotonic() + 60
    while any(_is_running(pid) for pid in pids):
        assert time.monotonic() < until, "feed processes outlive their worker"
        time.sleep(0.05)
    worker_process.communicate()


def _is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.slow
def test_shared_memory_that_is_too_small_is_named(cache, tmp_path):
    """The system refuses larger files, as a full /dev/shm does."""
    worker_process = start(cache, tmp_path, "train.batch_tokens=20000", limit=100_000)
    _, errors = worker_process.communicate(timeout=100)
    assert worker_process.returncode == 1
    (line,) = [line for line in errors.splitlines() if line.startswith("suite.errors.DataError: ")]
    assert "the mini-batch of step 1 takes 0." in line
    assert "MiB of shared memory, and /dev/shm has " in line
    assert "MiB left (unable to " in line
    assert "--shm-size" in line


def test_a_flat_batch_is_the_batch_in_one_tensor_of_each_dtype(monkeypatch):
    inputs = [(torch.randn(2, 3), torch.arange(4).view(2, 2)), (torch.randn(5, 3)[::2], torch.arange(3).view(3, 1))]
    targets = [(torch.tensor([True, False]),), (torch.zeros(3, 0, dtype=torch.bool),)]
    batch = ReplicaBatch(inputs, targets, 7.5, 3, 5, [("de", 2.0)])
    flat = FlatBatch.of(batch)
    assert {dtype: tensor.shape for dtype, tensor in flat.flat.items()} == {
        torch.float32: (15,), torch.int64: (7,), torch.bool: (2,),
    }  # fmt: skip
    assert_same(flat.unpack(), batch)
    pinned = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned.append(tensor.clone()) or pinned[-1])
    copied = flat.pin_memory().unpack()
    assert_same(copied, batch)
    blocks = {tensor.untyped_storage().data_ptr() for tensor in pinned}
    assert {t.untyped_storage().data_ptr() for part in (*copied.inputs, *copied.targets) for t in part} == blocks
    nothing = ReplicaBatch([], [], 3.0, 2)
    assert_same(FlatBatch.of(nothing).unpack(), nothing)


@pytest.mark.parametrize(("cores", "gpus", "expected"), [(96, 8, 4), (32, 8, 3), (8, 8, 1), (4, 8, 1), (2, 1, 1)])
def test_a_gpu_has_one_process_less_than_its_share_of_cores_from_one_to_four(monkeypatch, cores, gpus, expected):
    monkeypatch.setattr(feed_processes, "cpu_limit", lambda: cores)
    monkeypatch.setattr(feed_processes, "module_of", lambda _: SimpleNamespace(device_count=lambda: gpus))
    assert feed_process_count(torch.device("cuda", 0)) == expected
    assert feed_process_count(torch.device("cpu")) == 0


def worker_with_processes(rank, world, rendezvous, attempt, count):
    """A worker as beside a GPU, except that its device is the CPU."""
    feed_processes.feed_process_count = lambda device: count
    run_worker(rank, world, rendezvous, attempt)


def train(experiment, data, folder, count, resume=False):
    """Trains with feed processes, or without; returns the run."""
    run = RunFolder(folder)
    run.path.mkdir(exist_ok=True)
    layers, _ = experiment.build()
    cells = (len(layers) - 1, 1) if experiment.pipeline.stages == 2 else (len(layers),)
    _, attempt = write_records(run, experiment, cells, data, resume)
    run_processes(worker_with_processes, attempt.workers, attempt, count, deadline_s=200)
    return run


def metrics(run):
    valid = json.loads(run.record.read_text())
    return [(line["train/loss"], line["train/grad_norm"]) for line in read_steps(run.metrics)], {
        name: value for name, value in valid.items() if name.startswith(("valid", "best_valid", "unigram"))
    }


@pytest.mark.slow
def test_a_run_with_processes_has_the_same_bits_and_resumes(cache, tmp_path):
    experiment, data = experiment_with("pipeline.stages=2", cache)
    alone = train(experiment, data, tmp_path / "thread", 0)
    train(experiment.with_settings("train.steps=3"), data, tmp_path / "processes", 2)
    beside = train(experiment, data, tmp_path / "processes", 2, resume=True)
    assert len(metrics(alone)[0]) == 6
    assert metrics(beside) == metrics(alone)


@pytest.mark.slow
def test_a_run_that_stops_early_ends_its_processes(tmp_path):
    experiment = own(tmp_path).with_settings("train.patience=1 optimizer.learning_rate=9 train.steps=1000")
    run = train(experiment, tmp_path, tmp_path / "run", 2)
    assert json.loads(run.record.read_text())["stopped_early"]
    assert len(metrics(run)[0]) < 1000


def kill_feed_process(rank, world, rendezvous, attempt):
    """A worker whose feed process is killed before step 2, as by the kernel where memory is short."""

    class Killed(FeedProcesses):
        def __call__(self, step):
            if step == 2:
                for process in self._batches._workers:
                    os.kill(process.pid, signal.SIGKILL)
            return super().__call__(step)

    feed_processes.FeedProcesses = Killed
    worker_with_processes(rank, world, rendezvous, attempt, 1)


def test_a_killed_process_ends_the_attempt_with_a_sentence(tmp_path):
    run, experiment = RunFolder(tmp_path / "run"), own(tmp_path).with_settings("train.steps=50")
    run.path.mkdir()
    _, attempt = write_records(run, experiment, (2, 1), tmp_path)
    with pytest.raises(ProgramError) as raised:
        run_processes(kill_feed_process, 2, attempt, deadline_s=200)
    assert "batch of step 3: ChildProcessError: a process that makes mini-batches died, " in str(raised.value)
    assert raised.value.where.action == "batch"
    assert "\n" not in str(raised.value)
