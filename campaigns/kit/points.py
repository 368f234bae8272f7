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


_POST = "holdfast.engine.ballot.Ballot.post"
_WRITER = "holdfast.storage.bulk.BulkWriter"
_DRAFT = "holdfast.engine.commit.Draft"

SAVING = (
    Point("beginning a session", "holdfast.engine.ranks.Ranks.session"),
    Point("looking", "holdfast.agreement.capture"),
    Point("announcing", _POST, phase="looking at what to save"),
    Point("announced", _POST, after=True, phase="looking at what to save"),
    Point("settling", "holdfast.agreement._settle", leader=True),
    Point("planning", "holdfast.saving.plan_save"),
    Point("comparing replicas", "holdfast.engine.replicas.digests"),
    Point("opening the draft", f"{_DRAFT}.open", leader=True),
    Point("sizing a file", "holdfast.storage.local.allocate", leader=True),
    Point("draft open", f"{_DRAFT}.open", after=True, leader=True),
    Point("prepared", _POST, after=True, phase="preparing the save"),
    Point("making a group to exchange over", "holdfast.engine.ranks._gloo_beside", needs="a group beside"),
    Point("staging", "holdfast.moving.stage", needs="asynchronous"),
    Point("staged", _POST, after=True, phase="copying what is to be saved", needs="asynchronous"),
    Point("sending a stripe", "holdfast.engine.wire.Wire.send"),
    Point("receiving a stripe", "holdfast.engine.wire.Wire.receive"),
    Point("waiting for a stripe", "holdfast.engine.wire.Wire.wait"),
    Point("putting a stripe together", "holdfast.engine.stripes.Share.put"),
    Point("writing", f"{_WRITER}.write"),
    Point("syncing", f"{_WRITER}.sync"),
    Point("reporting", "holdfast.engine.tree.encode_fragments"),
    Point("telling its group", "holdfast.engine.tree._Group.tell", needs="groups"),
    Point("folding for its group", "holdfast.engine.tree._Group.folded", needs="groups"),
    Point("reported", _POST, after=True, phase="writing", late=True),
    Point("writing headers", "holdfast.layout.files.DataFile.header", leader=True),
    Point("writing small files", "holdfast.storage.local.write_small", leader=True),
    Point("syncing folders", "holdfast.storage.local.sync_folder", leader=True),
    Point("publishing", f"{_DRAFT}.publish", leader=True, needs="a new name"),
    Point("overwriting", f"{_DRAFT}.overwrite", leader=True, needs="a name that is taken"),
    Point("renaming", "holdfast.storage.folders._renameat2", leader=True),
    Point("renamed", "holdfast.storage.folders._renameat2", after=True, leader=True, late=True),
    Point("published", f"{_DRAFT}.publish", after=True, leader=True, late=True, needs="a new name"),
    Point("overwritten", f"{_DRAFT}.overwrite", after=True, leader=True, late=True, needs="a name that is taken"),
    Point("tidying up", "holdfast.saving.Save._tidy", late=True, needs="old ones go"),
    Point("between two renames", "holdfast.storage.folders.sync_folder", leader=True, needs="no exchange of names"),
    Point("giving an old one up", "holdfast.upkeep.rename", after=True, leader=True, late=True, needs="retention"),
    Point("removing an old one", "os.unlink", after=True, leader=True, late=True, needs="old ones go"),
    Point("parting", "holdfast.engine.ranks.Session.part", late=True),
)

LOADING = (
    Point("beginning a session", "holdfast.engine.ranks.Ranks.session"),
    Point("finding", "holdfast.finding.Search.next", leader=True),
    Point("found", _POST, after=True, phase="finding the checkpoint"),
    Point("opening", "holdfast.loading.Load._open"),
    Point("matching", "holdfast.state.restore.Intake.match"),
    Point("matched", _POST, after=True, phase="reading the metadata"),
    Point("planning", "holdfast.reading.plan_load"),
    Point("making a group to exchange over", "holdfast.engine.ranks._gloo_beside", needs="a group beside"),
    Point("reading", "holdfast.engine.opened.Opened.read"),
    Point("sending a stripe", "holdfast.engine.wire.Wire.send"),
    Point("receiving a stripe", "holdfast.engine.wire.Wire.receive"),
    Point("waiting for a stripe", "holdfast.engine.wire.Wire.wait"),
    Point("checking", "holdfast.engine.checks.Checks.check_own"),
    Point("checking what is shared", "holdfast.engine.checks.Checks.check_shared", leader=True),
    Point("putting values in place", "holdfast.state.restore.Intake.apply", late=True),
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
