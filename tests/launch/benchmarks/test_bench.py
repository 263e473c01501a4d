"""The benchmark: who runs when, what is made of times, and that wrong gradients are found. No time is asserted."""

import io
import json
import math
import os
import sys
import time
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from experiments.benchmark import cases
from experiments.benchmark.cases import CASES, Case, ideal_fill_drain_s, turn_order
from experiments.benchmark.peers.one_process import OneProcess
from experiments.benchmark.peers.peer import Entrant
from experiments.benchmark.peers.workload import SyntheticWork
from experiments.benchmark.report import HEADINGS, entrants_table, page, summary
from experiments.benchmark.results import TOLERANCE, Result, Score, refused
from experiments.tables.table2_transformer import closed_form
from launch import cli
from launch.benchmarks import bench, entrants
from suite.errors import SettingError, WorkerDiedError
from suite.pipeline.planning.costs import LayerCost

TINY = Case(SyntheticWork(2, 3, forward_s=0.0, shape=(2, 3, 4)), steps=2, time_limit_s=0.0)


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
    assert all({at: len(steps) for at, steps in row["seconds_by_round"].items()} == {"0": 2, "1": 2}
               for row in rows.values())  # fmt: skip
    assert rows["missing"]["gradient_difference"] is None
    assert rows["scaled"]["gradient_difference"] == pytest.approx(1e-3, rel=0.01)
    assert rows[entrants.RECOMPUTED]["over_best"]["all"]["peer"] == "right"  # of those that are right the only peer
    table = (bench.FOLDER / "bench-sleeping-k2-m3.md").read_text()
    assert table.count("WRONG GRADIENTS") == len(FAULTS)


@pytest.mark.parametrize("own", [False, True])
def test_a_right_benchmark_ends_well_and_prints_its_progress(monkeypatch, own):
    monkeypatch.setattr(entrants, "ENTRANTS", (entrants.OURS[0], Entrant("right", OneProcess, False)))
    monkeypatch.setitem(CASES, "tiny", (replace(TINY, own_processes=own),))
    screen = io.StringIO()
    assert bench.bench("tiny", Console(file=screen, soft_wrap=True)) == []
    assert "starting 2 entrants and comparing their gradients" in screen.getvalue()
    assert "2 rounds, the last with 2 entrants" in screen.getvalue()
    assert "(2 rounds), undecided against right |" in screen.getvalue()
    (case,) = json.loads((bench.FOLDER / "bench.json").read_text())["cases"]
    assert case["own_processes"] == own
    assert [list(map(len, row["seconds_by_round"].values())) for row in case["entrants"]] == [[2, 2], [2, 2]]


class Dying(OneProcess):
    """One process that ends in its first turn."""

    def __init__(self, context):
        super().__init__(context)
        self._steps = 0

    def step(self):
        self._steps += 1
        if self._steps > 1:
            os._exit(3)
        super().step()


def test_a_worker_that_dies_in_its_turn_ends_the_benchmark_at_once():
    rivals = (Entrant("right", OneProcess, False), Entrant("dying", Dying, False))
    costs = [cost(1.0, 2.0)] * 4
    begin = time.monotonic()
    with pytest.raises(WorkerDiedError, match="exit code 3"):
        bench.run(replace(TINY, own_processes=True), rivals, Console(file=io.StringIO()), costs)
    assert time.monotonic() - begin < 240


@given(st.sets(st.text(min_size=1), min_size=1, max_size=20), st.integers(0, 50))
def test_each_round_runs_everybody_once_and_every_second_one_backwards(names, at):
    order = turn_order(names, at)
    assert sorted(order) == sorted(names)
    assert turn_order(names, at ^ 1) == order[::-1]


def test_the_ideal_time_of_equal_stages_is_the_closed_form():
    layers = [cost(0.01, 0.02)] * 8
    whole = cost(0.02, 0.04)
    assert ideal_fill_drain_s(layers, (2, 2, 2, 2), 8, recomputes=True) == pytest.approx(closed_form(whole, 4, 8))
    assert ideal_fill_drain_s(layers, (2, 2, 2, 2), 8, recomputes=False) == pytest.approx((8 + 4 - 1) * 0.06)


def known(seconds, rounds=6):
    """Turns of one step each, all alike."""
    return dict.fromkeys(range(rounds), (seconds,))


def result_of(*scores):
    return Result(TINY, (2, 2), (cost(1.0, 2.0),) * 4, scores)


MINE = Score("suite mine", True, True, known(2.0), peak_bytes=100, difference=1e-7, ideal_s=1.0)
QUICK = Score("quick", False, False, known(1.0), peak_bytes=900, difference=1e-7, ideal_s=0.5)
LEAN = Score("lean", False, False, known(1.5), peak_bytes=90, difference=1e-7, ideal_s=0.5)
ALIKE = Score("alike", False, True, known(4.0), peak_bytes=500, difference=1e-7, ideal_s=0.5)
CHEAT = Score("cheat", False, True, known(0.1), peak_bytes=10, difference=0.5, ideal_s=0.5)
UNSEEN = Score("unseen", False, False, known(0.9), difference=0.0, ideal_s=0.5)


