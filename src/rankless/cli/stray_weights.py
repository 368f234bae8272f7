"""Weight files in a rankless checkpoint that do not belong to it: other tools may load them instead."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rankless.inspection.inspected_checkpoint import InspectedCheckpoint
from rankless.storage import posix
from rankless.storage.object_path import ObjectPath

#: The group whose folder transformers opens, and the file that it prefers if it exists.
_MODEL, _FIRST = "model", "model.safetensors"

#: If this file exists, ``from_pretrained`` loads an adapter and the base weights that it names.
_ADAPTER = "adapter_config.json"

#: The suffixes of weight files and their indexes.
_ENDINGS = (".safetensors", ".bin", ".index.json", ".pt", ".pth")


def list_unnamed_weights(checkpoint: InspectedCheckpoint) -> Iterator[str]:
    """Describe the weight files in the folders of the models that the manifest does not name."""
    if checkpoint.manifest is None:
        return
    names = checkpoint.manifest.files
    folders = {Path(name).parent for name in names if name.endswith(".safetensors") and name.startswith(_MODEL)}
    for folder in sorted(folders - {Path()}):
        for file in _list_files(checkpoint.path / folder):
            if str(folder / file.name) not in names and (file.name.endswith(_ENDINGS) or file.name == _ADAPTER):
                yield f"{file} is not part of this checkpoint: its manifest does not name it{_describe_effect(file)}"


def _list_files(folder: Path) -> list[Path]:
    if isinstance(folder, ObjectPath):
        return [folder / name for name in sorted(folder.store.list_names(folder))]
    return posix.list_files(folder)


def _describe_effect(file: Path) -> str:
    if file.name in {_FIRST, _ADAPTER}:
        return "; transformers loads it instead of the verified weights"
    if file.name == f"{_FIRST}.index.json":
        return "; tools that read this index load other weights than the verified ones"
    return ""
