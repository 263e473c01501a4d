"""The command line: a fixed list of commands; every error of the user is one sentence and exit code 2."""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.registry import experiments, find
from experiments.sweeps.registry import SWEEPS
from launch import cli
from launch.catalog import TABLES
from launch.tracking import progress
from suite.pipeline.model.layers import count_parameters
from tests.launch.command_line import call, environment, gpipe_here, refusal


def call_in_fresh_process(commands, forbidden, modules=()):
    """Calls commands, one after another, in one new process. Each is its arguments, or a dictionary: the environment of
    a shell that asks for a completion. Fails when one of them, or one of the ``modules``, imports a forbidden module.

    Returns what ``call`` does of each."""
    program = f"""
import importlib, json, os, sys
from tests.launch.command_line import call

answers = []
for name in {modules}:
    importlib.import_module(name)
for command in {commands}:
    asks_to_complete = isinstance(command, dict)
    os.environ.update(command if asks_to_complete else {{"_GPIPE_COMPLETE": ""}})
    answers.append(call(*([] if asks_to_complete else command.split())))
    imported = [name for name in {forbidden} if name in sys.modules]
    assert not imported, f"{{command}} imports {{imported}}"
print(json.dumps(answers))
"""
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], env=environment(), capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    return [tuple(answer) for answer in json.loads(done.stdout)]


