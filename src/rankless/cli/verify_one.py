"""The verification of one checkpoint, which reports all problems, not only the first.

``rankless verify``, ``rollback`` and ``report`` call it, in one process. Scripts read the status: its words must stay.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import rankless
from rankless.cli.command_process import leave_on_interrupt
from rankless.cli.output import format_error_message
from rankless.errors import CorruptCheckpointError, NoCheckpointError, RanklessError
from rankless.inspection.inspected_checkpoint import InspectedCheckpoint, describe_unread, inspect_exact_path
from rankless.observe.terminal import show_progress
from rankless.storage.links_and_clones import own_bytes
from rankless.storage.store import store_of

#: The group with the folder that transformers opens, and the file that it prefers if it exists.
_MODEL, _FIRST = "model", "model.safetensors"

#: If this file exists, ``from_pretrained`` loads an adapter and the base weights that it names.
_ADAPTER = "adapter_config.json"

#: The suffixes of weight files and their indexes.
_ENDINGS = (".safetensors", ".bin", ".index.json", ".pt", ".pth")


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyResult:
    """The result of the verification of one checkpoint.

    ``status`` is ``"damaged"`` if something is corrupt, ``"unchecked"`` if all could be read but not all of it has
    checksums, and ``"unreadable"`` if it could not be opened for another reason than corruption. ``tensors`` and
    ``bytes`` count the intact tensors, which were read in ``seconds``; ``checksummed`` is the number of tensors with
    checksums. ``own_bytes`` is the disk space that no other file shares. ``problems`` name files and tensors.
    ``notes`` name files that do not belong to the checkpoint, and facts that could not be proven.
    """

    path: str
    status: Literal["verified", "unchecked", "damaged", "unreadable"]
    tensors: int = 0
    checksummed: int = 0
    bytes: int = 0
    own_bytes: int = 0
    seconds: float = 0.0
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """``True`` if there are no problems."""
        return not self.problems


def _count_own_bytes(target: InspectedCheckpoint, intact: int) -> int:
    """Return the bytes that a checkpoint takes in addition to others: a published version names its own files."""
    written: int | None = getattr(target.reader, "written_bytes", None)
    if written is not None:
        return written
    return intact if store_of(target.path).is_remote else own_bytes(target.path)


def verify_checkpoint(path: Path) -> VerifyResult:
    """Read every byte of a checkpoint, and check it. Raises ``NoCheckpointError`` if it does not exist."""
    try:
        target = inspect_exact_path(path)
    except NoCheckpointError:
        raise
    except CorruptCheckpointError as error:
        return VerifyResult(path=str(path), status="damaged", problems=tuple(_find_corruption(path, error)))
    except RanklessError as error:
        return VerifyResult(
            path=str(path), status="unreadable", problems=tuple(format_error_message(error).splitlines())
        )
    with leave_on_interrupt():  # imports NumPy, which is not part of the progress
        checkpoint = rankless.Checkpoint(target.reader)
    with show_progress(f"verifying {path.name}", target.nbytes) as done:
        started = time.perf_counter()
        tally = _check_tensors(checkpoint, done)
        seconds = time.perf_counter() - started
    checksummed = target.tensor_count - len(tally.unchecked)
    return VerifyResult(
        path=str(path),
        status="damaged" if tally.problems else "unchecked" if tally.unchecked else "verified",
        tensors=len(tally.intact),
        checksummed=checksummed,
        bytes=sum(tally.intact.values()),
        own_bytes=_count_own_bytes(target, sum(tally.intact.values())),
        seconds=seconds,
        problems=tuple(tally.problems),
        notes=(
            *(note for note in target.notes if note not in describe_unread(target.reader)),
            *_list_unnamed_weights(target),
            *getattr(target.reader, "unproven", ()),  # formats without checks of their own
        ),
    )


def _find_corruption(path: Path, error: CorruptCheckpointError) -> list[str]:
    with leave_on_interrupt():
        from rankless.load.checkpoint_verification import find_all_corruption  # noqa: PLC0415 - NumPy is slow to import
    return find_all_corruption(path, error)


@dataclass(frozen=True)
class _Tally:
    """The sizes of intact tensors, the names of those without checksums, and all problems, each once."""

    intact: dict[str, int]
    unchecked: set[str]
    problems: list[str]


def _check_tensors(checkpoint: rankless.Checkpoint, done: Callable[[int], None]) -> _Tally:
    sizes: Counter[str] = Counter()
    corrupt: set[str] = set()
    unchecked: set[str] = set()
    problems: dict[str, None] = {}
    for name, nbytes, problem, checked in checkpoint.verify():
        done(nbytes)
        if name:
            sizes[name] += nbytes
        if problem:
            if not name or name not in corrupt:  # one problem per tensor is enough
                problems[problem] = None
            corrupt.add(name)
        if not checked:
            unchecked.add(name)
    return _Tally({name: size for name, size in sizes.items() if name not in corrupt}, unchecked, list(problems))


def _list_unnamed_weights(checkpoint: InspectedCheckpoint) -> Iterator[str]:
    """Describe the weight files in the folders of the models that the manifest does not name."""
    if checkpoint.manifest is None:
        return
    names = checkpoint.manifest.files
    folders = {Path(name).parent for name in names if name.endswith(".safetensors") and name.startswith(_MODEL)}
    for folder in sorted(folders - {Path()}):
        for file in _list_files(checkpoint.path / folder):
            if str(folder / file.name) not in names and (file.name.endswith(_ENDINGS) or file.name == _ADAPTER):
                yield f"{file} is not part of this checkpoint: its manifest does not name it{_describe_effect(file)}"


def _list_files(folder: Path) -> list[Path]:
    return store_of(folder).list_files(folder)


def _describe_effect(file: Path) -> str:
    if file.name in {_FIRST, _ADAPTER}:
        return "; transformers loads it instead of the verified weights"
    if file.name == f"{_FIRST}.index.json":
        return "; tools that read this index load other weights than the verified ones"
    return ""
