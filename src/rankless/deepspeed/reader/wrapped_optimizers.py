"""Optimizers without ZeRO. Their whole state is in the file of the model, with numbers instead of names.

Source: ``state_dict`` in ``runtime/fp16/unfused_optimizer.py`` and ``runtime/fp16/fused_optimizer.py``.

:mod:`rankless.deepspeed.reader.tag_contents` calls it on each rank that opens such a checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rankless.deepspeed.reader.joined_optimizer import JoinedOptimizer
from rankless.deepspeed.reader.master_weight_proof import have_equal_values, round_values
from rankless.errors import CorruptCheckpointError, FormatError
from rankless.formats.read_stored_tensor import read_tensor_bytes
from rankless.formats.stored_tensor import StoredTensor
from rankless.ondisk.dtypes import dtype_width

#: The keys of the master weights: lists of tensors by group, or one flat tensor a group.
_MASTERS, _FLAT_MASTERS, _INNER = "fp32_groups", "fp32_groups_flat", "optimizer_state_dict"

#: The elements that are compared first. Rarely two parameters have equal ones.
_SAMPLE = 4096


def is_wrapped(optimizer: Any) -> bool:
    """Return whether a state is from an optimizer with master weights. Else it is the state dict of torch."""
    return isinstance(optimizer, dict) and _INNER in optimizer


def name_wrapped(optimizer: Mapping[str, Any], module: Mapping[str, Any], source: str) -> JoinedOptimizer:
    """Return the state of an optimizer with master weights by the names of the parameters.

    The files have no names. A master weight belongs to the one parameter that it rounds to. Raises ``FormatError`` if
    there is none, or several.
    """
    inner = optimizer[_INNER]
    if _MASTERS not in optimizer:
        raise FormatError(
            f"{source} has the flat master weights of FP16_Optimizer, which have no names: read the model with --key "
            "optimizer=skip (keys={'optimizer': 'skip'}), or save with ZeRO"
        )
    groups = inner.get("param_groups") if isinstance(inner, dict) else None
    masters = optimizer[_MASTERS]
    if not isinstance(groups, list) or not isinstance(masters, list) or len(groups) != len(masters):
        raise CorruptCheckpointError(f"{source}: the optimizer's groups are not those of its master weights")
    joined = JoinedOptimizer(
        values={"loss_scaler": {key: optimizer[key] for key in optimizer if key not in {_MASTERS, _INNER}}}
    )
    names = _NameSearch(module, source)
    for group, tensors in zip(groups, masters, strict=True):
        numbers = group.get("params")
        if not isinstance(numbers, list) or len(numbers) != len(tensors):
            raise CorruptCheckpointError(f"{source}: a group of the optimizer does not list its parameters")
        named = [names.find_name(tensor) for tensor in tensors]
        joined.masters |= dict(zip(named, tensors, strict=True))
        joined.states |= {
            name: dict(inner["state"].get(number, {})) for name, number in zip(named, numbers, strict=True)
        }
        joined.groups.append({**{key: value for key, value in group.items() if key != "params"}, "params": named})
    if len(joined.masters) != sum(map(len, masters)):
        raise FormatError(f"{source}: two master weights of the optimizer round to the same parameter")
    return joined


class _NameSearch:
    """A search for the parameter that a master weight rounds to: by shape, by a sample, and then by all values."""

    def __init__(self, module: Mapping[str, Any], source: str) -> None:
        self._source = source
        self._tensors = {name: value for name, value in module.items() if isinstance(value, StoredTensor)}
        self._samples: dict[tuple[Any, ...], list[str]] = {}
        identities = set()
        for name, tensor in self._tensors.items():
            if tensor.identity not in identities:  # a tied parameter has the name that comes first
                self._samples.setdefault(self._sample_key(tensor, tensor.info.dtype), []).append(name)
            identities.add(tensor.identity)

    def find_name(self, master: Any) -> str:
        if not isinstance(master, StoredTensor):
            raise CorruptCheckpointError(f"{self._source}: a master weight of the optimizer is not a tensor")
        names = list(self._iterate_candidates(master))
        if len(names) > 1:
            names = [name for name in names if have_equal_values(master, self._tensors[name])]
        if len(names) != 1:
            could_be = f"could be any of {', '.join(names[:3])}" if names else "rounds to no parameter"
            raise FormatError(
                f"{self._source}: without ZeRO, master weights have no names, and one of the shape "
                f"{list(master.info.shape)} {could_be}: read the model with --key optimizer=skip "
                "(keys={'optimizer': 'skip'})"
            )
        return names[0]

    def _iterate_candidates(self, master: StoredTensor) -> Iterator[str]:
        for dtype in sorted({tensor.info.dtype for tensor in self._tensors.values()}):
            yield from self._samples.get(self._sample_key(master, dtype), ())

    def _sample_key(self, tensor: StoredTensor, dtype: str) -> tuple[Any, ...]:
        """Return the shape and the first values of a tensor, rounded to ``dtype``."""
        stop = min(tensor.info.nbytes, _SAMPLE * dtype_width(tensor.info.dtype))
        raw = read_tensor_bytes(tensor, 0, stop) if stop else b""
        return repr(tensor.info.shape), dtype, round_values(raw, tensor.info.dtype, dtype)
