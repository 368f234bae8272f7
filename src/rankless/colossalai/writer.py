"""Converts to folders and files that ColossalAI's Booster loads, with the names and paths of its training scripts.

``modeling/`` and ``optimizer/`` are for ``load_model`` and ``load_optimizer``, ``lr_scheduler`` is for
``load_lr_scheduler``.

A conversion makes one on every rank; see :class:`rankless.conversion.target.ConversionTarget` for the ranks of its
methods. ColossalAI's scripts look for these names.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from rankless.colossalai.file_division import model_files, optimizer_files
from rankless.conversion.fake_tensors import FakeTensors
from rankless.conversion.native_target import companion_files
from rankless.conversion.state_dict_schemas import booster_schema
from rankless.conversion.target import ConversionSource, FileLayout, FileSpan
from rankless.conversion.tensor_filter import Key
from rankless.conversion.torch_target import PlannedTorchFile
from rankless.engine.io.requests import KnownFragments
from rankless.formats.reader import Reader
from rankless.formats.sharded.model_files import CONTENT, MODEL, MODELING, OPTIMIZER, SCHEDULER
from rankless.formats.sharded.sharded_reader import ShardedReader
from rankless.storage.posix import make_parents, sync_tree, write_small


class ColossalaiTarget:
    """A target that consists of several files of ``torch.save``, and small files next to them."""

    output_name = ""

    def __init__(self, source: ConversionSource, pending: Path) -> None:
        self._source, self._pending = source, pending
        self._fakes = FakeTensors(source.tensor_infos)
        self._small_files = {f"{MODELING}/{name}": data for name, data in companion_files(source.reader)}
        trees = self._plan_trees(self._fakes.build_tree(source, booster_schema))
        self._files = {pending / name: PlannedTorchFile(tree) for name, tree in trees}

    def _plan_trees(self, components: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        """Yield the name and the tree of each file. Adds the indexes to the small files."""
        for kind, folder, divide_files in ((MODEL, MODELING, model_files), (OPTIMIZER, OPTIMIZER, optimizer_files)):
            if kind in components:
                files = divide_files(components[kind], self._source.limit)
                self._small_files[f"{folder}/{files.index_name}"] = files.index
                yield from ((f"{folder}/{name}", tree) for name, tree in files.trees.items())
        yield from ((name, components[name]) for name in (SCHEDULER, CONTENT) if name in components)

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
        """See :class:`rankless.conversion.target.ConversionTarget`."""
        del fragments  # these files have no room for CRCs
        for name, data in self._small_files.items():
            make_parents(self._pending, name)
            write_small(self._pending / name, data)
        sync_tree(self._pending)

    def open_reader(self) -> Reader:
        """See :class:`rankless.conversion.target.ConversionTarget`."""
        return ShardedReader(self._pending, {})
