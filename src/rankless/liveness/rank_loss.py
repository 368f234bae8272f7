"""The loss of ranks: one rank's finding, in a form that the others read, and its message.

:class:`~rankless.liveness.watcher.Watcher` finds losses in its thread, on each rank, and posts them for all others. All
ranks must use one encoded form.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from rankless.engine.comm.vote import format_ranks


class LossEvidence(StrEnum):
    """The observation that shows that ranks are lost. The first two are certain."""

    #: The process has ended without a farewell. Certain: the kernel of its host reports it.
    ENDED = "ended"
    #: The process ended with an exception, and has reported it.
    RAISED = "raised"
    #: The rank has sent no heartbeat for too long.
    SILENT = "silent"
    #: The key-value store was lost, or does not answer.
    STORE = "store"


class RankLoss(msgspec.Struct, frozen=True):
    """Ranks of the job that are lost. ``finder`` is the rank that has noticed it, ``detail`` says more.

    Ranks are numbers in the default group.
    """

    ranks: tuple[int, ...]
    evidence: LossEvidence
    finder: int
    detail: str = ""

    @property
    def message(self) -> str:
        """The message of the error that every rank raises."""
        return (
            f"{_DESCRIPTIONS[self.evidence].format(ranks=format_ranks(self.ranks), detail=self.detail)} "
            f"(noticed by rank {self.finder}). Restart the job from its latest checkpoint"
        )


_DESCRIPTIONS = {
    LossEvidence.ENDED: "{ranks} died: {detail} ended without leaving the job, as a killed or crashed process does",
    LossEvidence.RAISED: "{ranks} ended with an error: {detail}",
    LossEvidence.SILENT: "{ranks} sent no heartbeat {detail}",
    LossEvidence.STORE: "{ranks} cannot be reached: {detail}",
}
