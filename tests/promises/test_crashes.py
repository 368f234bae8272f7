"""Promises about a host that crashes and a process that is killed, at any moment of a save."""

from __future__ import annotations

import shutil
from pathlib import Path

from campaigns.crash.operations import History, Log, merge_logs
from campaigns.crash.recorder import Recorder
from campaigns.crash.state_check import write_tree
from campaigns.crash.states import sample_states
from rankless.errors import EmptyRunError
from tests.helpers.examples import examples
from tests.promises.moments import count_changes, draw_moments, save_in_job, save_until
from tests.promises.places import (
    NEW_ONLY,
    PLACES,
    Conversion,
    Drain,
    Place,
    Run,
    TrainerFolder,
    count_bytes,
    in_killed_job,
    save_in_another_job,
)
from tests.promises.promise import because, promise

_NO_DISK = because("a store keeps what it has acknowledged", *(name for name in PLACES if "store" in name))


def record(place: Place, root: Path, tags: list[str]) -> History:
    """Save under each name in turn, the values 1, 2 and so on. Return the operations below ``root``."""
    with Recorder(root) as recorder:
        of_killed_jobs: list[Log] = []
        for number, tag in enumerate(tags):
            recorder.begin_step(number)
            if isinstance(place, Drain):
                of_killed_jobs.append(in_killed_job(record_job, recorder, place, tag, number + 1.0))
                place.drain()
            else:
                place.save(tag, number + 1.0, overwrite=True)
            recorder.end_step(number)
        return merge_logs([recorder.log, *of_killed_jobs])


def record_job(recorder: Recorder, place: Drain, tag: str, value: float) -> Log:
    """Save as the job does that is killed before the drain. Return what it did below the root."""
    known = len(recorder.log.operations)
    place.save_into_tier(tag, value, overwrite=True)
    return recorder.log._replace(operations=recorder.log.operations[known:])


@promise(
    "if the host crashes, the old output or the new one is there, whole; once the save has returned, the new one",
    exempt=_NO_DISK | because("torch itself writes the file, and the recorder does not see that", "Lightning's format"),
    in_one_process=True,
)
def test_crashes_of_the_host(place: Place, tmp_path: Path) -> None:
    if isinstance(place, Run | Drain) and place.local is not None:
        place.local = tmp_path / "memory"
    place.path = tmp_path / "disk/run"  # type: ignore[misc]
    # transformers makes the folder of the Trainer, and does not sync its name.
    root = place.path if isinstance(place, TrainerFolder) else place.path.parent
    root.mkdir(parents=True)
    is_new = isinstance(place, Conversion)
    history = record(place, root, ["one"] if is_new else ["one", "one"])
    for state in sample_states(history, examples(300, 15), seed=0):
        shutil.rmtree(root)
        write_tree(state.tree, root)
        has_returned = state.moment >= history.acknowledged[-1]
        try:
            value = place.load("one")
        except EmptyRunError:
            assert is_new
            assert not has_returned
        else:
            assert value == len(history.begun) or (value == 1.0 and not has_returned)


@promise(
    "if the process is killed at any moment, the old output or the new one is there, whole, and later saves go on",
    exempt=because("only new paths are written", *NEW_ONLY),
    in_one_process=True,
)
def test_kills(place: Place) -> None:
    place.save("one", 1.0)
    changes = count_changes(lambda: save_in_job(place, "one", 1.0))
    for number in draw_moments(changes, 2, place):
        save_until(place, "one", 2.0, number)
        if isinstance(place, Drain):
            place.drain()
        assert place.load("one") in {1.0, 2.0}, number
        save_in_another_job(place, "one", 1.0, overwrite=True)
        assert place.load("one") == 1.0, number


@promise(
    "what killed saves have left is removed by the next one",
    exempt=because("only new paths are written", *NEW_ONLY)
    | because(
        "a store cannot tell a dead save from a slow one: what it has left is removed after a day",
        *("store", "store and tier", "component in a store", "DCP in a store"),
    )
    | because(
        "older versions are kept, and what no manifest names is removed after an hour",
        *("published weights", "published weights in a store"),
    ),
    in_one_process=True,
)
def test_leftovers(place: Place) -> None:
    place.save("one", 1.0)
    once = count_bytes(place)
    changes = count_changes(lambda: save_in_job(place, "one", 1.0))
    for number in draw_moments(changes, 3, place):
        save_until(place, "one", 2.0, number)
    if isinstance(place, Drain):
        place.drain()
    save_in_another_job(place, "one", 3.0, overwrite=True)
    assert count_bytes(place) < 1.8 * once
    assert place.load("one") == 3.0
