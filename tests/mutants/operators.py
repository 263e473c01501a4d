"""What can be changed in a file. Nothing is changed in types, docstrings, messages, assertions and ``__repr__``."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from copy import copy
from itertools import pairwise
from typing import NamedTuple

from tests.mutants.fault import Fault, Mutant

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip

FUNCTIONS_WITHOUT_EFFECT = ("sorted", "reversed", "abs", "max", "min")
"""Dropped, they leave their first argument."""

METHODS_WITHOUT_EFFECT = ("clone", "detach", "contiguous", "copy", "strip", "resolve")
"""Dropped, they leave their object."""

SYNCS = ("fsync", "sync_folder", "flush", "synchronize")

LOGS = ("log", "_log", "print", "echo", "warn", "warning", "info", "debug", "exception")
"""Calls whose arguments are texts for people."""

UNSWAPPED = (
    "isinstance",
    "issubclass",
    "cast",
    "getattr",
    "setattr",
    "hasattr",
    "TypeVar",
    "max",
    "min",
    "equal",
    "gcd",
    "union",
)
"""Functions whose swapped arguments are a TypeError, or the same result."""

TYPES = ("Annotated", "Literal", "Callable", "Optional", "Union", "ClassVar")

COSMETIC = ("indent", "stacklevel", "maxsize", "ensure_ascii", "repr", "frozen", "slots", "kw_only")
"""Arguments whose values only change looks or speed."""

OFF_BY_ONE_MOST = 8
"""Larger constants are sizes and limits in seconds or bytes, which one more or less does not break."""

SIMPLE = (ast.Return, ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Expr, ast.Delete)


class Place(NamedTuple):
    """Where a node is: its function, its smallest statement, the expression or statement around it."""

    function: str
    statement: ast.stmt
    around: ast.AST


class Change(NamedTuple):
    """A node and what it becomes; None drops a statement."""

    operator: str
    node: ast.AST
    new: ast.AST | None


def mutants(source: bytes, file: str) -> list[Mutant]:
    """Returns all changes of a file's source, in the order of the code."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    counts, found = Counter[tuple[str, ...]](), []
    for place, change in _Walk().changes(ast.parse(source)):
        node, replacement = change.node, _replacement(change)
        text, changed = _around(place, change)
        identity = (file, place.function, change.operator, text, changed)
        found.append(
            Mutant(
                *identity,
                counts[identity],
                starts[node.lineno - 1] + node.col_offset,
                starts[node.end_lineno - 1] + node.end_col_offset,
                replacement,
                node.lineno,
                place.statement.lineno,
            )
        )
        counts[identity] += 1
    return found


def by_hand(fault: Fault, source: bytes) -> Mutant | None:
    """Returns a fault by hand as a mutant; None if its text is no longer in the file.

    Raises ValueError if the text occurs more than once."""
    text = fault.text.encode()
    if source.count(text) > 1:
        raise ValueError(f"{fault.file} has {source.count(text)} times {fault.text!r}; name a longer text")
    begin = source.find(text)
    if begin < 0:
        return None
    line = source.count(b"\n", 0, begin + len(text) - len(text.lstrip())) + 1
    lines = {line, *range(line, source.count(b"\n", 0, begin + len(text)) + 1)}
    statements = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.stmt)]
    around = [node for node in statements if node.lineno <= line <= node.end_lineno]
    smallest = max(around, key=lambda node: node.lineno)
    first = min((node.lineno for node in statements if node.lineno in lines), default=smallest.lineno)
    identity = (fault.file, "", "by hand", fault.what, fault.replacement, 0)
    return Mutant(*identity, begin, begin + len(text), fault.replacement, line, first)


def _replacement(change: Change) -> str:
    """Returns the new code in parentheses where it could bind more loosely than the old one."""
    if change.new is None:
        return "pass"
    code = ast.unparse(change.new)
    plain = (ast.Name, ast.Constant, ast.Call, ast.Attribute, ast.Subscript)
    return code if isinstance(change.new, plain) else f"({code})"


