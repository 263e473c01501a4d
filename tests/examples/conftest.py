"""Fixtures of the tests of the examples."""

from tests.quick_measuring import _measures_quickly  # noqa: F401
