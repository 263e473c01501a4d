"""Fixtures of the tests of the command line and its workers."""

from tests.quick_measuring import _measures_quickly  # noqa: F401
