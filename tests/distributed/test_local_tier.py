"""Tests the local tier: a job that ends without a drain leaves a checkpoint in it, which any other job loads.

Ranks play hosts: each host has a folder of its own for the tier.
"""

import itertools
import os
import shutil
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import rankless
from rankless.engine.io.checkpoint_files import CheckpointFiles
from rankless.save import drain_attempts
from rankless.save.folder_output import RunFolderOutput
from rankless.save.tier_content import TierContent
from rankless.storage import mapped_file
from rankless.tier import job
from rankless.tier.host_folder import TierFolder
from tests.helpers.file_contents import read_state_files
from tests.helpers.killed_jobs import run_killed_job
from tests.helpers.pairwise import each_value, first_of
from tests.helpers.pool import Ranks
from tests.helpers.tier_runs import continue_from, go_on
from tests.helpers.training import assert_equal, gather_run, start_run, train_run

#: A number of saves of which none is drained.
NEVER = 10**6

WRITERS = [("plain", 1), ("ddp", 2), ("fsdp", 3), ("fsdp", 4)]
READERS = [("plain", 1), ("ddp", 3), ("fsdp", 2), ("fsdp", 4)]


def tier_of(base: str, ranks_per_host: int = 1, **options: Any) -> rankless.LocalTier:
    rank = dist.get_rank() if dist.is_initialized() else 0
    return rankless.LocalTier(f"{base}/host{rank // ranks_per_host}", **options)


def save(base: str, layout: str, ranks_per_host: int, steps: int = 3, copies: int = 0) -> None:
    run = train_run(layout, steps=steps)
    local = tier_of(base, ranks_per_host, drain_every=NEVER, copies=copies)
    directory = rankless.RunDirectory(f"{base}/run", local=local)
    go_on(directory)
    directory.save(f"step_{steps}", run.model, run.optimizer, run.scheduler, {"n": steps}, step=steps)


def save_without_tier(base: str, layout: str) -> None:
    run = train_run(layout)
    rankless.save_checkpoint(f"{base}/run", "step_3", run.model, run.optimizer, run.scheduler, {"n": 3}, step=3)


def load(base: str, layout: str, ranks_per_host: int) -> tuple[dict[str, torch.Tensor], str, str, list[str]]:
    """Return the tensors, the tag, where it was loaded from, and the warnings."""
    run = start_run(layout, seed=9)
    directory = rankless.RunDirectory(f"{base}/run", local=tier_of(base, ranks_per_host))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = directory.restore(None, run.model, run.optimizer, run.scheduler)
    assert result.verified
    directory.finalize()
    return gather_run(run), result.tag, result.source, [str(warning.message) for warning in caught]


@each_value({"writer": WRITERS, "reader": READERS, "ranks_per_host": [1, 4]})
def test_any_layout_loads_a_generation_of_any_other(
    ranks: Ranks, tmp_path: Path, writer: tuple[str, int], reader: tuple[str, int], ranks_per_host: int
) -> None:
    ranks(writer[1], save, str(tmp_path), writer[0], ranks_per_host, 3, 3)  # the reader may have fewer hosts
    assert not list((tmp_path / "run").glob("step*"))
    for tensors, tag, source, _ in ranks(reader[1], load, str(tmp_path), reader[0], ranks_per_host):
        assert_equal(tensors, gather_run(train_run("plain")))
        assert (tag, source) == ("step_3", "local tier")


@first_of(2, "ranks_per_host", [1, 2, 4])
def test_a_drained_generation_has_the_bytes_of_an_ordinary_save(
    ranks: Ranks, tmp_path: Path, ranks_per_host: int
) -> None:
    ranks(4, save, str(tmp_path), "fsdp", ranks_per_host)
    ranks(4, load, str(tmp_path), "fsdp", ranks_per_host)
    ranks(4, save_without_tier, str(tmp_path / "other"), "fsdp")
    assert read_state_files(tmp_path / "run/step_3") == read_state_files(tmp_path / "other/run/step_3")


