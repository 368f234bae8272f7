"""Cleaning up on one host while a save of another host lives, is cut off, or has died.

No process may remove the pending directory of a living save, whatever its host. What a dead one left is removed as soon
as the file server has released its lock.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from campaigns.hosts import guest, network
from campaigns.hosts.testbed import Testbed, mount_point
from campaigns.hosts.workers import Worker
from rankless.errors import RanklessError
from rankless.ondisk.hidden_names import parse_hidden_name
from rankless.run.cleanup import clean_up
from rankless.run.pending_dir import PendingDirectory
from rankless.run.pending_lock import confirm_lock

#: How long a host tries to clean up after another one died, in seconds: the server's lease is 10.
_PATIENCE = 60.0

#: The files of the checkpoint that is being saved.
_FILES = 20

_SAVES: list[PendingDirectory] = []


def begin_save(run: Path) -> str:
    """Create a pending directory with files in it. Return its name."""
    staging = PendingDirectory(run / "step_1")
    staging.create()
    for number in range(_FILES):
        (staging.path / str(number)).write_bytes(bytes(1000))
    _SAVES.append(staging)
    return staging.path.name


def confirm(run: Path, name: str) -> None:
    """Do what a rank of the save's job does on this host."""
    confirm_lock(PendingDirectory(run / "step_1", parse_hidden_name(name)).path)


def finish_save() -> str:
    """Publish the directory. Return ``"published"`` or the error."""
    staging = _SAVES.pop()
    try:
        staging.publish()
    except RanklessError as error:
        return f"{type(error).__name__}: {error}"
    return "published"


def die() -> None:
    """End this process in the middle of the save."""
    os._exit(9)


def tidy(run: Path) -> int:
    """Remove leftovers, and return their number."""
    return len(clean_up(run))


def tidy_until_removed(run: Path) -> str:
    """Remove leftovers until there was one. Return after how many seconds."""
    started = time.monotonic()
    while time.monotonic() < started + _PATIENCE:
        if clean_up(run):
            return f"removed after {time.monotonic() - started:.1f} s"
        time.sleep(0.25)
    return f"not removed in {_PATIENCE:.0f} s"


def count_files(run: Path) -> int:
    """Return the number of files of the checkpoint; -1 if there is no checkpoint."""
    folder = run / "step_1"
    os.listdir(run)  # noqa: PTH208 - asks the server again
    return len(list(folder.iterdir())) if folder.exists() else -1


def run(testbed: Testbed, kinds: list[str], report: Callable[[str], None]) -> None:
    """Save on the first client, and clean up on the second one and on the server."""
    for kind in kinds:
        report(f"{kind} | living save | {_live(testbed, kind)}")
        report(f"{kind} | killed process | {_kill_process(testbed, kind)}")
        report(f"{kind} | cut off for 30 s | {_cut_off(testbed, kind)}")
        report(f"{kind} | killed host | {_kill_host(testbed, kind)}")


def _names(kind: str) -> tuple[Path, Path]:
    """Return a new run directory as the clients and as the server name it."""
    name = f"run-{kind}-{time.monotonic_ns()}"
    return mount_point(kind) / name, guest.EXPORT / name


def _begin(saver: Worker, other: Worker, run: Path) -> None:
    name = saver.call(begin_save, run)
    other.call(confirm, run, name)


def _live(testbed: Testbed, kind: str) -> str:
    path, exported = _names(kind)
    with testbed.clients[0].worker() as saver, testbed.clients[1].worker() as other, testbed.server.worker() as server:
        _begin(saver, other, path)
        removed = other.call(tidy, path), server.call(tidy, exported)
        outcome, files = saver.call(finish_save), server.call(count_files, exported)
    verdict = "" if removed == (0, 0) and outcome == "published" and files == _FILES else "WRONG: "
    return f"{verdict}the other client removed {removed[0]}, the server {removed[1]}; then {outcome}, {files} files"


def _kill_process(testbed: Testbed, kind: str) -> str:
    path, _ = _names(kind)
    with testbed.clients[0].worker() as saver, testbed.clients[1].worker() as other:
        _begin(saver, other, path)
        saver.send(die)
        answer = other.call(tidy_until_removed, path)
    return answer if answer.startswith("removed") else f"WRONG: {answer}"


def _cut_off(testbed: Testbed, kind: str) -> str:
    path, exported = _names(kind)
    host = testbed.clients[0]
    with host.worker() as saver, testbed.clients[1].worker() as other, testbed.server.worker() as server:
        _begin(saver, other, path)
        network.cut_link(host.spec.number)
        time.sleep(30)
        removed = other.call(tidy, path)
        network.restore_link(host.spec.number)
        outcome, files = saver.call(finish_save), server.call(count_files, exported)
    is_right = (outcome == "published" and files == _FILES) or (outcome != "published" and files == -1)
    return f"{'' if is_right else 'WRONG: '}the other client removed {removed}; then {outcome}; {files} files"


def _kill_host(testbed: Testbed, kind: str) -> str:
    path, _ = _names(kind)
    with testbed.clients[0].worker() as saver, testbed.clients[1].worker() as other:
        _begin(saver, other, path)
        testbed.clients[0].kill()
        answer: str = other.call(tidy_until_removed, path)
    testbed.restart(testbed.clients[0])
    return answer
