"""ZeRO-1 states of NxD for another number of data-parallel ranks, or for all of them in one: its offline converter.

Beside NxD's: master weights, scalars and parameters without a state are converted; whether files belong together is
checked before anything is written; the input is only read, and the output appears in one step, complete.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.compat.nxd.convert import torch_files
from holdfast.compat.nxd.format import file_names, zero
from holdfast.compat.nxd.format.consistency import ReplicaEvidence
from holdfast.compat.nxd.format.file_names import OPTIM, RankCoordinates, RankFiles, full_name
from holdfast.compat.nxd.format.rank_file import FileAccess, RankFile, read_rank_file
from holdfast.compat.nxd.format.rank_file_writer import PlannedFile, plan_rank_files
from holdfast.compat.nxd.format.step_dirs import MARKERS
from holdfast.conversion.source_checksums import check_file_checksums
from holdfast.conversion.torch_names_hash import names_hash
from holdfast.errors import FormatError, InvalidArgumentError, NoCheckpointError
from holdfast.formats.dcp.folder import METADATA
from holdfast.formats.stored_tensor import StoredTensor
from holdfast.run.staging_dir import check_destination, staging_directory
from holdfast.storage import directories, posix
from holdfast.storage.reader_pool import ReaderPool


@dataclass(frozen=True)
class ZeroRequest:
    """What is asked for. ``ranks``: how many data-parallel ranks it is to be for; ``None``: the whole state."""

    source: Path
    final: Path
    ranks: int | None

    def check(self) -> None:
        """Raise for what cannot be done, before anything is touched."""
        if self.ranks is not None and self.ranks < 1:
            raise InvalidArgumentError(f"--dp_size is a number of ranks, at least 1, not {self.ranks}")
        if not posix.is_directory(self.source):
            raise NoCheckpointError(f"there is no folder {self.source}")
        source, final = self.source.resolve(), self.final.resolve()
        if final.is_relative_to(source) or source.is_relative_to(final):
            raise InvalidArgumentError(
                f"the output {self.final} is, or lies in, the input {self.source}: choose another"
            )
        check_destination(self.final)


def convert_zero_checkpoints(request: ZeroRequest) -> Path:
    """Convert a checkpoint's ZeRO-1 state, and take along what else is in its folder.

    Raises ``CorruptCheckpointError`` naming a file that is missing or not of the same save, ``FormatError`` for a state that
    cannot be converted, ``TagExistsError``, ``InvalidArgumentError``. The input is as it was then, and nothing is left.
    """
    request.check()
    with ReaderPool() as readers:
        found = _find(request)
        files = _read(found, FileAccess(request.source, readers))
        check_file_checksums([path for file in files.values() for path in file.files])
        plan = _plan(request, found, files)
        with staging_directory(request.final) as draft:
            _write(request, plan, draft)
            _check(draft, request)
    return request.final


def _find(request: ZeroRequest) -> RankFiles:
    folder = request.source / OPTIM
    if posix.is_file(folder / METADATA):
        raise FormatError(
            f"{folder} was saved with use_zero1_dcp; it goes to any number of ranks as it is: holdfast reads it"
        )
    found = file_names.find_rank_files(folder)
    if found is None:
        raise FormatError(
            f"{request.source} has no ranks' files in {OPTIM}/: --input_dir is one checkpoint, a tag's folder"
        )
    if found.full and request.ranks is None:
        raise InvalidArgumentError(f"{folder} holds whole states already")
    if found.experts:
        raise FormatError(f"{folder} has states of expert-parallel ranks, which were not saved by a ZeRO-1 optimizer")
    return found


def _read(found: RankFiles, access: FileAccess) -> dict[RankCoordinates, RankFile]:
    files = {rank: read_rank_file(path, access) for rank, path in found.files.items()}
    for file in files.values():
        if isinstance(file.root, dict) and zero.EXPERTS in file.root:
            raise FormatError(
                f"{file.path} has states of experts, whose data-parallel groups are smaller by a number that no file "
                "says: they cannot be told apart from here. Convert the whole checkpoint: holdfast convert … --to nxd"
            )
        file.check()
    return files


def _joined(found: RankFiles, files: Mapping[RankCoordinates, RankFile]) -> dict[tuple[int, int], dict[str, Any]]:
    """The whole state of each tensor-parallel rank of each stage, proven to be of one save."""
    evidence, degrees = ReplicaEvidence(), found.degrees
    whole: dict[tuple[int, int], dict[str, Any]] = {}
    for pp in range(degrees.pp):
        for tp in range(degrees.tp):
            group = [files[RankCoordinates(dp, 0, tp, pp)] for dp in range(degrees.dp)]
            whole[tp, pp] = zero.join_zero_states(group, evidence)
            _note_steps(whole[0, pp], whole[tp, pp], evidence)
    evidence.check()
    return whole


def _note_steps(one: Mapping[str, Any], other: Mapping[str, Any], evidence: ReplicaEvidence) -> None:
    """Numbers of steps are the same on all tensor-parallel ranks."""
    for pid, states in one[zero.BASE].items():
        for name, value in states.items():
            match = other[zero.BASE].get(pid, {}).get(name)
            if (
                isinstance(value, StoredTensor)
                and isinstance(match, StoredTensor)
                and value is not match
                and not value.info.shape
            ):
                evidence.copies.append((f"{zero.BASE} of {pid}, {name}", (value, match)))


def _plan(request: ZeroRequest, found: RankFiles, files: Mapping[RankCoordinates, RankFile]) -> list[PlannedFile]:
    planned_files: list[PlannedFile] = []
    for (tp, pp), root in _joined(found, files).items():
        first = files[RankCoordinates(0, 0, tp, pp)]
        if request.ranks is None:
            roots = {full_name(tp, pp): root}
        else:
            parts = zero.shard_zero_state(root, request.ranks, first.path)
            roots = {RankCoordinates(dp, 0, tp, pp).name(experts=False): part for dp, part in enumerate(parts)}
        for name, part in roots.items():
            planned_files += plan_rank_files(f"{OPTIM}/{name}", part, names_hash, xser=first.xser)
    return planned_files


def _write(request: ZeroRequest, plan: Sequence[PlannedFile], draft: Path) -> None:
    others = list(_others(request.source))
    sizes = sum(file.frame.size for file in plan) + sum(posix.size_of(request.source / name) for name in others)
    directories.check_space(request.final.parent, sizes)
    torch_files.write_torch_files(draft, plan)
    for name in (*(one for one in others if one not in MARKERS), *(one for one in MARKERS if one in others)):
        posix.make_parents(draft, name)
        posix.copy_file(request.source / name, draft / name)
    posix.sync_tree(draft)


def _others(source: Path) -> Iterator[str]:
    """What else is in the checkpoint's folder: the model, the scheduler, markers."""
    for file in posix.walk_files(source):
        name = file.relative_to(source).as_posix()
        if not name.startswith(f"{OPTIM}/"):
            yield name


def _check(draft: Path, request: ZeroRequest) -> None:
    """Raise ``CorruptCheckpointError`` where what was written is not a complete state of so many ranks."""
    with ReaderPool() as readers:
        written = _find(ZeroRequest(draft, request.final, 1))
        _joined(written, _read(written, FileAccess(draft, readers)))
