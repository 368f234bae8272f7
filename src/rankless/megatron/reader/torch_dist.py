"""Reading an iteration of ``torch_dist``: a folder of ``torch.distributed.checkpoint`` with Megatron's own keys.

Source: ``megatron/core/dist_checkpointing`` and ``megatron/core/optimizer/distrib_optimizer.py`` of megatron-core 0.15
to 0.19.

:class:`~rankless.megatron.reader.megatron_reader.MegatronReader` calls it on each rank that opens such an iteration.
The keys are Megatron's; an unknown form must be refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rankless.dcp.reader import dcp_directory
from rankless.errors import CorruptCheckpointError, FormatError
from rankless.formats.chunked_tensor import ChunkedTensor
from rankless.formats.chunked_tensor_slices import Chunks, offset_slices, reshape_flat_slices, unstack_slices
from rankless.formats.stored_tensor import UnreadableTensor
from rankless.formats.torch_file import read_tree
from rankless.megatron.reader.bucket_search import SKIP
from rankless.megatron.reader.config_files import choose_args
from rankless.megatron.reader.flat_buffers import FlatBuffer, FlatTensor
from rankless.megatron.reader.flat_states import find_parts, join_states
from rankless.megatron.reader.group_settings import COMMON_STEP, collect_groups
from rankless.megatron.reader.inert_objects import MEGATRON_NAMES, make_plain
from rankless.megatron.reader.layer_names import strip_wrappers, unstack_tensor
from rankless.megatron.reader.megatron_directory import COMMON, DESCRIPTION
from rankless.megatron.reader.param_state import buffers_of_param_state
from rankless.megatron.reader.rank_parts import list_parts
from rankless.megatron.reader.saved_state import MASTER, SavedState
from rankless.ondisk.data_files import TensorInfo
from rankless.ondisk.dtypes import dtype_width
from rankless.ondisk.read_budget import ReadBudget
from rankless.storage.store import store_of

#: The forms of optimizer states that are read.
FORMS = ("fully_reshardable", "dp_reshardable", "fully_sharded_model_space", "dp_zero_gather_scatter")
_FORM = "param_state_sharding_type"

#: The names of the states of a parameter in the files.
_MASTERS, _STATES = ("param", "fp32_param"), ("exp_avg", "exp_avg_sq", "momentum_buffer")

#: The keys of the optimizer. There may be several of these, as for experts.
_PREFIX = r"(?:chained_\d{1,3}\.)?optimizer\."
_OPTIMIZER = re.compile(_PREFIX + ".+")
_STATE = re.compile(_PREFIX + r"state\.([^.]+)\.(.+)")
_BUCKET = re.compile(
    rf"({_PREFIX}distributed\.dp_group_idx_\d+)\.gbuf_idx_(\d+)\.dtype_(.+)\.bucket_idx_(\d+)\.([a-z_]+)"
)
_SHARD = re.compile(r"(.+)/shard_([\d.]+)_([\d.]+)")

#: The ends of the keys of objects that are not read: state of Transformer Engine, and facts that the buckets repeat.
_IGNORED = ("_extra_state", ".per_bucket_numel", ".per_bucket_numel_unpadded")


def read_torch_dist(path: Path, *, with_optimizer: bool) -> SavedState:
    """Return the state in the folder of an iteration. Raises ``FormatError`` for contents that cannot be read."""
    saved = dcp_directory.read_tree(path, MEGATRON_NAMES)
    objects = {key: value for key, value in saved.entries.items() if not isinstance(value, ChunkedTensor)}
    shards = {name: make_plain(value, saved.budget) for name, value in _read_objects(objects)}
    common, files, digest = _read_common(path, shards, saved)
    state = SavedState(
        path,
        [*saved.files, *files, path / DESCRIPTION],
        f"{saved.fingerprint}-{digest:016x}",
        saved.budget,
        choose_args(common.get("args"), path),
    )
    return _StateBuilder(state, saved, shards, common).build_state(with_optimizer=with_optimizer)


def _read_objects(entries: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    """Yield the objects by key and shard: a list of one object, as each rank saved it."""
    for key, value in entries.items():
        match = _SHARD.fullmatch(key)
        if match is not None and match[1].endswith(_IGNORED):
            continue
        yield key, value[0] if isinstance(value, list) and len(value) == 1 else value


def _read_common(
    path: Path, shards: dict[str, Any], saved: dcp_directory.SavedTree
) -> tuple[dict[str, Any], list[Path], int]:
    """Return the values that all ranks share, their files, and a digest of these."""
    files, digest = [], 0
    common: Any = shards.pop("common_state/shard_0_1", None)
    if store_of(path).file_exists(path / COMMON):
        store_of(path).check_regular(path / COMMON, within=(path,))
        tree = read_tree(path / COMMON, saved.budget, MEGATRON_NAMES)
        common, files, digest = make_plain(tree.root, saved.budget), [path / COMMON], tree.digest
    if not isinstance(common, dict):
        raise CorruptCheckpointError(f"{path} has no {COMMON}, and no common_state in its metadata: a file is missing")
    return common, files, digest


class _StateBuilder:
    """Sorts the entries of a folder into the model, the optimizer and other values."""

    def __init__(
        self, state: SavedState, saved: dcp_directory.SavedTree, shards: dict[str, Any], common: dict[str, Any]
    ) -> None:
        self._state, self._saved, self._shards, self._common = state, saved, shards, common

    def build_state(self, *, with_optimizer: bool) -> SavedState:
        optimizer, model = self._split_entries(with_optimizer=with_optimizer)
        for key, stacked in model.items():
            for name, tensor in unstack_tensor(strip_wrappers(key), stacked, self._state.budget):
                if name in self._state.weights:
                    raise FormatError(f"{self._state.path} has {name!r:.200} with and without a prefix of wrappers")
                self._state.weights[name] = tensor
        if not self._state.weights:
            raise FormatError(f"{self._state.path} has no tensors of a model: it is not a checkpoint of Megatron")
        saved_optimizer = self._common.pop("optimizer", None)
        if isinstance(saved_optimizer, list) and len(saved_optimizer) == 1:  # as NeMo has it
            saved_optimizer = saved_optimizer[0]
        if with_optimizer:
            self._add_optimizer(optimizer, saved_optimizer)
        self._state.values |= self._common | self._list_objects()
        if isinstance(saved_optimizer, dict) and "grad_scaler" in saved_optimizer:
            self._state.values["grad_scaler"] = saved_optimizer["grad_scaler"]
        return self._state

    def _split_entries(self, *, with_optimizer: bool) -> tuple[dict[str, ChunkedTensor], dict[str, ChunkedTensor]]:
        """Return the tensors of the optimizer, by key, and the tensors of the model."""
        optimizer: dict[str, ChunkedTensor] = {}
        model: dict[str, ChunkedTensor] = {}
        for key, tensor in self._saved.entries.items():
            is_state = _OPTIMIZER.fullmatch(key) is not None
            if isinstance(tensor, UnreadableTensor) and (with_optimizer or not is_state):
                raise FormatError(f"{self._state.path}: tensor {key!r} {tensor.why}{f'; {SKIP}' if is_state else ''}")
            if not isinstance(tensor, ChunkedTensor):
                continue
            shape = self._saved.original_shapes.get(key)
            own = tensor if shape is None else _restore_shape(key, tensor, shape, self._state.budget)
            (optimizer if is_state else model)[key] = own
        return optimizer, model

    def _add_optimizer(self, tensors: Mapping[str, ChunkedTensor], saved: Any) -> None:
        self._check_forms(saved)
        buckets: dict[str, dict[tuple[int, str, int], dict[str, ChunkedTensor]]] = {}
        for key, tensor in tensors.items():
            if match := _BUCKET.fullmatch(key):
                place = int(match[2]), match[3], int(match[4])
                buckets.setdefault(match[1], {}).setdefault(place, {})[match[5]] = tensor
            else:
                self._add_state(key, tensor)
        buffers = {
            label: [self._make_buffer(label, place, by_place[place]) for place in sorted(by_place)]
            for label, by_place in buckets.items()
        }
        for key in [key for key in self._shards if ".param_state/" in key]:
            buffers[key] = buffers_of_param_state(self._shards.pop(key), f"{self._state.path}: {key}")
        if buffers:
            self._add_flat_states({f"{self._state.path}: {label}": rows for label, rows in buffers.items()})
        self._add_groups(saved)

    def _check_forms(self, saved: Any) -> None:
        for form in _list_forms(saved):
            if form not in FORMS:
                raise FormatError(
                    f"{self._state.path} has optimizer states of the form {form!r:.60}; rankless reads "
                    f"{', '.join(FORMS)}, and those without a distributed optimizer; {SKIP}"
                )

    def _add_state(self, key: str, stacked: ChunkedTensor) -> None:
        """Add a state that is stored like its parameter."""
        match = _STATE.fullmatch(key)
        if match is None or match[1] not in (*_MASTERS, *_STATES):
            raise FormatError(
                f"{self._state.path}: the optimizer has the tensor {key!r:.200}, whose meaning is unknown; {SKIP}"
            )
        state = MASTER if match[1] in _MASTERS else match[1]
        for name, tensor in unstack_tensor(strip_wrappers(match[2]), stacked, self._state.budget):
            weight = self._state.weights.get(name)
            if weight is None or weight.info.shape != tensor.info.shape:
                raise CorruptCheckpointError(
                    f"{self._state.path}: the optimizer has {state} of {name!r}, which the model does not have in that "
                    "shape"
                )
            self._state.add_states({name: {state: tensor}})

    def _make_buffer(self, label: str, place: tuple[int, str, int], tensors: dict[str, ChunkedTensor]) -> FlatBuffer:
        name = f"{self._state.path}: {label}, buffer {place[0]} of {place[1]}, bucket {place[2]}"
        flat = {state: FlatTensor.from_chunked(tensor) for state, tensor in tensors.items()}
        unknown = next((state for state in flat if state not in ("param", *_STATES)), None)
        if "param" not in flat or unknown:
            raise FormatError(f"{name} has the state {unknown or 'param'!r}, or lacks it, which is unknown; {SKIP}")
        return FlatBuffer(name, flat.pop("param"), flat, has_edges=True)

    def _add_flat_states(self, buffers: dict[str, list[FlatBuffer]]) -> None:
        weights = self._state.weights
        parts = list_parts(weights, is_gated=self._state.args.is_gated)
        positions = find_parts(buffers, weights, parts, self._state.budget)
        states = join_states(weights, positions)
        self._state.add_states(states)
        self._state.proofs += [(name, weights[name], by_state[MASTER]) for name, by_state in states.items()]

    def _add_groups(self, saved: Any) -> None:
        """Add the groups, which are in the common values or, of each group of ranks, in an object."""
        trees = [saved, *(self._shards.pop(key) for key in [key for key in self._shards if ".optimizer/" in key])]
        self._state.groups = [groups for tree in trees for groups in collect_groups(tree)]
        states = saved.get("state") if isinstance(saved, dict) else None
        self._state.common_step = states.get(COMMON_STEP) if isinstance(states, dict) else None

    def _list_objects(self) -> dict[str, Any]:
        """Return all other objects, by key and shard."""
        objects: dict[str, Any] = {}
        for key, value in self._shards.items():
            match = _SHARD.fullmatch(key)
            if _OPTIMIZER.fullmatch(key) or match is None:
                continue
            objects.setdefault(match[1], {})[f"{match[2]}_{match[3]}"] = value
        return objects


def _list_forms(tree: Any) -> list[Any]:
    """Return the forms of all optimizers in a tree of dicts."""
    if not isinstance(tree, dict):
        return []
    inner = [form for value in tree.values() for form in _list_forms(value)]
    return [tree[_FORM], *inner] if _FORM in tree else inner


def _restore_shape(name: str, stored: ChunkedTensor, shape: tuple[int, ...], budget: ReadBudget) -> ChunkedTensor:
    """Return a tensor of ``fully_sharded_model_space``, which has its parts stored flat, in its own shape.

    A tensor of shape [X, Y] is stored with the shape [X / x, Y / y, x * y], where [x, y] is the shape of the part of a
    rank. For example, [4, 6] in parts of [2, 3] is stored as [2, 2, 6]. megatron-core 0.7 to 0.15 wrote it. Raises
    ``CorruptCheckpointError`` if the parts do not fit into ``shape``.
    """
    grid = stored.info.shape[:-1]
    part = tuple(size // max(1, count) for size, count in zip(shape, grid, strict=False))
    fits = len(grid) == len(shape) and all(size == n * count for size, n, count in zip(shape, part, grid, strict=True))
    if not fits or stored.info.shape[-1:] != (math.prod(part),):
        raise CorruptCheckpointError(
            f"{name!r} is stored with the shape {list(stored.info.shape)}, which does not divide its own shape "
            f"{list(shape)} into parts: the metadata is corrupt"
        )
    return ChunkedTensor(TensorInfo(stored.info.dtype, shape), _place_parts(stored.chunks, grid, part, stored, budget))


def _place_parts(
    chunks: Chunks, grid: tuple[int, ...], part: tuple[int, ...], stored: ChunkedTensor, budget: ReadBudget
) -> Chunks:
    """Return the flat chunks of all cells of the grid as boxes of the tensor."""
    cells: dict[tuple[int, ...], Chunks] = {(): chunks}
    for _ in grid:
        cells = {
            (*cell, index): inner
            for cell, outer in cells.items()
            for index, inner in unstack_slices(outer, budget).items()
        }
    width = dtype_width(stored.info.dtype)
    placed: list[Chunks] = []
    for cell, flat in cells.items():
        offset = tuple(index * size for index, size in zip(cell, part, strict=True))
        placed.append(offset_slices(reshape_flat_slices(flat, part, width), offset))
    return tuple(chunk for of_cell in placed for chunk in of_cell)
