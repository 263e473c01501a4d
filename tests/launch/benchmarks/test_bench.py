"""The benchmark: who runs when, what is made of times, and that wrong gradients are found. No time is asserted."""

import csv
import io
import json
import math
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch
from rich.console import Console

from experiments.benchmark import cases
from experiments.benchmark.cases import CASES, HEADINGS, Case, Result, Score, ideal_fill_drain_s, order, refused
from experiments.benchmark.peers.one_process import OneProcess
from experiments.benchmark.peers.peer import Entrant
from experiments.benchmark.peers.workload import SyntheticWork
from experiments.tables.table2_transformer import closed_form
from launch import cli
from launch.benchmarks import bench, entrants
from launch.benchmarks.worker import Observation
from suite.errors import SettingError
from suite.pipeline.planning.costs import LayerCost

TINY = Case(SyntheticWork(2, 3, forward_s=0.0, shape=(2, 3, 4)), rounds=2, steps=2)


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


def test_wrong_gradients_are_found_and_end_the_command_with_exit_code_1(monkeypatch, capsys):
    several = (*entrants.OURS, Entrant("right", OneProcess, False), *map(faulty, FAULTS))
    monkeypatch.setattr(entrants, "ENTRANTS", several)
    monkeypatch.setitem(CASES, "tiny", (TINY,))
    monkeypatch.setattr(sys, "argv", ["gpipe", "bench", "tiny"])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 1
    printed_errors = capsys.readouterr().err
    assert all(f"wrong: {fault} in sleeping: K = 2, M = 3" in printed_errors.replace("\n", " ") for fault in FAULTS)
    assert "right in" not in printed_errors

    record = json.loads((bench.FOLDER / "bench.json").read_text())
    assert {"cpu", "cores", "threads_a_process", "torch", "deepspeed", "python"} <= record["machine"].keys()
    (case,) = record["cases"]
    assert (case["K"], case["M"], case["R"], case["cells"]) == (2, 3, 1, [2, 2])
    rows = {row["entrant"]: row for row in case["entrants"]}
    assert {name for name, row in rows.items() if row["wrong"]} == set(FAULTS)
    assert all(len(row["rounds"]) == 2 and all(len(steps) == 2 for steps in row["rounds"]) for row in rows.values())
    assert rows["missing"]["gradient_difference"] is None
    assert rows["scaled"]["gradient_difference"] == pytest.approx(1e-3, rel=0.01)
    assert rows["right"]["over_best_peer"] == 1.0  # of those that are right it is the only peer
    table = (bench.FOLDER / "bench-sleeping-k2-m3.md").read_text()
    assert table.count("WRONG GRADIENTS") == len(FAULTS)
    with (bench.FOLDER / "bench-sleeping-k2-m3.csv").open() as file:
        assert [row["entrant"] for row in csv.DictReader(file)][:2] != ["right", "scaled"]  # ours come first


@pytest.mark.parametrize("apart", [False, True])
def test_a_right_contest_ends_well_and_prints_its_progress(monkeypatch, apart):
    monkeypatch.setattr(entrants, "ENTRANTS", (entrants.OURS[0], Entrant("right", OneProcess, False)))
    monkeypatch.setitem(CASES, "tiny", (replace(TINY, fresh_processes=apart),))
    screen = io.StringIO()
    assert bench.bench("tiny", Console(file=screen, soft_wrap=True)) == []
    assert ("2 entrants built and their gradients compared" in screen.getvalue()) == (not apart)
    assert "round 2 of 2" in screen.getvalue()
    assert "suite fill-drain, recomputed" in screen.getvalue()
    (case,) = json.loads((bench.FOLDER / "bench.json").read_text())["cases"]
    assert case["apart"] == apart
    assert [[len(steps) for steps in row["rounds"]] for row in case["entrants"]] == [[2, 2], [2, 2]]


