"""Tests the commands with ``--local``, after a job has left a checkpoint in the local tier of its hosts.

Ranks play hosts: each host has a folder of its own. The commands run without ranks, once for each host.
"""

from __future__ import annotations

import gc
import os
import shutil
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

import rankless
from rankless.cli.main import app
from rankless.run.cleanup import clean_up
from rankless.tier.host_folder import TierFolder
from rankless.tier.part import PartTable, encode_checked
from rankless.tier.parts_in_run import CollectedParts
from tests.helpers.commands import invoke, invoke_json
from tests.helpers.file_contents import read_state_files
from tests.helpers.killed_jobs import run_killed_job
from tests.helpers.pairwise import each_value, first_of
from tests.helpers.pool import Ranks
from tests.helpers.processes import ForkedProcess, run_command, start_code, start_command
from tests.helpers.tier_runs import continue_from, go_on
from tests.helpers.training import start_run, train_run

NEVER = 10**6


def save(base: str, ranks_per_host: int, steps: int = 3, copies: int = 0, **options: Any) -> None:
    run = train_run("fsdp", steps=steps)
    rank = dist.get_rank() if dist.is_initialized() else 0
    local = rankless.LocalTier(f"{base}/host{rank // ranks_per_host}", drain_every=NEVER, copies=copies)
    directory = rankless.RunDirectory(f"{base}/run", local=local)
    go_on(directory)
    tag = options.pop("tag", f"step_{steps}")
    directory.save(tag, run.model, run.optimizer, run.scheduler, {"n": steps}, step=steps, **options)


