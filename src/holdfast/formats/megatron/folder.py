"""The folders of Megatron's checkpoints: a run with ``latest_checkpointed_iteration.txt``, and one iteration.

Source: ``megatron/training/checkpointing.py`` and ``megatron/core/dist_checkpointing`` of megatron-core 0.15 to 0.19.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from holdfast.errors import CorruptCheckpointError, FormatError, NoCheckpointError
from holdfast.formats.dcp.folder import METADATA, is_dcp
from holdfast.formats.megatron.config_files import NEMO_WEIGHTS
from holdfast.formats.native import is_native
from holdfast.formats.tensor_bytes import read_tensor_bytes
from holdfast.formats.torch_file import read_tree
from holdfast.formats.torchfile.objects import TorchTensor
from holdfast.ondisk.files import TensorInfo
from holdfast.storage.store import store_of

#: The file of a run that names the newest iteration, and the file of an iteration that is written last.
LATEST, DESCRIPTION = "latest_checkpointed_iteration.txt", "metadata.json"

#: The file of a run of Megatron-Bridge with the counters of the newest iteration.
LATEST_STATE = "latest_train_state.pt"

#: The file of an iteration with the values that all ranks share, up to megatron-core 0.18.
COMMON = "common.pt"

#: The file of a rank with its model, in the format ``torch``.
MODEL_FILE = "model_optim_rng.pt"

#: The key of the description that names the format of the tensors, and the most bytes of the description.
_BACKEND, _LARGEST = "sharded_backend", 2**16

_RANK = re.compile(r"mp_rank_(\d{2,4})(?:_(\d{3,4}))?(?:_(\d{3,4}))?")

#: The folder of the first rank, without and with pipeline or expert parallelism, and with both.
_FIRST_RANKS = ("mp_rank_00", "mp_rank_00_000", "mp_rank_00_000_000")

#: Names in the metadata of an iteration of Megatron-FSDP.
_FSDP_NAMES = (b"model.module.", b"checkpoint_version")

_ITERATION = re.compile(r"iter_\d{7,12}|release")


def is_megatron(path: Path) -> bool:
    """Return whether a folder is one iteration of Megatron, or a run that names its newest one.

    A run that has moved from Megatron to holdfast counts as a holdfast run.
    """
    store = store_of(path)
    if store.file_exists(path / LATEST) or store.file_exists(path / LATEST_STATE):
        return not any(is_native(folder) for folder in store.list_subdirectories(path))
    return is_iteration(path) or is_iteration(path / NEMO_WEIGHTS)


def is_iteration(path: Path) -> bool:
    """Return whether a folder is one iteration."""
    first = (path / name / MODEL_FILE for name in _FIRST_RANKS)
    has_files = read_backend(path) is not None or any(store_of(file).file_exists(file) for file in first)
    return has_files or is_fsdp_dtensor(path)


def is_fsdp_dtensor(path: Path) -> bool:
    """Return whether a folder is an iteration of Megatron-FSDP, which no file describes but the metadata's names."""
    file = path / METADATA
    store = store_of(path)
    if not store.file_exists(file) or store.path_exists(path / DESCRIPTION):
        return False
    metadata = store.read_small(file)
    return all(name in metadata for name in _FSDP_NAMES)


def read_backend(path: Path) -> str | None:
    """Return the format of an iteration's tensors, as its description names it; ``None`` if there is none."""
    file = path / DESCRIPTION
    if not store_of(file).file_exists(file) or store_of(file).file_size(file) > _LARGEST:
        return None
    try:
        table = json.loads(store_of(file).read_small(file))
    except (ValueError, RecursionError):
        return None
    backend = table.get(_BACKEND) if isinstance(table, dict) else None
    return backend if isinstance(backend, str) else None


def list_rank_folders(path: Path) -> dict[tuple[int, ...], Path]:
    """Return the folders of ranks in the format ``torch``, by the numbers in their names."""
    folders = {folder: _RANK.fullmatch(folder.name) for folder in store_of(path).list_subdirectories(path)}
    return {
        tuple(int(number) for number in match.groups() if number is not None): folder
        for folder, match in sorted(folders.items())
        if match and store_of(folder).file_exists(folder / MODEL_FILE)
    }


def resolve_iteration(path: Path) -> Path:
    """Return the folder of an iteration: ``path`` itself, or the newest one of a run.

    Raises ``NoCheckpointError`` if it does not exist, ``FormatError`` if it has a format that is not read.
    """
    if is_iteration(path):
        return path
    if is_iteration(path / NEMO_WEIGHTS):
        return path / NEMO_WEIGHTS
    file, text = _read_latest(path)
    name = f"iter_{int(text):07d}" if text.isascii() and text.isdigit() and len(text) <= 12 else text  # noqa: PLR2004 - digits
    if not _ITERATION.fullmatch(name):
        raise CorruptCheckpointError(f"{file} must hold the number of an iteration or 'release', not {text[:40]!r}")
    folder = path / name
    if is_iteration(folder):
        return folder
    if is_dcp(folder):
        raise FormatError(
            f"{folder} has no {DESCRIPTION}: either its save did not end, or it has the format torch_dcp, which "
            "holdfast does not read as Megatron's: open this folder itself, which is read as one of "
            "torch.distributed.checkpoint"
        )
    others = [other.name for other in store_of(path).list_subdirectories(path) if _ITERATION.fullmatch(other.name)]
    raise NoCheckpointError(
        f"{file} names {name}, which is not there or not complete; {path} has {', '.join(others) or 'no iterations'}"
    )


def _read_latest(path: Path) -> tuple[Path, str]:
    """Return the file that names a run's newest iteration, and what it says."""
    store = store_of(path)
    if store.file_exists(path / LATEST):
        store.check_regular(path / LATEST, within=(path,))
        return path / LATEST, store.read_small(path / LATEST, _LARGEST).decode(errors="replace").strip()
    file = path / LATEST_STATE
    store.check_regular(file, within=(path,))
    tree = read_tree(file).root
    step = tree.get("step") if isinstance(tree, dict) else None
    if not isinstance(step, TorchTensor) or step.info != TensorInfo("I64", ()):
        raise CorruptCheckpointError(f"{file} must hold the step of the training, as Megatron-Bridge writes it")
    return file, str(int.from_bytes(read_tensor_bytes(step, 0, step.info.nbytes), "little", signed=True))
