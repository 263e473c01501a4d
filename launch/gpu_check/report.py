"""The results as tables, for the terminal and one page. Headings say whether a number is measured or computed."""

from __future__ import annotations

from typing import Any

from experiments.report.table import Table, Value
from launch.gpu_check.parts import PARTS, Record
from launch.gpu_check.work import REMAT
from suite.pipeline.planning.devices import GIB

TERA = 1e12


def page(results: dict[str, Any]) -> str:
    """Returns the page, in Markdown."""
    name, versions = results["machine"]["name"], results["versions"]
    title = f"`{results['command']}` on {name}, torch {versions['torch']}, code {versions['code']}\n"
    return "\n".join([title, *(table.markdown() for table in tables(results)), ""])


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
