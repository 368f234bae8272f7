"""The actions that a job repeats: saves, and reads whose results are known."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import torch
import torch.distributed as dist
from typer.testing import CliRunner

import rankless
from rankless.cli.main import app
from rankless.errors import CheckpointReplacedError

#: The elements of a tensor, and the tensors of a checkpoint, which has two files.
ELEMENTS, TENSORS = 5_000, 4

#: An action, which is called with the run and the number of earlier calls.
Action = Callable[[rankless.RunDirectory, int], object]


class Violation(AssertionError):  # noqa: N818 - of what is promised
    """A job has seen, or left, a forbidden state."""


def require(condition: bool, message: str) -> None:
    """Raise :class:`Violation` with ``message`` unless a condition holds."""
    if not condition:
        raise Violation(message)


def build_state(step: int) -> dict[str, torch.Tensor]:
    """Return the state of a step: each element is the step."""
    return {f"w{n}": torch.full((ELEMENTS,), float(step)) for n in range(TENSORS)}


def check_state(tensors: dict[str, torch.Tensor], step: int) -> None:
    """Check that the whole state is of one step."""
    require(all(bool((tensor == step).all()) for tensor in tensors.values()), f"not all is of step {step}")


def save_keeping_one(run: rankless.RunDirectory, step: int) -> None:
    """Save under a new name, and remove the previous one."""
    run.save(f"{dist.get_rank()}_{step}", build_state(step), user_content=step, keep=1)


def overwrite_tag(run: rankless.RunDirectory, step: int) -> None:
    """Save under the same name each time."""
    run.save("last", build_state(step), user_content=step, overwrite=True)


def overwrite_keeping_one(run: rankless.RunDirectory, step: int) -> None:
    """Save under one name again and again, and remove it in between."""
    if step % 2:
        save_keeping_one(run, step)
    else:
        run.save("last", build_state(step), user_content=step, overwrite=True, keep=1)


def save_under_shared_tag(run: rankless.RunDirectory, step: int) -> None:
    """Save under a name that another job uses, too."""
    run.save(f"step_{step}", build_state(step), user_content=step)


def load_latest(run: rankless.RunDirectory, number: int) -> None:
    """Load the latest checkpoint, verified or not."""
    tensors = build_state(0)
    check_state(tensors, run.load(model=tensors, verify=number % 2 == 0))


def load_tag(run: rankless.RunDirectory, number: int) -> None:
    """Load the checkpoint that is being overwritten."""
    tensors = build_state(0)
    check_state(tensors, run.load("last", model=tensors, verify=number % 2 == 0))


def read_view(run: rankless.RunDirectory, _: int) -> None:
    """Read through an open view: its checkpoint may be replaced, and the view must then say so."""
    view = rankless.open(run.path)
    with suppress(CheckpointReplacedError):
        step = view.values["user_content"]
        check_state({name: view[name] for name in view}, step)


def read_pinned(run: rankless.RunDirectory, number: int) -> None:
    """Read a pinned checkpoint in all ways: no other job may remove it."""
    with rankless.pin(run.path) as view:
        step = view.values["user_content"]
        for _ in range(2):
            check_state({name: view[name] for name in view}, step)
        tensors = build_state(0)
        require(run.load(view.tag, model=tensors, verify=number % 2 == 0) == step, "another checkpoint was loaded")
        check_state(tensors, step)


def list_checkpoints(run: rankless.RunDirectory, _: int) -> None:
    """List the checkpoints: there is always one, and none is reported corrupt."""
    require(rankless.has_checkpoint(run.path), "has_checkpoint tells of none")
    infos = run.list()
    require({info.status for info in infos} == {"complete"}, f"the list is {infos}")


def make_command(*words: str) -> Action:
    """Run a command, which must succeed."""

    def run_it(run: rankless.RunDirectory, _: int) -> None:
        done = CliRunner().invoke(app, [*words, str(run.path)])
        require(done.exit_code == 0, done.output)

    return run_it


def read_in_turn(run: rankless.RunDirectory, number: int) -> None:
    """Read in all ways, in turn."""
    ways = (
        load_latest,
        read_view,
        list_checkpoints,
        load_latest,
        make_command("verify"),
        list_checkpoints,
        make_command("ls"),
    )
    ways[number % len(ways)](run, number)
