"""Reader for a folder of NxD: reads its files, and orders them by the parallelism of the ranks.

:class:`~rankless.nxd.reader.nxd_reader.NxdReader` calls it on each rank that opens a checkpoint. All ranks must get the
same fingerprint: it depends on pickles and sizes of files only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rankless.dcp.reader.dcp_directory import METADATA
from rankless.errors import CorruptCheckpointError, FormatError
from rankless.formats.stored_tensor import StoredTensor, UnreadableTensor
from rankless.nxd.reader import nxd_file_names, rank_trees, zero_states
from rankless.nxd.reader.numbered_states import PipelineStage
from rankless.nxd.reader.nxd_file_names import MODEL, OPTIM, VALUES, RankCoordinates, RankFiles
from rankless.nxd.reader.rank_file import RankFile, RankFileAccess, read_rank_file, read_tree
from rankless.nxd.reader.replica_evidence import ReplicaEvidence
from rankless.nxd.reader.step_dirs import check_finished
from rankless.ondisk.block_crcs import crc64
from rankless.ondisk.read_budget import ReadBudget
from rankless.storage.reader_pool import ReaderPool
from rankless.storage.store import store_of


@dataclass
class NxdCheckpoint:
    """The contents of a folder. ``values`` has ``scheduler`` and ``user_content``, if they exist."""

    path: Path
    degrees: RankCoordinates
    stages: list[PipelineStage] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    files: list[RankFile] = field(default_factory=list)
    others: list[Path] = field(default_factory=list)
    budget: ReadBudget = field(default_factory=ReadBudget)
    evidence: ReplicaEvidence = field(default_factory=ReplicaEvidence)

    @property
    def fingerprint(self) -> str:
        """A digest of all pickles and of the sizes of the files."""
        sizes = repr([(file.digest, [store_of(path).file_size(path) for path in file.files]) for file in self.files])
        return f"{crc64(sizes.encode()):016x}"


def read_folder(path: Path) -> NxdCheckpoint:
    """Read the trees of all files; tensors are read when they are needed.

    Raises ``CorruptCheckpointError`` naming a file that is missing or from another save.
    """
    check_finished(path)
    access = RankFileAccess(path, ReaderPool())
    if nxd_file_names.has_legacy_files(path):
        models, optimizers, values = rank_trees.read_legacy_files(path, access)
        saved = NxdCheckpoint(path, _count_ranks(path, models, optimizers), values=values)
        saved.files = list({id(file): file for file in (*models.values(), *optimizers.values())}.values())
    else:
        models, optimizers = (_read_kind(path / kind, access) for kind in (MODEL, OPTIM))
        saved = NxdCheckpoint(
            path, _count_ranks(path, models, optimizers), files=[*models.values(), *optimizers.values()]
        )
        _read_values(saved, access)
    saved.budget = access.budget
    saved.stages = list(_build_stages(saved, models, optimizers))
    return saved


def _read_kind(folder: Path, access: RankFileAccess) -> dict[RankCoordinates, RankFile]:
    """Read the files of the models or of the optimizers."""
    if store_of(folder).file_exists(folder / METADATA):
        raise FormatError(f"{folder} was saved with use_zero1_dcp: open it separately, as a DCP folder")
    rank_files = nxd_file_names.find_rank_files(folder)
    if rank_files is None:
        return {}
    return {
        rank: read_rank_file(file, access, _redirect_path(rank_files, rank)) for rank, file in rank_files.files.items()
    }


def _redirect_path(rank_files: RankFiles, rank: RankCoordinates) -> Path | None:
    """Return the file of the first expert-parallel rank, which stores the tensors that are not experts'."""
    return rank_files.files[rank._replace(ep=0)] if rank.ep else None


def _read_values(saved: NxdCheckpoint, access: RankFileAccess) -> None:
    for key, name in VALUES.items():
        if store_of(saved.path).file_exists(saved.path / name):
            saved.values[key] = read_tree(saved.path / name, access).root
            saved.others.append(saved.path / name)


def _count_ranks(
    path: Path, models: Mapping[RankCoordinates, RankFile], optimizers: Mapping[RankCoordinates, RankFile]
) -> RankCoordinates:
    """Return the number of ranks of each kind."""
    ranks = [*models, *optimizers]
    if not ranks:
        raise FormatError(f"the ranks' files in {path} hold neither a model nor the state of an optimizer")
    return RankCoordinates(*(max(kind) + 1 for kind in zip(*ranks, strict=True)))


