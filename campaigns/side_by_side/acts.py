"""What a job does over and over: one who saves, and one who reads and knows what it must see."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import torch
import torch.distributed as dist
from typer.testing import CliRunner

import holdfast
from holdfast.cli.main import app
from holdfast.errors import CheckpointReplacedError

#: Elements of a tensor, and tensors of a checkpoint, which are in two files.
ELEMENTS, TENSORS = 5_000, 4

#: The run, and how many times it was done.
Act = Callable[[holdfast.Checkpointer, int], object]


class Violation(AssertionError):  # noqa: N818 - of what is promised
    """A job has seen, or left, what must not be."""


def check(condition: bool, message: str) -> None:
    """Raise :class:`Violation` where something is not so."""
    if not condition:
        raise Violation(message)


def state(step: int) -> dict[str, torch.Tensor]:
    """What is saved at a step: every element says which."""
    return {f"w{n}": torch.full((ELEMENTS,), float(step)) for n in range(TENSORS)}


def check_state(tensors: dict[str, torch.Tensor], step: int) -> None:
    """All of it is of one step."""
    check(all(bool((tensor == step).all()) for tensor in tensors.values()), f"not all is of step {step}")


def keeping_one(run: holdfast.Checkpointer, step: int) -> None:
    """Save under a new name, and remove the one before."""
    run.save(f"{dist.get_rank()}_{step}", state(step), user_content=step, num_kept_ckpts=1)


def overwriting(run: holdfast.Checkpointer, step: int) -> None:
    """Save under the same name each time."""
    run.save("last", state(step), user_content=step, overwrite=True)


def both(run: holdfast.Checkpointer, step: int) -> None:
    """One name is taken again and again, and removed in between."""
    if step % 2:
        keeping_one(run, step)
    else:
        run.save("last", state(step), user_content=step, overwrite=True, num_kept_ckpts=1)


def under_one_name(run: holdfast.Checkpointer, step: int) -> None:
    """Save under a name that another job uses, too."""
    run.save(f"step_{step}", state(step), user_content=step)


def load(run: holdfast.Checkpointer, number: int) -> None:
    """The latest one, verified or not."""
    tensors = state(0)
    check_state(tensors, run.load(model=tensors, verify=number % 2 == 0))


def load_by_name(run: holdfast.Checkpointer, number: int) -> None:
    """The one that is overwritten."""
    tensors = state(0)
    check_state(tensors, run.load("last", model=tensors, verify=number % 2 == 0))


def look(run: holdfast.Checkpointer, _: int) -> None:
    """A view that is open does not keep its checkpoint from going, and says so then."""
    found = holdfast.open(run.path)
    with suppress(CheckpointReplacedError):
        step = found.values["user_content"]
        check_state({name: found[name] for name in found}, step)


def listing(run: holdfast.Checkpointer, _: int) -> None:
    """There is always one, and nothing is called damaged."""
    check(holdfast.has_checkpoint(run.path), "has_checkpoint tells of none")
    found = run.list()
    check({info.status for info in found} == {"complete"}, f"the list is {found}")


def command(*words: str) -> Act:
    """A command that succeeds."""

    def run_it(run: holdfast.Checkpointer, _: int) -> None:
        done = CliRunner().invoke(app, [*words, str(run.path)])
        check(done.exit_code == 0, done.output)

    return run_it


def reading(run: holdfast.Checkpointer, number: int) -> None:
    """All of them, in turn."""
    ways = (load, look, listing, load, command("verify"), listing, command("ls"))
    ways[number % len(ways)](run, number)
