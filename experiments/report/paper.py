"""The paper's printed numbers, as data (``paper.toml``)."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.resources import files
from typing import Any


@cache
def paper_numbers(section: str) -> dict[str, Any]:
    """Returns a section such as ``table2.transformer``."""
    record = tomllib.loads(files("experiments.report").joinpath("paper.toml").read_text())
    for name in section.split("."):
        record = record[name]
    return record
