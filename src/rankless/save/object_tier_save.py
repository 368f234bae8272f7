"""A save into the local tier whose run directory is in an object store."""

from __future__ import annotations

import secrets

import msgspec

from rankless.engine.comm.session import RankGroup
from rankless.run.pointers import find_tag
from rankless.run.scan import CheckpointInfo
from rankless.save.object_publication import PublicationChecks
from rankless.save.object_save import ObjectSave
from rankless.save.save_negotiation import SaveAgreement
from rankless.save.save_request import SaveRequest
from rankless.save.tier_save import TierSave, describe_tier_save
from rankless.save.training_save import SavePlanCache
from rankless.storage.object_path import ObjectPath
from rankless.tier.job import TierJob
from rankless.tier.tier_options import LocalTier

_encode = msgspec.msgpack.Encoder().encode


class ObjectTierSave(TierSave, ObjectSave):
    """A save into the local tier, and into a run in an object store."""

    def __init__(  # noqa: PLR0917 - as an ordinary save, and the tier
        self,
        request: SaveRequest,
        run: ObjectPath,
        ranks: RankGroup,
        cache: SavePlanCache,
        timeout: float,
        tier: TierJob,
        options: LocalTier,
    ) -> None:
        super().__init__(describe_tier_save(request, tier, options), run, ranks, cache, timeout)
        self._use_tier(tier, options)

    def _open_run(self, agreement: SaveAgreement) -> None:
        super(TierSave, self)._plan_and_open(agreement)

    def _write_run(self) -> CheckpointInfo:
        return super(TierSave, self).write_and_commit()

    def _roll_back_run(self, error: BaseException) -> None:
        super(TierSave, self)._roll_back(error)

    def _discard_attempt(self) -> None:
        self._discard_output()

    def _drain_once(self, attempt: int) -> CheckpointInfo:
        """See :class:`TierSave`. Each attempt has a folder of its own, so that no two processes write one object."""
        request, tier, info = self._request, self._stage.tier, self._info
        checks = PublicationChecks(
            lambda: tier.check_not_fenced(request.tag), lambda: tier.check_not_superseded(info, request.tag)
        )

        def begin_uploads(_: list[bytes]) -> bytes:
            entry = find_tag(self._run, request.tag)
            if entry is not None and entry.names_checkpoint(self._identity.id):  # by an attempt that seemed to fail
                return _encode(("", []))
            checks.before()
            folder_id = secrets.token_hex(8)
            return _encode((folder_id, self._open_output(folder_id, attempt, checks).upload.begin(self._identity.id)))

        _, raw = self._session.vote("preparing the drain", lambda: None, lambda _: b"", begin_uploads)
        folder_id, uploads = msgspec.msgpack.decode(raw, type=tuple[str, list[str]])
        if not folder_id:
            return self._info
        self._join_output(folder_id, uploads, attempt)
        self._removes_old = request.keep is not None or request.overwrite or bool(request.corrupt)
        return self._write_run()
