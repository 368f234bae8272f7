"""The claims of jobs in the history of a run directory, and one job's knowledge of it.

Each claim is a small file or object ``.history/N.json``, in the run directory or next to it (see
:mod:`rankless.run.records_folder`), which no other job can create: an :class:`rankless.run.history.Entry`. It is
never changed, and never removed before its run. Rank 0 of a job claims; the vote of the save tells all ranks.

:mod:`rankless.run.catalog` claims in a save (inside the vote on the preparation) and after a load,
:mod:`rankless.tier.job` in a load with a local tier, and ``rankless rollback`` in a process of its own. The exclusive
creation of the file decides between jobs: a look before it proves nothing. The JSON of entries is on disks, and jobs of
other versions read it.
"""

from __future__ import annotations

import errno
import mmap
import os
import re
import secrets
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from rankless.errors import StateError, StorageError, SupersededError
from rankless.observe.warning import warn_caller
from rankless.ondisk.manifest import EditRecord
from rankless.process.prepared_types import prepared
from rankless.run.history import Entry, FoundCheckpoint, Job, KnownCheckpoint, cut_line
from rankless.run.records_folder import FOLDER, records_of
from rankless.storage import posix
from rankless.storage.store import map_requests, store_of

_SUFFIX = ".json"

#: The names of entries without their suffix: eight digits, or more without zeros before them.
_STEM = re.compile("[0-9]{8}|[1-9][0-9]{8,11}")

#: The names of files that become entries.
_DRAFT = re.compile(r"\.[0-9]{8,12}\.json\.[0-9a-f]{16}")

#: The most entries that are remembered, and the most bytes of one.
_MAX_REMEMBERED, _MAX_BYTES = 2**12, 2**24

#: The most entries that are read to show a history, and the most bytes of all of them.
_MAX_SHOWN, _MAX_SHOWN_BYTES = 1000, 2**26

#: The entries that are read at a time to show a history.
_BATCH = 16

#: The most attempts to claim while other jobs do.
_ATTEMPTS = 1000

#: The errors of bytes that are no entry.
_UNDECODABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)

#: The errors of a path that is no file of an entry's size, but a directory, a pipe, a socket or a loop of links.
_NO_ENTRY = {errno.EISDIR, errno.EINVAL, errno.ENXIO, errno.EFBIG, errno.ELOOP}

#: The most seconds that the clocks of two hosts may differ by.
_MOST_CLOCK_DIFFERENCE = 300.0

#: The attempts to read an entry that is listed, and the seconds between.
_READ_ATTEMPTS, _READ_SECONDS = 20, 0.05


E = TypeVar("E", Entry, Entry | None)


