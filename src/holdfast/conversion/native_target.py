"""Into a checkpoint of ours; and into a Hugging Face folder, which is what lies in it under ``model/``."""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from holdfast._version import __version__
from holdfast.conversion.target import ConversionSource, FileLayout, FileSpan
from holdfast.engine.io.commit import StagingDirectory
from holdfast.engine.io.requests import Fragments
from holdfast.engine.plan.save_plan import SavePlan
from holdfast.errors import InvalidArgumentError
from holdfast.formats.huggingface import SINGLE, HuggingFaceReader
from holdfast.formats.native import RANKS, STATE, NativeReader
from holdfast.formats.reader import Reader
from holdfast.formats.sharded.model_files import MODELING
from holdfast.ondisk import manifest, values
from holdfast.ondisk.files import TensorInfo, pack_files
from holdfast.ondisk.manifest import FileRecord, Manifest, Provenance
from holdfast.run.catalog import next_identity
from holdfast.state.capture import ranks_file, state_file
from holdfast.state.model.hf_config import has_adapters
from holdfast.storage.directories import DirectoryLock
from holdfast.storage.posix import is_file, read_small

#: The group whose folder transformers opens.
_MODEL = "model"

#: Files beside weights that make a folder a model of transformers'.
_COMPANIONS = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model"),
    *("special_tokens_map.json", "vocab.json", "vocab.txt", "merges.txt", "preprocessor_config.json"),
    *("processor_config.json", "chat_template.jinja", "added_tokens.json"),
)


class NativeTarget:
    """A checkpoint's folder, in the run's folder that it lies in."""

    def __init__(self, material: ConversionSource, draft: Path, final: Path) -> None:
        self._material, self._final = material, final
        self._draft = StagingDirectory(draft, _plan(material))
        self._lock: DirectoryLock | None = None

    def prepare(self) -> None:
        """See :class:`holdfast.conversion.target.ConversionTarget`."""
        self._lock = self._draft.open()

    def places(self) -> FileLayout:
        """See :class:`holdfast.conversion.target.ConversionTarget`."""
        plan = self._draft.plan
        starts = (
            [FileSpan(number, file.data_start + entry.data_offsets[0], 0, entry.nbytes)]
            for number, file in enumerate(plan.files)
            for entry in file.entries.values()
        )
        files = [self._draft.folder / file.path for file in plan.files]
        return FileLayout(files, dict(zip(plan.tensors, starts, strict=True)))

    def finish(self, fragments: Fragments) -> None:
        """See :class:`holdfast.conversion.target.ConversionTarget`."""
        carried, fits = self._material.carried, not has_adapters(_model_names(self._material))
        small = {
            STATE: state_file(carried.shared, {}),
            RANKS: ranks_file([values.to_json(own) for own in carried.ranks], carried.shared),
            **{f"{_MODEL}/{name}": data for name, data in companion_files(self._material.reader.path) if fits},
        }
        self._draft.complete(fragments, small, self._describe)

    def reader(self) -> Reader:
        """See :class:`holdfast.conversion.target.ConversionTarget`."""
        return NativeReader(self.made)

    @property
    def made(self) -> Path:
        """See :class:`holdfast.conversion.target.ConversionTarget`."""
        return self._draft.folder

    def close(self) -> None:
        """See :class:`holdfast.conversion.target.ConversionTarget`."""
        if self._lock is not None:
            self._lock.close()

    def _describe(self, files: dict[str, FileRecord]) -> Manifest:
        source, following = self._material.reader, next_identity(self._final.parent, frozenset())
        of = source.manifest if isinstance(source, NativeReader) else None
        ranks = len(self._material.carried.ranks)
        return Manifest(
            format="holdfast",
            version=manifest.VERSION,
            tag=self._final.name,
            id=following.id,
            run=following.run,
            sequence=following.sequence,
            time=round(time.time(), 6),
            step=of.step if of else None,
            metrics=of.metrics if of else {},
            provenance=Provenance(__version__, str(torch.__version__), platform.python_version(), ranks),
            files=files,
        )


class HuggingFaceTarget(NativeTarget):
    """A folder of weights as transformers has it. Of all that is no model, nothing goes into it."""

    def __init__(self, material: ConversionSource, draft: Path, final: Path) -> None:
        groups = material.chosen.groups()
        if groups != [_MODEL]:
            raise InvalidArgumentError(
                f"a Hugging Face folder holds one model, and there are {', '.join(groups) or 'none'}: "
                "choose one by keys, or convert with model_only"
            )
        super().__init__(material, draft, final)
        self._check_names()

    def _check_names(self) -> None:
        """Raise ``InvalidArgumentError`` for a model that transformers would open with weights that it makes up."""
        if has_adapters(_model_names(self._material)):
            raise InvalidArgumentError(
                f"{self._material.reader.path} holds a model with PEFT's adapters in it, which is no Hugging Face "
                "checkpoint: load it into that PEFT model, and let save_pretrained() write the adapter; or convert to "
                "'safetensors' or 'torch'"
            )

    def reader(self) -> Reader:
        """See :class:`holdfast.conversion.target.ConversionTarget`."""
        return HuggingFaceReader(self.made)

    @property
    def made(self) -> Path:
        """See :class:`holdfast.conversion.target.ConversionTarget`."""
        return super().made / _MODEL


class SafetensorsTarget(HuggingFaceTarget):
    """One safetensors file, whatever its size."""

    def __init__(self, material: ConversionSource, draft: Path, final: Path) -> None:
        super().__init__(replace(material, limit=sys.maxsize), draft, final)

    def _check_names(self) -> None:
        """A file by itself has any names: transformers does not open it."""

    @property
    def made(self) -> Path:
        """See :class:`holdfast.conversion.target.ConversionTarget`."""
        return super().made / SINGLE


def _plan(material: ConversionSource) -> SavePlan:
    groups: dict[str, dict[str, TensorInfo]] = {}
    for (group, name), info in material.infos.items():
        groups.setdefault(group, {})[name] = info
    packed = {
        group: pack_files(group, infos, material.chosen.tied.get(group, {}), material.limit)
        for group, infos in sorted(groups.items())
    }
    files = [file for shelf in packed.values() for file in shelf]
    tensors = [(group, name) for group, shelf in packed.items() for file in shelf for name in file.entries]
    return SavePlan(files, packed, tensors, (), (), {}, exchanges=False)


def _model_names(material: ConversionSource) -> list[str]:
    return [name for group, name in material.infos if group == _MODEL]


def companion_files(source: Path) -> Iterator[tuple[str, bytes]]:
    """What lies beside the weights of the source: in a folder of theirs, of ours, or of ColossalAI's scripts."""
    for folder in (source, source / _MODEL, source / MODELING):
        for name in _COMPANIONS:
            if is_file(folder / name):
                yield name, read_small(folder / name)
