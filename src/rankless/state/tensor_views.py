"""Views of tensors of training objects: dtype, global shape, layout, and the local shard in this rank's memory.

Views of models, optimizers and values are made of these, on each rank: in the first vote of a save, and in the vote
"reading the metadata" of a load. The layout must be equal on all ranks that hold a tensor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import msgspec
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from rankless.engine.plan.layout_types import Placement as PlannedPlacement
from rankless.engine.plan.layout_types import PlacementLayout, Replicated, Sharded, is_dividing
from rankless.engine.plan.shard_byte_ranges import shard_shape
from rankless.engine.plan.tensor_specs import HeldPieces
from rankless.errors import FormatError, UnsupportedTensorError
from rankless.ondisk.dtypes import TORCH_NAMES
from rankless.ondisk.header import DIMENSIONS
from rankless.state.declared_boxes import DeclaredBoxes, PackedBoxes, boxes_of_checkpointable, boxes_of_chunk_list
from rankless.state.mesh_order import order_mesh, place_of

#: What a caller of :func:`find_shared_memory` names tensors by; keys can be sorted.
Key = TypeVar("Key", bound=tuple[str, ...])


class _TorchDtypes(dict[str, torch.dtype]):
    """The torch dtype of each safetensors dtype that the installed torch has."""

    def __missing__(self, dtype: str) -> torch.dtype:
        raise FormatError(
            f"torch {torch.__version__} has no dtype for {dtype!r}: update torch if a newer one has it, read the bytes "
            "with rankless.open(path).array(name), or convert to 'hf', 'safetensors' or 'native', which copies them"
        )


DTYPES = _TorchDtypes(
    {dtype: getattr(torch, name) for dtype, name in TORCH_NAMES.items() if hasattr(torch, name)}  # F4 is of torch 2.8
)
NAMES = {dtype: name for name, dtype in DTYPES.items()}

#: The class and dtype of a parameter of bitsandbytes. Its module has its scales as an attribute.
_INT8_PARAMS = "Int8Params", torch.int8

#: Classes of tensors that are made of elements in memory if torch says that they are dense.
PLAIN_CLASSES = frozenset({torch.Tensor, nn.Parameter})


class _PlacedLayout(NamedTuple):
    """A layout, and the place of this rank in its mesh and its coordinate in torch's; ``None`` if it is not there."""

    layout: PlacementLayout
    place: tuple[int, ...] | None
    coordinate: tuple[int, ...]


#: The layouts of each mesh by placements and shard order. Cached: torch takes 0.2 ms to compute the ranks of a mesh.
_LAYOUTS: WeakKeyDictionary[DeviceMesh, dict[object, _PlacedLayout]] = WeakKeyDictionary()


class TensorView(msgspec.Struct, frozen=True):
    """A tensor as a checkpoint sees it. ``layout`` is ``None`` for a plain tensor; ``local`` is this rank's shard.

    ``pieces`` has the boxes or sizes that this rank holds, if they do not follow from the layout. A tensor that says
    itself which boxes it holds has ``declared``; of several, ``local`` is a copy in one buffer, and ``packed`` copies
    it back.
    """

    dtype: str
    shape: tuple[int, ...]
    layout: PlacementLayout | None
    local: torch.Tensor
    pieces: HeldPieces | None = None
    declared: DeclaredBoxes | None = None
    packed: PackedBoxes | None = None

    def is_divided(self) -> bool:
        """Return whether ranks hold different shards of it."""
        return self.pieces is not None or (self.layout is not None and bool(self.layout.division))


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
    layout = pieces = declared = None
    local = tensor
    if isinstance(tensor, DTensor):
        placed = _place_rank(tensor, subject)
        layout, local = placed.layout, tensor._local_tensor  # noqa: SLF001 - to_local() would be traced by autograd
    if not is_plain(local):
        check_kind(local, subject)
    if isinstance(tensor, DTensor):
        declared = boxes_of_chunk_list(local, tuple(tensor.shape), subject)
        pieces = None if declared else _find_sizes(tensor, placed, local, subject)
    else:
        declared = boxes_of_checkpointable(tensor, subject)
    if local.ndim > DIMENSIONS:
        raise UnsupportedTensorError(f"{subject} has {local.ndim} dimensions; at most {DIMENSIONS} can be stored")
    name = NAMES.get(tensor.dtype)
    if name is None:
        raise UnsupportedTensorError(f"{subject} has dtype {tensor.dtype}, which safetensors files cannot hold")
    if declared is not None and not declared.is_whole:
        return view_boxes(local, declared, subject, layout)
    return TensorView(name, tuple(tensor.shape), layout, local, pieces)


