"""Tests that copies wait for work enqueued on an accelerator, and end before more is enqueued."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import holdfast
from holdfast.engine.comm.session import RankGroup
from holdfast.engine.io.device_streams import synchronize_devices
from holdfast.engine.io.staging import DeferredCopies
from holdfast.engine.io.staging_memory import Arena, StagingMemory
from holdfast.engine.io.tensor_bytes import TensorBytes
from holdfast.engine.plan.file_ranges import FileRange
from holdfast.engine.plan.load_plan import LoadPlan
from holdfast.engine.plan.save_plan import ReplicatedShard, SavePlan
from holdfast.formats.remapped_reader import identity_mapping
from holdfast.load.read_plan import ReadPlan
from holdfast.ondisk.files import TensorInfo
from holdfast.save.shard_writer import ShardWriter
from holdfast.state.tensors import TensorView


class Accelerator:
    """An accelerator whose kernels run when they are waited for, and no sooner. Its memory is the host's."""

    def __init__(self, kind: str | None = "cpu") -> None:
        self.kind, self.enqueued = kind, list[Callable[[], object]]()
        self.waited: list[torch.device] = []

    def current_accelerator(self) -> torch.device | None:
        return None if self.kind is None else torch.device(self.kind)

    def synchronize(self, device: torch.device, /) -> None:
        self.waited.append(device)
        while self.enqueued:
            self.enqueued.pop(0)()


def on(device: str) -> SimpleNamespace:
    return SimpleNamespace(device=torch.device(device))


def test_each_accelerator_that_holds_a_tensor_is_waited_for_once() -> None:
    accelerator = Accelerator("cuda")
    synchronize_devices([on("cuda:1"), on("cpu"), on("cuda:0"), on("cuda:1"), on("meta"), on("xla:0")], accelerator)
    assert accelerator.waited == [torch.device("cuda:1"), torch.device("cuda:0")]


@pytest.mark.parametrize("kind", [None, "cuda"])
def test_nothing_is_waited_for_where_all_is_in_memory(kind: str | None) -> None:
    accelerator = Accelerator(kind)
    synchronize_devices([on("cpu"), on("cpu")], accelerator)
    assert accelerator.waited == []


def test_torchs_own_accelerator_is_asked() -> None:
    synchronize_devices([torch.zeros(3)])
    holds = Accelerator.__dict__.keys() & {"current_accelerator", "synchronize"}
    assert all(callable(getattr(torch.accelerator, name)) for name in holds)


VALUES = torch.arange(1024.0)


def moving(accelerator: Accelerator) -> ShardWriter:
    """The save of a tensor whose last kernel has not run yet."""
    tensor = torch.zeros(1024)
    accelerator.enqueued.append(lambda: tensor.copy_(VALUES))
    plan = SavePlan(
        files=(),
        groups={},
        tensors=[("model", "w")],
        file_ranges=[FileRange(0, 0, 4096, 0, 0, 0)],
        stripe_tasks=(),
        replicas={(0, 1): [ReplicatedShard(0, 4096)]},
        needs_exchange=False,
    )
    ranks = RankGroup()
    return ShardWriter(ranks, ranks.open_session(10), plan, {("model", "w"): TensorBytes(tensor)}, accelerator)


def test_replicas_are_hashed_after_the_kernels_before_the_save() -> None:
    late, done = moving(Accelerator()), moving(ready := Accelerator())
    ready.synchronize(torch.device("cpu"))
    assert late.hash_replicas(0)[0] == done.hash_replicas(0)[0]


def staged(moving: ShardWriter, later: DeferredCopies) -> torch.Tensor:
    result = moving.stage(Arena(StagingMemory()), later)
    result.copy_deferred([("model", "w")])
    into = np.empty(4096, np.uint8)
    for piece in result.file_ranges:
        result.shard_of(piece.tensor).copy_out(piece.local, into[piece.start : piece.stop])
    return torch.from_numpy(into).view(torch.float32)


@pytest.mark.parametrize("later", [DeferredCopies(), DeferredCopies(frozenset({0}))], ids=["eager", "overlapped"])
def test_what_is_staged_comes_after_the_kernels_before_the_save(later: DeferredCopies) -> None:
    assert torch.equal(staged(moving(Accelerator()), later), VALUES)


def test_what_is_written_at_once_comes_after_the_kernels_before_the_save(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(4096))
    moving(Accelerator()).write(tmp_path, ["file"], None)
    assert torch.equal(torch.frombuffer(bytearray((tmp_path / "file").read_bytes()), dtype=torch.float32), VALUES)


def test_what_is_loaded_comes_after_the_kernels_before_and_before_those_after(tmp_path: Path) -> None:
    accelerator, seen = Accelerator(), list[torch.Tensor]()
    target = torch.zeros(1024)
    accelerator.enqueued.append(lambda: target.fill_(-1))

    def moved(nbytes: int) -> None:
        del nbytes
        accelerator.enqueued.append(lambda: seen.append(target.clone()))  # what a copy leaves behind

    (tmp_path / "file").write_bytes(VALUES.numpy().tobytes())
    key = ("model", "w")
    pieces = [FileRange(0, 0, 4096, 0, 0, 0)]
    mappings = identity_mapping({"w": TensorInfo("F32", (1024,))})
    reading = ReadPlan(LoadPlan(pieces), {key: 0}, {key: mappings["w"]}, [tmp_path / "file"], [], exchange=False)
    intake: Any = SimpleNamespace(targets={key: TensorView("F32", (1024,), None, target)}, aliased_targets=[])
    ranks = RankGroup()
    reading.run(intake, ranks, ranks.open_session(10), moved, accelerator=accelerator)
    assert torch.equal(target, VALUES)
    assert len(seen) == 1


def test_a_save_and_a_load_ask_no_accelerator_where_there_is_none(tmp_path: Path) -> None:
    holdfast.save_checkpoint(tmp_path, "s", {"w": VALUES}).wait()
    target = {"w": torch.zeros(1024)}
    holdfast.load_checkpoint(tmp_path, model=target)
    assert torch.equal(target["w"], VALUES)
