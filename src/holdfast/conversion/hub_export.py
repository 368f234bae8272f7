"""``export_model``: writes a model as a folder that can be uploaded to the Hugging Face Hub as it is."""

from __future__ import annotations

import json
import math
import re
import tempfile
from collections.abc import Collection, Iterator
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from holdfast.conversion.convert import parse_dtype
from holdfast.conversion.model_card import CardMetadata, CardSource, build_card
from holdfast.conversion.native_target import companion_files
from holdfast.conversion.pipeline import Conversion, ConversionRequest
from holdfast.conversion.tensor_filter import TensorFilter
from holdfast.engine.comm.session import RankGroup
from holdfast.errors import InvalidArgumentError
from holdfast.formats.native import NativeReader
from holdfast.formats.peft import read_adapter_files
from holdfast.formats.reader import Reader
from holdfast.observe.events import OnEvent, ignore_event
from holdfast.observe.warning import warn_caller
from holdfast.ondisk.files import ADAPTER_CONFIG, TensorInfo, is_adapter_group, parse_size
from holdfast.run.lookup import checkpoint_path, open_latest
from holdfast.run.tags import TagArgument, check_tag_argument
from holdfast.state.model.hf_config import has_adapters
from holdfast.state.training import NO_ADAPTERS, ONLY_ADAPTERS
from holdfast.storage import posix

_CONFIG, _CARD = "config.json", "README.md"

#: A name of a model on the Hub.
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*", re.ASCII)

#: The group of the model in a checkpoint.
_MODEL = "model"


def export_model(
    src: str | PathLike[str],
    folder: str | PathLike[str],
    *,
    tag: TagArgument = None,
    model: str | None = None,
    config: Any = None,
    tokenizer: Any = None,
    card: str | PathLike[str] | None = None,
    license: str = "",  # noqa: A002 - the Hub's name
    base_model: str = "",
    dtype: torch.dtype | str | None = None,
    max_shard_size: int | str = "5GB",
    on_event: OnEvent | None = None,
    process_group: dist.ProcessGroup | None = None,
    timeout: float = 600.0,
) -> Path:
    """Write a model as a folder for the Hugging Face Hub: weights, configuration, tokenizer and model card.

    The folder has what ``push_to_hub`` of a model uploads. Of a model with PEFT adapters it has the adapters, as PEFT
    stores them. Every rank of the process group calls it, and the ranks share the work. The folder appears in one step,
    when it is complete and verified.

    Args:
        src: A checkpoint of any format, or a run directory.
        folder: The output path; must not exist.
        tag: The checkpoint of the run: its tag or an alias, :func:`holdfast.best`, or :data:`holdfast.LATEST`, which is
            the default.
        model: The name of the model, if the checkpoint has several: ``"gen"``.
        config: The model's configuration: an object of transformers, a ``config.json``, or a folder with one. By
            default that of the checkpoint, which has it if the model is a ``PreTrainedModel``.
        tokenizer: A tokenizer or processor (an object with ``save_pretrained``), or a folder with the files of one.
        card: A Markdown file to use as model card. By default a card is written that names the checkpoint.
        license: The license, for the card: ``"apache-2.0"``.
        base_model: The model from which this one was trained, for the card: ``"org/name"``. By default the one that the
            configuration of an adapter names.
        dtype: The dtype of floating-point tensors; by default they are not cast.
        max_shard_size: The maximum bytes of tensors in one file.
        on_event: Is called with the progress: see :class:`holdfast.Progress`.
        process_group: The ranks that share the work.
        timeout: How many seconds ranks wait for each other before all of them fail.

    Returns:
        The path of the folder.

    Raises:
        InvalidArgumentError: An argument is not valid.
        NoCheckpointError: There is no checkpoint.
        TagExistsError: ``folder`` exists.
        CorruptCheckpointError: The source does not match its checksums, or the output is not what was written.
    """
    path, wanted = posix.local_path(src), check_tag_argument(tag)
    keys = {} if model is None else {_MODEL: model}
    if wanted is not None:
        path = checkpoint_path(path, wanted)
    final, reader = posix.local_path(folder), open_latest(path, keys)
    is_adapter = _has_only_adapters(reader)
    if is_adapter and dtype is not None:
        raise InvalidArgumentError("adapters are exported as they are: leave out dtype, or merge them into the model")
    tensor_filter = TensorFilter(
        dtype=parse_dtype(dtype), model_only=True, adapters=ONLY_ADAPTERS if is_adapter else NO_ADAPTERS
    )
    files = dict(_read_companions(config, tokenizer))
    has_config = _CONFIG in files or _CONFIG in dict(companion_files(reader))
    if not is_adapter and not has_config:
        warn_caller(f"{reader.path} has no {_CONFIG}, so from_pretrained cannot open the export: pass config=")
    if card is not None:
        files[_CARD] = posix.read_small(posix.local_path(card))
    else:
        metadata = CardMetadata("transformers" if has_config else "", license, base_model)
        metadata = _describe_adapter(reader, metadata) if is_adapter else metadata
        infos = tensor_filter.select_tensors(reader).infos.values()
        files[_CARD] = build_card(final.name, metadata, _describe_source(reader, model, infos)).encode()
    request = ConversionRequest(
        reader.path, final, "peft" if is_adapter else "hf", tensor_filter, keys, parse_size(max_shard_size), files
    )
    return Conversion(request, RankGroup(process_group).open_session(timeout), on_event or ignore_event).run(
        verify=True
    )


