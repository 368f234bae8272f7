"""The conversion target ``native``, and the Hugging Face targets, which publish only its ``model/`` folder.

A conversion makes one on every rank; see :class:`rankless.conversion.target.ConversionTarget` for the ranks of its
methods. It writes the same files and headers as a save.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from msgspec import structs

from rankless.conversion.config_dtype import set_config_dtype
from rankless.conversion.equal_files import find_equal_files, link_equal_files
from rankless.conversion.target import ConversionSource, FileLayout, FileSpan
from rankless.engine.io.checkpoint_files import NOTHING_UNCHANGED, CheckpointFiles
from rankless.engine.io.requests import KnownFragments
from rankless.engine.plan.save_plan import SavePlan
from rankless.errors import InvalidArgumentError
from rankless.formats.adapter_configs import read_adapter_configs
from rankless.formats.contained_paths import check_contained
from rankless.formats.edited_reader import EditedReader
from rankless.formats.hub_layout_file import layout_file
from rankless.formats.huggingface import SINGLE, HuggingFaceReader
from rankless.formats.native import RANKS, STATE, NativeReader
from rankless.formats.reader import EditedCheckpoint, Reader, original_reader
from rankless.formats.remapped_reader import underlying_reader
from rankless.formats.sharded.model_files import MODELING
from rankless.ondisk import values
from rankless.ondisk.data_files import CONFIG, HUB_LAYOUT, TensorInfo, is_adapter_group, pack_files
from rankless.ondisk.dtypes import TORCH_NAMES
from rankless.ondisk.manifest import FileRecord, Manifest
from rankless.ondisk.value_files import build_ranks_file, build_state_file
from rankless.ondisk.weight_names import find_stems, rename_weights
from rankless.ondisk.wrapper_prefixes import has_adapters
from rankless.run.catalog import independent_identity
from rankless.save.build_manifest import CheckpointLabel, build_manifest
from rankless.storage.store import store_of

#: The group with the folder that transformers opens.
_MODEL = "model"

#: Small files of the top folder that are made anew.
_MADE_ANEW = frozenset({STATE, RANKS, "state.safetensors.index.json", "ranks.safetensors.index.json"})

#: Files next to weights that make a folder a transformers model.
_COMPANIONS = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model"),
    *("special_tokens_map.json", "vocab.json", "vocab.txt", "merges.txt", "preprocessor_config.json"),
    *("processor_config.json", "chat_template.jinja", "added_tokens.json"),
)


class NativeTarget:
    """A checkpoint's folder in a run's folder."""

    output_name = ""

    def __init__(self, source: ConversionSource, pending: Path, final: Path) -> None:
        self._source, self._final = source, final
        self._files = CheckpointFiles(pending, _plan_save(source))
        #: On rank 0, the files that the output shares with its source.
        self._unchanged = NOTHING_UNCHANGED

    def create_files(self) -> Collection[int]:
        """See :class:`rankless.conversion.target.ConversionTarget`. Files that an edit does not change are linked."""
        if not self.output_name and not store_of(self._final).is_remote:
            self._unchanged = link_equal_files(self._source, self._files)
        self._files.create_files(existing=self._unchanged.linked)
        return self._unchanged.linked

    def count_equal_bytes(self) -> int:
        """Return how many bytes of files will probably be links, and take no space."""
        if self.output_name or store_of(self._final).is_remote:
            return 0
        files = self._files.plan.files
        equal = find_equal_files(self._source, self._files.plan)
        return sum(entry.nbytes for number in equal for entry in files[number].entries.values())

    def locate_tensors(self) -> FileLayout:
        """See :class:`rankless.conversion.target.ConversionTarget`."""
        plan = self._files.plan
        starts = (
            [FileSpan(number, file.data_start + entry.data_offsets[0], 0, entry.nbytes)]
            for number, file in enumerate(plan.files)
            for entry in file.entries.values()
        )
        files = [self._files.folder / file.path for file in plan.files]
        tensors = dict(zip(plan.tensors, starts, strict=True))
        return FileLayout(files, tensors, [file.data_start for file in plan.files])

    def write_metadata(self, fragments: KnownFragments) -> None:
        """See :class:`rankless.conversion.target.ConversionTarget`."""
        carried, is_plain_model = self._source.carried, not has_adapters(_model_names(self._source))
        companions = self._adapt_dtype(companion_files(self._source.reader))
        small = {
            STATE: build_state_file(carried.shared, {}),
            RANKS: build_ranks_file([values.to_json(rank_values) for rank_values in carried.ranks], carried.shared),
            **{f"{_MODEL}/{name}": data for name, data in companions if is_plain_model},
        }
        small |= self.adapter_files() | self._hub_layout()
        small = {**self._own_files(), **small}
        given = self._adapt_dtype(self._source.small_files.items())
        small |= {f"{self.output_name}/{name}": data for name, data in given}
        self._files.finalize(fragments, small, self._build_manifest, self._unchanged)

    def _adapt_dtype(self, files: Iterable[tuple[str, bytes]]) -> Iterator[tuple[str, bytes]]:
        """Yield small files. A configuration names the dtype that the model is cast to."""
        dtype = _find_cast(self._source)
        for name, data in files:
            if name == CONFIG and dtype is not None:
                data = set_config_dtype(data, TORCH_NAMES[dtype])  # noqa: PLW2901
            yield name, data

    def adapter_files(self) -> dict[str, bytes]:
        """Return the small files of the adapters that are converted, by their paths in a checkpoint."""
        selects_adapters = any(map(is_adapter_group, self._source.selected.group_names()))
        return read_adapter_configs(original_reader(self._source.reader)) if selects_adapters else {}

    def _own_files(self) -> dict[str, bytes]:
        """Return the files that the user has saved with the source, next to the folders of tensors."""
        original = original_reader(self._source.reader)
        if self.output_name or not isinstance(original, NativeReader):
            return {}
        records = original.manifest.files
        own = (name for name in records.keys() - _MADE_ANEW if "/" not in name and not records[name].header_size)
        return {name: original.read_small_file(name) for name in own}

    def _hub_layout(self) -> dict[str, bytes]:
        """Return the layout for the Hub, by its path in the checkpoint, if all tensors that it names are unchanged."""
        reader, sources = self._source.reader, self._source.selected.sources
        raw = layout_file(reader)
        is_unchanged = all(
            sources.get(key) == key for key in ((_MODEL, name) for name in reader.groups.get(_MODEL, ()))
        )
        return {f"{_MODEL}/{HUB_LAYOUT}": raw} if raw is not None and is_unchanged else {}

    def open_reader(self) -> Reader:
        """See :class:`rankless.conversion.target.ConversionTarget`."""
        return NativeReader(self._files.folder)

    def _build_manifest(self, files: dict[str, FileRecord]) -> Manifest:
        reader, identity = self._source.reader, independent_identity(self._final.parent)
        original = original_reader(reader)
        source_manifest = original.manifest if isinstance(original, NativeReader) else None
        before = (source_manifest.edits if source_manifest else ()) or ()
        identity = structs.replace(
            identity, edits=reader.edits if isinstance(reader, EditedCheckpoint) else tuple(before)
        )
        label = CheckpointLabel(
            tag=self._final.name,
            identity=identity,
            time=round(time.time(), 6),
            ranks=len(self._source.carried.ranks),
            step=self._source.step,
            metrics=source_manifest.metrics if source_manifest else {},
        )
        return build_manifest(label, files)


class HuggingFaceTarget(NativeTarget):
    """A Hugging Face model folder. It contains only the model."""

    output_name = _MODEL

    def __init__(self, source: ConversionSource, pending: Path, final: Path) -> None:
        groups = source.selected.group_names()
        if groups != [_MODEL]:
            raise InvalidArgumentError(
                f"the output contains one model, but the source has {', '.join(groups) or 'none'}: "
                'select one with keys={"model": …}, on the command line --key model=…, or leave out the others'
            )
        super().__init__(replace(source, stem=self._find_stem(source)), pending, final)
        self._check_names()

    def _find_stem(self, source: ConversionSource) -> str:
        """Return the stem of the files that the library of the configuration opens."""
        companions = dict(companion_files(source.reader))
        return find_stems(source.small_files.get(CONFIG, companions.get(CONFIG, b"")))[0]

    def _check_names(self) -> None:
        """Raise ``InvalidArgumentError`` if transformers would open the model with newly initialized weights."""
        if has_adapters(_model_names(self._source)):
            raise InvalidArgumentError(
                f"{self._source.reader.path} contains a model with PEFT adapters, which is not a Hugging Face "
                "checkpoint: merge the adapters into it (--merge, rankless.merge_adapters), or convert to 'peft', "
                "'safetensors' or 'torch'"
            )

    def open_reader(self) -> Reader:
        """See :class:`rankless.conversion.target.ConversionTarget`."""
        return HuggingFaceReader(self._files.folder / self.output_name)


class SafetensorsTarget(HuggingFaceTarget):
    """One safetensors file of any size."""

    output_name = f"{_MODEL}/{SINGLE}"

    def __init__(self, source: ConversionSource, pending: Path, final: Path) -> None:
        super().__init__(replace(source, limit=sys.maxsize), pending, final)

    def _find_stem(self, source: ConversionSource) -> str:
        """Return the stem of the only file, which gets the name of the output."""
        return source.stem

    def _check_names(self) -> None:
        """Accept any names: transformers does not open a single file."""


def _plan_save(source: ConversionSource) -> SavePlan:
    groups: dict[str, dict[str, TensorInfo]] = {}
    for (group, name), info in source.tensor_infos.items():
        groups.setdefault(group, {})[name] = info
    packed = {
        group: pack_files(group, infos, source.selected.tied.get(group, {}), source.limit)
        for group, infos in sorted(groups.items())
    }
    if _MODEL in packed:
        packed[_MODEL] = [
            structs.replace(file, notes=source.notes) for file in rename_weights(packed[_MODEL], source.stem)
        ]
    files = [file for group_files in packed.values() for file in group_files]
    tensors = [(group, name) for group, group_files in packed.items() for file in group_files for name in file.entries]
    return SavePlan(files, packed, tensors, (), (), {}, needs_exchange=False)


def _find_cast(source: ConversionSource) -> str | None:
    """Return the dtype that tensors of the model are cast to, or ``None`` if none is cast."""
    for key, (group, name) in source.selected.sources.items():
        dtype = source.selected.infos[key].dtype
        if key[0] == _MODEL and dtype != source.reader.groups[group][name].dtype:
            return dtype
    return None


def _model_names(source: ConversionSource) -> list[str]:
    return [name for group, name in source.tensor_infos if group == _MODEL]


def companion_files(reader: Reader) -> Iterator[tuple[str, bytes]]:
    """Iterate over the companion files of the source: of transformers, rankless, or ColossalAI's scripts.

    The files of an edited checkpoint follow the edit: for example, ``layers`` changes the number of layers in
    ``config.json``. Targets and exports call it on each rank when they are made, and targets on rank 0 when they write.
    """
    reader = underlying_reader(reader)
    if isinstance(reader, EditedReader):
        for name, data in companion_files(reader.original):
            yield name, reader.content.change_config(data) if name == CONFIG else data
        return
    if isinstance(reader, NativeReader):  # the manifest names all its files
        for prefix in ("", f"{reader.model_folder.relative_to(reader.path)}/"):
            for name in _COMPANIONS:
                if prefix + name in reader.manifest.files:
                    yield name, reader.read_small_file(prefix + name)
        return
    for folder in (reader.path, reader.path / _MODEL, reader.path / MODELING):
        for name in _COMPANIONS:
            store = store_of(folder)
            if store.is_file(folder / name):
                check_contained(folder / name, reader.path)
                yield name, store.read_small(folder / name)
