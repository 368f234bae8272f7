"""Resharding of NxD's ZeRO-1 states to another number of ranks, against ``cp`` of the same bytes; and its memory.

Both end with durable output. The input is in the page cache for both, as far as it fits.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch

from benchmarks import raw
from benchmarks.conversion import CP
from benchmarks.measure import Contender, Table, time_interleaved
from benchmarks.peers import OURS
from benchmarks.process_timer import ProcessTimer, build_memory_table
from benchmarks.setting import Setting
from rankless.conversion.torch_names_hash import names_hash
from rankless.engine.io.tensor_sources import SourceChunk, StridedLocation, row_major_strides
from rankless.engine.plan.element_ranges import IndexBox
from rankless.formats.chunked_tensor_slices import JoinedTensor
from rankless.nxd.offline_zero_conversion import ZeroRequest, convert_zero_checkpoints
from rankless.nxd.reader import zero_states
from rankless.nxd.writer.rank_file_plan import plan_rank_files
from rankless.nxd.writer.torch_files import write_torch_files
from rankless.ondisk.data_files import TensorInfo

#: Rows and columns of each parameter, which has two states and a master weight of 4 bytes an element.
ROWS, COLUMNS = 8190, 4096

RANKS = f"{OURS}, 2 to 3 ranks"


def measure_nxd(setting: Setting) -> Iterator[Table]:
    """Measure with one file per tensor, and with one per rank."""
    for kind, xser in (("a file for each tensor", True), ("a file for each rank", False)):
        create_source(setting.folder / "source", setting.nbytes, xser=xser)
        yield from _measure_conversion(setting, f"NxD's ZeRO-1 states, {kind}, {setting.gigabytes}")
        raw.empty_directory(setting.folder)


def _measure_conversion(setting: Setting, source_kind: str) -> Iterator[Table]:
    source, made = setting.folder / "source", setting.folder / "made"
    clear = partial(_prepare, made)
    job = ProcessTimer(partial(convert_zero_checkpoints, ZeroRequest(source, made, 3)), _do_nothing, clear)
    contenders = {RANKS: job.build_contender(), CP: Contender(partial(raw.copy_durably, source, made), clear)}
    yield time_interleaved(contenders, setting.rounds).build_table(
        f"conversion of {source_kind}, from the page cache", (CP,)
    )
    yield build_memory_table(f"memory of that conversion of {source_kind}", {RANKS: job})


def create_source(folder: Path, nbytes: int, *, xser: bool) -> None:
    """Create a checkpoint of 2 data-parallel ranks, with AdamW states and master weights."""
    number = max(1, round(nbytes / (3 * 4 * ROWS * COLUMNS)))
    data = folder.with_name("elements")
    data.write_bytes(torch.randn(ROWS, COLUMNS).numpy().tobytes())
    whole, step = _build_tensor(data, (ROWS, COLUMNS)), _build_tensor(data, ())
    root = {
        "state": {},
        "param_groups": [{"lr": 0.1, "params": list(range(number))}],
        zero_states.BASE: {
            pid: {"step": step, "exp_avg": _copy_reference(whole), "exp_avg_sq": _copy_reference(whole)}
            for pid in range(number)
        },
        zero_states.SHAPES: {pid: [ROWS, COLUMNS] for pid in range(number)},
        zero_states.MASTERS: {pid: _copy_reference(whole) for pid in range(number)},
    }
    for rank, part in enumerate(zero_states.shard_zero_state(root, 2, folder)):
        name = f"optim/dp_rank_{rank:02}_tp_rank_00_pp_rank_00.pt"
        folder.mkdir(exist_ok=True)
        write_torch_files(folder, plan_rank_files(name, part, names_hash, xser=xser))
    data.unlink()


def _build_tensor(file: Path, shape: tuple[int, ...]) -> JoinedTensor:
    place = StridedLocation(file, 0, row_major_strides(shape, 4))
    return JoinedTensor(
        TensorInfo("F32", shape), (SourceChunk(IndexBox((0,) * len(shape), shape), lambda: place, (file, 0)),)
    )


def _copy_reference(tensor: JoinedTensor) -> JoinedTensor:
    return JoinedTensor(tensor.info, tensor.chunks)


def _prepare(made: Path) -> None:
    raw.remove_path(made)
    os.sync()


def _do_nothing() -> None:
    """Do nothing: all modules are imported already."""
