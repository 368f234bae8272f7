"""The oracle: what ``save_pretrained`` writes for a model, and what ``from_pretrained`` makes of a folder."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import nn

from campaigns.families.models import Recipe, find_differences, is_equal

INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Opened:
    """A model that ``from_pretrained`` opened, and what it says about keys: missing, unexpected, of other shapes."""

    model: nn.Module
    keys: Mapping[str, Any]


def open_pretrained(recipe: Recipe, folder: Path) -> Opened:
    """Open a folder with ``from_pretrained``, in the dtypes of its files."""
    model, keys = recipe.find_class().from_pretrained(folder, output_loading_info=True)
    return Opened(model, {name: entries for name, entries in keys.items() if entries})


@dataclass(frozen=True)
class Reference:
    """A folder of ``save_pretrained``, the saved model, and what ``from_pretrained`` makes of the folder."""

    recipe: Recipe
    folder: Path
    saved: nn.Module
    opened: Opened

    @property
    def fault(self) -> str | None:
        """What transformers itself loses in its round trip."""
        if lost := find_differences(self.saved, self.opened.model):
            return f"{len(lost)} tensors differ after its own round trip, such as {lost[0]}"
        return f"its own files have {', '.join(self.opened.keys)}" if self.opened.keys else None

    def compare_folder(self, folder: Path) -> Iterator[str]:
        """Yield how a folder differs from that of ``save_pretrained``, and what ``from_pretrained`` makes of it."""
        yield from compare_folders(folder, self.folder)
        opened = open_pretrained(self.recipe, folder)
        if lost := find_differences(self.opened.model, opened.model):
            yield f"from_pretrained: {len(lost)} tensors differ, such as {lost[0]}"
        if opened.keys != self.opened.keys:
            yield f"from_pretrained: {opened.keys}"


def compare_folders(ours: Path, theirs: Path) -> Iterator[str]:
    """Yield how names of files, keys, values, metadata and configurations differ from the expected ones.

    Tensors may be in other files than those of ``save_pretrained``.
    """
    names, expected = _file_names(ours), _file_names(theirs)
    if names != expected:
        yield f"files: {sorted(names - expected)} for {sorted(expected - names)}"
    yield from _compare_tensors(ours, theirs)
    for name in sorted(names & expected):
        if name.endswith(".json") and (text := _compare_json(ours / name, theirs / name)):
            yield f"{name}: {text}"


def _file_names(folder: Path) -> set[str]:
    return {re.sub(r"\d{5}-of-\d{5}", "#", path.name) for path in folder.iterdir()}


def _compare_tensors(ours: Path, theirs: Path) -> Iterator[str]:
    tensors, expected = _read_tensors(ours), _read_tensors(theirs)
    if only := tensors.keys() - expected.keys():
        yield f"keys: {len(only)} that transformers does not store, such as {min(only)}"
    if missing := expected.keys() - tensors.keys():
        yield f"keys: {len(missing)} are missing, such as {min(missing)}"
    wrong = [key for key in tensors.keys() & expected.keys() if not is_equal(tensors[key], expected[key])]
    if wrong:
        yield f"values: {len(wrong)} differ, such as {min(wrong)}"
    if (metadata := _read_metadata(ours)) != (expected_metadata := _read_metadata(theirs)):
        yield f"metadata: {metadata} for {expected_metadata}"


def _read_tensors(folder: Path) -> dict[str, Any]:
    tensors: dict[str, Any] = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            tensors |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - it is no dict
    return tensors


def _read_metadata(folder: Path) -> set[tuple[tuple[str, str], ...]]:
    """Return the metadata that files have, without rankless's checksums and ties, which have names of their own."""
    metadata = set()
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            texts = file.metadata().items()
            metadata.add(tuple((name, text) for name, text in texts if not name.startswith("rankless.")))
    return metadata


def _compare_json(ours: Path, theirs: Path) -> str | None:
    values, expected = _read_json(ours), _read_json(theirs)
    different = sorted(name for name in values.keys() | expected.keys() if values.get(name) != expected.get(name))
    return f"{', '.join(different)} differ" if different else None


def _read_json(path: Path) -> dict[str, Any]:
    """Return what a file has; of an index the names of the tensors, not of their files, and their total size."""
    values: dict[str, Any] = json.loads(path.read_text())
    if path.name != INDEX:
        return values
    return {"names": sorted(values["weight_map"]), "total_size": values["metadata"]["total_size"]}
