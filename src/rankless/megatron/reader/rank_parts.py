"""The parts that tensor-parallel ranks have of parameters. A rank stores each of its parts in row-major order.

The readers of iterations use it on each rank. The elements of a part are in the order that Megatron stored them in.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rankless.engine.plan.element_ranges import IndexBox
from rankless.formats.chunked_tensor_slices import JoinedTensor

#: The end of the names of the parameters that consist of a gate and a projection.
GATED = (".linear_fc1.weight", ".linear_fc1.bias")


@dataclass(frozen=True)
class RankPart:
    """A rank's part of a parameter: boxes of it, which the rank stores one after another.

    Of ``shards`` parts of the parameter it is number ``index``.
    """

    name: str
    boxes: tuple[IndexBox, ...]
    shards: int
    index: int

    @property
    def numel(self) -> int:
        """The number of elements."""
        return sum(math.prod(box.shape) for box in self.boxes)


def list_parts(weights: Mapping[str, JoinedTensor], *, is_gated: bool) -> Iterator[RankPart]:
    """Yield the parts of all parameters, which are the chunks of the weights as ranks stored them.

    With ``is_gated`` a part of ``linear_fc1`` has two boxes: rows of the gate, and as many of the projection.
    """
    for name, weight in weights.items():
        boxes = sorted(chunk.box for chunk in weight.chunks)
        rows: list[tuple[IndexBox, ...]] = [(box,) for box in boxes]
        if is_gated and name.endswith(GATED):
            rows = _pair_boxes(boxes, weight.info.shape[0] // 2)
        for index, row in enumerate(rows):
            yield RankPart(name, row, len(rows), index)


def _pair_boxes(boxes: Sequence[IndexBox], half: int) -> list[tuple[IndexBox, ...]]:
    """Pair the boxes in the first half of the rows with those at the same place in the second half."""
    partners = {box: box._replace(offset=(box.offset[0] + half, *box.offset[1:])) for box in boxes}
    pairs = [(box, partners[box]) for box in boxes if partners[box] in partners]
    return list(pairs) if 2 * len(pairs) == len(boxes) else [(box,) for box in boxes]
