"""The generations in the local tiers of all hosts: each rank lists its host's, and all ranks exchange them.

:mod:`rankless.load.tier_load` calls it on every rank before a checkpoint is selected. The order of :func:`take_over`
must stay: announce in the run directory, take over the folders of all hosts, and only then look. An earlier job that is
still alive could otherwise change them after the look.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from rankless.engine.comm.session import RankGroup, Session
from rankless.engine.comm.spec_directory import deduplicate
from rankless.errors import StateError
from rankless.ondisk.manifest import Manifest
from rankless.process.prepared_types import prepared
from rankless.run.catalog import list_checkpoints_strictly
from rankless.run.history import Entry
from rankless.run.stored_history import read_history
from rankless.storage.posix import host_id
from rankless.tier.generation_catalog import HostOffer, LocalCheckpoint, find_complete, list_offers
from rankless.tier.host_folder import TierFolder
from rankless.tier.job import TierJob, tier_jobs
from rankless.tier.part_names import GenerationKey
from rankless.tier.parts_in_run import CollectedParts
from rankless.tier.tier_options import LocalTier

_encode = msgspec.msgpack.Encoder().encode


@dataclass(frozen=True)
class TierHosts:
    """The hosts of a job, and the common contents of their local tiers.

    Attributes:
        host_of: The number of each rank's host.
        writers: The beginnings of the names of files, one for each host.
        local: On rank 0, the complete generations, oldest first.
        unreadable: On rank 0, why labels of generations could not be read.
    """

    host_of: Sequence[int]
    writers: Sequence[str]
    local: Sequence[LocalCheckpoint] = ()
    unreadable: Sequence[str] = ()

    def ranks_on_host_of(self, rank: int) -> list[int]:
        """Return the ranks on the host of a rank."""
        return [other for other, host in enumerate(self.host_of) if host == self.host_of[rank]]


@prepared
class _Gathered(msgspec.Struct, frozen=True, array_like=True):
    """The decision of rank 0. The run directory lacks the parts of ``ranks`` of the generation ``lacking``."""

    host_of: list[int]
    writers: list[str]
    lacking: GenerationKey | None
    ranks: list[int]


def gather_hosts(tier: TierJob, session: Session) -> TierHosts:
    """Let all ranks tell which generations their hosts have, and put parts that only they have into the run directory.

    Every rank of a job that goes on calls it, after it has taken over the folders.
    """
    hosts, gathered = _gather(tier, session, lambda: _offer(tier.folder, tier.slots.writer), refuses_unknown=True)
    if gathered.lacking is not None:
        _complete_collected(tier, session, hosts, gathered.lacking, gathered.ranks)
    return hosts


def look_at_hosts(tier: TierJob, session: Session) -> TierHosts:
    """Let all ranks tell which generations their hosts have. Nothing is changed; a host may have no folder.

    Ranks of several hosts send each other parts. Each host needs names of files for these.
    """

    def list_own() -> HostOffer:
        folder = tier.find_folder()
        if folder is None:
            return HostOffer(f"{host_id()} without {tier.path}", "", [])
        return _offer(folder, tier.slots.writer if session.size > 1 else "")

    return _gather(tier, session, list_own, refuses_unknown=False)[0]


def has_checkpoint_in_tier(run: Path, local: LocalTier, ranks: RankGroup, timeout: float) -> bool:
    """Return, on all ranks, whether the run directory or the tiers of the hosts have a complete checkpoint.

    ``has_checkpoint`` and the first step of a ``Checkpointer`` that has not resumed call it.
    """
    session = ranks.open_session(timeout)
    hosts = look_at_hosts(tier_jobs.get_state(local.path, run), session)
    _, raw = session.vote(
        "looking for a checkpoint",
        lambda: None,
        lambda _: b"",
        lambda _: _encode(
            bool(hosts.local) or any(info.status == "complete" for info in list_checkpoints_strictly(run))
        ),
    )
    session.leave()
    return msgspec.msgpack.decode(raw, type=bool)


def _offer(folder: TierFolder, writer: str) -> HostOffer:
    return HostOffer(folder.identity, writer, list_offers(folder))


def _find_unknown(run: Path, offers: Sequence[HostOffer], history: Entry) -> list[Manifest]:
    """Return the labels of generations of runs that neither the history nor a checkpoint of the directory has."""
    labels = [one.manifest for offer in offers for one in offer.generations if one.manifest is not None]
    strange = [manifest for manifest in labels if manifest.run not in history.runs]
    known = {info.run for info in list_checkpoints_strictly(run)} if strange else set()
    return [manifest for manifest in strange if manifest.run not in known]


def _gather(
    tier: TierJob, session: Session, list_own: Callable[[], HostOffer], *, refuses_unknown: bool
) -> tuple[TierHosts, _Gathered]:
    local: list[LocalCheckpoint] = []
    unreadable: list[str] = []

    def decide(posted: list[bytes]) -> bytes:
        offers = [msgspec.msgpack.decode(raw, type=HostOffer) for raw in posted]
        history = read_history(tier.run)
        unknown = _find_unknown(tier.run, offers, history)
        if unknown and refuses_unknown:
            raise StateError(
                f"the local tier {tier.path} has the checkpoint {unknown[0].tag!r} of a run that {tier.run} does not "
                "know: was that directory removed, or is its file system not mounted? To write the checkpoint there, "
                "run `rankless drain --adopt`; to begin anew, remove the folder of the tier"
            )
        unreadable.extend(f"{manifest.tag} is of a run that {tier.run} does not know" for manifest in unknown)
        ids = {manifest.id for manifest in unknown}
        local.extend(one for one in find_complete(offers, history) if one.manifest.id not in ids)
        unreadable.extend(one.problem for offer in offers for one in offer.generations if one.problem)
        host_of, first_ranks = deduplicate([offer.host.encode() for offer in offers])
        writers = [offers[rank].writer for rank in first_ranks]
        return _encode(_Gathered(host_of, writers, *_find_lacking(tier, offers, local, history)))

    _, raw = session.vote("looking into the local tier", list_own, _encode, decide)
    gathered: _Gathered = msgspec.msgpack.decode(raw, type=_Gathered)
    return TierHosts(gathered.host_of, gathered.writers, local, unreadable), gathered


def take_over(tier: TierJob, ranks: RankGroup, timeout: float) -> TierHosts:
    """Begin a job: announce it, and gather the hosts.

    From then on, an earlier job that is still alive changes nothing in their folders.
    """
    session = ranks.open_session(timeout)

    def find_newest_job() -> int:
        tier.reopen_lost_folder()
        return tier.folder.find_newest_job()  # the folder may be refused

    _, raw = session.vote(
        "beginning to look into the local tier",
        find_newest_job,
        _encode,
        lambda posted: tier.announce(max(map(msgspec.msgpack.decode, posted))).encode(),
    )
    # On all hosts before any of them looks: else an earlier job may complete one and remove another meanwhile.
    session.run_on_all("taking over the local tier", lambda: tier.take_over(raw.decode()))
    hosts = gather_hosts(tier, session)
    session.leave()
    return hosts


def _find_lacking(
    tier: TierJob, offers: Sequence[HostOffer], local: Sequence[LocalCheckpoint], history: Entry
) -> tuple[GenerationKey | None, list[int]]:
    """Return the newest generation that only hosts and the run directory have together, and the parts that it lacks."""
    collected = CollectedParts.of(tier.run)
    shared = list_offers(collected.folder) if collected.exist else []
    together = find_complete([*offers, HostOffer("", "", shared)], history)
    newest = together[-1].key if shared and together else None
    if newest is None or newest in {one.key for one in local}:
        return None, []
    size = together[-1].manifest.provenance.world_size
    return newest, sorted(set(range(size)) - {rank for one in shared if one.key == newest for rank in one.ranks})


def _complete_collected(
    tier: TierJob, session: Session, hosts: TierHosts, key: GenerationKey, ranks: Sequence[int]
) -> None:
    """Put parts of the hosts into the run directory, from where rank 0 writes the checkpoint."""
    on_host = hosts.ranks_on_host_of(session.rank)
    share = ranks[on_host.index(session.rank) :: len(on_host)]
    collected = CollectedParts.of(tier.run)
    session.run_on_all(
        "putting parts of the local tier into the run directory",
        lambda: collected.put_host_parts(tier.folder, key, share),
    )
