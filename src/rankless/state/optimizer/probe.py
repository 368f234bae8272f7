"""Prediction of the states that an optimizer creates for a parameter: a shallow copy takes a step on fake tensors.

A fake tensor has a shape, a dtype and a device but no memory: nothing is computed, and collectives of a DTensor do not
communicate. Values that the step reads are invented.

:mod:`rankless.state.optimizer.optimizer_restore` and :mod:`rankless.state.optimizer.state_buffers` ask it on each rank
while a load matches. Nothing of the caller's may change by it.
"""

from __future__ import annotations

import math
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import torch
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.optim import Optimizer
from torch.optim import optimizer as optim
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from rankless.errors import OptimizerMismatchError
from rankless.state.tensor_subclasses import is_wrapper


class ProbedWrapper(msgspec.Struct, frozen=True):
    """A wrapper subclass that a predicted shard belongs to, its context, and its inner tensors by name."""

    subclass: Any
    context: Any
    inner: dict[str, ProbedState]


class ProbedState(msgspec.Struct, frozen=True):
    """A predicted state tensor. ``shape`` and ``stride`` are global; ``mesh`` and ``placements`` are a DTensor's."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    local_shape: tuple[int, ...]
    local_stride: tuple[int, ...]
    mesh: DeviceMesh | None = None
    placements: tuple[Placement, ...] = ()
    wrapper: ProbedWrapper | None = None

    def numel(self) -> int:
        """Return the number of its elements, on all ranks."""
        return math.prod(self.shape)

    def make_empty(self) -> torch.Tensor:
        """Return a new tensor like it, with uninitialized values."""
        local = self._make_local()
        if self.mesh is None:
            return local
        return DTensor.from_local(
            local, self.mesh, self.placements, run_check=False, shape=torch.Size(self.shape), stride=self.stride
        )

    def _make_local(self) -> torch.Tensor:
        if self.wrapper is None:
            return torch.empty_strided(self.local_shape, self.local_stride, dtype=self.dtype, device=self.device)
        inner = {name: state.make_empty() for name, state in self.wrapper.inner.items()}
        size = torch.Size(self.local_shape), self.local_stride
        return self.wrapper.subclass.__tensor_unflatten__(inner, self.wrapper.context, *size)  # type: ignore[no-any-return]


def probe_states(optimizer: Optimizer, parameter: torch.Tensor) -> dict[str, ProbedState | None]:
    """Return the states, by name, that the optimizer has for a parameter after its first step; ``None``: no tensor.

    It affects this rank alone, and changes nothing in the optimizer or the parameter. Raises ``OptimizerMismatchError``
    if no step can be taken without values: it needs a closure or another optimizer, or fails in torch.
    """
    try:
        return _probe_step(optimizer, parameter)
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise OptimizerMismatchError(
            f"the states that {type(optimizer).__qualname__} creates for a parameter of shape {list(parameter.shape)} "
            f"are unknown before its first step; take one, then load ({reason})"
        ) from error


def _probe_step(optimizer: Optimizer, parameter: torch.Tensor) -> dict[str, ProbedState | None]:
    copy, group = _copy_optimizer(optimizer), _find_group(optimizer, parameter)
    devices = [] if parameter.device.type == "cpu" else [parameter.device]
    with (
        torch.compiler.set_stance("force_eager"),  # a compiled step could not run on fake tensors
        torch.random.fork_rng(devices, device_type=parameter.device.type),
        FakeTensorMode(allow_fallback_kernels=False),
        _FakeTensorsOnly(),  # type: ignore[no-untyped-call]
        _only_own_step(copy),
    ):
        fake = torch.nn.Parameter(_describe_tensor(parameter).make_empty())
        vars(fake).update(vars(parameter))
        fake.grad = torch.empty_like(fake)
        copy.param_groups = [{**_copy_containers({**group, "params": []}), "params": [fake]}]
        # Some optimizers create states in their constructor.
        copy.state[fake] = _copy_containers(optimizer.state.get(parameter, {}))
        type(optimizer).step(copy)
    states = copy.state[fake].items()
    return {str(name): _describe_tensor(value) if isinstance(value, torch.Tensor) else None for name, value in states}


def _find_group(optimizer: Optimizer, parameter: torch.Tensor) -> dict[str, Any]:
    for group in optimizer.param_groups:
        if any(member is parameter for member in group["params"]):
            return group
    raise ValueError("the parameter is in none of its groups")


def _copy_optimizer(optimizer: Optimizer) -> Any:
    """Return a copy without groups, states, hooks, and the ``step`` that a scheduler sets on an instance."""
    attributes = {
        name: value for name, value in vars(optimizer).items() if name not in {"param_groups", "state", "step"}
    }
    if "param_groups" not in vars(optimizer) or any(isinstance(leaf, Optimizer) for leaf in tree_leaves(attributes)):
        raise TypeError("it wraps another optimizer")
    copy: Any = object.__new__(type(optimizer))
    vars(copy).update(_copy_containers(attributes), state=defaultdict(dict))
    vars(copy).update(_optimizer_step_pre_hooks=OrderedDict(), _optimizer_step_post_hooks=OrderedDict())
    return copy


def _copy_containers(tree: Any) -> Any:
    """Return a copy of the dicts, lists and tuples of a tree, with the same leaves."""
    return tree_map(lambda leaf: leaf, tree)


def _describe_tensor(tensor: torch.Tensor) -> ProbedState:
    shape, stride = tuple(tensor.shape), tuple(tensor.stride())
    if not isinstance(tensor, DTensor):
        wrapper = _describe_wrapper(tensor) if is_wrapper(tensor) else None
        return ProbedState(shape, stride, tensor.dtype, tensor.device, shape, stride, wrapper=wrapper)
    local = _describe_tensor(tensor._local_tensor)  # noqa: SLF001
    mesh, placements = tensor.device_mesh, tuple(tensor.placements)
    return ProbedState(
        shape, stride, local.dtype, local.device, local.shape, local.stride, mesh, placements, local.wrapper
    )


def _describe_wrapper(tensor: torch.Tensor) -> ProbedWrapper:
    names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    return ProbedWrapper(type(tensor), context, {name: _describe_tensor(getattr(tensor, name)) for name in names})


class _FakeTensorsOnly(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that keeps real tensors, values and communication out of a step."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace == "c10d":
            raise RuntimeError(f"it communicates, with {func}")
        if func is torch.ops.aten._local_scalar_dense.default:  # noqa: SLF001
            dtype = args[0].dtype  # a value that does not make updates divide by zero
            return False if dtype == torch.bool else 0.5 if dtype.is_floating_point or dtype.is_complex else 1
        if not all(issubclass(kind, FakeTensor) for kind in types):
            return NotImplemented  # a DTensor's own dispatch calls again with the local shards
        if not func._schema.returns:  # noqa: SLF001 - it only sets values, and may have no fake kernel
            return None
        # FakeTensorMode refuses a real tensor, but only after it has run some ops on it.
        args, kwargs = tree_map_only(torch.Tensor, _make_fake, (args, kwargs or {}))
        return func(*args, **kwargs)


def _make_fake(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if isinstance(tensor, FakeTensor) else _describe_tensor(tensor).make_empty()


@contextmanager
def _only_own_step(copy: Optimizer) -> Iterator[None]:
    """Disable the hooks of all optimizers, and raise ``TypeError`` if another optimizer steps."""

    def check_optimizer(optimizer: Optimizer, *_: Any) -> None:
        if optimizer is not copy:
            raise TypeError("it steps another optimizer")

    names = "_global_optimizer_pre_hooks", "_global_optimizer_post_hooks"
    previous = {name: getattr(optim, name) for name in names}
    vars(optim).update(zip(names, (OrderedDict({0: check_optimizer}), OrderedDict()), strict=True))
    try:
        yield
    finally:
        vars(optim).update(previous)
