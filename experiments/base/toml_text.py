"""Writes a record as TOML: strings, numbers, booleans, lists, and one level of sections. Python only reads TOML."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from typing import Any

from suite.errors import SettingError


def write(record: Mapping[str, Any]) -> str:
    """Returns TOML that ``read`` parses to the same values, with tuples as lists; omits None."""
    plain = {key: value for key, value in record.items() if not isinstance(value, Mapping)}
    parts = [_lines(plain)]
    parts += [f"[{key}]\n{_lines(value)}" for key, value in record.items() if isinstance(value, Mapping)]
    return "\n".join(parts)


def read(text: str) -> dict[str, Any]:
    """Parses TOML. Raises SettingError with the position of a syntax error."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as fault:
        raise SettingError(f"the experiment's file is not valid TOML: {fault}; restore it or start a new run") from None


def _lines(values: Mapping[str, Any]) -> str:
    return "".join(f"{key} = {_value(value)}\n" for key, value in values.items() if value is not None)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        # TOML has JSON's escapes, but also requires one for the delete character
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_value, value))}]"
    raise TypeError(f"no TOML for {type(value).__name__}")