def _has_only_adapters(reader: Reader) -> bool:
    """Return whether the model has PEFT adapters, which are not merged into its weights."""
    names = reader.groups.get(_MODEL)
    return any(map(is_adapter_group, reader.groups)) and (names is None or has_adapters(names))


def _read_companions(config: Any, tokenizer: Any) -> Iterator[tuple[str, bytes]]:
    """Yield the names and the bytes of the files of a tokenizer, then of a configuration."""
    if tokenizer is not None:
        yield from _read_saved(tokenizer, "tokenizer")
    if hasattr(config, "to_json_string"):
        yield _CONFIG, config.to_json_string().encode()
    elif config is not None:
        path = _as_path(config, "config")
        path = path / _CONFIG if posix.is_directory(path) else path
        yield _CONFIG, posix.read_small(path)


def _read_saved(given: Any, name: str) -> Iterator[tuple[str, bytes]]:
    """Yield the files in a folder, or those that an object saves into one."""
    if not hasattr(given, "save_pretrained"):
        yield from _read_folder(_as_path(given, name))
        return
    with tempfile.TemporaryDirectory() as folder:
        given.save_pretrained(folder)
        yield from _read_folder(Path(folder))


def _read_folder(folder: Path) -> Iterator[tuple[str, bytes]]:
    if not posix.is_directory(folder):
        raise InvalidArgumentError(f"{folder} is not a folder")
    for file in posix.list_files(folder):
        if file.suffix not in {".safetensors", ".bin", ".pt", ".md"} and file.name != _CONFIG:
            yield file.name, posix.read_small(file)


def _as_path(given: Any, name: str) -> Path:
    if not isinstance(given, str | PathLike):
        raise InvalidArgumentError(f"{name} must be an object of transformers or a path; got {type(given).__name__}")
    return posix.local_path(given)


def _describe_adapter(reader: Reader, given: CardMetadata) -> CardMetadata:
    """Return the metadata of an adapter, whose configuration may name the base model."""
    configs = (data for name, data in read_adapter_files(reader).items() if Path(name).name == ADAPTER_CONFIG)
    named = (json.loads(data).get("base_model_name_or_path") for data in configs)
    # A path of the machine that trained is no name on the Hub.
    known = (name for name in named if isinstance(name, str) and _HUB_NAME.fullmatch(name))
    return replace(given, library_name="peft", base_model=given.base_model or next(known, ""))


def _describe_source(reader: Reader, model: str | None, infos: Collection[TensorInfo]) -> CardSource:
    dtypes = ", ".join(sorted({info.dtype for info in infos}))
    return CardSource(
        f"{reader.path.name}, model {model}" if model else reader.path.name,
        reader.manifest if isinstance(reader, NativeReader) else None,
        f"{sum(math.prod(info.shape) for info in infos):,} of {dtypes}",
    )
