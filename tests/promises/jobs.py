"""Jobs that train in the place of a run: they resume, save each step, and end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import rankless
from tests.promises.places import ON_RANKS, PLACES, Drain, Place, Run, state_of, tier_of, value_of, weights_of
from tests.promises.promise import because

#: The places that are runs.
RUNS = ("folder", "folder and tier", "store", "store and tier", "drain of an earlier job", "`rankless drain`")

_RUNS_OF_FRAMEWORKS = ("Trainer", "Accelerate", "NxD")

NO_RUN = because(
    "there is no run: each output is a path of its own",
    *(name for name in PLACES if name not in {*RUNS, *_RUNS_OF_FRAMEWORKS}),
) | because("jobs find their checkpoints as in a folder, where this is tested", *_RUNS_OF_FRAMEWORKS)


@contextmanager
def job(place: Place) -> Iterator[rankless.RunDirectory]:
    """A job of a run, in the place of one. After jobs on two hosts it is on the first of them."""
    assert isinstance(place, Run | Drain)
    local = place.local
    if local is not None and isinstance(place, Run) and place.way == ON_RANKS:
        local = local / "0"
    directory = rankless.RunDirectory(place.path, local=tier_of(local))
    yield directory
    directory.finalize()


def train(place: Place, stop: int, tag: str | None = None, **options: Any) -> int:
    """Resume as ``Checkpointer.resume`` does, train to a step, save each step. Return the step that was resumed."""
    with job(place) as directory:
        state = state_of(0.0)
        first = 0
        if rankless.has_checkpoint(place.path):  # type: ignore[attr-defined]
            first = int(directory.restore(tag, state, resume=True, again=False).step or 0)
            assert value_of(state) == first
        for step in range(first + 1, stop + 1):
            state["w"].copy_(weights_of(step))
            directory.save(f"step_{step}", state, step=step, **options)
            directory.finalize()
        return first


def listed(place: Place) -> list[str]:
    return [info.tag for info in rankless.list_checkpoints(place.path)]  # type: ignore[attr-defined]


def latest_step(place: Place) -> int:
    """Return the step of the latest checkpoint, after its values were compared with it."""
    state = state_of(-1.0)
    step = int(rankless.restore(place.path, model=state).step or 0)  # type: ignore[attr-defined]
    assert value_of(state) == step
    return step


def resumes_at(place: Place, step: int) -> None:
    """Check where a job resumes."""
    assert train(place, 0) == step


def train_from(place: Place, first: int, stop: int, tag: str | None = None, **options: Any) -> None:
    """Check where a job resumes, and train to a step."""
    assert train(place, stop, tag, **options) == first
