"""The mutants themselves: what each operator changes, and that a mutant is found again in later code."""

import ast
import json

import pytest

from tests.mutants import choice, executed, table
from tests.mutants.fault import Fault
from tests.mutants.operators import by_hand, mutants

BODIES = {
    "return a < b": ["changed comparison: return a <= b"],
    "return a is None": ["changed comparison: return a is not None"],
    "if a and b: pass": ["and for or: a or b"],
    "return not a": ["lost not: return a"],
    "return (not a) == c": ["changed comparison: return (not a) != c", "lost not: a == c"],
    "return a[1:b]": ["off by one: a[1:b + 1]", "off by one: 2:b", "off by one: 0:b"],
    "return a[-1]": ["off by one: -2", "off by one: -0"],
    "for _ in range(a): pass": ["off by one: range(a - 1)"],
    "a = 0.5": ["other constant: a = 1.0"],
    "a = True": ["other constant: a = False"],
    "a = 300": ["other constant: a = 600"],
    "a.close()": ["dropped call: pass"],
    "return sorted(a)": ["dropped call: return a"],
    "return f(a, b)": ["swapped arguments: return f(b, a)"],
    "raise ValueError(a < b)": ["removed raise: pass"],
    "os.fsync(a)": ["removed fsync: pass"],
    "log(a < b)": [],
    "assert a < b": [],
    "a: Literal[1] = b": [],
    "return f'{a < 1}'": [],
    "return isinstance(a, b)": [],
    "return max(a, b)": ["dropped call: return a"],
}


def function(body):
    return f"def work(a, b, c):\n    {body}\n"


def changes(source):
    return [f"{mutant.operator}: {mutant.changed}" for mutant in mutants(source.encode(), "suite/x.py")]


@pytest.mark.parametrize("body", BODIES)
def test_each_operator_changes_what_it_names(body):
    source = function(body)
    assert changes(source) == BODIES[body]
    for mutant in mutants(source.encode(), "suite/x.py"):
        assert ast.unparse(ast.parse(mutant.applied(source.encode()))) != ast.unparse(ast.parse(source))


def test_a_looser_expression_stays_in_its_place():
    source = b"def work(a, b, c):\n    return a and not (b or c)\n"
    (lost,) = [mutant for mutant in mutants(source, "suite/x.py") if mutant.operator == "lost not"]
    assert lost.applied(source).endswith(b"return a and (b or c)\n")


def test_nothing_is_changed_in_types_defaults_of_fields_and_representations():
    source = (
        "class A:\n    x: Annotated[int, 1] = Field(3, ge=1)\n    y: int = 4\n    def __repr__(self): return 1 + 2\n"
    )
    assert changes(source) == ["off by one: Field(3, ge=2)", "off by one: Field(3, ge=0)"]


def test_a_mutant_is_the_same_when_other_code_changes():
    before = function("return f(a) < g(a, 1)")
    after = "import os\n\n\ndef other():\n    return 1 < 2\n\n\n" + before.replace("1", "(1)")
    old, new = (mutants(source.encode(), "suite/x.py") for source in (before, after))
    assert [(one.key, one.line + 7) for one in old] == [(one.key, one.line) for one in new[-len(old) :]]


def test_a_mutant_is_found_in_another_file_and_class_unless_two_have_it():
    (old,) = mutants(function("return a < b").encode(), "suite/x.py")
    moved = mutants(f"class A:\n    {function('    return a < b')}".encode(), "suite/data/y.py")
    assert choice.find_again(old, moved) == moved[0]
    assert choice.find_again(old, moved * 2) is None
    assert choice.find_again(old, mutants(function("return a > b").encode(), "suite/x.py")) is None


def test_mutants_are_spread_over_files_and_operators():
    candidates = [
        mutant
        for name in ("x", "y", "z")
        for mutant in mutants(
            b"def f(a, b):\n    a.do()\n    return [a < b, a > b, a[b:], not a, f(a, b)]\n", f"suite/data/{name}.py"
        )
    ]
    chosen = choice.choose(candidates, 10 * sum(choice.SHARES.values()) // 10, seed=3)
    assert len(chosen) == choice.SHARES["suite/data"]
    assert sorted(mutant.file for mutant in chosen) == [f"suite/data/{name}.py" for name in "xxyyzz"]
    assert max(sum(one.operator == other.operator for other in chosen) for one in chosen) <= 2
    assert chosen == choice.choose(candidates[::-1], sum(choice.SHARES.values()), seed=3)


def test_a_fault_by_hand_is_one_place():
    source = b"def f(a):\n    if a:\n        g(a)\n    return a\n"
    fault = Fault("it is not called", "suite/x.py", "        g(a)\n", "        pass\n")
    mutant = by_hand(fault, source)
    assert (mutant.line, mutant.statement) == (3, 3)
    assert mutant.applied(source) == b"def f(a):\n    if a:\n        pass\n    return a\n"
    assert by_hand(fault, b"") is None
    with pytest.raises(ValueError, match="2 times"):
        by_hand(fault, source * 2)


def test_a_marked_file_marks_what_it_executes(tmp_path):
    lines = ['"""Doc."""', "from __future__ import annotations", "def f(a):", "    if a:", "        return 1"]
    (tmp_path / "x.py").write_text("\n".join([*lines, "    elif a is None:", "        return 2"]))
    statements = [("x.py", 4), ("x.py", 5), ("x.py", 6), ("x.py", 7)]
    sources = executed.mark_statements(tmp_path, statements, tmp_path / "marks")
    space = {}
    exec(compile(sources[tmp_path / "x.py"], "x.py", "exec", dont_inherit=True), space)
    assert space["f"](None) == 2
    assert [*space[executed.MARKS]] == [1, 0, 1, 1]


def test_statements_of_an_import_are_those_of_all_tests():
    answer = {
        "events": [
            ["imports", [0]],
            ["start", "a"],
            ["done", "a", 0.1, [1, 2]],
            ["done", "b", 0.2, []],
            ["shared", "b", [3]],
        ],
        "ended": "exit 0",
    }
    known = executed.of_file("test_x.py", answer, [("x", line) for line in range(4)], {("x", 2)})
    assert known.tests == {"a": {("x", 0), ("x", 1), ("x", 2)}, "b": {("x", 0), ("x", 2), ("x", 3)}}


def test_compare_names_what_is_lost(tmp_path):
    def write(name, **outcomes):
        lines = [
            {
                "key": key, "identity": ["suite/x.py", "f", "lost not", key, "a", 0], "line": 1, "outcome": outcome,
                "by": "t" if outcome == "found" else "", "where": "its file", "tests": 1, "left_out": 0,
            }
            for key, outcome in outcomes.items()
        ]  # fmt: skip
        (tmp_path / name).write_text("\n".join(map(json.dumps, [{"commit": "c", "budget_s": 1.0}, *lines])))
        return tmp_path / name

    before = write("before", a="found", b="found", c="not found", d="found")
    after = write("after", a="found", b="not found", c="hangs", d="gone")
    lines = table.compare(before, after).splitlines()
    assert lines[0].startswith("3 mutants in both: 2 found before, 2 found after; the code of 1 is gone")
    assert [line.split("`")[1] for line in lines[1:]] == ["b", "c"]
    assert "| suite | 4 | 3 | 0 | 0 | 0 | 1 | 0 | 0 | 0 |" in table.summary(before)