@pytest.fixture(autouse=True)
def here(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


def test_the_list_of_commands_is_fixed():
    names = {command.name or command.callback.__name__ for command in cli.app.registered_commands}
    assert names == {
        "check", "checkpoints", "diff", "doctor", "experiment", "export", "generate",
        "list", "plan", "report", "resume", "runs", "score", "settings", "submit",
        "sweep", "sync", "table", "translate"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["experiment", "t128_6b", "--scale", "laptp"], ["unknown scale 'laptp'; did you mean laptop?"]),
        (["plan", "t128_6b", "--format", "xml"], ["unknown format 'xml'; known names: json, text"]),
        (["experiment", "t128_6b", "--set", "train.step=5"], ["train.step", "train.steps"]),
        (
            ["experiment", "t128_6b", "--set", "train.steps=50,pipeline.stages=2"],
            ["'train.steps=50,pipeline.stages=2' has settings with a comma between them; separate them by blanks"],
        ),
        (["check", ""], ["which experiment? Name one with NAME; gpipe list lists them"]),
        (["experiment", "t128_6b", "--set", "train.steps"], ["train.steps"]),
        (["experiment", "t128_6b", "--scale", "laptop", "--set", "pipeline.stages=500"], ["500", "131 layers"]),
        (["experiment", "t12_400m", "--scale", "laptop", "--set", "text.corpus=jango"], ["jango", "django"]),
        (["experiment", "t128_6b", "--set", "optimizer.learning_rate=inf"], ["optimizer.learning_rate", "inf"]),
        (["plan", "t128_6b", "--cluster", "16x16"], ["--cluster '16x16'", "16GiB", "2x8xH100"]),
        (["plan", "t128_6b", "--set", "pipeline.layers_per_cell=70,60"], ["hold 130 layers", "1 left out"]),
        (["resume", "nothing", "--launcher", "rai"], ["unknown launcher 'rai'; did you mean ray?"]),
        (["sweep", "depth_wide"], ["there is no sweep 'depth_wide'", "did you mean depth_width"]),
        (["sweep", "depth_width", "--scale", "laptp"], ["no scale 'laptp'", "did you mean laptop"]),
        (["sweep", "depth_width", "--scale", "paper"], ["at scale paper", "needs 8 GPUs", "CPU core"]),
        (["sweep", "transfer", "--scale", "laptop"], ["no scale 'laptop'", "omit SCALE"]),
        (["report", "capacity"], ["no run of the sweep capacity is finished yet"]),
        (["report"], ["no run of any sweep"]),
        (["report", "depth_width", "--run", "x"], ["both the sweep 'depth_width' and --run are given"]),
        (["table", "?"], [f"unknown table '?'; known names: {', '.join(sorted(TABLES))}"]),
        (["table", "breakdown"], ["has a trace yet"]),
        (["submit", "t128_6b", "--address", "http://127.0.0.1:1"], ["no Ray cluster answers at http://127.0.0.1:1"]),
        (["submit", "--address", "http://127.0.0.1:1"], ["which experiment or sweep?", "NAME", "depth_width"]),
        (["submit", "t128_6b", "--storage", "s3://KEY:SECRET@b/x"], ["is not a folder that nodes share"]),
        (
            ["experiment", "t128_6b", "--scale", "laptop", "--set", "train.checkpoint_dir=s3://b/x?region=a"],
            ["only a bucket and a path"],
        ),
        (["settings", "--set", "train.steps=5"], ["which experiment has train.steps=5?"]),
        (["resume", ""], ["no run given", "RUN"]),
        (["resume", "**x"], ["no run '**x'"]),
        (["resume", "nothing"], ["no run 'nothing'", "there are no runs"]),
        (["score", "x" * 5000], ["no run 'xxx", "xxx...': there are no runs"]),
        (["doctor", "--storage", "/" + "x" * 5000], ["xxx... is too long for a file name"]),
        (["doctor", "--storage", "s3://bucket/runs"], ["--storage s3://bucket/runs is a URL"]),
        (["doctor", "--address", "head"], ["--address head is not the address of a Ray cluster: use host:port"]),
        (["doctor", "--address", "127.0.0.1:9"], ["no Ray cluster answers at 127.0.0.1:9"]),
        (["translate", "nothing", "--to", "de", "--", os.fsdecode(b"na\xefve")], ["argument 6", "0xef after 2 char"]),
    ],
)
def test_an_error_of_the_user_is_one_sentence_and_exit_code_2(arguments, parts, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    code, _, printed = call(*arguments)
    assert (code, printed[:7]) == (2, "error: ")
    assert "Traceback" not in printed
    for part in parts:
        assert part in printed, printed


@pytest.mark.parametrize(
    ("address", "name", "parts"),
    [
        ("127.0.0.1:9", "t128_6b", ["no Ray cluster answers at 127.0.0.1:9", "unset RAY_ADDRESS"]),
        ("http://127.0.0.1:9", "t128_6b", ["http://127.0.0.1:9 is the address of a dashboard", "such as head:6379"]),
        ("127.0.0.1:9", "t128_6", ["did you mean t128_6b"]),
    ],
)
def test_a_plan_is_for_the_cluster_of_ray_address(address, name, parts, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", address)
    code, _, printed = call("plan", name)
    assert (code, printed[:7]) == (2, "error: ")
    for part in parts:
        assert part in printed


def test_a_plan_as_json_is_one_object_and_nothing_else(capfd, monkeypatch):
    monkeypatch.setattr(progress, "SILENT_S", 0.01)
    settings = ("--set", "pipeline.stages=2")
    code, out, errors = call("plan", "transformer_3", "--cluster", "2x16GiB", "--format", "json", *settings)
    assert code == 0, errors
    assert "planning transformer_3, " in errors
    assert capfd.readouterr().out == ""
    plan, (layers, _) = json.loads(out), find("transformer_3").build()
    assert (plan["parameters"], plan["K"], sum(plan["cells"])) == (count_parameters(layers), 2, len(layers))
    assert all(0 < stage["peak_bytes"] <= 16 * 2**30 for stage in plan["stages"])
    assert plan["hours"] == pytest.approx(plan["steps"] * plan["step_s"] / 3600)


@pytest.mark.parametrize(("command", "names"), [("table", TABLES), ("sweep", SWEEPS)])
def test_without_a_name_the_choices_are_listed(command, names, monkeypatch):
    monkeypatch.setattr(cli.console, "width", 200)
    printed = gpipe_here(".", command)
    for name in names:
        assert name in printed


def test_the_page_of_settings_is_what_the_program_prints():
    page = Path(__file__).parents[2] / "docs/settings.md"
    out = gpipe_here(".", "settings", "--format", "markdown")
    assert out == page.read_text(), "run: gpipe settings --format markdown > docs/settings.md"


def test_settings_fit_100_columns_also_in_a_pipe_and_have_an_experiments_values():
    lines = gpipe_here(".", "settings").splitlines()
    assert ["train.device_timeout_s", "60.0", "seconds"] in [line.split()[:3] for line in lines]
    assert len([line for line in lines if line.split()[:1] == ["pipeline.stages"]]) == 1
    arguments = ("settings", "t128_6b", "--scale", "paper", "--set", "train.steps=7", "--set", "train.seed=3")
    printed = gpipe_here(".", *arguments).splitlines()
    assert all(len(line) <= 100 for line in (*lines, *printed))
    rows = [line.split()[:3] for line in printed]
    assert ["pipeline.stages", "1", "16"] in rows
    assert ["train.steps", "100", "7"] in rows
    assert ["train.seed", "0", "3"] in rows
    assert ["model.blocks_per_stack", "required", "64"] in rows
    assert "images.size" not in str(printed)


def test_the_names_that_are_known_without_torch_are_all():
    assert sorted(cli.experiment_names()) == sorted(experiments())
    assert tuple(SWEEPS) == cli.SWEEP_NAMES


LIBRARIES = ("ray", "deepspeed", "datasets", "transformers", "torch._dynamo")

WRONG_NAMES = (
    *(f"{name} nosuch" for name in ("experiment", "plan", "settings", "check", "diff", "submit", "table", "sweep")),
    *(f"{name} no/such" for name in ("resume", "checkpoints", "score", "generate", "export", "report --run")),
    *("experiment", "plan", "report nosuch", "translate no/such --to de", "table breakdown --run no/such"),
)
COMPLETIONS = {
    "gpipe exp": ["experiment", "export"],
    "gpipe experiment t1": ["t12_400m", "t128_6b"],
    "gpipe experiment t128_6b --scale p": ["paper"],
}


def test_names_help_versions_and_completions_need_no_torch():
    scripts = [{"_GPIPE_COMPLETE": f"source_{shell}"} for shell in ("bash", "zsh", "fish")]
    asked = [
        {"_GPIPE_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
        for words in COMPLETIONS
    ]
    commands = [*WRONG_NAMES, "--help", "table", "--version", *scripts, *asked]
    answers = call_in_fresh_process(commands, ("torch", *LIBRARIES))
    count = len(WRONG_NAMES)
    for name, (code, out, errors) in zip(WRONG_NAMES, answers[:count], strict=True):
        assert (code, out, errors[:7], errors.count("\n")) == (2, "", "error: ", 1), name
    assert all(code == 0 and errors == "" for code, _, errors in answers[count:])
    _, table, versions, *completed = (out.splitlines() for _, out, _ in answers[count:])
    assert len(table) > len(TABLES)
    assert [line.split()[0] for line in versions] == ["gpipe-suite", "torch", "ray", "deepspeed", "Python"]
    assert versions[-1] == f"Python {platform.python_version()}"
    assert all(line.split()[1][0].isdigit() for line in versions)
    for shell, script in zip(("bash", "zsh", "fish"), completed[:3], strict=True):
        assert f"_GPIPE_COMPLETE=complete_{shell}" in "\n".join(script)
    assert completed[3:] == [*COMPLETIONS.values()]


def test_the_list_has_the_papers_sizes_and_fits_80_columns_without_breaking_a_word():
    """It imports no library but torch, nor do the list of runs and what the doctor is made of: Ray reads its variables
    when it is imported, which is to be on use alone."""
    of_doctor = ("launch.diagnostics.command", "launch.ray_nodes")
    (runs_code, *_), (code, out, errors) = call_in_fresh_process(["runs", "list"], LIBRARIES, of_doctor)
    assert (runs_code, code, errors) == (0, 0, "")
    printed = out.splitlines()
    rows = {line.split()[0]: line.split()[1:] for line in printed if line[:1] == " " and line.split()}
    assert rows["t128_6b"] == ["131", "6,040,979,968", "16", "8", "256", "4,000,000", "tokens"]
    assert rows["t12_400m"][1] == "408,209,920"
    assert rows.keys() >= experiments().keys()
    assert all(len(line) <= 80 for line in printed)
    assert {"(Helsinki-NLP/opus-100):", "(ILSVRC/imagenet-1k):"} <= set(" ".join(printed).split())


def test_the_help_of_make_fits_a_screen():
    command = ["make", "--no-print-directory", "-C", Path(cli.__file__).parents[1], "help"]
    lines = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
    assert 10 < len(lines) <= 24
    assert max(map(len, lines)) <= 80


def test_a_file_that_cannot_be_read_or_written_is_not_a_defect_of_the_suite(monkeypatch):
    for error, path in ((13, "/runs/x"), (30, "runs"), (2, ".cache")):  # the last in /proc

        def fail(number=error, path=path):
            raise OSError(number, os.strerror(number), path)

        monkeypatch.setattr("launch.catalog.experiments_table", fail)
        said = f"error: {path} cannot be read or written: {os.strerror(error)}; check its permissions or work elsewhere"
        assert refusal("list").startswith(said)


def test_any_other_exception_is_one_sentence_and_exit_code_1_with_its_traceback_in_a_log(monkeypatch, tmp_path):
    def fail():
        raise ZeroDivisionError("a bug\nof two lines")

    monkeypatch.setattr("launch.catalog.experiments_table", fail)
    code, _, errors = call("list")
    assert code == 1
    (printed,) = errors.splitlines()
    log = tmp_path / ".cache/errors.log"
    assert printed == f"error: ZeroDivisionError: a bug; this is a defect of the suite, the traceback is in {log}"
    assert "in fail\n" in log.read_text()
