"""The opcodes that checkpoints' pickles have, of protocols 2 to 5: the stack, plain values, containers.

Source: https://docs.python.org/3/library/pickletools.html
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable
from types import UnionType
from typing import Any

from holdfast.formats.pickles.unpickler import SafeUnpickler, StopUnpickling, kind_of
from holdfast.ondisk.hash_limits import is_safe

Opcode = Callable[[SafeUnpickler], None]

#: The longest integer in bytes: Python prints no number of more than 4300 digits.
_INTEGER = 1251

#: What is spent for each empty container, for its memory; and for the first items of a dict.
_COSTS: dict[type, int] = {list: 4, dict: 5, set: 14}
_TUPLE, _FROZEN, _FIRST, _MARK = 3, 14, 8, 4

_U8, _U16, _U32, _U64 = (struct.Struct(f"<{letter}") for letter in "BHIQ")
_I32, _FLOAT = struct.Struct("<i"), struct.Struct(">d")

_LAST_PROTOCOL = 5


def _stop(machine: SafeUnpickler) -> None:
    if not machine.stack:
        raise IndexError
    raise StopUnpickling


def _refuse(machine: SafeUnpickler) -> None:
    code = machine.raw[machine.at - 1]
    raise ValueError(f"no checkpoint has its opcode {code:#04x} at byte {machine.at - 1}")


def _protocol(machine: SafeUnpickler) -> None:
    if machine.take(1)[0] > _LAST_PROTOCOL:
        raise ValueError("it is of an unknown protocol")


def _frame(machine: SafeUnpickler) -> None:
    machine.take(_U64.size)  # how long a part of the pickle is; all of it is here


def _mark(machine: SafeUnpickler) -> None:
    machine.budget.spend(_MARK)
    machine.marks.append(machine.stack)
    machine.stack = []


def _pop(machine: SafeUnpickler) -> None:
    machine.stack.pop() if machine.stack else machine.items()


def _pop_mark(machine: SafeUnpickler) -> None:
    machine.items()


def _duplicate(machine: SafeUnpickler) -> None:
    machine.stack.append(machine.stack[-1])


def _memoize(machine: SafeUnpickler) -> None:
    machine.put(len(machine.memo) + len(machine.far))


def _put_small(machine: SafeUnpickler) -> None:
    machine.put(machine.raw[machine.at])
    machine.at += 1


def _put(machine: SafeUnpickler) -> None:
    machine.put(machine.number(_U32))


def _get_small(machine: SafeUnpickler) -> None:
    machine.get(machine.raw[machine.at])
    machine.at += 1


def _get(machine: SafeUnpickler) -> None:
    machine.get(machine.number(_U32))


def _constant(value: Any) -> Opcode:
    def push(machine: SafeUnpickler) -> None:
        machine.stack.append(value)

    return push


def _number(form: struct.Struct) -> Opcode:
    def push(machine: SafeUnpickler) -> None:
        machine.stack.append(machine.number(form))

    return push


def _small(machine: SafeUnpickler) -> None:
    machine.stack.append(machine.raw[machine.at])
    machine.at += 1


def _integer(form: struct.Struct) -> Opcode:
    def push(machine: SafeUnpickler) -> None:
        size = machine.number(form)
        if size > _INTEGER:
            raise ValueError(f"it has an integer of {size} bytes")
        machine.stack.append(int.from_bytes(machine.take(size), "little", signed=True))

    return push


def _text(form: struct.Struct) -> Opcode:
    def push(machine: SafeUnpickler) -> None:
        machine.stack.append(machine.take(machine.number(form)).decode("utf-8", "surrogatepass"))

    return push


def _bytes(form: struct.Struct, made: Callable[[bytes], Any] = bytes) -> Opcode:
    def push(machine: SafeUnpickler) -> None:
        machine.stack.append(made(machine.take(machine.number(form))))

    return push


def _empty(made: type) -> Opcode:
    cost = _COSTS[made]

    def push(machine: SafeUnpickler) -> None:
        machine.budget.spend(cost)
        machine.stack.append(made())

    return push


def _tuple(machine: SafeUnpickler) -> None:
    machine.budget.spend(_TUPLE)
    items = machine.items()
    machine.stack.append(tuple(items))


def _list(machine: SafeUnpickler) -> None:
    items = machine.items()  # the mark has paid for the list that these are in
    machine.stack.append(items)


def _dict(machine: SafeUnpickler) -> None:
    machine.budget.spend(_COSTS[dict])
    items = machine.items()
    table: dict[Any, Any] = {}
    _set(machine, table, items)
    machine.stack.append(table)


def _frozenset(machine: SafeUnpickler) -> None:
    machine.budget.spend(_FROZEN)
    items = machine.items()
    machine.keys.check_new(items)
    machine.stack.append(frozenset(items))


def _tuple_of(size: int) -> Opcode:
    def push(machine: SafeUnpickler) -> None:
        stack = machine.stack
        if len(stack) < size:
            raise IndexError
        machine.budget.spend(_TUPLE)
        stack[-size:] = [tuple(stack[-size:])]

    return push


def _append(machine: SafeUnpickler) -> None:
    item = machine.stack.pop()
    _target(machine, list | deque).append(item)


def _appends(machine: SafeUnpickler) -> None:
    found = machine.items()
    _target(machine, list | deque).extend(found)


def _set_item(machine: SafeUnpickler) -> None:
    value, key = machine.stack.pop(), machine.stack.pop()
    table = _target(machine, dict)
    if not is_safe(key):
        _set(machine, table, [key, value])
        return
    if not table:
        machine.budget.spend(_FIRST)
    table[key] = value


def _set_items(machine: SafeUnpickler) -> None:
    found = machine.items()
    _set(machine, _target(machine, dict), found)


def _set(machine: SafeUnpickler, table: dict[Any, Any], flat: list[Any]) -> None:
    keys = flat[::2]
    if not table and keys:
        machine.budget.spend(_FIRST)
    machine.keys.check_new(keys, table)
    table.update(zip(keys, flat[1::2], strict=True))


def _add_items(machine: SafeUnpickler) -> None:
    items = machine.items()
    table = _target(machine, set)
    machine.keys.check_new(items, table)
    table.update(items)


def _target(machine: SafeUnpickler, wanted: type | UnionType) -> Any:
    found = machine.stack[-1]
    if not isinstance(found, wanted):
        raise TypeError(f"it puts items into {kind_of(found)}")
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
    "t": _tuple,
    "\x85": _tuple_of(1),
    "\x86": _tuple_of(2),
    "\x87": _tuple_of(3),
    "l": _list,
    "d": _dict,
    "a": _append,
    "e": _appends,
    "s": _set_item,
    "u": _set_items,
    "\x90": _add_items,
    "\x91": _frozenset,
}


def opcode_table(more: dict[str, Opcode]) -> list[Opcode]:
    """What to do for each byte that may be an opcode."""
    known = OPCODES | more
    return [known.get(chr(code), _refuse) for code in range(256)]
