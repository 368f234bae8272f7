"""Tests that a local tier that is lost, full, closed or looked at by others never ends a training."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch

import rankless
from rankless.errors import StorageError
from rankless.tier.host_folder import TierFolder
from tests.helpers.killed_jobs import run_killed_job
from tests.helpers.processes import run_code
from tests.helpers.tier_runs import load_newest_step, save_steps, state_of

NEVER = 10**6


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return tmp_path


def open_run(base: Path, drain_every: int = NEVER) -> rankless.RunDirectory:
    return rankless.RunDirectory(base / "run", local=rankless.LocalTier(base / "tier", drain_every=drain_every))


LOAD = """
import sys, torch, rankless
state = {"w": torch.zeros(3000)}
restored = rankless.restore(sys.argv[1], model=state, local=sys.argv[2], resume=sys.argv[3] == "resume")
assert torch.equal(state["w"], torch.full((3000,), float(restored.step))), "a mixture"
print(restored.step, restored.source)
rankless.finalize()
"""


def load_in_a_job(base: Path, what: str, more: str = "") -> str:
    """Load as the next job of the training does, or as an evaluation beside it. Return the step and its source."""
    done = run_code(LOAD + more, base / "run", base / "tier", what)
    assert "Error" not in done.stderr, done.stderr
    return done.stdout.strip()


def load_step(base: Path) -> int:
    return int(load_in_a_job(base, "resume").split()[0])


def newest_step(base: Path) -> float | None:
    return rankless.list_checkpoints(base / "run")[-1].step


@contextmanager
def failing(name: str, error: int) -> Iterator[None]:
    """Let a method of the folder fail, as on a full memory."""
    with mock.patch.object(TierFolder, name, side_effect=StorageError(error, "no space left on device")):
        yield


class TestTheFolderIsRemoved:
    def test_the_next_saves_go_on_in_a_new_one(self, base: Path) -> None:
        directory = open_run(base)
        save_steps(directory, 1, 2)
        shutil.rmtree(base / "tier")
        save_steps(directory, 3, 4)
        assert load_step(base) == 4
        directory.finalize()
        assert newest_step(base) == 4

    def test_it_is_removed_during_a_save(self, base: Path) -> None:
        directory = open_run(base)
        save_steps(directory, 1)
        write_part = TierFolder.write_part

        def remove_first(folder: TierFolder, table: object) -> None:
            shutil.rmtree(folder.path)
            write_part(folder, table)  # type: ignore[arg-type]

        with (
            mock.patch.object(TierFolder, "write_part", remove_first),
            pytest.warns(UserWarning, match="step_2 is saved without the local tier"),
        ):
            save_steps(directory, 2)
        assert newest_step(base) == 2
        save_steps(directory, 3)
        assert load_step(base) == 3

    def test_the_end_of_the_block_saves_what_only_the_tier_had(self, base: Path) -> None:
        with pytest.warns(UserWarning, match="step_3 is saved again"):
            train_and_lose_the_folder(base)
        assert newest_step(base) == 3


def train_and_lose_the_folder(base: Path) -> None:
    tier = rankless.LocalTier(base / "tier", drain_every=NEVER)
    model = torch.nn.Linear(3, 3)
    with rankless.Checkpointer(base / "run", model=model, save_every=1, local=tier) as checkpointer:
        checkpointer.resume()
        for step in (1, 2, 3):
            checkpointer.step(step)
        checkpointer._directory.wait()
        shutil.rmtree(base / "tier")


@pytest.mark.parametrize("method", ["write_part", "write_common"])
def test_a_full_memory_sends_a_save_to_the_run_directory(base: Path, method: str) -> None:
    directory = open_run(base)
    save_steps(directory, 1)
    with failing(method, errno.ENOSPC), pytest.warns(UserWarning, match="step_2 is saved without the local tier"):
        save_steps(directory, 2)
    assert newest_step(base) == 2
    save_steps(directory, 3)
    assert load_step(base) == 3


def test_a_folder_that_others_may_enter_is_not_used_and_the_job_goes_on(base: Path) -> None:
    directory = open_run(base, drain_every=1)
    save_steps(directory, 1, 2)
    directory.finalize()
    (base / "tier").chmod(0o755)
    done = run_code(LOAD, base / "run", base / "tier", "resume")
    assert done.stdout.strip() == "2 run directory"
    assert "only this user may enter" in done.stderr


@pytest.mark.parametrize("what", ["resume", "look"])
def test_a_folder_that_was_used_instead_is_not_forgotten(base: Path, what: str) -> None:
    """The next job finds the folder repaired, and the newest checkpoint only in the one next to it."""
    directory = open_run(base, drain_every=1)
    save_steps(directory, 1)
    directory.finalize()
    del directory
    shutil.rmtree(base / "tier")
    (base / "tier").touch()
    run_killed_job(train_from_1_to_3, base)
    (base / "tier").unlink()
    assert newest_step(base) == 1
    assert load_in_a_job(base, what) == "3 local tier"
    if what == "resume":
        assert newest_step(base) == 3


@pytest.mark.parametrize("what", ["resume", "look"])
def test_the_folder_of_another_run_next_to_it_is_left_alone(base: Path, what: str) -> None:
    beside = base / f"tier.{os.getuid()}"
    run_killed_job(save_one, base / "other", beside)
    run_killed_job(save_one, base / "run", base / "tier")
    before = sorted(path.name for path in beside.iterdir())
    assert load_in_a_job(base, what) == "1 local tier"
    assert sorted(path.name for path in beside.iterdir()) == before


def save_one(run: Path, tier: Path) -> None:
    save_steps(rankless.RunDirectory(run, local=rankless.LocalTier(tier, drain_every=NEVER)), 1)


def train_from_1_to_3(base: Path) -> None:
    directory = open_run(base)
    with pytest.warns(UserWarning, match="Until then the local tier of this host is"):
        directory.restore(None, state_of(0.0), resume=True)
    save_steps(directory, 2, 3)


def lose_the_marker(tier: Path) -> None:
    (tier / "tier.json").unlink()


def cut_the_marker(tier: Path) -> None:
    (tier / "tier.json").write_bytes(b"")


def use_another_version(tier: Path) -> None:
    marker = (tier / "tier.json").read_text()
    (tier / "tier.json").write_text(re.sub('"version": *[0-9]+', '"version":99', marker))


def lose_the_owner(tier: Path) -> None:
    (tier / "owner").unlink()


def cut_the_owner(tier: Path) -> None:
    (tier / "owner").write_bytes(b"")


def remove_all_files(tier: Path) -> None:
    for path in tier.iterdir():
        path.unlink()


def leave_a_part(tier: Path) -> None:
    """As a cleaner does of whose files a job writes one anew meanwhile."""
    for path in tier.iterdir():
        if path.suffix != ".part":
            path.unlink()


def load_newest(base: Path) -> float:
    return load_newest_step(open_run(base))


SPOIL = [
    lose_the_marker,
    cut_the_marker,
    use_another_version,
    lose_the_owner,
    cut_the_owner,
    remove_all_files,
    leave_a_part,
]


@pytest.mark.filterwarnings("ignore:.*local tier")
@pytest.mark.parametrize("spoil", SPOIL)
class TestTheFolderIsDamaged:
    def test_a_training_goes_on_and_so_does_the_next_one(self, base: Path, spoil: Callable[[Path], None]) -> None:
        directory = open_run(base)
        save_steps(directory, 1, 2)
        spoil(base / "tier")
        save_steps(directory, 3, 4)
        directory.finalize()
        assert newest_step(base) == 4
        assert run_killed_job(load_newest, base) == 4

    def test_a_job_starts(self, base: Path, spoil: Callable[[Path], None]) -> None:
        directory = open_run(base, drain_every=1)
        save_steps(directory, 1)
        directory.finalize()
        spoil(base / "tier")
        assert run_killed_job(load_newest, base) == 1


def test_a_job_goes_on_where_no_folder_can_be_made(base: Path) -> None:
    """The mount of the tier is missing on a host, for one: nothing can be made below its path."""
    (base / "mount").write_text("a file")
    directory = rankless.RunDirectory(base / "run", local=base / "mount/tier")
    with pytest.warns(UserWarning, match="step_1 is saved without the local tier: rank 0: there is no folder"):
        save_steps(directory, 1)
    done = run_code(LOAD, base / "run", base / "mount/tier", "resume")
    assert done.stdout.strip() == "1 run directory"
    assert "this host saves nothing into its local tier" in done.stderr


def test_the_probe_of_another_rank_that_opens_the_new_folder_is_no_damage(base: Path) -> None:
    (base / "tier").mkdir(mode=0o700)
    (base / "tier/0123456789abcdef.probe").touch()
    save_steps(open_run(base), 1)
    assert (base / "tier/tier.json").exists()


def test_a_folder_of_the_users_is_refused(base: Path) -> None:
    (base / "tier").mkdir(mode=0o700)
    (base / "tier/thesis.data").write_text("years of work")
    (base / "tier/notes.txt").write_text("years of work")
    with pytest.raises(rankless.InvalidArgumentError, match="is not empty, and is no local tier"):
        save_steps(open_run(base), 1)
    assert {path.name for path in (base / "tier").iterdir()} == {"thesis.data", "notes.txt"}


@pytest.mark.parametrize("method", ["_remove", "remove_generations"])
def test_generations_that_cannot_be_removed_end_no_training(base: Path, method: str) -> None:
    directory = open_run(base)
    save_steps(directory, 1)
    with failing(method, errno.EACCES):
        save_steps(directory, 2)
    assert run_killed_job(load_newest, base) == 2


class TestReaders:
    """A process that loads without an optimizer is an evaluation: it changes nothing, and stops nobody."""

    def names(self, base: Path) -> set[str]:
        return {str(path.relative_to(base)) for path in base.rglob("*")}

    def test_a_reader_leaves_everything_and_the_training_goes_on(self, base: Path) -> None:
        directory = open_run(base)
        save_steps(directory, 1, 2)
        before = self.names(base)
        assert load_in_a_job(base, "look") == "2 local tier"
        assert self.names(base) == before
        save_steps(directory, 3)
        directory.finalize()
        assert newest_step(base) == 3

    def test_a_reader_without_a_tier_on_its_host_makes_none(self, base: Path) -> None:
        rankless.RunDirectory(base / "run").save("step_1", state_of(1), step=1)
        assert load_in_a_job(base, "look") == "1 run directory"
        assert not (base / "tier").exists()

    def test_a_load_in_the_process_of_the_training_changes_nothing(self, base: Path) -> None:
        directory = open_run(base)
        save_steps(directory, 1)
        assert open_run(base).restore(None, state_of(-1)).step == 1
        save_steps(directory, 2)
        assert load_step(base) == 2

    def test_a_save_after_such_a_load_goes_on_from_it(self, base: Path) -> None:
        save_steps(open_run(base), 1, 2)
        code = (
            "state['w'].fill_(3.0)\n"
            "rankless.save_checkpoint(sys.argv[1], 'step_3', state, step=3, local=sys.argv[2])\n"
            "rankless.finalize()\n"
        )
        load_in_a_job(base, "look", code)
        assert load_step(base) == 3


def test_steps_are_not_lost_if_the_first_save_after_a_look_fails(base: Path) -> None:
    save_steps(open_run(base), 1, 2)
    code = (
        "from unittest import mock; from rankless.tier.host_folder import TierFolder\n"
        "import os\n"
        "mock.patch.object(TierFolder, 'write_part', lambda *_: os._exit(0)).start()\n"
        "rankless.save_checkpoint(sys.argv[1], 'step_3', state, step=3, local=sys.argv[2])\n"
    )
    load_in_a_job(base, "look", code)
    assert load_step(base) == 2
