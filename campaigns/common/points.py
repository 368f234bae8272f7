"""Points of a save and of a load at which something can happen to a rank: function calls."""

from __future__ import annotations

import itertools
import pkgutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock


@dataclass(frozen=True)
class Point:
    """A point before (or ``after``) a call of a function, which all ranks or only rank 0 (``rank_0_only``) make.

    ``phase``: only calls about the vote of this name. ``may_be_committed``: the save may be committed by then.
    ``condition``: the kind of save that reaches the point.
    """

    name: str
    function: str
    after: bool = False
    rank_0_only: bool = False
    phase: str = ""
    may_be_committed: bool = False
    condition: str = ""


_POST = "rankless.engine.comm.vote.VoteRound.post_outcome"
_HOST_VOTE = "rankless.engine.comm.host_vote_channel.HostVoteChannel"
_WRITER = "rankless.storage.direct_io.DirectWriter"
_CONTENT = "rankless.save.training_content.TrainingContent"
_STAGING = "rankless.run.pending_dir.PendingDirectory"

SAVE_POINTS = (
    Point("opening the session", "rankless.engine.comm.session.RankGroup.open_session"),
    Point("capturing the objects", "rankless.save.save_negotiation.capture_training"),
    Point("posting the announcement", _POST, phase="looking at what to save"),
    Point("announcement posted", _POST, after=True, phase="looking at what to save"),
    Point("deciding for all ranks", "rankless.save.save_negotiation._decide_globally", rank_0_only=True),
    Point("planning", "rankless.save.training_content.plan_save"),
    Point("comparing replicas", "rankless.engine.integrity.replica_comparison.digest_replicas"),
    Point("creating the pending directory", f"{_STAGING}.create", rank_0_only=True),
    Point("sizing a file", "rankless.storage.posix.allocate_space", rank_0_only=True),
    Point("pending directory created", f"{_STAGING}.create", after=True, rank_0_only=True),
    Point("prepared", _POST, after=True, phase="preparing the save"),
    Point("preparing in the first vote", f"{_CONTENT}._prepare_known", condition="a second save"),
    Point("prepared in the first vote", f"{_CONTENT}._prepare_known", after=True, condition="a second save"),
    Point("posted in the first vote", _POST, after=True, phase="looking at what to save", condition="a second save"),
    Point("opening in the first vote", f"{_CONTENT}._begin_output", rank_0_only=True, condition="a second save"),
    Point(
        "opened in the first vote", f"{_CONTENT}._begin_output", after=True, rank_0_only=True, condition="a second save"
    ),
    Point("making a gloo group", "rankless.engine.comm.session._make_gloo_group", condition="a second process group"),
    Point("staging", "rankless.save.shard_writer.stage_tensors", condition="asynchronous"),
    Point("staged", _POST, after=True, phase="copying what is to be saved", condition="asynchronous"),
    Point("sending a stripe", "rankless.engine.io.p2p.P2PExchange.send"),
    Point("receiving a stripe", "rankless.engine.io.p2p.P2PExchange.receive"),
    Point("waiting for a stripe", "rankless.engine.io.p2p.P2PExchange.wait"),
    Point("assembling a stripe", "rankless.engine.plan.stripes.StripeSlice.copy_in"),
    Point("posting to the host", "rankless.storage.host_mailbox.HostMailbox.post", condition="several hosts"),
    Point(
        "posted to the host", "rankless.storage.host_mailbox.HostMailbox.post", after=True, condition="several hosts"
    ),
    # A rank may send or poll for its host in any vote, in the last one, too.
    Point("sending the host's outcomes", f"{_HOST_VOTE}._send", may_be_committed=True, condition="several hosts"),
    Point(
        "sent the host's outcomes",
        f"{_HOST_VOTE}._send",
        after=True,
        may_be_committed=True,
        condition="several hosts",
    ),
    Point(
        "posting the decision to the host",
        f"{_HOST_VOTE}._fetch_decision",
        may_be_committed=True,
        condition="several hosts",
    ),
    Point("sending bytes of cells", "rankless.engine.io.cell_exchange.CellExchange.start", condition="several hosts"),
    Point("writing bytes of cells", "rankless.engine.io.cell_exchange.CellExchange.finish", condition="several hosts"),
    Point("writing", f"{_WRITER}.write"),
    Point("syncing", f"{_WRITER}.sync"),
    Point("encoding the CRCs", "rankless.engine.integrity.crc_gather.encode_fragments"),
    Point(
        "sending CRCs to the bucket",
        "rankless.engine.integrity.crc_gather.StoredReports.publish",
        condition="buckets of ranks",
    ),
    Point(
        "merging the CRCs of the bucket",
        "rankless.engine.integrity.crc_gather.StoredReports.merge_bucket",
        condition="buckets of ranks",
    ),
    Point("CRCs reported", _POST, after=True, phase="writing", may_be_committed=True),
    Point("writing headers", "rankless.ondisk.data_files.DataFile.build_header_from_text", rank_0_only=True),
    Point("writing small files", "rankless.engine.io.checkpoint_files._write_small", rank_0_only=True),
    Point("syncing files and directories", "rankless.storage.posix.fsync_path", rank_0_only=True),
    Point("publishing", f"{_STAGING}.publish", rank_0_only=True, condition="a new name"),
    Point("overwriting", f"{_STAGING}.replace", rank_0_only=True, condition="a name that is taken"),
    Point("renaming", "rankless.storage.atomic_rename._renameat2", rank_0_only=True),
    Point("renamed", "rankless.storage.atomic_rename._renameat2", after=True, rank_0_only=True, may_be_committed=True),
    Point(
        "published", f"{_STAGING}.publish", after=True, rank_0_only=True, may_be_committed=True, condition="a new name"
    ),
    Point(
        "overwritten",
        f"{_STAGING}.replace",
        after=True,
        rank_0_only=True,
        may_be_committed=True,
        condition="a name that is taken",
    ),
    Point(
        "removing old checkpoints",
        "rankless.save.folder_output.RunFolderOutput._remove_old",
        rank_0_only=True,
        may_be_committed=True,
        condition="old checkpoints removed",
    ),
    Point(
        "between two renames",
        "rankless.storage.atomic_rename.fsync_directory",
        rank_0_only=True,
        condition="no exchange of names",
    ),
    Point(
        "old checkpoint hidden",
        "rankless.run.folder_removal.rename_path",
        after=True,
        rank_0_only=True,
        may_be_committed=True,
        condition="retention",
    ),
    Point(
        "file of an old checkpoint removed",
        "os.unlink",
        after=True,
        rank_0_only=True,
        may_be_committed=True,
        condition="old checkpoints removed",
    ),
    Point("leaving the session", "rankless.engine.comm.session.Session.leave", may_be_committed=True),
)

