"""A mark of the state that training objects have after a step, which tells later whether they have changed since.

:class:`rankless.Checkpointer` has one on each rank, in the thread of the training.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from rankless.state.optimizer.adapters import optimizer_components

#: The address of a tensor, and the number of its tracked changes in place.
_Version = tuple[int, int]


#: The most tensors with elements that are compared.
_MAX_SAMPLED = 32


class _MarkedTensor(NamedTuple):
    """A tensor of a model when a step was complete.

    ``versions`` has its own version and, for a ``DTensor``, the version of its shard. ``sample`` has some elements, or
    none.
    """

    tensor: weakref.ref[torch.Tensor]
    versions: list[_Version]
    sample: torch.Tensor | None


class StepMark:
    """Notices changes of a state without reading tensors, for ``Checkpointer``.

    If optimizers of torch were passed, their steps are counted, by hooks that are removed with this object. Only
    without any of them the tensors of the model are compared: their addresses and versions, and because writes to
    ``.data`` do not change these, two elements of some tensors.
    """

    def __init__(self, model: Any, optimizer: Any) -> None:
        self._model = model
        self._is_counting = False
        self._steps = self._marked_steps = 0
        self._marked_tensors: dict[str, _MarkedTensor] = {}
        for part in [part for group in optimizer_components(optimizer).values() for part in group]:
            self.add_optimizer(part)

    def add_optimizer(self, candidate: Any) -> None:
        """Count the steps of an object, too, if it is an optimizer of torch."""
        if not isinstance(candidate, Optimizer):
            return
        mark = weakref.ref(self)

        def count_step(*_: Any) -> None:
            if (living := mark()) is not None:
                living._steps += 1  # noqa: SLF001 - of this object

        weakref.finalize(self, candidate.register_step_post_hook(count_step).remove)
        self._is_counting = True

    def set_mark(self) -> None:
        """Remember the present state as the state of the last complete step."""
        self._marked_steps = self._steps
        if not self._is_counting:
            tensors = list(_iter_tensors(self._model))
            stride = -(-len(tensors) // _MAX_SAMPLED)
            self._marked_tensors = {
                name: _MarkedTensor(
                    weakref.ref(tensor), _find_versions(tensor), None if number % stride else _sample(tensor)
                )
                for number, (name, tensor) in enumerate(tensors)
            }

    def has_changed(self) -> bool:
        """Return whether the state has changed since :meth:`set_mark`, as far as that can be noticed."""
        if self._is_counting:
            return self._steps != self._marked_steps
        present = dict(_iter_tensors(self._model))
        return present.keys() != self._marked_tensors.keys() or any(
            _is_changed(marked, present[name]) for name, marked in self._marked_tensors.items()
        )


def _is_changed(marked: _MarkedTensor, present: torch.Tensor) -> bool:
    tensor = marked.tensor()
    if tensor is None or _find_versions(tensor) != marked.versions:
        return True
    sample = None if marked.sample is None else _sample(tensor)
    if marked.sample is not None and sample is not None and not torch.equal(marked.sample, sample):
        return True
    # FSDP2 puts a whole parameter in the place of its shard for a while, also after a forward pass without gradients.
    return tensor is not present and not isinstance(tensor, DTensor)


def _iter_tensors(given: Any, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of modules, state dicts, and lists and dicts of these, with unique names."""
    if isinstance(given, nn.Module):
        yield from given.named_parameters(prefix)
        yield from given.named_buffers(prefix)
    elif isinstance(given, torch.Tensor):
        yield prefix, given
    elif isinstance(given, Mapping):
        for name, part in given.items():
            yield from _iter_tensors(part, f"{prefix}/{name}")
    elif isinstance(given, list | tuple):
        for number, part in enumerate(given):
            yield from _iter_tensors(part, f"{prefix}/{number}")


def _find_versions(tensor: torch.Tensor) -> list[_Version]:
    parts = {id(part): part for part in (tensor, _find_shard(tensor))}.values()
    return [(_find_address(part), -1 if part.is_inference() else part._version) for part in parts]  # noqa: SLF001


def _find_shard(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor with this rank's elements."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor  # noqa: SLF001


def _sample(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the bytes of the first and the last element of this rank. They stay on their device."""
    shard = _find_shard(tensor).detach()
    if type(shard) is not torch.Tensor or shard.is_meta or not shard.numel():
        return None
    ends = [shard[(position,) * shard.ndim] for position in (0, -1)]
    return torch.stack(ends).view(torch.uint8)


def _find_address(tensor: torch.Tensor) -> int:
    """Return the address of the first element; 0 for a subclass that has no memory of its own."""
    try:
        return tensor.data_ptr()
    except RuntimeError:
        return 0
