"""``load_from_checkpoint`` for checkpoints that Lightning cannot open: folders."""

from __future__ import annotations

import io
from os import PathLike
from typing import Any, TypeVar

import torch
from lightning.pytorch import LightningDataModule, LightningModule

from holdfast.conversion.state_dict_schemas import lightning_schema
from holdfast.lightning.checkpoint_dict import ResumedCheckpoint
from holdfast.storage.posix import local_path

_M = TypeVar("_M", bound=LightningModule | LightningDataModule)


def load_from_checkpoint(module: type[_M], path: str | PathLike[str], **options: Any) -> _M:
    """Make a module with the hyper-parameters and weights of a checkpoint of any format, in one process.

    Lightning's ``module.load_from_checkpoint`` does the work. It opens files only, so it is given one in memory: while
    it works, the weights are in memory three times. ``holdfast consolidate`` writes such a file once for all.

    Args:
        module: the class of the module, or of a ``LightningDataModule``.
        path: a checkpoint, a folder or a file. Code in it is never run.
        options: of Lightning's ``load_from_checkpoint``: ``map_location``, ``hparams_file``, ``strict``, and
            hyper-parameters that take the place of those in the checkpoint. The weights are on the CPU without a
            ``map_location``.

    Raises ``NoCheckpointError``, ``FormatError`` or ``CorruptCheckpointError``, and what Lightning raises.
    """
    opened = ResumedCheckpoint.of(local_path(path))
    file = io.BytesIO()
    torch.save(lightning_schema({"model": dict(opened.model)}, {"user_content": opened.content}), file)
    del opened
    file.seek(0)
    options.pop("weights_only", None)  # the file has just been made of tensors and plain values
    return module.load_from_checkpoint(file, weights_only=False, **options)  # type: ignore[return-value]