LOAD_POINTS = (
    Point("opening the session", "rankless.engine.comm.session.RankGroup.open_session"),
    Point("selecting the checkpoint", "rankless.load.selection.CheckpointSelector.select_next", rank_0_only=True),
    Point("checkpoint selected", _POST, after=True, phase="finding the checkpoint to load"),
    Point("opening the checkpoint", "rankless.load.load_operation.LoadOperation._open_reader"),
    Point("matching the tensors", "rankless.state.restore.LoadTargets.match_targets"),
    Point("tensors matched", _POST, after=True, phase="reading the metadata"),
    Point("planning", "rankless.load.rank_reads.plan_load"),
    Point("making a gloo group", "rankless.engine.comm.session._make_gloo_group", condition="a second process group"),
    Point("reading", "rankless.engine.io.source_reader.SourceReader.read"),
    Point("sending a stripe", "rankless.engine.io.p2p.P2PExchange.send"),
    Point("receiving a stripe", "rankless.engine.io.p2p.P2PExchange.receive"),
    Point("waiting for a stripe", "rankless.engine.io.p2p.P2PExchange.wait"),
    Point("verifying checksums", "rankless.engine.integrity.block_verification.ChecksumVerifier.verify_local"),
    Point(
        "verifying checksums across ranks",
        "rankless.engine.integrity.block_verification.ChecksumVerifier.verify_across_ranks",
        rank_0_only=True,
    ),
    Point("applying the values", "rankless.state.restore.LoadTargets.apply", may_be_committed=True),
)


@contextmanager
def call_at_point(point: Point, action: Callable[[], None], turn: int = 1) -> Iterator[None]:
    """Call ``action`` when this process reaches a point for the time number ``turn``."""
    call = pkgutil.resolve_name(point.function)
    turns = itertools.count(1)

    def wrapped(*args: Any, **options: Any) -> Any:
        here = not point.phase or args[0].phase == point.phase
        if here and not point.after and next(turns) == turn:
            action()
        result = call(*args, **options)
        if here and point.after and next(turns) == turn:
            action()
        return result

    with mock.patch(point.function, wrapped):
        yield
