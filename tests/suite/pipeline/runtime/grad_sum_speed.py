"""Times one micro-batch of an encoder layer in bf16, with weight gradients as autocast computes them and as the product
adds them in fp32. Run from the checkout:

    OMP_NUM_THREADS=2 .venv/bin/python -m tests.suite.pipeline.runtime.grad_sum_speed --rounds 40
    .venv/bin/python -m tests.suite.pipeline.runtime.grad_sum_speed --rounds 40 --device cuda

A round times both ways, in turn. The CPU has no product of bf16 factors into fp32, so there it is one of fp32 factors.
"""

import argparse
import statistics
import time

import torch
from torch import Tensor, nn

from models.shape import TransformerShape
from models.transformer import EncoderLayer
from suite.device import synchronize
from suite.pipeline.planning.memory_tracker import keep_freed_memory
from suite.pipeline.runtime import stage as stage_module
from suite.pipeline.runtime import weight_grad
from suite.pipeline.runtime.boundary import CutSpec
from suite.pipeline.runtime.skip import SkipLayout
from suite.pipeline.runtime.stage import CellMicroBatch, Stage
from tests.bench.ratio import ratio_of
from tests.suite.pipeline.runtime.test_grad_sums import multiply, multiply_and_add

SHAPES = {
    "width 512": TransformerShape(1, 512, 2048, 8, 1000, dropout=0.0),
    "slice": TransformerShape(1, 1024, 16384, 32, 1000, dropout=0.0),
}
TOKENS = (8, 128)
"""Rows and tokens a row of a micro-batch, as planned for t128_6b."""

AUTOCAST, IN_PRODUCT = "autocast", "in the product"


class MeanSquare(nn.Module):
    """The mean square of each position's output, summed over positions."""

    def forward(self, x: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
        objective = x.float().square().mean(-1).sum()
        return objective, objective.detach()


def backward_of(way: str, shape: TransformerShape, device: torch.device):
    """Returns a function that runs one micro-batch forward and backward."""
    kinds = (device.type,) if way == IN_PRODUCT else ()
    for module in (stage_module, weight_grad):
        module.MULTIPLIES_BF16_INTO_FP32 = kinds
    with torch.device("meta"):
        made = [EncoderLayer(shape)]
    cells, layout = [range(1)], SkipLayout([], [range(1)], 0)
    stage = Stage(made, cells, MeanSquare(), device, "bf16", seed=0)
    x = torch.randn(*TOKENS, shape.width, device=device).bfloat16().requires_grad_()
    sentence = torch.ones(*TOKENS, dtype=torch.int32, device=device)
    inputs = (x, sentence, sentence.long())
    boundary = layout.input_boundary(CutSpec.of(inputs))

    def run() -> None:
        for module in (stage_module, weight_grad):
            module.MULTIPLIES_BF16_INTO_FP32 = kinds
        micro_batch = CellMicroBatch(inputs, boundary, None)
        (objective,), _ = stage.forward_with_graph(micro_batch)
        stage.backward(micro_batch, (torch.ones_like(objective),))
        synchronize(device)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    device = torch.device(options.device)
    keep_freed_memory()
    if device.type == "cpu":
        library = torch.library.Library("aten", "IMPL")
        library.impl("mm.dtype", multiply, "CPU")
        library.impl("addmm.dtype_out", multiply_and_add, "CPU")
    for name, shape in SHAPES.items():
        runs = {way: backward_of(way, shape, device) for way in (AUTOCAST, IN_PRODUCT)}
        for run in runs.values():
            for _ in range(3):
                run()
        seconds: dict[str, list[float]] = {way: [] for way in runs}
        for _ in range(options.rounds):
            for way, run in runs.items():
                begin = time.perf_counter()
                run()
                seconds[way].append(time.perf_counter() - begin)
        print(name, {way: f"{1e3 * statistics.median(times):.2f} ms" for way, times in seconds.items()})
        print(
            "autocast over in the product:",
            ratio_of(seconds[AUTOCAST], seconds[IN_PRODUCT]),
        )


if __name__ == "__main__":
    main()
