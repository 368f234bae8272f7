"""Weights that lie in a checkpoint of ours and are no part of it: others may load them instead of what was verified."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from holdfast.cli.target import InspectedCheckpoint
from holdfast.storage import posix

#: The group whose folder transformers opens, and the file that it takes first, if that is there.
_MODEL, _FIRST = "model", "model.safetensors"

#: Makes ``from_pretrained`` load an adapter, and the weights that this is for.
_ADAPTER = "adapter_config.json"

#: How the names of files of weights and of their indexes end.
_ENDINGS = (".safetensors", ".bin", ".index.json", ".pt", ".pth")


def list_unnamed_weights(found: InspectedCheckpoint) -> Iterator[str]:
    """Say which files of weights lie beside those of our models, and no manifest names them."""
    if found.manifest is None:
        return
    names = found.manifest.files
    folders = {Path(name).parent for name in names if name.endswith(".safetensors") and name.startswith(_MODEL)}
    for folder in sorted(folders - {Path()}):
        for file in posix.list_files(found.path / folder):
            if str(folder / file.name) not in names and (file.name.endswith(_ENDINGS) or file.name == _ADAPTER):
                yield f"{file} is no part of this checkpoint: its manifest does not name it{_describe_effect(file)}"


def _describe_effect(file: Path) -> str:
    if file.name in {_FIRST, _ADAPTER}:
        return "; transformers loads it instead of what was verified"
    if file.name == f"{_FIRST}.index.json":
        return "; whoever opens the folder by it loads other weights than were verified"
    return ""
