"""A device ``sim`` for tensors, of torch's kind for devices written in Python (PrivateUse1).

Its memory has addresses at which the process cannot read, so nothing can look into it but the device's own kernels and
copies. These are enqueued on streams (:mod:`tests.helpers.simulated.streams`), and run later, in this process, on the
host's memory. As with CUDA, a copy between the device and *pinned* memory is enqueued if it need not block; any other
copy of host memory has ended, or has read its source, when the call returns.

Python devices of torch (2.13) have no streams and events of C++, and one index. So streams are those of the device's
module: ``torch.get_device_module("sim")``, with the names of ``torch.cuda``. Code that asks ``torch.accelerator`` for a
stream does not see them. Memory is not used again within a test: what is freed too early is not noticed.

A process that has imported this has an accelerator for good. Import it in ranks of the pool, or in other processes of
their own, and never in that of pytest.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from rankless.engine.io import device_streams
from tests.helpers.simulated import streams
from tests.helpers.simulated.streams import SCHEDULER, Entry

aten = torch.ops.aten
_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)

#: The bytes of memory that the device has. They take host memory when they are used.
_CAPACITY = 2**32


class Memory:
    """The memory of the device: ``addresses`` that the process cannot read, and the bytes that are there."""

    def __init__(self) -> None:
        self._addresses = np.frombuffer(mmap.mmap(-1, _CAPACITY, prot=0), np.uint8)
        self._start = self._addresses.ctypes.data
        self._map = mmap.mmap(-1, _CAPACITY, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._bytes = torch.from_numpy(np.frombuffer(self._map, np.uint8))
        self.used = 512  # the address of an empty tensor is not 0
        #: The bytes that were allocated since a test has set this to 0.
        self.allocated = 0

    def allocate(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        nbytes = dtype.itemsize * (1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True)))
        nbytes = 0 if 0 in size else nbytes
        storage = torch._C._construct_storage_from_data_pointer(self._start + self.used, torch.device("sim:0"), nbytes)
        self.used += -(-nbytes // 512) * 512
        self.allocated += nbytes
        assert self.used <= _CAPACITY, "the simulated device is full"
        empty = torch._C._acc.create_empty_tensor([0], dtype)
        return aten.set_.source_Storage_storage_offset.redispatch(_CPU, empty, storage, 0, list(size), list(stride))

    def free_all(self) -> None:
        """Free the memory of all tensors, and give it back to the host."""
        self.used = 512
        self._map.madvise(mmap.MADV_DONTNEED)

    def on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the elements of a tensor of the device, for its kernels."""
        if tensor.device.type != "sim":
            return tensor
        start = tensor.untyped_storage().data_ptr() - self._start
        whole = self._bytes[start : start + tensor.untyped_storage().nbytes()].view(tensor.dtype)
        offset = whole.storage_offset() + tensor.storage_offset()
        view = torch.as_strided(whole, tensor.shape, tensor.stride(), offset)
        view = torch._conj(view) if tensor.is_conj() else view
        return torch._neg_view(view) if tensor.is_neg() else view


class Runtime:
    """What ``torch.cuda.cudart()`` returns: registration of host memory as pinned."""

    cudaError = SimpleNamespace(success=0)  # noqa: N815 - CUDA's name

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}
        self.refuses = False
        #: Has an error that the next kernel of a thread reports, as CUDA does if nobody has asked for it.
        self.thread = threading.local()

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802
        SCHEDULER.note_call()
        if self.refuses:
            self.thread.pending = "simulated error: out of memory"
            return 2
        known = list(self.registered.items())  # other threads register memory, too
        assert not any(start < address + nbytes and address < start + size for start, size in known)
        self.registered[address] = nbytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        try:
            SCHEDULER.note_call()
            SCHEDULER.run_all()  # as CUDA does
        finally:  # the memory is about to be unmapped, whatever the kernels before do
            del self.registered[address]
        return 0

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        address, nbytes = tensor.data_ptr(), tensor.numel() * tensor.element_size()
        return any(
            start <= address and address + nbytes <= start + size for start, size in list(self.registered.items())
        )


class Module:
    """The module of the device: what rankless and torch use of ``torch.cuda``."""

    Stream, Event = streams.Stream, streams.Event
    stream, current_stream = streams.StreamContext, staticmethod(streams.current_stream)
    device = streams.DeviceContext

    def __init__(self) -> None:
        self._rng_state = torch.zeros(16, dtype=torch.uint8)

    def cudart(self) -> Runtime:
        return RUNTIME

    def synchronize(self, device: object = None) -> None:
        SCHEDULER.run_all()

    def is_current_stream_capturing(self) -> bool:
        return streams.current_stream().is_capturing

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def current_device(self) -> int:
        return 0

    def set_device(self, device: object) -> None:
        pass

    def device_count(self) -> int:
        return 1

    def manual_seed(self, seed: int) -> None:
        self._rng_state = torch.full((16,), seed % 256, dtype=torch.uint8)

    manual_seed_all = manual_seed

    def get_rng_state(self, device: object = None) -> torch.Tensor:
        if self.is_current_stream_capturing():
            raise RuntimeError("simulated error: the seed cannot be read during a capture")
        return self._rng_state.clone()

    def set_rng_state(self, state: torch.Tensor, device: object = None) -> None:
        self._rng_state = state.clone()


MEMORY, RUNTIME = Memory(), Runtime()

_VIEWS = {
    aten.as_strided.default,
    aten.view.default,
    aten._reshape_alias.default,
    aten.alias.default,
    aten.set_.source_Storage,
    aten.set_.source_Storage_storage_offset,
}


