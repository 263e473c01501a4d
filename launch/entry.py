"""Before and after every command: streams and signals, one sentence and an exit code for each error."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable

from launch import interrupts
from suite.errors import SettingError


def prepare() -> None:
    """Makes the process of a command line ready for interrupts and closed streams, before the slow imports."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:  # it is closed, and what is opened next would take its descriptor
            setattr(sys, name, open(os.devnull, "r+"))  # noqa: SIM115
            os.set_inheritable(getattr(sys, name).fileno(), True)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # what its encoding lacks
    interrupts.install()
    try:
        os.getcwd()
    except OSError as error:  # torch would not be found
        print(f"error: the current folder: {error.strerror}; was it removed? change to another", file=sys.stderr)
        sys.exit(2)


def run(app: Callable[[], None]) -> None:
    """Runs the command of ``sys.argv`` and exits. Prints one sentence for an error of the user (exit code 2), for any
    other exception (1) and for an interrupt (130, 143)."""
    code = 1
    try:
        code = _run_command(app)
    except BaseException as error:
        if not interrupts.was_interrupted():
            code = _print_error(error)
    if interrupts.was_interrupted():
        interrupts.kill_children_and_exit()
    interrupts.leave(code)


def _run_command(app: Callable[[], None]) -> int:
    """Runs a command; returns the exit code."""
    try:
        with interrupts.interruptible():
            _check_arguments()
            app()
    except SystemExit as end:
        return int(end.code or 0)
    except BaseException as error:
        if interrupts.was_interrupted() or isinstance(error, KeyboardInterrupt):
            return interrupts.exit_code()
        return _print_error(error)
    return 0


def _print_error(error: BaseException) -> int:
    """Prints the sentence of an exception; returns the exit code."""
    from launch.cli_options import error_console
    from launch.error_log import describe_error

    message, code = describe_error(error)
    error_console.print(f"error: {message}")
    return code


def _check_arguments() -> None:
    """Raises SettingError for an argument that is not UTF-8: it could not be written or printed."""
    for at, argument in enumerate(sys.argv[1:], 1):
        try:
            argument.encode()
        except UnicodeEncodeError as error:
            byte = os.fsencode(argument[error.start])
            raise SettingError(
                f"argument {at} is not UTF-8: it has the byte 0x{byte.hex()} after {error.start} characters; "
                "convert it first, for example with iconv"
            ) from None
