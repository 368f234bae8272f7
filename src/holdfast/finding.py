"""Which checkpoint a load is about: the one that was asked for, or the newest that can be read."""

from __future__ import annotations

import msgspec

from holdfast.catalog import every_checkpoint, find, latest
from holdfast.errors import DamagedError, FormatError, NoCheckpointError
from holdfast.formats.detect import is_checkpoint
from holdfast.request import LoadRequest
from holdfast.upkeep import recover


class Found(msgspec.Struct, frozen=True, array_like=True):
    """The folder of the checkpoint to load, its id where it is one of a run, and the tags passed over as damaged."""

    folder: str = ""
    id: str = ""
    passed: list[str] = []


def locate(request: LoadRequest, damaged: tuple[str, ...]) -> Found:
    """Rank 0's search.

    Raises ``NoCheckpointError``, ``StorageError``, or ``DamagedError`` where nobody wants to fall back.
    """
    recover(request.path)
    if request.tag is not None:
        return Found(str(find(request.path, request.tag)))
    if is_checkpoint(request.path):
        return Found(str(request.path))
    every = every_checkpoint(request.path)
    unreadable = [info for info in every if info.status != "complete"]
    if unreadable and request.on_damage == "raise":
        kind = DamagedError if unreadable[0].status == "damaged" else FormatError
        raise kind(f"{unreadable[0].problem}; it may be the newest checkpoint: remove it, or name another by tag")
    sound = [info for info in every if info.status == "complete" and info.id not in damaged]
    chosen = sound[-1] if sound else latest(request.path) if not damaged else None
    if chosen is None:
        raise NoCheckpointError(f"all checkpoints in {request.path} are damaged")
    passed = [info.tag for info in every if info.status != "complete" or info.id in damaged]
    return Found(str(chosen.path), chosen.id, passed)
