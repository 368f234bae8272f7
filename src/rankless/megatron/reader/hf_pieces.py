"""Tensors under the names of Hugging Face: rows of Megatron's tensors, in another order or transposed.

:class:`~rankless.megatron.reader.megatron_reader.MegatronReader` cuts tensors with it on each rank, and
:mod:`rankless.megatron.writer.hf_tensors` applies it backwards. Both must agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rankless.engine.plan.element_ranges import ElementRange
from rankless.errors import FormatError
from rankless.formats.chunked_tensor_slices import (
    Chunks,
    JoinedTensor,
    cut_slice,
    offset_along,
    offset_slices,
    permute_slices,
    slice_along,
)
from rankless.megatron.reader.model_args import ModelArgs
from rankless.ondisk.data_files import TensorInfo

#: Ranges of rows, one after another.
Rows = tuple[ElementRange, ...]


@dataclass(frozen=True)
class TransformersPiece:
    """The tensor ``target``: rows of ``source``, all of them without ``rows``, and transposed if that is asked for."""

    target: str
    source: str
    rows: Rows = ()
    is_transposed: bool = False

    def cut_from(self, stored: JoinedTensor, label: str) -> JoinedTensor:
        """Return the tensor. Raises ``FormatError`` if ``stored`` has fewer rows."""
        shape, chunks = stored.info.shape, stored.chunks
        if self.rows:
            if not shape or max(rows.stop for rows in self.rows) > shape[0]:
                raise FormatError(
                    f"{label}: {self.source!r} has the shape {list(shape)}, and by args it should have at least "
                    f"{max(rows.stop for rows in self.rows)} rows"
                )
            chunks = _select_rows(chunks, shape, self.rows)
            shape = (sum(rows.stop - rows.start for rows in self.rows), *shape[1:])
        if self.is_transposed and len(shape) > 1:
            chunks, shape = permute_slices(chunks, (1, 0)), (shape[1], shape[0])
        elif not self.rows:
            return stored
        return JoinedTensor(TensorInfo(stored.info.dtype, shape), chunks)


def _select_rows(chunks: Chunks, shape: tuple[int, ...], ranges: Rows) -> Chunks:
    selected: list[Chunks] = []
    reached = 0
    for rows in ranges:
        inside = cut_slice(chunks, slice_along(shape, 0, rows.start, rows.stop))
        selected.append(offset_slices(inside, offset_along(shape, 0, reached)))
        reached += rows.stop - rows.start
    return tuple(chunk for of_range in selected for chunk in of_range)


@dataclass(frozen=True)
class AttentionRows:
    """The rows of ``linear_qkv``: for each group of queries its queries, then one key and one value head."""

    groups: int
    queries: int
    head_dim: int

    @classmethod
    def from_args(cls, args: ModelArgs) -> AttentionRows:
        """Return the division that the arguments describe. Raises ``FormatError`` if they contradict each other."""
        heads = args.require_size("num_attention_heads")
        groups = args.require_size("num_query_groups", heads) if args.is_set("group_query_attention") else heads
        head_dim = args.require_size("kv_channels", max(1, args.require_size("hidden_size") // heads))
        if heads % groups:
            raise FormatError(f"{args.source}: {heads} attention heads are no multiple of {groups} query groups")
        return cls(groups, heads // groups, head_dim)

    @property
    def total(self) -> int:
        """The number of rows."""
        return self.groups * (self.queries + 2) * self.head_dim

    @property
    def query(self) -> Rows:
        """The rows of all queries."""
        return self._select(0, self.queries)

    @property
    def key(self) -> Rows:
        """The rows of all keys."""
        return self._select(self.queries, 1)

    @property
    def value(self) -> Rows:
        """The rows of all values."""
        return self._select(self.queries + 1, 1)

    def _select(self, first: int, heads: int) -> Rows:
        size = self.queries + 2
        starts = ((group * size + first) * self.head_dim for group in range(self.groups))
        return tuple(ElementRange(start, start + heads * self.head_dim) for start in starts)


def check_rows(stored: JoinedTensor, rows: int, name: str, source: str) -> None:
    """Raise ``FormatError`` if a tensor does not have the number of rows that the arguments say."""
    if stored.info.shape[:1] != (rows,):
        raise FormatError(
            f"{source}: {name!r} has the shape {list(stored.info.shape)}, and by args it should have {rows} rows"
        )


def split_halves(first: str, second: str, source: str, rows: int) -> Sequence[TransformersPiece]:
    """Return the two halves of the rows of a tensor: the gate, and the projection."""
    half = rows // 2
    return [
        TransformersPiece(first, source, (ElementRange(0, half),)),
        TransformersPiece(second, source, (ElementRange(half, rows),)),
    ]
