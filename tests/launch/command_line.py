"""The command line in the process of a test, where nothing is imported again."""

import sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO

import pytest

from launch import cli


def call(*arguments, folder="."):
    """Runs the command line in this process; returns its exit code, its output and its errors.

    What its workers print is in neither."""
    out, errors = StringIO(), StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(errors):
        patch.chdir(folder)
        patch.setattr(sys, "argv", ["gpipe", *arguments])
        with pytest.raises(SystemExit) as end:
            cli.main()
    return end.value.code or 0, out.getvalue(), errors.getvalue()
