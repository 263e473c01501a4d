"""Compares the gradients of a GPU, and of pipelines over several, with the CPU's, parameter by parameter.

There is no dropout, because the generators of two devices differ.

Tolerance. Two devices add the same numbers in different orders. A sum of n products has a relative error of about
sqrt(n) u (u is the unit roundoff), like a random walk. A gradient passes through P products in sequence, with
independent errors. The measure is the largest deviation of any entry of a parameter's gradient, divided by its largest
entry; the largest of some millions of deviations is about five standard deviations:

    tolerance = 5 sqrt(P n) u        P = 2 (6 L + 10 L + 1): an encoder layer has 6 products in a row, a decoder layer
                                     10, the head 1, and backward as many as forward
                                     n = the longest sum: vocabulary, width, H, 64A, or the tokens of the mini-batch

A ReLU whose input is closer to zero than its error may be active on one device only, which changes a whole term of a
gradient. So the check uses the one of several random batches whose ReLU inputs are farthest from zero.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from experiments.base.cluster import Cluster
from launch.backends.processes import run_processes
from models.blocks import FeedForward
from suite.device import MULTIPLIES_BF16_INTO_FP32
from suite.pipeline.model.cells import CellPlacement
from suite.pipeline.model.layers import Tensors
from suite.pipeline.model.ties import TiedParameters, find_ties
from suite.pipeline.model.topology import RankCoord
from suite.pipeline.runtime.boundary import CutSpec
from suite.pipeline.runtime.skip import SkipLayout, find_skips
from suite.pipeline.runtime.stage import CellMicroBatch, Stage
from tests.gpu.work import Sizes, make_batch, model
from tests.gpu.workers import Arrays, Start, add_product, cells_of, parameters, train, train_and_update

Record = dict[str, Any]
"""``rows``: what was measured, the number, and the one that it is compared with; ``faults``, as clauses."""

DRAWS = 8

CPU_WORKERS = 4


def check_gradients(sizes: Sizes, machine: Cluster) -> Record:
    """Compares one device in fp64 and in fp32, with products in full precision, and a sum in bf16."""
    use_gpu, start = machine.kind == "gpu", choose_start(sizes)
    found: list[Record] = []
    for dtype in (torch.float64, torch.float32):
        (expected,), (there,) = (run_processes(train, 1, 1, on_gpu, start, dtype) for on_gpu in (False, use_gpu))
        what = str(dtype).removeprefix("torch.")
        found.append(compare(what, expected, there, tolerance(start, dtype)))
    width = sizes.gradients.width
    allowed = torch.finfo(torch.bfloat16).eps  # the product is rounded once
    if use_gpu and "cuda" in MULTIPLIES_BF16_INTO_FP32:
        allowed = 5 * math.sqrt(width) * torch.finfo(torch.float32).eps / 2
    ((exact, there),) = run_processes(add_product, 1, use_gpu, width)
    found.append(compare("bfloat16", exact, there, allowed))
    return {key: [one for record in found for one in record[key]] for key in ("rows", "faults")}


def check_two_stages(sizes: Sizes, machine: Cluster) -> Record:
    """Compares K = 2 by two processes, in fp32, with the CPU, and with K = 1 on the same device, whose gradients must
    be equal to the last bit. The messages are gloo's, or NCCL's; one GPU serves both processes."""
    use_gpu, start = machine.kind == "gpu", choose_start(sizes)
    (expected,) = run_processes(train, 1, 1, False, start, torch.float32)
    (alone,) = run_processes(train, 1, 1, True, start, torch.float32) if use_gpu else (expected,)
    first, second = run_processes(train, 2, 2, use_gpu, start, torch.float32)
    both = {**first, **second}
    record = compare("K = 2, float32", expected, both, tolerance(start, torch.float32))
    other = [key for key, gradient in alone.items() if not np.array_equal(gradient, both[key])]
    record["rows"].append(["gradients of K = 2 that are not the bits of K = 1", len(other), 0])
    if other:
        record["faults"].append(
            f"{len(other)} of {len(alone)} gradients of K = 2 are not those of K = 1, as {other[0]}"
        )
    return record


def check_update(sizes: Sizes, machine: Cluster) -> Record:
    """Compares the gradient norms of a step with its update on every GPU, built as a run builds its workers: DeepSpeed,
    ties, replicas. K is 2, or 1 with an odd number of GPUs."""
    use_gpu = machine.kind == "gpu"
    world = machine.devices if use_gpu else CPU_WORKERS
    stages, start = 1 if world % 2 else 2, choose_start(sizes)
    ((norms, _),) = run_processes(train_and_update, 1, 1, False, start)
    found = run_processes(train_and_update, world, stages, use_gpu, start)
    ratios = {f"a layer of worker {rank}": np.array(own) / norms for rank, (own, _) in enumerate(found)}
    what = f"K = {stages}, R = {world // stages}, float32 norms"
    kept = [f"worker {rank} kept its weights" for rank, (_, changed) in enumerate(found) if not changed]
    record = compare(what, {key: np.ones(len(norms)) for key in ratios}, ratios, tolerance(start, torch.float32))
    return record | {"faults": record["faults"] + kept}


def compare(what: str, expected: Arrays, found: Arrays, allowed: float) -> Record:
    """Compares gradients with those of the CPU."""
    errors = {key: _deviation(found[key], gradient) for key, gradient in expected.items()}
    worst = max(errors, key=lambda key: (not math.isfinite(errors[key]), errors[key]))
    wrong = sum(not error <= allowed for error in errors.values())  # also what is not a number
    fault = (
        f"{what}: {wrong} of {len(errors)} gradients differ from the CPU's, most in {worst}: by {errors[worst]:.2g} of "
        f"its largest entry, with {allowed:.2g} allowed"
    )
    shown = errors[worst] if math.isfinite(errors[worst]) else str(errors[worst])  # JSON lacks the others
    return {"rows": [[f"{what}: {worst}", shown, allowed]], "faults": [fault] if wrong else []}


def tolerance(start: Start, dtype: torch.dtype) -> float:
    """Returns 5 sqrt(P n) u; see the module's docstring."""
    shape, tokens = start.shape, sum(tensors[0].numel() for tensors in start.batch.inputs)
    longest = max(shape.vocabulary, shape.width, shape.feed_forward, shape.attention_width, tokens)
    products = 2 * (16 * shape.blocks_per_stack + 1)
    return 5 * math.sqrt(products * longest) * torch.finfo(dtype).eps / 2


