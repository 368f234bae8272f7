"""A ``StorageWriter`` that writes torch's files into a folder which appears when it is complete and durable.

torch calls the methods: rank 0 prepares the global plan and finishes, each rank writes, in the thread of ``dcp.save``
or of ``dcp.async_save``. A rank that fails must return its error as a result, or the others would wait.
"""

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
from torch.distributed.checkpoint.filesystem import _StoragePrefix
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from rankless.dcp.pending_dcp import check_same_on_all_ranks
from rankless.dcp.reader import checksums_json
from rankless.dcp.save_output import make_output
from rankless.dcp.shard_check import check_checkpointable, check_shards
from rankless.dcp.write_results import (
    WrittenItem,
    check_all_written,
    checksum_records,
    hash_chunks,
    metadata_indices,
)
from rankless.dcp_versions import DCP_VERSION, SerializationFormat
from rankless.engine.comm.process_group_argument import check_ranks_are_joined
from rankless.engine.comm.vote import RankFailure
from rankless.engine.io.device_streams import synchronize_devices
from rankless.errors import InvalidArgumentError, StorageError
from rankless.storage.location import is_supported, parse_location
from rankless.storage.reader_pool import ReaderPool


class FileSystemWriter(StorageWriter, BlockingAsyncStager):
    """Writes the files of torch's ``FileSystemWriter``, for ``dcp.save`` and ``dcp.async_save``.

    The folder appears, or replaces the previous one, atomically, when all ranks have written and everything is durable.
    A crash or a failed rank leaves the previous checkpoint unchanged, and a hidden folder, which the next save to the
    same path removes. ``checksums.json`` next to the files holds their CRCs; torch itself does not read it.

    The arguments are the same as of torch's writer, and are kept as attributes of the same names. ``save_id`` is
    different for each save.

    Args:
        path: the folder, or the URL of one in an object store; ``checkpoint_id`` of a save replaces it.
        single_file_per_rank: write one file for each thread of a rank instead of one for each tensor and value.
        sync_files: make the files durable before the checkpoint gets its name. Without it a save is still atomic for
            every process that looks, but a power failure soon after may leave incomplete files, which the checksums
            detect.
        thread_count: the number of threads of a rank that write.
        per_thread_copy_ahead: the number of bytes that are copied from an accelerator ahead of being written.
        cache_staged_state_dict: ``dcp.async_save`` copies into the pinned memory of the previous save instead of
            allocating new memory: for a writer that is used again and again. The memory of one copy stays allocated.
        overwrite: replace an existing checkpoint; otherwise ``TagExistsError`` is raised.
        serialization_format: ``TORCH_SAVE``. Other formats are refused: ``FileSystemReader`` cannot read them.

    Errors of any rank are raised by ``dcp.save`` as torch's ``CheckpointException``, which contains rankless's errors.
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
                f"serialization_format must be SerializationFormat.TORCH_SAVE; got {serialization_format}, which "
                "neither torch's FileSystemReader nor rankless's can read"
            )
        self.path, self.overwrite = parse_location(path), overwrite
        self.single_file_per_rank, self.sync_files, self.thread_count = single_file_per_rank, sync_files, thread_count
        self.per_thread_copy_ahead, self.serialization_format = per_thread_copy_ahead, serialization_format
        self._output = make_output(self.path, sync_files=sync_files)
        self.save_id = str(uuid4())

    @property
    def checkpoint_id(self) -> str:
        """The folder's path."""
        return str(self.path)

    def reset(self, checkpoint_id: str | PathLike[str] | None = None) -> None:
        """Begin a new save."""
        if checkpoint_id:
            self.path = parse_location(checkpoint_id)
        self.save_id = str(uuid4())
        self._renew_output()

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Copy the state dict to the CPU: see torch's ``AsyncStager``. Nothing has to be copied ahead then."""
        check_checkpointable(state_dict)  # the copies lack its attributes
        self.per_thread_copy_ahead = 0
        return super().stage(state_dict)

    def storage_meta(self) -> StorageMeta:
        """Return the description of the save in the metadata."""
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self.save_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Raise ``InvalidArgumentError`` if ranks do not use collectives, or have no process group and may overwrite.

        See torch's ``StorageWriter`` for this method and the next ones.
        """
        del is_coordinator, args
        if self.overwrite:
            check_ranks_are_joined(None, "pass overwrite=False to the writer, or unset WORLD_SIZE")
        check_same_on_all_ranks(use_collectives=kwargs.get("use_collectives", True))

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Begin the output (rank 0 only), and give each rank a prefix for its files."""
        self._renew_output()  # torch calls reset() only if a save has a checkpoint_id
        self._output.begin(overwrite=self.overwrite)
        return [replace(plan, storage_data=_StoragePrefix(f"__{rank}_")) for rank, plan in enumerate(plans)]

    def _renew_output(self) -> None:
        """Prepare for another save. Remove the leftovers of one that failed and did not call :meth:`finish`."""
        self._output.discard()
        self._output = make_output(self.path, sync_files=self.sync_files)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's files, make them durable, and hash them."""
        results: Future[list[WriteResult]] = Future()
        try:
            check_shards(planner)
            with self._output.open_folder(sum(map(_count_bytes, plan.items))) as folder:
                results.set_result(self._output.keep_files(folder, self._write_files(folder, plan, planner)))
        except Exception as error:  # noqa: BLE001 - reported to rank 0, which removes the folder
            results.set_result([WriteResult(MetadataIndex(""), 0, RankFailure.from_error(error))])
        return results

    def _write_files(self, folder: Path, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
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
        missing = {item.index for item in plan.items} - {result.index for result in results}
        if missing:
            name = min(index.fqn for index in missing)
            raise StorageError(
                f"{name!r} and {len(missing) - 1} more were not written to {folder}: a writer thread failed"
            )
        with ReaderPool() as readers:
            return [hash_chunks(folder, result, readers) for result in results]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the metadata, and publish the checkpoint (rank 0 only)."""
        output = self._output
        if not output.is_begun:
            raise StorageError(f"the save to {self.path} was not started: call prepare_global_plan first")
        try:
            check_all_written(results)
            written: dict[MetadataIndex, WrittenItem] = {r.index: r.storage_data for row in results for r in row}
            output.check_files([*written.values()])
            output.publish(*self._encode_metadata(metadata, written))
        except BaseException:
            output.discard([result for row in results for result in row])
            raise

    def _encode_metadata(self, metadata: Metadata, written: Mapping[MetadataIndex, WrittenItem]) -> tuple[bytes, bytes]:
        """Return the bytes of the metadata and of the checksums."""
        missing = next((index for index in metadata_indices(metadata) if index not in written), None)
        if missing is not None:
            raise StorageError(f"no rank has written {missing.fqn!r} at {list(missing.offset or ())}")
        metadata.version = DCP_VERSION
        metadata.storage_meta = self.storage_meta()
        metadata.storage_data = {index: item.info for index, item in written.items()}
        raw = pickle.dumps(metadata)
        return raw, checksums_json.encode_checksums(raw, checksum_records(written))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | PathLike[str]) -> bool:
        """Return whether this is a path of a file system, or of an object store that rankless knows."""
        return is_supported(checkpoint_id)


def _count_bytes(item: WriteItem) -> int:
    """Return the size of the tensor of an item; 0 for a value."""
    data = item.tensor_data
    return 0 if data is None else data.chunk.sizes.numel() * data.properties.dtype.itemsize
