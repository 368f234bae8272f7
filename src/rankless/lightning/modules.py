"""Lightning's modules. Their ``load_from_checkpoint`` also opens checkpoints of the strategies: folders, and URLs.

A script calls it in one process. The names of the classes are Lightning's, so that a program changes one import.
"""

from __future__ import annotations

from os import PathLike
from typing import IO, Any, Self

import lightning.pytorch as pl

from rankless.errors import InvalidArgumentError
from rankless.lightning.checkpoint_file import read_as_file
from rankless.storage.location import parse_location
from rankless.storage.store import store_of


class _FolderOpening:
    """Common base of these modules: a folder or a URL becomes a file in memory, and all else is left to Lightning."""

    @classmethod
    def load_from_checkpoint(
        cls,
        checkpoint_path: str | PathLike[str] | IO[bytes],
        *args: Any,
        weights_only: bool | None = None,
        **kwargs: Any,
    ) -> Self:
        """Create a module with the hyper-parameters and weights of a checkpoint of any format, in one process.

        Args:
            checkpoint_path: A file, as for Lightning; or the folder of a checkpoint of rankless, Lightning or another
                system, or its URL in an object store. Code in a folder is never run.
            args: Lightning's further positional arguments: ``map_location``, ``hparams_file`` and ``strict``.
            weights_only: As for Lightning. It says nothing about a folder.
            kwargs: Lightning's keyword arguments, and hyper-parameters that replace those in the checkpoint.

        Returns:
            The module.

        Raises:
            NoCheckpointError: There is nothing at the URL.
            FormatError: The folder is no checkpoint.
            CorruptCheckpointError: Its bytes are not those that were saved. Further errors are Lightning's.
        """
        load = super().load_from_checkpoint  # type: ignore[misc]  # of Lightning's class, which comes after this one
        if isinstance(checkpoint_path, str | PathLike) and _is_folder(checkpoint_path):
            checkpoint_path, weights_only = read_as_file(checkpoint_path), False  # of tensors and plain values
        return load(checkpoint_path, *args, weights_only=weights_only, **kwargs)  # type: ignore[no-any-return]


def _is_folder(path: str | PathLike[str]) -> bool:
    """Return whether a path is a folder, or the URL of a store that has checkpoints as folders."""
    try:
        location = parse_location(path)
    except InvalidArgumentError:  # such as http://, which Lightning knows
        return False
    return store_of(location).is_remote or store_of(location).is_directory(location)


class LightningModule(_FolderOpening, pl.LightningModule):
    """Lightning's module. ``load_from_checkpoint`` also opens folders, such as a native ``.ckpt``, and URLs of them."""


class LightningDataModule(_FolderOpening, pl.LightningDataModule):
    """Lightning's data module. ``load_from_checkpoint`` also opens folders, such as a native ``.ckpt``, and URLs."""
