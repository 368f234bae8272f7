"""Writes a checkpoint in NxD's format: the files that each of its ranks would have saved.

:mod:`rankless.nxd.writer.nxd_target` runs it on rank 0. Markers are written last: without them NxD takes no folder for
a checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rankless.conversion.source_checksums import check_ranges, find_source_checksums
from rankless.conversion.state_dict_schemas import check_named, scheduler_state_dict
from rankless.conversion.target import ConversionSource
from rankless.conversion.torch_names_hash import names_hash
from rankless.conversion.torch_target import as_saved_bytes
from rankless.engine.integrity.block_verification import ChecksumVerifier
from rankless.engine.io.byte_sinks import NullSink
from rankless.engine.io.read import read_file_ranges
from rankless.engine.io.source_reader import SourceReader
from rankless.engine.io.tensor_bytes import TensorBytes
from rankless.engine.io.tensor_sources import Source
from rankless.engine.plan.element_ranges import TensorRange
from rankless.engine.plan.tensor_specs import STATE
from rankless.errors import InvalidArgumentError
from rankless.formats.reader import find_file_ranges
from rankless.formats.registry import LAYOUT
from rankless.nxd.reader.nxd_file_names import MODEL, OPTIM, VALUES, RankCoordinates
from rankless.nxd.reader.nxd_reader import COPIES, NxdReader
from rankless.nxd.reader.step_dirs import MARKERS
from rankless.nxd.writer import torch_files
from rankless.nxd.writer.numbered_states_of_ranks import ShardedOptimizerStates
from rankless.nxd.writer.nxd_options import NxdOptions
from rankless.nxd.writer.parameters import ShardedParameters
from rankless.nxd.writer.rank_file_plan import PlannedFile, plan_rank_files
from rankless.nxd.writer.shard import stored_slices
from rankless.ondisk import values
from rankless.ondisk.validation import split_state_key
from rankless.state.array_decoder import ArrayDecoder
from rankless.state.optimizer.whole_states import without_orders
from rankless.storage import posix
from rankless.storage.posix import check_space

_OPTIMIZER = "optimizer"


class NxdWriter:
    """Plans the files of all ranks, and writes them into a folder."""

    def __init__(self, source: ConversionSource, options: NxdOptions) -> None:
        """Plan the parameters. Raises ``InvalidArgumentError`` if NxD cannot store the source or the layout is bad."""
        self._source, self._options = source, options
        self._values = _decode_values(source)
        self._check_components()
        self._groups: Sequence[Mapping[str, Any]] = self._values.get(_OPTIMIZER, {}).get("groups", [])
        trained = [name for group in self._groups for name in group["params"]]
        self._parameters = ShardedParameters(source, options, trained)

    def _check_components(self) -> None:
        """Raise ``InvalidArgumentError`` if the source has components that NxD cannot store."""
        groups = self._source.selected.group_names()
        if groups and MODEL not in groups:
            raise InvalidArgumentError("an NxD checkpoint needs one model, and the source has none: name it by keys")
        others = [group for group in groups if "/" in group]
        if others or len([name for name in self._values if name.startswith(_OPTIMIZER)]) > 1:
            raise InvalidArgumentError(
                f"an NxD checkpoint has one model and one optimizer: choose one of {', '.join(others)}"
            )
        check_named(self._values.get(_OPTIMIZER, {}))

    def write_checkpoint(self, folder: Path) -> None:
        """Write all files into an existing folder, markers last, and read them back.

        Rank 0 calls it in the vote "converting".
        """
        self._verify_source()
        files = [*self._plan_models(), *self._plan_optimizers()]
        check_space(folder.parent, sum(file.frame.size for file in files))
        torch_files.write_torch_files(folder, files)
        for slot, name in VALUES.items():
            if slot in self._values:
                value = self._values[slot]
                posix.write_small(
                    folder / name, as_saved_bytes(scheduler_state_dict(value) if slot == "scheduler" else value)
                )
        for marker in MARKERS:
            posix.write_small(folder / marker, b"1")
        posix.sync_tree(folder)
        layout = self._options.layout
        NxdReader(folder, {LAYOUT: layout, COPIES: "first"} if layout else {}).check_files()

    def _verify_source(self) -> None:
        """Raise ``CorruptCheckpointError`` if the source has checksums that its bytes do not match."""
        reader, keys = self._source.reader, list(self._source.selected.sources.values())
        check_ranges(find_source_checksums(reader, keys))
        if not any(reader.block_crcs(*key) is not None for key in keys):
            return
        files: dict[Source, int] = {}
        file_ranges = [
            file_range
            for index, key in enumerate(keys)
            for file_range in find_file_ranges(
                reader, key, TensorRange(index, 0, reader.groups[key[0]][key[1]].nbytes), files
            )
        ]
        ChecksumVerifier(reader, keys).verify_local(read_file_ranges(list(files), file_ranges, lambda _: NullSink()))

    def _plan_models(self) -> Iterator[PlannedFile]:
        """Yield the planned files of the model."""
        parameters = self._parameters
        for pp, stage in enumerate(parameters.split_stages()):
            for tp in range(self._options.tp_size):
                tree = {
                    parameter.name: torch_files.cast_tensor(
                        parameters.local_tensor(parameter, tp), parameters.dtype_of(parameter)
                    )
                    for parameter in stage
                }
                yield from self._plan_files(f"{MODEL}/{RankCoordinates(0, 0, tp, pp).file_name(experts=False)}", tree)

    def _plan_optimizers(self) -> Iterator[PlannedFile]:
        """Yield the planned files of the optimizer."""
        if not self._groups:
            return
        origin = self._source.reader.path
        states = ShardedOptimizerStates(self._groups, self._collect_states(), self._parameters, self._options, origin)
        for pp, stage in enumerate(self._parameters.split_stages()):
            for tp in range(self._options.tp_size):
                for dp, tree in enumerate(states.rank_states(stage, tp)):
                    yield from self._plan_files(
                        f"{OPTIM}/{RankCoordinates(dp, 0, tp, pp).file_name(experts=False)}", tree
                    )

    def _collect_states(self) -> dict[str, dict[str, Any]]:
        """Return the states of whole parameters, by parameter name and state name."""
        selected = self._source.selected
        states: dict[str, dict[str, Any]] = {}
        for name in selected.infos_of_group(_OPTIMIZER):
            fqn, state = split_state_key(name)
            states.setdefault(fqn, {})[state] = stored_slices(self._source.reader, *selected.sources[_OPTIMIZER, name])
        for group in self._groups:
            for fqn, plain in group["state"].items():
                states.setdefault(fqn, {}).update(without_orders(plain))
        return states

    def _plan_files(self, name: str, tree: Mapping[str, Any]) -> list[PlannedFile]:
        """Plan the files of one rank."""
        return plan_rank_files(name, tree, names_hash, xser=self._options.xser)


def _decode_values(source: ConversionSource) -> dict[str, Any]:
    """Decode the values of a source, and read the tensors in them."""
    infos = {name: info for (group, name), info in source.tensor_infos.items() if group == STATE}
    arrays = ArrayDecoder(infos)
    decoded = values.decode_value(dict(source.carried.shared), arrays, "the values")
    for name, tensor in arrays.tensors.items():
        _read_tensor(source, name, tensor)
    return dict(decoded)


def _read_tensor(source: ConversionSource, name: str, tensor: torch.Tensor) -> None:
    """Read a tensor of the values into memory."""
    if name in source.carried.arrays:
        if data := bytearray(source.carried.arrays[name].data):
            tensor.copy_(torch.frombuffer(data, dtype=tensor.dtype).reshape(tensor.shape))
        return
    buffer = np.empty(tensor.nbytes, np.uint8)
    extents = source.reader.find_extents(*source.selected.sources[STATE, name], 0, tensor.nbytes)
    with SourceReader([extent.file for extent in extents]) as reader:
        for index, extent in enumerate(extents):
            reader.read(index, extent.offset, buffer[extent.start : extent.stop].data)
    if tensor.nbytes:
        TensorBytes(tensor).write(0, buffer)
