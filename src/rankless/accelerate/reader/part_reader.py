"""Reading single parts of a folder: files of torch.save, state dicts of models and optimizers, JSON.

:class:`~rankless.accelerate.reader.training_reader.TrainingReader` has one on each rank. No pickle is run.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rankless.dcp.reader import dcp_directory
from rankless.errors import CorruptCheckpointError, UnsafePickleError
from rankless.formats.contained_paths import check_contained
from rankless.formats.sharded.model_files import MODEL, OPTIMIZER, parse_file_name
from rankless.formats.sharded.reader_files import OpenedFiles
from rankless.formats.stored_tensor import UnreadTensor
from rankless.formats.tree.classify import TreeClassifier
from rankless.ondisk.block_crcs import crc64
from rankless.storage.store import store_of


class PartReader:
    """A reader of the parts of the folder ``root``. It notes in ``opened`` which files it has opened."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.opened = OpenedFiles(root)

    def read_object(self, kind: str, path: Path) -> Any:
        """Return the state dict of a model, optimizer or scheduler, or a placeholder if it is unsafe to read.

        Raises ``CorruptCheckpointError`` if the file does not contain one.
        """
        file = parse_file_name(path) if kind == MODEL else None
        if file is not None:
            tree = _read_safely(lambda: self.opened.read_model(file))
        else:
            tree = self.read_file(path) if path.suffix else self._read_folder(kind, path)
        if isinstance(tree, UnreadTensor):
            return tree
        is_optimizer = TreeClassifier(self.opened.budget).is_optimizer
        if not isinstance(tree, dict) or (kind == OPTIMIZER and not is_optimizer(tree)):
            raise CorruptCheckpointError(f"{path} must contain the state dict of the {kind}: it has something else")
        return tree

    def read_file(self, path: Path) -> Any:
        """Return the tree in a file of torch.save, or a placeholder if it is unsafe to read."""
        return _read_safely(lambda: self.opened.read_tree(path))

    def read_json(self, path: Path) -> Any:
        """Return the value in a file of JSON, which may have ``NaN``, as Python writes it."""
        check_contained(path, self._root)
        raw = store_of(path).read_small(path)
        self.opened.budget.earn(len(raw))
        self.opened.add_file(path, crc64(raw))
        try:
            return json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise CorruptCheckpointError(f"{path} is not valid JSON: {error}") from error

    def _read_folder(self, kind: str, path: Path) -> Any:
        """Return the tree under the name ``kind`` in a folder of ``torch.distributed.checkpoint``."""
        if not store_of(path).path_exists(path / dcp_directory.METADATA):
            raise CorruptCheckpointError(f"{path} has no {dcp_directory.METADATA}: its save did not finish")
        check_contained(path / dcp_directory.METADATA, self._root)
        saved = dcp_directory.read_tree(path)
        self.opened.budget.earn(saved.budget.earned)
        for file in saved.files:
            check_contained(file, self._root)
            self.opened.add_file(file, crc64(saved.fingerprint.encode()))
        return saved.root.get(kind)


def _read_safely(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except UnsafePickleError as error:
        return UnreadTensor(f"is not read: {error}", type(error))
