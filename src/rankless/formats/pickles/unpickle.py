"""Safe unpickling: every global that a pickle names is looked up in an allow-list, and nowhere else.

Readers of files of ``torch.save``, DCP, DeepSpeed, Megatron and NxD call it, on each rank or process that opens them. A
checkpoint is not trusted: nothing that a pickle names may be imported or run.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from rankless.errors import ReadBudgetError, UnsafePickleError
from rankless.formats.pickles.builtin_types import STATES
from rankless.formats.pickles.opcodes import opcode_table
from rankless.formats.pickles.unpickler import AllowedCallable, OpaqueObject, SafeUnpickler, kind_of
from rankless.ondisk.read_budget import ReadBudget

#: Names of Python 2 for modules and types, which protocol 2 still uses.
_MODULES = {"__builtin__": "builtins", "copy_reg": "copyreg"}
_RENAMED = {"builtins.xrange": "builtins.range", "builtins.unicode": "builtins.str", "builtins.long": "builtins.int"}

#: The most characters of a global's name in messages.
_MAX_SHOWN = 200

#: Units of work for each object, in addition to the units of its callable; and for a state.
_OBJECT, _STATE = 24, 4


def unpickle(
    raw: bytes,
    allowed: Mapping[str, object],
    source: str,
    persistent_load: Callable[[Any], Any] | None = None,
    *,
    budget: ReadBudget | None = None,
    advice: str = "",
) -> Any:
    """Return the tree in a pickle. For the arguments see :class:`rankless.formats.pickles.unpickler.SafeUnpickler`.

    The bytes of ``raw`` must already have been added to ``budget``. Without one, the pickle gets a budget of its own.

    Raises ``UnsafePickleError`` for a global that is not ``allowed``, ``CorruptCheckpointError`` for an invalid pickle.
    """
    if budget is None:
        budget = ReadBudget(len(raw))
    return SafeUnpickler(raw, allowed, source, persistent_load, budget=budget, advice=advice).run_opcodes(_TABLE)


def unpickle_sequence(
    raw: bytes,
    number: int,
    allowed: Mapping[str, object],
    source: str,
    persistent_load: Callable[[Any], Any],
    *,
    budget: ReadBudget,
    advice: str,
) -> tuple[list[Any], int]:
    """Return the trees in ``number`` consecutive pickles, and the offset after the last one. See :func:`unpickle`."""
    trees, at = [], 0
    for _ in range(number):
        unpickler = SafeUnpickler(raw, allowed, source, persistent_load, budget=budget, advice=advice)
        unpickler.at = at
        trees.append(unpickler.run_opcodes(_TABLE))
        at = unpickler.at
    return trees, at


def _push_global(unpickler: SafeUnpickler) -> None:
    module = unpickler.read_line()
    _look_up_global(unpickler, module, unpickler.read_line())


def _push_stack_global(unpickler: SafeUnpickler) -> None:
    name, module = unpickler.stack.pop(), unpickler.stack.pop()
    _look_up_global(unpickler, module, name)


def _look_up_global(unpickler: SafeUnpickler, module: Any, name: Any) -> None:
    if not isinstance(module, str) or not isinstance(name, str):
        raise TypeError(f"the module and name of a global must be strings, got {kind_of(module)} and {kind_of(name)}")
    full = f"{_MODULES.get(module, module)}.{name}"
    full = _RENAMED.get(full, full)
    if full not in unpickler.allowed:
        raise UnsafePickleError(
            f"{unpickler.source} names {full[:_MAX_SHOWN]!r}, which rankless does not run: it reads only tensors and "
            f"plain values from pickles. {unpickler.advice}".rstrip()
        )
    unpickler.stack.append(unpickler.allowed[full])


def _call_allowed(unpickler: SafeUnpickler) -> None:
    args, function = unpickler.stack.pop(), unpickler.stack.pop()
    if not isinstance(function, AllowedCallable) or not isinstance(args, tuple):
        raise TypeError(f"it calls {kind_of(function)}")
    unpickler.budget.spend(_OBJECT)
    try:
        unpickler.stack.append(function.make(unpickler.budget, *args))
    except ReadBudgetError:
        raise
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise ValueError(f"it calls {function.name} with invalid arguments: {error}") from error


def _set_state(unpickler: SafeUnpickler) -> None:
    state, target = unpickler.stack.pop(), unpickler.stack[-1]
    unpickler.budget.spend(_STATE)
    if isinstance(target, OpaqueObject):
        target.state = state
    elif type(target) in STATES:
        STATES[type(target)](unpickler.budget, target, state)
    elif not isinstance(target, OrderedDict):  # a state dict has the versions of its modules as an attribute
        raise TypeError(f"it sets the state of {kind_of(target)}, which has none")


def _push_persistent(unpickler: SafeUnpickler) -> None:
    if unpickler.persistent_load is None:
        raise TypeError("it refers to an object outside of the pickle, which only pickles of torch.save may do")
    unpickler.stack.append(unpickler.persistent_load(unpickler.stack.pop()))


_TABLE = opcode_table(
    {
        "c": _push_global,
        "\x93": _push_stack_global,
        "R": _call_allowed,
        "\x81": _call_allowed,
        "b": _set_state,
        "Q": _push_persistent,
    }
)
