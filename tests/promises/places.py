"""The places: what saves a state that is one value, where it appears, and what reads it."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import rankless
from rankless import nxd
from rankless.colossalai import Booster
from rankless.dcp import FileSystemReader, FileSystemWriter
from rankless.run.records_folder import FOLDER
from rankless.storage.object_path import ObjectPath
from tests.helpers.fake_s3 import BUCKET, FakeS3, store_at
from tests.helpers.pool import Ranks
from tests.helpers.simulated_hosts import simulated_host

#: A process of another job is forked: it has all modules then, and knows nothing of what this process has saved.
FORK = multiprocessing.get_context("fork")

Result = TypeVar("Result")

#: The ways to save, and the places that have them.
PLAIN, ON_RANKS = "synchronous", "four ranks on two hosts"
_RUNS = frozenset({"folder", "folder and tier", "store", "store and tier"})
WAYS = {PLAIN: _RUNS, "eager": _RUNS, "overlapped": _RUNS, ON_RANKS: _RUNS}

#: By their number, the ranks in the order of their mesh, if that is not their own.
MESHES = {3: [1, 0, 2]}

#: The options of a save in a way.
OPTIONS: dict[str, dict[str, Any]] = {
    PLAIN: {},
    "eager": {"async_save": True, "staging": "eager"},
    "overlapped": {"async_save": True, "staging": "overlapped"},
}


class Place(Protocol):
    """Where outputs appear under names, and what writes and reads them."""

    def save(self, tag: str, value: float, *, overwrite: bool = False) -> None:
        """Save a state that is this value. It is durable when this returns."""

    def load(self, tag: str) -> float:
        """Return the value that was saved under a name, after every element was compared with it."""

    def locate(self, tag: str) -> Path:
        """Return the path of an output."""


AnyPlace = TypeVar("AnyPlace", bound=Place)


def weights_of(value: float) -> torch.Tensor:
    return torch.arange(300.0) + value


def state_of(value: float) -> dict[str, torch.Tensor]:
    """Return a state that is one value. Several ranks have shards of it."""
    if count_ranks() == 1:
        return {"w": weights_of(value)}
    mesh = DeviceMesh("cpu", MESHES.get(count_ranks(), list(range(count_ranks()))))
    return {"w": distribute_tensor(weights_of(value), mesh, [Shard(0)])}


def count_ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def value_of(state: dict[str, torch.Tensor]) -> float:
    """Return the value of a state, after every element that this rank has was compared with it."""
    weights, zero = local_part(state["w"]), local_part(state_of(0.0)["w"])
    value = float(weights[0] - zero[0])
    assert torch.equal(weights, zero + value), "a mixture of states"
    return value


def local_part(weights: torch.Tensor) -> torch.Tensor:
    return weights.to_local() if isinstance(weights, DTensor) else weights


@dataclass
class Run:
    """Checkpoints of a run directory, of one job, with a tier if ``local`` is set."""

    path: Path
    local: Path | None = None
    way: str = PLAIN
    ranks: Ranks | None = None
    _directory: rankless.RunDirectory | None = None

    def save(self, tag: str, value: float, *, overwrite: bool = False) -> None:
        if self.ranks is not None:
            for outcome in self.ranks.outcomes(4, _save_on_rank, self.path, self.local, tag, value, overwrite):
                if isinstance(outcome, BaseException):
                    raise outcome
            return
        self._start(tag, value, overwrite=overwrite, **OPTIONS[self.way]).finalize()

    def start_saving(self, tag: str, value: float) -> None:
        """Begin a save in the background."""
        self._start(tag, value, async_save=True)

    def _start(self, tag: str, value: float, **options: Any) -> rankless.RunDirectory:
        if self._directory is None:
            self._directory = rankless.RunDirectory(self.path, local=tier_of(self.local))
        self._directory.save(tag, state_of(value), step=value, **options)
        return self._directory

    def load(self, tag: str) -> float:
        state = state_of(-1.0)
        rankless.load_model(state, self.path / tag if not isinstance(self.path, ObjectPath) else self.locate(tag))
        return value_of(state)

    def locate(self, tag: str) -> Path:
        if isinstance(self.path, ObjectPath):
            found = [info.path for info in rankless.list_checkpoints(self.path) if info.tag == tag]
            return found[0] if found else self.path / tag
        return self.path / tag


def tier_of(local: Path | None) -> rankless.LocalTier | None:
    return None if local is None else rankless.LocalTier(local, drain_every=1)


def _save_on_rank(path: Path, local: Path | None, tag: str, value: float, overwrite: bool) -> None:
    """Save on one of four ranks, on the first or the second host."""
    host = dist.get_rank() // 2
    board = Path(tempfile.gettempdir()) / f"promises-{os.getuid()}-{host}"
    board.mkdir(exist_ok=True)
    with simulated_host(str(host), str(board)):
        directory = rankless.RunDirectory(path, local=tier_of(local and local / str(host)))
        state = state_of(value)
        if rankless.has_checkpoint(path):
            directory.restore(None, state_of(-1.0), resume=True)
        directory.save(tag, state, overwrite=overwrite, step=value)
        directory.finalize()


@dataclass
class Drain:
    """A job saves into its tier and is killed; a later one drains what it has left, when it loads."""

    path: Path
    local: Path
    offline: bool = False

    def save(self, tag: str, value: float, *, overwrite: bool = False) -> None:
        if count_ranks() == 1:
            in_killed_job(self.save_into_tier, tag, value, overwrite=overwrite)
        else:
            self.save_into_tier(tag, value, overwrite=overwrite)
        self.drain()

    def save_into_tier(self, tag: str, value: float, *, overwrite: bool = False) -> None:
        """Save as the job does that is killed then."""
        directory = rankless.RunDirectory(self.path, local=rankless.LocalTier(self.local, drain_every=10**6))
        if rankless.has_checkpoint(self.path):
            directory.restore(None, state_of(-1.0), resume=True)
        directory.save(tag, state_of(value), overwrite=overwrite, step=value)

    def drain(self) -> None:
        """Drain what the job has left."""
        if self.offline:
            rankless.drain(self.path, self.local)
        else:
            directory = rankless.RunDirectory(self.path, local=rankless.LocalTier(self.local))
            directory.restore(None, state_of(-1.0), resume=True)
            directory.wait()

    def load(self, tag: str) -> float:
        state = state_of(-1.0)
        rankless.load_model(state, self.path / tag)
        return value_of(state)

    def locate(self, tag: str) -> Path:
        return self.path / tag


@dataclass
class Component:
    """The files of one model in a folder, or in one file."""

    path: Path
    shard: bool = True

    def save(self, tag: str, value: float, *, overwrite: bool = False) -> None:
        del overwrite
        rankless.save_model(state_of(value), self.locate(tag), shard=self.shard)

    def start_saving(self, tag: str, value: float) -> None:
        """Begin a save in the background."""
        rankless.save_model(state_of(value), self.locate(tag), shard=self.shard, async_save=True)

    def load(self, tag: str) -> float:
        state = state_of(-1.0)
        rankless.load_model(state, self.locate(tag))
        return value_of(state)

    def locate(self, tag: str) -> Path:
        return self.path / (tag if self.shard else f"{tag}.safetensors")


#: The publishers by their processes and directories.
_publishers: dict[tuple[int, Path], rankless.WeightPublisher] = {}


@dataclass
class PublishedWeights:
    """The newest version of published weights: an anchor, then deltas. Each process has a publisher of its own."""

    path: Path

    def save(self, tag: str, value: float, *, overwrite: bool = False) -> None:
        del overwrite
        state = state_of(value)
        publisher = self._publisher_of(tag)
        publisher.publish(state, step=value)
        publisher.wait()

    def start_saving(self, tag: str, value: float) -> None:
        """Begin a publication in the background."""
        self._publisher_of(tag).publish(state_of(value), step=value)

    def _publisher_of(self, tag: str) -> rankless.WeightPublisher:
        directory = self.locate(tag)
        return _publishers.setdefault((os.getpid(), directory), rankless.WeightPublisher(directory))

    def load(self, tag: str) -> float:
        state = state_of(-1.0)
        rankless.load_model(state, self.locate(tag))
        return value_of(state)

    def locate(self, tag: str) -> Path:
        return self.path / tag


@dataclass
class Distributed:
    """A checkpoint of ``torch.distributed.checkpoint``, by our writer."""

    path: Path

    def save(self, tag: str, value: float, *, overwrite: bool = False) -> None:
        writer = FileSystemWriter(self.locate(tag), overwrite=overwrite)
        with _as_torch_was_called():
            dcp.save(state_of(value), storage_writer=writer, no_dist=count_ranks() == 1)

    def load(self, tag: str) -> float:
        state = state_of(-1.0)
        with _as_torch_was_called():
            dcp.load(state, storage_reader=FileSystemReader(self.locate(tag)), no_dist=count_ranks() == 1)
        return value_of(state)

    def locate(self, tag: str) -> Path:
        return self.path / tag


@contextmanager
def _as_torch_was_called() -> Iterator[None]:
    """Raise the error of the rank instead of what torch makes of the errors of all ranks."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is")
        try:
            yield
        except dcp.api.CheckpointException as failure:
            error, _ = failure.failures[0]
            raise error from failure


