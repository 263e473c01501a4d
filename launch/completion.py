"""Names for shell completion. They are read from files, because the imports of an experiment take seconds."""

from __future__ import annotations

import ast
import re
from importlib.util import find_spec
from pathlib import Path

SETTINGS_PAGE = Path(__file__).resolve().parents[1] / "docs" / "settings.md"
"""Lists every setting; part of a checkout, not of an installed package."""


def experiment_names() -> list[str]:
    """Returns the names of the experiments: the functions without arguments of the modules that
    define them."""
    names = []
    for module in ("experiments.translation.runs", "experiments.language_model.runs", "experiments.images.runs"):
        spec = find_spec(module)
        assert spec is not None
        assert spec.origin is not None
        source = ast.parse(Path(spec.origin).read_text())
        functions = [node for node in source.body if isinstance(node, ast.FunctionDef) and not node.args.args]
        names += [function.name for function in functions if function.name[0] != "_"]
    return names


def setting_names() -> list[str]:
    """Returns the names of all settings."""
    if SETTINGS_PAGE.exists():
        return sorted({*re.findall(r"^\| `([\w.]+)` \|", SETTINGS_PAGE.read_text(), re.MULTILINE)})
    from launch.planning.settings import all_settings

    return sorted({row.name for section in all_settings() for row in section.rows})


def complete_settings(incomplete: str) -> list[str]:
    """Completes the last of the settings in a text."""
    settings, blank, _ = incomplete.rpartition(" ")
    return [f"{settings}{blank}{name}=" for name in setting_names()]