def choose_start(sizes: Sizes) -> Start:
    """Returns the start whose ReLU inputs are farthest from zero."""
    layers, loss = model(sizes.gradients, torch.float64)
    cells = cells_of(sizes.gradients, 1)
    stage = Stage(layers, cells, loss, torch.device("cpu"), "fp32", seed=0)
    TiedParameters(
        find_ties(layers, cells, CellPlacement(1)), RankCoord(0, 1, 1), stage.named_parameters(), 0.0
    ).broadcast_first_copy()
    boundary, distances = SkipLayout(find_skips(layers), cells, 0).input_boundary, [math.inf]

    def record(module: nn.Module, inputs: Tensors, output: Tensor) -> None:
        distances[-1] = min(distances[-1], float(output.abs().min()))

    for module in stage.layers.modules():
        if isinstance(module, FeedForward):
            module.inward.register_forward_hook(record)
    batches = [make_batch(sizes.gradients, seed) for seed in range(DRAWS)]
    for batch in batches:
        with torch.no_grad():
            for inputs, targets in zip(batch.inputs, batch.targets, strict=True):
                stage.forward(CellMicroBatch(inputs, boundary(CutSpec.of(inputs)), None), targets)
        distances.append(math.inf)
    batch = batches[distances.index(max(distances[:DRAWS]))]
    return Start(sizes.gradients, batch, {key: p.detach().numpy() for key, p in parameters(stage).items()})


def _deviation(found: NDArray[np.float64], expected: NDArray[np.float64]) -> float:
    largest, deviation = np.abs(expected).max(), np.abs(found - expected).max()
    return float(deviation / largest if largest else deviation)