@dataclass
class Conversion:
    """A checkpoint that is converted into another format, or edited, at a new path."""

    path: Path
    scratch: Path
    is_edit: bool = False

    def save(self, tag: str, value: float, *, overwrite: bool = False) -> None:
        del overwrite
        source = self.scratch / (f"source of {os.getpid()}" if count_ranks() == 1 else "source of several ranks")
        rankless.RunDirectory(source).save("one", state_of(value), overwrite=True)
        if self.is_edit:  # the mean of a state and itself is the state, and is computed
            mean = {"verb": "average", "paths": [str(source / "one")]}
            rankless.edit(source / "one", self.locate(tag), [mean], to="hf")
        else:
            rankless.convert(source / "one", self.locate(tag), to="hf")

    def load(self, tag: str) -> float:
        state = state_of(-1.0)
        rankless.load_model(state, self.locate(tag))
        return value_of(state)

    def locate(self, tag: str) -> Path:
        return self.path / tag


class Weights(torch.nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(weights_of(value))


@dataclass
class FabricFile:
    """A checkpoint by our strategies of Lightning's Fabric, which replace what is at a path."""

    path: Path
    checkpoint_format: str = "native"

    def _strategy(self) -> Any:
        from rankless.lightning.fabric import SingleDeviceStrategy

        return SingleDeviceStrategy(torch.device("cpu"), checkpoint_format=self.checkpoint_format)

    def save(self, tag: str, value: float, *, overwrite: bool = False) -> None:
        del overwrite
        strategy = self._strategy()
        strategy.save_checkpoint(self.locate(tag), {"model": Weights(value)})

    def load(self, tag: str) -> float:
        model = Weights(-1.0)
        self._strategy().load_checkpoint(self.locate(tag), {"model": model})
        return value_of({"w": model.w.detach()})

    def locate(self, tag: str) -> Path:
        return self.path / f"{tag}.ckpt"


@dataclass
class NxDCheckpoint:
    """A checkpoint by the calls of NxD, which replace what has the tag."""

    path: Path

    def save(self, tag: str, value: float, *, overwrite: bool = False) -> None:
        del overwrite
        nxd.save_checkpoint(self.path, tag, state_of(value))

    def load(self, tag: str) -> float:
        state = state_of(-1.0)
        nxd.load_checkpoint(self.path, tag, state)
        return value_of(state)

    def locate(self, tag: str) -> Path:
        return self.path / tag


@dataclass
class BoosterFolder:
    """A model by ColossalAI's ``Booster``."""

    path: Path

    def save(self, tag: str, value: float, *, overwrite: bool = False) -> None:
        del overwrite
        Booster().save_model(Weights(value), self.locate(tag), shard=True, use_safetensors=True)

    def load(self, tag: str) -> float:
        model = Weights(-1.0)
        Booster().load_model(model, self.locate(tag))
        return value_of({"w": model.w.detach()})

    def locate(self, tag: str) -> Path:
        return self.path / tag


@dataclass
class AcceleratorFolder:
    """A checkpoint by our ``Accelerator``, which replaces what is at a path."""

    path: Path

    def save(self, tag: str, value: float, *, overwrite: bool = False) -> None:
        del overwrite
        accelerator, _ = self._prepare(value)
        accelerator.save_state(str(self.locate(tag)))

    def load(self, tag: str) -> float:
        accelerator, model = self._prepare(-1.0)
        accelerator.load_state(str(self.locate(tag)))
        return value_of({"w": model.w.detach()})

    def _prepare(self, value: float) -> tuple[Any, Any]:
        from rankless.accelerate import Accelerator

        accelerator = Accelerator(cpu=True)
        return accelerator, accelerator.prepare(Weights(value))

    def locate(self, tag: str) -> Path:
        return self.path / tag


@dataclass
class TrainerFolder:
    """A checkpoint by our ``Trainer`` of transformers, whose names are steps, and which replaces them."""

    path: Path

    def save(self, tag: str, value: float, *, overwrite: bool = False) -> None:
        del overwrite
        from transformers import TrainingArguments

        from rankless.transformers import Trainer

        arguments = TrainingArguments(str(self.path), use_cpu=True, report_to=[], disable_tqdm=True)
        trainer = Trainer(model=Weights(value), args=arguments)
        trainer.create_optimizer_and_scheduler(1)
        trainer.state.global_step = self._step(tag)
        trainer._save_checkpoint(trainer.model, None)

    def load(self, tag: str) -> float:
        model = Weights(-1.0)
        rankless.load_model(model, self.locate(tag))
        return value_of({"w": model.w.detach()})

    def _step(self, tag: str) -> int:
        return zlib.crc32(tag.encode())

    def locate(self, tag: str) -> Path:
        return self.path / f"checkpoint-{self._step(tag)}"


Opened = Callable[[Path], "Iterator[Place]"]

#: The servers of the buckets by their URLs.
_buckets: dict[str, FakeS3] = {}


def bucket_of(place: Place) -> FakeS3 | None:
    """Return the server of the bucket of a place; ``None`` of a folder."""
    path = place.locate("one")
    return _buckets[path.store.endpoint] if isinstance(path, ObjectPath) else None  # type: ignore[attr-defined]


def _here(make: Callable[[Path], Place]) -> Opened:
    def open_place(tmp_path: Path) -> Iterator[Place]:
        yield make(tmp_path)

    return open_place


def _in_store(make: Callable[[Path, Path], Place]) -> Opened:
    def open_place(tmp_path: Path) -> Iterator[Place]:
        bucket = FakeS3()
        with bucket.served() as url:
            _buckets[url] = bucket
            yield make(store_at(url).path(f"{BUCKET}/run"), tmp_path)
            del _buckets[url]

    return open_place


#: All places by name.
PLACES: dict[str, Opened] = {
    "folder": _here(lambda tmp: Run(tmp / "run")),
    "folder and tier": _here(lambda tmp: Run(tmp / "run", tmp / "tier")),
    "store": _in_store(lambda run, _: Run(run)),
    "store and tier": _in_store(lambda run, tmp: Run(run, tmp / "tier")),
    "drain of an earlier job": _here(lambda tmp: Drain(tmp / "run", tmp / "tier")),
    "`rankless drain`": _here(lambda tmp: Drain(tmp / "run", tmp / "tier", offline=True)),
    "component in a folder": _here(lambda tmp: Component(tmp / "run")),
    "component in a file": _here(lambda tmp: Component(tmp / "run", shard=False)),
    "component in a store": _in_store(lambda run, _: Component(run)),
    "published weights": _here(PublishedWeights),
    "published weights in a store": _in_store(lambda run, _: PublishedWeights(run)),
    "DCP in a folder": _here(lambda tmp: Distributed(tmp / "run")),
    "DCP in a store": _in_store(lambda run, _: Distributed(run)),
    "Lightning": _here(lambda tmp: FabricFile(tmp / "run")),
    "Lightning's format": _here(lambda tmp: FabricFile(tmp / "run", "lightning")),
    "Trainer": _here(lambda tmp: TrainerFolder(tmp / "run")),
    "Accelerate": _here(lambda tmp: AcceleratorFolder(tmp / "run")),
    "NxD": _here(lambda tmp: NxDCheckpoint(tmp / "run")),
    "ColossalAI": _here(lambda tmp: BoosterFolder(tmp / "run")),
    "conversion into a folder": _here(lambda tmp: Conversion(tmp / "run", tmp)),
    "conversion into a store": _in_store(Conversion),
    "edit into a folder": _here(lambda tmp: Conversion(tmp / "run", tmp, is_edit=True)),
    "edit into a store": _in_store(lambda run, tmp: Conversion(run, tmp, is_edit=True)),
}

#: The places that only write new paths.
NEW_ONLY = ("conversion into a folder", "conversion into a store", "edit into a folder", "edit into a store")


#: The places whose packages take seconds to import: by day only one module of promises has them.
SLOW = frozenset({"Trainer", "Accelerate"})


@contextmanager
def open_place(name: str, tmp_path: Path) -> Iterator[Place]:
    """Open a place by its name."""
    yield from PLACES[name](tmp_path)


def count_bytes(place: Place) -> int:
    """Return the bytes at and below the parent of all outputs, in whatever form, without the history of the run.

    Each job adds an entry to it, which stays.
    """
    parent = place.locate("one").parent
    if isinstance(parent, ObjectPath):
        return sum(info.size for info in parent.store.list_objects(parent) if info.path.parent.name != FOLDER)
    files = (file for file in parent.rglob("*") if file.is_file() and file.parent.name != FOLDER)
    return sum(file.stat().st_size for file in files)


def in_new_job(place: AnyPlace) -> AnyPlace:
    """Return the place as another job sees it: it has saved and loaded nothing."""
    if isinstance(place, Run):
        return replace(place, _directory=None, ranks=None)
    return copy(place)


def save_in_another_job(place: Place, tag: str, value: float, *, overwrite: bool = False) -> None:
    """Save by a job that begins and ends now. Of a run it is another process, which resumes the run."""
    if isinstance(place, Run):
        in_killed_job(_resume_and_save, in_new_job(place), tag, value, overwrite)
    else:
        place.save(tag, value, overwrite=overwrite)


def _resume_and_save(place: Run, tag: str, value: float, overwrite: bool) -> None:
    directory = rankless.RunDirectory(place.path, local=tier_of(place.local))
    with suppress(rankless.NoCheckpointError):
        directory.restore(None, state_of(-1.0), resume=True)
    replace(place, _directory=directory).save(tag, value, overwrite=overwrite)


def in_killed_job(function: Callable[..., Result], *arguments: Any, **options: Any) -> Result:
    """Call a function in a process that is gone right after it. Returns what it returns, and raises its error."""
    ours, theirs = FORK.Pipe(duplex=False)
    process = FORK.Process(target=_call_and_die, args=(theirs, partial(function, *arguments, **options)))
    process.start()
    theirs.close()
    error: BaseException | None
    try:
        result, error = ours.recv()
    except EOFError:
        error = RuntimeError("the process has ended without a word")
    process.join()
    if error is not None:
        raise error
    return result


def _call_and_die(reply: Connection, function: Callable[[], object]) -> None:
    result: object = None
    error: BaseException | None = None
    try:
        result = function()
    except BaseException as raised:  # noqa: BLE001 - the other process raises it
        error = raised
    reply.send((result, error))
    os._exit(0)
