"""The benchmark: who runs when, what is made of times, and that wrong gradients are found. No time is asserted."""

import io
import json
import math
import re
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from rich.console import Console

from experiments.report.figure import svg
from experiments.tables.table2 import closed_form
from suite.pipeline.planning.costs import LayerCost
from tests.bench import bench, entrants
from tests.bench.__main__ import main
from tests.bench.cases import CASES, Case, ideal_fill_drain_s, turn_order
from tests.bench.peers.cell import OneProcess
from tests.bench.peers.peer import Entrant
from tests.bench.peers.workload import SyntheticWork
from tests.bench.ratio import ratio_of
from tests.bench.report import HEADINGS, entrants_table, page, summary
from tests.bench.results import Result, Score

TINY = Case(SyntheticWork(2, 3, forward_s=0.0), steps=2, rounds=2)
"""Its tensors are large beside the 8 KiB in which a step's shapes are sent."""


class Faulty(OneProcess):
    """One process that has something wrong with the gradient of layer 2."""

    def __init__(self, context, fault):
        super().__init__(context)
        self._fault = fault

    def gradients(self):
        found = super().gradients()
        if found and self._fault == "scaled":
            found[2, "weight"] = found[2, "weight"] * 1.001
        if found and self._fault == "missing":
            del found[2, "weight"]
        if found and self._fault == "not a number":
            found[2, "weight"] = torch.full_like(found[2, "weight"], math.nan)
        if found and self._fault == "a vector":
            found[2, "weight"] = found[2, "weight"].repeat(2)
        return found


def faulty(fault):
    return Entrant(fault, partial(Faulty, fault=fault), False)


FAULTS = ("scaled", "missing", "not a number", "a vector")