def test_a_save_that_is_drained_at_once_has_the_bytes_of_an_ordinary_save(ranks: Ranks, tmp_path: Path) -> None:
    ranks(4, _save_and_drain, str(tmp_path))
    ranks(4, save_without_tier, str(tmp_path / "other"), "fsdp")
    assert read_state_files(tmp_path / "run/step_3") == read_state_files(tmp_path / "other/run/step_3")


def _save_and_drain(base: str) -> None:
    run = train_run("fsdp")
    directory = rankless.RunDirectory(f"{base}/run", local=tier_of(base), async_save=True)
    directory.save("step_3", run.model, run.optimizer, run.scheduler, {"n": 3}, step=3).wait()


def test_the_end_of_a_block_drains_what_only_the_tier_has(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, _save_in_block, str(tmp_path))
    assert [info.tag for info in rankless.list_checkpoints(tmp_path / "run")] == ["b"]


def _save_in_block(base: str) -> None:
    with rankless.RunDirectory(f"{base}/run", local=tier_of(base, drain_every=NEVER)) as directory:
        for tag in ("a", "b"):
            directory.save(tag, {"w": torch.ones(3)})


@first_of(2, "lost", [0, 3, 1, 2])
def test_a_lost_host_is_replaced_by_the_copies_of_its_parts(ranks: Ranks, tmp_path: Path, lost: int) -> None:
    ranks(4, save, str(tmp_path), "fsdp", 1, 3, 1)
    shutil.rmtree(tmp_path / f"host{lost}")
    for tensors, _, source, _ in ranks(4, load, str(tmp_path), "fsdp", 1):
        assert_equal(tensors, gather_run(train_run("plain")))
        assert source == "local tier"


def test_without_copies_a_lost_host_leads_back_to_the_run_directory(ranks: Ranks, tmp_path: Path) -> None:
    ranks(4, save_without_tier, str(tmp_path), "fsdp")
    ranks(4, save, str(tmp_path), "fsdp", 1, 5, 0)
    shutil.rmtree(tmp_path / "host1")
    for tensors, tag, source, _ in ranks(4, load, str(tmp_path), "fsdp", 1):
        assert_equal(tensors, gather_run(train_run("plain")))
        assert (tag, source) == ("step_3", "run directory")


@pytest.mark.parametrize("ranks_per_host", [1, 2])
def test_a_flipped_byte_is_named_and_the_copy_is_used(ranks: Ranks, tmp_path: Path, ranks_per_host: int) -> None:
    ranks(4, save, str(tmp_path), "fsdp", ranks_per_host, 3, 1)
    corrupt = _flip_bytes_of_rank(tmp_path, 1, ranks_per_host)
    loaded = ranks(4, load, str(tmp_path), "fsdp", ranks_per_host)
    for tensors, _, source, _ in loaded:
        assert_equal(tensors, gather_run(train_run("plain")))
        assert source == "local tier"
    assert any(str(corrupt) in message and "the part of rank 1" in message for message in loaded[0][3])


def test_a_flipped_byte_without_a_copy_leads_back_to_the_run_directory(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, save_without_tier, str(tmp_path), "fsdp")
    ranks(2, save, str(tmp_path), "fsdp", 2, 5)
    corrupt = _flip_bytes_of_rank(tmp_path, 1, 2)
    loaded = ranks(2, load, str(tmp_path), "fsdp", 2)
    assert [result[1:3] for result in loaded] == [("step_3", "run directory")] * 2
    assert any(str(corrupt) in message for message in loaded[0][3])


