"""The state of a safe unpickler: a stack, a memo, and an allow-list of globals. It imports nothing and runs nothing.

Python's own unpickler, however restricted, cannot be trusted with hostile bytes: one memo index can make it allocate
gigabytes, and hashing a deeply nested key can crash the process.

:mod:`rankless.formats.pickles.unpickle` makes one for each pickle, and the handlers in
:mod:`rankless.formats.pickles.opcodes` change it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Any

from rankless.errors import CorruptCheckpointError, RanklessError, ReadBudgetError
from rankless.formats.pickles.hashable_keys import HashableKeys
from rankless.ondisk.read_budget import ReadBudget


class TruncatedPickleError(CorruptCheckpointError):
    """The bytes end before the pickle does."""


class AllowedCallable:
    """A global that a pickle may call.

    ``make`` is called instead, with the budget and the arguments of the pickle. The arguments may be of any type.
    """

    __slots__ = ("make", "name")

    def __init__(self, name: str, make: Callable[..., Any]) -> None:
        self.name, self.make = name, make


class OpaqueObject:
    """A placeholder for an object of an allowed class: its class name, its arguments and its state."""

    __slots__ = ("args", "name", "state")

    def __init__(self, name: str, args: tuple[Any, ...]) -> None:
        self.name, self.args = name, args
        self.state: Any = None


def kind_of(value: object) -> str:
    """Return a phrase for messages that says what kind of value it is: a class name, or ``a dict``."""
    return value.name if isinstance(value, AllowedCallable | OpaqueObject) else f"a {type(value).__name__}"


class StopUnpickling(Exception):  # noqa: N818 - the end of a pickle is no error
    """Raised by the opcode that ends a pickle."""


class SafeUnpickler:
    """The state of an unpickler that reads one pickle.

    Args:
        raw: Bytes that contain the pickle. Reading starts at the offset ``at``, which is 0 at first.
        allowed: The globals that the pickle may name: :class:`AllowedCallable` objects and plain values.
        source: The name of the file, for messages.
        persistent_load: Returns the object for a persistent id, such as a storage; ``None`` if there may be no ids.
        budget: Everything that is built is charged to this budget.
        advice: A sentence for messages about unsafe pickles: what to do if the user trusts the file.
    """

    __slots__ = (
        "advice",
        "allowed",
        "at",
        "budget",
        "key_checker",
        "marks",
        "memo",
        "persistent_load",
        "raw",
        "source",
        "sparse_memo",
        "stack",
    )

    def __init__(
        self,
        raw: bytes,
        allowed: Mapping[str, object],
        source: str,
        persistent_load: Callable[[Any], Any] | None,
        *,
        budget: ReadBudget,
        advice: str = "",
    ) -> None:
        self.raw, self.at, self.advice = raw, 0, advice
        self.allowed, self.source, self.persistent_load, self.budget = allowed, source, persistent_load, budget
        self.key_checker = HashableKeys(budget)
        self.stack: list[Any] = []
        self.marks: list[list[Any]] = []
        # All picklers number their memos from 0 on. Any other number is legal, but must not allocate a long list.
        self.memo: list[Any] = []
        self.sparse_memo: dict[int, Any] = {}

    def run_opcodes(self, table: list[Callable[[SafeUnpickler], None]]) -> Any:
        """Run the pickle with ``table``, the handler of each opcode, and return its tree.

        Raises ``CorruptCheckpointError`` if the pickle is invalid or truncated.
        """
        raw = self.raw
        try:
            while True:
                code = raw[self.at]
                self.at += 1
                table[code](self)
        except StopUnpickling:
            return self.stack.pop()
        except ReadBudgetError as error:
            raise ReadBudgetError(f"{self.source}: {error}") from error
        except RanklessError:
            raise
        except (ArithmeticError, AttributeError, TypeError, ValueError, struct.error) as error:
            raise CorruptCheckpointError(f"{self.source}: its pickle is invalid: {error}") from error
        except (LookupError, MemoryError, RecursionError) as error:
            kind = TruncatedPickleError if self.at >= len(raw) else CorruptCheckpointError
            raise kind(f"{self.source}: its pickle is corrupt or truncated at byte {self.at}") from error

    def read_raw_bytes(self, size: int) -> bytes:
        """Return the next ``size`` bytes of the pickle. Raises ``CorruptCheckpointError`` if there are fewer."""
        start = self.at
        self.at += size
        if self.at > len(self.raw):
            raise TruncatedPickleError(
                f"{self.source}: its pickle is truncated: it needs {size} bytes at byte {start}, but only "
                f"{max(0, len(self.raw) - start)} are left"
            )
        return self.raw[start : self.at]

    def read_number(self, form: struct.Struct) -> Any:
        """Return the next number of the pickle. Raises ``CorruptCheckpointError`` if it is incomplete."""
        start = self.at
        self.at += form.size
        if self.at > len(self.raw):
            raise TruncatedPickleError(f"{self.source}: its pickle is truncated in the number at byte {start}")
        (value,) = form.unpack_from(self.raw, start)
        return value

    def read_line(self) -> str:
        """Return the next line of the pickle. Raises ``CorruptCheckpointError`` if it is incomplete."""
        end = self.raw.find(b"\n", self.at)
        if end < 0:
            raise TruncatedPickleError(f"{self.source}: its pickle is truncated in the line at byte {self.at}")
        start, self.at = self.at, end + 1
        return self.raw[start:end].decode()

    def memoize_top(self, number: int) -> None:
        """Store the top of the stack in the memo under ``number``."""
        value = self.stack[-1]
        if number == len(self.memo):
            self.memo.append(value)
        elif number < len(self.memo):
            self.memo[number] = value
        else:
            self.sparse_memo[number] = value

    def push_memoized(self, number: int) -> None:
        """Push the memo's value with the given number."""
        self.stack.append(self.memo[number] if number < len(self.memo) else self.sparse_memo[number])

    def pop_to_mark(self) -> list[Any]:
        """Pop and return the values above the last mark, and remove the mark."""
        items, self.stack = self.stack, self.marks.pop()
        return items
