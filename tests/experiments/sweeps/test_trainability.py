"""The trainability sweep: how its members differ, and its report of hand-made records."""

import json
import math

import pytest

from experiments.base.cluster import Cluster
from experiments.sweeps.trainability import CASES, FACTORS, SWEEP
from suite.pipeline.planning.devices import GIB

LAPTOP = Cluster(devices=2, bytes_per_device=12 * GIB, kind="cpu")


@pytest.mark.parametrize("scale", SWEEP.scales)
def test_members_differ_only_in_initialization_clipping_and_rate(scale, tmp_path):
    members = SWEEP.members(scale, LAPTOP, tmp_path)
    count = len(CASES) * len(FACTORS)
    assert len({member.folder for member in members}) == len({member.label for member in members}) == count
    differences = set()
    base = members[0].experiment
    for member in members:
        run = member.experiment
        differences.add(
            (
                run.model.depth_scaled_init,
                run.model.logit_clip,
                run.optimizer.learning_rate / base.optimizer.learning_rate,
            )
        )
        optimizer = run.optimizer.model_copy(update={"learning_rate": base.optimizer.learning_rate})
        assert run.model_copy(update={"model": base.model, "optimizer": optimizer}) == base
        assert run.model.layers == base.model.layers
    assert differences == {(start, clip, rate) for start in (True, False) for clip in (30.0, None) for rate in FACTORS}
    if scale != "tiny":
        assert base.model.list_length == 131  # the paper's 128, two embeddings and the head


def test_the_report_lists_finished_and_missing_members(tmp_path):
    first, second = SWEEP.members("laptop", LAPTOP, tmp_path)[:2]
    for member, norm in ((first, 0.5), (second, None)):
        folder = tmp_path / member.folder
        folder.mkdir(parents=True)
        (folder / "record.json").write_text(json.dumps({"valid_nll": 6.25}))
        lines = [
            {"train/loss": 9 - step / 10, "train/grad_norm": norm, "train/applied": float(step != 3)}
            for step in range(20)
        ]
        lines.insert(10, {"step": 10, "valid/nll": 7.5})
        (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
        layers = [{"step": step, "norms": [0.1, 0.2, norm], "kurtosis": [0.5, step, None]} for step in (1, 10)]
        (folder / "layers.jsonl").write_text("\n".join(map(json.dumps, layers)))
    (table,) = SWEEP.tables("laptop", LAPTOP, tmp_path)
    left_out, early, late, valid, middle, largest, sharp_first, sharp_last = table.rows[0][1:]
    assert (left_out, valid, middle, largest, sharp_first, sharp_last) == (1, 6.25, 0.5, 0.5, 1, 10)
    assert math.isclose(early, 8.55)
    assert math.isclose(late, 7.55)
    assert table.rows[1][5:7] == [None, None]  # no norm was finite
    html, markdown = SWEEP.page("laptop", LAPTOP, tmp_path).write(tmp_path / "report")
    assert html.read_text().count("<svg") == 2
    text = markdown.read_text()
    assert f"excluded: {SWEEP.members('laptop', LAPTOP, tmp_path)[2].folder}" in text
    assert first.folder not in text.partition("excluded: ")[2].partition("\n")[0]
    assert "smoke test" not in text
    assert "> **A smoke test: at scale tiny" in SWEEP.page("tiny", LAPTOP, tmp_path).markdown()