def _around(place: Place, change: Change) -> tuple[str, str]:
    """Returns the code around a change, before and after it."""
    if change.new is None:
        return ast.unparse(change.node), "pass"
    whole = place.around
    return ast.unparse(whole), ast.unparse(_Replace(change.node, change.new).visit(whole))


def _copied(node: ast.AST) -> ast.AST:
    """Returns a node with own lists of children; the children are the same objects."""
    new = copy(node)
    for name, value in ast.iter_fields(node):
        setattr(new, name, [*value] if isinstance(value, list) else value)
    return new


class _Replace(ast.NodeTransformer):
    """Replaces one node, and leaves the tree that is walked as it is."""

    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self._old, self._new = old, new

    def visit(self, node: ast.AST) -> ast.AST:
        return self._new if node is self._old else super().generic_visit(_copied(node))


class _Walk:
    """Walks through the code that runs, and yields its changes with their places."""

    def changes(self, tree: ast.Module) -> Iterator[tuple[Place, Change]]:
        for statement in tree.body:
            yield from self._statement(statement, ())

    def _statement(self, node: ast.stmt, names: tuple[str, ...]) -> Iterator[tuple[Place, Change]]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from self._definition(node, names)
            return
        if isinstance(node, ast.Assert | ast.Import | ast.ImportFrom | ast.Global | ast.Nonlocal):
            return
        if isinstance(node, ast.If) and re.search(r"TYPE_CHECKING|__name__", ast.unparse(node.test)):
            return
        place = Place(".".join(names), node, node)
        if isinstance(node, ast.Raise):
            yield place, Change("removed raise", node, None)
            return
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            name = _name(node.value.func)
            if name in LOGS:
                return
            yield place, Change("removed fsync" if name in SYNCS else "dropped call", node, None)
        if isinstance(node, ast.Assign) and "__all__" in ast.unparse(node.targets[0]):
            return
        is_limit = isinstance(node, ast.Assign) and not names and re.search(r"_S\b", ast.unparse(node.targets[0]))
        if is_limit:
            return
        for name, value in ast.iter_fields(node):
            if name == "annotation" or (name == "targets" and isinstance(node, ast.Assign | ast.Delete)):
                continue
            for child in value if isinstance(value, list) else [value]:
                yield from self._child(child, names, place)

    def _child(self, child: object, names: tuple[str, ...], place: Place) -> Iterator[tuple[Place, Change]]:
        if isinstance(child, ast.stmt):
            yield from self._statement(child, names)
        elif isinstance(child, ast.expr):
            yield from self._expression(child, place)
        elif isinstance(child, ast.ExceptHandler | ast.match_case):
            for statement in child.body:
                yield from self._statement(statement, names)
        elif isinstance(child, ast.withitem):
            yield from self._expression(child.context_expr, place)

    def _definition(
        self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef, names: tuple[str, ...]
    ) -> Iterator[tuple[Place, Change]]:
        """Of a class, only arguments of a field are changed, such as its bounds: the docs show its value."""
        if node.name in ("__str__", "__repr__"):
            return
        own = (*names, node.name)
        if not isinstance(node, ast.ClassDef):
            for default in (*node.args.defaults, *node.args.kw_defaults):
                if default is not None:
                    yield from self._expression(default, Place(".".join(own), node, default))
        for statement in node.body:
            if isinstance(node, ast.ClassDef) and isinstance(statement, ast.AnnAssign):
                if isinstance(statement.value, ast.Call):
                    for keyword in statement.value.keywords:
                        place = Place(".".join((*own, ast.unparse(statement.target))), statement, keyword.value)
                        if keyword.arg not in (*COSMETIC, "default", "description"):
                            yield from self._expression(keyword.value, place._replace(around=statement.value))
                continue
            yield from self._statement(statement, own)

    def _expression(self, node: ast.expr, place: Place) -> Iterator[tuple[Place, Change]]:
        if isinstance(node, ast.JoinedStr):
            return
        if isinstance(node, ast.Subscript) and _name(node.value) in TYPES:
            return
        if isinstance(node, ast.Call) and _name(node.func) in LOGS:
            return
        around = place.around if isinstance(place.around, (ast.expr, *SIMPLE)) else node
        yield from ((place._replace(around=around), change) for change in expression_changes(node))
        inner = place._replace(around=node)
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.keyword):
                if child.arg not in COSMETIC:
                    yield from self._expression(child.value, inner)
            elif isinstance(child, ast.comprehension):
                for part in (child.iter, *child.ifs):
                    yield from self._expression(part, inner)
            elif isinstance(child, ast.expr):
                yield from self._expression(child, inner)


