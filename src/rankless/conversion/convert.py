"""``convert``: writes a checkpoint of any format in another format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankless.conversion.pipeline import Conversion, ConversionRequest
from rankless.conversion.tensor_filter import Rename, TensorFilter
from rankless.engine.comm.collective_call import collective_call
from rankless.engine.comm.session import RankGroup, WritingRanks
from rankless.errors import InvalidArgumentError
from rankless.formats.registry import LAYOUT, MEGATRON, NXD, load_target
from rankless.observe.events import OnEvent, ignore_event
from rankless.ondisk.data_files import NO_ADAPTERS, ONLY_ADAPTERS, SHARD_SIZE, WITH_ADAPTERS, parse_size
from rankless.ondisk.dtypes import BY_TORCH_NAME, FLOATING
from rankless.ondisk.validation import check_integer, check_keys
from rankless.storage.location import parse_location
from rankless.torch_import import explain_imports

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

#: Further names of dtypes in torch.
_ALIASES = {"half": "float16", "float": "float32", "double": "float64"}


def convert(
    path: str | PathLike[str],
    output: str | PathLike[str],
    *,
    to: str,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    rename: Rename = None,
    dtype: torch.dtype | str | None = None,
    model_only: bool = False,
    keys: Mapping[str, str] | None = None,
    layout: str | PathLike[str] | None = None,
    step: int | None = None,
    max_shard_size: int | str = SHARD_SIZE,
    verify: bool = True,
    on_event: OnEvent | None = None,
    process_group: dist.ProcessGroup | None = None,
    timeout: float = 600.0,
    **format_options: Any,
) -> Path:
    """Write a checkpoint of any format in another format. It needs a few buffers of memory, whatever the size.

    Every rank of the process group calls it, and the ranks share the work. ``output`` appears in one step, when it is
    complete and verified. ``path`` is only read.

    Args:
        path: a checkpoint of any format that rankless reads, or a run's folder for its latest checkpoint.
        output: the output path; must not exist.
        to: ``"native"`` (rankless's), ``"hf"`` (a Hugging Face model folder), ``"safetensors"`` (one such file),
            ``"torch"`` (one file of ``torch.save``: state dicts by name, or the model's alone), ``"dcp"`` (a folder of
            ``torch.distributed.checkpoint``), ``"lightning"`` (one ``.ckpt`` file), ``"lightning-folder"`` (as its FSDP
            and model-parallel strategies write it), ``"colossalai"`` (folders that ColossalAI's Booster loads: model,
            optimizer, scheduler, ``user_content``), ``"deepspeed-universal"`` (a folder that DeepSpeed loads with
            ``load_universal_checkpoint``), ``"nxd"`` (a tag's folder as NeuronX Distributed writes it;
            only rank 0 writes it), ``"megatron"`` (a run's folder with an iteration of Megatron's ``torch_dist``),
            ``"peft"`` (the PEFT adapters alone, as PEFT stores them). PyTorch need not be installed for ``"native"``,
            ``"hf"``, ``"safetensors"`` and ``"peft"``; these three have the model alone.
        include: shell patterns of the parameters and buffers to convert. Default: all.
        exclude: shell patterns of the parameters and buffers to leave out.
        rename: a function from names to names, or regular expressions with their replacements.
        dtype: the dtype of the model's floating-point tensors; optimizer state is not cast. With one of these four
            arguments the folder ``adapter`` of a checkpoint is left out, as its tensors are in the model, too.
        model_only: convert only the model.
        keys: the paths of components in another system's checkpoint that are not found by name:
            ``{"model": "app.net"}``.
        layout: the tensor-parallel layout of parameters if NxD is read or written: ``"llama"``, ``"mixtral"``,
            ``"gpt-neox"``, or the path of a spec file. If Megatron's format is read: ``"hf"`` for the names of
            transformers, which is the default with ``to="hf"``, or ``"megatron"``.
        step: the training step of the output, if the source does not name it or names another one. A ``Checkpointer``
            needs it to go on from the output. For formats with a place for it.
        max_shard_size: the maximum bytes of tensors in one file, for formats with several files.
        verify: read the output back. The source is always verified if its format has checksums: rankless's own, the
            CRC-32s of ``torch.save`` files and of DCP, and the ``checksums.json`` of :mod:`rankless.dcp`.
        on_event: is called with the progress: see :class:`rankless.Progress`.
        process_group: the ranks that share the work.
        timeout: how many seconds ranks wait for each other before all of them fail.
        format_options: options of ``"nxd"``: ``tp_size``, ``pp_size``, ``dp_size`` (for a ZeRO-1 optimizer), ``xser``,
            ``master_weights``: see :class:`rankless.nxd.writer.nxd_options.NxdOptions`. There ``max_shard_size``,
            ``verify`` and ``on_event`` have no effect. Options of ``"megatron"``: ``config``, ``vocab_divisible_by``,
            ``consumed_samples``, ``expert_parallel``: see
            :class:`rankless.megatron.writer.megatron_options.MegatronOptions`.

    Returns:
        The path of the output.

    Raises:
        InvalidArgumentError: an argument is not valid, or ``output`` is inside ``path``.
        TagExistsError: ``output`` exists.
        CorruptCheckpointError: the source does not match its checksums, or the output has other bytes than were
            written.
        TorchMissingError: the output needs PyTorch, which is not installed.
    """
    with collective_call(process_group, timeout):
        check_keys(keys)
        model_only = model_only or to in {"hf", "safetensors", "peft"}
        selects_parameters = bool(include or exclude or rename or dtype)
        if to == "peft" and selects_parameters:
            raise InvalidArgumentError(
                "adapters are converted as they are: leave out include, exclude, rename and dtype"
            )
        tensor_filter = TensorFilter(
            _as_list(include),
            _as_list(exclude),
            rename,
            parse_dtype(dtype),
            model_only,
            {"peft": ONLY_ADAPTERS, "native": WITH_ADAPTERS}.get(to, NO_ADAPTERS)
            if not selects_parameters
            else NO_ADAPTERS,
        )
        key_map = {**(keys or {}), **({LAYOUT: str(layout)} if layout is not None else {})}
        request = ConversionRequest(
            parse_location(path),
            parse_location(output),
            to,
            tensor_filter,
            key_map,
            parse_size(max_shard_size),
            options=format_options,
            step=None if step is None else check_integer("step", step, smallest=0),
        )
        if format_options and to not in {NXD, MEGATRON}:
            raise InvalidArgumentError(f"the format {to!r} has no options {', '.join(format_options)}: leave them out")
        with explain_imports(f"to={to!r}"):
            ranks = RankGroup(process_group)
            writing = WritingRanks(ranks, ranks.open_session(timeout))
            return _write_output(request, writing, on_event, verify=verify)


def _write_output(request: ConversionRequest, ranks: WritingRanks, on_event: OnEvent | None, *, verify: bool) -> Path:
    if request.to == NXD:
        written: Path = load_target(NXD)(request, ranks.session, {**request.options, LAYOUT: request.keys.get(LAYOUT)})
        return written
    return Conversion(request, ranks, on_event or ignore_event).run(verify=verify)


def _as_list(patterns: str | Sequence[str] | None) -> tuple[str, ...]:
    return () if patterns is None else (patterns,) if isinstance(patterns, str) else tuple(patterns)


def parse_dtype(given: torch.dtype | str | None) -> str | None:
    """Return the name of a dtype in safetensors files.

    For example, ``"BF16"`` for ``torch.bfloat16`` and ``"bfloat16"``.
    """
    if given is None:
        return None
    name = given if isinstance(given, str) else str(given).removeprefix("torch.") if "torch." in str(given) else ""
    dtype = BY_TORCH_NAME.get(_ALIASES.get(name, name))
    if dtype not in FLOATING:
        raise InvalidArgumentError(f"dtype must be a floating-point dtype such as 'bfloat16'; got {given!r}")
    return dtype
