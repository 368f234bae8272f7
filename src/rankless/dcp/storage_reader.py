"""A ``StorageReader`` for ``dcp.load``: verifies all bytes that it reads, runs no code, reads only needed ranges.

torch calls the methods: each rank reads the metadata and its plan, in the thread of ``dcp.load``.
:mod:`rankless.torchtitan.manager` loads with it, too. No pickle may run unless the user passes ``weights_only=False``.
"""

from __future__ import annotations

import io
from os import PathLike
from typing import Any
from uuid import uuid4

from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from rankless.dcp.dcp_record_reader import DcpFolder
from rankless.dcp.reader.dcp_directory import is_dcp
from rankless.dcp.shard_check import check_shards
from rankless.errors import InvalidArgumentError, MismatchError, NoCheckpointError
from rankless.run.run_store import run_store_of
from rankless.save.background import background_saves
from rankless.storage.location import is_supported, parse_location
from rankless.storage.store import store_of


class FileSystemReader(StorageReader):
    """Reads a DCP folder for ``dcp.load``. Any writer may have written it.

    The metadata must be complete: chunks cover each tensor, and each chunk is inside its file. If there is a
    ``checksums.json``, all bytes that are read are verified in blocks of 16 MiB. If a rank needs only a part of a
    chunk, it reads only that part.

    ``load_id`` is different for each load, as in torch's reader.

    Args:
        path: the folder; ``checkpoint_id`` of a load replaces it.
        verify: verify checksums if there are any.
        weights_only: read only tensors and values of plain types, and run no code, whatever is in the file. With
            ``False`` torch unpickles values, which can run any code: only for folders that you trust.

    Errors of any rank are raised by ``dcp.load`` as torch's ``CheckpointException``, which contains rankless's errors.
    """

    def __init__(self, path: str | PathLike[str], *, verify: bool = True, weights_only: bool = True) -> None:
        self.path = parse_location(path)
        self._verify, self._weights_only = verify, weights_only
        self.load_id = str(uuid4())
        self._folder: DcpFolder | None = None

    @property
    def checkpoint_id(self) -> str:
        """The folder's path."""
        return str(self.path)

    def reset(self, checkpoint_id: str | PathLike[str] | None = None) -> None:
        """Begin a new load."""
        if checkpoint_id:
            self.path = parse_location(checkpoint_id)
        self.load_id = str(uuid4())
        self._folder = None

    def read_metadata(self) -> Metadata:
        """Read the metadata. Raises ``CorruptCheckpointError`` if it is incomplete.

        See torch's ``StorageReader`` for this method and the next ones.
        """
        if not store_of(self.path).path_exists(self.path):
            run_store_of(self.path.parent).repair_names()
        if not is_dcp(self.path):
            raise NoCheckpointError(f"there is no distributed checkpoint in {self.path}: it has no .metadata")
        self._folder = DcpFolder.open_folder(self.path, verify=self._verify)
        metadata = self._folder.build_metadata()
        save_id = self._folder.dcp_metadata.save_id
        metadata.storage_meta = StorageMeta(checkpoint_id=self.checkpoint_id, save_id=save_id, load_id=self.load_id)
        return metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: no setup is needed."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans unchanged."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the records that this rank needs, in the order of the files."""
        folder = self._folder
        if folder is None:
            raise InvalidArgumentError(f"the metadata of {self.path} was not read: call read_metadata first")
        check_shards(planner)
        background_saves.wait_for_copies()  # they may still read the tensors that are filled here
        for item in sorted(plan.items, key=folder.locate_record):
            if item.type == LoadItemType.BYTE_IO:
                window = folder.open_window(item)
                raw = folder.read_value(item) if self._weights_only else window.read(0, window.size)
                planner.load_bytes(item, io.BytesIO(raw))
            else:
                _fill_tensor(folder, item, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | PathLike[str]) -> bool:
        """Return whether this is a path of a file system, or of an object store that is supported."""
        return is_supported(checkpoint_id)


def _fill_tensor(folder: DcpFolder, item: ReadItem, planner: LoadPlanner) -> None:
    target = planner.resolve_tensor(item).detach()
    if target.size() != item.lengths:
        raise MismatchError(
            f"{item.storage_index.fqn!r}: cannot read shape {list(item.lengths)} into shape {list(target.size())}"
        )
    target.copy_(folder.read_tensor(item))
    planner.commit_tensor(item, target)