def die_in_second_save(base: Path) -> None:
    def die(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    torch.set_num_threads(1)  # as ranks of the pool do: the sums of several threads differ in the last bit
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    run = train_run("fsdp", steps=3)
    directory = rankless.RunDirectory(base / "run", local=rankless.LocalTier(base / "host0", drain_every=NEVER))
    directory.save("older", run.model, run.optimizer, run.scheduler, {"n": 3}, step=3)
    with mock.patch.object(TierFolder, "write_common", die):
        directory.save("newer", run.model)


def save_without_tier(base: str, steps: int = 3, tag: str = "") -> None:
    run = train_run("fsdp", steps=steps)
    tag = tag or f"step_{steps}"
    rankless.save_checkpoint(f"{base}/run", tag, run.model, run.optimizer, run.scheduler, {"n": steps}, step=steps)


def expected_files(ranks: Ranks, tmp_path: Path, size: int = 4) -> dict[str, Any]:
    """The files of an ordinary save of the same training."""
    ranks(size, save_without_tier, str(tmp_path / "ordinary"))
    return read_state_files(tmp_path / "ordinary/run/step_3")


def commands(base: Path, command: str, host: int = 0) -> list[str]:
    return [command, str(base / "run"), "--local", str(base / f"host{host}")]


def flip_bytes(base: Path, rank: int, host: int = 0) -> Path:
    folder = TierFolder.find(base / f"host{host}", base / "run")
    (name,) = [name for names in folder.list_parts().values() for name in names if name.rank == rank]
    path = folder.path / folder.read_part(name).data
    data = bytearray(path.read_bytes())
    data[100] ^= 4
    path.write_bytes(data)
    return path


class TestDrain:
    def test_a_host_with_all_parts_writes_the_bytes_of_an_ordinary_save(self, ranks: Ranks, tmp_path: Path) -> None:
        ranks(4, save, str(tmp_path), 4)
        assert "wrote" in invoke(*commands(tmp_path, "drain")).stdout
        assert read_state_files(tmp_path / "run/step_3") == expected_files(ranks, tmp_path)
        assert not (tmp_path / "run/.parts").exists()
        assert "already" in invoke(*commands(tmp_path, "drain")).stdout
        assert invoke_json("verify", tmp_path / "run")["ok"]

    @pytest.mark.parametrize("ranks_per_host", [1, 2])
    def test_the_last_of_several_hosts_writes_the_bytes_of_an_ordinary_save(
        self, ranks: Ranks, tmp_path: Path, ranks_per_host: int
    ) -> None:
        ranks(4, save, str(tmp_path), ranks_per_host)
        hosts = list(range(4 // ranks_per_host))
        for host in hosts[:-1]:
            for _ in range(2):  # a second call changes nothing
                report = invoke_json(*commands(tmp_path, "drain", host), code=3)
                assert report["status"] == "waiting"
                assert report["collected"] == list(range((host + 1) * ranks_per_host))
                assert report["missing"] == list(range((host + 1) * ranks_per_host, 4))
        assert invoke_json(*commands(tmp_path, "drain", hosts[-1]))["status"] == "published"
        assert read_state_files(tmp_path / "run/step_3") == expected_files(ranks, tmp_path)
        assert not (tmp_path / "run/.parts").exists()
        assert all(invoke_json(*commands(tmp_path, "drain", host))["status"] == "durable" for host in hosts)

    def test_copies_make_a_lost_host_unnecessary(self, ranks: Ranks, tmp_path: Path) -> None:
        ranks(4, save, str(tmp_path), 1, 3, 1)
        invoke(*commands(tmp_path, "drain", 0), code=3)
        invoke(*commands(tmp_path, "drain", 2))
        assert read_state_files(tmp_path / "run/step_3") == expected_files(ranks, tmp_path)

    def test_all_hosts_may_drain_at_once(self, ranks: Ranks, tmp_path: Path) -> None:
        ranks(4, save, str(tmp_path), 1, 3, 1)
        with ThreadPoolExecutor(4) as pool:
            done = list(pool.map(lambda host: run_command(*commands(tmp_path, "drain", host)), range(4)))
        assert {process.returncode for process in done} <= {0, 3}, [process.stderr for process in done]
        assert 0 in {process.returncode for process in done}
        assert read_state_files(tmp_path / "run/step_3") == expected_files(ranks, tmp_path)
        assert not (tmp_path / "run/.parts").exists()

    @first_of(1, "seconds", [0.2, 0.0, 0.8])
    def test_a_killed_drain_can_be_repeated(self, ranks: Ranks, tmp_path: Path, seconds: float) -> None:
        ranks(4, save, str(tmp_path), 2)
        invoke(*commands(tmp_path, "drain", 0), code=3)
        _kill_after_first_change(commands(tmp_path, "drain", 1), tmp_path / "run", seconds)
        shown = invoke_json(*commands(tmp_path, "drain", 1))
        assert shown["status"] in {"published", "durable"}
        assert read_state_files(tmp_path / "run/step_3") == expected_files(ranks, tmp_path)
        assert not (tmp_path / "run/.parts").exists()

    def test_a_corrupt_part_is_replaced_by_a_copy_in_the_run_directory(self, ranks: Ranks, tmp_path: Path) -> None:
        ranks(2, save, str(tmp_path), 1, 3, 1)
        corrupt = flip_bytes(tmp_path, 0, host=0)
        first = invoke(*commands(tmp_path, "drain", 0), code=3)
        assert str(corrupt) in first.stderr
        assert invoke_json(*commands(tmp_path, "drain", 1))["status"] == "published"
        assert read_state_files(tmp_path / "run/step_3") == expected_files(ranks, tmp_path, 2)

    def test_if_the_newest_checkpoint_was_not_completed_the_one_before_is_written(
        self, ranks: Ranks, tmp_path: Path
    ) -> None:
        with pytest.raises(EOFError):
            run_killed_job(die_in_second_save, tmp_path)
        assert invoke_json(*commands(tmp_path, "drain"))["status"] == "published"
        assert read_state_files(tmp_path / "run/older") == expected_files(ranks, tmp_path, 1)
        assert not (tmp_path / "run/newer").exists()

    def test_a_part_that_is_corrupt_in_the_run_directory_is_put_again(self, ranks: Ranks, tmp_path: Path) -> None:
        ranks(2, save, str(tmp_path), 1)
        invoke(*commands(tmp_path, "drain", 0), code=3)
        (data,) = (tmp_path / "run/.parts").glob("*.data")
        data.write_bytes(b"?" * data.stat().st_size)
        assert invoke_json(*commands(tmp_path, "drain", 1), code=3)["missing"] == [0]
        assert invoke_json(*commands(tmp_path, "drain", 0))["status"] == "published"
        assert read_state_files(tmp_path / "run/step_3") == expected_files(ranks, tmp_path, 2)

    def test_a_retired_or_superseded_checkpoint_is_not_written(self, ranks: Ranks, tmp_path: Path) -> None:
        ranks(2, save, str(tmp_path), 2)
        continue_from(tmp_path / "run", 0)
        assert invoke_json(*commands(tmp_path, "drain"))["status"] == "durable"
        assert not rankless.list_checkpoints(tmp_path / "run")
        for steps in (4, 5):
            ranks(2, save_without_tier, str(tmp_path), steps)
        assert invoke_json(*commands(tmp_path, "drain"))["status"] == "durable"

    def test_parts_stay_until_a_newer_checkpoint_is_durable(self, ranks: Ranks, tmp_path: Path) -> None:
        ranks(2, save_without_tier, str(tmp_path))
        ranks(2, save, str(tmp_path), 1, 4)
        invoke(*commands(tmp_path, "drain", 0), code=3)
        for _ in range(2):
            clean_up(tmp_path / "run")
            invoke("prune", tmp_path / "run", "--leftovers")
        assert list((tmp_path / "run/.parts").glob("*.part"))
        for steps in (6, 7, 8):
            ranks(2, save_without_tier, str(tmp_path), steps)
        clean_up(tmp_path / "run")
        assert not (tmp_path / "run/.parts").exists()

    def test_a_living_job_is_left_alone(self, tmp_path: Path) -> None:
        with _start_job(tmp_path):
            before = _all_files(tmp_path)
            done = run_command(*commands(tmp_path, "drain"))
            assert done.returncode == 1
            assert "is alive" in done.stderr
            assert invoke_json(*commands(tmp_path, "prune"))["generations"] == []
            assert "in use" in invoke(*commands(tmp_path, "ls")).stdout
            assert invoke_json(*commands(tmp_path, "verify"))["ok"]
            assert _all_files(tmp_path) == before
        assert invoke_json(*commands(tmp_path, "drain"))["tag"] == "b"
        assert torch.equal(rankless.open(tmp_path / "run")["model/w"], torch.ones(3000))

    def test_a_taken_tag_is_refused(self, tmp_path: Path) -> None:
        _end_job(tmp_path)
        shutil.copytree(tmp_path / "run", tmp_path / "other")
        rankless.save_checkpoint(tmp_path / "other", "b", {"w": torch.zeros(1)})
        (tmp_path / "other/b").rename(tmp_path / "run/b")
        assert "b" in invoke(*commands(tmp_path, "drain"), code=2).stderr
        assert torch.equal(rankless.open(tmp_path / "run")["model/w"], torch.zeros(1))


def _kill_after_first_change(command: list[str], run: Path, seconds: float) -> None:
    """Kill a command some time after it has changed the run directory."""
    before = _all_files(run)
    with start_command(*command) as process:
        while process.poll() is None and _all_files(run) == before:
            time.sleep(0.002)
        time.sleep(seconds / 10)


def _all_files(folder: Path) -> list[tuple[str, int]]:
    found = []
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                found.append((f"{root}/{name}", (Path(root) / name).stat().st_size))
            except FileNotFoundError:
                continue
    return sorted(found)


_JOB = """
import sys, time, torch, rankless
base = sys.argv[1]
directory = rankless.RunDirectory(f"{base}/run", local=rankless.LocalTier(f"{base}/host0", drain_every=9))
directory.save("a", {"w": torch.zeros(3000)}, step=1)
directory.save("b", {"w": torch.ones(3000)}, step=2)
print("saved", flush=True)
time.sleep(100)
"""


def _end_job(base: Path) -> None:
    directory = rankless.RunDirectory(f"{base}/run", local=rankless.LocalTier(f"{base}/host0", drain_every=9))
    directory.save("a", {"w": torch.zeros(3000)}, step=1)
    directory.save("b", {"w": torch.ones(3000)}, step=2)
    del directory
    gc.collect()  # as the end of the process: the lock is released


def _start_job(base: Path) -> ForkedProcess:
    job = start_code(_JOB, base)
    assert job.stdout.readline() == "saved\n"
    return job


class TestLoad:
    """A load finds what the commands have put into the run directory."""

    @pytest.mark.parametrize("uses_tier", [True, False])
    def test_all_parts_in_the_run_directory(self, ranks: Ranks, tmp_path: Path, uses_tier: bool) -> None:
        ranks(4, save, str(tmp_path), 2)
        invoke(*commands(tmp_path, "drain", 0), code=3)
        _collect_host(tmp_path, 1)  # as a process that is killed before it writes the checkpoint
        for host in (0, 1):
            shutil.rmtree(tmp_path / f"host{host}")
        assert ranks(3, load, str(tmp_path), 1 if uses_tier else 0) == ["step_3"] * 3
        assert read_state_files(tmp_path / "run/step_3") == expected_files(ranks, tmp_path)
        assert not (tmp_path / "run/.parts").exists()

    @pytest.mark.parametrize("lost", [0, 1])
    def test_some_parts_in_the_run_directory_and_the_others_in_memory(
        self, ranks: Ranks, tmp_path: Path, lost: int
    ) -> None:
        ranks(2, save_without_tier, str(tmp_path), 2)
        ranks(4, save, str(tmp_path), 2)
        invoke(*commands(tmp_path, "drain", lost), code=3)
        shutil.rmtree(tmp_path / f"host{lost}")
        assert ranks(4, load, str(tmp_path), 2) == ["step_3"] * 4
        assert read_state_files(tmp_path / "run/step_3") == expected_files(ranks, tmp_path)
        assert not (tmp_path / "run/.parts").exists()

    def test_parts_that_stay_incomplete_lead_back_to_the_run_directory(self, ranks: Ranks, tmp_path: Path) -> None:
        ranks(2, save_without_tier, str(tmp_path), 2)
        ranks(4, save, str(tmp_path), 2)
        invoke(*commands(tmp_path, "drain", 0), code=3)
        shutil.rmtree(tmp_path / "host1")
        assert ranks(4, load, str(tmp_path), 2) == ["step_2"] * 4
        assert not (tmp_path / "run/.parts").exists()  # retired


def _collect_host(base: Path, host: int) -> None:
    folder = TierFolder.find(base / f"host{host}", base / "run")
    (key,) = folder.list_parts()
    CollectedParts.of(base / "run").put_host_parts(folder, key, range(4))


def load(base: str, ranks_per_host: int) -> str:
    run = start_run("fsdp", seed=9)
    rank = dist.get_rank()
    local = f"{base}/host{rank // ranks_per_host}" if ranks_per_host else None
    directory = rankless.RunDirectory(f"{base}/run", local=local)
    tag = directory.restore(None, run.model, run.optimizer, run.scheduler).tag
    directory.finalize()
    return tag


class TestLs:
    def test_names_the_parts_on_this_host(self, ranks: Ranks, tmp_path: Path) -> None:
        ranks(4, save, str(tmp_path), 2)
        shown = invoke(*commands(tmp_path, "ls", 1)).stdout
        (row,) = [line for line in shown.splitlines() if line.startswith("step_3")]
        assert "2-3 of 4" in row
        assert row.endswith("in the tier only")
        invoke(*commands(tmp_path, "drain", 0), code=3)
        (generation,) = invoke_json(*commands(tmp_path, "ls", 1))["local"]["generations"]
        assert (generation["here"], generation["collected"], generation["missing"]) == ([2, 3], [0, 1], [])
        assert (generation["tag"], generation["step"], generation["parts"]) == ("step_3", 3, 4)
        assert (generation["complete"], generation["durable"], generation["retired"]) == (True, False, False)

    def test_shows_what_is_in_both_and_what_is_retired(self, ranks: Ranks, tmp_path: Path) -> None:
        ranks(2, save, str(tmp_path), 2)
        invoke(*commands(tmp_path, "drain"))
        (generation,) = invoke_json(*commands(tmp_path, "ls"))["local"]["generations"]
        assert generation["durable"]
        info = rankless.list_checkpoints(tmp_path / "run")[0]
        assert abs(info.nbytes - generation["bytes"]) < 10_000
        assert "in both" in invoke(*commands(tmp_path, "ls")).stdout
        shutil.rmtree(tmp_path / "run/step_3")
        continue_from(tmp_path / "run", 0)
        assert "retired" in invoke(*commands(tmp_path, "ls")).stdout


class TestShow:
    @pytest.mark.parametrize("host", [0, 1])
    def test_shows_what_the_checkpoint_will_have_without_all_parts(
        self, ranks: Ranks, tmp_path: Path, host: int
    ) -> None:
        ranks(4, save, str(tmp_path), 2)
        shown = invoke_json(*commands(tmp_path, "show", host))
        ranks(4, save_without_tier, str(tmp_path / "ordinary"))
        expected = invoke_json("show", tmp_path / "ordinary/run")
        for key in ("tensors", "tied", "modules", "values", "tag", "step", "world_size"):
            assert shown[key] == expected[key]
        assert "parts on this host: " in shown["notes"][0]

    def test_shows_tensors_that_are_larger_than_the_first_file(self, tmp_path: Path) -> None:
        local = rankless.LocalTier(tmp_path / "host0", drain_every=NEVER)
        model = {"small": torch.zeros(2)}
        directory = rankless.RunDirectory(tmp_path / "run", local=local)
        directory.save("a", model, user_content=torch.zeros(10_000)).wait()
        shown = invoke_json(*commands(tmp_path, "show"))
        assert shown["bytes"] > 40_000

    def test_a_tag_that_is_not_there_is_refused(self, tmp_path: Path) -> None:
        _end_job(tmp_path)
        assert "it has b" in invoke(*commands(tmp_path, "show"), "--tag", "c", code=2).stderr


class TestVerify:
    def test_names_the_corrupt_tensor_and_the_bytes(self, ranks: Ranks, tmp_path: Path) -> None:
        ranks(2, save, str(tmp_path), 2)
        assert invoke_json(*commands(tmp_path, "verify"))["ok"]
        corrupt = flip_bytes(tmp_path, 1)
        report = invoke_json(*commands(tmp_path, "verify"), code=1)
        (problem,) = report["checkpoints"][0]["problems"]
        assert str(corrupt) in problem
        assert "the part of rank 1" in problem
        names = {tensor["name"] for tensor in invoke_json(*commands(tmp_path, "show"))["tensors"]}
        assert problem.split()[1] in names

    def test_says_that_parts_of_other_hosts_were_not_read(self, ranks: Ranks, tmp_path: Path) -> None:
        ranks(4, save, str(tmp_path), 2)
        (result,) = invoke_json(*commands(tmp_path, "verify", 1))["checkpoints"]
        assert "2-3 of 4" in result["notes"][0]


class TestPrune:
    def test_the_newest_undrained_checkpoint_stays_unless_told(self, ranks: Ranks, tmp_path: Path) -> None:
        ranks(2, save, str(tmp_path), 2)
        before = _all_files(tmp_path)
        assert invoke_json(*commands(tmp_path, "prune"))["kept"] == ["step_3"]
        dry = invoke_json(*commands(tmp_path, "prune"), "--undrained", "--dry-run")
        assert dry["generations"] == ["step_3"]
        assert _all_files(tmp_path) == before
        assert invoke_json(*commands(tmp_path, "prune"), "--undrained")["bytes"] == dry["bytes"] > 0
        assert {path.name for path in (tmp_path / "host0").iterdir()} == {"tier.json", "owner"}

    def test_what_is_durable_or_retired_is_removed_with_its_memory(self, ranks: Ranks, tmp_path: Path) -> None:
        ranks(2, save, str(tmp_path), 2)
        invoke(*commands(tmp_path, "drain"))
        assert invoke_json(*commands(tmp_path, "prune"))["generations"] == ["step_3"]
        assert {path.name for path in (tmp_path / "host0").iterdir()} == {"tier.json", "owner"}
        assert invoke_json("verify", tmp_path / "run")["ok"]

    def test_options_for_the_run_directory_are_refused(self, tmp_path: Path) -> None:
        _end_job(tmp_path)
        invoke(*commands(tmp_path, "prune"), "--keep", "1", code=2)
        invoke("prune", tmp_path / "run", "--undrained", code=2)


def run_here(*command: str) -> Any:
    """Run a command in this process, whatever its exit code."""
    result = CliRunner().invoke(app, list(command))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


ALL = ["ls", "show", "verify", "prune", "drain"]


class TestHostileFolders:
    @pytest.mark.parametrize("command", ALL)
    def test_a_folder_of_another_run_is_refused(self, tmp_path: Path, command: str) -> None:
        _end_job(tmp_path)
        (tmp_path / "other").mkdir()
        done = run_here(command, str(tmp_path / "other"), "--local", str(tmp_path / "host0"))
        assert done.exit_code == 2
        assert "is the local tier of" in done.stderr

    @pytest.mark.parametrize("command", ALL)
    def test_a_folder_that_others_may_enter_is_refused(self, tmp_path: Path, command: str) -> None:
        _end_job(tmp_path)
        (tmp_path / "host0").chmod(0o755)
        done = run_here(*commands(tmp_path, command))
        assert done.exit_code == 1
        assert "only this user may enter" in done.stderr

    @pytest.mark.parametrize("command", ALL)
    @pytest.mark.parametrize("is_there", [True, False])
    def test_a_folder_that_is_no_tier_is_refused_and_not_created(
        self, tmp_path: Path, command: str, is_there: bool
    ) -> None:
        (tmp_path / "run").mkdir()
        if is_there:
            (tmp_path / "host0").mkdir(mode=0o700)
        done = run_here(*commands(tmp_path, command))
        assert done.exit_code == 2
        assert "Traceback" not in done.output
        assert list(tmp_path.rglob("*/*")) == []

    @each_value(
        {
            "command": ALL,
            "suffix": [".part", ".common", ".data"],
            "kind": ["empty", "random", "cut", "fifo", "link", "folder"],
        }
    )
    def test_a_broken_file_gives_no_traceback(self, tmp_path: Path, command: str, suffix: str, kind: str) -> None:
        _end_job(tmp_path)
        (path,) = [path for path in (tmp_path / "host0").glob(f"*{suffix}") if "-00.data" not in path.name]
        _break_file(path, kind)
        done = run_here(*commands(tmp_path, command))
        assert "Traceback" not in done.output
        assert done.exit_code in {0, 1, 2, 3}
        assert rankless.list_checkpoints(tmp_path / "run") == []
        if command in {"ls", "verify"} and suffix != ".data":
            assert done.exit_code == 1
        if command == "verify":
            assert done.exit_code == 1
        if command == "drain":
            assert done.exit_code == 3
            assert path.name in done.stderr

    @each_value({"command": ALL, "tag": ["../outside", "/outside", ".hidden"]})
    def test_a_forged_tag_is_refused(self, tmp_path: Path, command: str, tag: str) -> None:
        _end_job(tmp_path)
        folder = TierFolder.find(tmp_path / "host0", tmp_path / "run")
        (key,) = folder.list_parts()
        common = folder.read_common(key)
        assert common is not None
        manifest = {**_as_dict(common.label.manifest), "tag": tag}
        forged = {"label": {**_as_dict(common.label), "manifest": manifest}, "groups": common.groups}
        raw = encode_checked({**forged, "small_files": common.small_files})
        (tmp_path / "host0" / f"{key.name}.common").write_bytes(raw)
        done = run_here(*commands(tmp_path, command))
        assert "Traceback" not in done.output
        assert not (tmp_path / "outside").exists()
        assert {path.name for path in (tmp_path / "run").iterdir()} <= {".history", ".parts"}

    @each_value({"command": ALL, "column": ["tensor", "file", "offset", "stop"]})
    def test_forged_ranges_are_refused(self, tmp_path: Path, command: str, column: str) -> None:
        _end_job(tmp_path)
        folder = TierFolder.find(tmp_path / "host0", tmp_path / "run")
        ((name,),) = folder.list_parts().values()
        table = folder.read_part(name)
        getattr(table.rows, column)[:] = 2**31
        folder.write_part(PartTable(name, table.data, 2**32 if column == "stop" else table.nbytes, table.rows))
        done = run_here(*commands(tmp_path, command))
        assert "Traceback" not in done.output
        assert rankless.list_checkpoints(tmp_path / "run") == []
        if command in {"ls", "verify"}:
            assert done.exit_code == 1


def _as_dict(struct: Any) -> dict[str, Any]:
    fields = ((field, getattr(struct, field)) for field in struct.__struct_fields__)
    return {field: value for field, value in fields if value is not msgspec.UNSET}


def _break_file(path: Path, kind: str) -> None:
    data = path.read_bytes()
    path.unlink()
    if kind == "empty":
        path.touch()
    elif kind == "random":
        path.write_bytes(os.urandom(len(data)))
    elif kind == "cut":
        path.write_bytes(data[: len(data) // 2])
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "link":
        (path.parent.parent / "target").write_bytes(data)
        path.symlink_to(path.parent.parent / "target")
    else:
        path.mkdir()
