"""ZeRO-1 states of NxD for another number of data-parallel ranks, or for all of them in one: its offline converter.

Beside NxD's: master weights, scalars and parameters without a state are converted; whether files belong together is
checked before anything is written; the input is only read, and the output appears in one step, complete.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.conversion import planned
from holdfast.conversion.names_hash import names_hash
from holdfast.conversion.source_sums import check_file_sums
from holdfast.drafts import check_final, drafted
from holdfast.errors import FormatError, InvalidArgumentError, NoCheckpointError
from holdfast.formats.arrange.stored import Stored
from holdfast.formats.dcp.folder import METADATA
from holdfast.formats.nxd import names, zero
from holdfast.formats.nxd.evidence import Evidence
from holdfast.formats.nxd.names import OPTIM, Found, Rank, full_name
from holdfast.formats.nxd.rankfile import Access, RankFile, read
from holdfast.formats.nxd.tags import MARKERS
from holdfast.formats.nxd.writing import PlannedFile, rank_files
from holdfast.storage import folders, local
from holdfast.storage.readers import Readers


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
        if not local.is_folder(self.source):
            raise NoCheckpointError(f"there is no folder {self.source}")
        source, final = self.source.resolve(), self.final.resolve()
        if final.is_relative_to(source) or source.is_relative_to(final):
            raise InvalidArgumentError(
                f"the output {self.final} is, or lies in, the input {self.source}: choose another"
            )
        check_final(self.final)


def convert_zero(request: ZeroRequest) -> Path:
    """Convert a checkpoint's ZeRO-1 state, and take along what else is in its folder.

    Raises ``DamagedError`` naming a file that is missing or not of the same save, ``FormatError`` for a state that
    cannot be converted, ``TagExistsError``, ``InvalidArgumentError``. The input is as it was then, and nothing is left.
    """
    request.check()
    with Readers() as readers:
        found = _find(request)
        files = _read(found, Access(request.source, readers))
        check_file_sums([path for file in files.values() for path in file.files])
        plan = _plan(request, found, files)
        with drafted(request.final) as draft:
            _write(request, plan, draft)
            _check(draft, request)
    return request.final


def _find(request: ZeroRequest) -> Found:
    folder = request.source / OPTIM
    if local.is_file(folder / METADATA):
        raise FormatError(
            f"{folder} was saved with use_zero1_dcp; it goes to any number of ranks as it is: holdfast reads it"
        )
    found = names.find(folder)
    if found is None:
        raise FormatError(
            f"{request.source} has no ranks' files in {OPTIM}/: --input_dir is one checkpoint, a tag's folder"
        )
    if found.full and request.ranks is None:
        raise InvalidArgumentError(f"{folder} holds whole states already")
    if found.experts:
        raise FormatError(f"{folder} has states of expert-parallel ranks, which were not saved by a ZeRO-1 optimizer")
    return found


def _read(found: Found, access: Access) -> dict[Rank, RankFile]:
    files = {rank: read(path, access) for rank, path in found.files.items()}
    for file in files.values():
        if isinstance(file.root, dict) and zero.EXPERTS in file.root:
            raise FormatError(
                f"{file.path} has states of experts, whose data-parallel groups are smaller by a number that no file "
                "says: they cannot be told apart from here. Convert the whole checkpoint: holdfast convert … --to nxd"
            )
        file.check()
    return files


def _joined(found: Found, files: Mapping[Rank, RankFile]) -> dict[tuple[int, int], dict[str, Any]]:
    """The whole state of each tensor-parallel rank of each stage, proven to be of one save."""
    evidence, degrees = Evidence(), found.degrees
    whole: dict[tuple[int, int], dict[str, Any]] = {}
    for pp in range(degrees.pp):
        for tp in range(degrees.tp):
            group = [files[Rank(dp, 0, tp, pp)] for dp in range(degrees.dp)]
            whole[tp, pp] = zero.joined(group, evidence)
            _note_steps(whole[0, pp], whole[tp, pp], evidence)
    evidence.check()
    return whole


def _note_steps(one: Mapping[str, Any], other: Mapping[str, Any], evidence: Evidence) -> None:
    """Numbers of steps are the same on all tensor-parallel ranks."""
    for pid, states in one[zero.BASE].items():
        for name, value in states.items():
            match = other[zero.BASE].get(pid, {}).get(name)
            if isinstance(value, Stored) and isinstance(match, Stored) and value is not match and not value.info.shape:
                evidence.copies.append((f"{zero.BASE} of {pid}, {name}", (value, match)))


def _plan(request: ZeroRequest, found: Found, files: Mapping[Rank, RankFile]) -> list[PlannedFile]:
    planned_files: list[PlannedFile] = []
    for (tp, pp), root in _joined(found, files).items():
        first = files[Rank(0, 0, tp, pp)]
        if request.ranks is None:
            roots = {full_name(tp, pp): root}
        else:
            parts = zero.divided(root, request.ranks, first.path)
            roots = {Rank(dp, 0, tp, pp).name(experts=False): part for dp, part in enumerate(parts)}
        for name, part in roots.items():
            planned_files += rank_files(f"{OPTIM}/{name}", part, names_hash, xser=first.xser)
    return planned_files


def _write(request: ZeroRequest, plan: Sequence[PlannedFile], draft: Path) -> None:
    others = list(_others(request.source))
    sizes = sum(file.frame.size for file in plan) + sum(local.size_of(request.source / name) for name in others)
    folders.check_space(request.final.parent, sizes)
    planned.write(draft, plan)
    for name in (*(one for one in others if one not in MARKERS), *(one for one in MARKERS if one in others)):
        local.make_parents(draft, name)
        local.copy_file(request.source / name, draft / name)
    local.sync_tree(draft)


def _others(source: Path) -> Iterator[str]:
    """What else is in the checkpoint's folder: the model, the scheduler, markers."""
    for file in local.files_of(source):
        name = file.relative_to(source).as_posix()
        if not name.startswith(f"{OPTIM}/"):
            yield name


def _check(draft: Path, request: ZeroRequest) -> None:
    """Raise ``DamagedError`` where what was written is not a complete state of so many ranks."""
    with Readers() as readers:
        written = _find(ZeroRequest(draft, request.final, 1))
        _joined(written, _read(written, Access(draft, readers)))
