"""An estimate of the bytes that this rank stages in a save. It needs no message of another rank.

Memory of this size can be prepared before the first save. If the estimate is wrong, the save allocates other memory.

``RunDirectory.prepare_staging`` asks it on each rank, before the first save.
"""

from __future__ import annotations

import math
from typing import Any

from rankless.engine.plan.layout_types import PlacementLayout
from rankless.state.model import model_traversal as models
from rankless.state.optimizer import adapters
from rankless.state.optimizer import optimizer_view as optimizers


def estimate_staged_bytes(model: Any, optimizer: Any, rank_count: int) -> int:
    """Return about how many bytes this rank writes, in a process group of ``rank_count`` ranks.

    Ranks that hold the same shard of a tensor write equal parts of it.
    """
    views = {slot: models.build_view(parts, hooks=False) for slot, parts in models.model_components(model).items()}
    tensors = [tensor for view in views.values() for tensor in view.tensors.values()]
    for slot, parts in adapters.optimizer_components(optimizer).items():
        groups = optimizers.view_groups(parts, optimizers.refs_for(slot, views))
        tensors += [tensor for _, tensor in optimizers.optimizer_tensors(groups)]
    return sum(tensor.local.nbytes // _count_holders(tensor.layout, rank_count) for tensor in tensors)


def _count_holders(layout: PlacementLayout | None, rank_count: int) -> int:
    """Return how many ranks hold the same shard."""
    if layout is None:
        return rank_count
    return len(layout.mesh.ranks) // math.prod(count for count, _ in layout.division)
