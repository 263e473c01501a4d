"""The GPU check, run on the CPU at tiny sizes: its parts, its files, and that it finds faults."""

import json
import math
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from experiments.base.cluster import Cluster
from launch.worker.measure import MeasuredPipeline, Steps
from models.shape import TransformerShape
from suite.errors import PlacementError
from suite.pipeline.planning.devices import GIB
from suite.pipeline.runtime.weight_grad import weight_grad_sum
from tests.gpu import check as command
from tests.gpu import gradients, step, work, workers
from tests.gpu.check import DeviceError
from tests.suite.pipeline.runtime.test_communication_errors import system_error

CPU = Cluster(2, 4 * GIB, "cpu")
TINY = work.Sizes(
    TransformerShape(1, 16, 32, 2, 40, head_width=8, dropout=0.0),
    f"{work.ONE_STAGE} pipeline.micro_batches=4 train.batch_tokens=64 model.blocks_per_stack=1 model.width=32 "
    "model.feed_forward=64 model.heads=2 model.head_width=16 text.vocabulary=300 text.max_length=8",
)


def check(folder):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(work, "SMALL", TINY)
        command.check("cpu", folder)
    return json.loads((folder / "cpu.json").read_text())


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The folder, and what is in its file."""
    folder = tmp_path_factory.mktemp("check")
    return folder, check(folder)


def test_every_part_is_done_and_its_numbers_are_in_both_files(written):
    folder, results = written
    assert list(results["parts"]) == [part.name for part in command.all_parts()]
    for name, part in results["parts"].items():
        assert (part["status"], part["faults"]) == ("done", []), (name, part)
    one, two, exact = results["parts"]["gradients"], results["parts"]["two_stages"], results["parts"]["update"]
    assert [what.split(":")[0] for what, _, _ in one["rows"]] == ["float64", "float32", "bfloat16"]
    assert two["rows"][0][0].startswith("K = 2, float32: layer ")
    assert two["rows"].pop() == ["gradients of K = 2 that are not the bits of K = 1", 0, 0]
    assert exact["rows"][0][0].startswith("K = 2, R = 2, float32 norms: a layer of worker ")
    for part in (one, two, exact):
        assert all(0 <= measured < allowed for _, measured, allowed in part["rows"])
    (_, seconds, planned_s), (_, gib, planned_gib) = results["parts"]["step"]["rows"]
    assert min(seconds, planned_s) > 0
    assert 0 < gib <= planned_gib
    rows = [line for line in (folder / "cpu.md").read_text().splitlines() if line.startswith("| ")]
    assert [row.split(" | ")[0] for row in rows[2:]] == [
        *["| gradients"] * 3, "| update", *["| step"] * 2, *["| two_stages"] * 2,
    ]  # fmt: skip


def test_a_part_that_fails_does_not_end_the_others(monkeypatch, tmp_path):
    def fail(sizes, machine):
        raise RuntimeError("CUDA out of memory\nand more")

    two = (command.Part("a", "a", fail), command.Part("b", "b", lambda *_: {"faults": []}))
    monkeypatch.setattr(command, "all_parts", lambda: two)
    with pytest.raises(PlacementError, match=r"^a failed: RuntimeError: CUDA out of memory$"):
        check(tmp_path)
    found = json.loads((tmp_path / "cpu.json").read_text())["parts"]
    assert (found["a"]["status"], found["b"]["status"]) == ("failed", "done")


def test_a_peak_above_the_plan_ends_with_a_sentence(written, tmp_path):
    _, results = written
    assert step.over_plan(GIB, GIB) is None
    over = results["parts"]["step"] | {"over_plan": step.over_plan(2 * GIB, GIB)}
    with pytest.raises(PlacementError, match=r"held 2\.00 GiB and the plan says 1\.00; plans for"):
        command.raise_faults(results["parts"] | {"step": over}, tmp_path)
    command.raise_faults(results["parts"], tmp_path)


@pytest.mark.slow
def test_a_step_computes_logits_in_pieces_of_the_devices_size_and_must_be_applied(monkeypatch):
    """A GPU's are larger: in those of a CPU the head took four times as long (measured)."""
    machine, asked = Cluster(1, 80 * GIB, "gpu"), []

    def on_the_cpu(target, world, first, *others):
        if isinstance(first, MeasuredPipeline):
            asked.append(first.logits_bytes)
            found = gradients.run_processes(target, world, replace(first, use_gpu=False), *others)
            return [replace(one, applied=False) if isinstance(one, Steps) else one for one in found]
        estimated, threads, _, log_file, logits_bytes = others
        asked.append(logits_bytes)
        return gradients.run_processes(target, world, first, estimated, threads, False, log_file)

    monkeypatch.setattr(step, "run_processes", on_the_cpu)
    assert step.check_step(TINY, machine)["faults"] == ["a loss or a gradient of a step is not finite"]
    assert asked == [machine.logits_bytes] * 3 != [CPU.logits_bytes] * 3


def test_two_stages_whose_bits_are_not_those_of_one_are_a_fault(monkeypatch):
    original = gradients.run_processes

    def on_two_stages_that_round(target, world, *rest):
        results = original(target, world, *rest)
        if world == 2:
            entry = results[0]["layer 1, feed.inward.weight"].reshape(-1)[:1]
            entry[:] = np.nextafter(entry, 1)
        return results

    monkeypatch.setattr(gradients, "run_processes", on_two_stages_that_round)
    found = gradients.check_two_stages(TINY, CPU)
    assert found["rows"][1] == ["gradients of K = 2 that are not the bits of K = 1", 1, 0]
    assert len(found["faults"]) == 1
    assert "not those of K = 1, as layer 1, feed.inward.weight" in found["faults"][0]


