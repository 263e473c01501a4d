"""Holds a Kubernetes manifest against ``kuberay_fields.toml``: every field known, of its type, and none missing."""

import re
import tomllib
from pathlib import Path

TYPES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
QUANTITY = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([KMGTPE]i|[numkMGTPE]|[eE][+-]?\d+)?")
PLAIN = {
    "string": lambda value: isinstance(value, str),
    "integer": lambda value: type(value) is int,
    "number": lambda value: type(value) in (int, float),
    "boolean": lambda value: isinstance(value, bool),
    "quantity": lambda value: type(value) is int or (isinstance(value, str) and bool(QUANTITY.fullmatch(value))),
}


def faults(manifest):
    """Returns a sentence a fault of one document, none for a good one."""
    kind = str(manifest.get("kind"))
    return list(_of(manifest, kind, "")) if kind in TYPES else [f"kind {kind!r} is not known"]


def _of(value, expected, path):
    outer, is_several, inner = expected.partition(" of ")
    if is_several:
        if isinstance(value, {"list": list, "map": dict}[outer]):
            for key, one in value.items() if outer == "map" else enumerate(value):
                yield from _of(one, inner, f"{path}.{key}")
        else:
            yield f"{path}: {value!r} is no {outer}"
    elif expected.startswith("|"):
        if value not in expected[1:-1].split("|"):
            yield f"{path}: {value!r} is none of {expected}"
    elif expected in PLAIN:
        if not PLAIN[expected](value):
            yield f"{path}: {value!r} is no {expected}"
    else:
        yield from _of_table(value, TYPES[expected], path)


def _of_table(value, fields, path):
    if not isinstance(value, dict):
        yield f"{path}: {value!r} has no fields"
        return
    known = {name.removesuffix("!"): expected for name, expected in fields.items()}
    for name, one in value.items():
        if name in known:
            yield from _of(one, known[name], f"{path}.{name}")
        else:
            yield f"{path}.{name} is not known"
    for name in fields:
        if name.endswith("!") and name.removesuffix("!") not in value:
            yield f"{path}.{name.removesuffix('!')} is missing"
