"""The search for the parts of parameters in flat buffers: their files do not say which parameter lies where.

Each part begins at a multiple of 64 elements from the start of its bucket. A position can hold a part if the part's
weights are the rounded master weights there; see ``docs/migrating/megatron.md``. For example, a part of 100 elements at
the start of a bucket is followed by one at element 128.

:mod:`rankless.megatron.reader.flat_states` calls it on each rank that opens a checkpoint with flat buffers.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rankless.errors import CorruptCheckpointError, FormatError
from rankless.megatron.reader.content_proof import MASTER, WeightParts, round_masters, sample_masters
from rankless.megatron.reader.flat_buffers import FlatBuffer
from rankless.megatron.reader.rank_parts import RankPart
from rankless.ondisk.read_budget import ReadBudget

#: Parameters begin at positions that are multiples of so many elements.
ALIGNMENT = 64

#: Units of work for a comparison of samples.
_SAMPLE = 16

#: Advice in messages about optimizer states that cannot be assigned to parameters.
SKIP = "read it without its optimizer (--key optimizer=skip)"


@dataclass(frozen=True)
class BufferMatch:
    """A position in a buffer, and all parts that have their weights there."""

    buffer: FlatBuffer
    start: int
    parts: tuple[RankPart, ...]


class PartIndex:
    """The parts of a model by the samples of their weights."""

    def __init__(self, parts: Iterable[RankPart], weights: WeightParts, budget: ReadBudget) -> None:
        self._budget = budget
        self._by_sample: dict[tuple[int, str, bytes], list[RankPart]] = {}
        self._dtypes: dict[int, set[str]] = {}
        for part in parts:
            budget.spend(_SAMPLE)
            dtype = weights.dtype_of(part)
            self._dtypes.setdefault(part.numel, set()).add(dtype)
            self._by_sample.setdefault((part.numel, dtype, weights.sample_part(part)), []).append(part)
        self._sizes = sorted(self._dtypes)

    def match_buffer(self, buffer: FlatBuffer) -> list[BufferMatch]:
        """Return the parts in a buffer, in order.

        Raises ``FormatError`` if elements of it belong to no parameter, or parts of different sizes fit somewhere.
        """
        if buffer.master.info.dtype != MASTER or len(buffer.master.info.shape) != 1:
            raise FormatError(
                f"{buffer.label} has master weights of dtype {buffer.master.info.dtype}, not of 32 bits, as the "
                f"precision-aware optimizer has them; {SKIP}"
            )
        matches: list[BufferMatch] = []
        origin = end = 0
        while end < buffer.master.numel:
            aligned = origin + -(-(end - origin) // ALIGNMENT) * ALIGNMENT
            match = self._match_at(buffer, aligned)
            if match is None and aligned >= buffer.master.numel:
                break
            if match is None and (match := self._match_at(buffer, end)) is None:
                raise FormatError(
                    f"{buffer.label}: its elements from {aligned} on are, rounded, the weights of no parameter that "
                    f"can lie there: the weights were changed after the last step, or the layout is unknown; {SKIP}"
                )
            origin = origin if match.start == aligned else match.start
            matches.append(match)
            end = match.start + match.parts[0].numel
        return matches

    def _match_at(self, buffer: FlatBuffer, start: int) -> BufferMatch | None:
        candidates = {
            numel: parts for numel in self._sizes_at(buffer, start) if (parts := self._find(buffer, start, numel))
        }
        if len(candidates) > 1 and buffer.has_edges:
            number = bisect.bisect_right(buffer.master.edges, start)
            first_end = [*buffer.master.edges, buffer.master.numel][number]
            candidates = {
                numel: parts for numel, parts in candidates.items() if start + numel == first_end
            } or candidates
        if len(candidates) > 1:
            names = ", ".join(repr(parts[0].name) for parts in candidates.values())
            raise FormatError(
                f"{buffer.label}: {names} have equal weights, and all of them fit at element {start}; {SKIP}"
            )
        return next((BufferMatch(buffer, start, parts) for parts in candidates.values()), None)

    def _sizes_at(self, buffer: FlatBuffer, start: int) -> Iterator[int]:
        """Yield the sizes of the parts that can begin at a position."""
        size = buffer.master.numel
        self._budget.spend(len(self._sizes))
        if buffer.has_edges and not _has_edge(buffer, start):
            return
        for numel in self._sizes:
            if start + numel <= size and (not buffer.has_edges or _has_edge(buffer, start + numel)):
                yield numel

    def _find(self, buffer: FlatBuffer, start: int, numel: int) -> tuple[RankPart, ...]:
        self._budget.spend(_SAMPLE)
        sample = sample_masters(buffer.master, start, numel)
        return tuple(
            part
            for dtype in sorted(self._dtypes[numel])
            for part in self._by_sample.get((numel, dtype, round_masters(sample, dtype)), ())
        )


def _has_edge(buffer: FlatBuffer, at: int) -> bool:
    edges: Sequence[int] = buffer.master.edges
    number = bisect.bisect_left(edges, at)
    return at == buffer.master.numel or (number < len(edges) and edges[number] == at)


def check_states(buffer: FlatBuffer) -> None:
    """Raise ``CorruptCheckpointError`` if a state of a buffer is not as long as its master weights."""
    for name, state in buffer.states.items():
        if state.info.shape != buffer.master.info.shape:
            raise CorruptCheckpointError(
                f"{buffer.label}: {name} has {list(state.info.shape)} elements, and its master weights "
                f"{list(buffer.master.info.shape)}"
            )