def test_two_rounds_of_an_entrant_are_as_bad_as_the_worse():
    nan = float("nan")
    once = Observation({(0, "a"): 1.0, (0, "b"): 3.0, (1, "c"): 0.0, (1, "d"): nan}, 5, ((1.0,),))
    again = Observation({(0, "a"): 2.0, (0, "b"): 1.0, (1, "d"): 0.0}, 7, ((2.0,),))
    both = once.then(again)
    assert {key: both.differences[key] for key in [(0, "a"), (0, "b"), (1, "c")]} == {
        (0, "a"): 2.0, (0, "b"): 3.0, (1, "c"): math.inf,
    }  # fmt: skip
    assert math.isnan(both.differences[1, "d"])
    assert (both.peak, both.rounds) == (7, ((1.0,), (2.0,)))


@pytest.mark.parametrize(("count", "rounds"), [(16, 3), (5, 5), (2, 3), (1, 4)])
def test_each_round_runs_everybody_once_and_nobody_is_always_first(count, rounds):
    all_rounds = [order(count, at, rounds) for at in range(rounds)]
    assert all(sorted(one) == list(range(count)) for one in all_rounds)
    firsts = [one[0] for one in all_rounds]
    assert len(set(firsts)) == min(count, rounds)


def test_the_limit_of_equal_stages_is_the_closed_form():
    layers = [cost(0.01, 0.02)] * 8
    whole = cost(0.02, 0.04)
    assert ideal_fill_drain_s(layers, (2, 2, 2, 2), 8, recomputes=True) == pytest.approx(closed_form(whole, 4, 8))
    assert ideal_fill_drain_s(layers, (2, 2, 2, 2), 8, recomputes=False) == pytest.approx((8 + 4 - 1) * 0.06)


def test_ratios_by_hand():
    mine = Score("mine", True, True, ((2.0,), (1.0,), (3.0,)), peak_bytes=100, difference=1e-7, lower_bound_s=1.0)
    quick = Score("quick", False, False, ((1.0,),), peak_bytes=900, difference=1e-7, lower_bound_s=0.5)
    lean = Score("lean", False, False, ((1.5,),), peak_bytes=90, difference=1e-7, lower_bound_s=0.5)
    alike = Score("alike", False, True, ((4.0,),), peak_bytes=500, difference=1e-7, lower_bound_s=0.5)
    cheat = Score("cheat", False, True, ((0.1,),), peak_bytes=10, difference=0.5, lower_bound_s=0.5)
    unseen = Score("unseen", False, False, ((0.9,),), difference=0.0, lower_bound_s=0.5)
    absent = refused(Entrant("absent", OneProcess, False), "it is not here")
    result = Result(TINY, (2, 2), (cost(1.0, 2.0),) * 4, (quick, mine, absent, alike, cheat, lean, unseen))
    rows = {row[0]: dict(zip(HEADINGS, row, strict=True)) for row in result.table().rows}
    assert list(rows) == ["mine", "cheat", "unseen", "quick", "lean", "alike", "absent"]
    assert rows["mine"]["step s (measured)"] == 2.0
    assert rows["mine"]["spread"] == 1.0
    assert rows["mine"]["speed over best peer"] == 0.45  # unseen
    assert rows["mine"]["over best alike"] == 2.0
    assert rows["mine"]["over best in its memory"] == 0.75  # lean; of the unseen nobody knows
    assert rows["mine"]["limit / step"] == 0.5
    assert rows["unseen"]["over best in its memory"] is None
    assert rows["absent"]["remark"] == "not run: it is not here"
    assert rows["cheat"]["remark"] == "WRONG GRADIENTS"
    assert [score.entrant for score in result.wrong] == ["cheat"]
    json.dumps(result.record(), allow_nan=False)


def test_cases_by_name():
    assert [case.work.stages for case in cases.cases("sleeping")] == [2, 4, 8, 8, 16]
    everything = cases.cases("all")
    assert len(everything) == sum(map(len, CASES.values()))
    assert len({case.name for case in everything}) == len(everything)
    with pytest.raises(SettingError, match="did you mean layers"):
        cases.cases("layer")
    assert cases.TOLERANCE <= 1e-4
