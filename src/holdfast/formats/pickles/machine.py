"""A pickle machine: a stack, a memo, and what a pickle may name. It builds data; it imports nothing, and runs nothing.

Python's own unpickler, however restricted, cannot be trusted with hostile bytes: a memo index may cost it gigabytes,
a deeply nested key the whole process.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Any

from holdfast.errors import DamagedError, HoldfastError


class Maker:
    """What a pickle names in order to call it. ``make`` gets a :class:`Copied` and the arguments, whatever they are."""

    __slots__ = ("make", "name")

    def __init__(self, name: str, make: Callable[..., Any]) -> None:
        self.name, self.make = name, make


class Record:
    """Stands for an object of a class that is known by name: the arguments it was made with, and its state."""

    __slots__ = ("args", "name", "state")

    def __init__(self, name: str, args: tuple[Any, ...]) -> None:
        self.name, self.args = name, args
        self.state: Any = None


class Copied:
    """What makers copy is counted: a few bytes of a pickle could ask for the same large copy again and again."""

    def __init__(self, budget: int) -> None:
        self._left = budget

    def spend(self, items: int) -> None:
        """Raises ``ValueError`` where more is copied than the pickle has bytes."""
        self._left -= items
        if self._left < 0:
            raise ValueError("it makes more copies than it has bytes")


class Stop(Exception):  # noqa: N818 - the end of a pickle is no error
    """The pickle has ended."""


class Machine:
    """One pickle being read. ``names`` is what it may name: makers, and plain values.

    ``outside`` tells what stands for an object that lies outside of the pickle, given its id; ``what`` the pickle is
    goes into messages.
    """

    __slots__ = ("at", "copied", "marks", "memo", "names", "outside", "raw", "stack", "what")

    def __init__(
        self, raw: bytes, names: Mapping[str, object], what: str, outside: Callable[[Any], Any] | None
    ) -> None:
        self.raw, self.at = raw, 0
        self.names, self.what, self.outside = names, what, outside
        self.stack: list[Any] = []
        self.marks: list[list[Any]] = []
        self.memo: dict[int, Any] = {}
        self.copied = Copied(len(raw))

    def run(self, table: list[Callable[[Machine], None]]) -> Any:
        """The tree. ``table`` has what to do for each opcode. Raises ``DamagedError`` for what is no whole pickle."""
        raw = self.raw
        try:
            while True:
                code = raw[self.at]
                self.at += 1
                table[code](self)
        except Stop:
            return self.stack.pop()
        except HoldfastError:
            raise
        except (ArithmeticError, AttributeError, TypeError, ValueError, struct.error) as error:
            raise DamagedError(f"{self.what} is no pickle of a checkpoint: {error}") from error
        except (LookupError, MemoryError, RecursionError) as error:
            raise DamagedError(f"{self.what} is damaged or cut short: nothing is there at byte {self.at}") from error

    def take(self, size: int) -> bytes:
        """The next bytes of the pickle."""
        start = self.at
        self.at += size
        if self.at > len(self.raw):
            raise ValueError(f"byte {start} asks for {size} more, there are {len(self.raw) - start}")
        return self.raw[start : self.at]

    def number(self, form: struct.Struct) -> Any:
        """The next number of the pickle."""
        (value,) = form.unpack_from(self.raw, self.at)
        self.at += form.size
        return value

    def line(self) -> str:
        """The next line of the pickle."""
        end = self.raw.index(b"\n", self.at)
        start, self.at = self.at, end + 1
        return self.raw[start:end].decode()

    def items(self) -> list[Any]:
        """What was put on the stack since the last mark; the mark is gone then."""
        found, self.stack = self.stack, self.marks.pop()
        return found