def expression_changes(node: ast.expr) -> Iterator[Change]:
    """Yields the changes of an expression itself, not those of its parts."""
    if isinstance(node, ast.Compare):
        for at, operation in enumerate(node.ops):
            new = copy(node)
            new.ops = [*node.ops[:at], COMPARISONS[type(operation)](), *node.ops[at + 1 :]]
            yield Change("changed comparison", node, new)
    elif isinstance(node, ast.BoolOp):
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield Change("and for or", node, ast.BoolOp(other, node.values))
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield Change("lost not", node, node.operand)
    elif isinstance(node, ast.Constant):
        yield from _constant_changes(node)
    elif isinstance(node, ast.Slice):
        for name in ("lower", "upper"):
            bound = getattr(node, name)
            if bound is not None and not isinstance(bound, ast.Constant | ast.UnaryOp):
                yield Change("off by one", bound, _plus(bound, 1))
    elif isinstance(node, ast.Call):
        yield from _call_changes(node)


def _constant_changes(node: ast.Constant) -> Iterator[Change]:
    value = node.value
    if isinstance(value, bool):
        yield Change("other constant", node, ast.Constant(not value))
    elif isinstance(value, float) or (isinstance(value, int) and value > OFF_BY_ONE_MOST):
        yield Change("other constant", node, ast.Constant(value * 2 or 1.0))
    elif isinstance(value, int):
        yield from (Change("off by one", node, ast.Constant(new)) for new in (value + 1, value - 1) if new >= 0)


def _call_changes(node: ast.Call) -> Iterator[Change]:
    name, arguments = _name(node.func), node.args
    if name == "range":
        for argument in arguments[:2]:
            if not isinstance(argument, ast.Constant | ast.Starred):
                yield Change("off by one", argument, _plus(argument, -1))
    first = arguments[0] if arguments else None
    is_of_one = name in ("max", "min") and len(arguments) < 2
    is_dropped = isinstance(node.func, ast.Name) and name in FUNCTIONS_WITHOUT_EFFECT and not is_of_one
    if is_dropped and first is not None and not isinstance(first, ast.Starred | ast.GeneratorExp):
        yield Change("dropped call", node, first)
    if isinstance(node.func, ast.Attribute) and name in METHODS_WITHOUT_EFFECT and not arguments and not node.keywords:
        yield Change("dropped call", node, node.func.value)
    for at, pair in enumerate(pairwise(arguments)):
        is_starred = any(isinstance(argument, ast.Starred) for argument in pair)
        if name not in UNSWAPPED and not is_starred and ast.unparse(pair[0]) != ast.unparse(pair[1]):
            swapped = [*arguments[:at], pair[1], pair[0], *arguments[at + 2 :]]
            yield Change("swapped arguments", node, ast.Call(node.func, swapped, node.keywords))


def _plus(node: ast.expr, number: int) -> ast.expr:
    return ast.BinOp(node, ast.Add() if number > 0 else ast.Sub(), ast.Constant(abs(number)))


def _name(node: ast.expr) -> str:
    """Returns the last name of a function or type."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
