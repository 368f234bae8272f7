"""``save_checkpoint``, ``load_checkpoint``, ``has_checkpoint`` and ``finalize_checkpoint``, as NxD 0.18 has them."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn

from holdfast import api
from holdfast.compat.nxd.format import step_dirs
from holdfast.compat.nxd.format.nxd_reader import OPTIMIZER, WEIGHTS
from holdfast.compat.nxd.model_sharding import sharding_of
from holdfast.errors import InvalidArgumentError, NoCheckpointError
from holdfast.formats.detect import is_checkpoint
from holdfast.formats.native import is_native
from holdfast.formats.registry import LAYOUT
from holdfast.storage.posix import local_path

#: What keeps all checkpoints, beside ``None``.
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
    """Save a training state into the folder ``checkpoint_dir_str/tag``, as a checkpoint of holdfast's.

    As with NxD, a tag that is there already is replaced, but in one atomic step. ``path`` is what NxD's guide calls
    ``checkpoint_dir_str``.

    Without effect: ``num_workers``, ``use_xser``, ``zero1_optimizer``, ``use_zero1_dcp`` and
    ``avoid_saving_lower_precision_weights``. They choose among ways in which NxD lays files out; here there is one way,
    with everything in it. ``num_kept_ckpts``: -1 keeps all; 0, with which NxD removes what it has just written, is an
    error.

    Raises what :func:`holdfast.save_checkpoint` does.
    """
    del num_workers, use_xser, zero1_optimizer, use_zero1_dcp, avoid_saving_lower_precision_weights
    folder = _single_item(checkpoint_dir_str, path)
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
        num_kept_ckpts=kept,
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
    """Load a checkpoint in place, of holdfast or of NxD, on any ranks, and return its user content, or ``None``.

    Without a ``tag`` it is the latest of holdfast's in the folder, else the newest that NxD has finished there. Dtypes
    are cast where they differ. ``num_workers`` and ``use_zero1_dcp`` are without effect. ``layout`` says how NxD's
    tensor-parallel ranks divided parameters, as in :func:`holdfast.convert`; without it, it is what the model's
    parameters tell of themselves, which is enough for one such rank.

    Raises what :func:`holdfast.load_checkpoint` does.
    """
    del num_workers, use_zero1_dcp
    folder = _single_item(path, checkpoint_dir_str)
    options: dict[str, Any] = {"strict": strict, "cast_dtype": True}
    found = None if tag is None else folder / str(tag)
    if found is None and not api.has_checkpoint(folder) and step_dirs.is_nxd_run(folder):
        found = step_dirs.newest_tag(folder)
    if found is not None and not is_native(found) and step_dirs.is_tag(found):
        options["keys"] = _keys(found, layout, model, optimizer)
        return api.load_checkpoint(found, None, model, optimizer, scheduler, **options)
    if found is not None and not is_checkpoint(found):
        raise NoCheckpointError(f"there is no checkpoint {found}")
    return api.load_checkpoint(folder, None if tag is None else str(tag), model, optimizer, scheduler, **options)


def has_checkpoint(dir_str: str | PathLike[str]) -> bool:
    """Whether a folder has a complete checkpoint, of holdfast or of NxD."""
    folder = local_path(dir_str)
    if api.has_checkpoint(folder):
        return True
    try:
        return step_dirs.is_nxd_run(folder) and bool(step_dirs.newest_tag(folder))
    except NoCheckpointError:
        return False


def finalize_checkpoint() -> None:
    """Wait for all saves that are under way; raises what went wrong with them."""
    api.finalize()


def _single_item(first: str | PathLike[str] | None, other: str | PathLike[str] | None) -> Path:
    if (first is None) == (other is None):
        raise InvalidArgumentError("one folder is needed: path, or checkpoint_dir_str")
    return local_path(first if first is not None else other)  # type: ignore[arg-type]


def _keys(found: Path, layout: str | PathLike[str] | None, model: Any, optimizer: Any) -> dict[str, str]:
    keys = {} if optimizer is not None else {WEIGHTS: "model", OPTIMIZER: "skip"}
    if layout is not None:
        return {**keys, LAYOUT: str(layout)}
    own = optimizer if isinstance(optimizer, torch.optim.Optimizer) else None
    noted = isinstance(model, nn.Module) and any(hasattr(one, "tensor_model_parallel") for one in model.parameters())
    if isinstance(model, nn.Module) and (noted or step_dirs.tensor_parallel_degree(found) == 1):
        keys[LAYOUT] = sharding_of(model, own)
    return keys