def test_ratios_by_hand():
    absent = refused(Entrant("absent", OneProcess, False), "it is not here")
    result = result_of(QUICK, MINE, absent, ALIKE, CHEAT, LEAN, UNSEEN)
    (row,) = summary(result).rows
    assert row == [
        "suite mine",
        "0.450 [0.450, 0.450], behind unseen",
        "2.000 [2.000, 2.000], ahead of alike",
        "0.750 [0.750, 0.750], behind lean",  # of the memory of unseen nobody knows
    ]
    rows = {row[0]: dict(zip(HEADINGS, row, strict=True)) for row in entrants_table(result).rows}
    assert list(rows) == ["suite mine", "cheat", "unseen", "quick", "lean", "alike", "absent"]
    assert rows["suite mine"]["step s (measured)"] == 2.0
    assert rows["suite mine"]["ideal / step"] == 0.5
    assert rows["absent"]["remark"] == "not run: it is not here"
    assert rows["cheat"]["remark"] == "WRONG GRADIENTS"
    assert [score.entrant for score in result.wrong] == ["cheat"]
    written = page(result)
    assert "| alike | 2.000 [2.000, 2.000] |" in written.markdown()
    (picture,) = written.sections[0].pictures
    assert "times as fast as the fastest peer" in picture.svg
    json.dumps(result.record(), allow_nan=False)


def test_only_entrants_of_open_comparisons_run_again():
    assert result_of(MINE, QUICK, ALIKE, LEAN).needed == set()
    few = replace(ALIKE, seconds_by_round=known(4.0, rounds=5))
    assert result_of(MINE, QUICK, few, LEAN).needed == {"suite mine", "alike"}
    noisy = replace(QUICK, seconds_by_round={at: (1.0 + 0.2 * (at % 2),) for at in range(8)})
    assert result_of(MINE, noisy, ALIKE, LEAN).needed == {"suite mine", "quick"}
    far = replace(
        LEAN, peak_bytes=101, seconds_by_round={at: (3.0 + at % 2,) for at in range(8)}
    )  # it cannot be the fastest
    assert result_of(MINE, QUICK, ALIKE, far).needed == {"suite mine", "lean"}  # but in the memory of mine
    assert result_of(MINE, QUICK, ALIKE, replace(far, peak_bytes=102)).needed == set()
    assert result_of(QUICK, noisy).needed == set()  # nothing of ours


class Clock:
    """Turns of known seconds, with a clock that they move on; some entrants are noisy."""

    def __init__(self, seconds, noise):
        self.now, self.order = 0.0, []
        self._seconds, self._noise, self._draws = seconds, noise, np.random.default_rng(1)

    def turn(self, name):
        step = self._seconds[name] * math.exp(self._noise.get(name, 0.0) * self._draws.standard_normal())
        self.order.append(name)
        self.now += step
        return (step,)


def rounds_of(clock, until, *scores):
    empty = [replace(score, seconds_by_round={}) for score in scores]
    screen = Console(file=io.StringIO())
    return bench.run_rounds(clock.turn, result_of(*empty), until, screen, now=lambda: clock.now)


SECONDS = {"suite mine": 2.0, "quick": 1.0, "lean": 1.5, "alike": 4.0, "unseen": 0.9}


def test_rounds_go_on_in_pairs_until_every_ratio_is_known():
    clock = Clock(SECONDS, {"quick": 0.05})
    result = rounds_of(clock, 1e9, MINE, QUICK, LEAN, ALIKE, UNSEEN)
    assert result.open_pairs == set()
    rounds = {score.entrant: len(score.seconds_by_round) for score in result.scores}
    assert rounds["suite mine"] == max(rounds.values()) >= 6
    assert rounds["alike"] == rounds["lean"] == 6
    assert all(number % 2 == 0 for number in rounds.values())
    first = len(SECONDS)
    assert clock.order[first : 2 * first] == clock.order[:first][::-1]


def test_no_pair_of_rounds_begins_that_would_end_after_the_time_limit():
    all_of_a_pair = 2 * sum(SECONDS.values())
    for until, pairs in [(0.0, 1), (1.9 * all_of_a_pair, 1), (2.1 * all_of_a_pair, 2)]:
        clock = Clock(SECONDS, {})
        result = rounds_of(clock, until, MINE, QUICK, LEAN, ALIKE, UNSEEN)
        assert {len(score.seconds_by_round) for score in result.scores} == {2 * pairs}
        assert summary(result).rows[0][1].endswith("undecided against unseen")
        assert page(result).sections[0].pictures == []


def test_cases_by_name():
    assert [case.work.stages for case in cases.cases("sleeping")] == [2, 4, 8, 8, 16]
    everything = [case.name for name in CASES for case in cases.cases(name)]
    assert len(set(everything)) == len(everything)
    with pytest.raises(SettingError, match="did you mean layers"):
        cases.cases("layer")
    assert TOLERANCE <= 1e-4
