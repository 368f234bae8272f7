"""Moments of a save and of a load at which something can happen to a rank: calls that it makes then."""

from __future__ import annotations

import pkgutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock


@dataclass(frozen=True)
class Point:
    """Before, or ``after``, a call of a function that only rank 0 makes (``leader``), or all ranks.

    ``phase``: only where the call is about the vote of this name. ``late``: the save may be committed by then.
    ``needs``: what kind of save comes by here.
    """

    name: str
    where: str
    after: bool = False
    leader: bool = False
    phase: str = ""
    late: bool = False
    needs: str = ""


_POST = "holdfast.engine.comm.vote.VoteRound.post"
_WRITER = "holdfast.storage.direct_io.DirectWriter"
_DRAFT = "holdfast.engine.io.commit.StagingDirectory"

SAVING = (
    Point("beginning a session", "holdfast.engine.comm.session.RankGroup.session"),
    Point("looking", "holdfast.save.negotiation.capture_training"),
    Point("announcing", _POST, phase="looking at what to save"),
    Point("announced", _POST, after=True, phase="looking at what to save"),
    Point("settling", "holdfast.save.negotiation._decide_globally", leader=True),
    Point("planning", "holdfast.save.operation.plan_save"),
    Point("comparing replicas", "holdfast.engine.integrity.replicas.digest_replicas"),
    Point("opening the draft", f"{_DRAFT}.open", leader=True),
    Point("sizing a file", "holdfast.storage.posix.allocate_space", leader=True),
    Point("draft open", f"{_DRAFT}.open", after=True, leader=True),
    Point("prepared", _POST, after=True, phase="preparing the save"),
    Point("making a group to exchange over", "holdfast.engine.comm.session._gloo_beside", needs="a group beside"),
    Point("staging", "holdfast.save.shard_writer.stage_tensors", needs="asynchronous"),
    Point("staged", _POST, after=True, phase="copying what is to be saved", needs="asynchronous"),
    Point("sending a stripe", "holdfast.engine.io.p2p.P2PExchange.send"),
    Point("receiving a stripe", "holdfast.engine.io.p2p.P2PExchange.receive"),
    Point("waiting for a stripe", "holdfast.engine.io.p2p.P2PExchange.wait"),
    Point("putting a stripe together", "holdfast.engine.plan.stripes.StripeSlice.put"),
    Point("writing", f"{_WRITER}.write"),
    Point("syncing", f"{_WRITER}.sync"),
    Point("reporting", "holdfast.engine.integrity.crc_gather.encode_fragments"),
    Point("telling its group", "holdfast.engine.integrity.crc_gather._RankBucket.tell", needs="groups"),
    Point("folding for its group", "holdfast.engine.integrity.crc_gather._RankBucket.folded", needs="groups"),
    Point("reported", _POST, after=True, phase="writing", late=True),
    Point("writing headers", "holdfast.ondisk.files.DataFile.header", leader=True),
    Point("writing small files", "holdfast.storage.posix.write_small", leader=True),
    Point("syncing folders", "holdfast.storage.posix.fsync_directory", leader=True),
    Point("publishing", f"{_DRAFT}.publish", leader=True, needs="a new name"),
    Point("overwriting", f"{_DRAFT}.overwrite", leader=True, needs="a name that is taken"),
    Point("renaming", "holdfast.storage.directories._renameat2", leader=True),
    Point("renamed", "holdfast.storage.directories._renameat2", after=True, leader=True, late=True),
    Point("published", f"{_DRAFT}.publish", after=True, leader=True, late=True, needs="a new name"),
    Point("overwritten", f"{_DRAFT}.overwrite", after=True, leader=True, late=True, needs="a name that is taken"),
    Point("tidying up", "holdfast.save.operation.SaveOperation._tidy", late=True, needs="old ones go"),
    Point(
        "between two renames", "holdfast.storage.directories.fsync_directory", leader=True, needs="no exchange of names"
    ),
    Point(
        "giving an old one up",
        "holdfast.run.cleanup.rename_path",
        after=True,
        leader=True,
        late=True,
        needs="retention",
    ),
    Point("removing an old one", "os.unlink", after=True, leader=True, late=True, needs="old ones go"),
    Point("parting", "holdfast.engine.comm.session.Session.part", late=True),
)

LOADING = (
    Point("beginning a session", "holdfast.engine.comm.session.RankGroup.session"),
    Point("finding", "holdfast.load.selection.CheckpointSelector.next", leader=True),
    Point("found", _POST, after=True, phase="finding the checkpoint"),
    Point("opening", "holdfast.load.operation.LoadOperation._open"),
    Point("matching", "holdfast.state.restore.LoadTargets.match"),
    Point("matched", _POST, after=True, phase="reading the metadata"),
    Point("planning", "holdfast.load.read_plan.plan_load"),
    Point("making a group to exchange over", "holdfast.engine.comm.session._gloo_beside", needs="a group beside"),
    Point("reading", "holdfast.engine.io.source_reader.SourceReader.read"),
    Point("sending a stripe", "holdfast.engine.io.p2p.P2PExchange.send"),
    Point("receiving a stripe", "holdfast.engine.io.p2p.P2PExchange.receive"),
    Point("waiting for a stripe", "holdfast.engine.io.p2p.P2PExchange.wait"),
    Point("checking", "holdfast.engine.integrity.verify.ChecksumVerifier.check_own"),
    Point("checking what is shared", "holdfast.engine.integrity.verify.ChecksumVerifier.check_shared", leader=True),
    Point("putting values in place", "holdfast.state.restore.LoadTargets.apply", late=True),
)


@contextmanager
def armed(point: Point, trap: Callable[[], None]) -> Iterator[None]:
    """Spring a trap when this process first comes by a point."""
    call = pkgutil.resolve_name(point.where)
    sprung = threading.Lock()

    def wrapped(*args: Any, **options: Any) -> Any:
        here = not point.phase or args[0].phase == point.phase
        if here and not point.after and sprung.acquire(blocking=False):
            trap()
        result = call(*args, **options)
        if here and point.after and sprung.acquire(blocking=False):
            trap()
        return result

    with mock.patch(point.where, wrapped):
        yield
