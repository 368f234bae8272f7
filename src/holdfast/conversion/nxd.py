"""Into a checkpoint of NxD: what each of its ranks would have saved."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from holdfast.conversion import planned
from holdfast.conversion.names_hash import names_hash
from holdfast.conversion.nxd_options import NxdOptions
from holdfast.conversion.nxd_parameters import Parameters
from holdfast.conversion.nxd_states import OptimizerStates
from holdfast.conversion.nxd_values import decoded
from holdfast.conversion.shapes import check_named, scheduler_state
from holdfast.conversion.source_sums import check_sums
from holdfast.conversion.target import Material
from holdfast.conversion.torchfile import saved
from holdfast.engine.checks import Checks
from holdfast.engine.local import Nowhere
from holdfast.engine.read import read_pieces
from holdfast.engine.transfer import Piece
from holdfast.engine.woven import Source
from holdfast.errors import InvalidArgumentError
from holdfast.formats.nxd.division import stored
from holdfast.formats.nxd.names import MODEL, OPTIM, VALUES, Rank
from holdfast.formats.nxd.reader import COPIES, LAYOUT, NxdReader
from holdfast.formats.nxd.tags import MARKERS
from holdfast.formats.nxd.writing import PlannedFile, rank_files
from holdfast.layout.names import split_state_key
from holdfast.storage import local
from holdfast.storage.folders import check_space

_OPTIMIZER = "optimizer"


class NxdWriter:
    """Plans the files of all ranks, and writes them into a folder."""

    def __init__(self, material: Material, options: NxdOptions) -> None:
        """Raises ``InvalidArgumentError`` for what NxD has no place for, and where the layout does not fit."""
        self._material, self._options = material, options
        self._values = decoded(material)
        self._check()
        self._groups: Sequence[Mapping[str, Any]] = self._values.get(_OPTIMIZER, {}).get("groups", [])
        trained = [name for group in self._groups for name in group["params"]]
        self._parameters = Parameters(material, options, trained)

    def _check(self) -> None:
        groups = self._material.chosen.groups()
        if groups and MODEL not in groups:
            raise InvalidArgumentError("a checkpoint of NxD has one model, and there is none; name it by keys")
        others = [group for group in groups if "/" in group]
        if others or len([name for name in self._values if name.startswith(_OPTIMIZER)]) > 1:
            raise InvalidArgumentError(f"NxD has one model and one optimizer; choose one of {', '.join(others)}")
        check_named(self._values.get(_OPTIMIZER, {}))

    def write(self, folder: Path) -> None:
        """All files, into a folder that is there, markers last; what was written is read back."""
        self._verify_source()
        files = [*self._models(), *self._optimizers()]
        check_space(folder.parent, sum(file.frame.size for file in files))
        planned.write(folder, files)
        for slot, name in VALUES.items():
            if slot in self._values:
                value = self._values[slot]
                local.write_small(folder / name, saved(scheduler_state(value) if slot == "scheduler" else value))
        for marker in MARKERS:
            local.write_small(folder / marker, b"1")
        local.sync_tree(folder)
        layout = self._options.layout
        NxdReader(folder, {LAYOUT: layout, COPIES: "first"} if layout else {}).check_files()

    def _verify_source(self) -> None:
        """Raise ``DamagedError`` where the source has checksums, and its bytes are others."""
        reader, keys = self._material.reader, list(self._material.chosen.sources.values())
        check_sums(reader, keys)
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
        every = self._parameters
        for pp, stage in enumerate(every.stages()):
            for tp in range(self._options.tp_size):
                tree = {one.name: planned.cast(every.local(one, tp), every.dtype(one)) for one in stage}
                yield from self._files(f"{MODEL}/{Rank(0, 0, tp, pp).name(experts=False)}", tree)

    def _optimizers(self) -> Iterator[PlannedFile]:
        if not self._groups:
            return
        source = self._material.reader.path
        states = OptimizerStates(self._groups, self._states(), self._parameters, self._options, source)
        for pp, stage in enumerate(self._parameters.stages()):
            for tp in range(self._options.tp_size):
                for dp, tree in enumerate(states.of(stage, tp)):
                    yield from self._files(f"{OPTIM}/{Rank(dp, 0, tp, pp).name(experts=False)}", tree)

    def _states(self) -> dict[str, dict[str, Any]]:
        """The states of whole parameters, by parameter and state, tensors and others."""
        chosen = self._material.chosen
        found: dict[str, dict[str, Any]] = {}
        for name in chosen.group(_OPTIMIZER):
            fqn, state = split_state_key(name)
            found.setdefault(fqn, {})[state] = stored(self._material.reader, *chosen.sources[_OPTIMIZER, name])
        for group in self._groups:
            for fqn, plain in group["state"].items():
                found.setdefault(fqn, {}).update(plain)
        return found

    def _files(self, name: str, tree: Mapping[str, Any]) -> list[PlannedFile]:
        return rank_files(name, tree, names_hash, xser=self._options.xser)
