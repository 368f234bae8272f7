"""The history of a run directory as a graph of the terminal, and as JSON, for ``rankless ls --tree``.

:mod:`rankless.cli.ls` calls it. Programs read the JSON: keys keep their names.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from rankless.cli.format_incarnation import describe_base, describe_incarnation, incarnation_record
from rankless.cli.run_listing import RUN_CHARACTERS, RunListing
from rankless.cli.tree_rows import TreeRow, plan_rows
from rankless.observe.terminal import escape_control_characters
from rankless.observe.units import format_count, format_time
from rankless.run.checkpoint_info import CheckpointInfo
from rankless.run.history_tree import Incarnation, RunTree, build_trees
from rankless.run.records_folder import FOLDER
from rankless.run.stored_history import ShownHistory, read_entries

#: The columns that are drawn: columns further to the right are drawn in the last one.
_MAX_COLUMNS = 12

#: So many incarnations are named one by one; of more, the first and the last one.
_PAIR = 2

#: The widest tag after which times are aligned.
_MAX_TAG_WIDTH = 40


class _Symbols(NamedTuple):
    line: str
    fork: str
    current: str
    abandoned: str
    quiet: str


_ASCII = _Symbols("| ", "|\\", "* ", "o ", ": ")
_UNICODE = _Symbols("│ ", "├─╮", "● ", "○ ", "┊ ")


@dataclass(frozen=True)
class TreeListing:
    """The trees of the runs in a directory, and the entries that they were made from."""

    trees: Sequence[RunTree]
    history: ShownHistory
    empty_runs: int

    @classmethod
    def of(cls, path: Path, checkpoints: Sequence[CheckpointInfo]) -> TreeListing:
        """Read the entries of the history of a run directory with these checkpoints."""
        history = read_entries(path, {info.incarnation for info in checkpoints})
        runs = {entry.run for entry in history.entries if entry.run} - {info.run for info in checkpoints}
        return cls(build_trees(history.entries, checkpoints), history, len(runs))

    def print_graph(self, out: Console, listing: RunListing) -> None:
        """Print the graph, and the checkpoints that it lacks. ``listing`` is the list of the same checkpoints."""
        symbols = _ASCII if out.options.ascii_only else _UNICODE
        for tree in self.trees:
            width = max((cell_len(_format_tag(info)) for info in _checkpoints_of(tree)), default=0)
            out.print(Text(_describe_run(tree), "bold"))
            for row in plan_rows(tree):
                for line in _draw_row(row, tree, symbols, listing, min(width, _MAX_TAG_WIDTH)):
                    out.print(line)
        for note in self._describe_gaps(listing.path):
            out.print(escape_control_characters(note), style="dim")

    def _describe_gaps(self, path: Path) -> Iterator[str]:
        if not self.history.entries and not self.history.unreadable:
            yield f"{path} has no history: no checkpoint is known to be abandoned, and no job is known"
        if self.empty_runs:
            yield f"{format_count(self.empty_runs, 'more run')} without a checkpoint"
        if self.history.unreadable:
            count = f"{self.history.unreadable:,} of its entries in {FOLDER}"
            yield f"{count} cannot be read: their jobs are not known, nor all that they continued"
        if self.history.left_out:
            yield f"{self.history.left_out:,} older entries in {FOLDER} were not read"

    def as_record(self) -> dict[str, Any]:
        """Return the trees as JSON."""
        return {
            "runs": [
                {
                    "run": tree.run,
                    "newest": tree.newest,
                    "incarnations": [incarnation_record(one) for one in tree.incarnations],
                }
                for tree in self.trees
            ],
            "empty_runs": self.empty_runs,
            "unreadable_entries": self.history.unreadable,
            "entries_left_out": self.history.left_out,
        }


def _checkpoints_of(tree: RunTree) -> Iterator[CheckpointInfo]:
    for one in tree.incarnations:
        yield from one.checkpoints


def _format_tag(info: CheckpointInfo) -> str:
    return escape_control_characters(info.tag)


def _describe_run(tree: RunTree) -> str:
    run = escape_control_characters(tree.run[:RUN_CHARACTERS])
    return f"run {run}: {format_count(len(list(_checkpoints_of(tree))), 'checkpoint')}"


def _draw_row(row: TreeRow, tree: RunTree, symbols: _Symbols, listing: RunListing, width: int) -> Iterator[Text]:
    margin = symbols.line * min(row.depth, _MAX_COLUMNS)
    if row.kind == "fork":
        yield Text(margin + symbols.fork, "dim")
    elif row.kind == "quiet":
        for text in _describe_quiet(row.incarnations):
            yield Text.assemble((margin + symbols.quiet, "dim"), (text, "dim"))
    elif row.checkpoint is None:
        (one,) = row.incarnations
        texts = [describe_incarnation(one), describe_base(one), _describe_lack(one, tree)]
        yield Text.assemble((margin + symbols.line, "dim"), "; ".join(filter(None, texts)))
    else:
        yield _draw_checkpoint(row.checkpoint, margin, symbols, listing, width)


def _draw_checkpoint(info: CheckpointInfo, margin: str, symbols: _Symbols, listing: RunListing, width: int) -> Text:
    tag = _format_tag(info)
    marks = [
        *(["latest"] if info is listing.checkpoints[-1] and info.is_current else []),
        *(["best"] if info.tag == listing.best else []),
        *(["abandoned"] if not info.is_current else []),
        *map(escape_control_characters, listing.aliases_of(info)),
    ]
    style = "green" if info.is_current else "yellow"
    text = Text.assemble(
        (margin, "dim"),
        (symbols.current if info.is_current else symbols.abandoned, style),
        tag + " " * max(0, width - cell_len(tag)),
        f"  {format_time(info.time)}  ",
        (", ".join(marks), style),
    )
    text.rstrip()
    return text


def _describe_lack(one: Incarnation, tree: RunTree) -> str:
    """Return why an incarnation that has a row has no checkpoint; empty if it has some, or if that is not known."""
    if one.checkpoints:
        return ""
    if one.number == tree.newest:
        return "has no checkpoint yet"
    return "saved nothing" if one.is_empty else ""


def _describe_quiet(incarnations: Sequence[Incarnation]) -> Iterator[str]:
    empty = [one for one in incarnations if one.is_empty]
    others = [one for one in incarnations if not one.is_empty]
    for some, text in ((empty, "saved nothing"), (others, "have no checkpoint")):
        if len(some) == 1:
            lack = text if some is empty else "has no checkpoint"
            yield "; ".join(filter(None, [describe_incarnation(some[0]), describe_base(some[0]), lack]))
        elif some:
            to = "and" if len(some) == _PAIR else "to"
            yield f"{len(some):,} jobs that {text}: incarnations {some[0].number} {to} {some[-1].number}"
