"""Into a checkpoint of NxD: what each of its ranks would have saved."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.conversion import planned
from holdfast.conversion.names_hash import names_hash
from holdfast.conversion.nxd_options import NxdOptions
from holdfast.conversion.nxd_values import decoded
from holdfast.conversion.shapes import check_named, scheduler_state
from holdfast.conversion.target import Material
from holdfast.conversion.torchfile import saved
from holdfast.engine.checks import Checks
from holdfast.engine.local import Nowhere
from holdfast.engine.read import read_pieces
from holdfast.engine.transfer import Piece
from holdfast.engine.woven import Source
from holdfast.errors import InvalidArgumentError
from holdfast.formats.arrange.stored import Stored
from holdfast.formats.nxd import zero
from holdfast.formats.nxd.division import Divided, divided, local, stored
from holdfast.formats.nxd.evidence import digest
from holdfast.formats.nxd.layout import number
from holdfast.formats.nxd.names import MODEL, OPTIM, VALUES, Rank
from holdfast.formats.nxd.reader import COPIES, LAYOUT, NxdReader
from holdfast.formats.nxd.tags import MARKERS
from holdfast.formats.nxd.writing import PlannedFile, rank_files
from holdfast.layout.names import split_state_key
from holdfast.storage import local as storage
from holdfast.storage.folders import check_space


@dataclass
class NxdWriter:
    """Plans the files of all ranks, and writes them into a folder."""

    material: Material
    options: NxdOptions
    _locals: dict[tuple[int, str, str], Stored] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._spec, self._values = self.options.spec, decoded(self.material)
        if self.material.chosen.groups() and MODEL not in self.material.chosen.groups():
            raise InvalidArgumentError("a checkpoint of NxD has one model, and there is none; name it by keys")
        optimizer = self._values.get("optimizer", {})
        check_named(optimizer)
        self._groups: Sequence[Mapping[str, Any]] = optimizer.get("groups", [])
        trained = [name for group in self._groups for name in group["params"]]
        self._tied = self.material.chosen.tied.get(MODEL, {})
        names = [*self.material.chosen.group(MODEL), *self._tied]
        self._parameters = divided(self._spec, [*(one for one in trained if one in set(names)), *names])
        self._check_alone()
        self._whole = {name: self._stored(MODEL, self._tied.get(name, name)) for name in names}

    def _check_alone(self) -> None:
        others = [group for group in self.material.chosen.groups() if "/" in group]
        if others or len([name for name in self._values if name.startswith("optimizer")]) > 1:
            raise InvalidArgumentError(f"NxD has one model and one optimizer; choose one of {', '.join(others)}")

    def _stored(self, group: str, name: str) -> Stored:
        return stored(self.material.reader, *self.material.chosen.sources[group, name])

    def write(self, folder: Path) -> None:
        """All files, markers last; what was written is read back."""
        self._verify_source()
        files = [*self._models(), *self._optimizers()]
        check_space(folder.parent, sum(file.frame.size for file in files))
        planned.write(folder, files)
        for slot, name in VALUES.items():
            if slot in self._values:
                value = self._values[slot]
                storage.write_small(folder / name, saved(scheduler_state(value) if slot == "scheduler" else value))
        for marker in MARKERS:
            storage.write_small(folder / marker, b"1")
        storage.sync_tree(folder)
        NxdReader(folder, {LAYOUT: self.options.layout, COPIES: "first"} if self.options.layout else {}).check_files()

    def _verify_source(self) -> None:
        """Raise ``DamagedError`` where the source has checksums, and its bytes are others."""
        reader, keys = self.material.reader, list(self.material.chosen.sources.values())
        if not any(reader.crcs(*key) is not None for key in keys):
            return
        files: dict[Source, int] = {}
        pieces = [
            Piece(index, one.start, one.stop, one.start, files.setdefault(one.file, len(files)), one.offset)
            for index, key in enumerate(keys)
            for one in reader.extents(*key, 0, reader.groups[key[0]][key[1]].nbytes)
        ]
        Checks(reader, keys).check_own(read_pieces(list(files), pieces, lambda _: Nowhere()))

    def _models(self) -> Iterator[PlannedFile]:
        for pp, parameters in enumerate(self._stages()):
            for tp in range(self.options.tp_size):
                tree = {
                    one.name: planned.cast(self._local(one, tp, "", self._whole), self._dtype(one))
                    for one in parameters
                }
                yield from self._files(f"{MODEL}/{Rank(0, 0, tp, pp).name(experts=False)}", tree)

    def _dtype(self, one: Divided) -> str:
        """The dtype that a parameter gets."""
        return self.material.chosen.infos[MODEL, self._tied.get(one.names[0], one.names[0])].dtype

    def _optimizers(self) -> Iterator[PlannedFile]:
        if not self._groups:
            return
        states = self._states()
        for pp, parameters in enumerate(self._stages()):
            for tp in range(self.options.tp_size):
                for dp, tree in enumerate(self._optimizer(parameters, states, tp)):
                    yield from self._files(f"{OPTIM}/{Rank(dp, 0, tp, pp).name(experts=False)}", tree)

    def _files(self, name: str, tree: Mapping[str, Any]) -> list[PlannedFile]:
        return rank_files(name, tree, names_hash, xser=self.options.xser)

    def _stages(self) -> list[list[Divided]]:
        numbers = [number(self._spec.layer, one.name) for one in self._parameters] if self._spec.layer else []
        layers = max((found + 1 for found in numbers if found is not None), default=1)
        if self.options.pp_size > 1 and layers % self.options.pp_size:
            raise InvalidArgumentError(f"{layers} layers cannot be divided evenly among {self.options.pp_size} stages")
        stages: list[list[Divided]] = [[] for _ in range(self.options.pp_size)]
        for one in self._parameters:
            stages[self._spec.stage(one.name, layers, len(stages))].append(one)
        return stages

    def _states(self) -> Mapping[str, dict[str, Any]]:
        """The states of whole parameters, by parameter and state, tensors and others."""
        found: dict[str, dict[str, Any]] = {}
        for name in self.material.chosen.group("optimizer"):
            fqn, state = split_state_key(name)
            found.setdefault(fqn, {})[state] = self._stored("optimizer", name)
        for group in self._groups:
            for fqn, plain in group["state"].items():
                found.setdefault(fqn, {}).update(plain)
        return found

    def _optimizer(
        self, parameters: Sequence[Divided], states: Mapping[str, Mapping[str, Any]], tp: int
    ) -> list[dict[str, Any]]:
        """The states of all data-parallel ranks of a tensor-parallel one; one where it is no ZeRO-1 optimizer."""
        rows, numbered = self._numbered(parameters)
        own = {pid: found for pid, one in numbered.items() if (found := self._own(one, states, tp))}
        groups = [{**group["settings"], "params": row} for group, row in zip(self._groups, rows, strict=True)]
        if self.options.dp_size is None:
            return [{"state": own, "param_groups": groups}]
        here = {pid: self._local(one, tp, "", self._whole) for pid, one in numbered.items()}
        shapes = {pid: list(one.info.shape) for pid, one in here.items()}
        root = {"state": {}, "param_groups": groups, zero.BASE: own, zero.SHAPES: shapes}
        if self.options.master_weights:
            root[zero.MASTERS] = {pid: planned.cast(one, "F32") for pid, one in here.items()}
        return zero.divided(root, self.options.dp_size, self.material.reader.path)

    def _numbered(self, parameters: Sequence[Divided]) -> tuple[list[list[int]], dict[int, Divided]]:
        """The numbers in each group, and what has them."""
        rows: list[list[int]] = []
        numbered: dict[int, Divided] = {}
        for group in self._groups:
            members = [one for one in parameters if set(one.names) & set(group["params"])]
            apart = next((one for one in members if not set(one.names) <= set(group["params"])), None)
            if apart is not None:
                raise InvalidArgumentError(
                    f"{apart.name!r} of NxD is made of parameters in different groups of the optimizer"
                )
            rows.append([len(numbered) + index for index in range(len(members))])
            numbered |= dict(zip(rows[-1], members, strict=True))
        return rows, numbered

    def _own(self, one: Divided, states: Mapping[str, Mapping[str, Any]], tp: int) -> dict[str, Any]:
        every = [states.get(name, {}) for name in one.names]
        if any(own.keys() != every[0].keys() for own in every):
            raise InvalidArgumentError(f"{one.name!r} of NxD is made of parameters with different states")
        return {state: self._state(one, state, [own[state] for own in every], tp) for state in every[0]}

    def _state(self, one: Divided, state: str, row: Sequence[Any], tp: int) -> Any:
        first = row[0]
        if not isinstance(first, Stored) or not first.info.shape:
            same = all(_same(first, other) for other in row[1:])
            if not same:
                raise InvalidArgumentError(f"{state!r} differs among what {one.name!r} of NxD is made of")
            return first
        whole = dict(zip(one.names, row, strict=True))
        if any(whole[name].info.shape != self._whole[name].info.shape for name in whole):
            if one.rule.dim is None or self.options.tp_size == 1 == len(row):
                return first
            raise InvalidArgumentError(
                f"how tensor-parallel ranks would divide {state!r} of {one.name!r}, nobody can tell"
            )
        return self._local(one, tp, state, whole)

    def _local(self, one: Divided, tp: int, state: str, whole: Mapping[str, Stored]) -> Stored:
        key = (tp if one.rule.dim is not None else 0, one.name, state)
        if key not in self._locals:
            self._locals[key] = local(one, whole, self.options.tp_size, tp)
        return self._locals[key]


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Stored) and isinstance(other, Stored):
        return one.info == other.info and digest(one) == digest(other)
    return type(one) is type(other) and bool(one == other)