@prepared
class LoadedBase(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint that a job has loaded, of a run directory or by its own path.

    ``newest`` is the highest sequence number of the current checkpoints of its run then, or ``None`` if the caller has
    named the checkpoint. ``seen`` is the newest incarnation of the run then. ``token`` is the job's token: rank 0's,
    which has selected the checkpoint. ``resumes``: the training goes on from it. Without an ``id`` the job begins the
    run anew: all earlier checkpoints of the run are abandoned. ``edits`` are the edits that have made it.
    """

    id: str
    run: str
    incarnation: int
    sequence: int
    tag: str
    newest: int | None
    token: str
    seen: int = 0
    resumes: bool = False
    edits: tuple[EditRecord, ...] = ()

    @classmethod
    def of(cls, saved: KnownCheckpoint, tag: str, newest: int | None, token: str, seen: int = 0) -> LoadedBase:
        """Return the base for a checkpoint that a job has loaded."""
        return cls(
            id=saved.id,
            run=saved.run,
            incarnation=saved.incarnation,
            sequence=saved.sequence,
            tag=tag,
            newest=newest,
            token=token,
            seen=seen,
        )


class Claim(msgspec.Struct, frozen=True):
    """The incarnation that a job has claimed."""

    run: str
    incarnation: int


class Numbering:
    """The highest sequence number that this process has given to a checkpoint in a local tier of a run directory.

    Processes that are forked from it share the number: they save as a part of its job, and no list of a directory in
    memory shows a checkpoint that another one has saved if that was removed.
    """

    def __init__(self) -> None:
        self._shared = mmap.mmap(-1, 8)

    @property
    def highest(self) -> int:
        """The highest number that any of these processes has noted."""
        return int.from_bytes(self._shared[:], "little")

    def note(self, sequence: int) -> None:
        """Note the sequence number of a checkpoint."""
        self._shared[:] = max(self.highest, sequence).to_bytes(8, "little")


#: The numberings of this process. The tier of a directory may be ahead of it, also when no object uses it any more.
_numberings: dict[Path, Numbering] = {}


def numbering_of(run: Path) -> Numbering:
    """Return the numbering of a run directory in this process. Links to it lead to the same."""
    return _numberings.setdefault(run.resolve(), Numbering())


class JobHistory(msgspec.Struct):
    """The knowledge of one job about the history of a run directory. Its objects and ranks share it.

    Attributes:
        token: A text that no other job has.
        base: The checkpoint that the job has loaded and not continued yet.
        claim: The incarnation that it has claimed.
        runs: The runs that it has saved or loaded, in any directory: in a copy of that it continues them, too.
        sequence: The highest sequence number that it has saved or loaded here.
        point: The incarnation and the sequence number of the checkpoint that its state goes on from.
        newest: The id and the tag of that checkpoint.
        numbering: The numbers of its process in local tiers, which no list shows.
        command: The command that claims without a job; else empty.
        tier: The folder of the local tier that it claims with; else empty.
        groups: The name of the job, if its replica groups hold the same state and any of them may save; else empty.
        edits: The edits that have made its state: its checkpoints name them.
        began: When this process began to look at the run directory, in seconds since 1970.
    """

    token: str = msgspec.field(default_factory=lambda: secrets.token_hex(8))
    base: LoadedBase | None = None
    claim: Claim | None = None
    runs: set[str] = msgspec.field(default_factory=set)
    sequence: int = 0
    point: tuple[int, int] = (0, 0)
    newest: tuple[str, str] = ("", "")
    numbering: Numbering = msgspec.field(default_factory=Numbering)
    command: str = ""
    tier: str = ""
    groups: str = ""
    edits: tuple[EditRecord, ...] = ()
    began: float = msgspec.field(default_factory=time.time)

    def note_loaded(self, base: LoadedBase, *, resumes: bool) -> None:
        """Note the loaded checkpoint. If the training goes on from it, the next save continues it.

        Other loads, such as for an evaluation, change nothing for a job that saves already.
        """
        self.runs.add(base.run)
        self.sequence = max(self.sequence, base.sequence)
        if resumes or (self.claim is None and self.base is None):
            known = self.base if self.base is not None and self._completes(base) else base
            self.base, self.claim, self.token = msgspec.structs.replace(known, resumes=resumes), None, base.token
            self.point, self.newest = (base.incarnation, base.sequence), (base.id, base.tag)
            self.edits = base.edits

    def _completes(self, base: LoadedBase) -> bool:
        """Return whether a load by name completes an earlier one, which may have selected the latest checkpoint.

        A framework reads its own state from the latest checkpoint first, and then the model and the optimizer by the
        path of that.
        """
        first = self.base
        return first is not None and not first.resumes and (first.id, base.newest) == (base.id, None)

    def abandons(self, saved: KnownCheckpoint, *, is_current: bool) -> bool:
        """Return whether a checkpoint of the job's run is abandoned, or will be when the job saves."""
        if self.base is not None:
            return saved.run == self.base.run and (not is_current or saved.sequence > self.base.sequence)
        return self.claim is not None and saved.run == self.claim.run and not is_current

    def note_saved(self, run: str, incarnation: int, sequence: int, newest: tuple[str, str]) -> None:
        """Note the identity of a checkpoint that the job saves; ``newest`` are its id and tag."""
        self.runs.add(run)
        self.sequence = max(self.sequence, sequence)
        if incarnation:
            self.claim, self.base, self.point = Claim(run, incarnation), None, (incarnation, sequence)
            self.newest = newest


def read_history(run: Path) -> Entry:
    """Return the newest entry of the history of a run directory; an empty one if there is none.

    An entry that is corrupt is passed over, with a warning. Raises ``StorageError`` if it cannot be read now.

    Called on rank 0 in votes, and by commands. An entry that cannot be read now must be an error: without the entry an
    abandoned checkpoint would be the latest.
    """
    return read_newest(run)[0]


def read_history_in(run: Path, names: Collection[str]) -> tuple[Entry, int]:
    """Return the newest entry and the highest number as :func:`read_newest`. ``names`` are those in the directory."""
    return _read_newest(records_of(run, names) / FOLDER)


def read_newest(run: Path) -> tuple[Entry, int]:
    """Return the newest entry that is not corrupt, and the highest number."""
    return _read_newest(_folder_of(run))


def _folder_of(run: Path) -> Path:
    """Return the folder that has, or will have, the entries of a run."""
    return records_of(run) / FOLDER


def _read_newest(folder: Path) -> tuple[Entry, int]:
    """Return the newest entry in a folder that is not corrupt, and the highest number.

    An entry that is listed, but not found, is looked for again: replicas lag, and entries are never removed.
    """
    for _ in range(_READ_ATTEMPTS):
        etags = _list_entries(folder)
        with suppress(FileNotFoundError):
            for number, etag in sorted(etags.items(), reverse=True):
                if (entry := _read_listed(folder, number, etag)) is not None:
                    return entry, max(etags)
            return Entry(), max(etags, default=0)
        time.sleep(_READ_SECONDS)
    path = _path_of(folder, number)
    raise StorageError(
        errno.EIO, f"{path} is listed, but cannot be found: try again, or remove it if it is a broken link"
    )


def _list_entries(folder: Path) -> dict[int, str]:
    """Return the numbers of all entries, in an object store with their versions.

    For example, ``00000003.json`` has the number 3.
    """
    etags = store_of(folder).list_entries(folder)
    stems = {name.removesuffix(_SUFFIX): etag for name, etag in etags.items() if name.endswith(_SUFFIX)}
    return {int(stem): etag for stem, etag in stems.items() if _STEM.fullmatch(stem)}


#: The entries that were read from object stores, by path and version.
_entries: dict[tuple[Path, str], Entry] = {}

#: The corrupt entries that this process has warned of.
_passed_over: set[Path] = set()


def _read_listed(folder: Path, number: int, etag: str) -> Entry | None:
    """Return an entry; ``None``, with a warning, if it is corrupt. Raises ``FileNotFoundError`` if it is not found."""
    path = _path_of(folder, number)
    if etag and (path, etag) in _entries:
        return _entries[path, etag]
    entry = _decode_entry(path) or _decode_entry(path)  # bytes may change on their way
    if entry is None or entry.number != number:  # with another number, a stranger has written or copied it
        if path not in _passed_over:
            warn_caller(
                f"{path} is corrupt, so it is not known which checkpoints its job continued: it is passed over. "
                "If no job has written it, move it elsewhere"
            )
        _passed_over.add(path)
        return None
    if etag:
        if len(_entries) >= _MAX_REMEMBERED:
            _entries.clear()
        _entries[path, etag] = entry
    return entry


def _decode_entry(path: Path) -> Entry | None:
    try:
        return msgspec.json.decode(store_of(path).read_small(path, _MAX_BYTES), type=Entry)
    except StorageError as error:
        if error.errno == errno.ENOENT:
            raise FileNotFoundError(str(path)) from error
        if error.errno in _NO_ENTRY:
            return None
        raise
    except _UNDECODABLE:
        return None


def _find_entry(run: Path, number: int) -> Entry | None:
    """Return one entry; ``None`` if there is none, because the directory has lost it, or if it is corrupt."""
    folder = _folder_of(run)
    etags = _list_entries(folder)
    with suppress(FileNotFoundError):
        return _read_listed(folder, number, etags[number]) if number in etags else None
    return None


class ShownHistory(msgspec.Struct, frozen=True):
    """The entries of a history, from the newest to the oldest.

    ``unreadable`` of those that were looked at are corrupt or cannot be read now. ``left_out`` were not looked at.
    """

    entries: Sequence[Entry] = ()
    unreadable: int = 0
    left_out: int = 0


def read_entries(run: Path, wanted: Collection[int] = ()) -> ShownHistory:
    """Return the entries of the history of a run directory, to show them.

    Their number is bounded: the newest entry comes first, then the entries with the numbers ``wanted``, then all others
    from the newest to the oldest. Entries that cannot be read are counted, and raise nothing. A branch that a newer
    entry has is left out of the older ones.
    """
    folder = _folder_of(run)
    listed = _list_entries(folder)
    newest = max(listed, default=0)
    by_use = sorted(listed, key=lambda number: (number != newest, number not in wanted, -number))
    chosen = sorted(by_use[:_MAX_SHOWN], reverse=True)
    entries: list[Entry] = []
    looked_at = nbytes = 0
    seen: set[tuple[str, int]] = set()
    while looked_at < len(chosen) and nbytes < _MAX_SHOWN_BYTES:
        batch = chosen[looked_at : looked_at + _BATCH]
        looked_at += len(batch)
        looks = map_requests(lambda one: _look_at_entry(_path_of(folder, one)), batch)
        for number, (entry, size) in zip(batch, looks, strict=True):
            nbytes += size
            if entry is not None and entry.number == number:
                new = {name: branch for name, branch in entry.runs.items() if (name, branch.incarnation) not in seen}
                seen |= {(name, branch.incarnation) for name, branch in new.items()}
                entries.append(msgspec.structs.replace(entry, runs=new))
    return ShownHistory(entries, looked_at - len(entries), len(listed) - looked_at)


def _look_at_entry(path: Path) -> tuple[Entry | None, int]:
    """Return an entry and its size in bytes; no entry if it is corrupt or cannot be read."""
    try:
        data = store_of(path).read_small(path, _MAX_BYTES)
        return msgspec.json.decode(data, type=Entry), len(data)
    except (StorageError, *_UNDECODABLE):
        return None, 0


def _path_of(folder: Path, number: int) -> Path:
    return folder / f"{number:08d}{_SUFFIX}"


def _create(run: Path, entry: Entry) -> bool:
    """Create an entry. Return whether no other job has. A store may ignore that it exists, or its reply may be lost.

    Raises ``StateError`` if no reader would find an entry of this number: a file of a stranger has the highest one.
    """
    folder = _folder_of(run)
    path, data = _path_of(folder, entry.number), msgspec.json.encode(entry)
    if not _STEM.fullmatch(path.stem):
        highest = _path_of(folder, entry.number - 1)
        raise StateError(f"no number above that of {highest} is left for a job: move that file elsewhere")
    store = store_of(run)
    store.make_folder(folder)
    return store.create_small(path, data)


def add_entry(run: Path, make: Callable[[Entry, int], E], seen: tuple[Entry, int] | None = None) -> E:
    """Add the entry that ``make`` returns for the newest one and the highest number; nothing if it returns ``None``.

    It is called again if another job was faster. ``seen`` are these two at a look a moment ago: if there are newer
    ones, the entry has a number that is taken.
    """
    for _ in range(_ATTEMPTS):
        entry = make(*(seen or read_newest(run)))
        if entry is None or _create(run, entry):
            return entry
        seen = None
    raise StorageError(f"could not write into {_folder_of(run)}: other jobs do all the time")


def remove_drafts(run: Path, seconds: float) -> None:
    """Remove files older than ``seconds`` in a folder that were left by jobs which were killed while they claimed.

    A job that is only stopped there gets an error when it goes on.
    """
    folder = _folder_of(run)
    for name in posix.list_names(folder):
        draft = folder / name
        with suppress(StorageError):  # it has become an entry meanwhile, or another clean-up has removed it
            if _DRAFT.fullmatch(name) and time.time() - posix.last_change_time(draft) > seconds:
                posix.remove_file(draft)


def read_token(run: Path) -> str:
    """Return the token of the first entry, which identifies a run directory also after a move; "" without a history.

    A copy of the directory has the same one.
    """
    entry = _find_entry(run, min(_list_entries(_folder_of(run)), default=0))
    return "" if entry is None else entry.job.token


def announce(run: Path, above: int) -> int:
    """Announce on rank 0 that a job will look into the tiers of its hosts. Return its number, above ``above``.

    :class:`~rankless.tier.job.TierJob` calls it before the ranks take over the folders of their hosts: the number must
    be in the run directory first.
    """
    me = describe_job(secrets.token_hex(8))
    return add_entry(run, lambda newest, highest: newest.announce(max(highest, above), me)).number


def describe_job(token: str, command: str = "", tier: str = "", groups: str = "") -> Job:
    """Return this process as a job, with a local ``tier`` or without, or as a ``command`` that claims without one."""
    return Job(token, posix.host_name(), os.getpid(), round(time.time(), 3), command, tier, groups)


#: The incarnations that this process has claimed, by the real path of the run directory: another object of the process
#: may use a link. Each with the token of its job. A forked process has them, too.
_claimed: dict[tuple[Path, Claim], str] = {}


def is_of_earlier_job(run: Path, claimed: Claim, job: JobHistory) -> bool:
    """Return whether an incarnation was claimed before this process began, and not at the same time by another group.

    The clocks of hosts may differ by some minutes.
    """
    entry = _find_entry(run, claimed.incarnation)
    return entry is not None and entry.job.time < job.began - _MOST_CLOCK_DIFFERENCE


def warn_of_lost_history(run: Path, claimed: Claim) -> None:
    """Warn if the entry of a job, which is not listed, is really missing: a list may lag."""
    if not store_of(run).is_file(_path_of(_folder_of(run), claimed.incarnation)):
        warn_caller(
            f"{run} has lost the history that this job has written into it: the directory was moved or removed "
            "meanwhile. What was saved before is where it was moved to; what is saved now is here"
        )


def _has_claimed(run: Path, claimed: Claim) -> bool:
    """Return whether this process has claimed an incarnation."""
    return (run.resolve(), claimed) in _claimed


def _allow(newest: Entry) -> None:
    """Raise nothing: nothing forbids the claim."""


def claim(
    run: Path,
    job: JobHistory,
    found: Sequence[FoundCheckpoint],
    check: Callable[[Entry], None] = _allow,
    *,
    seen: tuple[Entry, int] | None = None,
    warns: bool = True,
) -> tuple[Claim, Entry]:
    """Claim an incarnation for a job, on rank 0, unless other ranks of it have claimed one. Return the history too.

    ``found`` are the checkpoints of the directory, oldest first. ``seen`` is its history at that look: the newest entry
    that is not corrupt, and the highest number, which a store that ignores conditions would let this job take.
    ``check`` is called with the entry right before the new one, and raises an error if the claim is too late.
    ``warns``: warn of a rollback. Raises ``StateError`` if another job has continued the run since this one has loaded
    it.
    """
    before = Entry()
    own: tuple[Claim, str] | None = None

    def make(newest: Entry, highest: int) -> Entry | None:
        nonlocal before, own
        before, own = newest, _find_own_claim(run, job, newest)
        if own is not None:
            return None
        check(newest)
        return _make_claim(run, job, newest, found, above=highest)

    newest = add_entry(run, make, seen or read_newest(run)) or before
    claimed, token = own or (Claim(newest.run, newest.number), job.token)
    if own is None:
        if warns and job.base is not None and job.base.newest is None:
            abandoned = [one for one in found if before.is_current(one) and not newest.is_current(one)]
            went_back = job.base.run in before.runs and before.runs[job.base.run].rolled_back_to == job.base.id
            _warn_of_rollback(run, job.base.tag, abandoned, again=went_back)
        elif warns and job.base is not None and not job.tier:
            _warn_of_unread_tier(run, job.base, before)
    _claimed[run.resolve(), claimed] = token
    return claimed, newest


def _find_own_claim(run: Path, job: JobHistory, newest: Entry) -> tuple[Claim, str] | None:
    """Return the incarnation that other ranks of the job have claimed, and the token of their entry.

    A sub-group has continued the same checkpoint. A replica group has continued a checkpoint that leads to it, or, if
    this one has loaded nothing, has begun the run. A group that has named its checkpoint goes back to it, unless
    another group has.
    """
    base = job.base
    runs = sorted(newest.runs, key=lambda name: -newest.runs[name].incarnation) if job.groups else []
    for name in runs if base is None else [base.run]:
        branch = newest.runs.get(name)
        if branch is None:
            continue
        is_claimed_there = base is None or branch.line[-1:] == ((base.incarnation, base.sequence),)
        follows = job.groups and base is not None and base.newest is not None and newest.is_current(base)
        if not is_claimed_there and not follows:
            continue
        own = newest if newest.number == branch.incarnation else _find_entry(run, branch.incarnation)
        if own is not None and (own.job.groups == job.groups if job.groups else own.job.token == job.token):
            return Claim(name, branch.incarnation), own.job.token
    return None


def _warn_of_rollback(run: Path, tag: str, abandoned: Sequence[KnownCheckpoint], *, again: bool) -> None:
    """Warn if checkpoints are abandoned. ``again``: perhaps a scheduler has started the same command again."""
    advice = ". To go on with them instead, load the latest checkpoint, and do not name this one" if again else ""
    if abandoned:
        warn_caller(
            f"the run in {run} goes back to {tag!r}{' again' if again else ''}: {len(abandoned)} later checkpoint(s) "
            f"are abandoned. They stay until a policy removes them, and can be loaded by their tags{advice}"
        )


def _warn_of_unread_tier(run: Path, base: LoadedBase, before: Entry) -> None:
    """Warn a job without a local tier if the job before it had one: checkpoints only there would be passed over."""
    branch = before.runs.get(base.run)
    if branch is None or _has_claimed(run, Claim(base.run, branch.incarnation)):
        return
    last = before if before.number == branch.incarnation else _find_entry(run, branch.incarnation)
    if last is not None and last.job.tier:
        warn_caller(
            f"the job before this one had a local tier, {last.job.tier}. If it was killed, the tier may have a later "
            f"checkpoint than {run / base.tag}, from which this job goes on: to look there, start again with local="
        )


def _make_claim(run: Path, job: JobHistory, newest: Entry, found: Sequence[FoundCheckpoint], *, above: int) -> Entry:
    base = _find_base(job, newest, found)
    me = describe_job(job.token, job.command, job.tier, job.groups)
    if base is None or not base.id:
        return newest.begin_run(secrets.token_hex(8) if base is None else base.run, me, found, above=above)
    current = [saved for saved in found if saved.run == base.run and newest.is_current(saved)]
    last = max((saved.sequence for saved in current), default=base.sequence)
    if base.newest is not None and (last > base.newest or _was_claimed_since(run, base, newest)):
        raise StateError(
            f"another job has continued the run in {run} since {base.tag!r} was loaded: load the latest checkpoint, or "
            f"go back to {base.tag!r} by its tag"
        )
    # A command that names a checkpoint, and is started again, goes on, also if nothing was later at the first time.
    is_rollback = last > base.sequence or base.newest is None
    if newest.is_current(base):
        line = newest.line_to(base, found)
    else:
        is_rollback = True
        line = cut_line(_line_of(run, base), base, found)
    return newest.continue_run(base, line, me, found, is_rollback=is_rollback, newest=base.newest, above=above)


def _was_claimed_since(run: Path, base: LoadedBase, newest: Entry) -> bool:
    """Return whether another process has continued, or rolled back, the run since its latest checkpoint was loaded."""
    branch = newest.runs.get(base.run)
    if branch is None or branch.incarnation <= base.seen:
        return False
    return not _has_claimed(run, Claim(base.run, branch.incarnation))


def _line_of(run: Path, base: LoadedBase) -> tuple[tuple[int, int], ...]:
    """Return the line of an abandoned checkpoint, which its own entry knows."""
    own = _find_entry(run, base.incarnation)
    branch = None if own is None else own.runs.get(base.run)
    return () if branch is None else branch.line


def _find_base(job: JobHistory, newest: Entry, found: Sequence[FoundCheckpoint]) -> LoadedBase | None:
    """Return the base of a job: the checkpoint that it loaded here, or the newest one of a run that it has loaded."""
    if job.base is not None:
        return job.base
    continued = [saved for saved in found if saved.run in job.runs and newest.is_current(saved)]
    return LoadedBase.of(continued[-1], "", None, job.token) if continued else None


def check_not_superseded(run: Path, newest: Entry, job: JobHistory) -> None:
    """Raise ``SupersededError`` if another job has continued the run of a job.

    If another object of this process has, and has not abandoned the checkpoint that this one goes on from, the job goes
    on with its incarnation.

    A save calls it on rank 0 in the vote on the preparation, and in its first vote if the tag is taken; an output in an
    object store calls it again around the publication.
    """
    claimed = job.claim
    if claimed is None:
        return
    if _is_overwritten(run, newest, claimed, job.groups):
        raise SupersededError(_describe_superseded(f"another job has continued the run in {run}", newest, claimed))
    if not newest.has_continued(claimed.run, claimed.incarnation):
        return
    branch = newest.runs[claimed.run]
    latest = Claim(claimed.run, branch.incarnation)
    incarnation, sequence = job.point
    is_abandoned = incarnation != branch.incarnation and dict(branch.line).get(incarnation, 0) < sequence
    if not is_abandoned and _has_claimed(run, latest):
        job.claim = latest
        return
    if is_abandoned:
        what = f"the run in {run} was continued from an earlier checkpoint than the last one of this job"
    else:
        what = f"another job has continued the run in {run}"
    raise SupersededError(_describe_superseded(what, newest, claimed))


def _is_overwritten(run: Path, newest: Entry, claimed: Claim, groups: str) -> bool:
    """Return whether the entry of a job's claim belongs to another job now, which has claimed at the same moment.

    A store that ignores conditions lets both write it. Another one of its replica ``groups`` is the same job.
    """
    if groups and newest.job.groups == groups:
        return False
    own = _claimed.get((run.resolve(), claimed), newest.job.token)
    return (newest.run, newest.number) == (claimed.run, claimed.incarnation) and newest.job.token != own


def _describe_superseded(what: str, newest: Entry, claimed: Claim) -> str:
    who = _name_claimant(newest.job) if newest.run == claimed.run else ""
    return f"{what}{who}: this job saves nothing any more. End it, or load the latest checkpoint"


def _name_claimant(job: Job) -> str:
    """Return which process has claimed an incarnation, and by which command, to end a message with it.

    For example, ``(process 42 on node-1)``.
    """
    return f"{f' by `{job.command}`' if job.command else ''} (process {job.pid} on {job.host})"
