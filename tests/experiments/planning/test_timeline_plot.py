"""The picture of a step: a PNG that opens, wide enough to read, taller with more stages."""

from __future__ import annotations

from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
from matplotlib.colors import to_rgb

from experiments.planning.timeline_plot import COLOURS, draw
from suite.pipeline.planning.simulate import CellCost, simulate
from suite.pipeline.schedule.config import ScheduleConfig
from suite.pipeline.schedule.timeline import Timeline
from tests.suite.pipeline.schedule_helpers import fill_drain


def step(stages: int) -> Timeline:
    return simulate(fill_drain(stages, 4, "except_last"), [CellCost(1.0, 1.0, 2.0, update_s=1.5)] * stages)


def pixels(path: Path) -> np.ndarray:
    assert path.read_bytes().startswith(b"\x89PNG")
    return matplotlib.image.imread(path)[..., :3]


def coloured(image: np.ndarray, colour: str) -> np.ndarray:
    """Returns which of the image's pixels have a colour, (height, width)."""
    return (np.abs(image - np.array(to_rgb(colour))) < 0.02).all(axis=2)


def share(image: np.ndarray, colour: str) -> float:
    """Returns the share of the image's pixels that have a colour."""
    return float(coloured(image, colour).mean())


def widest(image: np.ndarray, colour: str) -> int:
    """Returns the pixels of the longest horizontal stretch of a colour."""
    rows = ("".join("#" if there else "." for there in row) for row in coloured(image, colour))
    return max(len(stretch) for row in rows for stretch in row.split("."))


@pytest.mark.parametrize("stages", [1, 6])
@pytest.mark.filterwarnings("error")
def test_it_is_a_png_of_sensible_size_with_every_kind_of_action(tmp_path: Path, stages: int) -> None:
    timeline = step(stages)
    draw([("measured", timeline), ("simulated", timeline)], tmp_path / "step.png", "a step")
    image = pixels(tmp_path / "step.png")
    height, width = image.shape[:2]
    assert 1200 < width < 2000
    assert 150 + 2 * 30 * stages < height < 400 + 2 * 60 * stages
    shares = {kind: share(image, COLOURS[kind]) for kind in "FRBU"}
    assert all(share(image, COLOURS[kind]) < 0.001 for kind in "IW")  # nothing is deferred, so the legend omits it
    assert all(value > 0.005 for value in shares.values()), shares
    assert shares["B"] > 1.5 * shares["F"]  # twice as long
    assert shares["F"] > shares["R"]  # four forwards, three recomputes


def test_a_shorter_step_is_shorter_on_the_common_scale(tmp_path: Path) -> None:
    short, long = step(2), simulate(fill_drain(2, 4, "never"), [CellCost(2.0, 2.0, 4.0, update_s=3.0)] * 2)
    draw([("short", short)], tmp_path / "alone.png", "")
    draw([("long", long), ("short", short)], tmp_path / "both.png", "")
    alone, both = (pixels(tmp_path / name) for name in ("alone.png", "both.png"))
    # nothing is recomputed in the long one, so all recomputes are the short one's, drawn narrower beside it
    narrower = widest(both, COLOURS["R"]) / widest(alone, COLOURS["R"])
    assert narrower == pytest.approx(short.seconds / long.seconds, rel=0.05)


def test_deferred_gradients_have_colours_second_cells_their_names_and_idle_stages_a_row(tmp_path: Path) -> None:
    deferred = simulate(
        ScheduleConfig("zero_bubble", (0,)).actions(2, 3), [CellCost(1.0, 1.0, 2.0, weight_grad_s=1.0)] * 2
    )
    cells = simulate(ScheduleConfig("interleaved", (0,), 2).actions(2, 3), [CellCost(1.0, 1.0, 2.0)] * 4)
    half = Timeline((step(1).rows[0], ()))
    draw([("deferred", deferred), ("cells", cells), ("half", half)], tmp_path / "step.png", "")
    assert all(share(pixels(tmp_path / "step.png"), COLOURS[kind]) > 0.005 for kind in "IW")
    assert "B2.1" in {str(span) for row in cells.rows for span in row}
