"""The places of a run: a folder, or a bucket of a fake server, and what is in them, read without rankless."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any, Protocol

from campaigns.run_histories.oracle import Content
from rankless.storage.object_path import make_object_path
from tests.helpers.fake_http import BUCKET
from tests.helpers.fake_s3 import AWS, FakeS3, Profile

#: The seconds for which a job repeats a request that fails.
RETRY_SECONDS = 5.0

#: The kinds of places. The last one ignores conditions of writes.
KINDS = ("ext4", "tmpfs", "store", "store without conditions")


@dataclass(frozen=True)
class Found:
    """A checkpoint that is whole: what its files say."""

    tag: str
    content: Content
    id: str
    run: str
    sequence: int


class Place(Protocol):
    """A run directory."""

    @property
    def name(self) -> str:
        """Its name among those of a history."""

    @property
    def environment(self) -> Mapping[str, str]:
        """The variables that commands need."""

    @property
    def spared(self) -> bytes:
        """The part of the head of requests in which no job may be stopped, because it is lost then: see Trap."""

    def path(self) -> Any:
        """Return what a job passes to rankless."""

    def read_files(self) -> Mapping[str, bytes]:
        """Return the contents of all files, by their paths in the directory."""

    def copy(self, name: str, *, hidden: bool = True) -> Place:
        """Return a copy, with or without names that begin with a dot. What is there already stays."""

    def move(self, name: str) -> Place:
        """Return the place after it has another name."""

    def remove(self) -> None:
        """Remove all of it."""


@dataclass(frozen=True)
class FolderPlace:
    """A folder of a file system."""

    base: Path
    name: str

    @property
    def environment(self) -> dict[str, str]:
        """See :class:`Place`."""
        return {}

    @property
    def spared(self) -> bytes:
        """See :class:`Place`."""
        return b""

    def path(self) -> Path:
        """See :class:`Place`."""
        return self.base / self.name

    def read_files(self) -> dict[str, bytes]:
        """See :class:`Place`."""
        return read_folder(self.path())

    def copy(self, name: str, *, hidden: bool = True) -> FolderPlace:
        """See :class:`Place`."""
        target = FolderPlace(self.base, name)
        for path, data in sorted(self.read_files().items()):
            file = target.path() / path
            if (hidden or not path.startswith(".")) and not file.exists():
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(data)
        return target

    def move(self, name: str) -> FolderPlace:
        """See :class:`Place`."""
        self.path().rename(self.base / name)
        return FolderPlace(self.base, name)

    def remove(self) -> None:
        """See :class:`Place`."""
        shutil.rmtree(self.path(), ignore_errors=True)


def read_folder(folder: Path) -> dict[str, bytes]:
    """Return the contents of all files in a folder, by their paths in it. One that vanishes meanwhile is left out."""
    found = {}
    for file in folder.rglob("*"):
        with suppress(FileNotFoundError, NotADirectoryError):
            if file.is_file():
                found[str(file.relative_to(folder))] = file.read_bytes()
    return found


class Server:
    """A fake store in a process of its own, which serves all jobs of a worker."""

    def __init__(self, profile: Profile, context: BaseContext) -> None:
        self._pipe, theirs = context.Pipe()
        self.profile = profile
        self._process = context.Process(target=_serve, args=(theirs, profile), daemon=True)
        self._process.start()
        self.url = str(self._pipe.recv())

    def call(self, *command: str) -> Any:
        """Do what only the server can do, and return the answer."""
        self._pipe.send(command)
        return self._pipe.recv()

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.join()


def _serve(pipe: Connection, profile: Profile) -> None:
    fake = FakeS3(profile)
    with fake.served() as url:
        pipe.send(url)
        while True:
            try:
                command, *args = pipe.recv()
            except EOFError:
                return
            with fake.lock:
                pipe.send(_COMMANDS[command](fake, *args))


def _dump(fake: FakeS3, prefix: str) -> dict[str, bytes]:
    fake.requests.clear()
    return {key.removeprefix(prefix): stored.data for key, stored in fake.objects.items() if key.startswith(prefix)}


def _copy(fake: FakeS3, source: str, target: str, hidden: str) -> None:
    for path, stored in [
        (key.removeprefix(source), kept) for key, kept in fake.objects.items() if key.startswith(source)
    ]:
        if hidden or not path.startswith("."):
            fake.objects.setdefault(target + path, replace(stored))


def _remove(fake: FakeS3, prefix: str) -> None:
    for key in [key for key in fake.objects if key.startswith(prefix)]:
        del fake.objects[key]


_COMMANDS: dict[str, Callable[..., Any]] = {"dump": _dump, "copy": _copy, "remove": _remove}


@dataclass(frozen=True)
class BucketPlace:
    """A prefix of a bucket."""

    server: Server
    name: str

    @property
    def environment(self) -> dict[str, str]:
        """See :class:`Place`."""
        keys = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}
        return {**keys, "AWS_ENDPOINT_URL": self.server.url}

    @property
    def spared(self) -> bytes:
        """See :class:`Place`. Without conditions, a creation that arrives late overwrites what was created since."""
        return b"" if self.server.profile.honours_conditions else b"if-none-match"

    def path(self) -> Any:
        """See :class:`Place`."""
        fake = FakeS3(self.server.profile)
        return make_object_path(fake.store_at(self.server.url, retry_seconds=RETRY_SECONDS), f"{BUCKET}/{self.name}")

    def read_files(self) -> dict[str, bytes]:
        """See :class:`Place`."""
        return dict(self.server.call("dump", f"{self.name}/"))

    def copy(self, name: str, *, hidden: bool = True) -> BucketPlace:
        """See :class:`Place`."""
        self.server.call("copy", f"{self.name}/", f"{name}/", "hidden" if hidden else "")
        return BucketPlace(self.server, name)

    def move(self, name: str) -> BucketPlace:
        """See :class:`Place`."""
        copy = self.copy(name)
        self.remove()
        return copy

    def remove(self) -> None:
        """See :class:`Place`."""
        self.server.call("remove", f"{self.name}/")


def find_checkpoints(place: Place) -> list[Found]:
    """Return the checkpoints in a place, as the specification of the format says, by ascending sequence numbers."""
    files = place.read_files()
    folders = _list_bucket(files) if isinstance(place, BucketPlace) else _list_folder(files)
    found = [checkpoint for tag, folder in folders if (checkpoint := _read(files, tag, folder)) is not None]
    return sorted(found, key=lambda checkpoint: checkpoint.sequence)


def _list_folder(files: Mapping[str, bytes]) -> Iterator[tuple[str, str]]:
    for path in files:
        folder, _, name = path.partition("/")
        if name == "manifest.json" and not folder.startswith("."):
            yield folder, folder


def _list_bucket(files: Mapping[str, bytes]) -> Iterator[tuple[str, str]]:
    numbers: dict[str, int] = {}
    for path in files:
        folder, *names = path.split("/")
        if folder == ".tags" and len(names) == 2:
            numbers[names[0]] = max(numbers.get(names[0], 0), int(names[1]))
        elif names == ["manifest.json"] and "." not in folder:  # a copy in which only the folder was copied
            numbers.setdefault(folder, 0)
    for tag, number in numbers.items():
        if number:
            pointer = json.loads(files[f".tags/{tag}/{number}"])
            yield tag, f"{pointer.get('saved_as') or tag}.{pointer['id']}"
        else:
            yield tag, tag


def _read(files: Mapping[str, bytes], tag: str, folder: str) -> Found | None:
    """Return a checkpoint; ``None`` if one of its files is missing."""
    if f"{folder}/manifest.json" not in files:
        return None
    manifest = json.loads(files[f"{folder}/manifest.json"])
    if any(len(files.get(f"{folder}/{name}", b"")) != record["size"] for name, record in manifest["files"].items()):
        return None
    data = files[f"{folder}/model/model.safetensors"]
    length = int.from_bytes(data[:8], "little")
    begin, end = json.loads(data[8 : 8 + length])["content"]["data_offsets"]
    steps = struct.unpack(f"<{(end - begin) // 8}q", data[8 + length + begin : 8 + length + end])
    content = tuple(step for step in steps if step)
    return Found(tag, content, manifest["id"], manifest["run"], manifest["sequence"])


@contextmanager
def open_kind(kind: str, scratch: Mapping[str, Path], context: BaseContext) -> Iterator[Callable[[str], Place]]:
    """Yield a function that makes places of a kind. ``scratch`` has a folder for each kind of file system."""
    if kind in scratch:
        yield lambda name: FolderPlace(scratch[kind], name)
        return
    server = Server(AWS if kind == "store" else replace(AWS, honours_conditions=False), context)
    try:
        yield lambda name: BucketPlace(server, name)
    finally:
        server.close()
