"""The tensors of a stored model by number, in the order of the files, and the lazy tensors of them.

:class:`~rankless.inference.weights_loader.WeightsLoader` has one on each rank. The numbers are sent between ranks, so
the order must follow from the files alone.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from rankless.formats.native import MODEL
from rankless.formats.reader import Reader
from rankless.inference.lazy_tensor import LazyTensor, Loader, StoredContent
from rankless.ondisk.data_files import TensorInfo
from rankless.state.tensor_views import DTYPES


class StoredTensors:
    """The tensors of the model that a reader has. All ranks give a tensor the same number."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self.names = sorted(reader.groups[MODEL], key=self._file_position)
        self.numbers = {name: number for number, name in enumerate(self.names)}
        self._tied: dict[str, list[str]] = {}
        for tied, name in reader.tied.get(MODEL, {}).items():
            self._tied.setdefault(name, []).append(tied)

    @property
    def sizes(self) -> list[int]:
        """The size of each tensor in bytes, by its number."""
        return [self.info(name).nbytes for name in self.names]

    def _file_position(self, name: str) -> tuple[str, int]:
        extents = self._reader.find_extents(MODEL, name, 0, self.info(name).nbytes)
        return (str(extents[0].file), extents[0].offset) if extents else ("", 0)

    def info(self, name: str) -> TensorInfo:
        """Return the description of a stored tensor."""
        return self._reader.groups[MODEL][name]

    def keys(self, name: str) -> tuple[str, ...]:
        """Return the names that the model has for a stored tensor: several if it is tied.

        For example, ``embed.weight`` and ``lm_head.weight``.
        """
        return name, *self._tied.get(name, ())

    def make_meta(self, name: str) -> torch.Tensor:
        """Return a meta tensor of the shape and the dtype of a stored one."""
        info = self.info(name)
        return torch.empty(info.shape, dtype=DTYPES[info.dtype], device="meta")

    def iterate_lazy(self, number: int, loader: Loader) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each name of a stored tensor, which are several if it is tied, with a lazy tensor of ``loader``."""
        name = self.names[number]
        for key in self.keys(name):
            yield key, self.make_lazy(name, loader)

    def make_lazy(self, name: str, loader: Loader) -> LazyTensor:
        """Return a lazy tensor of ``loader``."""
        with torch.inference_mode(mode=False):  # views of it may be used outside of that mode
            meta = self.make_meta(name)
            return LazyTensor(StoredContent(loader, name, meta, meta), meta, meta)
