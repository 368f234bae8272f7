"""A save into the local tier whose run directory is on a file system."""

from __future__ import annotations

import secrets
from pathlib import Path

import msgspec

from rankless.engine.comm.session import RankGroup
from rankless.engine.comm.vote import COORDINATOR_RANK
from rankless.ondisk.manifest import Manifest
from rankless.run.pending_dir import PendingDirectory
from rankless.run.scan import CheckpointInfo
from rankless.save.base_checkpoint import Base
from rankless.save.checkpoint_save import CheckpointSave
from rankless.save.save_negotiation import SaveAgreement
from rankless.save.save_request import SaveRequest
from rankless.save.tier_save import TierSave, describe_tier_save
from rankless.save.training_save import SavePlanCache
from rankless.tier.job import TierJob
from rankless.tier.tier_options import LocalTier

_encode = msgspec.msgpack.Encoder().encode


class FolderTierSave(TierSave, CheckpointSave):
    """A save into the local tier, and into a run directory on a file system."""

    def __init__(  # noqa: PLR0917 - as an ordinary save, and the tier
        self,
        request: SaveRequest,
        ranks: RankGroup,
        cache: SavePlanCache,
        base: Base,
        timeout: float,
        tier: TierJob,
        options: LocalTier,
    ) -> None:
        super().__init__(describe_tier_save(request, tier, options), ranks, cache, base, timeout)
        self._use_tier(tier, options)

    def _open_run(self, agreement: SaveAgreement) -> None:
        super(TierSave, self)._plan_and_open(agreement)

    def _write_run(self) -> CheckpointInfo:
        return super(TierSave, self).write_and_commit()

    def _roll_back_run(self, error: BaseException) -> None:
        super(TierSave, self)._roll_back(error)

    def _discard_attempt(self) -> None:
        if self._pending.is_locked and not self._is_committed():
            self._pending.discard()
        self._pending.release()

    def _drain_once(self, attempt: int) -> CheckpointInfo:
        """See :class:`TierSave`. Each attempt has a pending directory of its own."""
        del attempt

        def open_pending(_: list[bytes]) -> bytes:
            if self._is_committed():  # by an attempt that seemed to fail
                return _encode(("", False))
            self._stage.tier.check_not_fenced(self._request.tag)
            text = secrets.token_hex(8)
            self._set_attempt(text)
            self._clean_up()
            self._pending.create(sum(file.size for file in self._plan.files))
            self._files.create_files()
            return _encode((text, self._may_remove_old()))

        _, raw = self._session.vote("preparing the drain", lambda: None, lambda _: b"", open_pending)
        text, self._removes_old = msgspec.msgpack.decode(raw, type=tuple[str, bool])
        if not text:
            return self._info
        if self._session.rank != COORDINATOR_RANK:
            self._set_attempt(text)
        return self._write_run()

    def _publish_checkpoint(self, committed: Manifest) -> None:
        if self._stage.has_slot:  # this process may have been stopped while another job continued the run
            self._stage.tier.check_not_fenced(self._request.tag)
        super()._publish_checkpoint(committed)
        if self._stage.has_slot:
            self._stage.tier.check_published(CheckpointInfo.of(self.path, committed))

    def _check_newest(self, committed: Manifest, folder: Path) -> None:
        if self._stage.has_slot:
            self._stage.tier.check_replaces(self.path, folder)
        super()._check_newest(committed, folder)

    def _set_attempt(self, text: str) -> None:
        self._pending = PendingDirectory(self.path, self._hidden_name._replace(id=text))
