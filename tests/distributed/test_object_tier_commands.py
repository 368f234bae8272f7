"""Tests the commands with ``--local`` of runs in an object store, after a job has left a checkpoint in its tier.

Ranks play hosts: each host has a folder of its own. The commands run without ranks, once for each host.
"""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

import rankless
from rankless.errors import StorageError
from rankless.run.cleanup import clean_up
from rankless.storage.http.connection import HttpResponse
from rankless.tier.host_folder import TierFolder
from rankless.tier.parts_in_run import CollectedParts
from tests.helpers.commands import invoke, invoke_json
from tests.helpers.fake_http import BUCKET
from tests.helpers.fake_s3 import FakeS3, failure
from tests.helpers.file_contents import read_state_files
from tests.helpers.pairwise import first_of
from tests.helpers.pool import Ranks
from tests.helpers.processes import run_command
from tests.helpers.small_parts import small_parts
from tests.helpers.tier_runs import continue_from
from tests.helpers.training import start_run, train_run

RUN = f"s3://{BUCKET}/run"
NEVER = 10**6


@pytest.fixture
def fake() -> Iterator[FakeS3]:
    """A store that URLs mean, in this process and in those that it starts."""
    store = FakeS3()
    with mock.patch("tests.helpers.fake_s3.MIN_PART", 1), store.served() as url:
        settings = {"AWS_ENDPOINT_URL": url, "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
        with mock.patch.dict(os.environ, settings):
            yield store


def connect(endpoint: str) -> None:
    os.environ.update({"AWS_ENDPOINT_URL": endpoint, "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"})


def save(endpoint: str, base: Path, ranks_per_host: int, steps: int = 3, copies: int = 0) -> None:
    connect(endpoint)
    state = train_run("fsdp", steps=steps)
    local = rankless.LocalTier(base / f"host{dist.get_rank() // ranks_per_host}", drain_every=NEVER, copies=copies)
    with small_parts(512):
        directory = rankless.RunDirectory(RUN, local=local)
        directory.save(f"step_{steps}", state.model, state.optimizer, state.scheduler, {"n": steps}, step=steps)


def save_without_tier(path: str) -> None:
    state = train_run("fsdp", steps=3)
    rankless.save_checkpoint(path, "step_3", state.model, state.optimizer, state.scheduler, {"n": 3}, step=3)


def load(endpoint: str, base: Path, ranks_per_host: int) -> tuple[str, str]:
    connect(endpoint)
    state, rank = start_run("fsdp", seed=9), dist.get_rank()
    local = base / f"host{rank // ranks_per_host}" if ranks_per_host else None
    directory = rankless.RunDirectory(RUN, local=local)
    result = directory.restore(None, state.model, state.optimizer, state.scheduler)
    directory.finalize()
    return result.tag, result.source


def commands(base: Path, command: str, host: int = 0) -> list[str]:
    return [command, RUN, "--local", str(base / f"host{host}")]


def assert_published(ranks: Ranks, fake: FakeS3, tmp_path: Path) -> None:
    """The run has the files of an ordinary save, and nothing else but epochs."""
    ranks(4, save_without_tier, str(tmp_path / "ordinary"))
    for key, stored in fake.objects.items():
        if key.startswith("run/step_3."):
            file = tmp_path / "objects" / key.split("/", 2)[2]
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(stored.data)
    assert read_state_files(tmp_path / "objects") == read_state_files(tmp_path / "ordinary/step_3")
    assert invoke_json("verify", RUN)["ok"]
    assert_nothing_is_left(fake)


def assert_nothing_is_left(fake: FakeS3) -> None:
    prefixes = {key.split("/")[1] for key in fake.objects}
    assert ".parts" not in prefixes
    assert len([name for name in prefixes if not name.startswith(".")]) == 1
    assert not fake.uploads


def endpoint() -> str:
    return os.environ["AWS_ENDPOINT_URL"]


class TestDrain:
    def test_a_host_with_all_parts_writes_the_bytes_of_an_ordinary_save(
        self, ranks: Ranks, fake: FakeS3, tmp_path: Path
    ) -> None:
        ranks(4, save, endpoint(), tmp_path, 4)
        assert "wrote" in invoke(*commands(tmp_path, "drain")).stdout
        assert_published(ranks, fake, tmp_path)
        assert "already" in invoke(*commands(tmp_path, "drain")).stdout

    @first_of(1, "ranks_per_host", [1, 2])
    def test_the_last_of_several_hosts_writes_the_bytes_of_an_ordinary_save(
        self, ranks: Ranks, fake: FakeS3, tmp_path: Path, ranks_per_host: int
    ) -> None:
        ranks(4, save, endpoint(), tmp_path, ranks_per_host)
        hosts = list(range(4 // ranks_per_host))
        for host in hosts[:-1]:
            for _ in range(2):  # a second call changes nothing
                report = invoke_json(*commands(tmp_path, "drain", host), code=3)
                assert report["status"] == "waiting"
                assert report["collected"] == list(range((host + 1) * ranks_per_host))
                assert report["missing"] == list(range((host + 1) * ranks_per_host, 4))
        assert invoke_json(*commands(tmp_path, "drain", hosts[-1]))["status"] == "published"
        assert_published(ranks, fake, tmp_path)
        assert all(invoke_json(*commands(tmp_path, "drain", host))["status"] == "durable" for host in hosts)

    def test_all_hosts_may_drain_at_once(self, ranks: Ranks, fake: FakeS3, tmp_path: Path) -> None:
        ranks(4, save, endpoint(), tmp_path, 1, 3, 1)
        with ThreadPoolExecutor(4) as pool:
            done = list(pool.map(lambda host: run_command(*commands(tmp_path, "drain", host)), range(4)))
        assert {process.returncode for process in done} <= {0, 3}, [process.stderr for process in done]
        assert 0 in {process.returncode for process in done}
        clean_up_parts(tmp_path)
        assert_published(ranks, fake, tmp_path)

    def test_a_part_that_is_corrupt_in_the_store_is_put_again(self, ranks: Ranks, fake: FakeS3, tmp_path: Path) -> None:
        ranks(4, save, endpoint(), tmp_path, 2)
        invoke(*commands(tmp_path, "drain", 0), code=3)
        key = next(key for key in fake.objects if key.startswith("run/.parts/") and key.endswith(".data"))
        fake.objects[key].data = b"?" * len(fake.objects[key].data)
        assert len(invoke_json(*commands(tmp_path, "drain", 1), code=3)["missing"]) == 1
        assert invoke_json(*commands(tmp_path, "drain", 0))["status"] == "published"
        assert_published(ranks, fake, tmp_path)

    @pytest.mark.parametrize(
        "number", [pytest.param(n, marks=() if n in {6, 18} else pytest.mark.full) for n in range(0, 30, 3)]
    )
    def test_a_drain_that_dies_at_any_request_can_be_repeated(
        self, ranks: Ranks, fake: FakeS3, tmp_path: Path, number: int
    ) -> None:
        ranks(4, save, endpoint(), tmp_path, 2)
        invoke(*commands(tmp_path, "drain", 0), code=3)
        fake.on_request = DenyFrom(number)
        with mock.patch("rankless.save.drain_attempts.ATTEMPTS", 1), suppress(StorageError):
            rankless.drain(RUN, tmp_path / "host1")
        fake.on_request = lambda *_: None
        assert invoke_json(*commands(tmp_path, "drain", 1))["status"] in {"published", "durable"}
        age_uploads(fake)
        clean_up(rankless.S3(endpoint()).path(f"{BUCKET}/run"))
        assert_published(ranks, fake, tmp_path)

    def test_a_retired_checkpoint_is_not_written(self, ranks: Ranks, fake: FakeS3, tmp_path: Path) -> None:
        ranks(2, save, endpoint(), tmp_path, 1)
        invoke(*commands(tmp_path, "drain", 0), code=3)
        continue_from(rankless.S3(endpoint()).path(f"{BUCKET}/run"), 0)
        assert invoke_json(*commands(tmp_path, "drain", 1))["status"] == "durable"
        assert rankless.list_checkpoints(RUN) == []
        assert not [key for key in fake.objects if "/.parts/" in key]


class DenyFrom:
    """The store answers all requests that change something with an error from one on."""

    def __init__(self, number: int) -> None:
        self.number, self.count = number, itertools.count()

    def __call__(self, request: Any, stage: str) -> HttpResponse | None:
        if stage == "after" or request.method in {"GET", "HEAD"} or next(self.count) < self.number:
            return None
        return failure(403, "AccessDenied")


def age_uploads(fake: FakeS3) -> None:
    """Let what was left in the store be some days old."""
    pointed = {key for key in fake.objects if key.startswith(("run/.tags/", "run/.epochs/"))}
    for stored in [*fake.uploads.values(), *(stored for key, stored in fake.objects.items() if key not in pointed)]:
        stored.time -= 3 * 86400


def clean_up_parts(base: Path) -> None:
    """Of hosts that drain at once, one may put a part just after another one has removed them."""
    invoke(*commands(base, "drain"))


class TestLoad:
    @pytest.mark.parametrize("ranks_per_host", [0, 1])
    def test_all_parts_in_the_store(self, ranks: Ranks, fake: FakeS3, tmp_path: Path, ranks_per_host: int) -> None:
        ranks(4, save, endpoint(), tmp_path, 2)
        for host in (0, 1):
            collect_host(tmp_path, host)  # as a process that is killed before it writes the checkpoint
            shutil.rmtree(tmp_path / f"host{host}")
        assert ranks(3, load, endpoint(), tmp_path, ranks_per_host) == [("step_3", "run directory")] * 3
        if ranks_per_host:
            assert_published(ranks, fake, tmp_path)

    @pytest.mark.parametrize("lost", [0, 1])
    def test_some_parts_in_the_store_and_the_others_in_memory(
        self, ranks: Ranks, fake: FakeS3, tmp_path: Path, lost: int
    ) -> None:
        ranks(4, save, endpoint(), tmp_path, 2)
        invoke(*commands(tmp_path, "drain", lost), code=3)
        shutil.rmtree(tmp_path / f"host{lost}")
        assert ranks(4, load, endpoint(), tmp_path, 2) == [("step_3", "run directory")] * 4
        assert_published(ranks, fake, tmp_path)


def collect_host(base: Path, host: int) -> None:
    run = rankless.S3(endpoint()).path(f"{BUCKET}/run")
    folder = TierFolder.find(base / f"host{host}", run)
    (key,) = folder.list_parts()
    CollectedParts.of(run).put_host_parts(folder, key, range(4))


class TestOtherCommands:
    def test_they_show_what_a_host_has(self, ranks: Ranks, fake: FakeS3, tmp_path: Path) -> None:
        ranks(4, save, endpoint(), tmp_path, 2)
        invoke(*commands(tmp_path, "drain", 0), code=3)
        (generation,) = invoke_json(*commands(tmp_path, "ls", 1))["local"]["generations"]
        assert (generation["here"], generation["collected"], generation["missing"]) == ([2, 3], [0, 1], [])
        assert (generation["tag"], generation["complete"], generation["durable"]) == ("step_3", True, False)
        assert "step_3" in invoke(*commands(tmp_path, "ls", 1)).stdout
        assert invoke_json(*commands(tmp_path, "show", 1))["tag"] == "step_3"
        assert invoke_json(*commands(tmp_path, "verify", 1))["ok"]
        assert invoke_json(*commands(tmp_path, "prune", 1))["kept"] == ["step_3"]
        invoke(*commands(tmp_path, "drain", 1))
        (generation,) = invoke_json(*commands(tmp_path, "ls", 1))["local"]["generations"]
        assert generation["durable"]
        assert invoke_json(*commands(tmp_path, "prune", 1))["generations"] == ["step_3"]
