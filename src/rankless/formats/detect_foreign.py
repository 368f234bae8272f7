"""Detection of the checkpoints of other systems by their files. A native save or load does not import this module.

:mod:`rankless.formats.detect` calls it, in the process or rank that opens the path. Some folders could have several
formats: then the order of the attempts decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rankless.errors import (
    CheckpointReplacedError,
    CorruptCheckpointError,
    FormatError,
    NoCheckpointError,
    StorageError,
)
from rankless.formats.composite_reader import CompositeReader
from rankless.formats.huggingface import INDEX, SINGLE, HuggingFaceReader, is_huggingface, kinds_in
from rankless.formats.native import is_native
from rankless.formats.pipelines import is_pipeline, open_pipeline
from rankless.formats.reader import Reader
from rankless.formats.registry import ACCELERATE, DEEPSPEED, READABLE
from rankless.formats.sharded.model_files import list_components
from rankless.formats.sharded.sharded_reader import ShardedReader, is_sharded_checkpoint
from rankless.ondisk import manifest
from rankless.storage.store import follow_folder_links, list_versions, store_of

#: How often files that change meanwhile are opened, and of how many the versions are compared.
_ATTEMPTS, _NOTED = 5, 4096

#: In how many folders in a folder a checkpoint is looked for, to name it in a message.
_MOST_CHILDREN = 10


def is_foreign(path: Path) -> bool:
    """Return whether the path itself is a checkpoint of another system. Called by ``detect``."""
    return (
        is_sharded_checkpoint(path)
        or is_huggingface(path)
        or is_pipeline(path)
        or any(readable.is_at(path) for readable in READABLE.values())
    )


def describe_contents(folder: Path) -> str:
    """Return the part of a message that says what a folder contains instead of a checkpoint.

    It names folders in it that are checkpoints, such as ``checkpoint-500`` of transformers' ``Trainer``, and names that
    identify a format but are no regular files, such as FIFOs.
    """
    markers = [readable.marker for readable in READABLE.values() if readable.marker]
    paths = [folder / name for name in (manifest.NAME, *markers, INDEX, SINGLE)]
    irregular = [path for path in paths if store_of(path).path_exists(path) and not store_of(path).is_file(path)]
    clauses = [f"; {path} is not a regular file" for path in irregular]
    children = sorted(store_of(folder).list_subdirectories(folder), key=lambda child: (len(child.name), child.name))
    for child in reversed(children[-_MOST_CHILDREN:]):
        if not is_native(child) and is_foreign(child):  # one of rankless is an interrupted save in an object store
            return "".join([*clauses, f", but {child} is one: pass its path"])
    return "".join(clauses)


def open_foreign(path: Path, keys: Mapping[str, str]) -> Reader:
    """Return the reader for a checkpoint of another system. ``keys`` and the errors are as in ``open_reader``.

    The reader knows the versions of the files: if one changes during the call, all are read again. A link is followed
    now, so that it may lead to another checkpoint later. Raises ``CheckpointReplacedError`` if the files change all the
    time.
    """
    real = follow_folder_links(path)
    for _ in range(_ATTEMPTS):
        before = list_versions(real, _NOTED)
        try:
            reader = _open_once(real, keys)
        except (CorruptCheckpointError, FormatError, StorageError):
            if list_versions(real, _NOTED) == before:
                raise
            continue
        after = list_versions(real, _NOTED)
        if all(before.get(file) == after.get(file) for file in reader.files):
            return reader
    raise CheckpointReplacedError(
        f"{path} is written all the time while it is opened: wait until the job that writes it has ended"
    )


def _open_once(path: Path, keys: Mapping[str, str]) -> Reader:
    for readable in (READABLE[ACCELERATE], READABLE[DEEPSPEED]):
        if readable.is_at(path):
            return readable.open(path, keys)
    if store_of(path).is_directory(path) and (is_huggingface(path) or is_sharded_checkpoint(path)):
        return _open_components(path, keys)
    if is_pipeline(path):
        return open_pipeline(path, keys)
    if is_sharded_checkpoint(path):
        return ShardedReader(path, keys)
    if is_huggingface(path):
        return HuggingFaceReader(path)
    for readable in READABLE.values():
        if readable.is_at(path):
            return readable.open(path, keys)
    if not store_of(path).path_exists(path):
        raise NoCheckpointError(f"there is no {path}")
    raise FormatError(
        f"{path} is not a checkpoint of a format that rankless reads: its own (a folder with a manifest.json), "
        "Hugging Face weights (safetensors), a pipeline of diffusers, a file of torch.save, or a folder of "
        "torch.distributed.checkpoint, Accelerate, DeepSpeed, Lightning, Megatron-LM, ColossalAI or NxD"
        + describe_contents(path)
    )


def _open_components(folder: Path, keys: Mapping[str, str]) -> Reader:
    """Return the reader for a folder with a model, an optimizer or both, each in a format of its own."""
    huggingface_kinds = kinds_in(folder)
    sharded_kinds = [file.kind for file in list_components(folder) if file.kind not in huggingface_kinds]
    readers: list[Reader] = [HuggingFaceReader(folder)] if huggingface_kinds else []
    if sharded_kinds:
        readers.append(ShardedReader(folder, keys, sharded_kinds))
    return readers[0] if len(readers) == 1 else CompositeReader(folder, readers)
