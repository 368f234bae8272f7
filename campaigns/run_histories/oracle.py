"""The knowledge of the oracle: what the runs of a directory should be, as far as what has happened decides it.

The content of a checkpoint is the list of the steps that led to it, over all jobs; no two saves have an equal step. So
a checkpoint says by itself where it comes from. The oracle uses nothing of rankless. If a job was killed, it may have
had an effect that nothing shows: then several :data:`World` are possible, and each later observation leaves some of
them. If none is left, a promise is broken.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

#: The steps that led to a state.
Content = tuple[int, ...]


@dataclass(frozen=True)
class Head:
    """What a run should continue: the content, and the number of the job that has continued it last."""

    run: int
    content: Content
    owner: int


#: The runs of a directory, from the one that was claimed or saved last to the first.
World = tuple[Head, ...]


def claimed(world: World, run: int, content: Content, job: int) -> World:
    """Return the world after a job has claimed a run, which goes on from a content."""
    return (Head(run, content, job), *(head for head in world if head.run != run))


def saved(world: World, run: int, content: Content, job: int) -> World:
    """Return the world after a job has saved. What a superseded job saves changes nothing."""
    return claimed(world, run, content, job) if owner_of(world, run) in {job, None} else world


def saved_in_place(world: World, run: int, content: Content, job: int) -> World:
    """Return like :func:`saved`, but other runs stay newer than this one."""
    if owner_of(world, run) != job:
        return world
    return tuple(Head(run, content, job) if head.run == run else head for head in world)


def owner_of(world: World, run: int) -> int | None:
    """Return the job that has continued a run last."""
    return next((head.owner for head in world if head.run == run), None)


def content_of(world: World, run: int) -> Content:
    """Return what a run should continue."""
    return next((head.content for head in world if head.run == run), ())


def longest_prefix(content: Content, existing: Collection[Content]) -> Content:
    """Return the longest existing checkpoint that a content begins with; an empty one if there is none."""
    return max((known for known in existing if content[: len(known)] == known), key=len, default=())


def latest_of(world: World, existing: Collection[Content], *, any_run: bool) -> list[Content]:
    """Return what the latest checkpoint may be: the newest on the line of the newest run that has one, or of any."""
    found = [content for head in world if (content := longest_prefix(head.content, existing))]
    return found if any_run else found[:1]


def worlds_that_load(
    worlds: Iterable[World], content: Content, must: Collection[Content], *, any_run: bool
) -> Iterator[tuple[World, int]]:
    """Yield the worlds in which a load of the latest checkpoint is right to return a content, each with its run.

    ``must`` are the checkpoints that exist for certain. A longer one on the same line may exist, too: in a local tier,
    or of a save whose job was killed. ``any_run``: jobs with a tier and others count for themselves, so the latest
    checkpoint may be of another run than the newest.
    """
    for world in worlds:
        heads = world if any_run else _heads_until_first(world, {*must, content})
        for head in heads:
            if head.content[: len(content)] == content and len(content) >= len(longest_prefix(head.content, must)):
                yield world, head.run


def _heads_until_first(world: World, existing: Collection[Content]) -> list[Head]:
    """Return the newest run that has a checkpoint on its line."""
    return [head for head in world if longest_prefix(head.content, existing)][:1]
