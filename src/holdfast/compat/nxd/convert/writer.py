"""Into a checkpoint of NxD: what each of its ranks would have saved."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from holdfast.compat.nxd.convert import torch_files
from holdfast.compat.nxd.convert.options import NxdOptions
from holdfast.compat.nxd.convert.parameters import ShardedParameters
from holdfast.compat.nxd.convert.states import ShardedOptimizerStates
from holdfast.compat.nxd.convert.values import decode_values
from holdfast.compat.nxd.format.file_names import MODEL, OPTIM, VALUES, RankCoordinates
from holdfast.compat.nxd.format.nxd_reader import COPIES, NxdReader
from holdfast.compat.nxd.format.rank_file_writer import PlannedFile, plan_rank_files
from holdfast.compat.nxd.format.shard import stored_slices
from holdfast.compat.nxd.format.step_dirs import MARKERS
from holdfast.conversion.source_checksums import check_source_checksums
from holdfast.conversion.state_dict_schemas import check_named, scheduler_state_dict
from holdfast.conversion.target import ConversionSource
from holdfast.conversion.torch_names_hash import names_hash
from holdfast.conversion.torch_target import as_saved_tensor
from holdfast.engine.integrity.verify import ChecksumVerifier
from holdfast.engine.io.read import read_pieces
from holdfast.engine.io.sources import Source
from holdfast.engine.io.tensor_bytes import NullSink
from holdfast.engine.plan.file_ranges import FileRange
from holdfast.errors import InvalidArgumentError
from holdfast.formats.registry import LAYOUT
from holdfast.ondisk.validation import split_state_key
from holdfast.storage import posix
from holdfast.storage.directories import check_space

_OPTIMIZER = "optimizer"


class NxdWriter:
    """Plans the files of all ranks, and writes them into a folder."""

    def __init__(self, material: ConversionSource, options: NxdOptions) -> None:
        """Raises ``InvalidArgumentError`` for what NxD has no place for, and where the layout does not fit."""
        self._material, self._options = material, options
        self._values = decode_values(material)
        self._check()
        self._groups: Sequence[Mapping[str, Any]] = self._values.get(_OPTIMIZER, {}).get("groups", [])
        trained = [name for group in self._groups for name in group["params"]]
        self._parameters = ShardedParameters(material, options, trained)

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
        torch_files.write_torch_files(folder, files)
        for slot, name in VALUES.items():
            if slot in self._values:
                value = self._values[slot]
                posix.write_small(
                    folder / name, as_saved_tensor(scheduler_state_dict(value) if slot == "scheduler" else value)
                )
        for marker in MARKERS:
            posix.write_small(folder / marker, b"1")
        posix.sync_tree(folder)
        layout = self._options.layout
        NxdReader(folder, {LAYOUT: layout, COPIES: "first"} if layout else {}).check_files()

    def _verify_source(self) -> None:
        """Raise ``CorruptCheckpointError`` where the source has checksums, and its bytes are others."""
        reader, keys = self._material.reader, list(self._material.chosen.sources.values())
        check_source_checksums(reader, keys)
        if not any(reader.crcs(*key) is not None for key in keys):
            return
        files: dict[Source, int] = {}
        pieces = [
            FileRange(index, one.start, one.stop, one.start, files.setdefault(one.file, len(files)), one.offset)
            for index, key in enumerate(keys)
            for one in reader.extents(*key, 0, reader.groups[key[0]][key[1]].nbytes)
        ]
        ChecksumVerifier(reader, keys).check_own(read_pieces(list(files), pieces, lambda _: NullSink()))

    def _models(self) -> Iterator[PlannedFile]:
        every = self._parameters
        for pp, stage in enumerate(every.stages()):
            for tp in range(self._options.tp_size):
                tree = {one.name: torch_files.cast_provider(every.local(one, tp), every.dtype(one)) for one in stage}
                yield from self._files(f"{MODEL}/{RankCoordinates(0, 0, tp, pp).name(experts=False)}", tree)

    def _optimizers(self) -> Iterator[PlannedFile]:
        if not self._groups:
            return
        source = self._material.reader.path
        states = ShardedOptimizerStates(self._groups, self._states(), self._parameters, self._options, source)
        for pp, stage in enumerate(self._parameters.stages()):
            for tp in range(self._options.tp_size):
                for dp, tree in enumerate(states.of(stage, tp)):
                    yield from self._files(f"{OPTIM}/{RankCoordinates(dp, 0, tp, pp).name(experts=False)}", tree)

    def _states(self) -> dict[str, dict[str, Any]]:
        """The states of whole parameters, by parameter and state, tensors and others."""
        chosen = self._material.chosen
        found: dict[str, dict[str, Any]] = {}
        for name in chosen.group(_OPTIMIZER):
            fqn, state = split_state_key(name)
            found.setdefault(fqn, {})[state] = stored_slices(self._material.reader, *chosen.sources[_OPTIMIZER, name])
        for group in self._groups:
            for fqn, plain in group["state"].items():
                found.setdefault(fqn, {}).update(plain)
        return found

    def _files(self, name: str, tree: Mapping[str, Any]) -> list[PlannedFile]:
        return plan_rank_files(name, tree, names_hash, xser=self._options.xser)
