"""The sources of the bytes of a conversion: the tensors of a checkpoint, and arrays that came with its values."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rankless.conversion.target import ConversionSource
from rankless.conversion.tensor_filter import Key
from rankless.engine.io.requests import ByteProvider, ProviderOf
from rankless.engine.io.source_reader import SourceReader
from rankless.engine.io.sources import Source
from rankless.engine.io.stream import ReadFragments, StreamedTensor
from rankless.engine.io.tensor_bytes import TensorBytes
from rankless.state.tensor_views import DTYPES


class SourceTable:
    """A table that numbers the source files of a conversion."""

    def __init__(self, source: ConversionSource, fragments_read: ReadFragments) -> None:
        self._source, self._fragments_read = source, fragments_read
        self.files: list[Source] = []
        self._numbers: dict[Source, int] = {}
        for key in source.selected.sources.values():
            for extent in source.reader.find_extents(*key, 0, source.reader.groups[key[0]][key[1]].nbytes):
                if extent.file not in self._numbers:
                    self._numbers[extent.file] = len(self.files)
                    self.files.append(extent.file)

    def tensor_providers(self, tensors: Sequence[Key], opened: SourceReader) -> ProviderOf:
        """Return a function that provides the bytes of a tensor by its number."""

        def provider_of(number: int) -> ByteProvider:
            key = tensors[number]
            source_key = self._source.selected.sources.get(key)
            if source_key is None:
                return TensorBytes(self._source.carried.arrays[key[1]])
            stored = DTYPES[self._source.reader.groups[source_key[0]][source_key[1]].dtype]
            dtype = DTYPES[self._source.selected.infos[key].dtype]
            return StreamedTensor(number, stored, dtype, self._extent_locator(source_key), opened, self._fragments_read)

        return provider_of

    def _extent_locator(self, source_key: Key) -> Callable[[int, int], list[tuple[int, int, int, int]]]:
        return lambda start, stop: [
            (self._numbers[extent.file], extent.offset, extent.start, extent.stop)
            for extent in self._source.reader.find_extents(*source_key, start, stop)
        ]
