"""A checkpoint's folder of NxD's: its files read, those of each rank put where it is in the parallelism."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from holdfast.compat.nxd.format import file_names, legacy, zero
from holdfast.compat.nxd.format.consistency import ReplicaEvidence
from holdfast.compat.nxd.format.file_names import MODEL, OPTIM, VALUES, RankCoordinates, RankFiles
from holdfast.compat.nxd.format.optimizer_states import PipelineStage
from holdfast.compat.nxd.format.rank_file import FileAccess, RankFile, read_rank_file, read_tree
from holdfast.compat.nxd.format.step_dirs import check_finished
from holdfast.errors import CorruptCheckpointError, FormatError
from holdfast.formats.dcp.folder import METADATA
from holdfast.formats.stored_tensor import StoredTensor, UnreadableTensor
from holdfast.ondisk.blocks import crc64
from holdfast.ondisk.read_budget import ReadBudget
from holdfast.storage import posix
from holdfast.storage.reader_pool import ReaderPool


@dataclass
class NxdCheckpoint:
    """What is in a folder. ``values``: ``scheduler`` and ``user_content``, where there are any."""

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
        """Of all pickles, and of the sizes of the files."""
        sizes = repr([(file.digest, [posix.size_of(one) for one in file.files]) for file in self.files])
        return f"{crc64(sizes.encode()):016x}"


def read_folder(path: Path) -> NxdCheckpoint:
    """Read what says what there is; tensors are only looked for when one is needed.

    Raises ``CorruptCheckpointError`` naming a file that is missing or is of another save.
    """
    check_finished(path)
    access = FileAccess(path, ReaderPool())
    if file_names.has_legacy_files(path):
        models, optimizers, values = legacy.read_legacy_files(path, access)
        saved = NxdCheckpoint(path, _degrees(path, models, optimizers), values=values)
        saved.files = list({id(file): file for file in (*models.values(), *optimizers.values())}.values())
    else:
        models, optimizers = (_read_kind(path / kind, access) for kind in (MODEL, OPTIM))
        saved = NxdCheckpoint(path, _degrees(path, models, optimizers), files=[*models.values(), *optimizers.values()])
        _read_values(saved, access)
    saved.budget = access.budget
    saved.stages = list(_stages(saved, models, optimizers))
    return saved


def _read_kind(folder: Path, access: FileAccess) -> dict[RankCoordinates, RankFile]:
    if posix.is_taken(folder / METADATA):
        raise FormatError(f"{folder} was saved with use_zero1_dcp: open it by itself, as a folder of PyTorch's")
    found = file_names.find_rank_files(folder)
    if found is None:
        return {}
    return {rank: read_rank_file(file, access, _redirect(found, rank)) for rank, file in found.files.items()}


def _redirect(found: RankFiles, rank: RankCoordinates) -> Path | None:
    return found.files[rank._replace(ep=0)] if rank.ep else None


def _read_values(saved: NxdCheckpoint, access: FileAccess) -> None:
    for key, name in VALUES.items():
        if posix.is_taken(saved.path / name):
            saved.values[key] = read_tree(saved.path / name, access).root
            saved.others.append(saved.path / name)


def _degrees(
    path: Path, models: Mapping[RankCoordinates, RankFile], optimizers: Mapping[RankCoordinates, RankFile]
) -> RankCoordinates:
    every = [*models, *optimizers]
    if not every:
        raise FormatError(f"the ranks' files in {path} hold neither a model nor the state of an optimizer")
    return RankCoordinates(*(max(kind) + 1 for kind in zip(*every, strict=True)))


def _stages(
    saved: NxdCheckpoint, models: Mapping[RankCoordinates, RankFile], optimizers: Mapping[RankCoordinates, RankFile]
) -> Iterator[PipelineStage]:
    dp, ep, tp, pp = saved.degrees
    for stage in range(pp):
        name = f"{saved.path}, stage {stage} of the pipeline" if pp > 1 else str(saved.path)
        trees = [[_model(models, RankCoordinates(0, e, t, stage), saved.path) for t in range(tp)] for e in range(ep)]
        states = (
            [_of_rank(optimizers, RankCoordinates(dp, ep, t, stage), saved) for t in range(tp)] if optimizers else []
        )
        yield PipelineStage(name, trees if models else [], list(zip(*states, strict=True)))


def _model(models: Mapping[RankCoordinates, RankFile], rank: RankCoordinates, path: Path) -> Mapping[str, StoredTensor]:
    if not models:
        return {}
    if rank not in models:
        raise CorruptCheckpointError(f"{path}: there is an optimizer of {rank}, and no model")
    root = models[rank].root
    if not isinstance(root, dict) or not all(isinstance(key, str) for key in root):
        raise CorruptCheckpointError(f"{models[rank].path} is no model: it holds no tensors by name")
    unread = next(((key, value) for key, value in root.items() if isinstance(value, UnreadableTensor)), None)
    if unread is not None:
        raise FormatError(f"{models[rank].path}: tensor {unread[0]!r} {unread[1].why}")
    return {key: value for key, value in root.items() if isinstance(value, StoredTensor)}


def _of_rank(
    optimizers: Mapping[RankCoordinates, RankFile], last: RankCoordinates, saved: NxdCheckpoint
) -> Sequence[Mapping[str, Any]]:
    """The states of one tensor-parallel rank, by expert-parallel rank. ``last`` has the degrees of these two."""
    of_rank = {rank: file for rank, file in optimizers.items() if rank[2:] == last[2:]}
    if not of_rank:
        raise CorruptCheckpointError(f"{saved.path}: there is no optimizer of tensor-parallel rank {last.tp}")
    files = [of_rank[rank] for rank in sorted(of_rank)]
    if not zero.is_zero(files[0].root):
        return [_plain(file, saved) for _, file in sorted(of_rank.items(), key=lambda item: item[0].ep)]
    if zero.EXPERTS not in files[0].root:
        return [zero.join_zero_states(files, saved.evidence)] * last.ep
    return _with_experts(files, last.ep, saved)


def _plain(file: RankFile, saved: NxdCheckpoint) -> Mapping[str, Any]:
    if not isinstance(file.root, dict) or "param_groups" not in file.root:
        raise CorruptCheckpointError(f"{file.path} holds no state of an optimizer")
    if file.path.name.startswith("dp_rank") and not file.path.name.startswith("dp_rank_00"):
        raise CorruptCheckpointError(
            f"{file.path} is a file of a further data-parallel rank, which {saved.path} has no use for"
        )
    return file.root


def _with_experts(files: Sequence[RankFile], experts: int, saved: NxdCheckpoint) -> Sequence[Mapping[str, Any]]:
    """Experts' parameters have data-parallel groups of their own: every so many-th rank."""
    if len(files) % experts:
        raise CorruptCheckpointError(
            f"{saved.path}: {len(files)} data-parallel ranks cannot be {experts} groups of experts'"
        )
    common = zero.join_zero_states([_only(file, experts=False) for file in files], saved.evidence)
    own = [
        zero.join_zero_states([_only(file, experts=True) for file in files[e::experts]], saved.evidence)
        for e in range(experts)
    ]
    return [{**common, **{key: {**common[key], **one[key]} for key in _TABLES if key in common}} for one in own]


_TABLES = (zero.BASE, zero.SHAPES, zero.MASTERS)


def _only(file: RankFile, *, experts: bool) -> RankFile:
    """The entries of a state that are of experts, or those that are not."""
    first = file.root[zero.EXPERTS]
    if type(first) is not int:
        raise CorruptCheckpointError(f"{file.path}: its {zero.EXPERTS} is no number")
    tables = {
        key: {pid: value for pid, value in file.root[key].items() if (pid >= first) == experts}
        for key in _TABLES
        if isinstance(file.root.get(key), dict)
    }
    return replace(file, root={**file.root, **tables})
