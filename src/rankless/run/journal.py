"""The journal of a run directory: the events of its checkpoints, which their manifests do not tell.

Rank 0 of a job appends a line of JSON for each save, each resume and each removal to the hidden file
``.journal.jsonl``, in the run directory or next to it (:mod:`rankless.run.records_folder`). One of a mebibyte becomes
``.journal.1.jsonl``, in place of the one before. The journal is for reports only, and no part of the format: lines
that cannot be read are skipped, and a failure to write one affects nothing. In an object store each entry is an
object: see :mod:`rankless.run.object_journal`.

Saves, drains and loads append in the thread that reports their events; retention and ``rankless prune`` append their
removals. The report, ``rankless top`` and :mod:`rankless.save.cadence` read it. One line is one ``write``, and fields
keep their names: journals of older versions are read.

Fields of each kind besides ``time``, ``tag``, ``step`` and ``run``: ``saved`` (the checkpoint is durable) has all but
``error``; ``failed`` (a save or a drain) has ``world_size``, ``hosts``, ``placement`` and ``error``; ``resumed`` (a
load with an optimizer or a data loader) has ``world_size`` and ``seconds``; ``removed`` has none. For example,
``placement`` is ``[["node-1", 8], ["node-2", 8]]``; it is unknown for drains, and for saves that fail at once.
``phases`` are ``[["prepare", 0.01], ["write", 0.6]]``, and add up to ``seconds``. Nothing is synced: after a power
failure the last lines may be missing.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from rankless.errors import StorageError
from rankless.observe.events import DrainFailed, Event, Loaded, Saved, SaveFailed
from rankless.observe.warning import warn_caller
from rankless.process.prepared_types import prepared
from rankless.run.run_store import run_store_of, tag_of

#: A journal of so many bytes is replaced by a new one.
MAX_BYTES = 2**20

#: The most entries of a journal in an object store.
MAX_OBJECTS = 1000

#: The most bytes of a line. One write of so few is not divided.
_MAX_LINE = 4096

#: The most characters of an error's message in a line: escaped, each takes up to six bytes.
_MAX_ERROR = 400

#: The most hosts of consecutive ranks in a line.
MAX_PLACEMENT = 8

#: Numbers that an entry may have: others cannot be shown, and the line is skipped.
_Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e11)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]

#: Numbers of the history, which are not shown.
_Number = Annotated[int, msgspec.Meta(ge=0)]

#: The hosts of consecutive ranks: the name of a host, and the number of ranks on it.
Placement = tuple[tuple[str, _Count], ...]

_log = logging.getLogger("rankless")

#: The run directories with a journal that this process could not write.
_failed: set[Path] = set()


@prepared
class JournalEntry(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line of a journal.

    Attributes:
        kind: The kind of event: a checkpoint was saved, a save failed, a training has continued from a checkpoint, or a
            checkpoint was removed by retention or ``rankless prune``.
        time: When it had happened, in seconds since 1970.
        tag: The tag of the checkpoint.
        step: The training step, if one is known.
        run: The id of the run; empty if it is not known.
        world_size: The number of ranks of the job.
        hosts: The number of hosts of the job; 0 if it is not known.
        blocking_seconds: For how long the save kept its caller.
        seconds: How long the save took until the checkpoint was durable, or how long the load took.
        nbytes: The size of the checkpoint.
        shared_nbytes: How much of it was not written, because the checkpoint before has it.
        error: Why the save failed.
        placement: The hosts of its ranks, from rank 0 on, as far as there is room for them.
        phases: How many seconds each phase of the save took on rank 0, in order: see :class:`rankless.Saved`.
        incarnation: The incarnation that saved the checkpoint; 0 if it is not known, as of all but saves.
        sequence: The sequence number of the checkpoint that was saved.
    """

    kind: Literal["saved", "failed", "resumed", "removed"]
    time: _Seconds
    tag: str
    step: float | None = None
    run: str = ""
    world_size: _Count = 0
    hosts: _Count = 0
    blocking_seconds: _Seconds = 0.0
    seconds: _Seconds = 0.0
    nbytes: _Count = 0
    shared_nbytes: _Count = 0
    error: str = ""
    placement: Placement = ()
    phases: tuple[tuple[str, _Seconds], ...] = ()
    incarnation: _Number = 0
    sequence: _Number = 0


def describe_event(event: Event, time: float) -> JournalEntry | None:
    """Return the entry of an event; ``None`` if the journal has none for it."""
    if isinstance(event, Saved):
        return JournalEntry(
            "saved",
            time,
            tag_of(event.path),
            event.step,
            blocking_seconds=round(event.blocking_seconds, 6),
            seconds=round(event.seconds, 6),
            nbytes=event.nbytes,
            shared_nbytes=event.shared_nbytes,
            phases=tuple((phase, round(max(seconds, 0.0), 6)) for phase, seconds in event.phases.items()),
        )
    if isinstance(event, Loaded):
        return JournalEntry("resumed", time, tag_of(event.path), event.step, seconds=round(event.seconds, 6))
    if isinstance(event, SaveFailed | DrainFailed):
        return JournalEntry("failed", time, tag_of(event.path), error=str(event.error)[:_MAX_ERROR])
    return None


def describe_placement(host_of: Sequence[int], names: Mapping[int, str]) -> Placement:
    """Return the hosts of the first ranks. ``host_of`` is the number of the host of each rank."""
    runs = itertools.groupby(host_of)
    return tuple((names.get(host, ""), len(list(ranks))) for host, ranks in itertools.islice(runs, MAX_PLACEMENT))


def append_entry(run: Path, entry: JournalEntry) -> None:
    """Append an entry to the journal of a run directory. The first failure of this process warns; none raises.

    Only a committed save creates a journal: all else leaves a directory without one as it is.
    """
    if run in _failed:
        return
    line = msgspec.json.encode(entry)
    if len(line) >= _MAX_LINE:
        return
    is_saved = entry.kind == "saved"
    try:
        run_store_of(run).append_journal(line, entry.time, create=is_saved)
    except StorageError as error:
        _failed.add(run)
        if is_saved:  # a reader may lack the permission
            warn_caller(f"the checkpoint is saved, but its report will lack this and later events: {error}")
        else:
            _log.debug("the journal of %s is not written", run, exc_info=True)


def read_journal(run: Path, count: int = MAX_OBJECTS) -> list[JournalEntry]:
    """Return the newest entries of the journal of a run, oldest first. Lines that are no entry are skipped.

    In an object store these are at most ``count``, each a request; in a directory, all.
    """
    lines = run_store_of(run).read_journal(count, _MAX_LINE)
    entries = (_parse_line(line) for line in lines if 0 < len(line) < _MAX_LINE)
    return sorted((entry for entry in entries if entry is not None), key=lambda entry: entry.time)


def _parse_line(line: bytes) -> JournalEntry | None:
    try:
        return msgspec.json.decode(line, type=JournalEntry)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
