"""The files that a conversion reads: those with the tensors of a checkpoint, and with arrays among its values.

:mod:`rankless.conversion.pipeline` makes one on each rank, inside the vote on the writing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rankless.conversion.target import ConversionSource
from rankless.conversion.tensor_filter import Key
from rankless.edits.cast_elements import cast_elements
from rankless.engine.io.requests import ProviderOf
from rankless.engine.io.source_reader import SourceReader
from rankless.engine.io.streamed_tensor import ReadFragments, StreamedTensor
from rankless.engine.io.tensor_sources import Source
from rankless.formats.reader import FileExtent
from rankless.ondisk.data_files import TensorInfo


class InputFiles:
    """The input files of a conversion, by number, and the places of tensors in them."""

    def __init__(self, source: ConversionSource, fragments_read: ReadFragments) -> None:
        self._source, self._fragments_read = source, fragments_read
        self.files: list[Source] = []
        self._numbers: dict[Source, int] = {}
        for key in source.tensor_infos:
            for extent in self._find_extents(key, 0, self._stored_info(key).nbytes):
                if extent.file not in self._numbers:
                    self._numbers[extent.file] = len(self.files)
                    self.files.append(extent.file)

    def tensor_providers(self, tensors: Sequence[Key], opened: SourceReader) -> ProviderOf:
        """Return a function that provides the bytes of a tensor by its number."""
        infos = self._source.tensor_infos

        def provider_of(number: int) -> StreamedTensor:
            key = tensors[number]
            stored, dtype = self._stored_info(key).dtype, infos[key].dtype
            locate = self._extent_locator(key)
            return StreamedTensor(number, stored, dtype, locate, opened, self._fragments_read, cast_elements)

        return provider_of

    def _stored_info(self, key: Key) -> TensorInfo:
        source_key = self._source.selected.sources.get(key)
        if source_key is None:
            return self._source.carried.arrays[key[1]].info
        return self._source.reader.groups[source_key[0]][source_key[1]]

    def _find_extents(self, key: Key, start: int, stop: int) -> Sequence[FileExtent]:
        source_key = self._source.selected.sources.get(key)
        if source_key is None:
            return self._source.carried.arrays[key[1]].find_extents(start, stop)
        return self._source.reader.find_extents(*source_key, start, stop)

    def _extent_locator(self, key: Key) -> Callable[[int, int], list[tuple[int, int, int, int]]]:
        return lambda start, stop: [
            (self._numbers[extent.file], extent.offset, extent.start, extent.stop)
            for extent in self._find_extents(key, start, stop)
        ]
