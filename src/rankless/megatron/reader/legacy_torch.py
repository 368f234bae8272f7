"""Reading an iteration of the format ``torch``: a folder for each tensor-parallel rank of each pipeline stage.

The files do not say which dimension of a tensor ranks divide. In Megatron that is fixed: columns of the weights of
``linear_qkv`` and ``linear_fc1``, of the embedding and of the output layer, and rows of ``linear_proj`` and
``linear_fc2``. Source: ``megatron/training/checkpointing.py`` of megatron-core 0.16.

:class:`~rankless.megatron.reader.megatron_reader.MegatronReader` calls it on each rank that opens such an iteration.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rankless.errors import CorruptCheckpointError, FormatError
from rankless.formats.torch_file import read_tree
from rankless.formats.torchfile.torch_placeholders import TorchTensor
from rankless.formats.tree.tree_traversal import is_extra
from rankless.megatron.reader.bucket_search import SKIP
from rankless.megatron.reader.flat_buffers import FlatBuffer
from rankless.megatron.reader.flat_states import find_parts, join_states
from rankless.megatron.reader.group_settings import collect_groups
from rankless.megatron.reader.inert_objects import MEGATRON_NAMES, make_plain
from rankless.megatron.reader.megatron_directory import MODEL_FILE, list_rank_folders
from rankless.megatron.reader.model_args import ModelArgs
from rankless.megatron.reader.param_state import buffers_of_param_state
from rankless.megatron.reader.rank_parts import RankPart
from rankless.megatron.reader.saved_state import MASTER, SavedState
from rankless.megatron.reader.stage_names import StageNames
from rankless.megatron.reader.tensor_parallel_join import RankTensors, join_ranks
from rankless.ondisk.block_crcs import crc64
from rankless.ondisk.read_budget import ReadBudget
from rankless.storage.store import store_of

#: The file with the states of the optimizer of a rank's group.
_OPTIMIZER_FILE = "distrib_optim.pt"

#: Values that each rank has for itself, and that the model and the optimizer are made of.
_RNG, _MODEL, _OPTIMIZER = "rng_state", "model", "optimizer"


@dataclass(frozen=True)
class _RankFile:
    """The file of a rank: its numbers, and its contents."""

    stage: int
    rank: int
    folder: Path
    root: dict[str, Any]


def read_rank_folders(path: Path, *, with_optimizer: bool) -> SavedState:
    """Return the state in the folder of an iteration. Raises ``FormatError`` for contents that cannot be read."""
    budget, digests = ReadBudget(), list[int]()
    files: list[Path] = []
    ranks: list[_RankFile] = []
    for numbers, folder in list_rank_folders(path).items():
        file = folder / MODEL_FILE
        root = _read_file(path, file, budget, digests)
        files.append(file)
        if not isinstance(root, dict):
            raise CorruptCheckpointError(f"{file} must hold a dict, not a {type(root).__name__}")
        ranks.append(_RankFile(numbers[1] if len(numbers) > 1 else 0, numbers[0], folder, root))
    args = ModelArgs.from_saved(ranks[0].root.get("args"), str(path))
    _check_degrees(path, ranks, args)
    state = SavedState(path, files, "", budget, args)
    parts = _add_model(state, ranks)
    if with_optimizer:
        _add_optimizer(state, ranks, parts, digests)
    _add_values(state, ranks)
    state.fingerprint = f"{crc64(repr(digests).encode()):016x}"
    return state


def _read_file(path: Path, file: Path, budget: ReadBudget, digests: list[int]) -> Any:
    store_of(file).check_regular(file, within=(path,))
    tree = read_tree(file, budget, MEGATRON_NAMES)
    digests.append(tree.digest)
    return make_plain(tree.root, budget)


def _check_degrees(path: Path, ranks: list[_RankFile], args: ModelArgs) -> None:
    """Raise an error if files of some ranks are missing, or belong to kinds of parallelism that are not read."""
    if args.get("expert_model_parallel_size", 1) != 1 or args.get("virtual_pipeline_model_parallel_size", None):
        raise FormatError(
            f"{path} was written with expert parallelism or a virtual pipeline in the format torch, which rankless "
            "does not read: convert it to torch_dist with Megatron"
        )
    tp, pp = (args.get(f"{kind}_model_parallel_size", None) for kind in ("tensor", "pipeline"))
    if type(tp) is not int or type(pp) is not int or not 0 < tp * pp <= 2**20:
        raise FormatError(f"{path}: args do not have the sizes of tensor and pipeline parallelism")
    present, expected = {(file.stage, file.rank) for file in ranks}, tp * pp
    if len(ranks) != expected or present != {(stage, rank) for stage in range(pp) for rank in range(tp)}:
        raise CorruptCheckpointError(
            f"{path} has the folders of {len(ranks)} ranks, and by args it should have {tp} tensor-parallel ranks of "
            f"{pp} stages: files are missing, or from another save"
        )


def _add_model(state: SavedState, ranks: list[_RankFile]) -> dict[tuple[int, int], list[RankPart]]:
    """Add the tensors of the model, and return the parts of them that each rank has."""
    parts: dict[tuple[int, int], list[RankPart]] = {}
    first_layer = 0
    for stage in sorted({file.stage for file in ranks}):
        files = [file for file in ranks if file.stage == stage]
        models = [_rename_tensors(file, first_layer) for file in files]
        first_layer += StageNames.count_layers(models[0])
        for name in models[0]:
            tensors = RankTensors(name, [model.get(name) for model in models], str(state.path))
            joined = join_ranks(tensors, is_gated=state.args.is_gated)
            if joined.copies:
                state.copies.append((name, joined.copies))
            state.weights.setdefault(name, joined.tensor)
            for file, part in zip(files, joined.parts, strict=True):
                parts.setdefault((file.stage, file.rank), []).append(part)
        if any(model.keys() != models[0].keys() for model in models):
            raise CorruptCheckpointError(f"{state.path}: ranks of stage {stage} have different tensors in their models")
    if not state.weights:
        raise FormatError(f"{state.path} has no tensors of a model: it is not a checkpoint of Megatron")
    return parts


def _rename_tensors(file: _RankFile, first_layer: int) -> dict[str, TorchTensor]:
    model = file.root.get(_MODEL)
    if not isinstance(model, dict):
        raise FormatError(
            f"{file.folder / MODEL_FILE} has no model, but {', '.join(map(str, file.root))[:200]}: a virtual pipeline "
            "is not read in the format torch"
        )
    names = StageNames(model, first_layer)
    return {
        names.rename(name): tensor
        for name, tensor in model.items()
        if isinstance(tensor, TorchTensor) and not is_extra(name)
    }


def _add_optimizer(
    state: SavedState, ranks: list[_RankFile], parts: Mapping[tuple[int, int], list[RankPart]], digests: list[int]
) -> None:
    """Add the states of all ranks' optimizers."""
    for file in ranks:
        optimizer = file.root.get(_OPTIMIZER)
        if not optimizer:
            continue
        state.groups += collect_groups(optimizer)
        path = file.folder / _OPTIMIZER_FILE
        if not store_of(path).file_exists(path):
            raise FormatError(
                f"{file.folder} has an optimizer and no {_OPTIMIZER_FILE}: a plain optimizer in the format torch "
                f"identifies parameters by number, which is not read; {SKIP}"
            )
        tree = _read_file(state.path, path, state.budget, digests)
        state.files = [*state.files, path]
        buffers = {str(path): buffers_of_param_state(tree, str(path))}
        _add_rank_states(state, buffers, parts[file.stage, file.rank])
    state.proofs += [
        (name, state.weights[name], states[MASTER]) for name, states in state.states.items() if MASTER in states
    ]


def _add_rank_states(state: SavedState, buffers: Mapping[str, list[FlatBuffer]], parts: list[RankPart]) -> None:
    """Add the states of one rank to the others' states: each has other boxes of the parameters."""
    positions = find_parts(buffers, state.weights, parts, state.budget)
    for name, states in join_states(state.weights, positions).items():
        present = state.states.setdefault(name, {})
        for kind, tensor in states.items():
            earlier = present.get(kind)
            present[kind] = tensor if earlier is None else earlier.add_chunks(tensor.chunks)


def _add_values(state: SavedState, ranks: list[_RankFile]) -> None:
    """Add the values that all ranks share, taken from the first one, and the random states of each."""
    left_out = {_MODEL, _OPTIMIZER, _RNG}
    state.values = {key: value for key, value in ranks[0].root.items() if key not in left_out}
    optimizer = ranks[0].root.get(_OPTIMIZER)
    if isinstance(optimizer, dict) and "grad_scaler" in optimizer:
        state.values["grad_scaler"] = optimizer["grad_scaler"]
    random_states = {f"{file.stage}.{file.rank}": file.root[_RNG] for file in ranks if _RNG in file.root}
    if random_states:
        state.values[_RNG] = random_states
