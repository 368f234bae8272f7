"""``IncrementalSave``: the steps that find out, on all ranks together, which bytes a save need not write.

1. In the vote on the preparation each rank compares samples of its tensors with the files of the base. Training that
   changes everything ends here: nothing was read or hashed for nothing.
2. Rank 0 links the files if all their samples match, and, if the file system can clone ranges, also if some of them
   match.
3. All ranks hash the parts of these files that they hold. Rank 0 compares the CRCs with the base's CRCs. Files with
   equal CRCs stay links; unchanged ranges of the others are cloned.

With ``staging="overlapped"`` the caller promises that only optimizer steps change parameters. Then frozen parameters
that torch has not seen change are trusted in the third step, so that the call returns early. They are hashed in the
background, before anything is committed. For example, in a fine-tuning with a frozen encoder, the files of the encoder
stay links.

Both outputs have one on every rank. The first and third step run in the thread of the caller, the check of trusted
parameters in the thread of the save. A byte that is not written must have been hashed for this save, or be checked
before the commit: versions and samples only decide which bytes are hashed, and when.

The places of tensors in files depend on names, dtypes and shapes alone, so an unchanged tensor is at the same place as
in the base, and the result is, byte for byte, a full save. There are no chains: any checkpoint may be removed at any
time. Samples need no state of the save before, so they work after a load, and on other ranks.

With ``staging="eager"`` everything is hashed during the call, in about half the time of the copy that this replaces.
Versions of tensors must not be trusted there: a change after the call would fail the save, or be in it. With
``staging="overlapped"`` a change of a trusted parameter fails the save with ``TornSnapshotError``, and the next save is
full; ``staging_check="full"`` hashes it during the call. Drains of the local tier share, too, and hash all staged
bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import msgspec

from rankless.engine.comm.session import Session
from rankless.engine.integrity.base_comparison import BaseComparison, FileSamples
from rankless.engine.integrity.block_sums import BlockSums, concatenate_sums
from rankless.engine.integrity.crc_gather import vote_with_sums
from rankless.engine.io.checkpoint_files import NOTHING_UNCHANGED
from rankless.engine.io.tensor_bytes import TensorBytes
from rankless.engine.plan.element_ranges import ElementRange
from rankless.engine.plan.omitted_ranges import OmittedRanges, omit_ranges
from rankless.engine.plan.save_plan import EMPTY_PLAN, SavePlan
from rankless.errors import TornSnapshotError
from rankless.process.prepared_types import prepared
from rankless.save.base_checkpoint import TensorVersions
from rankless.save.shared_files import SharedFiles

#: Sharing is worth its vote from this share of the bytes of a save on. States of random generators, which many
#: trainings never use, are less.
_MIN_SHARE = 0.001

_encode = msgspec.msgpack.Encoder().encode


class Candidates(msgspec.Struct, frozen=True, array_like=True):
    """Files, by number, that may be unchanged as a ``whole``, and ``partial`` ones: some of their tensors may be."""

    whole: list[int] = []
    partial: list[int] = []

    def numbers(self) -> list[int]:
        """Return all of them."""
        return sorted((*self.whole, *self.partial))

    def restrict_to(self, numbers: Collection[int]) -> Candidates:
        """Return those with the given numbers."""
        return Candidates(
            [number for number in self.whole if number in numbers],
            [number for number in self.partial if number in numbers],
        )


@prepared
class _UnchangedDecision(msgspec.Struct, frozen=True, array_like=True):
    """Rank 0's decision on the hashes: ranges that need not be written, if some are trusted, and the begun output."""

    omitted: dict[int, Sequence[ElementRange]]
    has_trusted: bool
    begun: bytes = b""


