"""``save_checkpoint``, ``load_checkpoint``, ``has_checkpoint`` and ``finalize_checkpoint`` of NxD 0.18.

A training script calls them on every rank, in place of NxD's functions. The names and the order of the arguments must
stay the same as in NxD.
"""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rankless import api, named_checkpoints
from rankless.engine.comm.collective_call import collective_call
from rankless.errors import InvalidArgumentError, NoCheckpointError
from rankless.formats.detect import is_checkpoint
from rankless.formats.native import is_native
from rankless.formats.registry import LAYOUT
from rankless.nxd.model_sharding import sharding_of
from rankless.nxd.reader import step_dirs
from rankless.nxd.reader.nxd_reader import OPTIMIZER, WEIGHTS
from rankless.options import LoadKeywords
from rankless.storage.posix import local_path

#: The value of ``num_kept_ckpts`` that keeps all checkpoints, besides ``None``.
_ALL = -1


def save_checkpoint(  # noqa: PLR0917 - the positional order of NxD's
    checkpoint_dir_str: str | PathLike[str] | None = None,
    tag: object = None,
    model: Any = None,
    optimizer: Any = None,
    scheduler: Any = None,
    user_content: Any = None,
    num_workers: int = 8,
    use_xser: bool = False,
    num_kept_ckpts: int | None = None,
    async_save: bool = False,
    zero1_optimizer: bool = False,
    use_zero1_dcp: bool = False,
    avoid_saving_lower_precision_weights: bool = False,
    *,
    path: str | PathLike[str] | None = None,
) -> None:
    """Save a training state into the folder ``checkpoint_dir_str/tag``, as a rankless checkpoint.

    As with NxD, an existing tag is replaced, but atomically. ``path`` is the name in NxD's guide for
    ``checkpoint_dir_str``.

    Ignored: ``num_workers``, ``use_xser``, ``zero1_optimizer``, ``use_zero1_dcp`` and
    ``avoid_saving_lower_precision_weights``. They choose among NxD's file layouts; here there is one layout, which
    holds everything. ``num_kept_ckpts``: -1 keeps all; 0, with which NxD removes the checkpoint it has just written, is
    an error.

    Raises the errors of :func:`rankless.save_checkpoint`.
    """
    with collective_call(None):
        del num_workers, use_xser, zero1_optimizer, use_zero1_dcp, avoid_saving_lower_precision_weights
        folder = _single_path(checkpoint_dir_str, path)
        if tag is None:
            raise InvalidArgumentError("save_checkpoint needs a tag, such as 'step_1000'")
        kept = None if num_kept_ckpts == _ALL else num_kept_ckpts
        api.save_checkpoint(
            folder,
            str(tag),
            model,
            optimizer,
            scheduler,
            user_content,
            keep=kept,
            async_save=async_save,
            overwrite=True,
        )


def load_checkpoint(  # noqa: PLR0917 - the positional order of NxD's
    path: str | PathLike[str] | None = None,
    tag: object = None,
    model: Any = None,
    optimizer: Any = None,
    scheduler: Any = None,
    num_workers: int = 8,
    strict: bool = True,
    use_zero1_dcp: bool = False,
    *,
    checkpoint_dir_str: str | PathLike[str] | None = None,
    layout: str | PathLike[str] | None = None,
) -> Any:
    """Load a checkpoint of rankless or NxD in place, on any ranks, and return its user content, or ``None``.

    Without a ``tag``, loads the latest rankless checkpoint in the folder, or else the newest that NxD has finished
    there. Dtypes that differ are cast. ``num_workers`` and ``use_zero1_dcp`` are ignored. ``layout`` describes how
    NxD's tensor-parallel ranks divided parameters, as in :func:`rankless.convert`; by default it is derived from the
    attributes of the model's parameters, which is enough for one such rank.

    Raises the errors of :func:`rankless.load_checkpoint`.
    """
    with collective_call(None):
        del num_workers, use_zero1_dcp
        folder = _single_path(path, checkpoint_dir_str)
        options: LoadKeywords = {"strict": strict, "cast_dtype": True}
        checkpoint = None if tag is None else folder / str(tag)
        if checkpoint is None and not named_checkpoints.has_checkpoint(folder) and step_dirs.is_nxd_run(folder):
            checkpoint = step_dirs.newest_tag(folder)
        if checkpoint is not None and not is_native(checkpoint) and step_dirs.is_tag(checkpoint):
            options["keys"] = _reader_keys(checkpoint, layout, model, optimizer)
            return api.load_checkpoint(checkpoint, None, model, optimizer, scheduler, **options)
        if checkpoint is not None and not is_checkpoint(checkpoint):
            raise NoCheckpointError(f"there is no checkpoint at {checkpoint}")
        return api.load_checkpoint(folder, None if tag is None else str(tag), model, optimizer, scheduler, **options)


def has_checkpoint(dir_str: str | PathLike[str]) -> bool:
    """Return whether a folder has a complete checkpoint of rankless or NxD."""
    folder = local_path(dir_str)
    if named_checkpoints.has_checkpoint(folder):
        return True
    try:
        return step_dirs.is_nxd_run(folder) and bool(step_dirs.newest_tag(folder))
    except NoCheckpointError:
        return False


def finalize_checkpoint() -> None:
    """Wait for all saves in progress. Raises their errors."""
    api.finalize()


def _single_path(first: str | PathLike[str] | None, second: str | PathLike[str] | None) -> Path:
    if (first is None) == (second is None):
        raise InvalidArgumentError("pass one folder: path or checkpoint_dir_str")
    return local_path(first if first is not None else second)  # type: ignore[arg-type]


def _reader_keys(checkpoint: Path, layout: str | PathLike[str] | None, model: Any, optimizer: Any) -> dict[str, str]:
    """Return the options for :class:`~rankless.nxd.reader.nxd_reader.NxdReader`."""
    keys = {} if optimizer is not None else {WEIGHTS: "model", OPTIMIZER: "skip"}
    if layout is not None:
        return {**keys, LAYOUT: str(layout)}
    torch_optimizer = optimizer if isinstance(optimizer, torch.optim.Optimizer) else None
    has_attributes = isinstance(model, nn.Module) and any(
        hasattr(parameter, "tensor_model_parallel") for parameter in model.parameters()
    )
    if isinstance(model, nn.Module) and (has_attributes or step_dirs.tensor_parallel_degree(checkpoint) == 1):
        keys[LAYOUT] = sharding_of(model, torch_optimizer)
    return keys
