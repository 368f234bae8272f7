"""``rankless follow``: keeps a folder at the newest version of published weights.

An operator runs it next to an inference engine, in one process for each folder. It imports no torch.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rankless.cli.command_process import leave_on_interrupt
from rankless.cli.output import print_json, print_warning
from rankless.errors import InvalidArgumentError, NoCheckpointError, RanklessError, StateError
from rankless.observe.terminal import escape_control_characters, terminal_console
from rankless.observe.units import format_seconds, format_size
from rankless.storage.location import parse_location
from rankless.weights.choose_version import choose_version

if TYPE_CHECKING:
    from rankless.weights.followed_folder import FollowedFolder, FollowedVersion

#: The most seconds between two attempts after an error.
_LONGEST_WAIT = 60.0

#: The most seconds between two looks: a day.
_LONGEST_POLL = 86_400


def follow(  # noqa: PLR0917 - options of the command
    weights: Annotated[str, typer.Argument(metavar="WEIGHTS", help="A weights directory, or its URL.")],
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="The folder to keep at the newest version.")],
    once: Annotated[bool, typer.Option("--once", help="Go to the newest version, and end.")] = False,
    command: Annotated[
        str | None,
        typer.Option(
            "--exec", metavar="CMD", help="Run this after each new version, with its folder as last argument."
        ),
    ] = None,
    seconds: Annotated[float, typer.Option("--poll", metavar="SECONDS", help="How often to look.")] = 1.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print a line of JSON for each version.")] = False,
) -> None:
    """Keep a folder at the newest version of published weights, until Ctrl-C.

    FOLDER/current leads to a folder with whole files, byte for byte those that save_model would have written. The link
    changes when every block is proven, so a reader sees the old version or the new one. The version before stays until
    the next one. If a version cannot be followed, the error is printed, and the next look tries again. CMD gets the
    version and its step as RANKLESS_VERSION and RANKLESS_STEP, too. Versions that are published while it runs are
    skipped, except for the newest. If CMD fails, that is printed, and it is not run again for this version; with --once
    the exit code is 1.
    """
    if not 0 < seconds <= _LONGEST_POLL:
        raise InvalidArgumentError(f"--poll must be above 0, and at most {_LONGEST_POLL}; got {seconds}")
    with leave_on_interrupt():  # NumPy is slow to import
        from rankless.weights.followed_folder import FollowedFolder  # noqa: PLC0415
    directory = parse_location(weights)
    arguments = None if command is None else _split(command)
    with FollowedFolder(parse_location(folder).absolute()) as followed:
        if once:
            _follow_once(directory, followed, arguments, as_json=as_json)
        wait, has_said = seconds, False
        while True:
            version = None
            try:
                version = go_to_newest(directory, followed, as_json=as_json)
                wait = seconds
                if followed.current is None and not has_said:
                    print_warning(f"there is no published version in {directory} yet: waiting for the first one")
                    has_said = True
            except (InvalidArgumentError, StateError):
                raise
            except (RanklessError, OSError) as error:
                print_warning(f"the folder stays as it is: {error}")
                wait = min(2 * wait, _LONGEST_WAIT)
            if version is None:
                time.sleep(wait)
            elif arguments is not None:
                _run(arguments, version)


def _follow_once(directory: Path, followed: FollowedFolder, command: list[str] | None, *, as_json: bool) -> None:
    version = go_to_newest(directory, followed, as_json=as_json)
    if followed.current is None:
        raise NoCheckpointError(f"there is no published version in {directory}")
    if version is None and not as_json:
        terminal_console().print(f"version {followed.current.number} is there already, and the newest", highlight=False)
    has_failed = version is not None and command is not None and not _run(command, version)
    raise typer.Exit(1 if has_failed else 0)


def _split(command: str) -> list[str]:
    try:
        arguments = shlex.split(command)
    except ValueError as error:
        raise InvalidArgumentError(f"--exec: {command!r} is no command: {error}") from error
    if not arguments or shutil.which(arguments[0]) is None:
        raise InvalidArgumentError(f"--exec: there is no program {command!r}")
    return arguments


def go_to_newest(directory: Path, followed: FollowedFolder, *, as_json: bool) -> FollowedVersion | None:
    """Go to the newest version, and print it; ``None`` if the folder has it."""
    followed.hold()
    newest = choose_version(directory, followed.current)
    if not followed.is_removed() and newest <= (0 if followed.current is None else followed.current.number):
        return None
    began = time.perf_counter()
    version = followed.update(directory, newest)
    _print_version(version, time.perf_counter() - began, as_json=as_json)
    return version


def _run(command: list[str], version: FollowedVersion) -> bool:
    """Run the caller's program after a version. Warn, and return false, if it fails: it is not run again."""
    manifest = version.manifest
    step = "" if manifest.step is None else str(manifest.step)
    environment = {**os.environ, "RANKLESS_VERSION": str(manifest.number), "RANKLESS_STEP": step}
    arguments = [*command, str(version.folder)]
    try:
        status = subprocess.run(arguments, env=environment, check=False).returncode  # noqa: S603 - the caller named it
    except OSError as error:
        print_warning(f"{shlex.join(command)} could not be run after version {manifest.number}: {error}")
        return False
    if status:
        print_warning(f"{shlex.join(command)} has ended with status {status} after version {manifest.number}")
    return not status


def _print_version(version: FollowedVersion, seconds: float, *, as_json: bool) -> None:
    manifest, route = version.manifest, version.route
    if as_json:
        print_json(
            {
                "version": manifest.number,
                "id": manifest.id,
                "step": manifest.step,
                "folder": str(version.folder),
                "read_bytes": route.nbytes,
                "verified_bytes": version.verified_bytes,
                "from": None if route.anchor else route.start.number,
                "seconds": seconds,
            }
        )
        return
    deltas = f"deltas since version {route.start.number}"
    way = f"anchor {route.start.number}{', and deltas' if route.steps else ''}" if route.anchor else deltas
    step = "" if manifest.step is None else f", step {manifest.step}"
    read, proven = format_size(route.nbytes), format_size(version.verified_bytes)
    terminal_console().print(
        f"version {manifest.number}{step}: read {read} ({way}), verified {proven} in {format_seconds(seconds)}: "
        f"{escape_control_characters(str(version.folder))}",
        highlight=False,
    )
