"""Conversion of a checkpoint between formats, against ``cp`` of the same bytes and the tools of other projects.

All start with cold caches, and end when their output is durable. Only rankless verifies: its input, if the format has
checksums, and, unless disabled, its output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp

import rankless
from benchmarks import raw
from benchmarks.measure import Contender, Table, time_interleaved
from benchmarks.peers import OURS
from benchmarks.process_timer import ProcessTimer, build_memory_table
from benchmarks.setting import Setting

#: A function that converts one path into another.
Convert = Callable[[Path, Path], object]

CP = "cp, durable"

#: The bytes of a tensor, unless it is the only one.
TENSOR = 128 * 10**6


def measure_conversion(setting: Setting) -> Iterator[Table]:
    """Measure each conversion with the peers that exist for it."""
    for folder, nbytes in ((setting.folder / "large", setting.nbytes), (setting.folder / "small", 10**5)):
        _save_sources(folder, nbytes)
    for (source, to), peers in _CONVERSIONS.items():
        ours = partial(rankless.convert, to=to)
        converts: dict[str, Convert] = {OURS: ours, f"{OURS}, verify=False": partial(ours, verify=False), **peers}
        yield from measure_against_cp(setting, f"conversion, {source} to {to}", source, converts)


def measure_against_cp(setting: Setting, what: str, source: str, converts: Mapping[str, Convert]) -> Iterator[Table]:
    """Measure what makes a path of another one beside ``cp``: the times, and the memory of the first ones.

    ``source`` is the name of a checkpoint in the folders ``large`` and ``small`` of the setting.
    """
    jobs = {name: _build_timer(setting.folder, source, convert) for name, convert in converts.items()}
    path, made = setting.folder / "large" / source, setting.folder / "made"
    contenders = {name: job.build_contender() for name, job in jobs.items()}
    contenders[CP] = Contender(partial(raw.copy_durably, path, made), partial(_prepare, path, made))
    way = f"{what}, {setting.gigabytes}"
    yield time_interleaved(contenders, setting.rounds).build_table(f"{way}, cold", (CP,))
    yield build_memory_table(f"memory of a {way}", jobs)
    raw.remove_path(made)


def _build_timer(folder: Path, source: str, convert: Convert) -> ProcessTimer:
    path, made = folder / "large" / source, folder / "made"
    warm = partial(_convert_small, convert, folder / "small" / source, folder / "tried")
    return ProcessTimer(partial(convert, path, made), warm, partial(_prepare, path, made))


def _convert_small(convert: Convert, source: Path, made: Path) -> None:
    """Convert a small checkpoint, so that all modules are imported."""
    raw.remove_path(made)
    convert(source, made)


def _prepare(source: Path, made: Path) -> None:
    raw.remove_path(made)
    raw.evict_from_cache(source)


def _save_sources(folder: Path, nbytes: int) -> None:
    """Save the same tensors in each format that can be converted."""
    number = max(1, nbytes // TENSOR)
    model = {f"w{n}": torch.rand(nbytes // number // 4 // 1000, 1000) for n in range(number)}
    dcp.save({"model": model}, checkpoint_id=folder / "dcp", no_dist=True)
    _save_lightning(folder / "lightning-folder", model)
    del model
    dcp_to_torch_save(folder / "dcp", folder / "torch")
    for to in ("hf", "native"):
        rankless.convert(folder / "dcp", folder / to, to=to, verify=False)


def _save_lightning(folder: Path, model: dict[str, torch.Tensor]) -> None:
    """Save as Lightning's FSDP strategy does, without a Lightning run: a sharded state, and a file of all else."""
    dcp.save({"model": model}, checkpoint_id=folder, no_dist=True)
    rest = {"epoch": 0, "global_step": 3, "pytorch-lightning_version": "2.6.6", "loops": {}, "lr_schedulers": []}
    torch.save(rest, folder / "meta.pt")


def _convert_dcp_to_torch(source: Path, made: Path) -> None:
    dcp_to_torch_save(source, made)
    raw.sync_tree(made)


def _convert_torch_to_dcp(source: Path, made: Path) -> None:
    torch_save_to_dcp(source, made)
    raw.sync_tree(made)


def _consolidate_lightning(source: Path, made: Path) -> None:
    """Do the work of ``python -m lightning.pytorch.utilities.consolidate_checkpoint``."""
    from lightning.fabric.utilities.load import _load_distributed_checkpoint  # noqa: PLC0415 - slow to import
    from lightning.pytorch.utilities.consolidate_checkpoint import _format_checkpoint  # noqa: PLC0415

    torch.save(_format_checkpoint(_load_distributed_checkpoint(source)), made)
    raw.sync_tree(made)


_CONVERSIONS: dict[tuple[str, str], dict[str, Convert]] = {
    ("dcp", "hf"): {},
    ("dcp", "torch"): {"dcp_to_torch_save": _convert_dcp_to_torch},
    ("dcp", "native"): {},
    ("hf", "dcp"): {},
    ("torch", "dcp"): {"torch_save_to_dcp": _convert_torch_to_dcp},
    ("native", "dcp"): {},
    ("lightning-folder", "lightning"): {"Lightning's consolidate_checkpoint": _consolidate_lightning},
}
