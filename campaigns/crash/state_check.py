"""The examination of all states of one history, each laid out on a disk."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from unittest import mock

from campaigns.crash.image import Tree
from campaigns.crash.operations import History
from campaigns.crash.oracle import Promised, Violation, check_run
from campaigns.crash.recording import RUN
from campaigns.crash.scenarios import Scenario
from campaigns.crash.states import State, sample_states
from campaigns.crash.training import Training


@dataclass(frozen=True)
class ForbiddenState:
    """A forbidden state, and the reason."""

    reason: str
    state: State


@dataclass
class Findings:
    """The number of states by outcome, and the violations."""

    outcomes: Counter[str] = field(default_factory=Counter)
    violations: list[ForbiddenState] = field(default_factory=list)

    @property
    def checked(self) -> int:
        """The number of examined states."""
        return self.outcomes.total() + len(self.violations)


def check_states(scenario: Scenario, history: History, limit: int, seed: int = 0) -> Findings:
    """Examine at most ``limit`` distinct states of a history, in this process."""
    before, after = scenario.list_checkpoints_by_step()[-2:]
    training, findings = Training(scenario.models), Findings()
    with (
        tempfile.TemporaryDirectory(prefix="rankless-crash-", dir=_find_memory_directory()) as folder,
        scenario.emulate_file_system(),
    ):
        store = _TreeStore(Path(folder))
        for state in sample_states(history, limit, seed):
            promised = after if state.moment >= history.acknowledged[-1] else before
            kept = {} if state.moment >= history.tidied[-1] else before
            try:
                with _without_fsync():
                    run = store.write_tree(state.tree) / RUN
                    outcome = check_run(run, Promised(promised, after, kept), scenario.resumed, training)
            except Violation as violation:
                findings.violations.append(ForbiddenState(str(violation), state))
            else:
                findings.outcomes[outcome] += 1
    return findings


def write_tree(tree: Tree, root: Path) -> None:
    """Create the directories and files of a tree."""
    root.mkdir(parents=True)
    for path, data in tree.items():
        if data is None:
            (root / path).mkdir()
        else:
            (root / path).write_bytes(data)


def _find_memory_directory() -> str | None:
    """Return a file system in memory that has enough space, if there is one."""
    with suppress(OSError):
        status = os.statvfs("/dev/shm")
        if status.f_bavail * status.f_frsize > 2**30:
            return "/dev/shm"
    return None


@contextmanager
def _without_fsync() -> Iterator[None]:
    """Disable ``fsync``: an examination needs no durability."""
    with mock.patch.object(os, "fsync"):
        yield


class _TreeStore:
    """A store of trees as directories. Equal files are hard links to one: existing files are never written to."""

    def __init__(self, folder: Path) -> None:
        self._disk, self._contents = folder / "disk", folder / "contents"
        self._contents.mkdir()

    def write_tree(self, tree: Tree) -> Path:
        """Lay the tree out as a directory that replaces the previous one."""
        if self._disk.exists():
            shutil.rmtree(self._disk)
        self._disk.mkdir()
        for path, data in tree.items():
            if data is None:
                (self._disk / path).mkdir()
            else:
                (self._disk / path).hardlink_to(self._store_content(data))
        return self._disk

    def _store_content(self, data: bytes) -> Path:
        path = self._contents / blake2b(data).hexdigest()
        if not path.exists():
            path.write_bytes(data)
        return path
