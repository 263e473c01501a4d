"""The command line: it is small and stays so, and every fault of a user is one sentence and exit code 2."""

import json
import os
import subprocess
import sys

import pytest

from experiments.registry import experiments
from experiments.sweeps import SWEEPS
from launch import cli
from launch.listing import TABLES


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
        (["submit", "--address", "http://127.0.0.1:1"], ["which experiment or sweep?", "NAME=", "depth_width"]),
        (["submit", "t128_6b", "--storage", "s3://KEY:SECRET@b/x"], ["only a bucket and a path"]),
        (["experiment", "t128_6b", "--set", "train.checkpoints=s3://b/x?region=a"], ["only a bucket and a path"]),
        (["resume", ""], ["which run?", "RUN="]),
        (["resume", "**x"], ["no run '**x'"]),
        (["resume", "nothing"], ["no run 'nothing'", "there are no runs"]),
        (["score", "x" * 5000], ["no run 'xxx", "xxx...': there are no runs"]),
        (["doctor", "--storage", "/" + "x" * 5000], ["xxx... is too long for the name of a file"]),
        (["translate", "nothing", "--to", "de", "--", os.fsdecode(b"na\xefve")], ["argument 6", "0xef after 2 char"]),
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


@pytest.mark.parametrize(
    ("command", "names"),
    [
        ("table", [*TABLES]),
        ("sweep", [*SWEEPS]),
        ("plan", [*experiments(), "transformer_<L>", "amoebanet_<L>x<D>"]),
        ("experiment", [*experiments()]),
    ],
)
def test_without_a_name_what_there_is_is_listed(command, names, monkeypatch, capsys):
    monkeypatch.setattr(cli.console, "width", 200)
    assert gpipe(command, monkeypatch=monkeypatch) == 0
    said = capsys.readouterr().out
    for name in names:
        assert name in said


def test_the_listed_tables_are_those_that_can_be_made(monkeypatch, capsys):
    assert gpipe("table", "?", monkeypatch=monkeypatch) == 2
    assert capsys.readouterr().err.strip().endswith(f"known names: {', '.join(sorted(TABLES))}")


def test_the_list_fits_a_terminal_of_80_columns_without_breaking_a_word(monkeypatch, capsys):
    monkeypatch.setattr(cli.console, "width", 80)
    assert gpipe("list", monkeypatch=monkeypatch) == 0
    said = capsys.readouterr().out.splitlines()
    rows = [line for line in said if line.startswith(" t128_6b")]
    assert len(rows) == 1
    assert rows[0].split() == ["t128_6b", "131", "6,040,979,968", "16", "8", "256", "4,000,000", "tokens"]
    assert all(len(line) <= 80 for line in said)
    assert {"(Helsinki-NLP/opus-100):", "(ILSVRC/imagenet-1k):"} <= set(" ".join(said).split())


def test_help_needs_neither_torch_nor_ray():
    code = (
        "import sys, launch.cli; sys.argv = ['gpipe', '--help']\n"
        "try: launch.cli.main()\nexcept SystemExit: pass\n"
        "print(sorted(m for m in ('torch', 'ray', 'deepspeed') if m in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_file_that_may_not_be_read_is_no_defect_of_the_suite(monkeypatch, capsys):
    def fail():
        raise PermissionError(13, "Permission denied", "/runs/x")

    monkeypatch.setattr("launch.listing.table", fail)
    assert gpipe("list", monkeypatch=monkeypatch) == 2
    assert capsys.readouterr().err == ("error: /runs/x cannot be read or written: Permission denied; see who owns it\n")


def test_a_jobs_secret_that_cannot_be_had_is_one_sentence(monkeypatch, capsys):
    def fail():
        raise RuntimeError("no head")

    monkeypatch.setenv("GPIPE_JOB", "j")
    monkeypatch.setattr("launch.jobs.secrets.take", fail)
    assert gpipe("list", monkeypatch=monkeypatch) == 1
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("error: RuntimeError: no head; this is a defect of the suite")


def test_any_other_exception_is_one_sentence_and_exit_code_1_with_its_traceback_in_a_log(monkeypatch, capsys, tmp_path):
    def fail():
        raise ZeroDivisionError("a bug\nof two lines")

    monkeypatch.setattr("launch.listing.table", fail)
    assert gpipe("list", monkeypatch=monkeypatch) == 1
    (said,) = capsys.readouterr().err.splitlines()
    log = tmp_path / ".cache/errors.log"
    assert said == f"error: ZeroDivisionError: a bug; this is a defect of the suite, its traceback is in {log}"
    assert "in fail\n" in log.read_text()
