"""Tests that a save into an object store has the store copy unchanged files, and has the bytes of a full save."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import rankless
from rankless.errors import StorageError, TornSnapshotError
from rankless.save import copied_files
from rankless.storage.http.connection import HttpResponse
from rankless.storage.object_path import ObjectPath
from tests.helpers.fake_azure import FakeAzure
from tests.helpers.fake_http import FakeStore
from tests.helpers.fake_s3 import AWS, BUCKET, GOOGLE, FakeS3, failure
from tests.helpers.file_contents import read_state_files
from tests.helpers.pairwise import each_value
from tests.helpers.pool import Ranks
from tests.helpers.simulated_hosts import simulated_host
from tests.helpers.small_parts import small_parts

#: Small parts, so that small files have several, with bytes of several ranks.
PART = 4096

#: So many bytes of tensors are in one file: each of the model's has one of its own.
LIMIT = 20_000

FROZEN = ("a", "b", "c")


class Adapted(nn.Module):
    """Three frozen parameters and a trained one, over the ranks in rows."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),)) if dist.is_initialized() else None
        for name in (*FROZEN, "trained"):
            whole = torch.rand(64, 65, generator=generator)
            value = whole if mesh is None else distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
            setattr(self, name, nn.Parameter(value, requires_grad=name == "trained"))

    def train_step(self) -> None:
        with torch.no_grad():
            self.trained.add_(1.0)


class Saves:
    """Saves of one model into a run in a store, and in full into a folder."""

    def __init__(self, run: Path, full: Path, **options: Any) -> None:
        self.model = Adapted()
        options = {"max_shard_size": LIMIT, "frozen": "apart", **options}
        self._run = rankless.RunDirectory(run, **options)
        self._full = rankless.RunDirectory(full, max_shard_size=LIMIT, frozen="apart", incremental=False)

    def save(self, tag: str) -> None:
        self.model.train_step()
        with small_parts(PART), mock.patch.object(copied_files, "MIN_COPY_BYTES", 0):
            self.start(tag)
            self.wait()
        self._full.save(tag, self.model)

    def start(self, tag: str) -> None:
        self._run.save(tag, self.model)

    def wait(self) -> None:
        self._run.finalize()


@pytest.fixture(params=["aws", "google", "azure"])
def fake(request: pytest.FixtureRequest) -> Iterator[FakeStore]:
    with (
        mock.patch("tests.helpers.fake_s3.MIN_PART", 1),
        mock.patch("rankless.storage.azure.azure_store._COPY_POLL_SECONDS", 0.0),
    ):
        yield FakeAzure() if request.param == "azure" else FakeS3({"aws": AWS, "google": GOOGLE}[request.param])


@pytest.fixture
def run(fake: FakeStore) -> Iterator[ObjectPath]:
    with fake.served() as url:
        yield fake.store_at(url).path(f"{BUCKET}/run")


def files_of(fake: FakeStore, tag: str) -> dict[str, bytes]:
    """The tensor files of a checkpoint in the store, by their paths in it."""
    keys = {key: key.partition(f"run/{tag}.")[2].partition("/")[2] for key in fake.objects}
    return {name: fake.objects[key].data for key, name in keys.items() if name.endswith(".safetensors")}


def check(fake: FakeStore, full: Path, tag: str) -> None:
    """Check that the checkpoint in the store has the files of the full one, but for its states of the run."""
    expected = {name: data for name, data in read_state_files(full / tag).items() if name.startswith("model/")}
    files = files_of(fake, tag)
    assert {name: data for name, data in files.items() if name in expected} == {
        name: data for name, data in expected.items() if name.endswith(".safetensors")
    }


