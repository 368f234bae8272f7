"""The opcodes that checkpoints' pickles have, of protocols 2 to 5: the stack, plain values, containers.

Source: https://docs.python.org/3/library/pickletools.html
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable
from types import UnionType
from typing import Any

from holdfast.formats.pickles.machine import Machine, Maker, Record, Stop

Opcode = Callable[[Machine], None]

#: The longest integer in bytes: Python prints no number of more than 4300 digits.
_INTEGER = 1251

#: How deep a key of a dict may be nested, as hashing is recursive; and the largest integer, as they are told apart
#: by their remainders.
_KEY_DEPTH, _KEY_SIZE = 8, 2**64

#: Types of which every value can be a key.
_KEYS = frozenset({str, float, bool, bytes, type(None), complex})

_U8, _U16, _U32, _U64 = (struct.Struct(f"<{letter}") for letter in "BHIQ")
_I32, _FLOAT = struct.Struct("<i"), struct.Struct(">d")

_LAST_PROTOCOL = 5


def check_key(key: object, depth: int = 0) -> None:
    """Raise ``TypeError`` for what is not to be hashed: what cannot be, and what is nested deeply."""
    if type(key) in _KEYS or isinstance(key, Record):
        return
    if isinstance(key, tuple | frozenset) and depth < _KEY_DEPTH:
        for one in key:
            check_key(one, depth + 1)
        return
    large = isinstance(key, int) and abs(key) >= _KEY_SIZE
    if large or isinstance(key, tuple | frozenset) or type(key).__hash__ is None:
        raise TypeError(f"{kind(key)} is a key")


def kind(value: object) -> str:
    """What a value is called in messages."""
    return value.name if isinstance(value, Maker | Record) else f"a {type(value).__name__}"


def _stop(machine: Machine) -> None:
    if not machine.stack:
        raise IndexError
    raise Stop


def _refuse(machine: Machine) -> None:
    code = machine.raw[machine.at - 1]
    raise ValueError(f"no checkpoint has its opcode {code:#04x} at byte {machine.at - 1}")


def _protocol(machine: Machine) -> None:
    if machine.take(1)[0] > _LAST_PROTOCOL:
        raise ValueError("it is of an unknown protocol")


def _frame(machine: Machine) -> None:
    machine.take(_U64.size)  # how long a part of the pickle is; all of it is here


def _mark(machine: Machine) -> None:
    machine.marks.append(machine.stack)
    machine.stack = []


def _pop(machine: Machine) -> None:
    machine.stack.pop() if machine.stack else machine.items()


def _pop_mark(machine: Machine) -> None:
    machine.items()


def _duplicate(machine: Machine) -> None:
    machine.stack.append(machine.stack[-1])


def _memoize(machine: Machine) -> None:
    machine.memo[len(machine.memo)] = machine.stack[-1]


def _put_small(machine: Machine) -> None:
    machine.memo[machine.raw[machine.at]] = machine.stack[-1]
    machine.at += 1


def _put(machine: Machine) -> None:
    machine.memo[machine.number(_U32)] = machine.stack[-1]


def _get_small(machine: Machine) -> None:
    machine.stack.append(machine.memo[machine.raw[machine.at]])
    machine.at += 1


def _get(machine: Machine) -> None:
    machine.stack.append(machine.memo[machine.number(_U32)])


def _constant(value: Any) -> Opcode:
    def push(machine: Machine) -> None:
        machine.stack.append(value)

    return push


def _number(form: struct.Struct) -> Opcode:
    def push(machine: Machine) -> None:
        machine.stack.append(machine.number(form))

    return push


def _small(machine: Machine) -> None:
    machine.stack.append(machine.raw[machine.at])
    machine.at += 1


def _integer(form: struct.Struct) -> Opcode:
    def push(machine: Machine) -> None:
        size = machine.number(form)
        if size > _INTEGER:
            raise ValueError(f"it has an integer of {size} bytes")
        machine.stack.append(int.from_bytes(machine.take(size), "little", signed=True))

    return push


def _text(form: struct.Struct) -> Opcode:
    def push(machine: Machine) -> None:
        machine.stack.append(machine.take(machine.number(form)).decode("utf-8", "surrogatepass"))

    return push


def _bytes(form: struct.Struct, made: Callable[[bytes], Any] = bytes) -> Opcode:
    def push(machine: Machine) -> None:
        machine.stack.append(made(machine.take(machine.number(form))))

    return push


def _empty(made: type) -> Opcode:
    def push(machine: Machine) -> None:
        machine.stack.append(made())

    return push


def _marked(made: Callable[[list[Any]], Any]) -> Opcode:
    def push(machine: Machine) -> None:
        found = made(machine.items())
        machine.stack.append(found)

    return push


def _tuple_of(size: int) -> Opcode:
    def push(machine: Machine) -> None:
        stack = machine.stack
        if len(stack) < size:
            raise IndexError
        stack[-size:] = [tuple(stack[-size:])]

    return push


def _append(machine: Machine) -> None:
    item = machine.stack.pop()
    _target(machine, list | deque).append(item)


def _appends(machine: Machine) -> None:
    found = machine.items()
    _target(machine, list | deque).extend(found)


def _dict(flat: list[Any]) -> dict[Any, Any]:
    table: dict[Any, Any] = {}
    _set(table, flat)
    return table


def _set_item(machine: Machine) -> None:
    value, key = machine.stack.pop(), machine.stack.pop()
    _set(_target(machine, dict), [key, value])


def _set_items(machine: Machine) -> None:
    found = machine.items()
    _set(_target(machine, dict), found)


def _set(table: dict[Any, Any], flat: list[Any]) -> None:
    keys = flat[::2]
    for key in keys:
        if type(key) is not str:
            check_key(key)
    table.update(zip(keys, flat[1::2], strict=True))


def _add_items(machine: Machine) -> None:
    found = machine.items()
    _target(machine, set).update(_checked(found))


def _checked(found: list[Any]) -> list[Any]:
    for item in found:
        check_key(item)
    return found


def _target(machine: Machine, wanted: type | UnionType) -> Any:
    found = machine.stack[-1]
    if not isinstance(found, wanted):
        raise TypeError(f"it puts items into {kind(found)}")
    return found


#: What each opcode does, but for those that are about objects.
OPCODES: dict[str, Opcode] = {
    ".": _stop,
    "(": _mark,
    "0": _pop,
    "1": _pop_mark,
    "2": _duplicate,
    "\x94": _memoize,
    "q": _put_small,
    "r": _put,
    "h": _get_small,
    "j": _get,
    "\x80": _protocol,
    "\x95": _frame,
    "N": _constant(None),
    "\x88": _constant(value=True),
    "\x89": _constant(value=False),
    ")": _constant(()),
    "J": _number(_I32),
    "K": _small,
    "M": _number(_U16),
    "G": _number(_FLOAT),
    "\x8a": _integer(_U8),
    "\x8b": _integer(_U32),
    "\x8c": _text(_U8),
    "X": _text(_U32),
    "\x8d": _text(_U64),
    "U": _text(_U8),
    "T": _text(_U32),
    "C": _bytes(_U8),
    "B": _bytes(_U32),
    "\x8e": _bytes(_U64),
    "\x96": _bytes(_U64, bytearray),
    "]": _empty(list),
    "}": _empty(dict),
    "\x8f": _empty(set),
    "t": _marked(tuple),
    "\x85": _tuple_of(1),
    "\x86": _tuple_of(2),
    "\x87": _tuple_of(3),
    "l": _marked(list),
    "d": _marked(_dict),
    "a": _append,
    "e": _appends,
    "s": _set_item,
    "u": _set_items,
    "\x90": _add_items,
    "\x91": _marked(lambda found: frozenset(_checked(found))),
}


def table(more: dict[str, Opcode]) -> list[Opcode]:
    """What to do for each byte that may be an opcode."""
    known = OPCODES | more
    return [known.get(chr(code), _refuse) for code in range(256)]
