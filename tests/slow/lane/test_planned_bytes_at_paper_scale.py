"""Planned bytes of every stage of the five translation runs at the paper's sizes, beside those alive in a step.

Each has the run's own micro-batches on K H100s, with R = 1 and M = 6. With so few micro-batches a plan would keep all
activations; they are recomputed, as in the whole run. The test prints docs/results/dry-run.md:

    .venv/bin/python -m pytest -n 0 -s --timeout 1800 tests/slow/lane/test_planned_bytes_at_paper_scale.py
"""

from experiments.registry import find
from experiments.report.table import Table
from experiments.translation.runs import MULTILINGUAL_RUNS
from suite.pipeline.planning.devices import GIB
from tests.lane.server import Server

MICRO_BATCHES = 6
HEADINGS = (
    "experiment",
    "K",
    "M",
    "stage",
    "layers",
    "planned GiB (computed)",
    "live GiB (computed)",
    "planned / live",
)
NOTES = [
    "Parameters, gradients, activations and messages, without the process itself and its communicators. A plan also "
    "counts the state of the optimizer, Adafactor, which does not exist in a first step.",
    "Live bytes are those of a step on a device without values, with the formats of CUDA's autocast, its masks of "
    "dropout and a fused attention.",
]


def test_every_stage_has_room_and_hardly_more():
    rows = []
    with Server() as server:
        for make in MULTILINGUAL_RUNS:
            run = find(make.__name__)
            each = run.batch // (run.pipeline.replicas * run.pipeline.micro_batches)
            settings = (
                f"pipeline.replicas=1 pipeline.micro_batches={MICRO_BATCHES} train.batch_tokens={MICRO_BATCHES * each} "
                "pipeline.remat=except_last"
            )
            stages, error = server.call("tests.lane.live_bytes:bytes_of_stages", run.name, settings)
            assert error is None
            for stage, (layers, planned, live) in enumerate(stages):
                place = run.name, len(stages), MICRO_BATCHES, stage, layers
                rows.append([*place, planned / GIB, live / GIB, planned / live])
    title = "Planned memory of every stage beside a step on fake tensors"
    print(Table("dry_run", title, HEADINGS, rows, NOTES).markdown())
    assert len(rows) == 31
    assert all(1 <= ratio <= 1.05 for *_, ratio in rows)
