"""Values that only rank 0 stores, and that the ranks which have them compare by digests.

Each rank posts the digests in the vote "looking at what to save" (:mod:`rankless.save.save_negotiation`), or in the
same vote of a live copy. They are compared only, and not stored. Equal values must have equal digests in all processes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from rankless.engine.integrity.compare_values_by_digest import DIGEST_BYTES
from rankless.engine.integrity.replica_comparison import hash_shards
from rankless.engine.io.tensor_bytes import TensorBytes
from rankless.engine.plan.tensor_specs import digest_bytes
from rankless.ondisk.validation import state_key
from rankless.state.tensor_views import NAMES


class ComparedValue(NamedTuple):
    """A ``value``; the same as JSON, ``encoded``, with the tensors that this refers to, by name.

    If DDP replaces the value on all ranks of its group by one rank's value, only this rank's value ``is_posted``.
    """

    value: Any
    encoded: Any
    tensors: Mapping[str, torch.Tensor]
    is_posted: bool = True


def compare_buffer(tensor: torch.Tensor, *, is_posted: bool) -> ComparedValue:
    """Return a buffer as a value."""
    return ComparedValue(tensor, None, {"": tensor}, is_posted)


def compare_state_names(
    slot: str, owned: Sequence[str], tensors: Iterable[str], groups: Sequence[Mapping[str, Any]]
) -> dict[str, ComparedValue]:
    """Return the names of an optimizer's states as a value: each state is stored if some rank has it.

    Ranks that have states of the same ``owned`` parameters compare them. ``tensors`` are the names of those that are
    tensors; ``groups`` have the others.
    """
    plain = (state_key(name, state) for group in groups for name, states in group["state"].items() for state in states)
    names = sorted({*tensors, *plain})
    owners = digest_bytes("\0".join(sorted(owned)).encode(errors="surrogatepass"), 4).hex()
    return {f"{slot}/names of states ({owners})": ComparedValue(names, names, {})}


def digest_values(compared: Mapping[str, ComparedValue]) -> dict[str, bytes]:
    """Return a digest of each value that this rank posts. Equal values have equal digests in all processes.

    The digests are over all bytes of the tensors at each save: no replica takes part in writing these, so nothing else
    would notice a difference.
    """
    posted = {name: value for name, value in compared.items() if value.is_posted}
    tensors = [tensor for value in posted.values() for _, tensor in sorted(value.tensors.items())]
    crcs = iter(hash_shards([TensorBytes(tensor) for tensor in tensors], 0))
    return {name: _digest_value(value, crcs) for name, value in posted.items()}


def _digest_value(value: ComparedValue, crcs: Iterator[int]) -> bytes:
    if value.encoded is None and len(value.tensors) == 1:  # a buffer: a model may have thousands
        (tensor,) = value.tensors.values()
        return digest_bytes(f"{NAMES[tensor.dtype]} {[*tensor.shape]} {next(crcs)}".encode(), DIGEST_BYTES)
    hashed = [
        (name, NAMES[tensor.dtype], list(tensor.shape), next(crcs)) for name, tensor in sorted(value.tensors.items())
    ]
    return digest_bytes(json.dumps([value.encoded, hashed], sort_keys=True).encode(), DIGEST_BYTES)
