"""``python -m tests.gpu.layer_speed [cpu]``: the layers of t12_400m and their attention, as they are and otherwise.

Layers in bf16, 16,384 tokens: eager, and compiled as in a run. Attention of packed rows: by a mask, as in a run, and by
segments of any length. All are timed in turns; the host's time ends when everything is started. On a CPU sizes are
small, and attention by segments, which has no kernel there, is left out.
"""

import statistics
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from models.blocks import _attend
from models.masks import mask, source_to_source, target_to_target
from models.shape import TransformerShape
from models.transformer import DecoderLayer, EncoderLayer
from suite import device as kinds
from suite.device import is_host, module_of, synchronize

ROUNDS, SENTENCES = 20, 4
DEVICE = torch.device("cpu" if "cpu" in sys.argv else "cuda")
ROWS, TIME, WIDTH, HIDDEN, HEADS = (4, 24, 64, 128, 2) if is_host(DEVICE) else (128, 128, 1024, 8192, 16)
SENTENCE = (torch.arange(TIME, device=DEVICE) * SENTENCES // TIME).expand(ROWS, TIME)


def layer_work(make: type[EncoderLayer] | type[DecoderLayer], compiles: bool) -> tuple[Callable[[], Tensor], Tensor]:
    torch.manual_seed(0)
    layer = make(TransformerShape(6, WIDTH, HIDDEN, HEADS, vocabulary=64_000)).to(DEVICE)
    x, memory = torch.randn(2, ROWS, TIME, WIDTH, device=DEVICE, dtype=torch.bfloat16)
    others = (SENTENCE, SENTENCE) if make is EncoderLayer else (memory, torch.cat((SENTENCE, SENTENCE), dim=1))
    x.requires_grad_()

    def work() -> Tensor:
        kinds.COMPILES = (DEVICE.type,) if compiles else ()
        with torch.autocast(DEVICE.type, torch.bfloat16):
            torch.manual_seed(1)
            return layer(x, *others)[0]

    return work, memory


def attention_work(causal: bool, by_segments: bool) -> tuple[Callable[[], Tensor], Tensor]:
    torch.manual_seed(0)
    joint = torch.randn(3, ROWS, TIME, HEADS, 64, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    ends = torch.arange(ROWS * SENTENCES + 1, device=DEVICE, dtype=torch.int32) * (TIME // SENTENCES)
    window = (-1, 0) if causal else (-1, -1)

    def work() -> Tensor:
        if by_segments:
            flat = (part.flatten(0, 1) for part in joint)
            return varlen_attn(*flat, ends, ends, TIME, TIME, window_size=window).flatten(1)
        rule = (target_to_target, SENTENCE, 0) if causal else (source_to_source, SENTENCE, TIME)
        return _attend(*joint.transpose(2, 3), partial(mask, *rule), causal=False).flatten(0, 1)

    return work, torch.randn(ROWS * TIME, HEADS * 64, device=DEVICE, dtype=torch.bfloat16)


def main() -> None:
    """Prints a table: medians in milliseconds, the peak of a forward and backward, and how far the outputs differ."""
    entries = {}
    for make in (EncoderLayer, DecoderLayer):
        entries |= {(make.__name__, way): layer_work(make, way == "compiled") for way in ("eager", "compiled")}
    for causal in (False, True):
        ways = ("mask",) if is_host(DEVICE) else ("mask", "segments")
        entries |= {(f"attention, {causal=}", way): attention_work(causal, way == "segments") for way in ways}
    times: dict[tuple[str, str], list[tuple[float, float, float]]] = {key: [] for key in entries}
    outputs, peaks = {key: work().detach() for key, (work, _) in entries.items()}, {}
    for _ in range(ROUNDS + 3):
        for key, (work, gradient) in entries.items():
            synchronize(DEVICE)
            if not is_host(DEVICE):
                module_of(DEVICE).reset_peak_memory_stats()
            marks = [time.perf_counter()]
            output = work()
            for step in (lambda: synchronize(DEVICE), lambda out=output, grad=gradient: out.backward(grad)):
                step()
                marks.append(time.perf_counter())
            synchronize(DEVICE)
            marks.append(time.perf_counter())
            times[key].append((marks[1] - marks[0], marks[3] - marks[0], marks[2] - marks[1]))
            peaks[key] = 0 if is_host(DEVICE) else module_of(DEVICE).max_memory_allocated()
    print(f"torch {torch.__version__}, {DEVICE}\n")
    print("| what | way | forward | both | host, backward | MiB | differs |", "|" + 7 * "---|", sep="\n")
    for (what, way), found in times.items():
        medians = [1e3 * statistics.median(part) for part in zip(*found[3:], strict=True)]
        first = next(output for key, output in outputs.items() if key[0] == what)
        gap = float((outputs[what, way].float() - first.float()).abs().max())
        cells = " | ".join(f"{median:.3f}" for median in medians)
        print(f"| {what} | {way} | {cells} | {peaks[what, way] / 2**20:.0f} | {gap:.2g} |")


if __name__ == "__main__":
    main()
