"""``python -m campaigns.published_weights``: publishers and followers are killed and stopped, and show no wrong bytes.

It proves "Published weights" of ``docs/failure-model.md``: on a disk, in memory, and in an object store in memory that
fails, loses replies and lists late. Each scene has one weights directory and one followed folder. Processes are forked
from this one, publish versions that are a function of their step, follow them, and are killed or stopped at random
moments; a stopped publisher wakes up after another one has published. After each event:

- each version that is listed has the bytes of its step, and each one that ``wait()`` has returned is listed, unless
  retention has removed it;
- the folder at ``current`` has, byte for byte, the files that ``save_model`` writes of the step of its version;
- a new publisher and a new follower get on.

It exits with 1 on any violation.
"""

from __future__ import annotations

import argparse
import functools
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import rankless
from rankless.errors import RanklessError
from tests.helpers.fake_http import BUCKET, FakeStore, disconnect
from tests.helpers.fake_s3 import FakeS3, store_at

KINDS = ("disk", "memory", "store")

#: The elements of the tensors, after how many versions an anchor comes, and how many anchors are kept.
_SIZES, _ANCHOR_EVERY, _KEPT = (4000, 700, 1), 5, 2

#: The versions that a publisher publishes unless it is killed, and the longest time until an event.
_VERSIONS, _SECONDS = 8, 0.25

#: In the store, the share of requests whose connection breaks, before or after their effect, and the seconds for which
#: lists do not have a new object.
_BROKEN, _LIST_LAG = 0.02, 0.03


@functools.cache
def state_at(step: int) -> dict[str, torch.Tensor]:
    """Return the weights of a step, of which some elements are those of the steps around it."""
    generator = torch.Generator().manual_seed(0)
    state = {f"w{number}": torch.randn(size, generator=generator).bfloat16() for number, size in enumerate(_SIZES)}
    for tensor in state.values():
        for older in range(max(0, step - 12), step + 1):
            tensor[older % 13 :: 13] *= 1 + (older % 97) / 100
    return state


@functools.cache
def files_at(step: int) -> dict[str, bytes]:
    """Return the files that ``save_model`` writes of a step."""
    with tempfile.TemporaryDirectory() as folder:
        rankless.save_model(state_at(step), Path(folder) / "model", shard=True)
        return {file.name: file.read_bytes() for file in (Path(folder) / "model").iterdir()}


@dataclass
class Scene:
    """One weights directory, one folder that follows it, and a log of what ``wait()`` has returned."""

    weights: Any
    folder: Path
    generator: random.Random
    events: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    published: dict[int, tuple[str, int]] = field(default_factory=dict)
    #: Lets requests of a store fail, or not.
    let_fail: Callable[[bool], None] = lambda on: None  # noqa: ARG005

    @property
    def log(self) -> Path:
        """The file with the versions that ``wait()`` has returned."""
        return self.folder / "published"

    @property
    def followed(self) -> Path:
        """The folder that follows."""
        return self.folder / "followed"

    def publish(self, first: int, versions: int = _VERSIONS) -> None:
        """Publish versions from a step on, and log each that is published. Runs in a process of its own."""
        publisher = rankless.WeightPublisher(
            self.weights, anchor_every=_ANCHOR_EVERY, keep=_KEPT, on_failure="warn", async_save=first % 2 == 0
        )
        with self.log.open("a") as log, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for step in range(first, first + versions):
                handle = publisher.publish(state_at(step), step=step)
                try:
                    version = None if handle is None else handle.wait()
                except RanklessError:
                    continue
                if version is not None:
                    log.write(f"{version.number} {version.id} {version.step}\n")
                    log.flush()

    def follow(self) -> None:
        """Follow until the process is killed."""
        while True:
            try:
                with rankless.WeightFollower(self.weights, self.followed) as follower:
                    while True:
                        follower.update()
                        time.sleep(0.005)
            except RanklessError:
                time.sleep(0.02)

    def play(self) -> None:
        """Let one event happen, and check what is there."""
        event = self.generator.choice(
            ["kill publisher", "kill follower", "kill both", "stop publisher", "two publishers"]
        )
        self.events[event] += 1
        first = self._next_step()
        self.let_fail(True)
        publisher, follower = _fork(lambda: self.publish(first)), _fork(self.follow)
        time.sleep(self.generator.random() * _SECONDS)
        if event in {"kill publisher", "kill both"}:
            os.kill(publisher, signal.SIGKILL)
        if event in {"kill follower", "kill both"}:
            os.kill(follower, signal.SIGKILL)
        if event == "stop publisher":
            os.kill(publisher, signal.SIGSTOP)
            os.waitpid(_fork(lambda: self.publish(first + 100, 2)), 0)
            os.kill(publisher, signal.SIGCONT)
        if event == "two publishers":
            os.waitpid(_fork(lambda: self.publish(first + 100)), 0)
        os.waitpid(publisher, 0)
        os.kill(follower, signal.SIGKILL)
        os.waitpid(follower, 0)
        self.let_fail(False)
        self._check(event)

    def _next_step(self) -> int:
        self._read_log()
        return 1 + max((step for _, step in self.published.values()), default=0)

    def _read_log(self) -> None:
        for line in self.log.read_text().splitlines() if self.log.exists() else ():
            number, identity, step = line.split()
            self.published[int(number)] = identity, int(step)

    def _check(self, event: str) -> None:
        self._read_log()
        listed = {version.number: version for version in rankless.list_weight_versions(self.weights)}
        anchors = sorted(number for number, version in listed.items() if version.is_anchor)
        oldest = anchors[-_KEPT] if len(anchors) >= _KEPT else 0  # older ones may be removed, in any number
        for number, (identity, step) in self.published.items():
            if number >= oldest and (number not in listed or listed[number].id != identity):
                self._violate(event, f"version {number}, which wait() has returned for step {step}, is lost")
        for version in listed.values():
            step = int(version.step or 0)
            self.published.setdefault(version.number, (version.id, step))
            state = {name: torch.zeros_like(tensor) for name, tensor in state_at(0).items()}
            try:
                rankless.load_model(state, version.path)
            except RanklessError as error:
                self._violate(event, f"version {version.number} cannot be loaded: {error}")
                continue
            if not all(torch.equal(state[name], tensor) for name, tensor in state_at(step).items()):
                self._violate(event, f"version {version.number} has not the bytes of step {step}")
        self._check_folder(event)

    def _check_folder(self, event: str) -> None:
        current = self.followed / "current"
        if not current.is_symlink():
            return
        number, _, identity = current.resolve().name.partition("-")
        version, step = self.published.get(int(number), ("", -1))
        files = {file.name: file.read_bytes() for file in current.resolve().iterdir()}
        if version != identity or files != files_at(step):
            self._violate(event, f"the folder of version {number} has not the bytes of step {step}")

    def finish(self) -> None:
        """Let a new publisher and a new follower get on after the last event."""
        step = self._next_step() + 1000
        _await(_fork(lambda: self.publish(step, 3)))
        with rankless.WeightFollower(self.weights, self.followed) as follower:
            follower.update()
        self._check("the end")
        newest = max(self.published)
        if self.published[newest][1] != step + 2 or follower.version is None or follower.version.number != newest:
            self._violate("the end", "a new publisher and a new follower did not get on")

    def _violate(self, event: str, text: str) -> None:
        self.violations.append(f"{event}: {text}")
        print(f"VIOLATION after {event} in {self.folder}: {text}", flush=True)


