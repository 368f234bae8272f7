"""A ``StorageWriter``: what torch's writes, in a folder that appears when it is complete and durable."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, SerializationFormat, _StoragePrefix
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from holdfast.dcp.staging import DcpStaging, check_same_on_all_ranks, staging_path
from holdfast.dcp.write_results import WrittenItem, check_all_written, checksum_records, hash_chunks, metadata_indices
from holdfast.engine.comm.vote import RankFailure
from holdfast.engine.io.device_streams import synchronize_devices
from holdfast.errors import InvalidArgumentError, StorageError
from holdfast.formats.dcp import checksums
from holdfast.formats.dcp.folder import METADATA
from holdfast.storage import posix
from holdfast.storage.reader_pool import ReaderPool


class FileSystemWriter(StorageWriter, BlockingAsyncStager):
    """Writes what torch's ``FileSystemWriter`` writes, for ``dcp.save`` and ``dcp.async_save``.

    The folder appears, or takes the place of the one before, in one step, when all ranks have written and all is
    durable. A crash, or a rank that fails, leaves what was there before, and a hidden folder that the next save to the
    same path removes. ``checksums.json`` beside the files has their CRCs; torch itself does not look at it.

    The arguments are those of torch's writer, and are kept as attributes of the same names. ``save_id`` is another one
    for each save.

    Args:
        path: the folder; ``checkpoint_id`` of a save takes its place.
        single_file_per_rank: one file for each thread of a rank, or one for each tensor and value.
        sync_files: make the files durable before the checkpoint gets its name. Without it a save is still one step for
            every process that looks, but a power failure soon after may leave files without all of their bytes, which
            the checksums tell.
        thread_count: threads of a rank that write.
        per_thread_copy_ahead: bytes that are copied from an accelerator ahead of being written.
        cache_staged_state_dict: ``dcp.async_save`` copies into the memory of the save before, which is pinned, instead
            of new one: for a writer that is used again and again. It takes the memory of one copy for good.
        overwrite: whether a checkpoint that is there is replaced; else ``TagExistsError``.
        serialization_format: ``TORCH_SAVE``. Anything else is refused: ``FileSystemReader`` cannot read it.

    Errors of any rank come out of ``dcp.save`` as torch's ``CheckpointException``, with those of holdfast in it.
    """

    def __init__(  # noqa: PLR0917 - torch's order
        self,
        path: str | PathLike[str],
        single_file_per_rank: bool = True,
        sync_files: bool = True,
        thread_count: int = 1,
        per_thread_copy_ahead: int = 10_000_000,
        cache_staged_state_dict: bool = False,
        overwrite: bool = True,
        *,
        serialization_format: SerializationFormat = SerializationFormat.TORCH_SAVE,
    ) -> None:
        BlockingAsyncStager.__init__(self, cache_staged_state_dict=cache_staged_state_dict)
        if serialization_format != SerializationFormat.TORCH_SAVE:
            raise InvalidArgumentError(
                f"serialization_format must be SerializationFormat.TORCH_SAVE, not {serialization_format}: torch's "
                "FileSystemReader and holdfast's cannot read another one"
            )
        self.path, self.overwrite = posix.local_path(path), overwrite
        self.single_file_per_rank, self.sync_files, self.thread_count = single_file_per_rank, sync_files, thread_count
        self.per_thread_copy_ahead, self.serialization_format = per_thread_copy_ahead, serialization_format
        self._draft: DcpStaging | None = None
        self.save_id = str(uuid4())

    @property
    def checkpoint_id(self) -> str:
        """The folder's path."""
        return str(self.path)

    def reset(self, checkpoint_id: str | PathLike[str] | None = None) -> None:
        """A new save begins."""
        if checkpoint_id:
            self.path = posix.local_path(checkpoint_id)
        self.save_id = str(uuid4())
        self._discard()

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """See torch's ``AsyncStager``: a copy on the CPU, from which nothing has to be copied ahead."""
        self.per_thread_copy_ahead = 0
        return super().stage(state_dict)

    def storage_meta(self) -> StorageMeta:
        """What the metadata says of the save."""
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self.save_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """See torch's ``StorageWriter``, here and below."""
        del is_coordinator, args
        check_same_on_all_ranks(use_collectives=kwargs.get("use_collectives", True))

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Nothing is to be done before all ranks have a plan."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Rank 0: make the folder."""
        self._discard()  # torch calls reset() only if a save has a checkpoint_id
        self._draft = DcpStaging(self.path, overwrite=self.overwrite)
        return [replace(plan, storage_data=_StoragePrefix(f"__{rank}_")) for rank, plan in enumerate(plans)]

    def _discard(self) -> None:
        """Remove what a save has left that failed where this writer was not told."""
        if self._draft is not None:
            self._draft.discard()
            self._draft = None

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's files, make them durable, and hash them."""
        found: Future[list[WriteResult]] = Future()
        try:
            found.set_result(self._write(staging_path(self.path), plan, planner))
        except Exception as error:  # noqa: BLE001 - rank 0 is to hear of it, who has the folder to remove
            found.set_result([WriteResult(MetadataIndex(""), 0, RankFailure.of(error))])
        return found

    def _write(self, folder: Path, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        data = (planner.resolve_data(item) for item in plan.items)
        synchronize_devices(
            tensor for tensor in data if isinstance(tensor, torch.Tensor)
        )  # torch copies in threads, too
        writer = filesystem.FileSystemWriter(
            folder,
            single_file_per_rank=self.single_file_per_rank,
            sync_files=False,  # torch's sync comes before its last bytes
            thread_count=self.thread_count,
            per_thread_copy_ahead=self.per_thread_copy_ahead,
        )
        results = writer.write_data(plan, planner).wait()
        lost = {item.index for item in plan.items} - {result.index for result in results}
        if lost:
            name = min(index.fqn for index in lost)
            raise StorageError(f"{name!r} and {len(lost) - 1} more were not written to {folder}: a thread failed")
        with ReaderPool() as readers:
            found = [hash_chunks(folder, result, readers) for result in results]
        for name in sorted({result.storage_data.relative_path for result in results}) if self.sync_files else ():
            posix.sync_tree(folder / name)
        return found

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Rank 0: complete the folder, and give it its name."""
        if self._draft is None:
            raise StorageError(f"the save to {self.path} was not begun")
        draft, self._draft = self._draft, None
        try:
            check_all_written(results)
            self._complete(draft.folder, metadata, {one.index: one.storage_data for row in results for one in row})
            draft.publish()
        except BaseException:
            draft.discard()
            raise
        draft.close()

    def _complete(self, folder: Path, metadata: Metadata, written: Mapping[MetadataIndex, WrittenItem]) -> None:
        lost = next((index for index in metadata_indices(metadata) if index not in written), None)
        if lost is not None:
            raise StorageError(f"no rank has written {lost.fqn!r} at {list(lost.offset or ())}")
        metadata.version = CURRENT_DCP_VERSION
        metadata.storage_meta = self.storage_meta()
        metadata.storage_data = {index: one.info for index, one in written.items()}
        raw = pickle.dumps(metadata)
        posix.write_small(folder / METADATA, raw)
        posix.write_small(folder / checksums.NAME, checksums.encode_checksums(raw, checksum_records(written)))
        posix.fsync_directory(folder)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | PathLike[str]) -> bool:
        """Whether this is a path of a file system."""
        return "://" not in str(checkpoint_id)
