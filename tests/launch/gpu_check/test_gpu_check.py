"""The GPU check, run on the CPU at tiny sizes: its files, and that it finds faults."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from experiments.report.table import Table
from launch.gpu_check import command as gpu_check
from launch.gpu_check import gradients, steps, variants
from launch.gpu_check.single_stage import SingleStageTrainer
from launch.gpu_check.work import MeanSquare, cell_workload, full_model_workload, paper_sizes
from models.shape import TransformerShape
from models.transformer import DecoderLayer, EncoderLayer
from suite.errors import NonFiniteError
from suite.pipeline.planning import profile

CPU = torch.device("cpu")
TINY = TransformerShape(1, 32, 64, 2, 200, head_width=16)


def tiny_sizes():
    return replace(
        paper_sizes(), whole=TINY, cell=replace(TINY, layers=4), cell_layers=2, rows=2, time=8, micro_batches=3,
        steps=3, rounds=2, other_rows=(1, 3), product=64, product_repeats=2, product_rounds=2, compiler="aot_eager",
        gradients=TransformerShape(1, 16, 32, 2, 40, head_width=8, dropout=0.0), gradient_rows=5, gradient_time=6,
        gradient_micro_batches=3,
    )  # fmt: skip


@pytest.fixture(scope="module")
def examined():
    """The findings and the logged lines."""
    lines: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(profile, "SECONDS_A_LAYER", 0.0)
        return gpu_check.examine(CPU, tiny_sizes(), lines.append, "a test"), lines


@pytest.fixture(scope="module")
def written(examined, tmp_path_factory):
    """The folder, the JSON object, the tables shown and the logged lines."""
    folder = tmp_path_factory.mktemp("check")
    shown: list[Table] = []
    lines: list[str] = []
    gpu_check.finish(examined[0], folder, lines.append, shown.append)
    return folder, json.loads((folder / "gpu-check.json").read_text()), shown, lines


def test_the_paper_sizes_are_those_of_the_experiments():
    sizes = paper_sizes()
    assert (sizes.whole.layers, sizes.whole.feed_forward, sizes.whole.heads) == (6, 8192, 16)
    assert (sizes.cell.layers, sizes.cell.feed_forward, sizes.cell.heads) == (64, 16384, 32)
    assert (sizes.cell_layers, sizes.rows, sizes.time, sizes.product) == (8, 16, 128, 8192)
    assert full_model_workload(sizes).parameters == 408_209_920


def test_the_json_has_every_promised_key(written):
    _, record, _, _ = written
    assert record["command"] == "a test"
    assert {"name", "driver", "host_cores"} <= record["machine"].keys()
    assert {"python", "torch", "cuda", "cudnn", "triton", "deepspeed", "ray"} <= record["versions"].keys()
    assert record["product"]["measured"]["flops_per_s_at_begin"] > 0
    assert record["faults"] == []
    for one in record["gradients"]:
        assert one["equal"]
        assert len(one["measured"]["errors"]) == 40
        assert one["computed"]["tolerance"] > 0
    assert [one["dtype"] for one in record["gradients"]] == ["float64", "float32"]
    assert len(record["steps"]) == 3
    for one in record["steps"]:
        measured, computed = one["measured"], one["computed"]
        assert set(measured) == {
            "step_s", "train_s", "update_s", "action_s", "tokens_per_s", "peak_bytes", "losses",
        }  # fmt: skip
        assert set(measured["action_s"]) == {"F", "R", "B"}
        assert all(value > 0 for value in measured["action_s"].values())
        assert len(measured["losses"]) == steps.WARM_UPS + 3 + 1
        assert computed["hardware_flops"] / computed["model_flops"] == pytest.approx(11 / 9)  # M = 3: 9 and 2 forwards
        assert 0 < computed["model_utilisation"] < computed["hardware_utilisation"]
        for kind in ("computed_from_measured_costs", "estimated"):
            assert one[kind]["peak_bytes"] > 0
            assert one[kind]["step_s"] > 0
    kernels = record["kernels"]
    assert kernels["measured"]["seconds_by_kind"]["products"] > 0
    assert kernels["computed"]["busy_share"] > 0
    assert record["measured"]["check_s"] > 0


def test_each_variant_says_whether_it_pays_or_why_it_cannot_run(written):
    _, record, _, _ = written
    rows = {one["name"]: one for one in record["variants"]}
    assert next(iter(rows)) == "eager"
    for backend in variants.BACKENDS:
        assert {f"{backend}, mask", f"{backend}, no mask"} <= rows.keys()
    assert {"eager, no mask", "torch.compile", "torch.compile, no mask", "1 rows", "3 rows"} <= rows.keys()
    for one in rows.values():
        if one["failure"]:
            assert "\n" not in one["failure"]
            assert one["measured"]["train_s"] is None
            assert one["pays"] in (False, None)
        else:
            assert len(one["measured"]["rounds_s"]) == 2
            assert one["recompute_equals_forward"] is True
            assert one["measured"]["peak_bytes"] > 0
            assert one["computed"]["of_plain"] > 0
    assert rows["eager"]["failure"] is None
    assert "No viable backend" in rows["cudnn, mask"]["failure"]  # the CPU has none
    assert rows["math, mask"]["attention"] == "math"
    assert "flash" in rows["eager"]["attention"]
    assert (rows["1 rows"]["micro_batches"], rows["3 rows"]["micro_batches"]) == (6, 2)
    assert rows["weights held in bf16 (bound)"]["pays"] is None


def test_tables_and_kernels_are_written_and_logged(examined, written):
    folder, _, shown, lines = written
    text = (folder / "gpu-check.md").read_text()
    assert text.startswith("`a test`")
    assert [table.name for table in shown] == ["gpu-gradients", "gpu-steps", "gpu-kernels", "gpu-variants"]
    for table in shown:
        assert table.markdown() in text
        assert all(len(row) == len(table.headings) for row in table.rows)
    for kind in ("(measured)", "(computed)", "(estimated)"):
        assert kind in text
    assert "addmm" in (folder / "gpu-check-kernels.txt").read_text()
    assert str(folder) in lines[-1]
    logged = "\n".join(examined[1])
    assert all(part in logged for part in ("gradients", "bf16 product", "whole T(1, 64, 2)", "variant torch.compile"))


def test_an_error_of_a_thousandth_is_found_and_written(examined, monkeypatch, tmp_path):
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
    monkeypatch.setattr(gradients, "run_batch", run_batch)
    comparisons = [gradients.compare(sizes.gradients, dtype, CPU, batch, 1.0) for dtype in gradients.DTYPES]
    for comparison in comparisons:
        assert not comparison.equal
        assert (comparison.worst.layer, comparison.worst.name) == (1, "feed.inward.weight")
        assert comparison.worst.error == pytest.approx(1e-3, rel=1e-2)
    with pytest.raises(NonFiniteError, match=r"layer 1, feed\.inward\.weight: by 0\.001 .*do not train on this device"):
        gpu_check.finish(replace(examined[0], gradients=comparisons), tmp_path, print, lambda table: None)
    assert len(json.loads((tmp_path / "gpu-check.json").read_text())["faults"]) == 2


def test_a_non_finite_number_is_a_fault(examined, tmp_path):
    bad = gradients.Difference(0, "weight", float("nan"))
    first = examined[0].gradients[0]
    comparison = replace(first, differences=(*first.differences, bad))
    assert comparison.worst is bad
    trained = replace(examined[0].steps[0], losses=(1.0, float("inf")))
    faulty = replace(examined[0], gradients=[comparison], steps=[trained])
    with pytest.raises(NonFiniteError, match=r"layer 0, weight: by nan.*loss of whole T\(1, 64, 2\) is inf in step 1"):
        gpu_check.finish(faulty, tmp_path, print, lambda table: None)
    assert json.loads((tmp_path / "gpu-check.json").read_text())["steps"][0]["measured"]["losses"] == [1.0, "inf"]


def test_gradients_are_those_of_the_whole_model():
    """Compares the two stages with autograd over the unpartitioned model: both devices could have the same error."""
    from suite.pipeline.model.layers import ties_of
    from tests.suite.pipeline.build import unpartitioned

    sizes = tiny_sizes()
    batch = gradients._make_batch(sizes, 0)
    made, loss = gradients._model(sizes.gradients, torch.float64)
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
    assert trainer.recompute_equals_forward()


def test_a_recomputation_that_differs_from_the_forward_does_not_pay():
    class ChangingLoss(MeanSquare):
        calls = 0

        def forward(self, x, *rest):
            ChangingLoss.calls += 1
            objective, measure = super().forward(x, *rest)
            return objective + ChangingLoss.calls, measure

    sizes = tiny_sizes()
    work = replace(cell_workload(sizes, EncoderLayer), loss=ChangingLoss())
    trainer = SingleStageTrainer(work, CPU, sizes.optimizer)
    assert not trainer.recompute_equals_forward()
    plain, other = variants.variants(sizes)[:2]
    slow = variants.VariantResult(plain, work, (2.0, 2.1), 1, True)
    assert variants.VariantResult(other, work, (1.0, 1.1), 1, True).pays(slow) is True
    assert variants.VariantResult(other, work, (2.05, 2.05), 1, True).pays(slow) is False
    assert variants.VariantResult(other, work, (1.0, 1.1), 1, False).pays(slow) is False


def test_without_rich_tables_are_printed_as_markdown(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    _, show = gpu_check._terminal()
    show(Table("a", "A title", ("x",), [[1]], ()))
    assert "### A title" in capsys.readouterr().out


def test_as_a_module_it_reports_that_there_is_no_gpu():
    done = subprocess.run([sys.executable, "-m", "launch.gpu_check"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr.startswith("error: gpu-check needs a CUDA device, and torch sees none;")
    assert len(done.stderr.splitlines()) == 1


def test_it_imports_no_other_pinned_packages_than_torch_numpy_and_pydantic():
    forbidden = (
        "datasets", "deepspeed", "django", "filelock", "fsspec", "matplotlib", "PIL", "pyarrow", "ray", "rich",
        "safetensors", "tokenizers", "transformers", "typer", "wandb",
    )  # fmt: skip
    code = (
        "import sys, torch, torch.profiler, torch.distributed, torch._subclasses.fake_tensor\n"
        f"sys.modules.update(dict.fromkeys({forbidden!r}))  # an import of any of these now fails\n"
        "from launch.gpu_check import command, gradients, kernels, tables, variants\n"
        "from launch.gpu_check.work import paper_sizes\n"
        "paper_sizes()\n"
    )
    subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=120, check=True)


def test_a_missing_package_is_one_sentence(monkeypatch, capsys):
    monkeypatch.setattr(gpu_check, "NEEDED", ("torch", "no_such_package"))
    with pytest.raises(SystemExit) as end:
        gpu_check.main()
    assert end.value.code == 2
    assert "this Python lacks no_such_package" in capsys.readouterr().err
