"""What a load tells of itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class RestoreResult:
    """What a load did, part by part.

    Parts are ``"model"``, ``"optimizer"`` and ``"scheduler"`` (with their names, as in ``"model/generator"``, where
    there are several), ``"stateful"``, ``"dataloader"``, ``"rng"``, ``"user_content"`` and ``"per_rank_content"``.

    ``exact`` are the parts that are bit for bit what was saved. ``reconstructed`` are those made from what was saved which
    cannot be the same: a model cast to another dtype, a data loader whose position was split anew for another number
    of ranks, generators that each rank of another number has derived from the saved ones. In ``missing`` are parts that
    could not be given back and, where that was allowed, the names that are only in the objects: of a model those of its
    tensors, of an optimizer its parameters that have no saved state, as ``"optimizer/NAME"``, and groups that keep
    their own settings. ``unexpected`` are the names that are only in the checkpoint. A part that has such names is
    neither exact nor reconstructed.

    ``verified`` tells whether every byte read was checked against its CRC; ``skipped_checkpoints`` are the tags of
    checkpoints that are corrupt and may be newer. ``run`` is the id of the run that saved it, where the format is
    holdfast's. ``named_by`` tells, by slot, what an optimizer's parameters were found by: ``"model"``, ``"names"``
    that torch keeps in the groups, or ``"places"``.
    """

    user_content: Any
    per_rank_content: Any
    tag: str
    step: float | None
    verified: bool
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    exact: tuple[str, ...]
    reconstructed: tuple[str, ...] = ()
    skipped_checkpoints: tuple[str, ...] = ()
    run: str = ""
    named_by: Mapping[str, str] = field(default_factory=dict)
