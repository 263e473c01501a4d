"""The benchmark of the mini-batches runs, and its table says what was measured. No time is asserted."""

import io
import re

import pytest
from rich.console import Console

from launch.benchmarks import bench, feed
from launch.benchmarks.feed import NOTHING, feed_table

TINY = "text.vocabulary=1200 text.max_length=32 train.batch_tokens=2000 pipeline.micro_batches=4 pipeline.stages=2"
TINY_TEXT = "text.corpus=django"


@pytest.mark.slow
def test_each_way_has_its_rates(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(feed, "SETTINGS", TINY_TEXT)
    monkeypatch.setattr(feed, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(feed, "NEEDED_S", 0.05)
    table = feed_table(Console(file=io.StringIO()), TINY, rounds=1)
    ways, tokens, seconds, launches = zip(*table.rows, strict=True)
    assert ways[:3] == (NOTHING, "a thread", "1 feed process")
    assert tokens[0] is seconds[0] is None
    assert all(re.fullmatch(r"[\d,]+ \[[\d,]+, [\d,]+\]", rate) for rate in (*tokens[1:], *launches))
    for rate, each in zip(tokens[1:], seconds[1:], strict=True):
        made = float(rate.split()[0].replace(",", ""))
        assert abs(made * each - 2000) < 100, "a mini-batch has about train.batch_tokens"
    assert "Needed: 40,000 tokens/s" in table.notes[1]
    monkeypatch.setattr(bench, "feed_table", lambda console: table)
    screen = io.StringIO()
    assert bench.bench("feed", Console(file=screen, soft_wrap=True)) == []
    assert "| a thread |" in screen.getvalue()
    assert (bench.FOLDER / "bench-feed.csv").exists()
