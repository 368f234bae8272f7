"""The result of a load.

:mod:`rankless.load.load_operation` makes it on each rank, after the last vote of a load.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rankless.ondisk.manifest import EditRecord
from rankless.run.claims import LoadedBase


@dataclass(frozen=True)
class RestoreResult:
    """The result of a load: the content that was returned, and a report of each component.

    Components are ``"model"``, ``"optimizer"`` and ``"scheduler"`` (with a name, as in ``"model/generator"``, if there
    are several), ``"stateful"``, ``"dataloader"``, ``"rng"``, ``"user_content"`` and ``"per_rank_content"``.

    Attributes:
        user_content: The user content of the checkpoint, or ``None``.
        per_rank_content: The content that this rank saved, or ``None``.
        tag: The tag of the checkpoint that was loaded.
        step: The training step, if one was saved, also by Lightning, the ``Trainer``, DeepSpeed or Megatron.
        verified: Whether every byte that was read was checked against its CRC.
        missing: The components that could not be restored and, if that was allowed, the names that exist only in the
            objects passed: tensors of a model; parameters of an optimizer without a saved state, as
            ``"optimizer/NAME"``; param groups that keep their settings.
        unexpected: The names that exist only in the checkpoint.
        exact: The components that are restored bit for bit.
        reconstructed: The components that are restored but cannot be identical: a model cast to another dtype, a data
            loader with a position that was split for another number of ranks, random number generators that were
            derived from the saved ones for another number of ranks, values that differed between the ranks that saved:
            all ranks get rank 0's. A component with missing or unexpected names is in neither list.
        skipped_checkpoints: The tags of corrupt checkpoints that were ignored and may be newer.
        run: The id of the run that saved the checkpoint; empty for formats other than rankless's.
        path: The directory of the checkpoint, or its file.
        id: The id of the checkpoint; empty for formats other than rankless's.
        source: ``"local tier"`` if the bytes were read from the local tier, else ``"run directory"``.
        corrupt_parts: Descriptions of the parts in the local tier that were corrupt, and were not used.
        matched_by: By optimizer, how its parameters were matched: ``"model"`` (the names in the model), ``"names"``
            (the names that torch keeps in the param groups) or ``"places"`` (their positions).
        not_requested: The components that the checkpoint has and that nothing was passed for, such as
            ``"stateful/ema"``.
        sequence: The position in the order of all saves into the run directory; 0 for formats other than rankless's.
        edits: The edits that have made it, oldest first, also the one of this load: see :func:`rankless.edit`.
        saved_ranks: How many ranks saved the checkpoint; 0 for formats other than rankless's.
        ranks: How many ranks loaded it.
        base: The facts that a save into its directory needs to continue it; ``None`` for formats other than rankless's.
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
    path: Path | None = None
    id: str = ""
    source: str = "run directory"
    corrupt_parts: tuple[str, ...] = ()
    matched_by: Mapping[str, str] = field(default_factory=dict)
    not_requested: tuple[str, ...] = ()
    sequence: int = 0
    edits: tuple[EditRecord, ...] = ()
    saved_ranks: int = 0
    ranks: int = 1
    base: LoadedBase | None = field(default=None, repr=False)

    def __str__(self) -> str:
        """Return a line for a log that describes the load.

        For example, ``runs/a/step_10 (step 10), saved by 8 ranks, loaded on 4 ranks, every byte verified``.
        """
        step = "" if self.step is None else f" (step {self.step:g})"
        saved = f", saved by {_count_ranks(self.saved_ranks)}" if self.saved_ranks else ""
        tier = ", from the local tier" if self.source == "local tier" else ""
        checked = ", every byte verified" if self.verified else ""
        lists = (("exact", self.exact), ("reconstructed", self.reconstructed), ("missing", self.missing))
        listed = "".join(f"; {title}: {_list_names(names)}" for title, names in lists if names)
        return f"{self.path}{step}{saved}, loaded on {self.ranks}{tier}{checked}{listed}"


#: So many names are listed in a line.
_MAX_NAMES = 6


def _list_names(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return ", ".join(names[:_MAX_NAMES]) + more


def _count_ranks(count: int) -> str:
    return f"{count} rank" if count == 1 else f"{count} ranks"