@pytest.mark.parametrize("options", [{"copies": 1}, {"copies": 0, "parity": 3}])
@pytest.mark.parametrize("damage", [lambda path: os.truncate(path, 50), Path.unlink])
def test_a_file_that_another_host_needs_and_that_is_cut_or_lost_is_named_and_replaced(
    ranks: Ranks, tmp_path: Path, options: dict[str, int], damage: Callable[[Path], None]
) -> None:
    ranks(3, _save_with, str(tmp_path), options)
    corrupt = _find_part_of_rank(tmp_path, 1, 1)
    damage(corrupt)
    loaded = ranks(3, load, str(tmp_path), "ddp", 1)  # each host needs all parts
    for tensors, _, source, _ in loaded:
        assert_equal(tensors, gather_run(train_run("plain")))
        assert source == "local tier"
    assert any(str(corrupt) in message for message in loaded[0][3])


def _save_with(base: str, options: dict[str, int]) -> None:
    run = train_run("fsdp")
    directory = rankless.RunDirectory(f"{base}/run", local=tier_of(base, drain_every=NEVER, **options))
    directory.save("step_3", run.model, run.optimizer, run.scheduler, {"n": 3}, step=3)


def _flip_bytes_of_rank(base: Path, rank: int, ranks_per_host: int) -> Path:
    """Change a byte of the part of a rank on its own host."""
    path = _find_part_of_rank(base, rank, ranks_per_host)
    data = bytearray(path.read_bytes())
    data[100] ^= 4
    path.write_bytes(data)
    return path


def _find_part_of_rank(base: Path, rank: int, ranks_per_host: int) -> Path:
    """Return the file with the part of a rank on its own host."""
    folder = TierFolder.open(base / f"host{rank // ranks_per_host}", base / "run")
    (name,) = [name for names in folder.list_parts().values() for name in names if name.rank == rank]
    return folder.path / folder.read_part(name).data


def test_a_newer_checkpoint_in_the_run_directory_is_preferred(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, save, str(tmp_path), "fsdp", 2, 3)
    ranks(2, _save_twice_without_tier, str(tmp_path))
    (result, *_) = ranks(2, load, str(tmp_path), "fsdp", 2)
    assert result[1:3] == ("later", "run directory")


def _save_twice_without_tier(base: str) -> None:
    run = train_run("fsdp", steps=4)
    for tag in ("sooner", "later"):
        rankless.save_checkpoint(f"{base}/run", tag, run.model, run.optimizer, run.scheduler, step=4)


def test_a_generation_of_an_abandoned_branch_is_never_the_newest(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, save_without_tier, str(tmp_path), "fsdp")
    ranks(2, save, str(tmp_path), "fsdp", 2, 5)
    (tmp_path / "host0").rename(tmp_path / "away")  # the host is disconnected, and the job goes on without it
    assert ranks(2, load, str(tmp_path), "fsdp", 2)[0][1] == "step_3"
    shutil.rmtree(tmp_path / "host0")
    (tmp_path / "away").rename(tmp_path / "host0")
    (result, *_) = ranks(2, load, str(tmp_path), "fsdp", 2)
    assert result[1:3] == ("step_3", "run directory")


def test_a_load_by_tag_retires_newer_generations(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, save_without_tier, str(tmp_path), "fsdp")
    ranks(2, save, str(tmp_path), "fsdp", 2, 5)
    ranks(2, _load_by_tag, str(tmp_path), "step_3")
    (result, *_) = ranks(2, load, str(tmp_path), "fsdp", 2)
    assert result[1:3] == ("step_3", "run directory")


def test_a_generation_is_found_by_its_tag(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, save, str(tmp_path), "fsdp", 2, 5)
    assert ranks(2, _load_by_tag, str(tmp_path), "step_5") == ["local tier"] * 2


def _load_by_tag(base: str, tag: str) -> str:
    run = start_run("fsdp", seed=9)
    directory = rankless.RunDirectory(f"{base}/run", local=tier_of(base, 2))
    source = directory.restore(tag, run.model, run.optimizer, run.scheduler).source
    directory.finalize()
    return source


def test_the_newest_of_several_generations_is_loaded_until_the_next_is_complete(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, _save_and_fail, str(tmp_path))
    (result, *_) = ranks(2, load, str(tmp_path), "fsdp", 2)
    assert result[1:3] == ("step_3", "local tier")


