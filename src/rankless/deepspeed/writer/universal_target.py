"""Writes universal checkpoints: a folder for each trained parameter, and files with everything else.

A conversion makes one on every rank; see :class:`rankless.conversion.target.ConversionTarget` for the ranks of its
methods. The files are those that DeepSpeed loads.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from rankless.conversion.fake_tensors import FakeTensors
from rankless.conversion.target import ConversionSource, FileLayout, FileSpan
from rankless.conversion.tensor_filter import Key
from rankless.conversion.torch_target import PlannedTorchFile
from rankless.deepspeed.reader.deepspeed_file_names import LATEST
from rankless.deepspeed.reader.deepspeed_reader import DeepSpeedReader
from rankless.deepspeed.reader.pickled_classes import ALLOWED
from rankless.deepspeed.writer import record_pickle
from rankless.deepspeed.writer.trained_parameters import TrainedParameters
from rankless.deepspeed.writer.universal_trees import UniversalTrees
from rankless.deepspeed.writer.universal_values import TAG_SUFFIX, EngineValues
from rankless.engine.io.requests import KnownFragments
from rankless.formats.reader import Reader
from rankless.observe.warning import warn_caller
from rankless.storage.posix import sync_tree, write_small


class UniversalTarget:
    """A folder with the file ``latest_universal`` and the folder of one tag."""

    output_name = ""

    def __init__(self, source: ConversionSource, pending: Path) -> None:
        """Plan the files. Raises ``InvalidArgumentError`` naming a value that DeepSpeed has no place for."""
        self._source, self._pending = source, pending
        self._fakes = FakeTensors(source.tensor_infos)
        tensors, values = self._fakes.build_tree(source, lambda groups, values: (groups, values))
        trained = TrainedParameters.from_components(source, tensors, values)
        engine_values = EngineValues.from_source(source, values, trained.steps)
        trees = UniversalTrees(trained, engine_values, tensors, values, source.selected.tied.get("model", {}))
        self._tag = f"global_step{engine_values.counters['global_steps']}{TAG_SUFFIX}"
        self._warnings = list(trees.warnings())
        self._files = {
            pending / self._tag / name: PlannedTorchFile(tree, record_pickle, ALLOWED)
            for name, tree in trees.files().items()
        }

    def create_files(self) -> Collection[int]:
        """See :class:`rankless.conversion.target.ConversionTarget`."""
        for path, file in self._files.items():
            file.create_file(path)
            file.write_small_tensors(path)
        return ()

    def locate_tensors(self) -> FileLayout:
        """See :class:`rankless.conversion.target.ConversionTarget`."""
        keys = {id(fake): key for key, fake in self._fakes.tensors_by_key.items()}
        infos = self._source.tensor_infos
        spans: dict[Key, list[FileSpan]] = {}
        for number, (path, file) in enumerate(self._files.items()):
            for fake, offset in sorted(file.read_offsets(path).items(), key=lambda start: start[1]):
                key = keys[fake]
                spans.setdefault(key, []).append(FileSpan(number, offset, 0, infos[key].nbytes))
        return FileLayout(list(self._files), spans, [0] * len(self._files))

    def write_metadata(self, fragments: KnownFragments) -> None:
        """See :class:`rankless.conversion.target.ConversionTarget`. Warns of values that DeepSpeed does not restore."""
        del fragments  # these files have no room for CRCs
        write_small(self._pending / LATEST[1], self._tag.encode())
        sync_tree(self._pending)
        for warning in self._warnings:
            warn_caller(warning)

    def open_reader(self) -> Reader:
        """See :class:`rankless.conversion.target.ConversionTarget`."""
        return DeepSpeedReader(self._pending, {})
