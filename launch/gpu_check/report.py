"""The results as tables, for the terminal and one page. Headings say whether a number is measured or computed."""

from __future__ import annotations

import statistics
from typing import Any

from experiments.report.table import Table, Value
from launch.gpu_check.parts import PARTS, Record
from launch.gpu_check.work import REMAT
from suite.pipeline.planning.devices import GIB

TERA = 1e12


def page(results: dict[str, Any]) -> str:
    """Returns the page, in Markdown."""
    versions = results["versions"]
    lines = [
        f"`{results['command']}` on {results['machine']['name']}, torch {versions['torch']}, code {versions['code']}\n",
        *(table.markdown() for table in tables(results)),
        *(f"- {sentence}" for sentence in results["left_out"]),
    ]
    table = results["parts"].get("profile", {}).get("table")
    return "\n".join([*lines, *(["", "```", table, "```"] if table else []), ""])


def tables(results: dict[str, Any]) -> list[Table]:
    """Returns the table of all parts, and those of the parts that are done."""
    parts: dict[str, Record] = results["parts"]
    done = {name: part for name, part in parts.items() if part["status"] == "done"}
    compared = [(name, one) for name, part in done.items() for one in part.get("comparisons", [])]
    trained = [part for part in done.values() if "planned_from_measured_costs" in part]
    made = [_part_table(parts)]
    if compared:
        made.append(_gradient_table(compared))
    if trained:
        made.append(_step_table(trained))
    if "measured" in done.get("compile", {}):
        made.append(_compile_table(done["compile"]))
    return made


def _part_table(parts: dict[str, Record]) -> Table:
    rows: list[list[Value]] = []
    for part in PARTS:
        record = parts.get(part.name, {"status": "not run", "reason": ""})
        why = record.get("reason") or record.get("over_plan") or "; ".join(record.get("faults", []))
        status = "done earlier" if record.get("resumed") else record["status"]
        rows.append([part.name, part.title, status, record.get("seconds"), why])
    return Table("gpu-parts", "gpu-check", ("part", "what", "status", "s (measured)", "reason"), rows, [])


def _gradient_table(compared: list[tuple[str, Record]]) -> Table:
    rows: list[list[Value]] = [
        [name, one["dtype"], one["parameters"], one["worst"], one["measured"]["error"], one["computed"]["tolerance"],
         "yes" if one["equal"] else "NO"]
        for name, one in compared
    ]  # fmt: skip
    headings = ("part", "dtype", "parameters", "worst", "deviation (measured)", "allowed (computed)", "within")
    notes = ["Deviations are relative to the largest entry of a parameter's gradient on the CPU; allowed are "
             "5 sqrt(P n) u (launch/gpu_check/gradients.py)."]  # fmt: skip
    return Table("gpu-gradients", "Gradients compared with the CPU's", headings, rows, notes)


def _step_table(trained: list[Record]) -> Table:
    headings = (
        "what", "M x rows x tokens", "step ms (measured)", "step ms (planned)", "tokens/s (measured)",
        "product TFLOP/s (measured)", "MFU (computed)", "HFU (computed)", "peak GiB (measured)", "peak GiB (planned)",
        "measured of planned", "loss, first and last (measured)",
    )  # fmt: skip
    rows: list[list[Value]] = []
    for one in trained:
        measured, computed, planned = one["measured"], one["computed"], one["planned_from_measured_costs"]
        losses = measured["losses"]
        rows.append([
            one["name"], f"{one['micro_batches']} x {one['rows']} x {one['time']}", 1e3 * measured["step_s"],
            1e3 * planned["step_s"], measured["tokens_per_s"], measured["product_flops_per_s"] / TERA, computed["mfu"],
            computed["hfu"], measured["peak_bytes"] / GIB, planned["peak_bytes"] / GIB, computed["peak_of_planned"],
            f"{losses[0]:.5g}, {losses[-1]:.5g}" if not one["faults"] else one["faults"][0],
        ])  # fmt: skip
    notes = [
        f"One stage, remat {REMAT}; a step is the median time of its actions plus the median update.",
        "Planned: from layer costs measured on this device. MFU and HFU are relative to a large bf16 product on the "
        "same device; HFU includes recomputation (suite/pipeline/planning/flops.py).",
    ]
    return Table("gpu-steps", "Training steps, compared with the plan", headings, rows, notes)


def _compile_table(record: Record) -> Table:
    measured, computed = record["measured"], record["computed"]
    headings = ("what", "eager ms (measured)", "compiled ms (measured)", "first step s (measured)",
                "speedup (computed)", "recompute = forward", "pays")  # fmt: skip
    rows: list[list[Value]] = [[
        record["name"], 1e3 * statistics.median(measured["eager_s"]), 1e3 * statistics.median(measured["compiled_s"]),
        measured["first_step_s"], computed["speedup"], "yes" if record["recompute_equals_forward"] else "no",
        "yes" if computed["pays"] else "no",
    ]]  # fmt: skip
    notes = ["Forward, recomputation and backward of a mini-batch, alternating. It pays if its median is below the "
             "fastest eager round and its recomputation has the bits of its forward."]  # fmt: skip
    return Table("gpu-compile", "torch.compile", headings, rows, notes)
