"""A pickle machine: a stack, a memo, and what a pickle may name. It builds data; it imports nothing, and runs nothing.

Python's own unpickler, however restricted, cannot be trusted with hostile bytes: a memo index may cost it gigabytes,
a deeply nested key the whole process.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Any

from holdfast.errors import CorruptCheckpointError, HoldfastError, ReadBudgetError
from holdfast.formats.pickles.hashable_keys import HashableKeys
from holdfast.ondisk.read_budget import ReadBudget


class TruncatedPickleError(CorruptCheckpointError):
    """A pickle goes on where its bytes end."""


class AllowedCallable:
    """What a pickle names in order to call it. ``make`` gets the budget and the arguments, whatever they are."""

    __slots__ = ("make", "name")

    def __init__(self, name: str, make: Callable[..., Any]) -> None:
        self.name, self.make = name, make


class OpaqueObject:
    """Stands for an object of a class that is known by name: the arguments it was made with, and its state."""

    __slots__ = ("args", "name", "state")

    def __init__(self, name: str, args: tuple[Any, ...]) -> None:
        self.name, self.args = name, args
        self.state: Any = None


def kind_of(value: object) -> str:
    """What a value is called in messages."""
    return value.name if isinstance(value, AllowedCallable | OpaqueObject) else f"a {type(value).__name__}"


class StopUnpickling(Exception):  # noqa: N818 - the end of a pickle is no error
    """The pickle has ended."""


class SafeUnpickler:
    """One pickle being read. ``names`` is what it may name: makers, and plain values.

    ``outside`` tells what stands for an object that lies outside of the pickle, given its id; ``what`` the pickle is
    goes into messages, and so does ``advice``, for who trusts it. What it makes is paid from ``budget``.
    """

    __slots__ = ("advice", "at", "budget", "far", "keys", "marks", "memo", "names", "outside", "raw", "stack", "what")

    def __init__(
        self,
        raw: bytes,
        names: Mapping[str, object],
        what: str,
        outside: Callable[[Any], Any] | None,
        *,
        budget: ReadBudget,
        advice: str = "",
    ) -> None:
        self.raw, self.at, self.advice = raw, 0, advice
        self.names, self.what, self.outside, self.budget = names, what, outside, budget
        self.keys = HashableKeys(budget)
        self.stack: list[Any] = []
        self.marks: list[list[Any]] = []
        # Memos are numbered from 0 on by all picklers; any other number is legal, and must cost no row of empty places.
        self.memo: list[Any] = []
        self.far: dict[int, Any] = {}

    def run(self, table: list[Callable[[SafeUnpickler], None]]) -> Any:
        """The tree. ``table`` has what to do for each opcode. Raises ``CorruptCheckpointError`` for what is no whole pickle."""
        raw = self.raw
        try:
            while True:
                code = raw[self.at]
                self.at += 1
                table[code](self)
        except StopUnpickling:
            return self.stack.pop()
        except ReadBudgetError as error:
            raise ReadBudgetError(f"{self.what}: {error}") from error
        except HoldfastError:
            raise
        except (ArithmeticError, AttributeError, TypeError, ValueError, struct.error) as error:
            raise CorruptCheckpointError(f"{self.what} is no pickle of a checkpoint: {error}") from error
        except (LookupError, MemoryError, RecursionError) as error:
            kind = TruncatedPickleError if self.at >= len(raw) else CorruptCheckpointError
            raise kind(f"{self.what} is damaged or cut short: nothing is there at byte {self.at}") from error

    def take(self, size: int) -> bytes:
        """The next bytes of the pickle."""
        start = self.at
        self.at += size
        if self.at > len(self.raw):
            raise TruncatedPickleError(
                f"{self.what} is no pickle of a checkpoint: byte {start} asks for {size} more, there are "
                f"{len(self.raw) - start}"
            )
        return self.raw[start : self.at]

    def number(self, form: struct.Struct) -> Any:
        """The next number of the pickle."""
        start = self.at
        self.at += form.size
        if self.at > len(self.raw):
            raise TruncatedPickleError(f"{self.what} is no pickle of a checkpoint: it ends in a number at byte {start}")
        (value,) = form.unpack_from(self.raw, start)
        return value

    def line(self) -> str:
        """The next line of the pickle."""
        end = self.raw.find(b"\n", self.at)
        if end < 0:
            raise TruncatedPickleError(f"{self.what} is no pickle of a checkpoint: it ends in a line at byte {self.at}")
        start, self.at = self.at, end + 1
        return self.raw[start:end].decode()

    def put(self, number: int) -> None:
        """Keep what is on top of the stack under a number."""
        value = self.stack[-1]
        if number == len(self.memo):
            self.memo.append(value)
        elif number < len(self.memo):
            self.memo[number] = value
        else:
            self.far[number] = value

    def get(self, number: int) -> None:
        """Push what was kept under a number."""
        self.stack.append(self.memo[number] if number < len(self.memo) else self.far[number])

    def items(self) -> list[Any]:
        """What was put on the stack since the last mark; the mark is gone then."""
        found, self.stack = self.stack, self.marks.pop()
        return found
