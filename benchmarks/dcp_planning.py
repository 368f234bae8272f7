"""Planning of a save of many simulated ranks on one rank, and reading of the metadata, by rankless and by DCP.

DCP's rank 0 gathers a plan from every rank, merges them and sends each rank its own. Every rank that loads reads the
metadata of all. Ranks are simulated by the messages that they would send; nothing goes over a network.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, SavePlan
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

import rankless
from benchmarks.measure import Contender, Table, time_interleaved
from benchmarks.peers import DCP, OURS
from benchmarks.planning import build_plan, build_sharded_specs
from benchmarks.setting import Setting
from rankless.formats.native import NativeReader

#: The number of tensors, each sharded by rows over all ranks, and the numbers of ranks.
TENSORS, RANKS = 1000, (64, 512)


def measure_dcp_planning(setting: Setting) -> Iterator[Table]:
    """Measure both with the same tensors and ranks; DCP without its optional cache of plans."""
    warnings.simplefilter("ignore")
    contenders = {}
    for ranks in RANKS:
        contenders[f"{OURS}, {ranks} ranks"] = Contender(partial(build_plan, *build_sharded_specs(ranks, TENSORS)))
        posted = [pickle.dumps(_build_rank_plan(rank, ranks)) for rank in range(ranks)]
        contenders[f"{DCP}, {ranks} ranks"] = Contender(partial(_decide_globally, posted, setting.folder))
    yield time_interleaved(contenders, setting.rounds).build_table(
        f"plan of a save at rank 0, {TENSORS} sharded tensors"
    )
    readers = {OURS: Contender(partial(NativeReader, _save_rankless(setting.folder)))}
    for ranks in RANKS:
        path = _write_dcp_metadata(setting.folder / f"dcp{ranks}", ranks)
        readers[f"{DCP}, {ranks} ranks"] = Contender(FileSystemReader(path).read_metadata)
    yield time_interleaved(readers, setting.rounds).build_table(
        f"metadata read by each rank, {TENSORS} sharded tensors"
    )


def _build_rank_plan(rank: int, ranks: int) -> SavePlan:
    """Return a rank's local plan, as DCP creates it from a ``DTensor``."""
    rows, columns = 8, 1024
    properties = TensorProperties(dtype=torch.float32)
    whole, local = torch.Size([rows * ranks, columns]), torch.Size([rows, columns])
    start = torch.Size([rows * rank, 0])
    names = [f"layers.{number}.weight" for number in range(TENSORS)]
    items = [
        WriteItem(
            MetadataIndex(name, start),
            WriteItemType.SHARD,
            tensor_data=TensorWriteData(ChunkStorageMetadata(start, local), properties, whole),
        )
        for name in names
    ]
    return SavePlan(items, planner_data={name: (name,) for name in names})


def _decide_globally(posted: list[bytes], folder: Path) -> list[bytes]:
    """Do the work of rank 0 between gathering the plans of all ranks and sending each its own."""
    planner, writer = DefaultSavePlanner(), FileSystemWriter(folder / "none")
    planner.set_up_planner({}, is_coordinator=True)
    plans, _ = planner.create_global_plan([pickle.loads(raw) for raw in posted])  # noqa: S301 - made above
    return [pickle.dumps(rank_plan) for rank_plan in writer.prepare_global_plan(plans)]


def _save_rankless(folder: Path) -> Path:
    state = {f"layers.{number}.weight": torch.zeros(8, 4) for number in range(TENSORS)}
    rankless.save_checkpoint(folder / "ours", "s", state, rng=False)
    return folder / "ours" / "s"


def _write_dcp_metadata(folder: Path, ranks: int) -> Path:
    """Return a directory with the metadata that rank 0 writes after all ranks have written their data."""
    folder.mkdir()
    planner, writer = DefaultSavePlanner(), FileSystemWriter(folder)
    planner.set_up_planner({}, is_coordinator=True)
    plans, metadata = planner.create_global_plan([_build_rank_plan(rank, ranks) for rank in range(ranks)])
    writer.set_up_storage_writer(is_coordinator=True)
    results = [
        [
            WriteResult(item.index, 32768, _StorageInfo(f"__{rank}_0.distcp", 33000 * number, 33000))
            for number, item in enumerate(rank_plan.items)
        ]
        for rank, rank_plan in enumerate(plans)
    ]
    writer.finish(metadata, results)
    return folder
