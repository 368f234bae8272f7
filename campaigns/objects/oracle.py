"""Checks of a run in an object store that read it without rankless."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any
from unittest import mock
from urllib.error import HTTPError

from campaigns.common import state
from campaigns.common.state import ViolationError
from campaigns.objects.readers import Reader
from rankless.run import cleanup, object_removal
from rankless.storage.object_path import ObjectPath

#: How often a list is compared with its objects, and the seconds between.
_LOOKS, _LOOK_SECONDS = 60, 0.5


@dataclass(frozen=True)
class Run:
    """A run at the server itself: its path, and a reader of its bucket."""

    path: ObjectPath
    reader: Reader

    def list_names(self, folder: str = "") -> list[str]:
        """Return the names of all objects below a folder of the run, relative to the run."""
        begin = f"{self.path.key}/"
        return [key.removeprefix(begin) for key in self.reader.list_keys(f"{begin}{folder}/" if folder else begin)]

    def read(self, name: str) -> bytes:
        """Download an object of the run."""
        return self.reader.read(f"{self.path.key}/{name}")


def read_checkpoints(run: Run) -> tuple[dict[str, int], str]:
    """Download all checkpoints that a tag names. Raises ``ViolationError`` if one is not whole.

    Returns the step of each, and the tag of the latest; an empty text if there is none. A job may save meanwhile: if
    tags have other checkpoints now than at the beginning, all are downloaded again.
    """
    while True:
        tags = _read_tags(run)
        try:
            return _read_tagged(run, tags), max(tags, key=lambda name: tags[name].age, default="")
        except ViolationError:
            if _read_tags(run) == tags:
                raise


def _read_tagged(run: Run, tags: Mapping[str, _Tag]) -> dict[str, int]:
    """Download the checkpoints of tags. Return the step of each."""
    with tempfile.TemporaryDirectory() as copy:
        for tag in tags.values():
            for name in run.list_names(tag.folder):
                file = Path(copy) / tag.name / name.removeprefix(f"{tag.folder}/")
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(_read_needed(run, name))
        missing = tags.keys() - {entry.name for entry in Path(copy).iterdir()}
        if missing:
            raise ViolationError(f"the files of {sorted(missing)} in {run.path} are missing")
        return state.read_checkpoints(Path(copy))


def _read_needed(run: Run, name: str) -> bytes:
    try:
        return run.read(name)
    except HTTPError as error:
        raise ViolationError(f"{run.path}/{name} cannot be read: {error}") from error


@dataclass(frozen=True)
class _Tag:
    """A tag of a run, and the content of the pointer that counts: that with the highest number."""

    name: str
    number: int
    pointer: Mapping[str, Any]

    @property
    def folder(self) -> str:
        return f"{self.name}.{self.pointer['id']}"

    @property
    def age(self) -> tuple[int, float, str]:
        return self.pointer["sequence"], self.pointer["time"], self.pointer["id"]


def _read_tags(run: Run) -> Mapping[str, _Tag]:
    """Return the tags by name. Swift lists objects for a while after they were removed: then look again."""
    for _ in range(_LOOKS):
        try:
            return _read_listed_tags(run)
        except HTTPError as error:
            if error.code != HTTPStatus.NOT_FOUND:
                raise
            time.sleep(_LOOK_SECONDS)
    raise ViolationError(f"a pointer in {run.path} is listed, but missing, for {_LOOKS * _LOOK_SECONDS:.0f} s")


def _read_listed_tags(run: Run) -> Mapping[str, _Tag]:
    newest: dict[str, int] = {}
    for name in run.list_names(".tags"):
        _, tag, number = name.split("/")
        newest[tag] = max(newest.get(tag, 0), int(number))
    if not newest:
        return _read_whole_folders(run)
    return {tag: _Tag(tag, number, json.loads(run.read(f".tags/{tag}/{number}"))) for tag, number in newest.items()}


def _read_whole_folders(run: Run) -> Mapping[str, _Tag]:
    """Return the tags of a run without pointers: its folders with a manifest. Its first save has died."""
    tags: dict[str, _Tag] = {}
    for name in run.list_names():
        folder, _, file = name.partition("/")
        if file == "manifest.json":
            tag, _, folder_id = folder.rpartition(".")
            found = _Tag(tag, 0, {**json.loads(run.read(name)), "id": folder_id})
            tags[tag] = max(found, tags.get(tag, found), key=lambda each: each.age)
    return tags


def describe_tags(run: Run) -> list[str]:
    """Return the tags of a run, the oldest first: number, step, and place in the order of saves."""
    tags = sorted(_read_tags(run).values(), key=lambda tag: tag.age)
    return [f"{tag.name}/{tag.number}: step {tag.pointer['step']}, save {tag.pointer['sequence']}" for tag in tags]


def check_nothing_is_left(run: Run) -> None:
    """Clean up as if a day had passed. Raise ``ViolationError`` if anything but the checkpoints is left."""
    with mock.patch.object(object_removal, "ABANDONED_SECONDS", -60.0):  # the clocks of hosts may differ
        cleanup.clean_up(run.path, with_whole=True)
    folders = {tag.folder for tag in _read_tags(run).values()}
    names = {name.partition("/")[0] for name in run.list_names()} - {".tags", ".journal", ".history"}
    uploads = [str(upload.path) for upload, _ in run.path.store.list_uploads(run.path)]
    if names != folders or uploads:
        raise ViolationError(f"after a clean-up, {run.path} has {sorted(names)} for {sorted(folders)}, and {uploads}")
