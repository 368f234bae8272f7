"""Single files, conversions and DCP's checkpoints at a real server, written by ranks and compared with those on a disk.

Ranks save a model, an optimizer and a scheduler as files and as folders, then others in their place; they save twice by
DCP's calls, and one of them converts a checkpoint. A reader without rankless downloads what is there: each file must
have the bytes that one process writes to a disk, and PyTorch must load the checkpoint of DCP. A save that fails,
because the proxy has cut its connections for too long, is repeated: it must not report success.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import rankless
import rankless.dcp
from campaigns.common.job import Job, Rank
from campaigns.common.state import ViolationError
from campaigns.objects import oracle
from rankless.errors import CorruptCheckpointError, RankFailedError, StorageError, TagExistsError
from rankless.storage.object_path import ObjectPath
from tests.helpers.small_parts import small_parts
from tests.helpers.training import Run, gather_run, train_run

#: The numbers of ranks of the jobs, one after the other.
_SIZES = (1, 2, 3)

#: Bytes: of small parts, so that small files have several, and of the tensors in a file of a folder.
_PART, _SHARD = 1024, 1

#: The steps of the training whose state is written last.
_STEPS = 3

#: The seconds after which a job counts as hanging, and how often a failed save is repeated.
_HANGING, _TRIES = 240.0, 10


@dataclass
class OutputResult:
    """What was compared how often, and what was violated."""

    events: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)


def check_outputs(path: ObjectPath, direct: oracle.Run, scratch: Path, in_small_parts: bool) -> OutputResult:
    """Write with each number of ranks, and compare. ``direct`` is the same folder without a proxy."""
    result = OutputResult()
    torch.set_num_threads(1)  # as in the ranks: sums of two threads differ in their last bits
    with tempfile.TemporaryDirectory(dir=scratch) as name:
        folder = Path(name)
        _write_expected(folder)
        for size in _SIZES:
            with Job(size, "agent", folder, write_outputs, path, folder, in_small_parts) as job:
                if not job.wait_until(lambda job=job: job.have_ended(), _HANGING):  # type: ignore[misc]
                    result.violations.append(f"{size} ranks that write into {path} hang")
                    continue
                failed = [end.message for end in job.outcomes.values() if end.error]
                result.violations += [f"{size} ranks that write into {path}: {message}" for message in failed[:1]]
                result.events["repeated after an error"] += sum(end.result or 0 for end in job.outcomes.values())
            if not failed:
                _compare(direct, folder, result)
    return result


def _write_expected(folder: Path) -> None:
    """Write to the disk what the objects must be, and the checkpoint that is converted."""
    run = _train("plain", _STEPS)
    rankless.save_checkpoint(folder / "run", "s", run.model)
    _save_files(run, folder / "disk", Counter())
    rankless.convert(folder / "run", folder / "disk/hf", to="hf")


def _train(layout: str, steps: int) -> Run:
    return train_run(layout, "adamw", steps=steps)


def write_outputs(_rank: Rank, path: ObjectPath, folder: Path, in_small_parts: bool) -> int:
    """Write everything as one rank. Return how often a call was repeated."""
    failures: Counter[str] = Counter()
    with small_parts(_PART) if in_small_parts else nullcontext():
        for steps in (1, _STEPS):  # the second one replaces the first
            _save_files(_train("fsdp", steps), path, failures)
            _repeat(failures, _save_by_dcp, path / "dcp", steps)
    _repeat(failures, _convert, folder / "run", path / "hf")
    loaded, run = _train("fsdp", 0), _train("fsdp", _STEPS)
    _repeat(failures, rankless.load_model, loaded.model, path / "model.safetensors")
    _repeat(failures, rankless.load_optimizer, loaded.optimizer, path / "optimizer", model=loaded.model)
    found, expected = gather_run(loaded), gather_run(run)
    wrong = [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)]
    if wrong:
        raise ViolationError(f"the tensors {wrong} of {path} were loaded with other values")
    return failures.total()


def _save_files(run: Run, path: Path, failures: Counter[str]) -> None:
    model, optimizer, whole = run.model, run.optimizer, {"model": run.model}
    for name in ("model.safetensors", "model.pt"):
        _repeat(failures, rankless.save_model, model, path / name)
    shards = {"shard": True, "max_shard_size": _SHARD}
    _repeat(failures, rankless.save_model, model, path / "folder", use_safetensors=False, **shards)
    _repeat(failures, rankless.save_optimizer, optimizer, path / "optimizer", shard=True, **whole)
    _repeat(failures, rankless.save_optimizer, optimizer, path / "optimizer.pt", **whole)
    _repeat(failures, rankless.save_lr_scheduler, run.scheduler, path / "scheduler.pt")


def _save_by_dcp(path: Path, steps: int) -> None:
    state = {"model": _train("fsdp", steps).model.state_dict()}
    dcp.save(state, storage_writer=rankless.dcp.FileSystemWriter(path))


def _convert(source: Path, path: Path) -> None:
    with suppress(TagExistsError):  # an earlier try has written it, and its reply was lost, or another job has
        rankless.convert(source, path, to="hf")


def _repeat(failures: Counter[str], function: Callable[..., object], *args: Any, **options: Any) -> None:
    """Call a function again if it fails, as all ranks do. Mistakes of the library are raised at once."""
    for _ in range(_TRIES):
        try:
            function(*args, **options)
        except (StorageError, RankFailedError, CorruptCheckpointError, CheckpointException) as error:
            failures[str(error)] += 1
        else:
            return
    function(*args, **options)


def _compare(direct: oracle.Run, folder: Path, result: OutputResult) -> None:
    """Download all objects, and compare them with the files of the disk, and with PyTorch's load."""
    names = set(direct.list_names())
    expected = {str(file.relative_to(folder / "disk")) for file in (folder / "disk").rglob("*") if file.is_file()}
    of_dcp = {name for name in names if name.startswith("dcp/")}
    if names - of_dcp != expected:
        result.violations.append(f"{direct.path} has {sorted(names - of_dcp)}, not {sorted(expected)}")
    for name in expected & names:
        result.events["files compared"] += 1
        if direct.read(name) != (folder / "disk" / name).read_bytes():
            result.violations.append(f"{direct.path}/{name} has other bytes than the file on a disk")
    with tempfile.TemporaryDirectory(dir=folder) as copy:
        for name in of_dcp:
            file = Path(copy) / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(direct.read(name))
        _compare_dcp(Path(copy) / "dcp", result)


def _compare_dcp(copy: Path, result: OutputResult) -> None:
    run = _train("plain", _STEPS)
    loaded = {"model": {name: torch.zeros_like(tensor) for name, tensor in run.model.state_dict().items()}}
    dcp.load(loaded, checkpoint_id=str(copy), no_dist=True)
    result.events["checkpoints of DCP compared"] += 1
    for name, tensor in run.model.state_dict().items():
        if not torch.equal(loaded["model"][name], tensor):
            result.violations.append(f"PyTorch loads {name!r} of {copy.name} with other values")
