"""Where the bytes of a conversion come from: the tensors of a checkpoint, and arrays that came with its values."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from holdfast.conversion.target import ConversionSource
from holdfast.conversion.tensor_filter import Key
from holdfast.engine.io.requests import ByteProvider, OriginOf
from holdfast.engine.io.source_reader import SourceReader
from holdfast.engine.io.sources import Source
from holdfast.engine.io.stream import ReadFragments, StreamedTensor
from holdfast.engine.io.tensor_bytes import TensorBytes
from holdfast.state.tensors import DTYPES


class SourceTable:
    """Numbers the files, or what reads like one."""

    def __init__(self, material: ConversionSource, heard: ReadFragments) -> None:
        self._material, self._heard = material, heard
        self.files: list[Source] = []
        self._numbers: dict[Source, int] = {}
        for key in material.chosen.sources.values():
            for extent in material.reader.extents(*key, 0, material.reader.groups[key[0]][key[1]].nbytes):
                if extent.file not in self._numbers:
                    self._numbers[extent.file] = len(self.files)
                    self.files.append(extent.file)

    def parts(self, tensors: Sequence[Key], opened: SourceReader) -> OriginOf:
        """The tensors, by their numbers."""

        def part_of(number: int) -> ByteProvider:
            key = tensors[number]
            source = self._material.chosen.sources.get(key)
            if source is None:
                return TensorBytes(self._material.carried.arrays[key[1]])
            stored = DTYPES[self._material.reader.groups[source[0]][source[1]].dtype]
            dtype = DTYPES[self._material.chosen.infos[key].dtype]
            return StreamedTensor(number, stored, dtype, self._locate(source), opened, self._heard)

        return part_of

    def _locate(self, source: Key) -> Callable[[int, int], list[tuple[int, int, int, int]]]:
        return lambda start, stop: [
            (self._numbers[one.file], one.offset, one.start, one.stop)
            for one in self._material.reader.extents(*source, start, stop)
        ]
