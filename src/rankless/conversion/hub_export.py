"""``export_model``: writes a model as a folder that can be uploaded to the Hugging Face Hub as it is."""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rankless.conversion.convert import parse_dtype
from rankless.conversion.hub_files import CARD, read_card, read_config, read_tokenizer
from rankless.conversion.model_card import CardMetadata, CardSource, build_card
from rankless.conversion.native_target import companion_files
from rankless.conversion.pipeline import Conversion, ConversionRequest
from rankless.conversion.tensor_filter import TensorFilter
from rankless.engine.comm.collective_call import collective_call
from rankless.engine.comm.session import RankGroup, WritingRanks, require_equal
from rankless.engine.plan.tensor_specs import digest_bytes
from rankless.errors import InvalidArgumentError
from rankless.formats.adapter_configs import read_adapter_configs
from rankless.formats.native import MODEL, NativeReader
from rankless.formats.reader import Reader
from rankless.observe.events import OnEvent, ignore_event
from rankless.observe.warning import warn_caller
from rankless.ondisk.data_files import (
    ADAPTER_CONFIG,
    CONFIG,
    NO_ADAPTERS,
    ONLY_ADAPTERS,
    TensorInfo,
    is_adapter_group,
    parse_size,
)
from rankless.ondisk.strict_json import parse_json
from rankless.ondisk.weight_names import DIFFUSERS, find_stems
from rankless.ondisk.wrapper_prefixes import has_adapters
from rankless.run.lookup import open_latest
from rankless.run.tag_arguments import TagArgument, check_tag_argument
from rankless.storage.location import parse_location

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

#: A name of a model on the Hub.
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*", re.ASCII)