class IncrementalSave:
    """The part of a save that finds the bytes that it can share with a base.

    ``folder`` has the files of the base; ``None`` in an object store, where a read of them takes requests. ``versions``
    are the versions of this rank's frozen parameters when the base was saved.
    """

    def __init__(self, session: Session, folder: Path | None, versions: TensorVersions) -> None:
        self._session, self._folder, self._base_versions = session, folder, versions
        self._plan: SavePlan = EMPTY_PLAN
        self._tensors: Mapping[tuple[str, str], TensorBytes] = {}
        self._number = 0
        #: On rank 0, the files of the base that may be shared, and the sharing of the new checkpoint.
        self.files: SharedFiles | None = None
        self.unchanged = NOTHING_UNCHANGED
        #: The bytes of tensors that the new checkpoint shares, and facts for all ranks about the files to be written.
        self.shared_nbytes, self.begun = 0, b""
        #: On rank 0, the sums of the bytes that were hashed before the call returned.
        self._sums: BlockSums | None = None
        #: The tensors that are to be hashed in the background.
        self._trusted: dict[int, TensorBytes] = {}
        self._has_trusted = False

    def set_plan(self, plan: SavePlan, tensors: Mapping[tuple[str, str], TensorBytes], number: int) -> None:
        """Set the plan of the save and this rank's tensors. ``number`` counts the saves with this plan."""
        self._plan, self._tensors, self._number = plan, tensors, number

    def sample_files(self, frozen: Collection[tuple[str, str]], *, clones: bool) -> list[FileSamples]:
        """Compare samples of this rank's tensors with the base. Return the samples of each file.

        ``frozen`` are the parameters without gradients.

        Called on each rank when its output prepares, in the vote that opens the output.
        """
        numbers = {number for number, key in enumerate(self._plan.tensors) if key in frozen}
        return self._compare(self._tensors).sample_files(numbers, clones=clones)

    def choose_candidates(self, samples: Sequence[Sequence[FileSamples]], *, clones: bool) -> Candidates:
        """Return the files that may be unchanged, by the samples of all ranks, if sharing them saves much.

        Called on rank 0. ``clones``: parts of files can be shared, too.
        """
        by_file = list(zip(*samples, strict=True))
        whole = [number for number, ranks in enumerate(by_file) if all(rank.all_match for rank in ranks)]
        matching = {number for number, ranks in enumerate(by_file) if any(rank.any_match for rank in ranks)}
        candidates = Candidates(whole, sorted(matching.difference(whole)) if clones else [])
        sizes = [file.size for file in self._plan.files]
        shared = sum(sizes[number] for number in candidates.numbers())
        return candidates if shared >= _MIN_SHARE * sum(sizes) else Candidates()

    def omit_unchanged(self, whole: Collection[int], partial: Collection[int], versions: TensorVersions) -> SavePlan:
        """Hash the candidates, and return the plan without ranges that need not be written. All ranks must call this.

        ``whole`` files may be unchanged, and parts of ``partial`` ones. Frozen parameters that have the same
        ``versions`` as in the base are trusted for now.
        """
        trusted = {number for number, key in enumerate(self._plan.tensors) if self.has_version(key, versions)}

        def hash_candidates() -> BlockSums:
            return self._compare(self._tensors).sum_files({*whole}, {*partial}, trusted)

        raw = vote_with_sums(
            self._session, "finding unchanged bytes", hash_candidates, self._settle, self._plan.rank_order
        )
        decision = msgspec.msgpack.decode(raw, type=_UnchangedDecision)
        self._has_trusted, self.begun = decision.has_trusted, decision.begun
        self.shared_nbytes = sum(
            stop - max(start, self._plan.files[number].data_start)
            for number, ranges in decision.omitted.items()
            for start, stop in ranges
        )
        if decision.has_trusted:
            kept = trusted & self._tensors_in(decision.omitted)
            self._trusted = {number: self._tensors[self._plan.tensors[number]] for number in kept}
        return omit_ranges(self._plan, decision.omitted)

    def find_frozen_files(self, versions: TensorVersions) -> list[int]:
        """Return the files if this rank has only frozen parameters of them, and torch has not seen these change.

        An output in an object store calls it on each rank in the vote that opens the output.
        """
        changed = {
            number
            for number, key in enumerate(self._plan.tensors)
            if key in self._tensors and not self.has_version(key, versions)
        }
        by_file = self._plan.tensors_by_file
        return [number for number, tensors in enumerate(by_file) if not changed.intersection(tensors)]

    def has_version(self, key: tuple[str, str], versions: TensorVersions) -> bool:
        """Return whether torch has seen no change of a frozen parameter since the base was saved."""
        return key in versions and versions[key].changes >= 0 and versions[key] == self._base_versions.get(key)

    def _settle(self, sums: BlockSums) -> bytes:
        """Decide which bytes are shared, and create the other files. Called on rank 0."""
        files = self._require_files()
        omitted, begun = files.settle(sums.matching_blocks(files.crcs, self._plan.tensor_sizes))
        self.unchanged, self._sums = files.unchanged_blocks(omitted), sums
        return _encode(_UnchangedDecision(dict(omitted), bool(sums.trusted.any()), begun))

    def _require_files(self) -> SharedFiles:
        if self.files is None:
            raise AssertionError("rank 0 has chosen files that may be shared")
        return self.files

    def verify_trusted(self) -> None:
        """Hash the tensors that were trusted to be unchanged. All ranks must call this, before the commit.

        Raises ``TornSnapshotError`` if one has changed.
        """
        if not self._has_trusted:
            return

        def hash_trusted() -> BlockSums:
            tensors = {self._plan.tensors[number]: tensor for number, tensor in self._trusted.items()}
            return self._compare(tensors).sum_tensors(self._trusted)

        try:
            vote_with_sums(
                self._session, "checking frozen tensors", hash_trusted, self._check_sums, self._plan.rank_order
            )
        finally:
            self._trusted = {}

    def _check_sums(self, later: BlockSums) -> bytes:
        """Raise ``TornSnapshotError`` if a shared block has not the CRC that it has in the base. Called on rank 0."""
        if self._sums is None:
            raise AssertionError("rank 0 has decided on the sums")
        files = self._require_files()
        sums = concatenate_sums(self._sums.without_trust(), later)
        matching = sums.matching_blocks(files.crcs, self._plan.tensor_sizes)
        for tensor, crcs in self.unchanged.crcs.items():
            if not crcs.keys() <= matching.get(tensor, set()):
                group, name = self._plan.tensors[tensor]
                raise TornSnapshotError(
                    f"{group} tensor {name!r} is frozen, but changed during the save, or by something that torch does "
                    "not count (a write to .data, a merge of adapters) before it: save with "
                    'staging="eager" or staging_check="full". Or its file in '
                    f"{files.base_path} is corrupt: the next save writes everything. Nothing was saved"
                )
        return b""

    def _tensors_in(self, omitted: OmittedRanges) -> set[int]:
        """Return the numbers of the tensors in files that have omitted ranges."""
        return {tensor for number in omitted for tensor in self._plan.tensors_by_file[number]}

    def _compare(self, tensors: Mapping[tuple[str, str], TensorBytes]) -> BaseComparison:
        plan = self._plan
        return BaseComparison(plan, lambda tensor: tensors[plan.tensors[tensor]], self._folder, self._number)
