"""``compare`` names each kind of difference, and calls equal records equal."""

from __future__ import annotations

import copy
import json
import sys

import pytest

from tests.record import __main__ as main
from tests.record.compare import differences, information
from tests.record.costs import Costs, packed, unpacked

DIGESTS = {f"layer {at}": f"{at:064x}" for at in range(131)}
RUN = {"loss": [9.25, 8.5, 8.1234], "validation": [{"step": 3, "valid/nll": 8.0}], "weights": DIGESTS}
PLAN = {"plan": {"K": 2, "step_s": 1.5, "peak_bytes": [10, 20], "schedules": [{"schedule": "1f1b", "step_s": 2.0}]}}


def entry(result, **more):
    return {"first": {"result": result, "seconds": 1.0, **more}}


RECORD = {
    "commit": "aaaa",
    "date": "2026-01-01",
    "parts": {
        "runs": entry(RUN),
        "plans": entry(PLAN, cpu_s=60.0),
        "help": entry({"gpipe plan": ["usage", "--best  the fastest"]}),
        "costs": entry({"forward_s": [[3, 0.5]]}),
    },
}


def changed(part, *path, value):
    """The record with another value at a path of a part's result."""
    record = copy.deepcopy(RECORD)
    place = record["parts"][part]["first"]["result"]
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = value
    return record


@pytest.mark.parametrize(
    ("other", "line"),
    [
        (changed("runs", "loss", 2, value=8.1235), "runs/first: step 3 loss 8.1234 -> 8.1235 (1 of 3 differ)"),
        (
            changed("runs", "weights", value=DIGESTS | {"layer 1": "f" * 64, "layer 9": "e" * 64}),
            "runs/first: weights of 2 of 131 differ, first layer 1",
        ),
        (
            changed("plans", "plan", "schedules", value=[]),
            "plans/first: plan schedules 1: only in A: {'schedule': '1f1b', 'step_s': 2.0} (1 of 1 differ, 1 ->",
        ),
        (changed("help", "gpipe new", value=["usage"]), "help/first: gpipe new only in B"),
    ],
)
def test_a_difference_is_named_with_its_place_and_both_values(other, line):
    (found,) = differences(RECORD, other)
    assert found.startswith(line)
    assert differences(other, copy.deepcopy(other)) == []


def test_missing_parts_are_named_and_times_commit_and_shapes_of_one_planner_are_information():
    other = copy.deepcopy(RECORD) | {"commit": "bbbb"}
    del other["parts"]["help"]
    other["parts"]["plans"]["first"]["cpu_s"] = 20.0
    other["parts"]["costs"]["second"] = {"result": {}}
    assert differences(RECORD, other) == ["help: only in A"]
    found = information(RECORD, other)
    assert {"commit: aaaa -> bbbb", "plans: 60 -> 20 CPU seconds"} < {*found}
    assert "costs: 1 shapes that only one of the two asked for" in found


def test_saved_costs_are_taken_and_own_ones_kept():
    own = [{"forward_s": 1.0, "skip_inputs": []}] * 2 + [{"forward_s": 2.0, "skip_inputs": [{"span": 2}]}]
    assert unpacked(packed(own)) == own
    costs = Costs({"known": packed(own[:1])})
    assert costs.choose("known", own) == own[:1]
    assert costs.choose("new", own) == own
    assert costs.own == {"known": packed(own), "new": packed(own)}


def test_exit_codes(tmp_path, monkeypatch, capsys):
    same, other, missing = (tmp_path / name for name in ("same.json", "other.json", "missing.json"))
    same.write_text(json.dumps(RECORD))
    other.write_text(json.dumps(changed("plans", "plan", "K", value=4)))

    def code(*arguments):
        monkeypatch.setattr(sys, "argv", ["record", *map(str, arguments)])
        return main.main()

    assert code("compare", same, same) == 0
    assert code("compare", same, other) == 1
    assert code("compare", same, missing) == 2
    assert code("make", same, "--only", "help") == 2  # of another commit
    assert code("make", missing, "--only", "everything") == 2
    assert "no part is called everything" in capsys.readouterr().err
