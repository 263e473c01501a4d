"""The results of the check as tables. Headings say whether a number is measured, computed or estimated."""

from __future__ import annotations

from experiments.report.table import Table, Value
from launch.gpu_check.report import Findings, machine, timed_record, trained_record
from launch.gpu_check.single_stage import REMAT
from suite.pipeline.planning.devices import GIB

TERA = 1e12


def tables(found: Findings) -> list[Table]:
    """Returns the tables of gradients, steps, kernels and variants."""
    name = machine(found.device)["name"]
    return [_gradient_table(found, name), _step_table(found, name), _kernel_table(found, name),
            _variant_table(found, name)]  # fmt: skip


def _gradient_table(found: Findings, name: str) -> Table:
    rows: list[list[Value]] = [
        [one.dtype, len(one.differences), f"layer {one.worst.layer}, {one.worst.name}", one.worst.error,
         one.tolerance, "yes" if one.equal else "NO"]
        for one in found.gradients
    ]  # fmt: skip
    headings = ("dtype", "parameters", "worst", "deviation (measured)", "allowed (computed)", "within")
    sizes = found.sizes
    shape, many = sizes.gradients, sizes.gradient_micro_batches
    notes = [
        f"T({shape.layers}, {shape.feed_forward}, {shape.heads}), width {shape.width}, in two stages, M = {many}, "
        "every micro-batch recomputed, padding masked, no dropout.",
        "Deviations are relative to the largest entry of a parameter's gradient; allowed are 5 sqrt(P n) u "
        "(launch/gpu_check/gradients.py).",
    ]
    return Table("gpu-gradients", f"{name}: gradients compared with the CPU's", headings, rows, notes)


def _step_table(found: Findings, name: str) -> Table:
    headings = (
        "what", "parameters", "M x rows x tokens", "F, R, B ms (measured)", "update ms (measured)",
        "step ms (measured)", "step ms (from measured costs)", "step ms (estimated)", "tokens/s (measured)",
        "model utilisation (computed)", "hardware utilisation (computed)", "... without update (computed)",
        "peak GiB (measured)", "peak GiB (from measured costs)", "peak GiB (estimated)",
        "loss, first and last (measured)",
    )  # fmt: skip
    rows: list[list[Value]] = []
    for one in found.steps:
        work = one.work
        numbers = trained_record(one, found.rate)["computed"]
        rows.append([
            work.name, work.parameters, f"{work.micro_batches} x {work.rows.count} x {work.rows.target}",
            ", ".join(f"{1e3 * one.actions[kind]:.3g}" for kind in "FRB"), 1e3 * one.update_s, 1e3 * one.step_s,
            1e3 * one.profiled.step_s, 1e3 * one.estimated.step_s, one.tokens_per_s, numbers["model_utilisation"],
            numbers["hardware_utilisation"], numbers["hardware_utilisation_without_update"], one.peak_bytes / GIB,
            one.profiled.peak_bytes / GIB, one.estimated.peak_bytes / GIB,
            f"{one.losses[0]:.5g}, {one.losses[-1]:.5g}",
        ])  # fmt: skip
    begin, end = (rate / TERA for rate in found.product_rates)
    side = found.sizes.product
    notes = [
        f"One stage, remat {REMAT}, {found.sizes.optimizer.name}, precision {found.sizes.optimizer.precision}; the "
        "update is by the torch optimizer that DeepSpeed wraps at K = R = 1, without DeepSpeed.",
        f"Utilisation is relative to a {side} x {side} x {side} bf16 product: {begin:.4g} TFLOP/s at the start, "
        f"{end:.4g} at the end (measured), the higher of the two. Hardware operations include recomputation, model "
        "operations do not (experiments/gpu_check/flops.py).",
        "A step is the median of forward, recomputation and backward plus the median update; a run with more "
        "micro-batches updates less often, so the utilisation without updates is also shown.",
        f"Estimated for: {found.steps[0].estimated_for}. Peaks are the allocator's and include all weights.",
    ]
    return Table("gpu-steps", f"{name}: training steps, compared with the plan", headings, rows, notes)


def _kernel_table(found: Findings, name: str) -> Table:
    total, of = found.kernels.total_s, found.kernels_of
    rows: list[list[Value]] = [
        [kind, 1e3 * seconds, seconds / total] for kind, seconds in found.kernels.seconds.items()
    ]
    rows.append(["all", 1e3 * total, 1.0])
    headings = ("kernels", "ms a step (measured)", "share (computed)")
    notes = [
        f"{of.work.name}: forward, recomputation, backward of a mini-batch. Without the profiler they take "
        f"{1e3 * of.train_s:.4g} ms (measured), so kernels fill {total / of.train_s:.3g} of the time (computed).",
        "Kinds follow from kernel names (launch/gpu_check/kernels.py); gpu-check-kernels.txt lists all kernels.",
    ]
    return Table("gpu-kernels", f"{name}: where a step's time goes", headings, rows, notes)


def _variant_table(found: Findings, name: str) -> Table:
    plain = found.variants[0]
    headings = (
        "variant", "M x rows", "attention by", "ms (measured)", "fastest, slowest (measured)", "of plain (computed)",
        "model utilisation (computed)", "hardware utilisation (computed)", "peak GiB over weights (measured)",
        "recompute = forward", "pays", "failure",
    )  # fmt: skip
    rows: list[list[Value]] = []
    for one in found.variants:
        numbers = timed_record(one, plain, found.rate)["computed"]
        spread = f"{1e3 * min(one.seconds):.4g}, {1e3 * max(one.seconds):.4g}" if one.seconds else "-"
        rows.append([
            one.variant.name, f"{one.work.micro_batches} x {one.work.rows.count}", one.attention or "-",
            None if one.median_s is None else 1e3 * one.median_s, spread, numbers["of_plain"],
            numbers["model_utilisation"], numbers["hardware_utilisation"],
            None if one.peak_bytes is None else one.peak_bytes / GIB, _yes_or_no(one.bits_equal),
            _yes_or_no(one.pays(plain)), one.failure or "",
        ])  # fmt: skip
    notes = [
        f"{plain.work.name}: forward, recomputation and backward of a mini-batch, no update; medians of "
        f"{found.sizes.rounds} rounds, all variants in turn.",
        "Of plain: tokens a second relative to the plain variant. A variant pays if its median is better than the "
        "plain one's fastest round and its recomputation is bit-identical to its forward.",
        "Without its mask the model is correct only if no row has padding, as here.",
        "A bound cannot train: it keeps weights and gradients of matrix products in bf16, which shows the cost of "
        "casting them for each micro-batch.",
    ]
    return Table("gpu-variants", f"{name}: other ways to compute the same cell", headings, rows, notes)


def _yes_or_no(value: bool | None) -> str:
    return "-" if value is None else "yes" if value else "no"
