"""Reading the trees in the files of one checkpoint, within one budget. No pickle is run.

:class:`~rankless.deepspeed.reader.deepspeed_reader.DeepSpeedReader` has one on each rank. A file outside of the folder
must not be opened.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rankless.deepspeed.reader.pickled_classes import ALLOWED
from rankless.errors import CorruptCheckpointError
from rankless.formats.contained_paths import check_contained
from rankless.formats.torch_file import read_tree
from rankless.formats.tree.expanded_size import check_expanded_size
from rankless.ondisk.block_crcs import crc64
from rankless.ondisk.read_budget import ReadBudget
from rankless.storage.reader_pool import ReaderPool
from rankless.storage.store import store_of


@dataclass
class FileAccess:
    """An open checkpoint: its folder, the budget that all of its files share, and the files that were read.

    Attributes:
        root: The folder that was opened. All files must be inside it.
        budget: The budget for reading all files.
        digests: A digest of the pickle of each file that was read.
        readers: The open files, at most as many as a process may have.
    """

    root: Path
    budget: ReadBudget = field(default_factory=ReadBudget)
    digests: dict[Path, int] = field(default_factory=dict)
    readers: ReaderPool = field(default_factory=ReaderPool)

    def read_root(self, path: Path) -> Any:
        """Return the tree in a file. Raises ``CorruptCheckpointError`` if the file is missing or invalid."""
        if not store_of(path).path_exists(path):
            raise CorruptCheckpointError(f"{path} is missing: the save did not finish, or files were removed")
        check_contained(path, self.root)
        tree = read_tree(path, self.budget, ALLOWED, self.readers)
        try:
            check_expanded_size(tree.root, self.budget)
        except CorruptCheckpointError as error:
            raise type(error)(f"{path}: {error}") from error
        self.digests[path] = tree.digest
        return tree.root

    def read_dict(self, path: Path) -> dict[Any, Any]:
        """Return the dict in a file. Raises ``CorruptCheckpointError`` if the file holds something else."""
        root = self.read_root(path)
        if not isinstance(root, dict):
            raise CorruptCheckpointError(f"{path} must hold a dict, as DeepSpeed writes it; got {type(root).__name__}")
        return root

    @property
    def files(self) -> list[Path]:
        """The files that were read."""
        return list(self.digests)

    @property
    def fingerprint(self) -> str:
        """A digest of all pickles and of the sizes of the files."""
        sizes = [(path.name, digest, store_of(path).file_size(path)) for path, digest in self.digests.items()]
        return f"{crc64(repr(sizes).encode()):016x}"
