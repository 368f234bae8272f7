"""The conversion target ``megatron``: a run's folder with one iteration of ``torch_dist``.

Megatron loads it into any layout of ranks. A source with a training step gives ``iter_…``, such as ``iter_0000100``,
another one ``release``. Of that Megatron takes the weights alone.

:mod:`rankless.formats.registry` names it, and a conversion makes one on every rank, of a source that
:mod:`rankless.megatron.writer.megatron_source` has adapted; see :class:`rankless.conversion.target.ConversionTarget`
for the ranks of its methods. The names and the values of the small files are Megatron's.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from rankless.conversion.fake_tensors import FakeTensors
from rankless.conversion.target import ConversionSource, FileLayout, FileSpan
from rankless.conversion.tensor_filter import Key
from rankless.conversion.torch_target import PlannedTorchFile
from rankless.dcp.writer.dcp_files import FlatState
from rankless.dcp.writer.dcp_target import DcpFiles
from rankless.engine.io.requests import KnownFragments
from rankless.formats.reader import Reader
from rankless.megatron.reader.megatron_directory import COMMON, DESCRIPTION, LATEST
from rankless.megatron.reader.megatron_reader import MegatronReader
from rankless.megatron.writer.common_state import build_common, list_objects
from rankless.megatron.writer.megatron_source import MegatronSource
from rankless.megatron.writer.parts import MODEL, StoredEntry
from rankless.megatron.writer.transposed_reader import TransposedReader
from rankless.ondisk.dtypes import dtype_width
from rankless.storage.posix import make_directory, sync_tree, write_small

#: The group of the checkpoint's tensors, which no source has.
_STORED = "stored"

#: The file that marks the folder as one of ``torch_dist``.
_DESCRIPTION = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


class MegatronTarget:
    """A run's folder of Megatron."""

    output_name = ""

    def __init__(self, source: ConversionSource, pending: Path) -> None:
        if not isinstance(source, MegatronSource):
            raise TypeError("the source was not adapted")
        self._source, self._pending = source, pending
        iteration = source.plan.iteration
        is_model_only = all(name.partition("/")[0] == MODEL for name in source.carried.shared)
        is_release = iteration is None or is_model_only
        self._name = "release" if is_release else f"iter_{iteration:07d}"
        self._latest = "release" if is_release else str(iteration)
        self._folder = pending / self._name
        stored = {(_STORED, key): entry.info for key, entry in source.plan.entries.items()}
        self._fakes = FakeTensors({**source.tensor_infos, **stored})
        trees: dict[str, Any] = self._fakes.build_tree(
            source, lambda _, values: {"common": build_common(source, values), "objects": list_objects(values)}
        )
        self._common = PlannedTorchFile(trees["common"])
        self._tensors = DcpFiles(self._folder, self._flatten(trees["objects"]), self._fakes, source.limit)

    def _flatten(self, objects: dict[str, Any]) -> FlatState:
        entries = self._source.plan.entries
        values: dict[str, Any] = {key: self._fakes.make_tensor((_STORED, key)) for key in entries}
        values |= {key: [None] for key in self._source.plan.model.list_extra_states()}
        return FlatState(values | {key: [value] for key, value in objects.items()})

    def create_files(self) -> Collection[int]:
        """See :class:`rankless.conversion.target.ConversionTarget`."""
        if isinstance(self._source.reader, TransposedReader):
            self._source.reader.verify_transposed()
        make_directory(self._folder)
        self._common.create_file(self._folder / COMMON)
        self._common.write_small_tensors(self._folder / COMMON)
        self._tensors.create()
        self._tensors.write_small_tensors()
        return ()

    def locate_tensors(self) -> FileLayout:
        """See :class:`rankless.conversion.target.ConversionTarget`."""
        dcp = self._tensors.locate_tensors()
        tensors: dict[Key, list[FileSpan]] = {}
        for (group, key), spans in dcp.tensors.items():
            if group == _STORED:
                for own, span in self._locate_parts(self._source.plan.entries[key], spans):
                    tensors.setdefault(own, []).append(span)
            else:
                tensors.setdefault((group, key), []).extend(spans)
        keys = {id(fake): key for key, fake in self._fakes.tensors_by_key.items()}
        for fake, offset in self._common.read_offsets(self._folder / COMMON).items():
            size = self._source.tensor_infos[keys[fake]].nbytes
            tensors.setdefault(keys[fake], []).append(FileSpan(len(dcp.files), offset, 0, size))
        return FileLayout([*dcp.files, self._folder / COMMON], tensors, [*dcp.header_bytes, 0])

    @staticmethod
    def _locate_parts(entry: StoredEntry, spans: Sequence[FileSpan]) -> Iterator[tuple[Key, FileSpan]]:
        """Yield the spans of the source's tensors that a tensor consists of."""
        width = dtype_width(entry.info.dtype)
        ordered = sorted(spans, key=lambda span: span.start)
        first = 0
        for part in entry.parts:
            start, stop = part.at * width, (part.at + part.size) * width
            while first < len(ordered) and ordered[first].stop <= start:
                first += 1
            for span in ordered[first:]:
                if span.start >= stop:
                    break
                low, high = max(start, span.start), min(stop, span.stop)
                shift = part.start * width - start
                own = FileSpan(span.file, span.offset + low - span.start, low + shift, high + shift)
                yield entry.sources[part.name], own

    def write_metadata(self, fragments: KnownFragments) -> None:
        """See :class:`rankless.conversion.target.ConversionTarget`."""
        del fragments  # these files have no room for CRCs
        write_small(self._folder / DESCRIPTION, json.dumps(_DESCRIPTION).encode())
        write_small(self._pending / LATEST, self._latest.encode())
        sync_tree(self._pending)

    def open_reader(self) -> Reader:
        """See :class:`rankless.conversion.target.ConversionTarget`."""
        return MegatronReader(self._pending, {})
