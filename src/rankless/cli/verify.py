"""``rankless verify``: reads every byte and checks every CRC.

It only reads, in one process. The exit code is an interface: scripts use it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from rankless.cli import checkpoint_argument
from rankless.cli.command_process import leave_on_interrupt
from rankless.cli.completion import complete_checkpoints
from rankless.cli.output import print_json
from rankless.cli.verify_one import VerifyResult, verify_checkpoint
from rankless.errors import CheckpointReplacedError, InvalidArgumentError, NoCheckpointError
from rankless.formats.detect import is_checkpoint
from rankless.formats.weights.version_files import list_numbers, manifest_path
from rankless.inspection import inspected_checkpoint
from rankless.observe.terminal import escape_control_characters, terminal_console
from rankless.observe.units import format_count, format_rate, format_seconds, format_size

#: How often a run is listed again if its checkpoints are removed while they are read.
_ATTEMPTS = 100

#: The maximum number of problems that are printed per checkpoint.
_MAX_SHOWN = 20


def verify(
    checkpoint: Annotated[
        str,
        typer.Argument(
            metavar="CKPT|RUN",
            help="A checkpoint, or a run's folder for its latest one.",
            autocompletion=complete_checkpoints,
        ),
    ],
    check_all: Annotated[bool, typer.Option("--all", "-a", help="Verify every checkpoint of the run.")] = False,
    tag: checkpoint_argument.Tag = None,
    local: checkpoint_argument.Local = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Read every byte of a checkpoint, check every CRC, and name everything that is corrupt.

    The exit code is 1 if something is corrupt. Checkpoints of the run with a corrupt manifest are always named. Files
    of torch.save and torch.distributed.checkpoint are compared with the CRCs in them, and those of rankless.dcp.
    With --local, verify all parts in the local tier of this host, and nothing in the run's folder.
    """
    if check_all and tag is not None:
        raise InvalidArgumentError("--all and --tag cannot be used together: leave one of them out")
    results = []
    if local is None:
        verified = _verify_all(checkpoint_argument.resolve_path(checkpoint, tag), check_all=check_all)
    else:
        verified = _verify_tier(checkpoint, local, tag)
    for result in verified:
        results.append(result)
        if not as_json:
            _print_result(result)
    ok = all(result.ok for result in results)
    if as_json:
        print_json({"ok": ok, "checkpoints": [asdict(result) for result in results]})
    raise typer.Exit(0 if ok else 1)


def _verify_tier(run: str, local: str, tag: str | None) -> Iterator[VerifyResult]:
    with leave_on_interrupt():
        from rankless.cli.tier.verify_local import verify_tier  # noqa: PLC0415 - NumPy is slow to import
    return verify_tier(run, local, tag)


def _verify_all(path: Path, *, check_all: bool) -> Iterator[VerifyResult]:
    """Verify the checkpoints of a path. Those that are removed meanwhile are skipped; if all are, list them again."""
    n_verified = 0
    for _ in range(_ATTEMPTS):
        for checkpoint_path in _paths_to_verify(path, check_all=check_all):
            with suppress(NoCheckpointError):
                yield verify_checkpoint(checkpoint_path)
                n_verified += 1
        if n_verified:
            return
    raise CheckpointReplacedError(
        f"the checkpoints in {path} are replaced or removed faster than one can be read: try again"
    )


def _paths_to_verify(path: Path, *, check_all: bool) -> list[Path]:
    """Return the checkpoints to verify. Those with a corrupt manifest are included: any of them may be the latest."""
    if check_all and (numbers := list_numbers(path)):
        return [manifest_path(path, number) for number in numbers]
    checkpoints = inspected_checkpoint.list_targets(path)
    if not checkpoints:
        return [path if is_checkpoint(path) else inspected_checkpoint.inspect_path(path).path]
    return [info.path for info in checkpoints if check_all or info.status != "complete" or info is checkpoints[-1]]


def _print_result(result: VerifyResult) -> None:
    out = terminal_console()
    out.print(escape_control_characters(result.path), end="  ")
    if result.ok:
        out.print(_status_text(result), style="bold green" if result.status == "verified" else "bold yellow")
    else:
        out.print(result.status, style="bold red")
    for problem in result.problems[:_MAX_SHOWN]:
        out.print(f"  {escape_control_characters(problem)}", style="red")
    if len(result.problems) > _MAX_SHOWN:
        out.print(
            f"  and {format_count(len(result.problems) - _MAX_SHOWN, 'more problem')}; --json lists all", style="red"
        )
    for note in result.notes:
        out.print(f"  {escape_control_characters(note)}", style="yellow")
    if result.status == "unchecked":
        out.print(f"  {_describe_unchecked(result)}", style="yellow")
    if result.seconds:
        out.print(f"  {_format_summary(result)}", style="dim")
    if result.own_bytes < result.bytes / 2:
        own = format_size(result.own_bytes)
        out.print(f"  it shares bytes with other checkpoints, and takes {own} by itself", style="dim")


def _status_text(result: VerifyResult) -> str:
    if result.status == "verified":
        return "verified"
    return "verified in part" if result.checksummed else "no checksums"


def _describe_unchecked(result: VerifyResult) -> str:
    if not result.checksummed:
        return "All of it can be read and its structure is intact, but its values cannot be verified."
    without = result.tensors - result.checksummed
    has, its = ("has", "its") if without == 1 else ("have", "their")
    total = format_count(result.tensors, "tensor")
    return f"{without:,} of {total} {has} no checksums: only {its} structure was checked."


def _format_summary(result: VerifyResult) -> str:
    intact = "" if result.ok else "intact "
    rate = format_rate(result.bytes, result.seconds)
    amount = f"{format_count(result.tensors, f'{intact}tensor')}, {format_size(result.bytes)}"
    return f"{amount} in {format_seconds(result.seconds)} ({rate})"
