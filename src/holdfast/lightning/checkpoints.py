"""Checkpoints by their whole paths, as Lightning names them: saved, loaded, and removed when nothing needs them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.api import finalize, restore, save_checkpoint
from holdfast.engine.comm.session import RankGroup
from holdfast.engine.comm.vote import COORDINATOR_RANK
from holdfast.errors import InvalidArgumentError, StorageError
from holdfast.formats.native import is_native
from holdfast.lightning.checkpoint_dict import ResumedCheckpoint
from holdfast.lightning.removal import remove_checkpoint
from holdfast.load.result import RestoreResult
from holdfast.run.cleanup import finish_interrupted_replace
from holdfast.run.scan import CheckpointInfo
from holdfast.save.handle import SaveHandle
from holdfast.storage.directories import rename_path
from holdfast.storage.posix import path_exists

#: Seconds that ranks wait for each other.
TIMEOUT = 600.0

#: What strategies may write.
FORMATS = ("native", "lightning")


@dataclass
class LightningCheckpoints:
    """One save is under way at a time, and removals wait for it: what is removed may be what it replaces."""

    checkpoint_format: str
    async_save: bool
    _handle: SaveHandle[CheckpointInfo] | None = None
    _removals: list[Callable[[], object]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.checkpoint_format not in FORMATS:
            raise InvalidArgumentError(
                f"checkpoint_format must be one of {', '.join(FORMATS)}; got {self.checkpoint_format!r}"
            )
        if self.async_save and self.checkpoint_format != "native":
            raise InvalidArgumentError("async_save=True needs checkpoint_format='native'")

    @property
    def native(self) -> bool:
        """Whether holdfast's own format is written."""
        return self.checkpoint_format == "native"

    def save(self, path: Path, model: Any, optimizer: Any, content: Mapping[str, Any], step: int | None) -> None:
        """Save under a path, over what is there. Waits for the save before."""
        self.finish()
        aside = _put_aside(path)
        self._handle = save_checkpoint(
            path.parent,
            path.name,
            model,
            optimizer,
            user_content=content,
            step=step,
            overwrite=True,
            async_save=self.async_save,
        )
        if aside is not None:
            self.remove(lambda: remove_checkpoint(aside))

    def restore(self, path: Path, model: Any, optimizer: Any, *, strict: bool) -> RestoreResult:
        """Load from a path, when what is being saved is there."""
        self.finish()
        return restore(path, None, model, optimizer, strict=strict)

    def open(self, path: Path) -> ResumedCheckpoint:
        """Open a checkpoint on all ranks, when what is being saved is there."""
        self.finish()
        session = RankGroup().session(TIMEOUT)

        def recovered() -> None:
            if session.rank == COORDINATOR_RANK:
                with suppress(StorageError):  # which all ranks together meet next
                    finish_interrupted_replace(path.parent)

        session.all("finding the checkpoint", recovered)
        return session.all("opening the checkpoint", lambda: ResumedCheckpoint.of(path))

    def remove(self, removal: Callable[[], object]) -> None:
        """Remove something once all that was saved is durable; at once where it is."""
        self._removals.append(removal)
        if self._handle is None or self._handle.done():
            self.finish()

    def finish(self) -> None:
        """Wait for the save under way, then remove what was to be removed. Raises what went wrong with the save."""
        removals, self._removals = self._removals, []
        finalize()
        for removal in removals:
            removal()


def _put_aside(path: Path) -> Path | None:
    """Another name for what Lightning itself has saved there: a native save takes the place of native ones only.

    The first rank gives it and is told; where it cannot, all raise its error.
    """
    aside = path.with_name(f"{path.stem}.before{path.suffix}")

    def decide(_: list[bytes]) -> bytes:
        if not path_exists(path) or is_native(path):
            return b""
        remove_checkpoint(aside)
        rename_path(path, aside)
        return b"aside"

    session = RankGroup().session(TIMEOUT)
    _, done = session.vote("putting Lightning's own checkpoint aside", lambda: None, lambda _: b"", decide)
    return aside if done and session.rank == COORDINATOR_RANK else None
