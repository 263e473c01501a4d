"""The results of the check as tables. Headings say whether a number is measured, computed or estimated."""

from __future__ import annotations

from experiments.report.table import Table, Value
from launch.gpu_check.report import Findings, machine, timed_record, trained_record
from launch.gpu_check.work import REMAT
from suite.pipeline.planning.devices import GIB

TERA = 1e12


def tables(findings: Findings) -> list[Table]:
    """Returns the tables of gradients, steps, kernels and variants."""
    name = machine(findings.device)["name"]
    return [_gradient_table(findings, name), _step_table(findings, name), _kernel_table(findings, name),
            _variant_table(findings, name)]  # fmt: skip


def _gradient_table(findings: Findings, name: str) -> Table:
    rows: list[list[Value]] = [
        [compared.dtype, len(compared.differences), f"layer {compared.worst.layer}, {compared.worst.name}",
         compared.worst.error, compared.tolerance, "yes" if compared.equal else "NO"]
        for compared in findings.gradients
    ]  # fmt: skip
    headings = ("dtype", "parameters", "worst", "deviation (measured)", "allowed (computed)", "within")
    sizes = findings.sizes
    shape, many = sizes.gradients, sizes.gradient_micro_batches
    notes = [
        f"T({shape.layers}, {shape.feed_forward}, {shape.heads}), width {shape.width}, in two stages, M = {many}, "
        "every micro-batch recomputed, padding masked, no dropout.",
        "Deviations are relative to the largest entry of a parameter's gradient; allowed are 5 sqrt(P n) u "
        "(launch/gpu_check/gradients.py).",
    ]
    return Table("gpu-gradients", f"{name}: gradients compared with the CPU's", headings, rows, notes)


def _step_table(findings: Findings, name: str) -> Table:
    headings = (
        "what", "parameters", "M x rows x tokens", "F, R, B ms (measured)", "update ms (measured)",
        "step ms (measured)", "step ms (from measured costs)", "step ms (estimated)", "tokens/s (measured)",
        "model utilisation (computed)", "hardware utilisation (computed)", "... without update (computed)",
        "peak GiB (measured)", "peak GiB (from measured costs)", "peak GiB (estimated)",
        "loss, first and last (measured)",
    )  # fmt: skip
    rows: list[list[Value]] = []
    for trained in findings.steps:
        work = trained.work
        numbers = trained_record(trained, findings.rate)["computed"]
        rows.append([
            work.name, work.parameters, f"{work.micro_batches} x {work.rows.count} x {work.rows.target}",
            ", ".join(f"{1e3 * trained.actions[kind]:.3g}" for kind in "FRB"), 1e3 * trained.update_s,
            1e3 * trained.step_s, 1e3 * trained.profiled.step_s, 1e3 * trained.estimated.step_s, trained.tokens_per_s,
            numbers["model_utilisation"], numbers["hardware_utilisation"],
            numbers["hardware_utilisation_without_update"], trained.peak_bytes / GIB,
            trained.profiled.peak_bytes / GIB, trained.estimated.peak_bytes / GIB,
            f"{trained.losses[0]:.5g}, {trained.losses[-1]:.5g}",
        ])  # fmt: skip
    begin, end = (rate / TERA for rate in findings.product_rates)
    side, optimizer = findings.sizes.product, findings.sizes.optimizer
    notes = [
        f"One stage, remat {REMAT}, {optimizer.name}, precision {optimizer.precision}; the "
        "update is by the torch optimizer that DeepSpeed wraps at K = R = 1, without DeepSpeed.",
        f"Utilisation is relative to a {side} x {side} x {side} bf16 product: {begin:.4g} TFLOP/s at the start, "
        f"{end:.4g} at the end (measured), the higher of the two. Hardware operations include recomputation, model "
        "operations do not (suite/pipeline/planning/flops.py).",
        "A step is the median of forward, recomputation and backward plus the median update; a run with more "
        "micro-batches updates less often, so the utilisation without updates is also shown.",
        f"Estimated for: {findings.steps[0].estimated_for}. Peaks are the allocator's and include all weights.",
    ]
    return Table("gpu-steps", f"{name}: training steps, compared with the plan", headings, rows, notes)


def _kernel_table(findings: Findings, name: str) -> Table:
    total, of = findings.kernels.total_s, findings.kernels_of
    rows: list[list[Value]] = [
        [kind, 1e3 * seconds, seconds / total] for kind, seconds in findings.kernels.seconds.items()
    ]
    rows.append(["all", 1e3 * total, 1.0])
    headings = ("kernels", "ms a step (measured)", "share (computed)")
    notes = [
        f"{of.work.name}: forward, recomputation, backward of a mini-batch. Without the profiler they take "
        f"{1e3 * of.train_s:.4g} ms (measured), so kernels fill {total / of.train_s:.3g} of the time (computed).",
        "Kinds follow from kernel names (launch/gpu_check/kernels.py); gpu-check-kernels.txt lists all kernels.",
    ]
    return Table("gpu-kernels", f"{name}: where a step's time goes", headings, rows, notes)


def _variant_table(findings: Findings, name: str) -> Table:
    plain = findings.variants[0]
    headings = (
        "variant", "M x rows", "attention by", "ms (measured)", "fastest, slowest (measured)", "of plain (computed)",
        "model utilisation (computed)", "hardware utilisation (computed)", "peak GiB over weights (measured)",
        "recompute = forward", "pays", "failure",
    )  # fmt: skip
    rows: list[list[Value]] = []
    for timed in findings.variants:
        numbers = timed_record(timed, plain, findings.rate)["computed"]
        spread = f"{1e3 * min(timed.seconds):.4g}, {1e3 * max(timed.seconds):.4g}" if timed.seconds else "-"
        rows.append([
            timed.variant.name, f"{timed.work.micro_batches} x {timed.work.rows.count}", timed.attention or "-",
            None if timed.median_s is None else 1e3 * timed.median_s, spread, numbers["of_plain"],
            numbers["model_utilisation"], numbers["hardware_utilisation"],
            None if timed.peak_bytes is None else timed.peak_bytes / GIB, _yes_or_no(timed.bits_equal),
            _yes_or_no(timed.pays(plain)), timed.failure or "",
        ])  # fmt: skip
    notes = [
        f"{plain.work.name}: forward, recomputation and backward of a mini-batch, no update; medians of "
        f"{findings.sizes.rounds} rounds, all variants in turn.",
        "Of plain: tokens a second relative to the plain variant. A variant pays if its median is better than the "
        "plain one's fastest round and its recomputation is bit-identical to its forward.",
        "Without its mask the model is correct only if no row has padding, as here.",
        "A bound cannot train: it keeps weights and gradients of matrix products in bf16, which shows the cost of "
        "casting them for each micro-batch.",
    ]
    return Table("gpu-variants", f"{name}: other ways to compute the same cell", headings, rows, notes)


def _yes_or_no(value: bool | None) -> str:
    return "-" if value is None else "yes" if value else "no"
