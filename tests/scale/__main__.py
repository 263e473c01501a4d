"""``python -m tests.scale`` counts and simulates what 64 to 1,024 workers do, and writes docs/results/scale.md."""

import math
import pickle
import statistics
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from experiments.base.cluster import NETWORK
from experiments.registry import find
from launch.supervision.watchdog import PERIOD_S, StallDetector
from launch.worker import heartbeat
from launch.worker.attempt import Attempt
from launch.worker.heartbeat import Heartbeat, parse_heartbeat
from suite.pipeline.model.topology import RankCoord
from suite.pipeline.planning.devices import Machine
from suite.pipeline.runtime.gradient_reducer import ACCELERATOR_BUCKET_BYTES, Shards, _buckets
from tests.scale.joining import joined
from tests.scale.starts import Machines, simulate

PAGE = Path(__file__).parents[2] / "docs/results/scale.md"
COUNTED = ((2, 1), (4, 1), (8, 1), (2, 2), (2, 4), (2, 8), (4, 4))
"""K and R of the processes in which calls are counted."""
SIZES = ((8, 8), (16, 16), (16, 64))
SEEDS = 5


def joining() -> Iterator[str]:
    """Yields the table of what a worker asks of the store, counted and extrapolated."""
    found = [joined(*shape) for shape in COUNTED]
    terms = [(1, stages, replicas, np.log2(stages * replicas)) for stages, replicas in COUNTED]
    fits = [np.linalg.lstsq(np.array(terms), np.array(column), rcond=None)[0] for column in zip(*found, strict=True)]
    yield "| K x R | workers | calls of the store by a worker | bytes sent by it | its descriptors | |"
    yield "|---|---|---|---|---|---|"
    for (stages, replicas), own in zip(COUNTED, found, strict=True):
        row = f"{own.calls} | {own.sent_bytes:,} | {own.descriptors}"
        yield f"| {stages} x {replicas} | {stages * replicas} | {row} | counted |"
    for stages, replicas in SIZES:
        values = (float(fit @ (1, stages, replicas, np.log2(stages * replicas))) for fit in fits)
        row = " | ".join(f"{value:,.0f}" for value in values)
        yield f"| {stages} x {replicas} | {stages * replicas:,} | {row} | extrapolated |"


def driver() -> Iterator[str]:
    """Yields the table of what the driver does for all workers."""
    yield "| workers | heartbeats a second | CPU of the watchdog, % of a core | memory of the last heartbeats, MiB |"
    yield "|---|---|---|---|"
    for stages, replicas in SIZES:
        workers = stages * replicas
        coords = [RankCoord(rank, stages, replicas) for rank in range(workers)]
        beat = Heartbeat(0, 0, 1, 1, "host-1", "n" * 56, 1, 1, "F2", 17, 0, 17, None, "", 0.1, 8.0, 8.0)
        data = heartbeat._HEARTBEAT.dump_json(beat).ljust(heartbeat._SIZE)
        detector = StallDetector(coords)
        tracemalloc.start()
        beats = {coord.rank: parse_heartbeat(data, 1) for coord in coords}
        used = tracemalloc.get_traced_memory()[0] / 2**20
        tracemalloc.stop()
        begin = time.process_time()
        for _ in range(20):
            beats = {coord.rank: parse_heartbeat(data, 1) for coord in coords}
            detector.update({rank: found for rank, found in beats.items() if found}, PERIOD_S)
        share = (time.process_time() - begin) / 20 / PERIOD_S
        yield f"| {workers:,} | {workers:,} | {100 * share:.1f} | {used:.1f} |"


def reductions() -> Iterator[str]:
    """Yields the table of what the replicas of a stage of t128_6b reduce in a step, with K = 16 on H100s."""
    yield "| R | all-reduces, planned | buckets | reductions with ZeRO-1 | planned seconds of bytes | of latency |"
    yield "|---|---|---|---|---|---|"
    layers, _ = find("t128_6b").build()
    parameters = [each for layer in layers[: len(layers) // 16] for each in layer.parameters()]
    values = sum(each.numel() for each in parameters)
    offsets = np.cumsum([0, *(each.numel() for each in parameters)])
    buckets = [*_buckets(parameters[::-1])]
    for _, replicas in SIZES:
        size = -(-values // replicas)
        shards = Shards({id(each): (int(at), size) for each, at in zip(parameters, offsets, strict=False)})
        slices = sum(len(shards.slices(bucket)) for bucket in buckets)
        machine = Machine(0, reduce_bytes_per_s=NETWORK.bytes_per_s, transport="nccl")
        far = replace(machine, reduce_bytes_per_s=math.inf, reduce_latency_s=NETWORK.latency_s)
        seconds = (4 * values * each.reduce_s_per_byte(replicas) for each in (machine, far))
        row = " | ".join(f"{each:.3f}" for each in seconds)
        planned = f"{4 * values / ACCELERATOR_BUCKET_BYTES:.0f}"
        yield f"| {replicas} | {planned} | {len(buckets)} | {slices} | {row} |"


def import_s() -> list[float]:
    """Returns the seconds in which fresh processes import what a worker needs."""
    found = []
    for _ in range(8):
        begin = time.monotonic()
        subprocess.run([sys.executable, "-c", "import launch.worker.worker"], check=True)
        found.append(time.monotonic() - begin)
    return found


def starts(imports: list[float]) -> Iterator[str]:
    """Yields the table of simulated starts and recoveries."""
    yield (
        "| workers | first step, s: median, worst | again after a death, s: median, worst | actors started again "
        "| as it was, s | actors |"
    )
    yield "|---|---|---|---|---|---|"
    for stages, replicas in SIZES:
        workers, machines = stages * replicas, Machines(imports)
        now, before = ([simulate(workers, machines, seed, old) for seed in range(SEEDS)] for old in (False, True))
        assert not any(start.verdict for start in now), "a healthy start was called a stall"
        first, again = [start.first_step_s for start in now], [start.again_s for start in now]
        was = [start.again_s for start in before]
        yield (
            f"| {workers:,} | {statistics.median(first):.0f}, {max(first):.0f} | {statistics.median(again):.0f}, "
            f"{max(again):.0f} | {now[0].started_again} | {statistics.median(was):.0f} | {before[0].started_again:,} |"
        )


def main() -> None:
    imports = import_s()
    attempt = len(pickle.dumps(Attempt(Path("/storage/runs/t128_6b/x"), Path("/storage/.cache/x"), 1024)))
    lines = [
        "# 1,024 workers, on two cores: `python -m tests.scale`", "",
        f"{datetime.now(UTC):%Y-%m-%d}. No run had so many workers.", "",
        "## Meeting", "", *joining(), "", f"Each worker gets {attempt} bytes; it reads plan and experiment itself.", "",
        "## The driver (measured)", "", *driver(), "",
        "## Reductions of a stage of t128_6b, K = 16 (counted, computed)", "", *reductions(), "",
        "## Starts (simulated)", "",
        f"A worker's imports take what was measured here, {min(imports):.1f} to {max(imports):.1f} s; those of eight "
        "workers, one node's, 60 times as long, because its disk is cold (assumed). After a death one other process "
        "ends 40 s late (assumed). As it was: all ends had 15 s together, and a late one cost all actors.", "",
        *starts(imports),
    ]  # fmt: skip
    PAGE.write_text("\n".join(lines) + "\n")
    print(PAGE.read_text())


if __name__ == "__main__":
    main()
