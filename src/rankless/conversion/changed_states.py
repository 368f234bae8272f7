"""Warnings of optimizer states that are not in an output as the optimizer kept them.

Conversions call it on rank 0; a save of an optimizer into a file of ``torch.save`` calls it on rank 0, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rankless.observe.warning import warn_caller
from rankless.ondisk.value_files import DIMENSION_ORDER
from rankless.ondisk.values import ORDER_SUFFIX

#: The entry of a table that takes the place of an object.
_OBJECT = "rankless.object"


def warn_of_changed_states(values: Mapping[str, Any], output: str) -> None:
    """Warn of states in the encoded ``values`` of a checkpoint that lose their class or their order in memory.

    ``output`` keeps the states of optimizers otherwise.
    """
    of_objects, of_orders = [], []
    for subject, value in _iterate_states(values):
        classes = [node[_OBJECT] for node in _iterate_tables(value) if _OBJECT in node]
        of_objects += [f"{subject} has a {str(classes[0]).rpartition(':')[2]}"] if classes else []
        of_orders += [subject] if any(map(_has_order, _iterate_tables(value))) else []
    if of_objects:
        warn_caller(
            f"{output} has tables in place of {len(of_objects)} optimizer states that are objects, as {of_objects[0]}: "
            "only rankless makes objects of them when it loads them"
        )
    if of_orders:
        warn_caller(
            f"{output} has the elements of {len(of_orders)} optimizer states in row-major order, which were in another "
            f"order in memory, as {of_orders[0]}: after a load, sums of steps may differ in their last bits"
        )


def _iterate_states(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the states of all optimizers that are more than a tensor in rows, with their names."""
    for slot, optimizer in values.items():
        if slot.partition("/")[0] == "optimizer":
            for parameter, states in (item for group in optimizer["groups"] for item in group["state"].items()):
                yield from ((f"{name!r} of {parameter!r}", value) for name, value in states.items())


def _iterate_tables(value: Any) -> Iterator[Mapping[str, Any]]:
    """Yield all tables in an encoded value."""
    if isinstance(value, Mapping):
        yield value
    children = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    for child in children:
        yield from _iterate_tables(child)


def _has_order(table: Mapping[str, Any]) -> bool:
    """Return whether a table has the order of dimensions of a tensor, or is an encoded tensor with one."""
    inline, name = table.get("$inline"), table.get("$tensor")
    has_suffix = isinstance(name, str) and ORDER_SUFFIX in name
    return DIMENSION_ORDER in table or has_suffix or (isinstance(inline, list) and len(inline) > len(_INLINE))


#: The members of a small tensor that is encoded in its place: its order of dimensions may follow.
_INLINE = "dtype", "shape", "bytes"
