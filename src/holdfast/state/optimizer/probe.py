"""What states an optimizer would make for a parameter, told by a step of a shallow copy on fake tensors.

A fake tensor has a shape, a dtype and a device but no memory: nothing is computed, and collectives of a DTensor end at
the fake. A value that the step reads is made up.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.optim import Optimizer
from torch.optim import optimizer as optim
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from holdfast.errors import OptimizerMismatchError


@dataclass(frozen=True, slots=True)
class ProbedStates:
    """A state tensor to come. ``shape`` and ``stride`` are global; ``mesh`` and ``placements`` are a DTensor's."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    local_shape: tuple[int, ...]
    local_stride: tuple[int, ...]
    mesh: DeviceMesh | None = None
    placements: tuple[Placement, ...] = ()

    def empty(self) -> torch.Tensor:
        """A new tensor like it, its values not set."""
        local = torch.empty_strided(self.local_shape, self.local_stride, dtype=self.dtype, device=self.device)
        if self.mesh is None:
            return local
        return DTensor.from_local(
            local, self.mesh, self.placements, run_check=False, shape=torch.Size(self.shape), stride=self.stride
        )


def probe_states(optimizer: Optimizer, parameter: torch.Tensor) -> dict[str, ProbedStates | None]:
    """The states, by name, that the optimizer has for a parameter after its first step; ``None`` is not a tensor.

    Concerns this rank alone, and leaves no trace in the optimizer or the parameter. Raises ``OptimizerMismatchError``
    where no step can be taken without values: one that needs a closure or another optimizer, or that fails in torch.
    """
    try:
        return _probe(optimizer, parameter)
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise OptimizerMismatchError(
            f"what states {type(optimizer).__qualname__} makes for a parameter of shape {list(parameter.shape)} cannot "
            f"be told before its first step; take one, then load ({reason})"
        ) from error


def _probe(optimizer: Optimizer, parameter: torch.Tensor) -> dict[str, ProbedStates | None]:
    copy, group = _copy(optimizer), _group(optimizer, parameter)
    devices = [] if parameter.device.type == "cpu" else [parameter.device]
    with (
        torch.random.fork_rng(devices, device_type=parameter.device.type),
        FakeTensorMode(allow_fallback_kernels=False),
        _Unreal(),  # type: ignore[no-untyped-call]
        _only_steps(copy),
    ):
        fake = torch.nn.Parameter(_described(parameter).empty())
        vars(fake).update(vars(parameter))
        fake.grad = torch.empty_like(fake)
        copy.param_groups = [{**_containers({**group, "params": []}), "params": [fake]}]
        # Some optimizers make states when they are made.
        copy.state[fake] = _containers(optimizer.state.get(parameter, {}))
        type(optimizer).step(copy)
    states = copy.state[fake].items()
    return {str(name): _described(value) if isinstance(value, torch.Tensor) else None for name, value in states}


def _group(optimizer: Optimizer, parameter: torch.Tensor) -> dict[str, Any]:
    for group in optimizer.param_groups:
        if any(one is parameter for one in group["params"]):
            return group
    raise ValueError("the parameter is in none of its groups")


def _copy(optimizer: Optimizer) -> Any:
    """A copy without groups, states, hooks, and the ``step`` that a scheduler puts on an instance."""
    own = {name: value for name, value in vars(optimizer).items() if name not in {"param_groups", "state", "step"}}
    if "param_groups" not in vars(optimizer) or any(isinstance(leaf, Optimizer) for leaf in tree_leaves(own)):
        raise TypeError("it wraps another optimizer")
    copy: Any = object.__new__(type(optimizer))
    vars(copy).update(_containers(own), state=defaultdict(dict))
    vars(copy).update(_optimizer_step_pre_hooks=OrderedDict(), _optimizer_step_post_hooks=OrderedDict())
    return copy


def _containers(tree: Any) -> Any:
    """Dicts, lists and tuples anew, with the same leaves."""
    return tree_map(lambda leaf: leaf, tree)


def _described(tensor: torch.Tensor) -> ProbedStates:
    shape, stride = tuple(tensor.shape), tuple(tensor.stride())
    if not isinstance(tensor, DTensor):
        return ProbedStates(shape, stride, tensor.dtype, tensor.device, shape, stride)
    local = _described(tensor._local_tensor)  # noqa: SLF001
    mesh, placements = tensor.device_mesh, tuple(tensor.placements)
    return ProbedStates(shape, stride, local.dtype, local.device, local.shape, local.stride, mesh, placements)


class _Unreal(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps real tensors, values and communication out of a step."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace == "c10d":
            raise RuntimeError(f"it communicates, with {func}")
        if func is torch.ops.aten._local_scalar_dense.default:  # noqa: SLF001
            dtype = args[0].dtype  # and a value that updates do not divide by zero with
            return False if dtype == torch.bool else 0.5 if dtype.is_floating_point or dtype.is_complex else 1
        if not all(issubclass(kind, FakeTensor) for kind in types):
            return NotImplemented  # a DTensor's own dispatch comes back with the local parts
        if not func._schema.returns:  # noqa: SLF001 - it only sets values, and may have no fake kernel
            return None
        # FakeTensorMode refuses a real tensor, but only after it has run some ops on it.
        args, kwargs = tree_map_only(torch.Tensor, _unreal, (args, kwargs or {}))
        return func(*args, **kwargs)


def _unreal(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if isinstance(tensor, FakeTensor) else _described(tensor).empty()


@contextmanager
def _only_steps(copy: Optimizer) -> Iterator[None]:
    """No hooks that are common to all optimizers, and no step of another optimizer."""

    def check(optimizer: Optimizer, *_: Any) -> None:
        if optimizer is not copy:
            raise TypeError("it steps another optimizer")

    names = "_global_optimizer_pre_hooks", "_global_optimizer_post_hooks"
    before = {name: getattr(optim, name) for name in names}
    vars(optim).update(zip(names, (OrderedDict({0: check}), OrderedDict()), strict=True))
    try:
        yield
    finally:
        vars(optim).update(before)
