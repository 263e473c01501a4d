"""Complete runs from the command line, on real text; one of them through Ray."""

import json
import re
import shutil
from collections import Counter

import filelock
import pytest

from experiments.base.cluster import Cluster
from launch.runs.store import RunFolder
from suite.errors import SuiteError
from suite.pipeline.planning.devices import DEVICES
from suite.training.jsonl import read_lines
from suite.training.metrics import read_steps
from tests.launch.command_line import SMALL, call, gpipe_at_once, gpipe_here, losses, only_run, refusal
from tests.launch.tracking.wandb_parts import parts


@pytest.fixture(scope="module")
def through_ray(tmp_path_factory, cache):
    folder = tmp_path_factory.mktemp("ray")
    (folder / ".cache").symlink_to(cache)
    settings = f"{SMALL} train.steps=6 pipeline.stages=2"
    printed = gpipe_at_once(folder, ("experiment", "t24_1_3b_wide", "--scale", "laptop", "--set", settings))
    return folder, printed


def test_a_run_through_ray_writes_a_complete_record(through_ray):
    folder, printed = through_ray
    run = only_run(folder)
    record = json.loads((run / "record.json").read_text())
    assert record | {
        "name": "t24_1_3b_wide", "scale": "laptop", "data": "django", "K": 2, "R": 1, "M": 3, "layers": 7, "steps": 6,
    } == record  # fmt: skip
    *lines, validated = read_lines(run / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert (validated["step"], validated["valid/nll"]) == (6, record["valid_nll"])
    tokens = record["valid_tokens"]
    mean = sum(validated[f"valid/nll/{language}"] * count for language, count in tokens.items()) / sum(tokens.values())
    assert mean == pytest.approx(validated["valid/nll"])
    assert (record["loss_first"], record["loss_last"]) == (lines[0]["train/loss"], lines[-1]["train/loss"])
    assert record["tokens"] == lines[-1]["train/tokens"] >= 6 * 200
    assert record["seconds"] == pytest.approx(sum(line["throughput/step_s"] for line in lines))
    assert record["tokens_per_second"] == pytest.approx(record["tokens"] / record["seconds"])
    assert 0 < record["baseline_nll"] < record["valid_nll"] < 9  # six steps learn little
    assert record["parameters"] > 1200 * 64
    assert sorted(path.name for path in (run / "logs").iterdir()) == ["stage-0-0.log", "stage-0-1.log"]
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["00000003", "00000006", "owner.json"]
    for word in ("validation:", "unigram entropy", "peak memory", f"{record['valid_nll']:.3f}", str(run)):
        assert word in printed.replace("\n", " "), printed


def test_a_run_writes_the_plan_that_it_used(through_ray):
    folder, printed = through_ray
    run = only_run(folder)
    plan = json.loads((run / "plan.json").read_text())
    assert (plan["K"], plan["R"], plan["M"], plan["layers"], plan["steps"]) == (2, 1, 3, 7, 6)
    assert plan["measured"]
    assert len(plan["cells"]) == 2
    assert sum(plan["cells"]) == 7
    assert plan["parameters"] == json.loads((run / "record.json").read_text())["parameters"]
    lines = (run / "plan.txt").read_text().splitlines()
    assert lines[0].startswith("plan of t24_1_3b_wide on ")
    assert "simulated from measured layer costs" in lines[0]
    cut = plan["cells"][0]
    for stage, layers in enumerate((f"layers 0-{cut - 1} ({cut})", f"layers {cut}-6 ({7 - cut})")):
        assert sum(line.startswith(f"  stage {stage}: {layers}, ") for line in lines) == 1
    assert sum(line.startswith("  6 steps of 200 tokens") for line in lines) == 1
    assert sum(line.endswith("<- this plan") for line in lines) == 1
    assert set(lines) - set(printed.splitlines()) == {
        line for line in lines if re.search("  [0-9]+ of |schedules that", line)
    }


def test_a_run_writes_a_trace_and_its_plot(through_ray):
    folder, printed = through_ray
    run = only_run(folder)
    events = json.loads((run / "trace.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert all(event["ts"] >= 0 and event["dur"] >= 0 for event in spans)
    seen = Counter((event["args"]["step"], event["tid"], event["name"]) for event in spans)
    actions = ["F0", "F1", "F2", "B0", "B1", "B2", "U"]  # the memory is enough, so nothing is recomputed
    # the first two steps of the six warm up
    assert seen == Counter((step, stage, name) for step in (2, 3, 4, 5) for stage in (0, 1) for name in actions)
    for step in (2, 3, 4, 5):
        at = {(event["tid"], event["name"]): event for event in spans if event["args"]["step"] == step}
        for i in range(3):  # a stage begins when its neighbour is done
            assert at[1, f"F{i}"]["ts"] >= at[0, f"F{i}"]["ts"] + at[0, f"F{i}"]["dur"]
            assert at[0, f"B{i}"]["ts"] >= at[1, f"B{i}"]["ts"] + at[1, f"B{i}"]["dur"]
    assert (run / "timeline.png").read_bytes().startswith(b"\x89PNG")
    done = printed[printed.index("\nreport: ") :].splitlines()[2:]
    begins = [line.partition(":")[0].partition(" ")[0] for line in done]
    assert begins[:4] == ["done", "step", "wall", "loss"]
    assert "folder" in begins[4:], "behind some translations"
    assert re.match(r"wall time: .*planning .*, start of the workers .*, training .*", done[2])


def test_a_run_writes_its_page_which_needs_no_other_file_and_says_how_the_run_went(through_ray):
    folder, printed = through_ray
    run = RunFolder(only_run(folder))
    assert f"report: {run.report}" in printed
    page = run.report.read_text()
    for text in ("<script", "<link", "@import", "src=", 'href="http', "url(http", "<image"):
        assert text not in page, text
    links = set(re.findall(r'<a href="([^"]+)"', page))
    assert links >= {"metrics.jsonl", "record.json", "attempts.jsonl", "logs/stage-0-1.log", "checkpoints/00000006/"}
    assert all((run.path / link).exists() for link in links)
    record, plan = (json.loads(path.read_text()) for path in (run.record, run.plan_json))
    facts = dict(re.findall(r"<dt>([^<]+)</dt><dd>([^<]+)</dd>", page))
    assert (facts["state"], facts["step"], facts["K x R, M"]) == ("finished", "6 of 6", "2 x 1, 3")
    assert facts["loss"] == f"{record['loss_last']:.4f}"
    assert facts["validation nll"] == f"{record['valid_nll']:.4f}"
    assert all(f">{stage['first_layer']}-{stage['last_layer']}</td>" in page for stage in plan["stages"])
    assert "train.batch_tokens" in page  # shrunk by the scale
    assert page.count("<svg") >= 6
    timeline = page[page.index("Timeline of a step") :]
    assert all(f">{name}</text>" in timeline for name in ("F0", "B2", "stage 1"))
    assert "simulated: " in timeline


def test_a_run_is_told_with_the_commands_that_make_sense(through_ray, tmp_path):
    folder, _ = through_ray
    run = only_run(folder)
    told = gpipe_here(folder, "runs", run.name)
    for part in (f"{run.name}: finished", "step 6/6", "checkpoints of steps 3, 6"):
        assert part in told
    for verb in ("report --run", "score", "export"):
        assert f"gpipe {verb} t24_1_3b_wide/{run.name}" in told
    assert f'gpipe translate t24_1_3b_wide/{run.name} --to de "' in told
    shutil.copytree(run, tmp_path / "runs/t24_1_3b_wide/italian")
    text = (run / "experiment.toml").read_text().replace("[text]\n", '[text]\nlanguages = ["it"]\n')
    (tmp_path / "runs/t24_1_3b_wide/italian/experiment.toml").write_text(text)
    assert 'gpipe translate t24_1_3b_wide/italian --to it "' in gpipe_here(tmp_path, "runs", "italian")


class StartedError(SuiteError):
    """Raised where workers would be started."""


@pytest.fixture
def small_machine(tmp_path, monkeypatch):
    """This process's machine has four cores with ``limit`` bytes each, measures nothing, and cannot start workers."""
    monkeypatch.chdir(tmp_path)

    def refuse(*arguments, **options):
        raise StartedError("workers were started")

    def of(limit):
        monkeypatch.setattr("launch.backends.backend.this_machine", lambda: Cluster(4, limit, "cpu"))

    monkeypatch.setattr("launch.planning.layer_costs.LEAST_ROUNDS", 10**9)  # too many to measure: costs are estimated
    monkeypatch.setattr("launch.planning.layer_costs.this_device", lambda memory: DEVICES["TPUv3"])
    monkeypatch.setattr("launch.backends.processes.run_processes", refuse)
    return of


@pytest.mark.slow
def test_a_run_that_does_not_fit_is_rejected_before_any_worker_starts(small_machine, tmp_path):
    settings = f"{SMALL} train.steps=6 pipeline.stages=2"
    arguments = ["experiment", "t24_1_3b_wide", "--scale", "laptop", "--launcher", "local", "--set", settings]
    small_machine(7 * 2**19)  # of four cores: 7 MiB for each of two workers, 4.9 without the reserve
    code, _, said = call(*arguments)
    assert code == 2
    assert said.startswith(
        "error: stage 0 (layers 0-4) needs 0.01 GiB, the device has 0.01 GiB (0.00 GiB after a reserve of 30%); all "
        "stages share the memory"
    )
    assert "Traceback" not in said
    assert "workers were started" not in said
    assert not [path for path in tmp_path.glob("runs/*/*/**/*") if path.is_file() and path.name != "lock"]
    code, _, said = call("resume", "t24_1_3b_wide")
    assert code == 2
    assert "there are no runs" in said
    small_machine(2**30)
    code, _, said = call(*arguments)
    assert (code, said.strip()) == (2, "error: workers were started")


def test_wandb_reads_the_run_back(through_ray):
    folder, _ = through_ray
    run = only_run(folder)
    record, plan = (json.loads((run / name).read_text()) for name in ("record.json", "plan.json"))
    trained, added = parts(run)
    assert {part.run["run_id"] for part in (trained, added)} == {record["wandb_run"]}
    assert trained.run["display_name"] == f"t24_1_3b_wide/{run.name}"
    assert set(trained.run["tags"]) == {"laptop", "django", plan["schedule"], "K=2", "M=3", "R=1"}
    assert "run_group" not in trained.run  # it is of no sweep
    assert trained.config["train"]["steps"] == 6
    assert trained.config["model"]["blocks_per_stack"] == 2
    assert trained.config["plan"] == {
        "cells": plan["cells"],
        "schedule": plan["schedule"],
        "virtual_stages": 1,
        "max_live_graphs": [3],
        "step_s": plan["step_s"],
    }
    assert trained.metrics == {"step": None} | {
        f"{namespace}/*": "step" for namespace in ("train", "valid", "throughput", "memory", "pipeline", "scores")
    }
    steps = [item for item in trained.history if "train/loss" in item]
    for name, value in read_steps(run / "metrics.jsonl")[-1].items():
        assert steps[-1][name] == pytest.approx(value), name
    assert [item["step"] for item in steps] == [1, 2, 3, 4, 5, 6]
    assert [item["train/loss"] for item in steps] == losses(run)
    (validated,) = [item for item in trained.history if "valid/nll" in item]
    assert (validated["step"], validated["valid/nll"]) == (6, record["valid_nll"])
    assert sum(name.startswith("valid/nll/") for name in validated) > 1  # by language
    for stage in (0, 1):
        noted = json.loads((run / "system" / f"0-{stage}.jsonl").read_text().splitlines()[-1])
        assert (noted["step"], noted["attempt"]) == (6, 1)
        for name in ("cpu_percent", "resident_bytes", "waiting_percent"):
            (*_, last) = (item for item in trained.history if f"pipeline/stage.0.{stage}/{name}" in item)
            assert last["step"] == 6
            assert last[f"pipeline/stage.0.{stage}/{name}"] == noted[name]
    assert [(item["step"], item["pipeline/timeline.format"]) for item in added.history] == [(6, "png")]
    assert added.artifacts == {
        f"plan-{record['wandb_run']}": {"experiment.toml", "plan.json", "plan.txt"},
        f"timeline-{record['wandb_run']}": {"timeline.png", "trace.json"},
    }


def test_a_finished_run_is_not_resumed_but_can_train_longer_with_another_k(through_ray):
    folder, _ = through_ray
    run = only_run(folder)
    assert "has finished all 6 steps" in refusal("resume", run.name, "--launcher", "local", folder=folder)
    before = losses(run)
    longer = "train.steps=8 pipeline.stages=1 pipeline.replicas=2"
    printed = gpipe_here(folder, "resume", run.name, "--launcher", "local", "--set", longer)
    assert "resumed at step 6" in printed
    assert "measured:" not in printed  # two steps are too few to be traced, and those of two stages are another plan's
    assert losses(run)[:6] == before
    assert len(losses(run)) == 8
    record = json.loads((run / "record.json").read_text())
    assert (record["K"], record["R"], record["steps"]) == (1, 2, 8)
    added = parts(run)
    assert {part.run["run_id"] for part in added} == {record["wandb_run"]}
    assert set(added[-1].run["tags"]) >= {"K=1", "R=2"}


def test_a_run_that_another_process_uses_is_not_touched(through_ray):
    folder, _ = through_ray
    run = only_run(folder)
    with filelock.FileLock(run / "lock"):
        said = refusal("resume", run.name, "--launcher", "local", "--set", "train.steps=50", folder=folder)
    assert f"another process is using run {run}" in said


def test_a_resumed_run_keeps_its_model(through_ray):
    folder, _ = through_ray
    said = refusal("resume", only_run(folder).name, "--set", "model.blocks_per_stack=3", folder=folder)
    assert "cannot change model" in said