def _save_and_fail(base: str) -> None:
    """Save twice; of the second save, one rank does not complete its part."""
    run = train_run("fsdp")
    directory = rankless.RunDirectory(f"{base}/run", local=tier_of(base, 2, drain_every=NEVER), timeout=20)
    directory.save("step_3", run.model, run.optimizer, run.scheduler, {"n": 3}, step=3)
    failing = dist.get_rank() == 1
    with (
        mock.patch.object(TierFolder, "write_part", _die) if failing else nullcontext(),
        pytest.raises(rankless.RankFailedError),
    ):
        directory.save("step_4", run.model, run.optimizer, run.scheduler, step=4)


def _die(*_: Any) -> None:
    raise rankless.RankFailedError("the rank has died")


def test_without_memory_a_save_goes_to_the_run_directory_and_warns(ranks: Ranks, tmp_path: Path) -> None:
    messages = ranks(2, _save_without_memory, str(tmp_path))
    assert "rank 1: " in messages[0]
    assert "free" in messages[0]
    assert [info.tag for info in rankless.list_checkpoints(tmp_path / "run")] == ["a"]


def _save_without_memory(base: str) -> str:
    free = 10 if dist.get_rank() == 1 else 10**12
    with (
        mock.patch.object(mapped_file, "count_free_bytes", return_value=free),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        directory = rankless.RunDirectory(f"{base}/run", local=tier_of(base, 2, drain_every=NEVER))
        directory.save("a", {"w": torch.ones(3000)})
    return "".join(str(warning.message) for warning in caught)


def test_a_drain_that_fails_is_tried_again(ranks: Ranks, tmp_path: Path) -> None:
    outcomes = ranks(2, _save_with_failing_drains, str(tmp_path), 2, "raise")
    assert outcomes == [(2, "")] * 2
    assert [info.tag for info in rankless.list_checkpoints(tmp_path / "run")] == ["a"]


def test_ranks_with_other_options_of_the_tier_neither_save_nor_load(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2, _use_with_other_options, str(tmp_path)) == [["RankMismatchError"] * 2] * 2


def _use_with_other_options(base: str) -> list[str]:
    """Return the errors of a save and a load, with as many copies as the rank's number."""
    directory = rankless.RunDirectory(f"{base}/run", local=tier_of(base, copies=dist.get_rank()))
    errors = []
    for call in (
        lambda: directory.save("a", {"w": torch.ones(3)}),
        lambda: directory.restore("a", {"w": torch.ones(3)}),
    ):
        try:
            call()
        except rankless.RanklessError as error:
            errors.append(type(error).__name__)
    return errors


@pytest.mark.parametrize("on_failure", ["raise", "warn"])
def test_a_drain_that_always_fails_raises_or_warns(ranks: Ranks, tmp_path: Path, on_failure: str) -> None:
    outcomes = ranks(2, _save_with_failing_drains, str(tmp_path), 99, on_failure)
    assert outcomes == [(drain_attempts.ATTEMPTS, "input/output error" if on_failure == "raise" else "")] * 2


def _save_with_failing_drains(base: str, failures: int, on_failure: str) -> tuple[int, str]:
    """Return how often a drain has failed, and the error of the save."""
    events: list[rankless.Event] = []
    finalize, counter = CheckpointFiles.finalize, itertools.count()

    def fail_first(*arguments: Any) -> Any:
        if next(counter) < failures:
            raise rankless.StorageError(5, "input/output error")
        return finalize(*arguments)

    error = ""
    with (
        mock.patch.object(drain_attempts, "_FIRST_SECONDS", 0.01),
        mock.patch.object(CheckpointFiles, "finalize", fail_first),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        directory = rankless.RunDirectory(
            f"{base}/run", local=tier_of(base, 2, on_failure=on_failure), async_save=True, on_event=events.append
        )
        handle = directory.save("a", {"w": torch.ones(3)})
        try:
            handle.wait()
        except rankless.StorageError as failure:
            error = str(failure.args[-1])
    return sum(isinstance(event, rankless.DrainFailed) for event in events), error


@pytest.mark.parametrize("stuck", [0, 1])
def test_a_drain_for_which_a_rank_does_not_come_is_not_tried_again(ranks: Ranks, tmp_path: Path, stuck: int) -> None:
    """The rank may have died. The others must end within the timeout, and not within five times as long."""
    assert ranks(2, _save_with_stuck_rank, str(tmp_path), stuck) == [1, 1]


def _save_with_stuck_rank(base: str, stuck: int) -> int:
    """Return how often a drain has failed."""
    events: list[rankless.Event] = []
    drain_once = TierContent._drain_once

    def come_too_late(*arguments: Any) -> Any:
        if dist.get_rank() == stuck:
            time.sleep(4)
        return drain_once(*arguments)

    with mock.patch.object(TierContent, "_drain_once", come_too_late):
        directory = rankless.RunDirectory(
            f"{base}/run", local=tier_of(base), async_save=True, on_event=events.append, timeout=2
        )
        with pytest.raises(rankless.RankTimeoutError, match=f"rank {stuck}"):
            directory.save("a", {"w": torch.ones(3)}).wait()
    return sum(isinstance(event, rankless.DrainFailed) for event in events)


def test_a_slow_drain_delays_no_save(ranks: Ranks, tmp_path: Path) -> None:
    """Checkpoints that are saved meanwhile stay in the tier, and the first save after it is drained."""
    assert ranks(2, _save_during_drain, str(tmp_path)) == [["a", "d"]] * 2


def _save_during_drain(base: str) -> list[str]:
    release, finalize = threading.Event(), CheckpointFiles.finalize

    def wait_and_finalize(*arguments: Any) -> Any:
        release.wait(60)
        return finalize(*arguments)

    with mock.patch.object(CheckpointFiles, "finalize", wait_and_finalize):
        directory = rankless.RunDirectory(f"{base}/run", local=tier_of(base, 2), async_save=True)
        slow = directory.save("a", {"w": torch.ones(3)})
        for tag in ("b", "c"):
            directory.save(tag, {"w": torch.ones(3)}).wait_local()
        assert not slow.done()
        dist.barrier()  # the other rank must have looked, too
        release.set()
        slow.wait()
    directory.save("d", {"w": torch.ones(3)}).wait()
    return [info.tag for info in directory.list()]


def test_a_taken_tag_is_refused_before_anything_is_staged(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, _save_same_tag, str(tmp_path))


def _save_same_tag(base: str) -> None:
    directory = rankless.RunDirectory(f"{base}/run", local=tier_of(base, 2, drain_every=NEVER))
    directory.save("a", {"w": torch.ones(3)})
    with pytest.raises(rankless.TagExistsError):
        directory.save("a", {"w": torch.ones(3)})
    directory.save("a", {"w": torch.zeros(3)}, overwrite=True)
    directory.finalize()
    assert torch.equal(rankless.open(f"{base}/run/a")["model/w"], torch.zeros(3))


def test_a_job_that_was_replaced_drains_nothing(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, _save_after_another_job, str(tmp_path))
    assert rankless.list_checkpoints(tmp_path / "run") == []


def _save_after_another_job(base: str) -> None:
    directory = rankless.RunDirectory(f"{base}/run", local=tier_of(base, 2, drain_every=NEVER))
    directory.save("a", {"w": torch.ones(3)})
    dist.barrier()
    if dist.get_rank() == 0:
        continue_from(Path(f"{base}/run"), 0)
    dist.barrier()
    with pytest.raises(rankless.StateError, match="another job has continued the run"):
        directory.finalize()


def test_the_tier_of_a_run_is_found_by_another_path_of_it(tmp_path: Path) -> None:
    rankless.save_checkpoint(tmp_path / "run", "a", {"w": torch.ones(1)}, local=tier_of(str(tmp_path)))
    (tmp_path / "link").symlink_to(tmp_path / "run")
    state = {"w": torch.ones(1)}
    assert rankless.restore(tmp_path / "link", None, state, local=tier_of(str(tmp_path)), resume=True).tag == "a"
    rankless.save_checkpoint(tmp_path / "link", "b", state, local=tier_of(str(tmp_path)))
    assert rankless.restore(tmp_path / "run", local=tier_of(str(tmp_path))).tag == "b"


def test_a_folder_of_another_run_or_user_is_refused(tmp_path: Path) -> None:
    rankless.save_checkpoint(tmp_path / "run", "a", {"w": torch.ones(1)}, local=tmp_path / "tier")
    with pytest.raises(rankless.InvalidArgumentError, match=r"is the local tier of .* Do not remove"):
        rankless.save_checkpoint(tmp_path / "other", "a", {"w": torch.ones(1)}, local=tmp_path / "tier")
    (tmp_path / "open").mkdir(mode=0o755)
    with pytest.warns(UserWarning, match="only this user may enter"):  # one next to it is used
        rankless.save_checkpoint(tmp_path / "other", "a", {"w": torch.ones(1)}, local=tmp_path / "open")
    assert not list((tmp_path / "open").iterdir())
    (tmp_path / "full").mkdir(mode=0o700)
    (tmp_path / "full/file").touch()
    with pytest.raises(rankless.InvalidArgumentError, match="is not empty"):
        rankless.save_checkpoint(tmp_path / "other", "b", {"w": torch.ones(1)}, local=tmp_path / "full")


def test_a_checkpoint_that_the_policy_keeps_for_its_metric_is_drained(tmp_path: Path) -> None:
    local = tier_of(str(tmp_path), drain_every=NEVER)
    keep = rankless.KeepLast(2) | rankless.KeepBest("loss", 1)
    directory = rankless.RunDirectory(tmp_path / "run", local=local, keep=keep)
    for step, loss in enumerate((3.0, 2.0, 5.0, 1.0, 4.0)):
        directory.save(f"step_{step}", {"w": torch.ones(3)}, step=step, metrics={"loss": loss})
    assert [info.tag for info in directory.list()] == ["step_1", "step_3"]


def test_the_number_of_the_newest_ones_that_a_policy_keeps_drains_nothing(tmp_path: Path) -> None:
    local = tier_of(str(tmp_path), drain_every=NEVER)
    directory = rankless.RunDirectory(tmp_path / "run", local=local, keep=rankless.KeepLast(5000))
    for step in range(3):
        directory.save(f"step_{step}", {"w": torch.ones(3)}, step=step)
    assert [info.tag for info in directory.list()] == []


def test_a_save_fails_if_nothing_was_drained_for_too_long(tmp_path: Path) -> None:
    local = tier_of(str(tmp_path), drain_every=NEVER, max_undrained_seconds=0.01)
    directory = rankless.RunDirectory(tmp_path / "run", local=local)
    directory.save("a", {"w": torch.ones(3)})
    time.sleep(0.02)
    with pytest.raises(rankless.StorageError, match="nothing was written to"):
        directory.save("b", {"w": torch.ones(3)})


@each_value({"size": [2, 3, 4], "lost": [0, 1, 3]})
def test_a_lost_host_is_computed_from_parity(ranks: Ranks, tmp_path: Path, size: int, lost: int) -> None:
    ranks(4, _save_with_parity, str(tmp_path), size)
    shutil.rmtree(tmp_path / f"host{lost}")
    for tensors, _, source, _ in ranks(4, load, str(tmp_path), "fsdp", 1):
        assert_equal(tensors, gather_run(train_run("plain")))
        assert source == "local tier"


def test_one_process_without_a_process_group_computes_a_lost_host_from_parity(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, _save_with_parity, str(tmp_path), 2)
    arrays, source = run_killed_job(_load_alone, str(tmp_path))
    assert_equal({name: torch.tensor(array) for name, array in arrays.items()}, gather_run(train_run("plain")))
    assert source == "local tier"


def _load_alone(base: str) -> tuple[dict[str, Any], str]:
    """Return arrays, which the pipe to the test copies: it only shares the memory of tensors."""
    tensors, _, source, _ = load(base, "plain", 1)
    return {name: tensor.numpy() for name, tensor in tensors.items()}, source


def test_a_corrupt_part_is_computed_from_parity(ranks: Ranks, tmp_path: Path) -> None:
    ranks(3, _save_with_parity, str(tmp_path), 3)
    corrupt = _flip_bytes_of_rank(tmp_path, 1, 1)
    loaded = ranks(3, load, str(tmp_path), "fsdp", 1)
    assert_equal(loaded[0][0], gather_run(train_run("plain")))
    assert any(str(corrupt) in message for message in loaded[0][3])


def test_parity_of_three_hosts_takes_half_of_the_memory_of_a_copy(ranks: Ranks, tmp_path: Path) -> None:
    ranks(3, _save_with_parity, str(tmp_path), 3)
    part, parity = sorted((file.stat().st_size for file in (tmp_path / "host0").glob("*.data")), reverse=True)
    assert parity <= part / 2 + 4096


def test_parity_does_not_replace_two_lost_hosts(ranks: Ranks, tmp_path: Path) -> None:
    ranks(4, save_without_tier, str(tmp_path), "fsdp")
    ranks(4, _save_with_parity, str(tmp_path), 4, 5)
    for lost in (1, 2):
        shutil.rmtree(tmp_path / f"host{lost}")
    assert [result[1:3] for result in ranks(4, load, str(tmp_path), "fsdp", 1)] == [("step_3", "run directory")] * 4


def _save_with_parity(base: str, size: int, steps: int = 3) -> None:
    run = train_run("fsdp", steps=steps)
    local = tier_of(base, drain_every=NEVER, parity=size)
    directory = rankless.RunDirectory(f"{base}/run", local=local)
    directory.save(f"step_{steps}", run.model, run.optimizer, run.scheduler, {"n": steps}, step=steps)


def test_a_drain_that_was_committed_and_seemed_to_fail_succeeds(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, _save_with_lost_commit, str(tmp_path))
    assert [info.tag for info in rankless.list_checkpoints(tmp_path / "run")] == ["a"]


def _save_with_lost_commit(base: str) -> None:
    publish, counter = RunFolderOutput._publish, itertools.count()

    def publish_and_fail(*arguments: Any) -> Any:
        publish(*arguments)
        if next(counter) == 0:
            raise rankless.StorageError(5, "input/output error")

    with (
        mock.patch.object(drain_attempts, "_FIRST_SECONDS", 0.01),
        mock.patch.object(RunFolderOutput, "_publish", publish_and_fail),
    ):
        directory = rankless.RunDirectory(f"{base}/run", local=tier_of(base, 2), async_save=True)
        assert directory.save("a", {"w": torch.ones(3)}).wait().tag == "a"


def test_a_list_of_the_run_directory_that_hangs_after_a_drain_delays_no_save(tmp_path: Path) -> None:
    hangs, release, list_all = threading.Event(), threading.Event(), job.list_checkpoints

    def hang(run: Path) -> Any:
        hangs.set()
        release.wait(60)
        return list_all(run)

    directory = rankless.RunDirectory(tmp_path / "run", local=tier_of(str(tmp_path)), async_save=True)
    directory.save("a", {"w": torch.ones(3)}).wait()
    with mock.patch.object(job, "list_checkpoints", hang):
        slow = directory.save("b", {"w": torch.ones(3)})
        assert hangs.wait(30)
        directory.save("c", {"w": torch.ones(3)}).wait_local(timeout=30)
        assert not slow.done()
        release.set()
        directory.finalize()
