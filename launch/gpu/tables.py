"""What the check found, as tables. Headings say how each number was come by."""

from __future__ import annotations

from experiments.table import Table, Value
from launch.gpu.lone import REMAT
from launch.gpu.report import Findings, machine, timed_record, trained_record
from suite.pipeline.devices import GIB

TERA = 1e12


def tables(found: Findings) -> list[Table]:
    """Returns gradients, steps, kernels and variants."""
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
        "every micro-batch rebuilt, padding hidden, no dropout.",
        "Deviations are over the largest entry of a parameter's gradient; allowed are 5 sqrt(P n) u "
        "(launch/gpu/gradients.py).",
    ]
    return Table("gpu-gradients", f"{name}: gradients against the CPU's", headings, rows, notes)


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
        f"Utilisation is a share of a {side} x {side} x {side} bf16 product: {begin:.4g} TFLOP/s at the begin, "
        f"{end:.4g} at the end (measured), the higher of them. Model operations leave rebuilds out, hardware "
        "operations count them (experiments/flops.py).",
        "A step is the median of forward, rebuild and backward and that of the update; a run with more micro-batches "
        "has fewer updates, so beside it stands the utilisation without one.",
        f"Estimated for: {found.steps[0].estimated_for}. Peaks are the allocator's, from before the first weight.",
    ]
    return Table("gpu-steps", f"{name}: training steps, beside the plan's", headings, rows, notes)


def _kernel_table(found: Findings, name: str) -> Table:
    total, of = found.kernels.total_s, found.kernels_of
    rows: list[list[Value]] = [
        [kind, 1e3 * seconds, seconds / total] for kind, seconds in found.kernels.seconds.items()
    ]
    rows.append(["all", 1e3 * total, 1.0])
    headings = ("kernels", "ms a step (measured)", "share (computed)")
    notes = [
        f"{of.work.name}: forward, rebuild, backward of a mini-batch. Without the profiler they take "
        f"{1e3 * of.train_s:.4g} ms (measured), so kernels fill {total / of.train_s:.3g} of the time (computed).",
        "Kinds are told by names (launch/gpu/kernels.py); each kernel by name: gpu-check-kernels.txt.",
    ]
    return Table("gpu-kernels", f"{name}: where a step's time goes", headings, rows, notes)


def _variant_table(found: Findings, name: str) -> Table:
    plain = found.variants[0]
    headings = (
        "variant", "M x rows", "attention by", "ms (measured)", "fastest, slowest (measured)", "of plain (computed)",
        "model utilisation (computed)", "hardware utilisation (computed)", "peak GiB over weights (measured)",
        "rebuild = forward", "pays", "why not",
    )  # fmt: skip
    rows: list[list[Value]] = []
    for one in found.variants:
        numbers = timed_record(one, plain, found.rate)["computed"]
        spread = f"{1e3 * min(one.seconds):.4g}, {1e3 * max(one.seconds):.4g}" if one.seconds else "-"
        rows.append([
            one.variant.name, f"{one.work.micro_batches} x {one.work.rows.count}", one.attention or "-",
            None if one.median_s is None else 1e3 * one.median_s, spread, numbers["of_plain"],
            numbers["model_utilisation"], numbers["hardware_utilisation"],
            None if one.peak_bytes is None else one.peak_bytes / GIB, _said(one.same), _said(one.pays(plain)),
            one.failure or "",
        ])  # fmt: skip
    notes = [
        f"{plain.work.name}: forward, rebuild and backward of a mini-batch, no update; medians of "
        f"{found.sizes.rounds} rounds, all variants in turn.",
        "Of plain: tokens a second over those of the plain one. It pays where its median is better than the plain "
        "one's fastest round and its rebuild has the bits of its forward.",
        "Without its mask the model is right only where no row has padding, as here.",
        "A bound is no way to train: it holds weights and gradients of products in bf16, and so says what casting them "
        "for each micro-batch costs.",
    ]
    return Table("gpu-variants", f"{name}: other ways to compute the same cell", headings, rows, notes)


def _said(value: bool | None) -> str:
    return "-" if value is None else "yes" if value else "no"
