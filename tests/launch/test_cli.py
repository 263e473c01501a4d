"""The command line: it is small and stays so, and every fault of a user is one sentence and exit code 2."""

import json
import subprocess
import sys

import pytest

from launch import cli


def gpipe(*arguments, monkeypatch):
    """Runs the command line in this process; returns its exit code."""
    monkeypatch.setattr(sys, "argv", ["gpipe", *arguments])
    with pytest.raises(SystemExit) as end:
        cli.main()
    return end.value.code or 0


@pytest.fixture(autouse=True)
def here(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


def test_the_commands_are_these_and_a_new_one_is_a_decision():
    names = {command.name or command.callback.__name__ for command in cli.app.registered_commands}
    assert names == {
        "bench", "checkpoints", "doctor", "experiment", "export", "fetch", "gpu-check", "jobs", "list", "logs", "plan",
        "report", "resume", "score", "stop", "submit", "sweep", "sync", "table", "translate",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["experiment", "t128_6"], ["t128_6", "did you mean t128_6b"]),
        (["experiment", "t128_6b", "--scale", "paper"], ["needs 128 GPUs", "GiB each", "there are", "CPU core"]),
        (["experiment", "t128_6b", "--set", "train.step=5"], ["train.step", "train.steps"]),
        (["experiment", "t128_6b", "--set", "train.steps=many"], ["train.steps", "integer", "many"]),
        (["experiment", "t128_6b", "--set", "train.steps"], ["train.steps"]),
        (["experiment", "t128_6b", "--scale", "laptop", "--set", "pipeline.stages=500"], ["500", "131 layers"]),
        (["experiment", "t12_400m", "--scale", "laptop", "--set", "text.corpus=jango"], ["jango", "django"]),
        (["experiment", "t128_6b", "--set", "optimizer.learning_rate=inf"], ["optimizer.learning_rate", "inf"]),
        (["plan", "t128_6"], ["t128_6", "did you mean t128_6b"]),
        (["plan", "transformer_0"], ["transformer_0"]),
        (["plan", "t128_6b", "--cluster", "16x16"], ["CLUSTER='16x16'", "16GiB", "2x8xH100"]),
        (["plan", "t128_6b", "--cluster", "axH100"], ["CLUSTER='axH100'", "[nodes x] devices x device"]),
        (["plan", "t128_6b", "--cluster", "16x16GiB"], ["layer 130 alone needs", "has 16.00 GiB", "nearest plans"]),
        (["plan", "t128_6b", "--cluster", "8xV100"], ["need 128 devices, there are 8 V100", "pipeline.stages=8"]),
        (["plan", "t128_6b", "--set", "pipeline.cells=70,60"], ["hold 130 layers", "1 left out"]),
        (["plan", "t128_6b", "--set", "pipeline.cells=70,62"], ["hold 132 layers", "1 too many"]),
        (["plan", "transformer_3", "--cluster", "2x1GiB"], ["alone needs", "has 1.00 GiB"]),
        (["plan", "transformer_3", "--set", "pipeline.stagez=2"], ["pipeline.stagez", "pipeline.stages"]),
        (["sweep", "transfr"], ["transfr", "did you mean transfer"]),
        (["sweep", "depth_wide"], ["no sweep is called 'depth_wide'", "did you mean depth_width"]),
        (["sweep", "depth_width", "--scale", "laptp"], ["no scale 'laptp'", "did you mean laptop"]),
        (["sweep", "depth_width", "--scale", "paper"], ["SCALE=paper", "needs 8 GPUs", "CPU core"]),
        (["sweep", "transfer", "--scale", "laptop"], ["no scale 'laptop'", "leave SCALE out"]),
        (["report", "capasity"], ["no sweep is called 'capasity'", "did you mean capacity"]),
        (["report", "capacity"], ["no run of the sweep capacity is finished yet"]),
        (["report"], ["no run of any sweep"]),
        (["bench", "sleepin"], ["no benchmark is called 'sleepin'", "sleeping"]),
        (["table", "6"], ["no table is called '6'", "efficiency"]),
        (["table", "breakdown"], ["has a trace yet"]),
        (["table", "breakdown", "--run", "nothing"], ["no run 'nothing'"]),
        (["gpu-check"], ["needs a CUDA device", "torch sees none", "nvidia-smi"]),
        (["submit", "t128_6", "--address", "http://127.0.0.1:1"], ["t128_6", "did you mean t128_6b"]),
        (["submit", "t128_6b", "--address", "http://127.0.0.1:1"], ["no Ray cluster answers at http://127.0.0.1:1"]),
        (["resume", ""], ["which run?", "RUN="]),
        (["resume", "**x"], ["no run '**x'"]),
        (["resume", "nothing"], ["no run 'nothing'", "there are no runs"]),
    ],
)
def test_a_users_fault_is_one_sentence_and_exit_code_2(arguments, parts, monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert gpipe(*arguments, monkeypatch=monkeypatch) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert "Traceback" not in said
    for part in parts:
        assert part in said, said


@pytest.mark.parametrize(
    ("address", "name", "parts"),
    [
        ("127.0.0.1:9", "t128_6b", ["no Ray cluster answers at 127.0.0.1:9", "unset RAY_ADDRESS"]),
        ("http://127.0.0.1:9", "t128_6b", ["http://127.0.0.1:9 is the address of a dashboard", "such as head:6379"]),
        ("127.0.0.1:9", "t128_6", ["did you mean t128_6b"]),
    ],
)
def test_a_plan_is_for_the_cluster_of_ray_address(address, name, parts, monkeypatch, capsys):
    monkeypatch.setenv("RAY_ADDRESS", address)
    assert gpipe("plan", name, monkeypatch=monkeypatch) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    for part in parts:
        assert part in said


def test_a_plan_as_json_is_one_object_and_nothing_else(monkeypatch, capfd):
    monkeypatch.setattr(sys, "argv", ["gpipe", "plan", "transformer_103", "--cluster", "8x16GiB", "--format", "json"])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert not end.value.code
    plan = json.loads(capfd.readouterr().out)
    assert (plan["parameters"], plan["K"], sum(plan["cells"])) == (5_318_006_016, 8, 105)
    assert all(0 < stage["peak_bytes"] <= 16 * 2**30 for stage in plan["stages"])
    assert plan["hours"] == pytest.approx(plan["steps"] * plan["step_s"] / 3600)


def test_the_list_has_the_five_runs_with_the_papers_sizes(monkeypatch, capsys):
    monkeypatch.setattr(cli.console, "width", 200)
    assert gpipe("list", monkeypatch=monkeypatch) == 0
    said = capsys.readouterr().out
    for name, parameters in [("t12_400m", "408,209,920"), ("t128_6b", "6,040,979,968")]:
        assert any(name in line and parameters in line for line in said.splitlines())


def test_help_needs_neither_torch_nor_ray():
    code = (
        "import sys, launch.cli; sys.argv = ['gpipe', '--help']\n"
        "try: launch.cli.main()\nexcept SystemExit: pass\n"
        "print(sorted(m for m in ('torch', 'ray', 'deepspeed') if m in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
