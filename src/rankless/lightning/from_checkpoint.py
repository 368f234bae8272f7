"""``load_from_checkpoint`` for checkpoints that Lightning cannot open: folders.

A script calls it in one process.
"""

from __future__ import annotations

from os import PathLike
from typing import Any, TypeVar

from lightning.pytorch import LightningDataModule, LightningModule

from rankless.lightning.checkpoint_file import read_as_file

_M = TypeVar("_M", bound=LightningModule | LightningDataModule)


def load_from_checkpoint(module: type[_M], path: str | PathLike[str], **options: Any) -> _M:
    """Create a module with the hyper-parameters and weights of a checkpoint of any format, in one process.

    Calls Lightning's ``module.load_from_checkpoint`` with a file in memory, because that function opens files only.
    Meanwhile the weights are in memory three times. ``rankless consolidate`` writes such a file once, for repeated use.

    Args:
        module: the class of the module, or of a ``LightningDataModule``.
        path: a checkpoint: a folder, a file, or a URL. Code in it is never run.
        options: options of Lightning's ``load_from_checkpoint``: ``map_location``, ``hparams_file``, ``strict``, and
            hyper-parameters that replace those in the checkpoint. Without ``map_location`` the weights are on the CPU.

    Raises ``NoCheckpointError``, ``FormatError`` or ``CorruptCheckpointError``, and Lightning's errors.
    """
    options.pop("weights_only", None)  # the file has just been created from tensors and plain values
    return module.load_from_checkpoint(read_as_file(path), weights_only=False, **options)  # type: ignore[return-value]
