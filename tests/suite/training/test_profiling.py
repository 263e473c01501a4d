"""Profiled steps: one trace a worker with a span for each action, and the same bits as without."""

import gzip
import json
from collections import Counter
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from experiments.registry import find
from launch.backends.processes import run_processes
from suite.errors import SettingError
from suite.pipeline.model.topology import RankCoord
from suite.training.profiling import StepProfiler, profiled_steps
from tests.suite.pipeline.build import join
from tests.suite.training.work import merge, trained


def with_and_without(rank, world, rendezvous, stages, replicas, folder):
    """Returns what ``trained`` returns of 4 steps, without and with the profiler."""
    join(rank, world, rendezvous)
    coord = rank, stages, replicas
    return trained(*coord, 4), trained(*coord, 4, profile=(folder, "2-3"))


def test_a_profiled_run_has_the_same_bits_and_a_trace_of_each_worker(tmp_path):
    stages, replicas = 2, 2
    found = run_processes(with_and_without, 4, stages, replicas, tmp_path / "profile")
    (losses, weights), (profiled_losses, profiled_weights) = merge([a for a, _ in found]), merge([b for _, b in found])
    assert losses == profiled_losses
    assert all((weights[key] == profiled_weights[key]).all() for key in weights)
    names = {f"stage-{replica}-{stage}.json.gz" for replica in range(replicas) for stage in range(stages)}
    assert {path.name for path in (tmp_path / "profile").iterdir()} == names
    count = 4 // replicas
    for path in (tmp_path / "profile").iterdir():
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        spans = Counter(event["name"] for event in events if event.get("cat") == "user_annotation")
        expected = {f"{kind}{i}": 2 for kind in "FRB" for i in range(count)} | {f"R{count - 1}": 0}
        assert {name: spans[name] for name in expected} == expected
        assert any(event["name"] == "aten::linear" or event["name"] == "aten::mm" for event in events)


def test_a_run_that_ends_within_the_range_leaves_the_steps_until_then(tmp_path):
    status = SimpleNamespace(begin=lambda name, step: None, allow=lambda seconds: nullcontext())
    executor = SimpleNamespace(status=status, profiling=False)
    profiler = StepProfiler(tmp_path / "profile", RankCoord(0, 1, 1), range(1, 9), torch.device("cpu"))
    profiler.begin(1, executor)
    torch.ones(3) + 1
    profiler.end(1, executor)
    assert not (tmp_path / "profile").exists()
    profiler.end(None, executor)
    assert not executor.profiling
    (trace,) = (tmp_path / "profile").iterdir()
    assert any(event["name"] == "aten::add" for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"])
    written = trace.read_bytes()
    profiler.end(None, executor)
    assert trace.read_bytes() == written, "a second end writes nothing"


def test_a_trace_that_cannot_be_written_ends_nothing(tmp_path, capsys):
    status = SimpleNamespace(begin=lambda name, step: None, allow=lambda seconds: nullcontext())
    executor = SimpleNamespace(status=status, profiling=False)
    (tmp_path / "profile").symlink_to("/dev/full")
    profiler = StepProfiler(tmp_path / "profile", RankCoord(0, 1, 1), range(1, 2), torch.device("cpu"))
    profiler.begin(1, executor)
    profiler.end(1, executor)
    assert f"the profile {tmp_path}/profile/stage-0-0.json.gz could not be written" in capsys.readouterr().err


@pytest.mark.parametrize(("text", "expected"), [("20", range(19, 20)), ("20-23", range(19, 23)), (" 1-50 ", range(50))])
def test_a_step_or_a_range(text, expected):
    assert profiled_steps(text, 50) == expected


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("some", "train.profile_steps is 'some'; give a step or a range of steps, such as 20 or 20-23"),
        ("", "give a step or a range"),
        ("0", "train.profile_steps is 0, the run has steps 1 to 50"),
        ("23-20", "first step first"),
        ("49-51", "the run has steps 1 to 50"),
    ],
)
def test_other_texts_are_refused_in_one_sentence(text, part):
    with pytest.raises(SettingError, match=part):
        profiled_steps(text, 50)
    with pytest.raises(SettingError, match=part):
        find("t24_1_3b_wide").with_settings(f"train.steps=50 'train.profile_steps={text}'")