def _build_stages(
    saved: NxdCheckpoint, models: Mapping[RankCoordinates, RankFile], optimizers: Mapping[RankCoordinates, RankFile]
) -> Iterator[PipelineStage]:
    dp, ep, tp, pp = saved.degrees
    for stage in range(pp):
        name = f"{saved.path}, stage {stage} of the pipeline" if pp > 1 else str(saved.path)
        trees = [
            [_rank_model(models, RankCoordinates(0, e, t, stage), saved.path) for t in range(tp)] for e in range(ep)
        ]
        states = (
            [_rank_states(optimizers, RankCoordinates(dp, ep, t, stage), saved) for t in range(tp)]
            if optimizers
            else []
        )
        yield PipelineStage(name, trees if models else [], list(zip(*states, strict=True)))


def _rank_model(
    models: Mapping[RankCoordinates, RankFile], rank: RankCoordinates, path: Path
) -> Mapping[str, StoredTensor]:
    """Return the model of a rank."""
    if not models:
        return {}
    if rank not in models:
        raise CorruptCheckpointError(f"{path}: {rank} has an optimizer, but no model")
    root = models[rank].root
    if not isinstance(root, dict) or not all(isinstance(key, str) for key in root):
        raise CorruptCheckpointError(f"{models[rank].path} is not a model: it does not hold tensors by name")
    unread = next(((key, value) for key, value in root.items() if isinstance(value, UnreadableTensor)), None)
    if unread is not None:
        raise FormatError(f"{models[rank].path}: tensor {unread[0]!r} {unread[1].why}")
    return {key: value for key, value in root.items() if isinstance(value, StoredTensor)}


def _rank_states(
    optimizers: Mapping[RankCoordinates, RankFile], last: RankCoordinates, saved: NxdCheckpoint
) -> Sequence[Mapping[str, Any]]:
    """Return the states of one tensor-parallel rank, by expert-parallel rank.

    ``last`` holds the numbers of data-parallel and expert-parallel ranks, and this rank's tensor-parallel and pipeline
    rank.
    """
    rank_files = {rank: file for rank, file in optimizers.items() if rank[2:] == last[2:]}
    if not rank_files:
        raise CorruptCheckpointError(f"{saved.path}: there is no optimizer of tensor-parallel rank {last.tp}")
    files = [rank_files[rank] for rank in sorted(rank_files)]
    if not zero_states.is_zero(files[0].root):
        return [_plain_state(file, saved) for _, file in sorted(rank_files.items(), key=lambda item: item[0].ep)]
    if zero_states.EXPERTS not in files[0].root:
        return [zero_states.join_zero_states(files, saved.evidence)] * last.ep
    return _join_with_experts(files, last.ep, saved)


def _plain_state(file: RankFile, saved: NxdCheckpoint) -> Mapping[str, Any]:
    if not isinstance(file.root, dict) or "param_groups" not in file.root:
        raise CorruptCheckpointError(f"{file.path} does not hold the state of an optimizer")
    if file.path.name.startswith("dp_rank") and not file.path.name.startswith("dp_rank_00"):
        raise CorruptCheckpointError(
            f"{file.path} is of another data-parallel rank, but the optimizer of {saved.path} is not a ZeRO-1 optimizer"
        )
    return file.root


def _join_with_experts(files: Sequence[RankFile], experts: int, saved: NxdCheckpoint) -> Sequence[Mapping[str, Any]]:
    """Join ZeRO-1 states with experts. Their data-parallel groups consist of every ``experts``-th rank."""
    if len(files) % experts:
        raise CorruptCheckpointError(
            f"{saved.path}: {len(files)} data-parallel ranks cannot form {experts} equal groups of experts"
        )
    common = zero_states.join_zero_states([_select_entries(file, experts=False) for file in files], saved.evidence)
    expert_states = [
        zero_states.join_zero_states(
            [_select_entries(file, experts=True) for file in files[e::experts]], saved.evidence
        )
        for e in range(experts)
    ]
    return [
        {**common, **{key: {**common[key], **states[key]} for key in _TABLES if key in common}}
        for states in expert_states
    ]


_TABLES = (zero_states.BASE, zero_states.SHAPES, zero_states.MASTERS)


def _select_entries(file: RankFile, *, experts: bool) -> RankFile:
    """Return the file with only the entries that are of experts, or only those that are not."""
    first = file.root[zero_states.EXPERTS]
    if type(first) is not int:
        raise CorruptCheckpointError(f"{file.path}: its {zero_states.EXPERTS} is not an integer")
    tables = {
        key: {pid: value for pid, value in file.root[key].items() if (pid >= first) == experts}
        for key in _TABLES
        if isinstance(file.root.get(key), dict)
    }
    return replace(file, root={**file.root, **tables})
