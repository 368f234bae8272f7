"""The judgement of a training: what its attempts have noted, and what its jobs have printed. Pure functions."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple


class Note(NamedTuple):
    """A line of the log: which attempt, what has happened, and the step, digest or name."""

    attempt: str
    kind: str
    value: Any


class Attempt(NamedTuple):
    """An attempt: the step from which it went on, the place where that was, and how it ended.

    The end is ``"finished"``, ``"stopped"``, both with all saves durable, or ``"superseded"``, or ``"cut"``.
    """

    name: str
    resumed: int
    source: str
    last: int
    end: str


def read_attempts(notes: Sequence[Note]) -> list[Attempt]:
    """Return the attempts that have loaded a checkpoint or begun the run, in their order."""
    attempts = []
    for name in dict.fromkeys(note.attempt for note in notes):
        noted: dict[str, Any] = {note.kind: note.value for note in notes if note.attempt == name}
        if "resumed" in noted:
            ends = (kind for kind in ("finished", "left", "superseded") if kind in noted)
            end = {"left": "stopped"}.get(last := next(ends, "cut"), last)
            last_step = int(noted.get("step", noted["resumed"]))
            attempts.append(Attempt(name, int(noted["resumed"]), noted.get("source", ""), last_step, end))
    return attempts


def next_steps(notes: Sequence[Note], save_every: int, *, keeps_memory: bool = False) -> set[int]:
    """Return the steps from which an attempt may go on after these notes.

    After a polite stop that is the one step at which all ranks have stopped: the end of the block has noted that it is
    durable. After a cut it is the newest durable step; a save that had begun then may have become durable without a
    note. If the nodes keep their memory, what was complete in their local tier counts as durable.
    """
    kinds = ("durable", "local") if keeps_memory else ("durable",)
    left = [index for index, note in enumerate(notes) if note.kind == "left"]
    if left and not any(note.kind in {"resumed", "step"} for note in notes[left[-1] :]):
        return {int(notes[left[-1]].value)}
    durable = max((int(note.value) for note in notes if note.kind in kinds), default=0)
    begun = {int(n.value) for n in notes if n.kind == "stopped" or (n.kind == "step" and n.value % save_every == 0)}
    return {durable} | {step for step in begun if step > durable}


def find_wrong_steps(notes: Sequence[Note], save_every: int, *, keeps_memory: bool = False) -> list[str]:
    """Return what is wrong with the steps from which the attempts went on.

    Another job may still save while an attempt loads: what became durable meanwhile may be loaded or not.
    """
    wrong = []
    loading: dict[str, set[int]] = {}
    for index, note in enumerate(notes):
        allowed = next_steps(notes[:index], save_every, keeps_memory=keeps_memory)
        if note.kind == "loading":
            loading[note.attempt] = allowed
        elif note.kind == "resumed":
            allowed |= loading.get(note.attempt, set())
            if note.value not in allowed:
                wrong.append(f"attempt {note.attempt} went on from {note.value}, and not from one of {sorted(allowed)}")
    return wrong


#: Lines of programs and libraries that are not rankless: torch's loggers and C++ code, torchrun's report of failed
#: ranks, Slurm, and the shell.
_OTHERS = re.compile(
    r"\s*$|\[?(rank\d+\]:)?\[?[IWEF]\d{4} |slurmstepd-|srun: |scancel: |Requested operation is |"
    r"terminate called|\s+what\(\): |={10,}|-{10,}|train\.py FAILED|"
    r"Failures:|Root Cause|\s*<NO_OTHER_FAILURES>|\[\d+\]:|"
    r"\s+(time|host|rank|exitcode|error_file|traceback) +: |Exception raised from |frame #\d+: |"
    r"<omitting python frames>|\S*slurm_script: line \d+: |/\S*spool\S*: line "
)

#: The beginning of a traceback, its inner lines, and what joins it to the next one.
_TRACEBACK = re.compile(
    r"(\[rank\d+\]: )?(Traceback \(most recent call last\):|  .*|The above exception|During handling)"
)

#: A rank that waits for others says so every few seconds, and which: after another one was killed, srun's SIGTERM makes
#: all ranks agree on a step, and the dead one does not answer until srun kills them. It is one line a rank that many
#: tools look for, and names the dead rank, so it is no noise; the number of such lines depends on ``KillWait`` alone.
_WAITING = re.compile(r"waiting for ")

#: The last line of a traceback of another package's error.
_ERROR_OF_OTHERS = re.compile(r"(\[rank\d+\]: )?(torch\.[\w.]+|RuntimeError|KeyboardInterrupt|SystemExit)\b")


def find_lines_of_ours(text: str) -> list[str]:
    """Return all lines of an output but those that are known to be of others. Ours have no mark of their own."""
    lines = (line for line in text.splitlines() if not _OTHERS.match(line) and not _TRACEBACK.match(line))
    return [line for line in lines if not _ERROR_OF_OTHERS.match(line)]


def count_lines(lines: Iterable[str]) -> int:
    """Return how many lines count for the limit of one an event: all but those of ranks that wait for a dead one."""
    return sum(not _WAITING.match(line) for line in lines)
