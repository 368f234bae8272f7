"""The folders of Megatron's checkpoints: a run with ``latest_checkpointed_iteration.txt``, and one iteration.

Source: ``megatron/training/checkpointing.py`` and ``megatron/core/dist_checkpointing`` of megatron-core 0.15 to 0.19.

``formats/registry.py`` names :func:`is_megatron`: the detection of formats asks it on each rank. The reader and the
writer use the names, which are Megatron's.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from rankless.dcp.reader.dcp_directory import METADATA, is_dcp
from rankless.errors import CorruptCheckpointError, FormatError, NoCheckpointError
from rankless.formats.native import is_native
from rankless.formats.read_stored_tensor import read_tensor_bytes
from rankless.formats.torch_file import read_tree
from rankless.formats.torchfile.torch_placeholders import TorchTensor
from rankless.megatron.reader.config_files import NEMO_WEIGHTS
from rankless.ondisk.data_files import TensorInfo
from rankless.storage.store import store_of

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

#: The versions that are read, by their keys in the description.
_VERSIONS: dict[str, tuple[Any, ...]] = {
    "sharded_backend_version": (1, None),
    "common_backend": ("torch", None),
    "common_backend_version": (1, None),
}

_RANK = re.compile(r"mp_rank_(\d{2,4})(?:_(\d{3,4}))?(?:_(\d{3,4}))?")

#: The folder of the first rank, without and with pipeline or expert parallelism, and with both.
_FIRST_RANKS = ("mp_rank_00", "mp_rank_00_000", "mp_rank_00_000_000")

#: A name in the metadata of an iteration of Megatron-FSDP, and the beginnings of the names of its model.
_FSDP_NAMES = (b"checkpoint_version", b"model.module.", b"model0.module.")

_ITERATION = re.compile(r"iter_\d{7,12}|release")


def is_megatron(path: Path) -> bool:
    """Return whether a folder is one iteration of Megatron, or a run that names its newest one.

    A run that has moved from Megatron to rankless counts as a rankless run.
    """
    store = store_of(path)
    if store.file_exists(path / LATEST) or store.file_exists(path / LATEST_STATE):
        return not any(is_native(folder) for folder in store.list_subdirectories(path))
    return is_iteration(path) or is_iteration(path / NEMO_WEIGHTS)


def is_iteration(path: Path) -> bool:
    """Return whether a folder is one iteration."""
    first = (path / name / MODEL_FILE for name in _FIRST_RANKS)
    has_files = read_backend(path) is not None or any(store_of(file).file_exists(file) for file in first)
    return has_files or is_fsdp_dtensor(path) or has_broken_description(path)


def has_broken_description(path: Path) -> bool:
    """Return whether a folder has the name and the tensors of an iteration, and a description that says no format."""
    is_described = bool(_ITERATION.fullmatch(path.name)) and store_of(path).file_exists(path / DESCRIPTION)
    return is_described and is_dcp(path) and read_backend(path) is None


def is_fsdp_dtensor(path: Path) -> bool:
    """Return whether a folder is an iteration of Megatron-FSDP, which no file describes but the metadata's names."""
    file = path / METADATA
    store = store_of(path)
    if not store.is_file(file) or store.path_exists(path / DESCRIPTION):
        return False
    metadata = store.read_small(file)
    return _FSDP_NAMES[0] in metadata and any(name in metadata for name in _FSDP_NAMES[1:])


def read_backend(path: Path) -> str | None:
    """Return the format of an iteration's tensors, as its description names it; ``None`` if there is none."""
    backend = _read_description(path).get(_BACKEND)
    return backend if isinstance(backend, str) else None


def check_versions(path: Path) -> None:
    """Raise ``FormatError`` if the description of an iteration names versions that are not known."""
    for key, value in _read_description(path).items():
        if key in _VERSIONS and value not in _VERSIONS[key]:
            raise FormatError(
                f"{path / DESCRIPTION} has {key} {value!r:.40}, and rankless knows {_VERSIONS[key][0]!r}: a newer "
                "version of Megatron wrote it"
            )


def _read_description(path: Path) -> dict[str, Any]:
    """Return the description of an iteration; an empty one if there is none."""
    file = path / DESCRIPTION
    if not store_of(file).file_exists(file) or store_of(file).file_size(file) > _LARGEST:
        return {}
    try:
        table = json.loads(store_of(file).read_small(file))
    except (ValueError, RecursionError):
        return {}
    return table if isinstance(table, dict) else {}


def list_rank_folders(path: Path) -> dict[tuple[int, ...], Path]:
    """Return the folders of ranks in the format ``torch``, by the numbers in their names.

    For example, ``mp_rank_01_002`` has the numbers 1 and 2.
    """
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
            "rankless does not read as Megatron's: open this folder itself, which is read as one of "
            "torch.distributed.checkpoint"
        )
    others = [other.name for other in store_of(path).list_subdirectories(path) if _ITERATION.fullmatch(other.name)]
    raise NoCheckpointError(
        f"{file} names {name}, which is not there or not complete; {path} has {', '.join(others) or 'no iterations'}"
    )


def _read_latest(path: Path) -> tuple[Path, str]:
    """Return the file that names a run's newest iteration, and its text."""
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
