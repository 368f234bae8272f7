"""Names, sizes and contents that another host has just changed; results of renames and removals."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from campaigns.hosts.testbed import Testbed, mount_point
from campaigns.hosts.workers import Worker

#: How long a client looks for a change, in seconds. Attributes of directories are cached for up to 60 by default.
_PATIENCE = 75.0

#: A way of looking begins with this if it lists the run's folder first.
_LISTED = "listdir, then "

_NOREPLACE, _EXCHANGE = 1, 2
_AT_FDCWD = -100
_libc = ctypes.CDLL(None, use_errno=True)
_OPEN: dict[str, int] = {}


def name_of(code: int | None) -> str:
    """Return the name of an error number."""
    return errno.errorcode.get(code or 0, str(code))


def attempt(function: Callable[..., Any], *args: Any) -> str:
    """Return ``"done"``, or the name of the error."""
    try:
        function(*args)
    except OSError as error:
        return name_of(error.errno)
    return "done"


def renameat2(source: Path, target: Path, flags: int) -> str:
    """Call ``renameat2``. Return ``"done"``, or the name of the error."""
    if _libc.renameat2(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), flags):
        return name_of(ctypes.get_errno())
    return "done"


def make_folder(path: Path, text: str = "new") -> None:
    """Create a directory with one file."""
    path.mkdir()
    with (path / "file").open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def look(path: Path, how: str) -> str:
    """Look at a path once. Return what is seen.

    ``how`` may begin with a look at the names of the run's folder, which is the parent of ``path`` or of its folder.
    """
    try:
        if how.startswith(_LISTED):
            how = how.removeprefix(_LISTED)
            list((path.parents[1] if path.name == "file" else path.parent).iterdir())
        if how == "stat":
            status = path.stat()
            return f"size {status.st_size}" if stat.S_ISREG(status.st_mode) else "there"
        if how == "open":
            return path.read_text()
        return "there" if path in path.parent.iterdir() else "ENOENT"
    except OSError as error:
        return name_of(error.errno)


def wait_to_see(path: Path, how: str, expected: str, pause: float = 0.05) -> str:
    """Look until the expected is seen. Return the seconds that it took, and what was seen at first."""
    started, first = time.monotonic(), ""
    while time.monotonic() < started + _PATIENCE:
        seen = look(path, how)
        first = first or seen
        if seen == expected:
            return f"{time.monotonic() - started:.1f} s" + (f" (first: {first})" if first != expected else "")
        time.sleep(pause)
    return f"not within {_PATIENCE:.0f} s ({seen})"


def keep_open(path: Path, name: str) -> None:
    """Open a file to read, and keep it open."""
    _OPEN[name] = os.open(path, os.O_RDONLY)


def read_open(name: str) -> str:
    """Read a file that is kept open, past the cache. Return its text, or the name of the error."""
    try:
        os.posix_fadvise(_OPEN[name], 0, 0, os.POSIX_FADV_DONTNEED)
        return os.pread(_OPEN[name], 100, 0).decode()
    except OSError as error:
        return name_of(error.errno)


def overwrite(path: Path, text: str) -> None:
    """Replace a small file's text in place."""
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def hidden_files(folder: Path) -> list[str]:
    """Return the names of files that the NFS client keeps because they are open."""
    with suppress(FileNotFoundError):
        return [path.name for path in folder.iterdir() if path.name.startswith((".nfs", ".fuse_hidden"))]
    return []


def run(testbed: Testbed, kinds: list[str], report: Callable[[str], None]) -> None:
    """Ask all questions on each kind of mount."""
    for kind in kinds:
        base = mount_point(kind) / f"names-{kind}"
        with testbed.clients[0].worker() as writer, testbed.clients[1].worker() as reader:
            writer.call(Path.mkdir, base)
            for questions in (_renames, _appearances, _changes, _removals):
                for question, answer in questions(writer, reader, base):
                    report(f"{kind} | {question} | {answer}")