def save_thrice(run: ObjectPath, full: Path, local: Path | None, hosts: int, options: dict[str, Any]) -> list[int]:
    """Save three times. Return the bytes that each save has not sent."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    host, shared = str(rank % hosts), list[int]()
    board = full.parent / f"board {host}"
    board.mkdir(exist_ok=True)
    tier = None if local is None else rankless.LocalTier(local / host, drain_every=1)
    with simulated_host(host, str(board)) if hosts > 1 else nullcontext():
        saves = Saves(
            run, full, local=tier, on_event=lambda event: shared.append(getattr(event, "shared_nbytes", 0)), **options
        )
        for number in range(3):
            saves.save(f"s{number}")
    return shared


@each_value(
    {
        "layout": [(4, 2), (1, 1), (3, 1)],
        "options": [{}, {"async_save": True}, {"async_save": True, "staging": "overlapped"}],
        "has_tier": [False, True],
    }
)
def test_the_store_copies_the_files_of_frozen_parameters(
    ranks: Ranks,
    fake: FakeStore,
    run: ObjectPath,
    tmp_path: Path,
    layout: tuple[int, int],
    options: dict[str, Any],
    has_tier: bool,
) -> None:
    full, (count, hosts) = tmp_path / "full", layout
    ranks(count, save_thrice, run, full, tmp_path / "tier" if has_tier else None, hosts, options)
    copies = [request for request in fake.requests if request.method == "PUT" and request.copies]
    assert len(copies) == 2 * len(FROZEN)  # in each save but the first
    for number in range(3):
        check(fake, full, f"s{number}")
        state, expected = ({name: torch.zeros(64, 65) for name in (*FROZEN, "trained")} for _ in range(2))
        rankless.load_checkpoint(run, f"s{number}", state)
        rankless.load_checkpoint(full, f"s{number}", expected)
        assert all(map(torch.equal, state.values(), expected.values()))


@pytest.mark.parametrize("has_versions", [True, False])
def test_a_frozen_parameter_that_changes_is_sent(
    fake: FakeStore, run: ObjectPath, tmp_path: Path, has_versions: bool
) -> None:
    saves = Saves(run, tmp_path / "full")
    saves.save("s0")
    with torch.no_grad():
        # torch does not count changes through .data: only the hash shows them.
        (saves.model.b if has_versions else saves.model.b.data).mul_(2.0)
    saves.save("s1")
    check(fake, tmp_path / "full", "s1")
    assert sum(request.copies for request in fake.requests) == len(FROZEN) - 1


def test_a_change_during_an_overlapped_save_fails_it(fake: FakeStore, run: ObjectPath, tmp_path: Path) -> None:
    saves = Saves(run, tmp_path / "full", async_save=True, staging="overlapped")
    saves.save("s0")
    saves.model.b.data.mul_(2.0)
    with pytest.raises(TornSnapshotError, match="'b' is frozen, but changed"):
        saves.save("s1")
    saves.save("s2")
    check(fake, tmp_path / "full", "s2")
    assert not any(key.startswith("run/s1.") for key in fake.objects)


def test_what_was_removed_or_replaced_is_sent(fake: FakeStore, run: ObjectPath, tmp_path: Path) -> None:
    saves = Saves(run, tmp_path / "full")
    saves.save("s0")
    (first, second, *_) = sorted(key for key in fake.objects if key.startswith("run/s0.") and "model" in key)
    del fake.objects[first]
    run.store.replace_small(run.parent / second, b"others")
    saves.save("s1")
    check(fake, tmp_path / "full", "s1")
    saves.save("s2")
    check(fake, tmp_path / "full", "s2")


def test_a_store_that_copies_nothing_gets_all_bytes(fake: FakeStore, run: ObjectPath, tmp_path: Path) -> None:
    if isinstance(fake, FakeS3):
        fake.profile = replace(fake.profile, copies=False)
    elif isinstance(fake, FakeAzure):
        fake.copies = False
    saves = Saves(run, tmp_path / "full")
    saves.save("s0")
    with pytest.warns(UserWarning, match="From now on, this process sends also the files that have not changed"):
        saves.save("s1")
    saves.save("s2")
    for tag in ("s0", "s1", "s2"):
        check(fake, tmp_path / "full", tag)
    assert sum(request.copies for request in fake.requests) == 1  # it is not asked again


def copies_of(fake: FakeStore) -> int:
    return sum(request.copies for request in fake.requests)


def refuse_copies(fake: FakeStore, first: int, answer: HttpResponse) -> None:
    """Answer so to requests for copies from this one on, counted from 0."""
    copies = -1

    def on_request(request: Any, stage: str) -> HttpResponse | None:
        nonlocal copies
        copies += stage == "before" and request.copies
        return answer if request.copies and copies >= first else None

    fake.on_request = on_request


def answer_of(fake: FakeStore, status: int, code: str) -> HttpResponse:
    return fake.failure(status, code) if isinstance(fake, FakeAzure) else failure(status, code)


def test_a_refused_copy_fails_the_save_and_later_ones_send_all(
    fake: FakeStore, run: ObjectPath, tmp_path: Path
) -> None:
    saves = Saves(run, tmp_path / "full")
    saves.save("s0")
    refuse_copies(fake, 1, answer_of(fake, 403, "AccessDenied"))
    with pytest.raises(StorageError, match="does not copy"):
        saves.save("s1")
    assert not any(key.startswith("run/s1.") for key in fake.objects)
    assert not fake.uploads
    known = copies_of(fake)
    for tag in ("s1", "s2", "s3"):
        saves.save(tag)
        check(fake, tmp_path / "full", tag)
    assert copies_of(fake) == known


def test_an_error_that_may_pass_does_not_end_the_copies(fake: FakeStore, run: ObjectPath, tmp_path: Path) -> None:
    saves = Saves(run, tmp_path / "full")
    saves.save("s0")
    refuse_copies(fake, 0, answer_of(fake, 503, "ServerBusy" if isinstance(fake, FakeAzure) else "SlowDown"))
    saves.save("s1")
    check(fake, tmp_path / "full", "s1")
    fake.on_request = lambda request, stage: None  # noqa: ARG005
    known = copies_of(fake)
    saves.save("s2")
    check(fake, tmp_path / "full", "s2")
    assert copies_of(fake) - known == len(FROZEN)


def test_the_call_waits_for_no_copy_but_the_first_one(fake: FakeStore, run: ObjectPath, tmp_path: Path) -> None:
    saves = Saves(run, tmp_path / "full", async_save=True)
    saves.save("s0")
    saves.save("s1")
    go_on, is_waited_for = threading.Event(), []

    def wait(request: Any, stage: str) -> None:
        if request.copies and stage == "before":
            is_waited_for.append(not go_on.wait(20))

    fake.on_request = wait
    with small_parts(PART), mock.patch.object(copied_files, "MIN_COPY_BYTES", 0):
        saves.start("s2")
        go_on.set()
        saves.wait()
    assert is_waited_for == [False] * len(FROZEN)


@pytest.mark.parametrize("fake", ["aws", "google"], indirect=True)  # the others tell no checksum of a copy
def test_a_copy_with_other_bytes_fails_the_save(fake: FakeS3, run: ObjectPath, tmp_path: Path) -> None:
    saves = Saves(run, tmp_path / "full")
    saves.save("s0")
    saves.save("s1")

    def spoil(request: Any, stage: str) -> None:
        if request.copies and stage == "after":
            stored = fake.objects[request.key]
            fake.objects[request.key] = replace(stored, data=b"x" + stored.data[1:])

    fake.on_request = spoil
    if fake.profile is AWS:  # it tells the CRC of what it copies
        key = next(
            key for key in fake.objects if key.startswith("run/s1.") and key.endswith("00002-of-00004.safetensors")
        )
        fake.objects[key] = replace(fake.objects[key], data=b"x" + fake.objects[key].data[1:])
        fake.on_request = lambda request, stage: None  # noqa: ARG005
    with pytest.raises(StorageError, match="has other bytes than"):
        saves.save("s2")
    fake.on_request = lambda request, stage: None  # noqa: ARG005
    saves.save("s2")
    check(fake, tmp_path / "full", "s2")


def save_stages(run: ObjectPath, full: Path) -> None:
    """Save twice on two ranks, of which one has the frozen parameters, as a stage of a pipeline."""
    model = nn.ParameterDict(
        {f"{dist.get_rank()}{name}": nn.Parameter(torch.ones(64, 65), requires_grad=False) for name in FROZEN}
    )
    for parameter in model.parameters():
        parameter.requires_grad_(dist.get_rank() == 0)
    directory, whole = rankless.RunDirectory(run, frozen="apart"), rankless.RunDirectory(full, frozen="apart")
    with small_parts(PART), mock.patch.object(copied_files, "MIN_COPY_BYTES", 0):
        for tag in ("s0", "s1"):
            with torch.no_grad():
                for parameter in (one for one in model.parameters() if one.requires_grad):
                    parameter.add_(1.0)
            directory.save(tag, model)
            whole.save(tag, model)


def test_ranks_without_frozen_parameters_do_not_forbid_copies(
    ranks: Ranks, fake: FakeStore, run: ObjectPath, tmp_path: Path
) -> None:
    ranks(2, save_stages, run, tmp_path / "full")
    check(fake, tmp_path / "full", "s1")
    assert copies_of(fake) == 1
