"""Views of tensors of training objects: dtype, global shape, layout, and the local shard in this rank's memory."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import msgspec
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from rankless.engine.plan.layout_types import MeshShape, PlacementLayout, Replicated, Sharded
from rankless.engine.plan.layout_types import Placement as PlannedPlacement
from rankless.errors import UnsupportedTensorError
from rankless.ondisk.header import DIMENSIONS

#: The torch dtype of each safetensors dtype.
DTYPES = {
    "BOOL": torch.bool,
    "BF16": torch.bfloat16,
    "C64": torch.complex64,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "I8": torch.int8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "U8": torch.uint8,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}

#: The class and dtype of a parameter of bitsandbytes whose scales are an attribute of its module.
_INT8_PARAMS = "Int8Params", torch.int8

#: Classes whose tensors are made of elements in memory if torch says that they are dense.
PLAIN_CLASSES = frozenset({torch.Tensor, nn.Parameter})

#: The ranks of meshes. Cached, because torch takes 0.2 ms to compute them each time.
_MESH_SHAPES: WeakKeyDictionary[DeviceMesh, MeshShape] = WeakKeyDictionary()


class TensorView(msgspec.Struct, frozen=True):
    """A tensor as a checkpoint sees it. ``layout`` is ``None`` for a plain tensor; ``local`` is this rank's shard."""

    dtype: str
    shape: tuple[int, ...]
    layout: PlacementLayout | None
    local: torch.Tensor

    def is_divided(self) -> bool:
        """Return whether ranks hold different shards of it."""
        return self.layout is not None and bool(self.layout.division)


def check_present(tensor: TensorView, subject: str) -> None:
    """Raise ``UnsupportedTensorError`` if a tensor has no memory. ``subject`` names it in the message."""
    if tensor.local.is_meta:
        raise UnsupportedTensorError(f"{subject} is on the meta device and has no data; materialize the model first")


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a plain one, made of elements in memory."""
    return (
        type(tensor) in PLAIN_CLASSES
        and not (tensor.is_nested or tensor.is_quantized)
        and tensor.layout == torch.strided
    )


def check_kind(tensor: torch.Tensor, subject: str) -> None:
    """Raise ``UnsupportedTensorError``, which names ``subject``, if a tensor is not made of elements in memory.

    Call this before reading the tensor's shape or address: for some kinds of tensors torch raises an error there.
    """
    local = local_tensor(tensor)
    if is_plain(local):
        return
    if is_lazy(local):
        raise UnsupportedTensorError(
            f"{subject} is uninitialized: its lazy module has not run yet; run one forward pass before you save or load"
        )
    if local.is_nested:
        raise UnsupportedTensorError(
            f"{subject} is a nested tensor; only dense tensors can be stored: store its values() and offsets()"
        )
    if isinstance(local, FakeTensor):
        raise UnsupportedTensorError(
            f"{subject} is a FakeTensor, which has no data; save and load outside FakeTensorMode"
        )
    if local.is_quantized:
        raise UnsupportedTensorError(
            f"{subject} is a quantized tensor; only dense tensors can be stored: store its int_repr() and its scales"
        )
    if local.layout != torch.strided:
        raise UnsupportedTensorError(f"{subject} is a {local.layout} tensor; only dense tensors can be stored")
    if getattr(local, "quant_state", None) is not None or (type(local).__name__, local.dtype) == _INT8_PARAMS:
        raise UnsupportedTensorError(
            f"{subject} is a quantized {type(local).__qualname__} of bitsandbytes, whose scales are not part of it; "
            "save only what is trained, as a state dict: {name: parameter for name, parameter in "
            "model.named_parameters() if parameter.requires_grad}"
        )
    if is_traceable_wrapper_subclass(local):
        kind = type(local).__qualname__
        raise UnsupportedTensorError(f"{subject} is a {kind}; only plain tensors and DTensors can be stored")


def view_of(tensor: torch.Tensor, subject: str) -> TensorView:
    """Return a view of a tensor.

    Raises ``UnsupportedTensorError``, which names ``subject``, if the tensor cannot be stored.
    """
    layout = None
    local = tensor
    if isinstance(tensor, DTensor):
        layout = convert_layout(tensor, subject)
        local = tensor._local_tensor  # noqa: SLF001 - to_local() would be traced by autograd
    if not is_plain(local):
        check_kind(local, subject)
    if local.ndim > DIMENSIONS:
        raise UnsupportedTensorError(f"{subject} has {local.ndim} dimensions; at most {DIMENSIONS} can be stored")
    name = NAMES.get(tensor.dtype)
    if name is None:
        raise UnsupportedTensorError(f"{subject} has dtype {tensor.dtype}, which safetensors files cannot hold")
    return TensorView(name, tuple(tensor.shape), layout, local)


def convert_layout(tensor: DTensor, subject: str) -> PlacementLayout:
    """Return the layout of a DTensor. Raises ``UnsupportedTensorError``, which names ``subject``."""
    placements = tuple(_convert_placement(placement, subject) for placement in tensor.placements)
    return PlacementLayout(_convert_mesh(tensor.device_mesh), placements)


def _convert_mesh(mesh: DeviceMesh) -> MeshShape:
    mesh_shape = _MESH_SHAPES.get(mesh)
    if mesh_shape is None:
        ranks = mesh.mesh
        mesh_shape = _MESH_SHAPES[mesh] = MeshShape(tuple(ranks.shape), tuple(ranks.flatten().tolist()))
    return mesh_shape


def _convert_placement(placement: Placement, subject: str) -> PlannedPlacement:
    if isinstance(placement, Partial):
        raise UnsupportedTensorError(
            f"{subject} has a Partial placement: each rank holds a summand of its value; redistribute it first"
        )
    if isinstance(placement, Replicate):
        return Replicated()
    if isinstance(placement, Shard):
        return Sharded(placement.dim, getattr(placement, "split_factor", 1))
    split = getattr(placement, "split_factor", None)
    dim = getattr(placement, "dim", None)
    if isinstance(split, int) and isinstance(dim, int):
        return Sharded(dim, split)
    raise UnsupportedTensorError(f"{subject} has the placement {placement}, which rankless does not support")


def shares_elements(tensor: torch.Tensor) -> bool:
    """Return whether several elements of a tensor share one memory location, as in an expanded view."""
    if tensor.is_contiguous():
        return False
    axes = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.numel() > 0 and any(size > 1 and stride == 0 for size, stride in axes)


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the shard of a tensor that is on this rank."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor  # noqa: SLF001
