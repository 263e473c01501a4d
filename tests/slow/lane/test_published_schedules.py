"""Idle time and memory of schedules in equal units, beside the papers'. The test prints docs/results/schedules.md:

.venv/bin/python -m pytest -n 0 -s tests/slow/lane/test_published_schedules.py
"""

from pathlib import Path

from experiments.report.table import Table
from suite.pipeline.schedule.config import V_SHAPED, ScheduleConfig
from suite.pipeline.schedule.csv_file import read_rows
from suite.pipeline.schedule.remat import UNLIMITED
from tests.suite.pipeline.schedule.test_v_schedules import (
    idle,
    most_held,
    published_idle,
    published_memory,
    spans,
    unlimited,
)
from tests.suite.pipeline.torch_schedules import dump

HEADINGS = (
    "schedule",
    "K",
    "M",
    "idle units (computed)",
    "idle units (paper)",
    "held micro-batches (computed)",
    "held micro-batches (paper)",
)
NOTES = (
    "F, I and W of half a stage take one unit each, B two, messages none. A step has 6 M units of work; the table has "
    "the others. K - 1 of them pass before the first forward reaches the last stage.",
    "Held micro-batches: of a whole stage, from F to W, on the stage that holds most.",
    "The papers' numbers: 2401.10241 for 1f1b, (K - 1)(F + B + W) of a whole stage, and for zero_bubble (its ZB-H1, "
    "and ZB-1P where F = B = W), (K - 1)(F + B - W); 2405.15362 for the others, for large M and without the K - 1 "
    "units.",
    "The last four of each K and M are schedules of torch.distributed.pipelining 2.13.",
    "Messages in flight are limited as in a run (suite/pipeline/schedule/flow_control.py). InterleavedZeroBubble "
    "waits for that with K = 8 and 16: without a limit it is idle for K - 1 units.",
)
TORCHS = ("Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")


def published(stages):
    """Returns idle units and held micro-batches by schedule."""
    one_cell = {"1f1b": (6 * (stages - 1), stages), "zero_bubble": (2 * (stages - 1), stages)}
    return one_cell | {name: (published_idle(name, stages), published_memory(name, stages)) for name in V_SHAPED}


def test_the_page_has_the_computed_numbers(tmp_path):
    rows = []
    for stages in (4, 8, 16):
        for micro_batches in (2 * stages, 4 * stages):
            configs = {name: ScheduleConfig(name, (UNLIMITED,)) for name in ("1f1b", "zero_bubble")}
            configs |= {name: unlimited(name) for name in V_SHAPED}
            for kind in TORCHS:
                lines = read_rows(dump(kind, tmp_path / kind, stages, micro_batches))
                configs[kind] = ScheduleConfig("csv", (UNLIMITED,), 2, lines)
            for name, schedule_config in configs.items():
                played = spans(schedule_config, stages, micro_batches)
                paper_idle, paper_held = published(stages).get(name, (None, None))
                held = most_held(played) / schedule_config.virtual_stages
                rows.append([name, stages, micro_batches, idle(played), paper_idle, held, paper_held])
    page = Table("schedules", "Idle time and memory of schedules in equal units", HEADINGS, rows, NOTES).markdown()
    print(page)
    assert (Path(__file__).parents[3] / "docs/results/schedules.md").read_text().strip() == page.strip()
