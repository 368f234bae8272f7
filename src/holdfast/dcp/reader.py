"""A ``StorageReader``: what is read is checked, nothing that is read is run, and of a chunk only what is asked for."""

from __future__ import annotations

import io
from os import PathLike
from typing import Any
from uuid import uuid4

from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from holdfast.dcp.dcp_folder import DcpFolder
from holdfast.errors import InvalidArgumentError, MismatchError
from holdfast.run.cleanup import finish_interrupted_replace
from holdfast.save.background import background_saves
from holdfast.storage import posix


class FileSystemReader(StorageReader):
    """Reads a folder for ``dcp.load``, whoever wrote it.

    The metadata must be whole: each tensor covered by its chunks, each chunk inside of its file. Where there is a
    ``checksums.json``, all that is read is verified in blocks of 16 MiB. Of a chunk that a rank needs a part of, it
    reads that part.

    ``load_id``, as torch's reader has it, is another one for each load.

    Args:
        path: the folder; ``checkpoint_id`` of a load takes its place.
        verify: whether checksums are looked at where there are any.
        weights_only: of values, only tensors and plain types are read, and no code runs, whatever is in the file.
            With ``False`` torch unpickles them, which can run anything: for folders that you trust.

    Errors of any rank come out of ``dcp.load`` as torch's ``CheckpointException``, with those of holdfast in it.
    """

    def __init__(self, path: str | PathLike[str], *, verify: bool = True, weights_only: bool = True) -> None:
        self.path = posix.local_path(path)
        self._verify, self._weights_only = verify, weights_only
        self.load_id = str(uuid4())
        self._opened: DcpFolder | None = None

    @property
    def checkpoint_id(self) -> str:
        """The folder's path."""
        return str(self.path)

    def reset(self, checkpoint_id: str | PathLike[str] | None = None) -> None:
        """A new load begins."""
        if checkpoint_id:
            self.path = posix.local_path(checkpoint_id)
        self.load_id = str(uuid4())
        self._opened = None

    def read_metadata(self) -> Metadata:
        """See torch's ``StorageReader``, here and below. Raises ``CorruptCheckpointError`` where it is not whole."""
        if not posix.path_exists(self.path):
            finish_interrupted_replace(self.path.parent)
        self._opened = DcpFolder.of(self.path, verify=self._verify)
        found = self._opened.metadata()
        save_id = self._opened.found.save_id
        found.storage_meta = StorageMeta(checkpoint_id=self.checkpoint_id, save_id=save_id, load_id=self.load_id)
        return found

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing is left to do."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """As they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what this rank needs, in the order of the files."""
        opened = self._opened
        if opened is None:
            raise InvalidArgumentError(f"the metadata of {self.path} is to be read first")
        background_saves.wait_for_copies()  # which may read the tensors that are filled here
        for item in sorted(plan.items, key=opened.place):
            if item.type == LoadItemType.BYTE_IO:
                window = opened.window(item)
                raw = opened.value(item) if self._weights_only else window.read(0, window.size)
                planner.load_bytes(item, io.BytesIO(raw))
            else:
                _fill(opened, item, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | PathLike[str]) -> bool:
        """Whether this is a path of a file system."""
        return "://" not in str(checkpoint_id)


def _fill(opened: DcpFolder, item: ReadItem, planner: LoadPlanner) -> None:
    target = planner.resolve_tensor(item).detach()
    if target.size() != item.lengths:
        raise MismatchError(
            f"{item.storage_index.fqn!r}: {list(item.lengths)} of it is to be read into {list(target.size())}"
        )
    target.copy_(opened.tensor(item))
    planner.commit_tensor(item, target)
