"""A fault that the tests should find."""

from typing import NamedTuple


class Fault(NamedTuple):
    """A fault written by hand: ``text``, which occurs once in ``file``, is replaced."""

    what: str
    """What is wrong then, in one sentence."""
    file: str
    """Path from the root of the repository."""
    text: str
    replacement: str


class Mutant(NamedTuple):
    """A change of one expression or statement of a file. The first six fields are its identity: they stay the same when
    other code of the file changes."""

    file: str
    function: str
    """Qualified name, empty outside of functions and classes."""
    operator: str
    text: str
    """The changed code and the expression around it, or what a fault by hand is about."""
    changed: str
    """The same after the change."""
    occurrence: int
    """How many equal changes the function has before this one."""
    begin: int
    """Of the replaced bytes in the file."""
    end: int
    replacement: str
    line: int
    statement: int
    """First line of the smallest statement around the change."""

    @property
    def key(self) -> str:
        return " | ".join(map(str, self[:6]))

    def applied(self, source: bytes) -> bytes:
        """Returns the file with the change."""
        return source[: self.begin] + self.replacement.encode() + source[self.end :]
