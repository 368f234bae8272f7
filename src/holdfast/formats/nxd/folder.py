"""A checkpoint's folder of NxD's: its files read, those of each rank put where it is in the parallelism."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from holdfast.errors import DamagedError, FormatError
from holdfast.formats.arrange.stored import Stored, Unreadable
from holdfast.formats.dcp.folder import METADATA
from holdfast.formats.nxd import legacy, names, zero
from holdfast.formats.nxd.evidence import Evidence
from holdfast.formats.nxd.names import MODEL, OPTIM, VALUES, Found, Rank
from holdfast.formats.nxd.rankfile import Access, RankFile, read, read_tree
from holdfast.formats.nxd.states import Stage
from holdfast.formats.nxd.tags import check_finished
from holdfast.layout.blocks import crc64
from holdfast.layout.budget import Budget
from holdfast.storage import local
from holdfast.storage.readers import Readers


@dataclass
class Saved:
    """What is in a folder. ``values``: ``scheduler`` and ``user_content``, where there are any."""

    path: Path
    degrees: Rank
    stages: list[Stage] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    files: list[RankFile] = field(default_factory=list)
    others: list[Path] = field(default_factory=list)
    budget: Budget = field(default_factory=Budget)
    evidence: Evidence = field(default_factory=Evidence)

    @property
    def fingerprint(self) -> str:
        """Of all pickles, and of the sizes of the files."""
        sizes = repr([(file.digest, [local.size_of(one) for one in file.files]) for file in self.files])
        return f"{crc64(sizes.encode()):016x}"


def read_folder(path: Path) -> Saved:
    """Read what says what there is; tensors are only looked for when one is needed.

    Raises ``DamagedError`` naming a file that is missing or is of another save.
    """
    check_finished(path)
    access = Access(path, Readers())
    if names.has_legacy(path):
        models, optimizers, values = legacy.read_all(path, access)
        saved = Saved(path, _degrees(path, models, optimizers), values=values)
        saved.files = list({id(file): file for file in (*models.values(), *optimizers.values())}.values())
    else:
        models, optimizers = (_read_kind(path / kind, access) for kind in (MODEL, OPTIM))
        saved = Saved(path, _degrees(path, models, optimizers), files=[*models.values(), *optimizers.values()])
        _read_values(saved, access)
    saved.budget = access.budget
    saved.stages = list(_stages(saved, models, optimizers))
    return saved


def _read_kind(folder: Path, access: Access) -> dict[Rank, RankFile]:
    if local.is_taken(folder / METADATA):
        raise FormatError(f"{folder} was saved with use_zero1_dcp: open it by itself, as a folder of PyTorch's")
    found = names.find(folder)
    if found is None:
        return {}
    return {rank: read(file, access, _redirect(found, rank)) for rank, file in found.files.items()}


def _redirect(found: Found, rank: Rank) -> Path | None:
    return found.files[rank._replace(ep=0)] if rank.ep else None


def _read_values(saved: Saved, access: Access) -> None:
    for key, name in VALUES.items():
        if local.is_taken(saved.path / name):
            saved.values[key] = read_tree(saved.path / name, access).root
            saved.others.append(saved.path / name)


def _degrees(path: Path, models: Mapping[Rank, RankFile], optimizers: Mapping[Rank, RankFile]) -> Rank:
    every = [*models, *optimizers]
    if not every:
        raise FormatError(f"the ranks' files in {path} hold neither a model nor the state of an optimizer")
    return Rank(*(max(kind) + 1 for kind in zip(*every, strict=True)))


def _stages(saved: Saved, models: Mapping[Rank, RankFile], optimizers: Mapping[Rank, RankFile]) -> Iterator[Stage]:
    dp, ep, tp, pp = saved.degrees
    for stage in range(pp):
        name = f"{saved.path}, stage {stage} of the pipeline" if pp > 1 else str(saved.path)
        trees = [[_model(models, Rank(0, e, t, stage), saved.path) for t in range(tp)] for e in range(ep)]
        states = [_of_rank(optimizers, Rank(dp, ep, t, stage), saved) for t in range(tp)] if optimizers else []
        yield Stage(name, trees if models else [], list(zip(*states, strict=True)))


def _model(models: Mapping[Rank, RankFile], rank: Rank, path: Path) -> Mapping[str, Stored]:
    if not models:
        return {}
    if rank not in models:
        raise DamagedError(f"{path}: there is an optimizer of {rank}, and no model")
    root = models[rank].root
    if not isinstance(root, dict) or not all(isinstance(key, str) for key in root):
        raise DamagedError(f"{models[rank].path} is no model: it holds no tensors by name")
    unread = next(((key, value) for key, value in root.items() if isinstance(value, Unreadable)), None)
    if unread is not None:
        raise FormatError(f"{models[rank].path}: tensor {unread[0]!r} {unread[1].why}")
    return {key: value for key, value in root.items() if isinstance(value, Stored)}


def _of_rank(optimizers: Mapping[Rank, RankFile], last: Rank, saved: Saved) -> Sequence[Mapping[str, Any]]:
    """The states of one tensor-parallel rank, by expert-parallel rank. ``last`` has the degrees of these two."""
    of_rank = {rank: file for rank, file in optimizers.items() if rank[2:] == last[2:]}
    if not of_rank:
        raise DamagedError(f"{saved.path}: there is no optimizer of tensor-parallel rank {last.tp}")
    files = [of_rank[rank] for rank in sorted(of_rank)]
    if not zero.is_zero(files[0].root):
        return [_plain(file, saved) for _, file in sorted(of_rank.items(), key=lambda item: item[0].ep)]
    if zero.EXPERTS not in files[0].root:
        return [zero.joined(files, saved.evidence)] * last.ep
    return _with_experts(files, last.ep, saved)


def _plain(file: RankFile, saved: Saved) -> Mapping[str, Any]:
    if not isinstance(file.root, dict) or "param_groups" not in file.root:
        raise DamagedError(f"{file.path} holds no state of an optimizer")
    if file.path.name.startswith("dp_rank") and not file.path.name.startswith("dp_rank_00"):
        raise DamagedError(f"{file.path} is a file of a further data-parallel rank, which {saved.path} has no use for")
    return file.root


def _with_experts(files: Sequence[RankFile], experts: int, saved: Saved) -> Sequence[Mapping[str, Any]]:
    """Experts' parameters have data-parallel groups of their own: every so many-th rank."""
    if len(files) % experts:
        raise DamagedError(f"{saved.path}: {len(files)} data-parallel ranks cannot be {experts} groups of experts'")
    common = zero.joined([_only(file, experts=False) for file in files], saved.evidence)
    own = [
        zero.joined([_only(file, experts=True) for file in files[e::experts]], saved.evidence) for e in range(experts)
    ]
    return [{**common, **{key: {**common[key], **one[key]} for key in _TABLES if key in common}} for one in own]


_TABLES = (zero.BASE, zero.SHAPES, zero.MASTERS)


def _only(file: RankFile, *, experts: bool) -> RankFile:
    """The entries of a state that are of experts, or those that are not."""
    first = file.root[zero.EXPERTS]
    if type(first) is not int:
        raise DamagedError(f"{file.path}: its {zero.EXPERTS} is no number")
    tables = {
        key: {pid: value for pid, value in file.root[key].items() if (pid >= first) == experts}
        for key in _TABLES
        if isinstance(file.root.get(key), dict)
    }
    return replace(file, root={**file.root, **tables})