def _dispatch(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Do what torch asks of the device: every call of an operator with a tensor of it."""
    if op in _VIEWS:
        return op.redispatch(_CPU, *args, **kwargs)
    return _OWN[op](*args, **kwargs) if op in _OWN else _run_kernel(op, args, kwargs)


def _empty(size: Sequence[int], *, dtype: torch.dtype | None = None, **_: Any) -> torch.Tensor:
    return _empty_strided(size, torch.empty(size, device="meta").stride(), dtype=dtype)


def _empty_strided(
    size: Sequence[int], stride: Sequence[int], *, dtype: torch.dtype | None = None, **_: Any
) -> torch.Tensor:
    return MEMORY.allocate(size, stride, dtype or torch.get_default_dtype())


def _item(tensor: torch.Tensor) -> Any:
    torch_stream().synchronize()
    return MEMORY.on_host(tensor).item()


def _resize_to(tensor: torch.Tensor, size: Sequence[int], **_: Any) -> torch.Tensor:
    return _resize(tensor, torch.empty(size, device="meta"))


def _copy(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    hosts = [tensor for tensor in (source, target) if tensor.device.type == "cpu"]
    is_pinned = all(RUNTIME.is_pinned(host) for host in hosts)
    if source is hosts[0] if hosts else False:
        source = source if is_pinned and non_blocking else source.clone()
    _enqueue(lambda: MEMORY.on_host(target).copy_(MEMORY.on_host(source)))
    if hosts and not (is_pinned and non_blocking):
        torch_stream().synchronize()
    return target


def torch_stream() -> streams.Stream:
    return streams.current_stream()


def _enqueue(work: Callable[[], Any]) -> None:
    SCHEDULER.raise_if_lost()
    if message := RUNTIME.thread.__dict__.pop("pending", None):
        raise RuntimeError(message)
    torch_stream().add(Entry(lambda: _run_without_checks(work)))


def _run_without_checks(work: Callable[[], Any]) -> None:
    """Run what torch has checked when it was enqueued, in whatever thread waits for it."""
    with torch.inference_mode():
        work()


def _run_kernel(op: Any, args: Any, kwargs: Any) -> Any:
    """Enqueue an operator. Its results have the shapes that it gives on the meta device."""
    kwargs = {name: value for name, value in kwargs.items() if name != "device"}
    mutated = [
        value
        for argument, value in _bind(op, args, kwargs)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    if mutated:
        if op._schema.arguments[-1].is_out:
            _fit_results(op, args, kwargs, mutated)
        _enqueue(lambda: op(*_map(MEMORY.on_host, args), **_map(MEMORY.on_host, kwargs)))
        return mutated[0] if len(mutated) == 1 else tuple(mutated)
    shapes = op(*_map(_to_meta, args), **_map(_to_meta, kwargs))
    results = _map(lambda meta: MEMORY.allocate(meta.shape, meta.stride(), meta.dtype), shapes)

    def run() -> None:
        values = op(*_map(MEMORY.on_host, args), **_map(MEMORY.on_host, kwargs))
        for result, value in zip(pytree.tree_leaves(results), pytree.tree_leaves(values), strict=True):
            MEMORY.on_host(result).copy_(value)

    _enqueue(run)
    return results


def _fit_results(op: Any, args: Any, kwargs: Any, results: Sequence[torch.Tensor]) -> None:
    """Give the results of an operator that fills what it is given the shapes that they have on the meta device."""
    shapes = op(*_map(_to_meta, args), **_map(_to_meta, kwargs))
    for result, shape in zip(results, [shapes] if isinstance(shapes, torch.Tensor) else shapes, strict=True):
        _resize(result, shape)


def _resize(tensor: torch.Tensor, shape: torch.Tensor) -> torch.Tensor:
    if tensor.shape == shape.shape:
        return tensor
    memory = MEMORY.allocate(shape.shape, shape.stride(), tensor.dtype).untyped_storage()
    return aten.set_.source_Storage_storage_offset.redispatch(_CPU, tensor, memory, 0, shape.shape, shape.stride())


def _bind(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[tuple[Any, Any]]:
    arguments = op._schema.arguments
    return [(arguments[i], value) for i, value in enumerate(args)] + [
        (argument, kwargs[argument.name]) for argument in arguments if argument.name in kwargs
    ]


def _to_meta(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.device.type != "sim":
        return tensor.to("meta") if tensor.ndim else tensor
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _map(function: Callable[[torch.Tensor], Any], tree: Any) -> Any:
    return pytree.tree_map(lambda leaf: function(leaf) if isinstance(leaf, torch.Tensor) else leaf, tree)


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    torch_stream().synchronize()
    return torch.equal(MEMORY.on_host(one), MEMORY.on_host(other))


def reset() -> None:
    """Make the device as it was in the beginning. No tensor of an earlier test may be used any more."""
    SCHEDULER.reset()
    device_streams._streams.clear()  # they have tensors, too
    MEMORY.free_all()
    RUNTIME.refuses, RUNTIME.thread = False, threading.local()


#: Operators that are not kernels.
_OWN: dict[Any, Callable[..., Any]] = {
    aten.empty.memory_format: _empty,
    aten.empty_strided.default: _empty_strided,
    aten._copy_from.default: _copy,
    aten._local_scalar_dense.default: _item,
    aten.resize_.default: _resize_to,
    aten.equal.default: _equal,
}

_setup_privateuseone_for_python_backend("sim", Module())
_library = torch.library.Library("_", "IMPL")
_library.fallback(_dispatch, "PrivateUse1")
