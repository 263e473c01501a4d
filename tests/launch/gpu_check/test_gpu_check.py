"""The GPU check, run on the CPU at tiny sizes: its parts, its files, and that it finds faults."""

import json
import math
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch.multiprocessing.spawn import ProcessRaisedException

from experiments.base.cluster import Cluster
from experiments.report.table import Table
from launch.gpu_check import command, device, gradients, parts, steps, two_stages, update
from launch.gpu_check.single_stage import SingleStageTrainer
from launch.gpu_check.work import MeanSquare, SkippedError, cell_workload, cpu_sizes, full_model_workload, paper_sizes
from models.shape import TransformerShape
from models.transformer import DecoderLayer, EncoderLayer
from suite.errors import NonFiniteError, PlacementError
from suite.pipeline.planning import profile
from suite.pipeline.planning.devices import GIB
from suite.pipeline.runtime.weight_grad import weight_grad_sum
from tests.suite.pipeline.runtime.test_communication_errors import system_error

CPU = torch.device("cpu")
TINY = TransformerShape(1, 32, 64, 2, 200, head_width=16)


def tiny_sizes():
    return replace(
        paper_sizes(), full=TINY, cell=replace(TINY, layers=4), cell_layers=2, rows=2, time=8, micro_batches=4,
        large_tokens=32, steps=3, product=64, product_repeats=2, product_rounds=2,
        gradients=TransformerShape(1, 16, 32, 2, 40, head_width=8, dropout=0.0), gradient_rows=5, gradient_time=6,
        gradient_micro_batches=3,
    )  # fmt: skip


