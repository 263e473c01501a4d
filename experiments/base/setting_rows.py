"""The settings of a record, described: what ``gpipe settings`` prints and docs/settings.md holds."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import MISSING
from itertools import pairwise
from typing import Any, NamedTuple, get_type_hints

from annotated_types import Unit
from pydantic import BaseModel

from experiments.base import overrides
from suite.paths import hide_secrets

REQUIRED = "required"


class Setting(NamedTuple):
    """One setting, as text; ``default`` is what ``SET=`` takes, or ``required`` where each experiment has its own."""

    name: str
    type: str
    default: str
    unit: str
    description: str


def describe_settings(record: type[BaseModel]) -> list[Setting]:
    """Returns every setting of a record, in the order of its fields."""
    return [_describe(record, path, kind) for path, kind in overrides.paths(record).items()]


def values(record: BaseModel) -> dict[str, str]:
    """Returns the value of every setting of a record, as ``SET=`` takes it; URLs without their secrets."""
    sections = record.model_dump()
    return {path: hide_secrets(overrides.as_typed(_value(sections, path))) for path in overrides.paths(type(record))}


def _value(sections: dict[str, Any], path: str) -> Any:
    value: Any = sections
    for name in path.split("."):
        value = value[name]
    return value


def _describe(record: type[BaseModel], path: str, kind: Any) -> Setting:
    section, _, name = path.rpartition(".")
    owner: Any = record.model_fields[section].annotation if section else record
    hint = get_type_hints(owner, include_extras=True)[name]
    if issubclass(owner, BaseModel):
        field = owner.model_fields[name]
        required, default, limits = field.is_required(), field.default, overrides.bounds(field.metadata)
        description = field.description or ""
    else:
        default = owner.__dataclass_fields__[name].default
        required, limits = default is MISSING, []
        description = _attribute_docstrings(owner)[name]
    return Setting(
        path,
        re.sub("^an? ", "", overrides.describe(kind, limits)),
        REQUIRED if required else overrides.as_typed(default),
        next((extra.unit for extra in getattr(hint, "__metadata__", ()) if isinstance(extra, Unit)), ""),
        " ".join(description.split()),
    )


def _attribute_docstrings(kind: type) -> dict[str, str]:
    """Returns the docstring below each field of a dataclass; pydantic reads only those of its own records."""
    (definition,) = ast.parse(inspect.getsource(kind)).body
    return dict(_documented(definition))


def _documented(definition: ast.stmt) -> Iterator[tuple[str, str]]:
    assert isinstance(definition, ast.ClassDef)
    for statement, following in pairwise(definition.body):
        match statement, following:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                yield name, text
