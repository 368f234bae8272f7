"""Converts ZeRO-1 states of NxD offline, to another number of data-parallel ranks or to whole states.

Unlike NxD's converter, it also converts master weights, scalars and parameters without a state, and checks that the
files belong together before it writes anything. The input is only read, and the output appears atomically when it is
complete.

:mod:`rankless.nxd.command` calls it, in one process.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rankless.conversion.source_checksums import check_file_checksums
from rankless.conversion.torch_names_hash import names_hash
from rankless.dcp.reader.dcp_directory import METADATA
from rankless.errors import FormatError, InvalidArgumentError, NoCheckpointError
from rankless.formats.stored_tensor import StoredTensor
from rankless.nxd.reader import nxd_file_names, zero_states
from rankless.nxd.reader.nxd_file_names import OPTIM, RankCoordinates, RankFiles, full_name
from rankless.nxd.reader.rank_file import RankFile, RankFileAccess, read_rank_file
from rankless.nxd.reader.replica_evidence import ReplicaEvidence
from rankless.nxd.reader.step_dirs import MARKERS
from rankless.nxd.writer import torch_files
from rankless.nxd.writer.rank_file_plan import PlannedFile, plan_rank_files
from rankless.run.pending_dir import check_destination
from rankless.run.unpublished_output import pending_directory
from rankless.storage import posix
from rankless.storage.reader_pool import ReaderPool


@dataclass(frozen=True)
class ZeroRequest:
    """A conversion: input folder, output path, and the number of data-parallel ranks (``None``: the whole state)."""

    source: Path
    final: Path
    ranks: int | None

    def check_arguments(self) -> None:
        """Raise an error if the request is invalid, before anything is written."""
        if self.ranks is not None and self.ranks < 1:
            raise InvalidArgumentError(f"--dp_size must be at least 1; got {self.ranks}")
        if not posix.is_directory(self.source):
            raise NoCheckpointError(f"there is no folder {self.source}")
        source, final = self.source.resolve(), self.final.resolve()
        if final.is_relative_to(source) or source.is_relative_to(final):
            raise InvalidArgumentError(
                f"the output {self.final} and the input {self.source} must not contain each other: choose another "
                "output path"
            )
        check_destination(self.final)


def convert_zero_checkpoints(request: ZeroRequest) -> Path:
    """Convert the ZeRO-1 state of a checkpoint, and copy the other files of its folder. Return the output path.

    Raises ``CorruptCheckpointError`` naming a file that is missing or not of the same save, ``FormatError`` for a state
    that cannot be converted, ``TagExistsError`` and ``InvalidArgumentError``. On an error the input is unchanged, and
    no output is left.
    """
    request.check_arguments()
    with ReaderPool() as readers:
        rank_files = _find_rank_files(request)
        files = _read_files(rank_files, RankFileAccess(request.source, readers))
        check_file_checksums([path for file in files.values() for path in file.files])
        plan = _plan_files(request, rank_files, files)
        with pending_directory(request.final) as pending:
            _write_files(request, plan, pending)
            _check_output(pending, request)
    return request.final


def _find_rank_files(request: ZeroRequest) -> RankFiles:
    """Return the ranks' optimizer files. Raises ``FormatError`` if this converter does not support them."""
    folder = request.source / OPTIM
    if posix.is_file(folder / METADATA):
        raise FormatError(
            f"{folder} was saved with use_zero1_dcp: it needs no conversion, rankless loads it on any number of ranks"
        )
    rank_files = nxd_file_names.find_rank_files(folder)
    if rank_files is None:
        raise FormatError(
            f"{request.source} has no ranks' files in {OPTIM}/: --input_dir must be one checkpoint, the folder of a tag"
        )
    if rank_files.full and request.ranks is None:
        raise InvalidArgumentError(f"{folder} holds whole states already: pass --convert_to_sharded")
    if rank_files.experts:
        raise FormatError(f"{folder} has states of expert-parallel ranks, which were not saved by a ZeRO-1 optimizer")
    return rank_files