def test_an_error_of_a_thousandth_is_found_and_written(monkeypatch, tmp_path):
    original = gradients.run_processes

    def on_a_wrong_device(target, world, *rest, calls=[]):  # noqa: B006
        results = original(target, world, *rest)
        calls.append(target)
        if target is workers.train and len(calls) % 2 == 0:  # the device's; the CPU is first
            worst = results[0]["layer 1, feed.inward.weight"]
            worst.flat[np.abs(worst).argmax()] *= 1.001
        return results

    monkeypatch.setattr(gradients, "run_processes", on_a_wrong_device)
    first, *_ = command.all_parts()
    monkeypatch.setattr(command, "all_parts", lambda: [first])
    with pytest.raises(DeviceError, match=r"layer 1, feed\.inward\.weight: by 0\.001 .*do not train on this device"):
        check(tmp_path)
    found = json.loads((tmp_path / "cpu.json").read_text())["parts"]["gradients"]
    assert len(found["faults"]) == 2
    for what, measured, _ in found["rows"][:2]:
        assert what.endswith(": layer 1, feed.inward.weight")
        assert measured == pytest.approx(1e-3, rel=1e-2)


def test_a_product_that_drops_its_sum_is_found(monkeypatch):
    exact, found = workers.add_product(0, 1, "", False, 64)
    assert gradients.compare("bfloat16", exact, found, 2**-7)["faults"] == []
    monkeypatch.setattr(workers, "weight_grad_sum", lambda total, *rest: weight_grad_sum(None, *rest))
    (fault,) = gradients.compare("bfloat16", *workers.add_product(0, 1, "", False, 64), 2**-7)["faults"]
    assert fault.startswith("bfloat16: 1 of 1 gradients differ from the CPU's, most in a sum of products")


def test_a_gpu_without_bf16_is_refused(monkeypatch):
    old = Cluster(1, 16 * GIB, "gpu", name="Tesla V100", has_bf16=False)
    monkeypatch.setattr("launch.worker.devices.gpus", lambda: old)
    with pytest.raises(PlacementError, match=r"^Tesla V100, or another GPU here, multiplies no bf16.*capability 8\.0"):
        command.find_machine("cuda")


def test_a_part_says_that_deepspeed_is_missing(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    found = [command.run_part(part, TINY, CPU) for part in command.all_parts() if part.needs_deepspeed]
    assert [one["status"] for one in found] == ["skipped", "skipped"]
    assert found[0]["reason"] == "a run's update is DeepSpeed's, and it is not installed: pip install deepspeed"


@pytest.mark.parametrize(
    ("found", "fault"),
    [
        (((1.0, 2.0), False), "worker 1 kept its weights"),
        (((1.0, math.nan), True), "most in a layer of worker 1: by nan of"),
    ],
)
def test_an_update_that_is_wrong_on_one_worker_is_a_fault(monkeypatch, found, fault):
    fine = ((1.0, 2.0), True)
    monkeypatch.setattr(
        gradients, "run_processes", lambda run, world, *rest: [fine] if world == 1 else [fine, found, fine, fine]
    )
    record = gradients.check_update(TINY, CPU)
    (only,) = record["faults"]
    assert fault in only
    json.dumps(record, allow_nan=False)


def test_a_process_that_fails_gives_its_own_reason():
    trace = "worker 1 failed\nTraceback (most recent call last):\n  File ...\n"
    failed = RuntimeError(f"{trace}torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB\nTry: less\n")
    assert command.reason(failed) == "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"
    full = system_error("Error while creating shared memory segment /dev/shm/nccl-1YsMbG (size 7340384)")
    assert command.reason(RuntimeError(trace + str(full))).startswith("NCCL has too little shared memory")


@pytest.mark.parametrize(
    ("arguments", "needed", "sentence"),
    [
        ([], "torch", f"gpu-check needs a GPU: torch {torch.__version__}, which is built without CUDA, sees no GPU"),
        (["--device", "tpu"], "torch", "gpu-check has no device 'tpu'"),
        ([], "no_such_package", "gpu-check needs no_such_package; this Python lacks no_such_package"),
    ],
)
def test_bad_input_is_one_sentence(arguments, needed, sentence, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu_check", *arguments])
    monkeypatch.setattr(command, "NEEDED", (needed,))
    with pytest.raises(SystemExit) as end:
        command.main()
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {sentence}")


@pytest.mark.slow
def test_it_imports_no_other_pinned_packages_than_it_says():
    forbidden = (
        "datasets", "deepspeed", "django", "filelock", "fsspec", "matplotlib", "PIL", "pyarrow", "ray", "rich",
        "safetensors", "tokenizers", "tomli_w", "transformers", "typer", "wandb",
    )  # fmt: skip
    code = (
        "import sys, torch, torch.profiler, torch.distributed, torch._subclasses.fake_tensor\n"
        f"sys.modules.update(dict.fromkeys({forbidden!r}))  # an import of any of these now fails\n"
        "from tests.gpu import check\n"
        "check.all_parts(), check.find_machine('cpu')\n"
    )
    subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=120, check=True)