def _fork(work: Callable[[], None]) -> int:
    process = os.fork()
    if process:
        return process
    try:
        work()
    except BaseException as error:  # noqa: BLE001 - the parent checks what is there
        print(f"a process has failed: {error!r}", file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)


def _await(process: int) -> None:
    _, status = os.waitpid(process, 0)
    if status:
        print(f"a process that nobody killed has ended with status {status}", flush=True)


@contextmanager
def open_scene(kind: str, seed: int) -> Iterator[Scene]:
    """Make an empty scene of a kind."""
    parent = "/dev/shm" if kind == "memory" else None
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="weights-", dir=parent)))
        weights: Any = folder / "weights"
        scene = Scene(weights, folder, random.Random(seed))
        if kind == "store":
            server = FakeS3()
            url = stack.enter_context(server.served())
            scene.weights, scene.let_fail = store_at(url).path(f"{BUCKET}/weights"), _faults_of(server, seed)
        yield scene
        if scene.violations:
            shutil.copytree(
                folder, tempfile.mkdtemp(prefix=f"weights-violation-{kind}-{seed}-"), dirs_exist_ok=True, symlinks=True
            )


def _faults_of(server: FakeStore, seed: int) -> Callable[[bool], None]:
    """Return what lets some requests fail, before or after their effect, and lists be late; or ends that."""
    generator = random.Random(seed + 1)

    def break_some(request: object, stage: str) -> None:
        del request, stage
        if generator.random() < _BROKEN:
            disconnect()

    def switch(on: bool) -> None:
        server.on_request = break_some if on else lambda request, stage: None  # noqa: ARG005
        server.list_lag = _LIST_LAG if on else 0.0

    return switch


def main() -> int:
    """Run scenes until enough events have happened."""
    parser = argparse.ArgumentParser(prog="python -m campaigns.published_weights", description=__doc__)
    parser.add_argument("--events", type=int, default=1000, help="events in all (default: 1000)")
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), choices=KINDS)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    total, violations, seed = Counter[str](), 0, options.seed
    while total.total() < options.events:
        kind = options.kinds[seed % len(options.kinds)]
        with open_scene(kind, seed) as scene:
            for _ in range(20):
                scene.play()
            scene.finish()
        total += Counter({f"{kind}, {event}": count for event, count in scene.events.items()})
        violations += len(scene.violations)
        print(f"{kind}, seed {seed}: {len(scene.published)} versions, {len(scene.violations)} violations", flush=True)
        seed += 1
    print(f"{total.total()} events, {violations} violations: {dict(sorted(total.items()))}")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
