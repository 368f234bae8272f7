"""Optimizer states in flat buffers, joined to whole tensors: found by content, and proved by it.

The readers of ``torch_dist`` and ``torch`` call it on each rank that opens a checkpoint with an optimizer. In doubt it
must raise: a wrong position gives a parameter the states of another.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rankless.errors import FormatError
from rankless.formats.chunked_tensor_slices import Chunks, JoinedTensor
from rankless.megatron.reader.bucket_assignment import assign_parts
from rankless.megatron.reader.bucket_search import SKIP, BufferMatch, PartIndex, check_states
from rankless.megatron.reader.content_proof import ROUNDED, WeightParts
from rankless.megatron.reader.flat_buffers import FlatBuffer
from rankless.megatron.reader.rank_parts import RankPart
from rankless.megatron.reader.saved_state import MASTER
from rankless.ondisk.data_files import TensorInfo
from rankless.ondisk.read_budget import ReadBudget

#: The ends of the names of tensors that are not trained by the optimizer.
_BUFFERS = (".expert_bias", ".local_tokens_per_expert")

#: The buffers of each group of data-parallel ranks, by its name.
Buffers = Mapping[str, Sequence[FlatBuffer]]


def find_parts(
    buffers: Buffers, weights: Mapping[str, JoinedTensor], parts: Iterable[RankPart], budget: ReadBudget
) -> dict[RankPart, BufferMatch]:
    """Return the position of each part of the model in the buffers.

    Raises ``FormatError`` if one is in no buffer, or if it is unknown which of them is at a position.
    """
    trained = [
        part
        for part in parts
        if part.numel and weights[part.name].info.dtype in ROUNDED and not part.name.endswith(_BUFFERS)
    ]
    index = PartIndex(trained, WeightParts(weights), budget)
    positions: dict[RankPart, BufferMatch] = {}
    for label, of_ranks in buffers.items():
        for buffer in of_ranks:
            check_states(buffer)
        matches = [match for buffer in of_ranks for match in index.match_buffer(buffer)]
        positions = assign_parts(matches, label) | positions
    lost = next((part for part in trained if part not in positions), None)
    if lost is not None:
        raise FormatError(
            f"{next(iter(buffers))}: no buffer of the optimizer has master weights that are, rounded, the weights of "
            f"{lost.name!r}: it was frozen, or changed after the last step; {SKIP}"
        )
    return positions


def join_states(
    weights: Mapping[str, JoinedTensor], positions: Mapping[RankPart, BufferMatch]
) -> dict[str, dict[str, JoinedTensor]]:
    """Return the master weights and the other states of each parameter, as whole tensors."""
    chunks: dict[tuple[str, str], Chunks] = {}
    dtypes: dict[tuple[str, str], str] = {}
    for part, match in positions.items():
        for state, flat in {MASTER: match.buffer.master, **match.buffer.states}.items():
            key = part.name, state
            chunks[key] = (*chunks.get(key, ()), *flat.cut_part(part, match.start))
            if dtypes.setdefault(key, flat.info.dtype) != flat.info.dtype:
                raise FormatError(f"{match.buffer.label}: {state} of {part.name!r} has several dtypes; {SKIP}")
    states: dict[str, dict[str, JoinedTensor]] = {}
    for (name, state), of_tensor in chunks.items():
        info = TensorInfo(dtypes[name, state], weights[name].info.shape)
        states.setdefault(name, {})[state] = JoinedTensor(info, of_tensor)
    return states
