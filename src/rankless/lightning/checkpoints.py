"""Saves, loads and removes checkpoints by their full paths, as Lightning names them.

The strategies of ``Trainer`` and Fabric have one on every rank, and call it in the thread of the caller. A checkpoint
is removed only when everything that was saved is durable.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

from rankless.api import finalize, restore, save_checkpoint
from rankless.engine.comm.session import RankGroup
from rankless.engine.comm.vote import COORDINATOR_RANK
from rankless.errors import InvalidArgumentError, NoCheckpointError, StorageError
from rankless.formats.native import is_native
from rankless.lightning.checkpoint_dict import ResumedCheckpoint
from rankless.lightning.removal import remove_checkpoint
from rankless.load.restore_result import RestoreResult
from rankless.ondisk.validation import check_choice
from rankless.options import FROZEN
from rankless.run.checkpoint_info import CheckpointInfo
from rankless.run.interrupted_copy import is_interrupted_copy
from rankless.run.ownership import Replaceable
from rankless.run.records_folder import keep_records_beside
from rankless.run.run_store import run_store_of
from rankless.save.deferred_errors import DeferredErrors
from rankless.save.handle import SaveHandle
from rankless.storage.atomic_rename import rename_noreplace
from rankless.storage.location import parse_location
from rankless.storage.posix import local_path, path_exists
from rankless.storage.store import store_of

#: Seconds that ranks wait for each other.
TIMEOUT = 600.0

#: The formats that strategies can write.
FORMATS = ("native", "lightning")


@dataclass
class LightningCheckpoints:
    """The saves and removals of a strategy.

    Only one save is in progress at a time. Removals wait for it, because it may replace the checkpoint that is to be
    removed.
    """

    checkpoint_format: str
    async_save: bool
    frozen: str = "together"
    #: The kind of Lightning's own checkpoints that the strategy may replace: see :mod:`rankless.run.ownership`.
    own_kind: str = "lightning"
    _handle: SaveHandle[CheckpointInfo] | None = None
    _removals: list[Callable[[], object]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.checkpoint_format not in FORMATS:
            raise InvalidArgumentError(
                f"checkpoint_format must be one of {', '.join(FORMATS)}; got {self.checkpoint_format!r}"
            )
        if self.async_save and self.checkpoint_format != "native":
            raise InvalidArgumentError("async_save=True needs checkpoint_format='native'")
        check_choice("frozen", self.frozen, FROZEN)
        if self.frozen != "together" and self.checkpoint_format != "native":
            raise InvalidArgumentError(f"frozen={self.frozen!r} needs checkpoint_format='native'")

    @property
    def writes_native(self) -> bool:
        """True if checkpoints are written in rankless's own format."""
        return self.checkpoint_format == "native"

    def replaceable_at(self, path: Path) -> Replaceable:
        """Return the rule for saves and removals at a path: they take a checkpoint of rankless or of Lightning."""
        return Replaceable(("checkpoint", self.own_kind), "a checkpoint of rankless or Lightning", path.name)

    def locate(self, path: str | PathLike[str]) -> Path:
        """Return the path of a checkpoint. Raises ``InvalidArgumentError`` for a URL with Lightning's own format."""
        return parse_location(path) if self.writes_native else local_path(path)

    def save(
        self,
        path: Path,
        model: Any,
        optimizer: Any,
        content: Mapping[str, Any],
        *,
        step: int | None,
        metrics: Mapping[str, Any] | None = None,
    ) -> None:
        """Save under a path. Replace the checkpoint there. Waits for the previous save.

        Its error is raised after this save has begun: Lightning's last save is not lost because an earlier one failed.

        Every rank calls it. Errors become common in the votes of the save.
        """
        failures = DeferredErrors()
        failures.run(self.finish_pending)
        with failures.raised_after(f"the save of {path} has begun all the same"):
            displaced = _displace_lightning_checkpoint(path, self.replaceable_at(path))
            if RankGroup().rank == COORDINATOR_RANK:
                keep_records_beside(path.parent)  # Lightning, and scripts around it, list the folder
            self._handle = save_checkpoint(
                path.parent,
                path.name,
                model,
                optimizer,
                user_content=content,
                step=step,
                metrics=metrics,
                overwrite=True,
                async_save=self.async_save,
                frozen=self.frozen,
            )
            if displaced is not None:
                self.remove_when_durable(lambda: remove_checkpoint(displaced, self.replaceable_at(displaced)))

    def restore(self, path: Path, model: Any, optimizer: Any, *, strict: bool) -> RestoreResult:
        """Load from a path, after the save in progress is complete.

        Every rank calls it.
        """
        self.finish_pending()
        return restore(path, None, model, optimizer, strict=strict)

    def open_checkpoint(self, path: Path, name: object) -> ResumedCheckpoint:
        """Open a checkpoint, called ``name`` by Lightning, on all ranks, after the save in progress is complete."""
        self.finish_pending()
        session = RankGroup().open_session(TIMEOUT)

        def finish_replace() -> None:
            if session.rank == COORDINATOR_RANK and not store_of(path).is_remote:
                with suppress(StorageError):  # all ranks together raise it next, if it matters
                    run_store_of(path.parent).repair_names()

        def open_existing() -> ResumedCheckpoint:
            try:
                return ResumedCheckpoint.open_path(path)
            except NoCheckpointError as error:  # in the words that programs around Lightning look for
                raise NoCheckpointError(f"Checkpoint file not found: {name} ({error})") from error

        session.run_on_all("finding the checkpoint", finish_replace)
        return session.run_on_all("opening the checkpoint", open_existing)

    def remove_when_durable(self, removal: Callable[[], object]) -> None:
        """Run a removal once everything that was saved is durable; at once if it already is.

        Rank 0 calls it. It raises no error of a save: other ranks do not call it, and would go on. The next save or
        load raises it on all ranks.
        """
        self._removals.append(removal)
        if self._handle is None or (self._handle.done() and not self._handle.has_failed()):
            self._run_removals()

    def finish_pending(self) -> None:
        """Wait for the save in progress, then run the pending removals. Raises the error of the save.

        Each rank calls it, before the next save or load and at the end of the training.
        """
        finalize()
        self._run_removals()

    def _run_removals(self) -> None:
        removals, self._removals = self._removals, []
        for removal in removals:
            removal()


def _displace_lightning_checkpoint(path: Path, replaceable: Replaceable) -> Path | None:
    """Rename a checkpoint of Lightning's format at the path, because a native save replaces native ones only.

    Rank 0 renames it and returns the new path; the other ranks return ``None``. If it fails, or something else is at
    the path, all ranks raise its error. In an object store both can have the same path, and the native one is found.
    """
    if store_of(path).is_remote:
        return None

    def rename_existing(_: list[bytes]) -> bytes:
        if not path_exists(path) or is_native(path) or is_interrupted_copy(path):
            return b""
        replaceable.check(path)
        displaced = _unused_name(path)
        rename_noreplace(path, displaced)
        return displaced.name.encode()

    session = RankGroup().open_session(TIMEOUT)
    _, name = session.vote(
        "renaming the checkpoint that Lightning has written", lambda: None, lambda _: b"", rename_existing
    )
    return path.with_name(name.decode()) if name and session.rank == COORDINATOR_RANK else None


def _unused_name(path: Path) -> Path:
    """Return a name next to a checkpoint that nothing has."""
    names = (f"{path.stem}.before{number or ''}{path.suffix}" for number in itertools.count())
    return next(other for name in names if not path_exists(other := path.with_name(name)))
