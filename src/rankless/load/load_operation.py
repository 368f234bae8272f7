"""The steps of one load, from selecting the checkpoint to applying the last value, on all ranks together.

Everything that can be checked without changing the caller's tensors is checked before they are changed.

:mod:`rankless.load.fallback` runs one for each attempt, on every rank, in the thread of the caller. The order of the
votes must stay: select, read the metadata, exchange specs, the last check ("matching …"), read, apply. Nothing of the
caller's may change before the vote "reading".

A pipeline stage requests only its part. So names that no model has are known only when the requests of all ranks are.
Each rank reads the metadata itself: headers, 3 MB for 20,000 tensors, are too much to send to thousands of ranks.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from rankless.engine.comm.call_check import vote_same_call
from rankless.engine.comm.polling import poll_until
from rankless.engine.comm.session import RankGroup, require_equal
from rankless.engine.comm.spec_directory import SpecDigests, SpecDirectory, digest_specs
from rankless.engine.comm.vote import COORDINATOR_RANK
from rankless.engine.integrity.block_verification import ChecksumVerifier
from rankless.engine.integrity.read_crcs import HashingReaderPool, RankCrcs, ReadCrcs
from rankless.engine.io.fragments import decode_fragments, encode_fragments
from rankless.engine.plan.global_spec import GlobalSpec
from rankless.engine.plan.tensor_specs import PER_RANK
from rankless.errors import (
    CheckpointReplacedError,
    CorruptCheckpointError,
    MismatchError,
    NoCheckpointError,
    RanklessError,
    RankMismatchError,
    StateError,
    StorageError,
)
from rankless.formats.adapter_configs import read_adapter_configs
from rankless.formats.detect import open_reader
from rankless.formats.find_training_step import find_step
from rankless.formats.native import NativeReader
from rankless.formats.reader import (
    CheckpointValues,
    EditedCheckpoint,
    Reader,
    check_current,
    check_read,
    describe_doubts,
    detect_replacement,
    original_reader,
)
from rankless.formats.remapped_reader import underlying_reader
from rankless.load.fused_experts import renamed_tensors, with_fused_experts
from rankless.load.load_request import LoadRequest
from rankless.load.rank_reads import Reads
from rankless.load.restore_result import RestoreResult
from rankless.load.selection import CheckpointSelector, SelectedCheckpoint
from rankless.load.torch_file_crcs import check_read_crcs, encode_read_crcs, find_read_crcs
from rankless.observe.events import Event
from rankless.observe.reporter import EventReporter
from rankless.observe.spans import span
from rankless.observe.warning import warn_caller
from rankless.ondisk.manifest import EditRecord, Manifest
from rankless.process.prepared_types import prepared
from rankless.run.claims import LoadedBase
from rankless.run.journal import append_entry, describe_event
from rankless.state.array_decoder import ArrayDecoder
from rankless.state.mismatches import format_lines
from rankless.state.rank_states import RankState, SavedRankStates, restore_resized, restore_same_world_size
from rankless.state.restore import LoadTargets
from rankless.state.restore_context import Merged, list_merged
from rankless.state.training import TrainingObjects
from rankless.storage.filesystem_kind import is_local
from rankless.storage.posix import host_id, list_names, path_exists
from rankless.storage.reader_pool import ReaderPool
from rankless.storage.store import store_of

#: Seconds that a rank waits for a checkpoint that another host sees.
_VISIBILITY_SECONDS = 5.0

if TYPE_CHECKING:
    from rankless.load.tier_load import TierLoad


@prepared
class _MatchedContent(msgspec.Struct, frozen=True, array_like=True):
    """The checkpoint's fingerprint on one rank, the rank's host, and the digests of its requested tensors."""

    fingerprint: str
    host: str
    spec: bytes
    meshes: bytes


@prepared
class _LoadDecision(msgspec.Struct, frozen=True, array_like=True):
    """The decision of rank 0 on the contributions: the directory of specs, and the number of hosts."""

    spec_directory: SpecDirectory
    hosts: int


@prepared
class _Tolerated(msgspec.Struct, frozen=True, array_like=True):
    """The names that a rank lacks and may lack, and the stored tensors that would be dropped although they differ."""

    missing: list[str]
    dropped: list[Merged]


#: The group of the values that a load always returns.
CONTENT = "user_content"

_encode = msgspec.msgpack.Encoder().encode

#: A rank's encoded spec and meshes; empty if another rank sends equal ones.
_EncodedSpec = tuple[bytes, bytes]


#: The begins of the names of components that a load without an optimizer does not want.
_OF_OPTIMIZERS = ("optimizer", "scheduler")

#: Advice if a checkpoint has tensors of other shapes.
_OTHER_MODEL = "If this is another model, pass another path. To change a checkpoint, see rankless.edit."


class LoadOperation:
    """The steps of one load; each ends in a vote.

    The caller's objects are unchanged until every check has passed on every rank.
    """

    def __init__(
        self,
        request: LoadRequest,
        ranks: RankGroup,
        timeout: float,
        selector: CheckpointSelector,
        tier: TierLoad | None = None,
    ) -> None:
        self._tier = tier
        self._request, self._ranks, self._session = request, ranks, ranks.open_session(timeout)
        self._selector = selector
        self._reporter = EventReporter(
            request.path, self._forward_event, is_coordinator=ranks.rank == COORDINATOR_RANK, began=request.began
        )
        self.selected = SelectedCheckpoint()
        self._manifest: Manifest | None = None
        self._format = ""
        #: The caller's tensors that may have been filled.
        self.filled: set[tuple[str, str]] = set()
        #: Whether the last step has begun, which applies the values.
        self.is_applying = False
        #: On rank 0, the tolerated missing things of all ranks, and differences of configurations.
        self._missing: list[str] = []
        self._differences: list[str] = []
        self._doubts: Sequence[str] = ()
        #: The edits that have made the loaded state.
        self._edits: tuple[EditRecord, ...] = ()

    def run(self) -> RestoreResult:
        """Run all steps of the load, on all ranks.

        :mod:`rankless.load.fallback` calls it on every rank. No vote follows the last step, the reports and warnings at
        the end.
        """
        self.selected = self._select_checkpoint()
        folder = self.selected.locate(self._request.path)
        reader, targets, plan = self._prepare_reads(folder)
        verified = self._read_tensors(reader, targets, plan)
        self.is_applying = True
        self._session.run_on_all("putting values in place", targets.apply)
        if self._tier is not None:
            base = self._find_base() if folder.parent == self._request.path else None
            self._tier.finish(self._session, self._manifest, self.selected.generation, base)
        result, training = self._build_result(reader, targets, verified=verified), self._request.training
        self._reporter.report_unread(folder, [note[:3] for note in reader.unread if note.group == CONTENT])
        # Trainers load the model by themselves, and then the rest: a line about each part would be of no use. And who
        # passes a model without an optimizer wants none.
        has_model, has_optimizer = training.model is not None, training.optimizer is not None
        if has_model:
            others = [name for name in result.not_requested if has_optimizer or not name.startswith(_OF_OPTIMIZERS)]
            self._reporter.report_not_requested(folder, others)
        self._reporter.report_loaded(folder, result.step, plan.nbytes, verified=verified, is_part=not has_model)
        if self._missing:
            warn_caller(f"loaded {folder}, but not all that was asked for:\n{format_lines(self._missing)}")
        if self._differences:
            warn_caller(f"loaded {folder} into a model of another configuration:\n{format_lines(self._differences)}")
        for doubt in self._doubts:
            warn_caller(doubt)
        return result

    def _forward_event(self, event: Event) -> None:
        """Write into the journal of its run, on rank 0, that a training continues, and call the listener."""
        is_coordinator, manifest = self._session.rank == COORDINATOR_RANK, self._manifest
        entry = describe_event(event, time.time()) if is_coordinator and self._request.policy.per_rank_content else None
        if entry is not None and manifest is not None:
            append_entry(
                event.path.parent, msgspec.structs.replace(entry, run=manifest.run, world_size=self._session.size)
            )
        self._request.on_event(event)

    def _prepare_reads(self, folder: Path) -> tuple[Reader, LoadTargets, Reads]:
        """Do all that precedes the reads. Afterwards this host has the other hosts' parts of a local checkpoint."""
        tier, generation = self._tier, self.selected.generation
        while True:
            if tier is not None and generation is not None:
                tier.assemble(self._session, generation)
            reader, targets, decision = self._match_targets(folder)
            global_spec = self._exchange_specs(targets, decision)
            plan = self._plan_reads(reader, targets, global_spec, decision)
            if tier is None or generation is None or tier.fetch(self._session, plan):
                return reader, targets, plan

    def _select_checkpoint(self) -> SelectedCheckpoint:
        """Return the checkpoint that rank 0 selects for all ranks."""
        request = self._request

        def check_arguments() -> bytes:
            request.check_arguments()
            return b""

        raw = vote_same_call(
            self._session,
            "finding the checkpoint to load",
            request.describe_call,
            check_arguments,
            lambda _: _encode(msgspec.structs.replace(self._selector.select_next(), token=request.token)),
        )
        return msgspec.msgpack.decode(raw, type=SelectedCheckpoint)

    def _match_targets(self, folder: Path) -> tuple[Reader, LoadTargets, _LoadDecision]:
        """Read the metadata and match the stored tensors with the caller's, allocating new tensors if needed."""
        request, rank = self._request, self._session.rank
        components = set(request.training.component_names())

        def read_metadata() -> tuple[Reader, LoadTargets]:
            reader = self._open_reader(folder)
            with self._detect_replacement(reader):
                if request.verify:
                    with span("verify small files", "verify"):
                        reader.check_files()
                check_read(reader, lambda note: note.group in components)
                training, policy = request.training, request.policy
                targets = LoadTargets(training, reader.groups, reader.tied, policy, renamed_tensors(reader))
                arrays = ArrayDecoder(reader.groups.get(PER_RANK, {}))
                values = reader.read_values(rank, targets.shared, arrays)
            targets.match_targets(values.shared, *self._restore_rank_state(reader, values, arrays))
            targets.fill_inventory(rank)
            if rank == COORDINATOR_RANK:
                with suppress(RanklessError):  # a corrupt configuration prevents a load only if all is verified
                    self._differences = list(
                        targets.explain_adapters(read_adapter_configs(original_reader(underlying_reader(reader))))
                    )
            return reader, targets

        def encode_contribution(matched: tuple[Reader, LoadTargets]) -> bytes:
            reader, targets = matched
            digests = digest_specs(targets.inventory.build_spec(), targets.inventory.build_meshes())
            return _encode(_MatchedContent(reader.fingerprint, host_id(), digests.spec, digests.meshes))

        def decide(posted: list[bytes]) -> bytes:
            contents = [msgspec.msgpack.decode(raw, type=_MatchedContent) for raw in posted]
            require_equal(f"the contents of {folder}", [content.fingerprint for content in contents])
            directory = SpecDirectory.from_digests([SpecDigests(content.spec, content.meshes) for content in contents])
            return _encode(_LoadDecision(directory, len({content.host for content in contents})))

        matched, raw = self._session.vote("reading the metadata", read_metadata, encode_contribution, decide)
        return *matched, msgspec.msgpack.decode(raw, type=_LoadDecision)

    def _restore_rank_state(
        self, reader: Reader, values: CheckpointValues, arrays: ArrayDecoder
    ) -> tuple[RankState, ArrayDecoder]:
        """Return the per-rank state that this rank gets back, and the decoder of the tensors in it."""
        rank, training, generators = self._session.rank, self._request.training, self._request.policy.rng
        if values.rank_values is None or values.world_size != self._session.size:
            arrays = ArrayDecoder(arrays.infos)
        saved = SavedRankStates(values.ranks, arrays, partial(reader.block_crcs, PER_RANK), str(reader.path))
        if values.rank_values is not None and values.world_size == self._session.size:
            rank_state = restore_same_world_size(
                values.rank_values, saved, rank, training.dataloader, generators=generators
            )
            return rank_state, arrays
        return restore_resized(saved, rank, self._session.size, training.dataloader, generators=generators), arrays

    def _exchange_specs(self, targets: LoadTargets, decision: _LoadDecision) -> GlobalSpec:
        """Return the tensors that all ranks request. Of ranks with equal specs only the lowest rank sends its spec."""
        directory = decision.spec_directory
        spec, meshes = targets.inventory.build_spec(), targets.inventory.build_meshes()
        if directory.is_uniform:
            return directory.share_spec(spec, meshes, self._ranks.global_ranks())
        _, raw = self._session.vote(
            "exchanging tensor specs",
            lambda: directory.encode_contribution(self._session.rank, spec, meshes),
            _encode,
            lambda posted: _encode([msgspec.msgpack.decode(raw, type=_EncodedSpec) for raw in posted]),
        )
        encoded_specs = msgspec.msgpack.decode(raw, type=list[_EncodedSpec])
        return directory.build_global_spec(encoded_specs, self._ranks.global_ranks())

    def _plan_reads(
        self, reader: Reader, targets: LoadTargets, global_spec: GlobalSpec, decision: _LoadDecision
    ) -> Reads:
        """Run the last checks before the caller's objects are changed, and plan the reads of each rank."""
        request = self._request
        # Of a generation in the local tier, each host gets its missing parts before.
        exchange_is_needed = self.selected.generation is None
        has_page_cache = decision.hosts == 1 and not store_of(request.path).is_remote
        exchange = request.share_reads == "always" or (request.share_reads == "auto" and not has_page_cache)

        #: The differences between stored tensors that are one tensor of the model, as far as this rank compared them.
        dropped: list[Merged] = []

        def check_and_plan() -> Reads:
            tensors = list(global_spec.iter_tensors())
            keys = {key for spec in global_spec.specs for key in spec.known_names}
            known_names = {key: global_spec.known_names(key) for key in keys}
            pairs = list_merged(known_names)[self._session.rank :: self._session.size]
            dropped.extend(_select_unequal(reader, pairs) if pairs else ())
            for merged in dropped:
                targets.add_dropped(*merged)
            requested = {(tensor.group, tensor.name) for tensor in tensors}
            targets.check_matches(requested, known_names, str(reader.path), advice=_OTHER_MODEL)
            self._check_refilled(targets, reader.path)
            exchanges = exchange and exchange_is_needed and self._session.size > 1
            return Reads.build(reader, targets, tensors, self._ranks, exchange=exchanges)

        def collect_tolerated(posted: list[bytes]) -> bytes:
            reports = [msgspec.msgpack.decode(raw, type=_Tolerated) for raw in posted]
            self._missing = list(dict.fromkeys(name for report in reports for name in report.missing))
            return _encode([merged for report in reports for merged in report.dropped])

        def encode_tolerated(_: Reads) -> bytes:
            return _encode(_Tolerated(targets.report.tolerated_reasons(request.policy), dropped))

        phase = "matching the checkpoint with what it is loaded into"
        reads, raw = self._session.vote(phase, check_and_plan, encode_tolerated, collect_tolerated)
        for merged in msgspec.msgpack.decode(raw, type=list[Merged]):
            if merged not in dropped:
                targets.add_dropped(*merged)
        return reads

    def _check_refilled(self, targets: LoadTargets, folder: Path) -> None:
        """Raise ``MismatchError`` if a failed attempt filled a tensor that this checkpoint does not fill."""
        stale = sorted(self._selector.filled - targets.tensors.filled)
        if stale:
            raise MismatchError(f"{folder} has no {'/'.join(stale[0])}, which would keep values of another checkpoint")

    def _open_reader(self, folder: Path) -> Reader:
        keys = self._request.keys
        if self._session.rank != COORDINATOR_RANK and self.selected.generation is None:
            self._await_checkpoint(folder)
        try:
            if self._tier is not None and self.selected.generation is not None:
                opened: Reader = self._tier.open_reader(folder, keys)
            else:
                opened = NativeReader(folder, keys=keys) if self.selected.id else open_reader(folder, keys)
            reader = self._request.reader_adapter(opened if self._request.edit is None else self._edit(opened))
            self._format = opened.format
            self._doubts = describe_doubts(opened) if self._session.rank == COORDINATOR_RANK else ()
            original = original_reader(reader)
            self._manifest = original.manifest if isinstance(original, NativeReader) else None
            before = self._manifest.edits if self._manifest else ()
            self._edits = reader.edits if isinstance(reader, EditedCheckpoint) else tuple(before or ())
            return with_fused_experts(reader, self._request.training)
        except NoCheckpointError:
            if self._session.rank == COORDINATOR_RANK:
                raise
            raise RankMismatchError(
                f"{folder}, which rank 0 selected, does not exist on this rank: "
                "all ranks must load from a shared file system"
            ) from None

    def _edit(self, opened: Reader) -> Reader:
        """Return the checkpoint after the edit that was asked for, unless it came about by that."""
        edited = opened if self._request.edit is None else self._request.edit(opened)
        if edited is not opened and self.selected.generation is not None:
            raise StateError(
                f"the newest checkpoint of {self._request.path} is in the local tier, and what is in there cannot be "
                "edited: write it into the run directory first, with rankless drain"
            )
        return edited

    def _await_checkpoint(self, folder: Path) -> None:
        """Make this host see the checkpoint that rank 0 has selected, if that is on another host.

        A client of a network file system may remember for half a minute that a name was missing, or was another
        directory. It asks the server again if the directory is listed. If that does not help, the caller raises.
        """
        if store_of(folder).is_remote or is_local(folder.parent):
            return

        def is_visible() -> bool:
            with suppress(StorageError):
                list_names(folder.parent)
                return path_exists(folder) and self.selected.still_exists(self._request.path)
            return False

        # The other ranks wait for the error of this one for at most the timeout.
        seconds = min(_VISIBILITY_SECONDS, self._session.timeout / 2)
        poll_until(is_visible, seconds, lambda: f"{folder} to appear on this host")

    def _read_tensors(self, reader: Reader, targets: LoadTargets, plan: Reads) -> bool:
        """Fill the targets. Return whether every byte was verified."""
        verifier, stored = None, underlying_reader(reader)
        if self._request.verify:
            reads_again = self._tier is None or self.selected.generation is None or self._tier.reads_again
            verifier = ChecksumVerifier(stored, list(plan.number), reads_again=reads_again)
        on_moved = self._reporter.progress_counter("load", plan.nbytes).add

        def fill_targets() -> RankCrcs:
            targets.materialize_models()
            targets.count_changes()
            lacks_crcs = verifier is not None and not verifier.has_every_crc
            crcs = find_read_crcs(plan) if lacks_crcs else ReadCrcs([])
            make_readers = partial(HashingReaderPool, crcs=crcs) if crcs.checksums else ReaderPool
            with self._detect_replacement(reader):
                fragments = plan.run(targets, self._ranks, self._session, on_moved, make_readers=make_readers)
                if lacks_crcs:
                    check_current(reader)
                partly_read = verifier.verify_local(fragments) if verifier else {}
                if verifier and isinstance(stored, EditedCheckpoint):
                    stored.verify_inputs()
            return RankCrcs(encode_fragments(partly_read), encode_read_crcs(crcs))

        def verify_crcs(posted: list[bytes]) -> bytes:
            if verifier:
                reports = [msgspec.msgpack.decode(raw, type=RankCrcs) for raw in posted]
                with self._detect_replacement(reader):
                    verifier.verify_across_ranks(decode_fragments(report.fragments for report in reports))
                    check_read_crcs(report.pieces for report in reports)
            else:
                check_current(reader)
            return b""

        self.filled = targets.tensors.filled
        try:
            self._session.vote("reading", fill_targets, _encode, verify_crcs)
        except (CorruptCheckpointError, StorageError, CheckpointReplacedError) as error:
            *other_args, message = error.args
            advice = _partly_filled_advice(self._request.training)
            raise type(error)(*other_args, f"{message}. {advice}") from error
        return verifier is not None and (
            verifier.has_all_crcs(plan.iter_stored(targets))
            or (
                isinstance(stored, EditedCheckpoint) and all(stored.has_crcs(*key) for key in plan.iter_stored(targets))
            )
        )

    def _detect_replacement(self, reader: Reader) -> AbstractContextManager[None]:
        """Tell an error of a checkpoint of another system that was replaced. The selector does so for one of a run."""
        return nullcontext() if self.selected.id else detect_replacement(reader)

    def _build_result(self, reader: Reader, targets: LoadTargets, *, verified: bool) -> RestoreResult:
        manifest = self._manifest
        exact, reconstructed = targets.classify_components()
        if isinstance(edited := underlying_reader(reader), EditedCheckpoint):
            groups = edited.find_edited_groups()
            reconstructed = [*reconstructed, *(name for name in exact if name in groups), *edited.reconstructed]
            exact = [name for name in exact if name not in groups]
        return RestoreResult(
            user_content=targets.user_content,
            per_rank_content=targets.per_rank_content,
            tag=self.selected.tag,
            step=manifest.step if manifest else find_step(self._format, targets.user_content),
            verified=verified,
            missing=tuple(targets.report.missing),
            unexpected=tuple(name for _, name in targets.report.unexpected),
            exact=tuple(exact),
            reconstructed=tuple(reconstructed),
            skipped_checkpoints=tuple(record.tag for record in self.selected.corrupt),
            run=manifest.run if manifest else "",
            path=self.selected.locate(self._request.path),
            id=manifest.id if manifest else "",
            source="run directory" if self.selected.generation is None else "local tier",
            corrupt_parts=() if self._tier is None else self._tier.problems,
            matched_by=dict(targets.matched_by),
            not_requested=tuple(targets.components_not_requested()),
            sequence=manifest.sequence if manifest else 0,
            edits=self._edits,
            saved_ranks=manifest.provenance.world_size if manifest else 0,
            ranks=self._ranks.size,
            base=self._find_base(),
        )

    def _find_base(self) -> LoadedBase | None:
        """Return the base that a save needs to continue the checkpoint, unless it is in another format."""
        manifest, selected = self._manifest, self.selected
        if manifest is None:
            return None
        base = LoadedBase.of(manifest, selected.tag, selected.newest, selected.token, selected.seen)
        return msgspec.structs.replace(base, edits=self._edits) if self._edits else base


def _partly_filled_advice(training: TrainingObjects) -> str:
    filled = [name for name in training.component_names() if name.partition("/")[0] in {"model", "optimizer"}]
    if not filled:
        return "The objects passed were not changed"
    pronoun = "it" if len(filled) == 1 else "them"
    return f"The {' and '.join(filled)} passed may be partly filled: do not use {pronoun}"


def _select_unequal(reader: Reader, pairs: Sequence[Merged]) -> list[Merged]:
    """Return the pairs of stored tensors that differ, although they are one tensor of the model."""
    from rankless.load.tied_comparison import are_equal  # noqa: PLC0415 - few loads compare

    return [pair for pair in pairs if not are_equal(reader, *pair)]
