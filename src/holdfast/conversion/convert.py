"""``convert``: from any format to any other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from holdfast.conversion.pipeline import Conversion, ConversionRequest
from holdfast.conversion.tensor_filter import Rename, TensorFilter
from holdfast.engine.comm.session import RankGroup
from holdfast.errors import InvalidArgumentError
from holdfast.formats.registry import LAYOUT, NXD, load_target
from holdfast.observe.events import OnEvent, ignore_event
from holdfast.ondisk.files import parse_size
from holdfast.ondisk.validation import check_keys
from holdfast.state.tensors import NAMES
from holdfast.storage.posix import local_path


def convert(
    src: str | PathLike[str],
    dst: str | PathLike[str],
    *,
    to: str,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    rename: Rename = None,
    dtype: torch.dtype | str | None = None,
    model_only: bool = False,
    keys: Mapping[str, str] | None = None,
    layout: str | PathLike[str] | None = None,
    max_shard_size: int | str = "5GB",
    verify: bool = True,
    on_event: OnEvent | None = None,
    process_group: dist.ProcessGroup | None = None,
    timeout: float = 600.0,
    **format_options: Any,
) -> Path:
    """Write a checkpoint of any format as one of another. A few buffers of memory do, whatever its size.

    Every rank of the process group calls it, and they share the work. ``dst`` appears in one step, when it is complete
    and verified; ``src`` is only read.

    Args:
        src: a checkpoint of any format that holdfast reads, or a run's folder: its latest.
        dst: a path where there is nothing yet.
        to: ``"native"`` (holdfast's), ``"hf"`` (a folder as transformers has it), ``"safetensors"`` (one such file),
            ``"torch"`` (one file of ``torch.save``: state dicts by name, or the model's alone), ``"dcp"`` (a folder of
            ``torch.distributed.checkpoint``), ``"lightning"`` (one ``.ckpt`` file), ``"lightning-folder"`` (as its FSDP
            and model-parallel strategies have it), ``"colossalai"`` (folders that ColossalAI's Booster loads: model,
            optimizer, scheduler, ``user_content``), ``"nxd"`` (a tag's folder as NeuronX Distributed has it; written by
            the first rank).
        include: patterns, as the shell has them, of parameters and buffers that are taken; all without it.
        exclude: patterns of those that are not.
        rename: a function from names to names, or regular expressions with what takes their place.
        dtype: of the model's floating-point tensors; those of optimizers stay as they are.
        model_only: nothing but the model.
        keys: where another system's checkpoint has what is not found by its name: ``{"model": "app.net"}``.
        layout: how tensor-parallel ranks of NxD divide parameters, where it is read or written: ``"llama"``,
            ``"mixtral"``, ``"gpt-neox"``, or the path of a spec file.
        max_shard_size: the most bytes of tensors in one file, where the format has several.
        verify: read back what was written. What is read is always verified if its format has checksums: holdfast's own,
            the CRC-32s of files of ``torch.save`` and of DCP, and the ``checksums.json`` of :mod:`holdfast.dcp`.
        on_event: is told how far it is: see :class:`holdfast.Progress`.
        process_group: the ranks that share the work.
        timeout: seconds that ranks wait for each other.
        format_options: of ``"nxd"``: ``tp_size``, ``pp_size``, ``dp_size`` (for a ZeRO-1 optimizer), ``xser``,
            ``master_weights``: see :class:`holdfast.compat.nxd.convert.options.NxdOptions`. There ``max_shard_size``,
            ``verify`` and ``on_event`` change nothing.

    Returns:
        The path of what was written.

    Raises:
        InvalidArgumentError: what cannot be done, such as writing into the source.
        TagExistsError: there is something at ``dst``.
        CorruptCheckpointError: the source is not what was saved, or the result not what was written.
    """
    check_keys(keys)
    model_only = model_only or to in {"hf", "safetensors"}
    choice = TensorFilter(_as_list(include), _as_list(exclude), rename, _dtype(dtype), model_only)
    known = {**(keys or {}), **({LAYOUT: str(layout)} if layout is not None else {})}
    wish = ConversionRequest(local_path(src), local_path(dst), to, choice, known, parse_size(max_shard_size))
    if to == NXD:
        options = {**format_options, LAYOUT: None if layout is None else str(layout)}
        path: Path = load_target(NXD)(wish, RankGroup(process_group).session(timeout), options)
        return path
    if format_options:
        raise InvalidArgumentError(f"there are no options {', '.join(format_options)} for {to!r}")
    return Conversion(wish, RankGroup(process_group).session(timeout), on_event or ignore_event).run(verify=verify)


def _as_list(patterns: str | Sequence[str] | None) -> tuple[str, ...]:
    return () if patterns is None else (patterns,) if isinstance(patterns, str) else tuple(patterns)


def _dtype(given: torch.dtype | str | None) -> str | None:
    """A dtype's name in safetensors files."""
    found: Any = getattr(torch, given, None) if isinstance(given, str) else given
    if given is None:
        return None
    if not isinstance(found, torch.dtype) or not found.is_floating_point or found not in NAMES:
        raise InvalidArgumentError(f"dtype is a floating-point one such as 'bfloat16', not {given!r}")
    return NAMES[found]