def _read_files(rank_files: RankFiles, access: RankFileAccess) -> dict[RankCoordinates, RankFile]:
    """Read and check the files of all ranks."""
    files = {rank: read_rank_file(path, access) for rank, path in rank_files.files.items()}
    for file in files.values():
        if isinstance(file.root, dict) and zero_states.EXPERTS in file.root:
            raise FormatError(
                f"{file.path} has states of experts, whose data-parallel groups are smaller, and no file says by how "
                "much. Convert the whole checkpoint instead: rankless convert … --to nxd"
            )
        file.check_tensors()
    return files


def _join_states(
    rank_files: RankFiles, files: Mapping[RankCoordinates, RankFile]
) -> dict[tuple[int, int], dict[str, Any]]:
    """Return the whole state of each tensor-parallel rank of each stage. Raises if the files are not of one save."""
    evidence, degrees = ReplicaEvidence(), rank_files.degrees
    states: dict[tuple[int, int], dict[str, Any]] = {}
    for pp in range(degrees.pp):
        for tp in range(degrees.tp):
            group = [files[RankCoordinates(dp, 0, tp, pp)] for dp in range(degrees.dp)]
            states[tp, pp] = zero_states.join_zero_states(group, evidence)
            _note_steps(states[0, pp], states[tp, pp], evidence)
    evidence.require_consistent()
    return states


def _note_steps(first: Mapping[str, Any], other: Mapping[str, Any], evidence: ReplicaEvidence) -> None:
    """Add step counts to the evidence: they must be equal on all tensor-parallel ranks."""
    for pid, states in first[zero_states.BASE].items():
        for name, value in states.items():
            match = other[zero_states.BASE].get(pid, {}).get(name)
            if (
                isinstance(value, StoredTensor)
                and isinstance(match, StoredTensor)
                and value is not match
                and not value.info.shape
            ):
                evidence.copies.append((f"{zero_states.BASE} of {pid}, {name}", (value, match)))


def _plan_files(
    request: ZeroRequest, rank_files: RankFiles, files: Mapping[RankCoordinates, RankFile]
) -> list[PlannedFile]:
    """Plan the output files."""
    planned_files: list[PlannedFile] = []
    for (tp, pp), root in _join_states(rank_files, files).items():
        first = files[RankCoordinates(0, 0, tp, pp)]
        if request.ranks is None:
            roots = {full_name(tp, pp): root}
        else:
            shards = zero_states.shard_zero_state(root, request.ranks, first.path)
            roots = {RankCoordinates(dp, 0, tp, pp).file_name(experts=False): shard for dp, shard in enumerate(shards)}
        for name, shard in roots.items():
            planned_files += plan_rank_files(f"{OPTIM}/{name}", shard, names_hash, xser=first.xser)
    return planned_files


def _write_files(request: ZeroRequest, plan: Sequence[PlannedFile], pending: Path) -> None:
    """Write the planned files, then copy the other files, markers last."""
    other_files = list(_list_other_files(request.source))
    total_bytes = sum(file.frame.size for file in plan) + sum(
        posix.file_size(request.source / name) for name in other_files
    )
    posix.check_space(request.final.parent, total_bytes)
    torch_files.write_torch_files(pending, plan)
    for name in (
        *(file_name for file_name in other_files if file_name not in MARKERS),
        *(file_name for file_name in MARKERS if file_name in other_files),
    ):
        posix.make_parents(pending, name)
        posix.copy_file(request.source / name, pending / name)
    posix.sync_tree(pending)


def _list_other_files(source: Path) -> Iterator[str]:
    """Yield the other files in the checkpoint's folder: the model, the scheduler, markers."""
    for file in posix.walk_files(source):
        name = file.relative_to(source).as_posix()
        if not name.startswith(f"{OPTIM}/"):
            yield name


def _check_output(pending: Path, request: ZeroRequest) -> None:
    """Raise ``CorruptCheckpointError`` if the output is not a complete state of the requested ranks."""
    with ReaderPool() as readers:
        written = _find_rank_files(ZeroRequest(pending, request.final, 1))
        _join_states(written, _read_files(written, RankFileAccess(pending, readers)))