def view_boxes(
    local: torch.Tensor, declared: DeclaredBoxes, subject: str, layout: PlacementLayout | None = None
) -> TensorView:
    """Return the view of a tensor, where ``local`` has its ``declared`` boxes.

    Raises ``UnsupportedTensorError``, which names ``subject``, if it is on the meta device and not just one box.
    """
    pieces, packed, held = HeldPieces(boxes=declared.boxes), None, local
    if len(declared.boxes) != 1 or declared.boxes[0].shape != declared.local_shape:
        if local.is_meta:
            raise UnsupportedTensorError(
                f"{subject} is on the meta device and has several parts or padding: give it memory before you load"
            )
        if len(declared.boxes) > 1:
            packed = PackedBoxes(local.detach(), declared)
            held = packed.pack()
        else:
            held = local.detach()[declared.slices()[0]] if declared.boxes else local.detach().reshape(-1)[:0]
    return TensorView(NAMES[local.dtype], declared.shape, layout, held, pieces, declared, packed)


def convert_layout(tensor: DTensor, subject: str) -> PlacementLayout:
    """Return the layout of a DTensor. Raises ``UnsupportedTensorError``, which names ``subject``."""
    return _place_rank(tensor, subject).layout


def has_uneven_shard(tensor: DTensor, subject: str) -> bool:
    """Return whether this rank's shard has another size than torch's rule gives it. Raises as :func:`view_of` does."""
    pieces = _find_sizes(tensor, _place_rank(tensor, subject), local_tensor(tensor), subject)
    return pieces is not None and not pieces.is_empty_by_rule


def _place_rank(tensor: DTensor, subject: str) -> _PlacedLayout:
    """Return the layout of a DTensor with the place of this rank."""
    mesh = tensor.device_mesh
    key = tensor.placements, getattr(tensor._spec, "shard_order", None)  # noqa: SLF001 - it has no public name
    of_mesh = _LAYOUTS.setdefault(mesh, {})
    placed = of_mesh.get(key)
    if placed is None:
        placements = tuple(_convert_placement(placement, subject) for placement in tensor.placements)
        placements = _apply_shard_order(tensor, placements)
        dividing = frozenset(dim for dim, size in enumerate(mesh.shape) if is_dividing(placements[dim], size))
        ordered, coordinate = order_mesh(mesh, dividing, subject), mesh.get_coordinate()
        place = None if coordinate is None else place_of(ordered, int(mesh.mesh[tuple(coordinate)]))
        placed = of_mesh[key] = _PlacedLayout(
            PlacementLayout(ordered, placements), place, () if coordinate is None else tuple(coordinate)
        )
    return placed


def _apply_shard_order(tensor: DTensor, placements: tuple[PlannedPlacement, ...]) -> tuple[PlannedPlacement, ...]:
    """Return the placements, each with the stride that follows from torch's order of mesh dimensions, if it has one."""
    converted = list(placements)
    for entry in getattr(tensor._spec, "shard_order", None) or ():  # noqa: SLF001 - torch has no public name for it
        mesh_dims = tuple(entry.mesh_dims)
        if list(mesh_dims) == sorted(mesh_dims):
            continue
        for number, dim in enumerate(mesh_dims):
            split = math.prod(tensor.device_mesh.size(other) for other in mesh_dims[:number] if other > dim)
            converted[dim] = Sharded(entry.tensor_dim, split)
    return tuple(converted)


