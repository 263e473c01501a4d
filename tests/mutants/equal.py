"""Mutants that were looked at and change nothing that a test could see, with the reason."""

EQUAL: dict[str, str] = {}
"""By ``Mutant.key``."""
