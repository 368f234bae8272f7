"""Reading a pickle: what it names is looked up in an allow-list, and nowhere else."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from holdfast.errors import ReadBudgetError, UnsafePickleError
from holdfast.formats.pickles.builtin_types import STATES
from holdfast.formats.pickles.opcodes import opcode_table
from holdfast.formats.pickles.unpickler import AllowedCallable, OpaqueObject, SafeUnpickler, kind_of
from holdfast.ondisk.read_budget import ReadBudget

#: What Python 2 called some modules and names, as protocol 2 still does.
_MODULES = {"__builtin__": "builtins", "copy_reg": "copyreg"}
_RENAMED = {"builtins.xrange": "builtins.range", "builtins.unicode": "builtins.str"}

_NAME = 200

#: What is spent for each object, beside what its maker spends; and for a state.
_OBJECT, _STATE = 24, 4


def unpickle(
    raw: bytes,
    names: Mapping[str, object],
    what: str,
    outside: Callable[[Any], Any] | None = None,
    *,
    budget: ReadBudget | None = None,
    advice: str = "",
) -> Any:
    """The tree in a pickle. For the arguments see :class:`holdfast.formats.pickles.unpickler.SafeUnpickler`.

    Without a ``budget`` the pickle has one of its own; a given one has earned its bytes already.

    Raises ``UnsafePickleError`` for a name that is not in ``names``, ``CorruptCheckpointError`` for what is no whole pickle.
    """
    return SafeUnpickler(
        raw, names, what, outside, budget=ReadBudget(len(raw)) if budget is None else budget, advice=advice
    ).run(_TABLE)


def unpickle_sequence(
    raw: bytes,
    number: int,
    names: Mapping[str, object],
    what: str,
    outside: Callable[[Any], Any],
    *,
    budget: ReadBudget,
    advice: str,
) -> tuple[list[Any], int]:
    """The trees in several pickles, one after another, and where the last one ends: see :func:`unpickle`."""
    found, at = [], 0
    for _ in range(number):
        machine = SafeUnpickler(raw, names, what, outside, budget=budget, advice=advice)
        machine.at = at
        found.append(machine.run(_TABLE))
        at = machine.at
    return found, at


def _global(machine: SafeUnpickler) -> None:
    module = machine.line()
    _find(machine, module, machine.line())


def _stack_global(machine: SafeUnpickler) -> None:
    name, module = machine.stack.pop(), machine.stack.pop()
    _find(machine, module, name)


def _find(machine: SafeUnpickler, module: Any, name: Any) -> None:
    if not isinstance(module, str) or not isinstance(name, str):
        raise TypeError(f"it names {kind_of(module)}")
    full = f"{_MODULES.get(module, module)}.{name}"
    full = _RENAMED.get(full, full)
    if full not in machine.names:
        raise UnsafePickleError(
            f"{machine.what} names {full[:_NAME]!r}, which holdfast does not run: of pickles it reads tensors and "
            f"plain values only. {machine.advice}".rstrip()
        )
    machine.stack.append(machine.names[full])


def _make(machine: SafeUnpickler) -> None:
    args, maker = machine.stack.pop(), machine.stack.pop()
    if not isinstance(maker, AllowedCallable) or not isinstance(args, tuple):
        raise TypeError(f"it calls {kind_of(maker)}")
    machine.budget.spend(_OBJECT)
    try:
        machine.stack.append(maker.make(machine.budget, *args))
    except ReadBudgetError:
        raise
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise ValueError(f"{maker.name} with these arguments is none: {error}") from error


def _build(machine: SafeUnpickler) -> None:
    state, made = machine.stack.pop(), machine.stack[-1]
    machine.budget.spend(_STATE)
    if isinstance(made, OpaqueObject):
        made.state = state
    elif type(made) in STATES:
        STATES[type(made)](machine.budget, made, state)
    elif not isinstance(made, OrderedDict):  # a state dict has the versions of its modules as an attribute
        raise TypeError(f"it gives a state to {kind_of(made)}")


def _persistent_load(machine: SafeUnpickler) -> None:
    if machine.outside is None:
        raise TypeError("it refers to something outside of it")
    machine.stack.append(machine.outside(machine.stack.pop()))


_TABLE = opcode_table(
    {"c": _global, "\x93": _stack_global, "R": _make, "\x81": _make, "b": _build, "Q": _persistent_load}
)