def _find_sizes(tensor: DTensor, placed: _PlacedLayout, local: torch.Tensor, subject: str) -> HeldPieces | None:
    """Return the sizes of this rank's shard if they differ from torch's rule.

    Raises ``UnsupportedTensorError``, which names ``subject``, if they follow the order of the mesh and not the order
    of its groups: then torch has cut the shard, or filled it up.
    """
    layout, place, coordinate = placed
    if place is None:
        return None
    shape, sizes = tuple(tensor.shape), tuple(local.shape)
    expected = shard_shape(shape, layout.placements, layout.mesh.shape, place)
    is_empty_by_rule = 0 in sizes and 0 in expected
    if sizes == expected or (is_empty_by_rule and len(sizes) != len(shape)):
        return None
    if coordinate != place and sizes == shard_shape(shape, layout.placements, layout.mesh.shape, coordinate):
        raise UnsupportedTensorError(
            f"{subject} of shape {list(shape)} has a shard of shape {list(sizes)}, which is that of the place of this "
            f"rank in the device mesh {tensor.device_mesh.mesh.tolist()}; torch divides by the rank in the process "
            f"group, where it is {list(expected)}: make the mesh with ascending ranks"
        )
    if len(sizes) != len(shape):
        raise UnsupportedTensorError(f"{subject} has shape {list(shape)}, and a shard of shape {list(sizes)}")
    return HeldPieces(sizes, is_empty_by_rule=is_empty_by_rule)


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


def find_shared_memory(views: Mapping[Key, TensorView]) -> tuple[list[tuple[Key, Key]], set[Key]]:
    """Return the keys of tensors that are views of the same elements in the same order, in pairs.

    Return, too, the keys of others that share memory in part or in another form. Of tensors that are not contiguous,
    this is known of those that begin at the same address. Those without memory are the same if they are one object, and
    share it in part if they are in one storage: each gets memory of its own.
    """
    alike: list[tuple[Key, Key]] = []
    partial: set[Key] = set()
    spans = sorted(
        (*_place_in_meta_storage(local), local.is_contiguous(), key)
        if local.is_meta
        else (str(local.device), local.data_ptr(), local.is_contiguous(), key)
        for key, local in ((key, view.local) for key, view in views.items())
        if local.numel()
    )
    start, first = ("", 0), None
    #: The end of the contiguous tensor that reaches farthest, and its key.
    end, reaching = ("", 0), None
    for device, address, is_contiguous, key in spans:
        if first is not None and start == (device, address):
            if _form_of(views[first]) == _form_of(views[key]):
                alike.append((first, key))
                continue
            partial |= {first, key}
        elif is_contiguous and reaching is not None and (device, address) < end:
            partial |= {reaching, key}
        start, first = (device, address), key
        stop = device, address + views[key].local.nbytes
        if is_contiguous and stop > end:
            end, reaching = stop, key
    return alike, partial


def _place_in_meta_storage(tensor: torch.Tensor) -> tuple[str, int]:
    """Return a name for the storage of a tensor without memory, and the place of its first byte there."""
    storage = tensor.untyped_storage()._cdata  # noqa: SLF001 - its address, which all its tensors have
    return f"meta {storage}", int(tensor.storage_offset()) * tensor.itemsize


def _form_of(view: TensorView) -> tuple[object, ...]:
    """Return how a view uses its memory, and as which part of a tensor."""
    local = view.local
    identity = id(local) if local.is_meta else None
    return local.shape, local.stride(), local.dtype, local.is_conj(), local.is_neg(), view.shape, view.layout, identity


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the shard of a tensor that is on this rank."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor  # noqa: SLF001
