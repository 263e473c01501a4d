"""Settings typed by a person: ``train.steps=50``. Finds the field, knows its type, says what is wrong in a sentence."""

from __future__ import annotations

import shlex
import types
from collections.abc import Iterable
from dataclasses import is_dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ValidationError

from suite.errors import SettingError, nearest
from suite.settings import MicroBatches

_KINDS: dict[Any, str] = {
    int: "an integer", float: "a number", str: "a text", bool: "true or false", MicroBatches: "auto or an integer",
}  # fmt: skip


_BOUNDS = {"ge": "{} or more", "gt": "more than {}", "le": "{} or less", "lt": "less than {}"}
"""Pydantic's names of a number's bounds, and the bounds in words."""


def paths(record: type[BaseModel]) -> dict[str, Any]:
    """Returns ``{"train.steps": int, "trace": bool, ...}``: the types of sections' fields, and of switches."""
    found: dict[str, Any] = {}
    for section, field in record.model_fields.items():
        kind = field.annotation
        if kind is bool:
            found[section] = bool
        elif isinstance(kind, type) and (is_dataclass(kind) or issubclass(kind, BaseModel)):
            hints = get_type_hints(kind, include_extras=True)
            names = kind.model_fields if issubclass(kind, BaseModel) else kind.__dataclass_fields__
            found |= {f"{section}.{name}": _without_unit(hints[name]) for name in names}
    return found


def _without_unit(kind: Any) -> Any:
    return get_args(kind)[0] if get_origin(kind) is Annotated and kind not in _KINDS else kind


def split(settings: str) -> list[str]:
    """Returns the settings of one text with blanks between; a value with blanks stands in quotes, as in a shell.

    Raises SettingError for a quote that is not closed.
    """
    try:
        return shlex.split(settings)
    except ValueError as error:
        raise SettingError(
            f"the settings {settings!r} cannot be read ({error}); a value with blanks stands in quotes, such as "
            "SET=\"train.checkpoint_dir='/my disk/runs'\""
        ) from None


def parse(settings: str | Iterable[str], record: type[BaseModel]) -> dict[str, Any]:
    """Returns ``{path: value}`` of ``path=value`` settings, given one by one or as one text with blanks between.

    Values stay texts, for the record to convert, but for None and tuples. Raises SettingError for an unknown path, a
    missing ``=`` and a path given twice.
    """
    known, given = paths(record), dict[str, Any]()
    for setting in split(settings) if isinstance(settings, str) else settings:
        path, equals, value = (part.strip() for part in setting.partition("="))
        if not equals:
            raise SettingError(f"setting '{setting}' has no '='; write field=value, such as train.steps=50")
        if path not in known:
            raise SettingError(f"{path} is not a setting; {nearest(path, known)}")
        if path in given:
            raise SettingError(f"{path} is set twice, to {given[path]} and to {value}; set it once")
        given[path] = _convert(value, known[path])
    return given


def may_be_none(kind: Any) -> bool:
    """Returns whether a field of this type may be None."""
    return get_origin(kind) in (Union, types.UnionType) and type(None) in get_args(kind)


def describe(kind: Any, limits: Iterable[str] = ()) -> str:
    """Returns what a field of this type and these bounds takes, in words."""
    if may_be_none(kind):
        return f"{describe(_present(kind), limits)}, or none"
    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(str, get_args(kind)))}"
    if get_origin(kind) is tuple:
        if str in get_args(kind):
            return "names joined by commas, such as de,fr"
        return "integers joined by commas, such as 10,12"
    return ", ".join([_KINDS.get(kind, str(kind)), *limits])


def bounds(metadata: Iterable[Any]) -> list[str]:
    """Returns the bounds among a pydantic field's constraints, in words."""
    return [
        words.format(getattr(constraint, bound))
        for constraint in metadata
        for bound, words in _BOUNDS.items()
        if hasattr(constraint, bound)
    ]


def as_typed(value: Any) -> str:
    """Returns a field's value as a person types it after the ``=``."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def as_setting_error(fault: ValidationError, record: type[BaseModel]) -> SettingError:
    """Returns what pydantic found, each fault as one sentence: the field, what it takes, what was given."""
    known = paths(record)
    return SettingError("; ".join(_sentence(error, known) for error in fault.errors(include_url=False)))


def _sentence(error: Any, known: dict[str, Any]) -> str:
    path = ".".join([str(part) for part in error["loc"]][:2])
    why = error["msg"].removeprefix("Value error, ").replace("Input should be", "it should be")
    if error["type"] == "extra_forbidden":
        return f"{path} is not a setting; {nearest(path, known)}"
    if error["type"] == "missing":
        return f"{path} is missing; give it a value"
    for bound, limit in error.get("ctx", {}).items():
        if path in known and bound in _BOUNDS:
            takes = describe(known[path], [_BOUNDS[bound].format(limit)])
            return f"{path} takes {takes}; it was given {error['input']}"
    if path in known:
        return f"{path} takes {describe(known[path])}; it was given {error['input']!r}: {why}"
    return f"{path}: {why}"


def _present(kind: Any) -> Any:
    """Returns the type without its None."""
    return next(part for part in get_args(kind) if part is not type(None))


def _convert(value: str, kind: Any) -> Any:
    if may_be_none(kind):
        return None if value.lower() == "none" else _convert(value, _present(kind))
    if get_origin(kind) is tuple:
        return tuple(part for part in value.strip("()[]").split(",") if part)
    return value