def examine(folder, minutes=60.0, show=lambda table: None):
    lines: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(profile, "SECONDS_A_LAYER", 0.0)
        command.examine(CPU, tiny_sizes(), minutes, folder, lines.append, show, "a test")
    return json.loads((folder / "cpu.json").read_text()), lines


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The folder, the JSON object, the tables shown and the logged lines."""
    folder, shown = tmp_path_factory.mktemp("check"), []
    results, lines = examine(folder, show=shown.append)
    return folder, results, shown, lines


def test_the_paper_sizes_are_those_of_the_experiments():
    sizes = paper_sizes()
    assert (sizes.full.layers, sizes.full.feed_forward, sizes.full.heads) == (6, 8192, 16)
    assert (sizes.cell.layers, sizes.cell.feed_forward, sizes.cell.heads) == (64, 16384, 32)
    assert (sizes.cell_layers, sizes.rows, sizes.time, sizes.large_tokens) == (8, 16, 128, 8192)
    assert full_model_workload(sizes).parameters == 408_209_920


def test_every_part_is_done_and_its_numbers_are_in_the_json(written):
    _, results, _, _ = written
    assert list(results["parts"]) == [part.name for part in parts.PARTS]
    for name, part in results["parts"].items():
        assert (part["status"], part["faults"]) == ("done", []), (name, part)
    assert [one["dtype"] for one in results["parts"]["gradients"]["comparisons"]] == ["float64", "float32", "bfloat16"]
    for name in ("stage", "large_micro_batch", "decoder_stage", "full_model"):
        one = results["parts"][name]
        assert one["loss_fell"]
        assert len(one["measured"]["losses"]) == steps.WARM_UPS + 3
        assert one["planned_from_measured_costs"]["peak_bytes"] > 0
        m = one["micro_batches"]  # backward is two forwards, and all micro-batches but one are recomputed
        recomputed = one["computed"]["hardware_flops"] / one["computed"]["model_flops"]
        assert recomputed == pytest.approx((4 * m - 1) / (3 * m))
        assert 0 < one["computed"]["mfu"] < one["computed"]["hfu"]
    large = results["parts"]["large_micro_batch"]
    assert (large["micro_batches"], large["rows"], large["time"]) == (2, 4, 8)
    two = results["parts"]["two_stages"]
    assert (two["backend"], two["comparisons"][0]["parameters"]) == ("gloo", 40)
    update = results["parts"]["update"]
    assert (update["stages"], update["replicas"]) == (2, 2)
    assert update["measured"]["error"] < update["computed"]["tolerance"]


def test_the_page_has_every_table(written):
    folder, _, shown, lines = written
    text = (folder / "cpu.md").read_text()
    assert [table.name for table in shown] == ["gpu-parts", "gpu-gradients", "gpu-steps"]
    assert all(table.markdown() in text for table in shown)
    assert str(folder) in lines[-1]


def test_a_second_call_takes_finished_parts_and_runs_the_others(written, tmp_path, monkeypatch):
    _, results, _, _ = written
    changed = json.loads(json.dumps(results))
    changed["parts"]["full_model"] = {"status": "failed", "reason": "out of memory"}
    changed["parts"]["stage"]["faults"] = ["the loss is nan"]
    (tmp_path / "cpu.json").write_text(json.dumps(changed))
    ran = []
    original = parts._run
    monkeypatch.setattr(parts, "_run", lambda part, *rest: ran.append(part.name) or original(part, *rest))
    again, _ = examine(tmp_path)
    assert ran == ["stage", "full_model"]
    assert again["parts"]["gradients"] == results["parts"]["gradients"] | {"resumed": True}
    assert again["parts"]["stage"]["faults"] == []


@pytest.mark.parametrize("key", ["versions", "machine", "sizes"])
def test_results_of_another_version_device_or_size_are_not_taken(written, tmp_path, key):
    _, results, _, _ = written
    path = tmp_path / "cpu.json"
    same = {name: results[name] for name in ("versions", "machine", "sizes")}
    path.write_text(json.dumps(results))
    assert command._earlier(path, same) == results["parts"]
    assert command._earlier(path, same | {key: {}}) == {}
    path.write_text(json.dumps(results)[:-9])
    assert command._earlier(path, same) == {}


def test_a_part_starts_only_if_its_estimate_fits(tmp_path):
    results, lines = examine(tmp_path, minutes=0.05)
    assert {part["status"] for part in results["parts"].values()} == {"not run"}
    assert results["parts"]["gradients"]["reason"].startswith("its estimate of 15 s is more than the 3 s left")
    assert any("gradients: not run" in line for line in lines)


def test_a_part_that_fails_does_not_end_the_others(tmp_path):
    def fail(sizes, device):
        raise RuntimeError("CUDA out of memory\nand more")

    two = (parts.Part("a", "a", 1, 1, fail), parts.Part("b", "b", 1, 1, lambda *_: {"faults": []}))
    found = parts.run_parts(tiny_sizes(), CPU, 1, {}, lambda text: None, lambda records: None, two)
    assert found["a"]["status"] == "failed"
    assert found["a"]["reason"] == "RuntimeError: CUDA out of memory"
    assert found["b"]["status"] == "done"


def test_an_earlier_fault_is_not_forgotten_when_its_part_does_not_run_again(written, tmp_path):
    _, results, _, _ = written
    changed = json.loads(json.dumps(results))
    changed["parts"]["gradients"]["faults"] = ["float32 gradients differ"]
    (tmp_path / "cpu.json").write_text(json.dumps(changed))
    with pytest.raises(NonFiniteError, match="float32 gradients differ; do not train on this device"):
        examine(tmp_path, minutes=0.05)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (
            {"status": "failed", "reason": "RuntimeError: boom"},
            "stage failed: RuntimeError: boom; the next call runs it",
        ),
        ({"over_plan": "8 layers held 3.20 GiB and the plan says 3.00"}, "3.20 GiB and the plan says 3.00; plans for"),
    ],
)
def test_a_failed_part_and_a_peak_above_the_plan_end_with_a_sentence(written, tmp_path, part, message):
    _, results, _, _ = written
    changed = results["parts"] | {"stage": results["parts"]["stage"] | part}
    with pytest.raises(PlacementError, match=message):
        command._raise_faults(changed, tmp_path)
    command._raise_faults(results["parts"], tmp_path)


def test_a_peak_above_its_plan_is_named_with_both_numbers():
    assert steps.over_plan("a stage", GIB, GIB) is None
    assert steps.over_plan("a stage", 2 * GIB, GIB) == "a stage held 2.00 GiB and the plan says 1.00"


def test_a_device_that_cannot_go_on_ends_the_check_with_the_part_saved(monkeypatch):
    def fail(device):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(steps, "empty_cache", fail)
    saved, lines = {}, []
    two = tuple(parts.Part(name, name, 1, 1, lambda *_: {"faults": []}) for name in "ab")
    parts.run_parts(tiny_sizes(), CPU, 1, {}, lines.append, saved.update, two)
    assert list(saved) == ["a"]
    assert "the device cannot go on after a: RuntimeError: CUDA error: an illegal memory access" in lines[-1]


def test_one_gpu_skips_two_stages_with_the_reason(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(SkippedError, match="NCCL refuses two ranks on one GPU"):
        two_stages.measure_two_stages(tiny_sizes(), torch.device("cuda"))


def test_an_error_of_a_thousandth_is_found_and_written(monkeypatch, tmp_path):
    original = gradients.run_batch
    results = []

    def run_batch(shape, stages, batch):
        result = original(shape, stages, batch)
        results.append(result)
        if len(results) % 2 == 0:  # the device's; the CPU is first
            worst = result[1, "feed.inward.weight"]
            worst.view(-1)[worst.abs().argmax()] *= 1.001
        return result

    sizes = tiny_sizes()
    batch = gradients._make_batch(sizes, 0)
    monkeypatch.setattr(gradients, "choose_batch", lambda sizes: (batch, 1.0))
    monkeypatch.setattr(gradients, "run_batch", run_batch)
    monkeypatch.setattr(parts.run_parts, "__defaults__", (parts.PARTS[:1],))
    with pytest.raises(NonFiniteError, match=r"layer 1, feed\.inward\.weight: by 0\.001 .*do not train on this device"):
        examine(tmp_path)
    found = json.loads((tmp_path / "cpu.json").read_text())["parts"]["gradients"]
    assert len(found["faults"]) == 2
    for comparison in found["comparisons"][:2]:
        assert comparison["worst"] == "layer 1, feed.inward.weight"
        assert comparison["measured"]["error"] == pytest.approx(1e-3, rel=1e-2)


def test_a_product_that_drops_its_sum_is_found(monkeypatch):
    assert gradients.compare_sum(64, CPU).fault is None
    monkeypatch.setattr(gradients, "weight_grad_sum", lambda total, *rest: weight_grad_sum(None, *rest))
    assert "bfloat16 gradients of this device differ" in gradients.compare_sum(64, CPU).fault


def test_a_non_finite_number_is_a_fault():
    bad = gradients.Difference(0, "weight", float("nan"))
    fine = gradients.Difference(0, "bias", 0.0)
    comparison = gradients.Comparison("float32", (fine, bad), 1e-5, 1.0)
    assert comparison.worst is bad
    assert "layer 0, weight: by nan" in comparison.fault
    sizes = tiny_sizes()
    work = replace(cell_workload(sizes, EncoderLayer), loss=InfiniteLoss())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(profile, "SECONDS_A_LAYER", 0.0)
        record = steps.measure_training(work, sizes, CPU)
    assert record["faults"][0].endswith("is inf in step 0")
    json.dumps(command._jsonable(record), allow_nan=False)


class InfiniteLoss(MeanSquare):
    def forward(self, x, *rest):
        objective, measure = super().forward(x, *rest)
        return objective + float("inf"), measure


def test_gradients_are_those_of_the_whole_model():
    """Compares the two stages with autograd over the unpartitioned model: both devices could have the same error."""
    from suite.pipeline.model.layers import ties_of
    from tests.suite.pipeline.build import unpartitioned

    sizes = tiny_sizes()
    batch = gradients._make_batch(sizes, 0)
    made, loss = gradients.model(sizes.gradients, torch.float64)
    ties = {(index, name): tie for index, layer in enumerate(made) for name, tie in ties_of(layer).items()}
    staged = gradients.stages_of(sizes.gradients, torch.float64, CPU)
    staged[1].layers[0].weight.data.copy_(staged[0].layers[0].weight.data)  # the tied copy, as in a run
    computed = gradients.run_batch(sizes.gradients, staged, batch)
    _, expected = unpartitioned(made, loss, batch, step=0, seed=0)
    total = sum(computed[key] for key in ties)
    for key, gradient in computed.items():
        torch.testing.assert_close(total if key in ties else gradient, expected[key], rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("kind", [EncoderLayer, DecoderLayer])
def test_losses_of_the_steps_fall(kind):
    sizes = tiny_sizes()
    trainer = SingleStageTrainer(cell_workload(sizes, kind), CPU, sizes.optimizer)
    losses = []
    for step in range(4):
        losses.append(trainer.train(step))
        trainer.update()
    assert losses == sorted(losses, reverse=True)


def test_a_device_smaller_than_a_layer_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(device, "memory_limit_bytes", lambda: 1 << 20)
    with pytest.raises(PlacementError, match=r"layers of 0\.\d\d GiB each.*the CPU has 0\.00 GiB; use a larger device"):
        command.examine(CPU, cpu_sizes(), 5, tmp_path, print, print, "a test")


def test_a_gpu_without_bf16_is_refused(monkeypatch):
    monkeypatch.setattr(device, "gpus", lambda: Cluster(1, 16 * GIB, "gpu", name="Tesla V100", has_bf16=False))
    with pytest.raises(PlacementError, match=r"^Tesla V100, or another GPU here, multiplies no bf16.*capability 8\.0"):
        device.find_device("cuda")


def test_an_update_says_where_deepspeed_is_missing(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SkippedError, match="a run's update is DeepSpeed's, and it is not installed"):
        update.measure_update(tiny_sizes(), CPU)


@pytest.mark.parametrize(
    ("found", "fault"),
    [
        (([1.0, 2.0], False), "worker 1 kept its weights"),
        (([1.0, 2.2], True), "a layer's gradient norm of worker 1 differs from the CPU's by 0.1, with "),
        (([1.0, math.nan], True), "a layer's gradient norm of worker 1 differs from the CPU's by nan, with "),
    ],
)
def test_an_update_that_is_wrong_on_one_worker_is_a_fault(monkeypatch, found, fault):
    fine = ([1.0, 2.0], True)
    monkeypatch.setattr(update, "_on_cpu", lambda sizes, batch: ({}, [1.0, 2.0]))
    monkeypatch.setattr(update, "run_spawned", lambda run, world, *rest: [fine, found, fine, fine])
    record = update.measure_update(tiny_sizes(), CPU)
    assert len(record["faults"]) == 1
    assert record["faults"][0].startswith(fault)


def test_a_spawned_process_that_fails_gives_its_own_reason():
    trace = "\n\n-- Process 1 terminated with the following error:\nTraceback (most recent call last):\n  File ...\n"
    failed = ProcessRaisedException(trace + "AssertionError: DeepSpeed moved the stage from cuda:1 to cuda:0\n", 1, 7)
    assert steps.reason(failed) == (
        "ProcessRaisedException: AssertionError: DeepSpeed moved the stage from cuda:1 to cuda:0"
    )
    full = system_error("Error while creating shared memory segment /dev/shm/nccl-1YsMbG (size 7340384)")
    assert steps.reason(ProcessRaisedException(trace + full, 1, 7)).startswith("NCCL has too little shared memory")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            [],
            f"error: gpu-check needs a GPU: torch {torch.__version__}, which is built without CUDA, sees no GPU",
        ),
        (["--device", "tpu"], "error: gpu-check has no device 'tpu'"),
        (["--minutes", "0", "--device", "cpu"], "error: --minutes is 0; gpu-check needs more than 0"),
        (["--minutes", "nan"], "error: --minutes is nan"),
    ],
)
def test_as_a_module_bad_input_is_one_sentence(arguments, sentence):
    call = [sys.executable, "-m", "launch.gpu_check", *arguments]
    done = subprocess.run(call, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr.startswith(sentence)
    assert len(done.stderr.splitlines()) == 1


def test_without_rich_tables_are_printed_as_markdown(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    _, show = command._terminal()
    show(Table("a", "A title", ("x",), [[1]], ()))
    assert "### A title" in capsys.readouterr().out


def test_it_imports_no_other_pinned_packages_than_torch_numpy_and_pydantic():
    forbidden = (
        "datasets", "deepspeed", "django", "filelock", "fsspec", "matplotlib", "PIL", "pyarrow", "ray", "rich",
        "safetensors", "tokenizers", "tomli_w", "transformers", "typer", "wandb",
    )  # fmt: skip
    code = (
        "import sys, torch, torch.profiler, torch.distributed, torch._subclasses.fake_tensor\n"
        f"sys.modules.update(dict.fromkeys({forbidden!r}))  # an import of any of these now fails\n"
        "from launch.gpu_check import command, device, parts, report\n"
        "from launch.gpu_check.work import paper_sizes\n"
        "paper_sizes()\n"
    )
    subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=120, check=True)


def test_a_missing_package_is_one_sentence(monkeypatch, capsys):
    monkeypatch.setattr(command, "NEEDED", ("torch", "no_such_package"))
    monkeypatch.setattr(sys, "argv", ["gpu_check"])
    with pytest.raises(SystemExit) as end:
        command.main()
    assert end.value.code == 2
    assert "this Python lacks no_such_package" in capsys.readouterr().err
