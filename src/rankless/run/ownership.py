"""Proof of ownership: only the files that an output is known to consist of are replaced or removed.

A user may keep anything at a path that a save is given, and put anything into a checkpoint. So all code that replaces
or removes a path asks first: the reader of a format that the caller may replace must name every file there. For
example, a checkpoint folder with the user's ``notes.txt`` is not replaced. Saves, drains, retention, components, DCP,
Lightning and exports all ask here, so that none of them forgets it.

Rank 0 asks in the first vote of a save, and again in the commit, after an exchange of names; clean-ups and retention
ask before and after their renames. A path without proof must count as foreign.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from rankless.errors import CorruptCheckpointError, FormatError, NoCheckpointError, StorageError, TagExistsError
from rankless.formats.native import is_native, read_manifest
from rankless.ondisk import manifest
from rankless.ondisk.hidden_names import REMOVED, STATISTICS
from rankless.storage import directory_trees, posix
from rankless.storage.store import store_of

#: Whether a path is an output of one format, and the names of its files in it; ``None`` if it is none. ``tag`` is the
#: name that it must have been saved with, or "" for any.
_Proof = Callable[[Path, str], "frozenset[str] | None"]

#: The most looks at a path that other jobs replace or remove meanwhile.
_LOOKS = 100


def _checkpoint_files(path: Path, tag: str) -> frozenset[str] | None:
    """Prove a checkpoint of rankless by its manifest: one that was renamed or copied is the user's own."""
    if not is_native(path):
        return None
    found = read_manifest(path)
    return frozenset({manifest.NAME, STATISTICS, REMOVED, *found.files}) if tag in {"", found.tag} else None


def _unfinished_files(path: Path, tag: str) -> frozenset[str] | None:
    """Prove objects of a save that has no manifest yet, or none any more: a file of tensors has our checksums in it.

    A save writes the files of tensors first, so JSON files next to one are its own, too. Marks are known by name.
    """
    from rankless.formats.safetensors import has_our_checksums  # noqa: PLC0415 - as below

    del tag
    if not store_of(path).is_remote or is_native(path):
        return None
    names, marks = store_of(path).list_entries(path).keys(), frozenset({STATISTICS, REMOVED})
    tensors = {name for name in names if name.endswith(".safetensors") and has_our_checksums(path / name)}
    return marks.union(tensors, (name for name in names if name.endswith(".json"))) if tensors else marks


def _busy_error(path: Path) -> StorageError:
    return StorageError(errno.EBUSY, f"other jobs replace {path} all the time: choose another path")


def _export_files(path: Path, tag: str) -> frozenset[str] | None:
    """Prove weights in the Hugging Face layout that rankless has written: each file has our checksums in it."""
    from rankless.formats.huggingface import find_exported_files  # noqa: PLC0415 - few saves replace an export

    del tag
    return find_exported_files(path)


def _tensor_file(path: Path, tag: str) -> frozenset[str] | None:
    """Prove a file of safetensors or of ``torch.save`` by its content, or an empty one: the caller has named it."""
    from rankless.formats.safetensors import is_safetensors  # noqa: PLC0415 - as above
    from rankless.formats.torch_file import is_saved_by_torch  # noqa: PLC0415 - as above

    del tag
    if not store_of(path).is_file(path):
        return None
    is_proven = store_of(path).file_size(path) == 0 or is_safetensors(path) or is_saved_by_torch(path)
    return frozenset({""}) if is_proven else None


def _proof_of(name: str) -> _Proof:
    """Return the proof of a format that belongs to one framework. Its package is imported when it is needed."""

    def find_files(path: Path, tag: str) -> frozenset[str] | None:
        from rankless.formats.registry import PROOFS, load_attribute  # noqa: PLC0415 - as above

        del tag
        found: frozenset[str] | None = load_attribute(PROOFS[name])(path)
        return found

    return find_files


#: The proof of each kind of output.
_PROOFS: Mapping[str, _Proof] = {
    "checkpoint": _checkpoint_files,
    "unfinished": _unfinished_files,
    "export": _export_files,
    "file": _tensor_file,
    "scheduler": _proof_of("scheduler"),
    "dcp": _proof_of("dcp"),
    "lightning": _proof_of("lightning"),
    "fabric": _proof_of("fabric"),
}


class SortedObjects(msgspec.Struct, frozen=True):
    """The names of the objects below a path in an object store: the objects of an output of ours, and other objects."""

    owned: frozenset[str]
    foreign: frozenset[str]


