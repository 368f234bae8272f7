"""Into folders and files that ColossalAI's Booster loads, named and placed as its training scripts have them.

``modeling/`` and ``optimizer/`` are for ``load_model`` and ``load_optimizer``, ``lr_scheduler`` likewise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from holdfast.compat.colossalai.files import model_files, optimizer_files
from holdfast.conversion.fake_tensors import FakeTensors
from holdfast.conversion.native_target import companion_files
from holdfast.conversion.state_dict_schemas import booster_schema
from holdfast.conversion.target import ConversionSource, FileLayout, FileSpan, StagedFolder
from holdfast.conversion.tensor_filter import Key
from holdfast.conversion.torch_target import PlannedTorchFile
from holdfast.engine.io.requests import Fragments
from holdfast.formats.reader import Reader
from holdfast.formats.sharded.model_files import CONTENT, MODEL, MODELING, OPTIMIZER, SCHEDULER
from holdfast.formats.sharded.sharded_reader import ShardedReader
from holdfast.storage.posix import make_parents, sync_tree, write_small


class ColossalaiTarget(StagedFolder):
    """Several files of ``torch.save``, and small ones beside them."""

    def __init__(self, material: ConversionSource, draft: Path) -> None:
        super().__init__(material, draft)
        self._fakes = FakeTensors(material.infos)
        self._small = {f"{MODELING}/{name}": data for name, data in companion_files(material.reader.path)}
        trees = self._trees(self._fakes.tree(material, booster_schema))
        self._files = {draft / name: PlannedTorchFile(tree) for name, tree in trees}

    def _trees(self, parts: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        """What is in each file. Takes note of the indexes."""
        for kind, folder, divided in ((MODEL, MODELING, model_files), (OPTIMIZER, OPTIMIZER, optimizer_files)):
            if kind in parts:
                files = divided(parts[kind], self._material.limit)
                self._small[f"{folder}/{files.index_name}"] = files.index
                yield from ((f"{folder}/{name}", tree) for name, tree in files.trees.items())
        yield from ((name, parts[name]) for name in (SCHEDULER, CONTENT) if name in parts)

    def prepare(self) -> None:
        """See :class:`holdfast.conversion.target.ConversionTarget`."""
        self._open()
        for path, file in self._files.items():
            file.make(path)

    def places(self) -> FileLayout:
        """See :class:`holdfast.conversion.target.ConversionTarget`."""
        known = {id(fake): key for key, fake in self._fakes.made.items()}
        infos = self._material.infos
        found: dict[Key, list[FileSpan]] = {}
        for number, (path, file) in enumerate(self._files.items()):
            for fake, offset in sorted(file.starts(path).items(), key=lambda start: start[1]):
                key = known[fake]
                found.setdefault(key, []).append(FileSpan(number, offset, 0, infos[key].nbytes))
        return FileLayout(list(self._files), found)

    def finish(self, fragments: Fragments) -> None:
        """See :class:`holdfast.conversion.target.ConversionTarget`."""
        del fragments  # these files have no room for CRCs
        for path, file in self._files.items():
            file.finish(path)
        for name, data in self._small.items():
            make_parents(self._draft, name)
            write_small(self._draft / name, data)
        sync_tree(self._draft)

    def reader(self) -> Reader:
        """See :class:`holdfast.conversion.target.ConversionTarget`."""
        return ShardedReader(self._draft, {})
