"""Mutants that were looked at and change nothing that a test could see, with the reason."""

import json
from pathlib import Path

BY_REASON: dict[str, list[str]] = json.loads(Path(__file__).with_suffix(".json").read_text())
"""Keys of mutants (``Mutant.key``) by reason."""

EQUAL = {key: reason for reason, keys in BY_REASON.items() for key in keys}