class Replaceable(msgspec.Struct, frozen=True):
    """The outputs that may be at a path that is replaced or removed: outputs of some kinds, and nothing else.

    ``kinds`` are keys of the table of proofs. ``tag``: the name of a checkpoint of rankless; "" for any. ``text`` names
    the expected output in messages.
    """

    kinds: tuple[str, ...]
    text: str
    tag: str = ""

    def find_foreign(self, path: Path) -> str | None:
        """Return the first name in ``path`` that is no file of such an output, or "" for the path itself.

        ``None`` if everything is: also if there is nothing, an empty folder, or a link to such an output, as only the
        link is lost then. Raises ``StorageError`` if that cannot be found out.
        """
        if store_of(path).is_remote:
            return min(self.sort_objects(path).foreign, default=None)
        for _ in range(_LOOKS):
            identity = posix.identify(path)
            try:
                foreign = self._find_foreign_file(path)
            except StorageError:
                if posix.identify(path) == identity:
                    raise
            else:
                # Another job may have put its output there after the files of the previous one were listed.
                if foreign is None or posix.identify(path) == identity:
                    return foreign
        raise _busy_error(path)

    def _find_foreign_file(self, path: Path) -> str | None:
        if not posix.path_exists(path):
            return None
        if posix.is_link(path):
            return None if self._prove(path.resolve(), "") else ""  # a folder of DCP's may have no file at all
        names = directory_trees.list_tree(path)
        if not names:
            return None
        owned = self._prove(path, self.tag)
        return min(names if owned is None else names - owned, default=None)

    def sort_objects(self, path: Path) -> SortedObjects:
        """Return the names of the objects below a path: the files of such an output, and all others.

        Raises ``StorageError`` if other jobs change them all the time.
        """
        store = store_of(path)
        versions = store.list_entries(path)
        for _ in range(_LOOKS):
            names = frozenset(versions)
            owned = (self._prove(path, self.tag) if names else None) or frozenset()
            # Another job may have removed or replaced its output after the objects were listed.
            if names <= owned or versions == (versions := store.list_entries(path)):
                return SortedObjects(names & owned, names - owned)
        raise _busy_error(path)

    def _prove(self, path: Path, tag: str) -> frozenset[str] | None:
        for kind in self.kinds:
            try:
                owned = _PROOFS[kind](path, tag)
            except (CorruptCheckpointError, FormatError, NoCheckpointError):
                continue
            if owned is not None:
                return owned
        return None

    def check(self, path: Path) -> None:
        """Raise ``TagExistsError``, naming the first file, if something at ``path`` is no file of such an output."""
        for _ in range(_LOOKS):
            foreign = self.find_foreign(path)
            if foreign is None:
                return
            with suppress(NoCheckpointError):  # another job has replaced or removed it since: look again
                what = self._describe(path, foreign)
                hint = "nothing else is replaced or removed: choose another name, or move it away"
                raise TagExistsError(f"{what}; {hint}")
        raise _busy_error(path)

    def _describe(self, path: Path, foreign: str) -> str:
        if foreign == manifest.NAME:
            return _describe_manifest(path)
        return f"{path / foreign} is no file of {self.text}" if foreign else f"{path} is not {self.text}"


def _describe_manifest(path: Path) -> str:
    """Return why a folder with a manifest is not the checkpoint that a save may replace."""
    try:
        read_manifest(path)
    except (CorruptCheckpointError, FormatError) as error:
        return f"it is not known what {path} is: {error}"
    return f"{path} was saved under another name, and then renamed or copied"


def checkpoint_of(tag: str) -> Replaceable:
    """Return the rule for saves and retention: they may replace or remove a checkpoint that has this tag."""
    return Replaceable(("checkpoint", "unfinished"), "a checkpoint of rankless", tag)


#: The objects of a save in its own folder in an object store, whether it has ended or not.
SAVED_FOLDER = checkpoint_of("")


#: The outputs that :class:`rankless.dcp.FileSystemWriter` replaces.
DCP_FOLDER = Replaceable(("dcp",), "a checkpoint of torch.distributed.checkpoint")

#: The outputs that an export of weights in place of a folder replaces.
EXPORT = Replaceable(("export",), "an export of weights by rankless")


def replaced_by_export(tag: str) -> Replaceable:
    """Return the rule for an export in place of a step: it replaces an earlier export, or a checkpoint of this tag."""
    return Replaceable(("export", "checkpoint", "unfinished"), "an export or a checkpoint of rankless", tag)


#: The outputs that a save of one component into one file replaces.
COMPONENT_FILE = Replaceable(("file", "scheduler"), "a file of safetensors, of torch.save or of a scheduler")
