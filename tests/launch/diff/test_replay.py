"""``gpipe replay`` of actions of a real run, and ``gpipe diff --run`` of one: the same bits, and what is refused."""

import json
import re
import shutil
from bdb import BdbQuit

import pytest
import torch
from torch import nn

from experiments.registry import read_experiment_file
from launch.diff import repeat as repeating
from launch.diff import replay as replaying
from launch.diff.replay import ReplayedAction, replay
from launch.terminal import Terminal
from suite import TrainSpec
from suite.errors import PlacementError
from suite.pipeline.schedule.action import Action
from tests.launch.command_line import call, gpipe_here, only_run, refusal
from tests.launch.diff.test_diff import right


class Overflows(nn.Linear):
    def forward(self, x):
        return super().forward(x) / 0.0


def overflows():
    torch.manual_seed(3)
    x = torch.randn(4, 6)
    return TrainSpec(
        layers=[nn.Linear(6, 6), Overflows(6, 6)], loss=nn.MSELoss(), train=list(zip(x, x, strict=True)),
        batch_size=4, steps=1, stages=1, micro_batches=2, settings="train.max_nonfinite_steps=9",
    )  # fmt: skip


@pytest.fixture(autouse=True)
def _threads_as_before():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def trained(folder, name, settings):
    given = f"tracking.wandb=disabled train.threads=1 {settings}"
    gpipe_here(folder, "experiment", name, "--launcher", "local", "--set", given)
    return only_run(folder)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Four steps on two stages and three replicas, with recomputes and checkpoints of steps 3 and 4."""
    settings = "train.steps=4 train.checkpoint_every=1 train.fingerprint_steps=4 pipeline.stages=2 pipeline.replicas=3"
    settings += " train.batch_rows=12 pipeline.micro_batches=2 pipeline.schedule=fill_drain pipeline.remat=always"
    return trained(tmp_path_factory.mktemp("run"), f"{right.__code__.co_filename}:right", settings)


@pytest.mark.parametrize("step", [1, 4])
@pytest.mark.parametrize("action", ["F1", "R0", "B1"])
@pytest.mark.parametrize(("replica", "stage"), [(0, 0), (0, 1), (2, 1)])
def test_an_action_has_the_bits_that_the_run_recorded(run, capsys, step, action, replica, stage):
    assert replay(str(run), ReplayedAction(step, replica, stage, Action.parse(action)), None, None, Terminal())
    first, *lines, last = capsys.readouterr().out.splitlines()
    micro_batch = 2 * replica + int(action[1])
    assert first.startswith(f"{action} of step {step} on replica {replica}, stage {stage}: micro-batch {micro_batch} ")
    assert lines
    assert all(line.endswith("; as recorded") for line in lines), lines
    assert last == f"{len(lines)} of {len(lines)} compared with what the run recorded: the same to the bit"
    assert all((": gradient of " in line) == (action[0] == "B") for line in lines)


def test_another_tensor_than_the_recorded_one_is_said(run, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    (file,) = (copy / "fingerprints").glob("0-0.jsonl")
    first, *steps = map(json.loads, file.read_text().splitlines())
    changed = next(row for row in steps[3]["rows"] if row[:3] == [1, 0, "output 0"])
    changed[3] = "0" * 16
    file.write_text("".join(json.dumps(line) + "\n" for line in (first, *steps)))
    code, out, _ = call("replay", str(copy), "--step", "4", "--action", "F1")
    assert code == 1
    assert re.findall(r"layer (\d) \w+: (\w+ \d) .*DIFFERS from the recorded one", out) == [("0", "output 0")]
    assert re.search(r"\n1 of \d differ; another number of threads explains rounding\n$", out)


def test_what_was_not_compared_is_said(run, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    for file in copy.glob("fingerprints/*.jsonl"):
        file.write_text(file.read_text().replace('"device": "cpu"', '"device": "cuda"'))
    code, out, _ = call("replay", str(copy), "--step", "4", "--action", "F1")
    assert (code, out.splitlines()[-1][:50]) == (0, "not compared: the run recorded on a cuda device (t")
    shutil.rmtree(copy / "fingerprints")
    code, out, _ = call("replay", str(copy), "--step", "4", "--action", "F1")
    assert (code, out.splitlines()[-1][:50]) == (0, "not compared: the run recorded none of these tenso")


def test_the_threads_are_those_of_a_worker(run, monkeypatch):
    seen, original = [], replaying.init_process_group
    monkeypatch.setattr(replaying, "threads_of", lambda chosen: chosen.pipeline.stages * chosen.pipeline.replicas)
    monkeypatch.setattr(replaying, "init_process_group", lambda *given: seen.append(given[3]) or original(*given))
    replay(str(run), ReplayedAction(4, 0, 0, Action.parse("F0")), None, None, Terminal())
    assert seen == [6]


def test_the_tensors_are_saved_and_a_debugger_stops_before_forward_and_backward(run, tmp_path, capsys):
    stops, file = [], tmp_path / "tensors.pt"
    asked = ReplayedAction(4, 0, 1, Action.parse("B0"))
    assert replay(str(run), asked, lambda: stops.append(capsys.readouterr().out), file, Terminal())
    assert len(stops) == 2
    saved = torch.load(file)
    assert len(saved) == capsys.readouterr().out.count(": gradient of ")
    assert saved[4, "gradient of weight"].shape == (6, 5)


@pytest.mark.slow
def test_numbers_that_are_not_finite_are_counted(tmp_path):
    run = trained(tmp_path, f"{__file__}:overflows", "")
    code, out, _ = call("replay", str(run), "--step", "1", "--action", "F1")
    assert code == 0
    assert re.search(r"layer 1 Overflows: output 0 \(2, 6\): norm (inf|nan), .*, 12 of 12 not finite", out), out
    assert re.search(r"layer 0 Linear: output 0 \(2, 6\): norm [\d.]+, largest [\d.]+\n", out), out


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (("--step", "4", "--action", "B2"), ["it has F, R, B of micro-batches 0 to 1, such as F0 and B0"]),
        (("--step", "4", "--action", "B1.1"), ["no such action"]),
        (("--step", "4", "--action", "W1"), ["no such action; it has F, R, B of"]),
        (("--step", "4", "--action", "B1", "--save", "none/tensors.pt"), ["--save is none/tensors.pt; give a file in"]),
        (("--step", "4", "--action", "B1", "--stage", "2"), ["there is no stage 2"]),
        (("--step", "4", "--action", "B1", "--replica", "-1"), ["there is no replica -1"]),
        (("--step", "5", "--action", "B1"), ["the run has steps 1 to 4"]),
        (("--step", "3", "--action", "B1"), ["step 3 starts from the weights after step 2", "those of steps 4, 3"]),
        (("--step", "4", "--action", "X1"), ["'X1' is no action"]),
    ],
)
def test_an_action_that_cannot_be_replayed_is_refused(run, arguments, parts):
    found = refusal("replay", str(run), *arguments)
    assert all(part in found for part in parts), found


@pytest.mark.slow
def test_a_runs_last_step_is_the_same_again_and_leaves_no_run(run, tmp_path):
    code, out, errors = call("diff", "--run", str(run), folder=tmp_path)
    assert (code, errors) == (0, ""), out
    assert re.search(r"^steps 4 to 4 of .*00000003\n  step 4: loss [\d.]+, gradient norm [\d.]+; the same\n$", out), out
    assert not list(tmp_path.glob("runs/*")) + list(tmp_path.glob(".cache/short_runs/*"))


@pytest.mark.slow
def test_a_last_digit_that_differs_is_said_and_the_copy_is_kept(run, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    lines = [json.loads(line) for line in (copy / "metrics.jsonl").read_text().splitlines()]
    (last,) = (line for line in lines if line.get("step") == 4 and "train/loss" in line)
    last["train/grad_norm"] *= 1 + 2**-52
    (copy / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    code, out, _ = call("diff", "--run", str(copy), folder=tmp_path)
    assert code == 1
    assert "DIFFERS now" in out
    kept = read_experiment_file(only_run(tmp_path) / "experiment.toml").pipeline
    assert list(kept.layers_per_cell) == json.loads((run / "plan.json").read_text())["cells"]


def test_a_copy_that_cannot_be_trained_leaves_no_run(run, tmp_path, monkeypatch):
    def refuse(*_):
        raise PlacementError("too few devices")

    monkeypatch.setattr(repeating, "resume", refuse)
    assert "too few devices" in refusal("diff", "--run", str(run), folder=tmp_path)
    assert not list(tmp_path.glob("runs/*")) + list(tmp_path.glob(".cache/short_runs/*"))


@pytest.mark.slow
def test_steps_that_are_not_finite_are_said(tmp_path):
    run = trained(tmp_path, f"{__file__}:overflows", "train.steps=2 train.checkpoint_every=1")
    code, out, _ = call("diff", "--run", str(run), folder=tmp_path)
    assert code == 0
    assert "step 2: loss not finite, gradient norm not finite; the same" in out


def test_a_run_without_a_plan_is_refused(run, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    (copy / "plan.json").unlink()
    for arguments in (("replay", str(copy), "--step", "4", "--action", "F1"), ("diff", "--run", str(copy))):
        assert "plan.json is missing" in refusal(*arguments)


def test_a_user_leaves_the_debugger(run, monkeypatch):
    def leave():
        raise BdbQuit

    monkeypatch.setattr("pdb.set_trace", leave)
    code, _, errors = call("replay", str(run), "--step", "4", "--action", "F1", "--pdb")
    assert (code, errors) == (1, "")


def test_no_step_behind_a_checkpoint_and_no_steps_are_refused(run, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    shutil.rmtree(copy / "checkpoints/00000003")
    assert "checkpoints of steps 4 and recorded no step behind" in refusal("diff", "--run", str(copy))
    assert "--steps is 0" in refusal("diff", "--run", str(run), "--steps", "0")
