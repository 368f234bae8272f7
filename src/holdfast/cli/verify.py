"""``holdfast verify``: read every byte and check every CRC."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli import target
from holdfast.cli.completion import complete_checkpoints
from holdfast.cli.output import format_count, print_json
from holdfast.cli.verify_one import VerifyResult, verify_checkpoint
from holdfast.errors import CheckpointReplacedError, InvalidArgumentError, NoCheckpointError
from holdfast.formats.detect import is_checkpoint
from holdfast.observe.terminal import escape_control_characters, terminal_console
from holdfast.observe.units import format_rate, format_seconds, format_size

#: How often a run is looked at again where its latest checkpoint goes.
_ATTEMPTS = 100

#: The most problems of one checkpoint that are printed.
_SHOWN = 20


def verify(
    checkpoint: Annotated[
        str,
        typer.Argument(
            metavar="CKPT|RUN", help="A checkpoint, or a run's folder: its latest.", autocompletion=complete_checkpoints
        ),
    ],
    check_all: Annotated[bool, typer.Option("--all", "-a", help="Every checkpoint of the run.")] = False,
    tag: target.Tag = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON, for programs.")] = False,
) -> None:
    """Read every byte of a checkpoint, check every CRC, and name all that is damaged.

    Exit code 1 if something is. A run's checkpoints with a damaged manifest are always named, too. Files of torch.save
    and of torch.distributed.checkpoint are compared with the CRCs that they have, and with those of holdfast.dcp.
    """
    if check_all and tag is not None:
        raise InvalidArgumentError(
            "--all reads every checkpoint of the run, --tag one of them: leave one of the two out"
        )
    verdicts = []
    for verdict in _verdicts(target.named_path(checkpoint, tag), check_all=check_all):
        verdicts.append(verdict)
        if not as_json:
            _print(verdicts[-1])
    ok = all(verdict.ok for verdict in verdicts)
    if as_json:
        print_json({"ok": ok, "checkpoints": [asdict(verdict) for verdict in verdicts]})
    raise typer.Exit(0 if ok else 1)


def _verdicts(path: Path, *, check_all: bool) -> Iterator[VerifyResult]:
    """What is removed before its turn is over is left out; where nothing is left, what is there then is looked at."""
    seen = 0
    for _ in range(_ATTEMPTS):
        for one in _paths(path, check_all=check_all):
            with suppress(NoCheckpointError):
                yield verify_checkpoint(one)
                seen += 1
        if seen:
            return
    raise CheckpointReplacedError(f"the checkpoints in {path} are replaced or removed faster than one can be read")


def _paths(path: Path, *, check_all: bool) -> list[Path]:
    """What to check; also checkpoints with a damaged manifest, as any of them may be the latest."""
    found = target.list_targets(path)
    if not found:
        return [path if is_checkpoint(path) else target.inspect_path(path).path]
    return [info.path for info in found if check_all or info.status != "complete" or info is found[-1]]


def _print(verdict: VerifyResult) -> None:
    out = terminal_console()
    out.print(escape_control_characters(verdict.path), end="  ")
    if verdict.ok:
        out.print(_word(verdict), style="bold green" if verdict.status == "verified" else "bold yellow")
    else:
        out.print(verdict.status, style="bold red")
    for problem in verdict.problems[:_SHOWN]:
        out.print(f"  {escape_control_characters(problem)}", style="red")
    if len(verdict.problems) > _SHOWN:
        out.print(
            f"  and {format_count(len(verdict.problems) - _SHOWN, 'more problem')}; --json names all", style="red"
        )
    for note in verdict.notes:
        out.print(f"  {escape_control_characters(note)}", style="yellow")
    if verdict.status == "unchecked":
        out.print(f"  {_reservation(verdict)}", style="yellow")
    if verdict.seconds:
        out.print(f"  {_summary(verdict)}", style="dim")


def _word(verdict: VerifyResult) -> str:
    if verdict.status == "verified":
        return "verified"
    return "verified in part" if verdict.checksummed else "no checksums"


def _reservation(verdict: VerifyResult) -> str:
    if not verdict.checksummed:
        return "All of it can be read and its structure is sound; whether the values are right cannot be told."
    without = verdict.tensors - verdict.checksummed
    return (
        f"{without:,} of {format_count(verdict.tensors, 'tensor')} {'has' if without == 1 else 'have'} no checksums: only "
        f"{'its' if without == 1 else 'their'} structure was checked."
    )


def _summary(verdict: VerifyResult) -> str:
    sound = "" if verdict.ok else " sound"
    rate = format_rate(verdict.bytes, verdict.seconds)
    read = f"{format_count(verdict.tensors, f'{sound} tensor'.strip())}, {format_size(verdict.bytes)}"
    return f"{read} in {format_seconds(verdict.seconds)} ({rate})"
