"""The settings of a record, described: what ``gpipe settings`` prints and docs/settings.md holds."""

from __future__ import annotations

import re
from functools import reduce
from operator import getitem
from typing import Any, NamedTuple

from annotated_types import Unit
from pydantic import BaseModel
from pydantic.fields import FieldInfo

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
    sections: Any = record.model_dump()
    found = {path: reduce(getitem, path.split("."), sections) for path in overrides.paths(type(record))}
    return {path: hide_secrets(overrides.as_typed(value)) for path, value in found.items()}


def _describe(record: type[BaseModel], path: str, kind: Any) -> Setting:
    section, _, name = path.rpartition(".")
    owner: Any = record.model_fields[section].annotation if section else record
    field: FieldInfo = owner.__pydantic_fields__[name]
    return Setting(
        path,
        re.sub("^an? ", "", overrides.describe(kind, overrides.bounds(field.metadata))),
        REQUIRED if field.is_required() else overrides.as_typed(field.default),
        next((extra.unit for extra in field.metadata if isinstance(extra, Unit)), ""),
        " ".join((field.description or "").split()),
    )