def _renames(writer: Worker, _reader: Worker, base: Path) -> list[tuple[str, str]]:
    answers = []
    for name in ("a", "b", "empty"):
        writer.call(make_folder if name != "empty" else Path.mkdir, base / name)
    call = lambda *args: writer.call(renameat2, *args)  # noqa: E731
    answers.append(("RENAME_NOREPLACE to a free name", call(base / "a", base / "free", _NOREPLACE)))
    answers.append(("RENAME_NOREPLACE to a taken name", call(base / "b", base / "empty", _NOREPLACE)))
    writer.call(make_folder, base / "c")
    answers.append(("RENAME_EXCHANGE of two folders", call(base / "b", base / "c", _EXCHANGE)))
    answers.append(("rename to a folder with entries", writer.call(attempt, os.rename, base / "b", base / "c")))
    answers.append(("rename to an empty folder", writer.call(attempt, os.rename, base / "b", base / "empty")))
    answers.append(("rename to a free name", writer.call(attempt, os.rename, base / "c", base / "d")))
    answers.append(("hard link", writer.call(attempt, os.link, base / "d/file", base / "d/link")))
    return answers


def _appearances(writer: Worker, reader: Worker, base: Path) -> list[tuple[str, str]]:
    answers = []
    for how in ("stat", "open", "listdir", f"{_LISTED}stat", f"{_LISTED}open"):
        for before in ("never looked", "looked before"):
            final, staging = base / f"tag-{how}-{before}", base / f".staging-{how}-{before}"
            path = final / "file" if how.endswith("open") else final
            writer.call(make_folder, staging)
            if before == "looked before":
                reader.call(look, path, how)
                reader.call(look, path, how)
            writer.call(os.rename, staging, final)
            expected = "new" if how.endswith("open") else "there"
            answers.append(
                (f"{how} of a folder renamed to its name, {before}", reader.call(wait_to_see, path, how, expected))
            )
    return answers


def _changes(writer: Worker, reader: Worker, base: Path) -> list[tuple[str, str]]:
    answers = []
    for how, old, new in (("open", "new", "newer"), ("stat", "size 3", "size 5")):
        folder = base / f"changed-{how}"
        writer.call(make_folder, folder)
        reader.call(wait_to_see, folder / "file", how, old)
        writer.call(overwrite, folder / "file", "newer")
        answers.append((f"{how} of a file overwritten in place", reader.call(wait_to_see, folder / "file", how, new)))
    for how, new in (("open", "newer"), ("stat", "size 5"), (f"{_LISTED}open", "newer")):
        old_folder, new_folder = base / f"tag2-{how}", base / f"new2-{how}"
        writer.call(make_folder, old_folder)
        writer.call(make_folder, new_folder, "newer")
        reader.call(look, old_folder / "file", how)
        reader.call(keep_open, old_folder / "file", how)
        writer.call(os.rename, old_folder, base / f"old2-{how}")
        writer.call(os.rename, new_folder, old_folder)
        answers.append(
            (f"{how} in a folder replaced by two renames", reader.call(wait_to_see, old_folder / "file", how, new))
        )
        answers.append((f"read of the old file, kept open ({how})", reader.call(read_open, how)))
        writer.call(shutil.rmtree, base / f"old2-{how}")
        answers.append((f"the same after its removal ({how})", reader.call(read_open, how)))
    return answers


def _removals(writer: Worker, reader: Worker, base: Path) -> list[tuple[str, str]]:
    answers = []
    for how in ("stat", "open", "listdir"):
        folder = base / f"removed-{how}"
        path = folder / "file" if how == "open" else folder
        writer.call(make_folder, folder)
        reader.call(look, path, how)
        writer.call(shutil.rmtree, folder)
        answers.append((f"{how} of a removed folder", reader.call(wait_to_see, path, how, "ENOENT")))
    folder = base / "open-here"
    writer.call(make_folder, folder)
    writer.call(keep_open, folder / "file", "here")
    answers.append(("rmtree, a file open on the same host", writer.call(attempt, shutil.rmtree, folder)))
    answers.append(("files left by that", str(writer.call(hidden_files, folder))))
    answers.append(("read of that file", writer.call(read_open, "here")))
    folder = base / "open-there"
    writer.call(make_folder, folder)
    reader.call(keep_open, folder / "file", "there")
    answers.append(("rmtree, a file open on another host", writer.call(attempt, shutil.rmtree, folder)))
    answers.append(("read of that file there", reader.call(read_open, "there")))
    return answers