def export_model(
    path: str | PathLike[str],
    output: str | PathLike[str],
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

    The folder has the files that ``push_to_hub`` of a model uploads. Of a model with PEFT adapters it has the adapters,
    as PEFT stores them. Every rank of the process group calls it, and the ranks share the work. The folder appears in
    one step, when it is complete and verified.

    Args:
        path: A checkpoint of any format, or a run directory.
        output: The folder to write; must not exist.
        tag: The checkpoint of the run: its tag or an alias, :func:`rankless.best`, or :data:`rankless.LATEST`, which is
            the default.
        model: The name of the model, if the checkpoint has several: ``"gen"``.
        config: The model's configuration: an object of transformers, a ``config.json``, or a folder with one. By
            default the checkpoint's configuration, which it has if the model is a ``PreTrainedModel``.
        tokenizer: A tokenizer or processor (an object with ``save_pretrained``), or a folder with the files of one.
        card: A Markdown file to use as model card. By default a card is written that names the checkpoint.
        license: The license, for the card: ``"apache-2.0"``.
        base_model: The model that this one was trained from, for the card: ``"org/name"``. By default the one that the
            configuration of an adapter names.
        dtype: The dtype of floating-point tensors; by default they are not cast.
        max_shard_size: The maximum bytes of tensors in one file.
        on_event: Is called with the progress: see :class:`rankless.Progress`.
        process_group: The ranks that share the work.
        timeout: How many seconds ranks wait for each other before all of them fail.

    Returns:
        The path of the folder.

    Raises:
        InvalidArgumentError: An argument is not valid.
        NoCheckpointError: There is no checkpoint.
        TagExistsError: ``output`` exists.
        CorruptCheckpointError: The source does not match its checksums, or the output has other bytes than were
            written.
    """
    with collective_call(process_group, timeout):
        options = _ExportOptions(tag, model, config, tokenizer, card, CardMetadata("", license, base_model), dtype)

        def plan() -> _PlannedExport:
            return options.plan(parse_location(path), parse_location(output), parse_size(max_shard_size))

        def compare(posted: list[bytes]) -> bytes:
            return require_equal("the arguments of the export", [raw.decode() for raw in posted]).encode()

        ranks = RankGroup(process_group)
        session = ranks.open_session(timeout)
        planned, _ = session.vote(
            "preparing the export", plan, lambda made: _describe_request(made.request).encode(), compare
        )
        if planned.lacks_config and session.rank == 0:
            warn_caller(
                f"{planned.request.source} has no {CONFIG}, so from_pretrained of transformers cannot open the export: "
                "for a model of transformers, pass its config (config=, or --config of the command)"
            )
        return Conversion(planned.request, WritingRanks(ranks, session), on_event or ignore_event).run(verify=True)


class _PlannedExport(NamedTuple):
    """The conversion, and whether its output is a model that transformers cannot open."""

    request: ConversionRequest
    lacks_config: bool


@dataclass(frozen=True)
class _ExportOptions:
    """The arguments of an export that determine its files."""

    tag: TagArgument
    model: str | None
    config: Any
    tokenizer: Any
    card: Any
    metadata: CardMetadata
    dtype: torch.dtype | str | None

    def plan(self, path: Path, final: Path, limit: int) -> _PlannedExport:
        """Return the conversion, with all small files."""
        wanted, keys = check_tag_argument(self.tag), {} if self.model is None else {MODEL: self.model}
        reader = open_latest(path, keys, wanted)
        is_adapter = _has_only_adapters(reader)
        if is_adapter and self.dtype is not None:
            raise InvalidArgumentError(
                "adapters are exported as they are: leave out dtype, or merge them into the model"
            )
        adapters = ONLY_ADAPTERS if is_adapter else NO_ADAPTERS
        tensor_filter = TensorFilter(dtype=parse_dtype(self.dtype), model_only=True, adapters=adapters)
        files = {} if self.tokenizer is None else read_tokenizer(self.tokenizer)
        files |= {} if self.config is None else {CONFIG: read_config(self.config)}
        config = files.get(CONFIG, dict(companion_files(reader)).get(CONFIG))
        files[CARD] = self._make_card(reader, final.name, tensor_filter, config, is_adapter)
        to = "peft" if is_adapter else "hf"
        request = ConversionRequest(reader.path, final, to, tensor_filter, keys, limit, files, reader.fingerprint)
        return _PlannedExport(request, lacks_config=not is_adapter and config is None)

    def _make_card(
        self, reader: Reader, title: str, tensor_filter: TensorFilter, config: bytes | None, is_adapter: bool
    ) -> bytes:
        if self.card is not None:
            return read_card(self.card)
        library = "diffusers" if find_stems(config or b"") == DIFFUSERS else "transformers"
        metadata = replace(self.metadata, library_name=library if config else "")
        metadata = _describe_adapter(reader, metadata) if is_adapter else metadata
        infos = tensor_filter.select_tensors(reader).infos.values()
        return build_card(title, metadata, _describe_source(reader, self.model, infos)).encode()


def _describe_request(request: ConversionRequest) -> str:
    """Return the arguments that must be the same on all ranks, as a text."""
    files = {name: digest_bytes(data, 8).hex() for name, data in sorted(request.small_files.items())}
    return (
        f"{request.final} in files of {request.limit} bytes from {request.source} ({request.fingerprint}), "
        f"dtype {request.tensor_filter.dtype}, files {files}"
    )


def _has_only_adapters(reader: Reader) -> bool:
    """Return whether the model has PEFT adapters, which are not merged into its weights."""
    names = reader.groups.get(MODEL)
    return any(map(is_adapter_group, reader.groups)) and (names is None or has_adapters(names))


def _describe_adapter(reader: Reader, given: CardMetadata) -> CardMetadata:
    """Return the metadata of an adapter. Its configuration may name the base model."""
    contents = (
        parse_json(data, f"{reader.path}: {name}")
        for name, data in read_adapter_configs(reader).items()
        if Path(name).name == ADAPTER_CONFIG
    )
    named = (content.get("base_model_name_or_path") for content in contents if isinstance(content, dict))
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