@pytest.fixture(autouse=True)
def here(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


def cost(forward, backward):
    return LayerCost(forward, forward, backward, 0.0, 1, 8, 8, 8, 8, 8, 8, 8)


@pytest.mark.slow
def test_wrong_gradients_are_found_and_end_the_command_with_exit_code_1(monkeypatch, capsys):
    several = (*entrants.OURS, Entrant("right", OneProcess, False), *map(faulty, FAULTS))
    monkeypatch.setattr(bench, "ENTRANTS", several)
    monkeypatch.setitem(CASES, "tiny", (TINY,))
    assert main("tiny") == 1
    printed_errors = capsys.readouterr().err
    assert all(f"wrong: {fault} in sleeping: K = 2, M = 3" in printed_errors.replace("\n", " ") for fault in FAULTS)
    assert "right in" not in printed_errors

    record = json.loads((bench.FOLDER / "bench.json").read_text())
    assert {"cpu", "cores", "threads_a_process", "torch", "deepspeed", "python"} <= record["machine"].keys()
    (case,) = record["cases"]
    assert (case["K"], case["M"], case["R"], case["cells"]) == (2, 3, 1, [2, 2])
    rows = {row["entrant"]: row for row in case["entrants"]}
    assert {name for name, row in rows.items() if row["wrong"]} == set(FAULTS)
    assert all(list(map(len, row["rounds"])) == [2, 2] for row in rows.values())
    assert rows["missing"]["difference"] is None
    assert rows["scaled"]["difference"] == pytest.approx(1e-3, rel=0.01)
    assert rows[entrants.RECOMPUTED]["over_best"]["all"]["peer"] == "right"  # of those that are right the only peer
    table = (bench.FOLDER / "bench-sleeping-k2-m3.md").read_text()
    assert table.count("WRONG GRADIENTS") == len(FAULTS)


@pytest.mark.slow
@pytest.mark.parametrize("own", [False, True])
def test_a_right_benchmark_ends_well_and_prints_its_progress(monkeypatch, own):
    monkeypatch.setattr(bench, "ENTRANTS", (entrants.OURS[0], Entrant("right", OneProcess, False)))
    monkeypatch.setitem(CASES, "tiny", (replace(TINY, own_processes=own),))
    screen = io.StringIO()
    assert bench.bench("tiny", Console(file=screen, soft_wrap=True)) == []
    assert "starting 2 entrants and comparing their gradients" in screen.getvalue()
    assert "K = 2, M = 3: round 1 of 2\n" in screen.getvalue()
    assert "round 2 of 2" in screen.getvalue()
    assert re.search(r"\| [\d.]+ \[[\d.]+, [\d.]+\], [a-z ]+ right \|", screen.getvalue())
    (case,) = json.loads((bench.FOLDER / "bench.json").read_text())["cases"]
    assert case["own_processes"] == own
    assert [list(map(len, row["rounds"])) for row in case["entrants"]] == [[2, 2], [2, 2]]


def test_each_round_runs_everybody_once_and_every_second_one_backwards():
    orders = [turn_order("DCBA", number) for number in range(20)]
    assert all(sorted(order) == [*"ABCD"] for order in orders)
    assert [order[::-1] for order in orders[::2]] == orders[1::2]
    assert len({*map(tuple, orders)}) > 4


def test_the_ideal_time_of_equal_stages_is_the_closed_form():
    layers = [cost(0.01, 0.02)] * 8
    assert ideal_fill_drain_s(layers, (2, 2, 2, 2), 8, recomputes=True) == pytest.approx(
        closed_form([cost(0.02, 0.04)] * 4, 8)
    )
    assert ideal_fill_drain_s(layers, (2, 2, 2, 2), 8, recomputes=False) == pytest.approx((8 + 4 - 1) * 0.06)


def known(seconds):
    """Six turns of one step each, all alike."""
    return ((seconds,),) * 6


def result_of(*scores):
    return Result(TINY, (2, 2), (cost(1.0, 2.0),) * 4, scores)


MINE = Score("suite mine", True, True, known(2.0), peak_bytes=100, difference=1e-7, ideal_s=1.0)
QUICK = Score("quick", False, False, known(1.0), peak_bytes=900, difference=1e-7, ideal_s=0.5)
LEAN = Score("lean", False, False, known(1.5), peak_bytes=90, difference=1e-7, ideal_s=0.5)
ALIKE = Score("alike", False, True, known(4.0), peak_bytes=500, difference=1e-7, ideal_s=0.5)
CHEAT = Score("cheat", False, True, known(0.1), peak_bytes=10, difference=0.5, ideal_s=0.5)
LARGE = Score("large", False, False, known(0.9), peak_bytes=1000, difference=0.0, ideal_s=0.5)


def test_ratios_by_hand():
    absent = Score("absent", False, False, remark="not run: it is not here")
    result = result_of(QUICK, MINE, absent, ALIKE, CHEAT, LEAN, LARGE)
    (row,) = summary(result).rows
    assert row == [
        "suite mine",
        "0.450 [0.450, 0.450], behind large",
        "2.000 [2.000, 2.000], ahead of alike",
        "0.750 [0.750, 0.750], behind lean",
    ]
    rows = {row[0]: dict(zip(HEADINGS, row, strict=True)) for row in entrants_table(result).rows}
    assert list(rows) == ["suite mine", "cheat", "large", "quick", "lean", "alike", "absent"]
    assert rows["suite mine"]["step s (measured)"] == 2.0
    assert rows["suite mine"]["ideal / step"] == 0.5
    assert rows["absent"]["remark"] == "not run: it is not here"
    assert rows["cheat"]["remark"] == "WRONG GRADIENTS"
    assert [score.entrant for score in result.wrong] == ["cheat"]
    written = page(result)
    assert "| alike | 2.000 [2.000, 2.000] |" in written.markdown()
    (picture,) = written.sections[0].pictures
    assert "times as fast as the fastest peer" in svg(picture.figure)
    json.dumps(result.record(), allow_nan=False)


def test_a_peer_needs_at_most_1_percent_more_memory_than_the_entrant_or_its_limit():
    def best(peak, **mine):
        found = result_of(replace(MINE, **mine), replace(LEAN, peak_bytes=peak)).ours[0]
        return result_of(found, replace(LEAN, peak_bytes=peak)).best(found, "in its memory")

    assert best(101) is not None
    assert best(102) is None
    assert best(102, memory_limit_bytes=102) is not None
    assert best(101, memory_limit_bytes=50) is None


def test_the_command_lists_the_cases_and_refuses_a_wrong_name(capsys):
    assert main("") == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in CASES)
    assert main("sleepin") == 2
    assert capsys.readouterr().err == "error: there is no benchmark 'sleepin'; did you mean sleeping?\n"


@pytest.mark.parametrize(
    ("other", "own", "verdict", "text"),
    [
        ([3.0, 4.0, 10.0], [2.0, 4.0, 8.0], "undecided against", "1.250 [1.000, 1.500]"),
        ([0.99, 1.01] * 3, [1.0] * 6, "level with", "1.000 [0.990, 1.010]"),
        ([1.0, 1.08] * 3, [1.0] * 6, "undecided against", "1.040 [1.000, 1.080]"),
        ([1.1, 1.54, 0.99, 2.75], [1.0, 1.4, 0.9, 2.5], "ahead of", "1.100 [1.100, 1.100]"),
        ([0.9, 1.26, 0.81, 2.25], [1.0, 1.4, 0.9, 2.5], "behind", "0.900 [0.900, 0.900]"),
    ],
)
def test_a_verdict_needs_an_interval_of_ratios_without_1_or_a_narrow_one(other, own, verdict, text):
    """What slows a whole round, as in the last two, does not blur the ratio."""
    found = ratio_of(other, own)
    assert (found.verdict, str(found)) == (verdict, text)


def test_the_interval_covers_the_true_ratio_in_about_95_of_100_contests():
    draws = np.random.default_rng(0)
    noises = [np.exp(0.04 * draws.standard_normal((2, 6))) for _ in range(200)]
    found = [ratio_of(1.05 * other, own) for other, own in noises]
    assert 0.91 <= sum(ratio.low <= 1.05 <= ratio.high for ratio in found) / 200 <= 0.995
