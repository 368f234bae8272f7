"""Promises about a run over several jobs: who is the latest, and which names a job can take."""

from __future__ import annotations

import shutil
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import rankless
from rankless.formats.native import read_manifest
from rankless.run.catalog import list_stale_directories
from rankless.run.cleanup import clean_up
from rankless.run.journal import read_journal
from rankless.storage.object_path import ObjectPath
from tests.promises.jobs import NO_RUN, job, latest_step, listed, resumes_at, train, train_from
from tests.promises.places import Drain, Place, Run, bucket_of, in_killed_job, in_new_job, state_of
from tests.promises.promise import promise


def spoil(path: Path) -> None:
    """Flip a bit of the model of a checkpoint."""
    if isinstance(path, ObjectPath):
        [file] = [info.path for info in path.store.list_objects(path) if info.path.name == "model.safetensors"]
        path.store.replace_small(file, flip(path.store.read_small(file)))
    else:
        [file] = path.rglob("model.safetensors")
        file.chmod(0o644)
        file.write_bytes(flip(file.read_bytes()))


def flip(data: bytes) -> bytes:
    return data[:-5] + bytes([data[-5] ^ 1]) + data[-4:]


def save_with_a_corrupt_one(place: Place) -> None:
    """Save two steps. The newer one is then corrupt, and no tier of this host has it."""
    for step in (1, 2):
        place.save(f"step_{step}", float(step))
    spoil(place.locate("step_2"))
    move_to_another_host(place)


@promise("a job goes on from the newest checkpoint, by any job", exempt=NO_RUN)
def test_the_next_job_goes_on(place: Place) -> None:
    place.save("step_1", 1.0)
    place.save("step_2", 2.0)
    assert train(place, 4) == 2
    assert train(place, 5) == 4
    assert listed(place) == [f"step_{step}" for step in range(1, 6)]


@promise("after a fall-back over a corrupt checkpoint its name can be saved again, at every restart", exempt=NO_RUN)
def test_the_name_of_a_corrupt_checkpoint_is_free_after_a_fall_back(place: Place) -> None:
    save_with_a_corrupt_one(place)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert train(place, 2) == 1
        assert train(place, 3) == 2
    assert place.load("step_2") == 2.0
    assert listed(place) == ["step_1", "step_2", "step_3"]


@promise("what a load found corrupt is hidden, and kept", exempt=NO_RUN)
def test_a_corrupt_checkpoint_is_kept(place: Place) -> None:
    """It may be intact: the memory of a host may be faulty, or a proxy may change what it passes on."""
    save_with_a_corrupt_one(place)
    with warnings.catch_warnings(), job(place) as directory:
        warnings.simplefilter("ignore")
        directory.restore(None, state_of(0.0), resume=True)
        directory.save("step_2", state_of(2.5), step=2, overwrite=True)
        directory.save("another", state_of(3.0), step=3, keep=1)
    assert listed(place) == ["another"]
    (kept,) = list_stale_directories(place.path)  # type: ignore[attr-defined]
    assert kept.tag == "step_2"
    assert read_manifest(kept.path).step == 2.0


def move_to_another_host(place: Place) -> None:
    """Only the run directory has the checkpoints from now on: the memory of the new host is empty."""
    if getattr(place, "local", None) is not None:
        place.local = place.local.with_name("tier_of_another_host")  # type: ignore[attr-defined]


@promise("retention keeps the newest, and removes nothing of another run", exempt=NO_RUN)
def test_retention(place: Place) -> None:
    for step in (1, 2, 3):
        place.save(f"step_{step}", float(step))
    other = rankless.RunDirectory(place.path)  # type: ignore[attr-defined]
    other.save("other", state_of(9.0))
    with job(place) as directory:
        directory.restore("step_3", state_of(0.0), resume=True)
        directory.save("step_4", state_of(4.0), step=4, keep=2)
    kept = listed(place)
    assert "other" in kept
    assert "step_4" in kept
    assert "step_1" not in kept


def go_back(place: Place) -> None:
    with job(place) as directory:
        directory.restore("step_1", state_of(0.0), resume=True)
        directory.save("branch", state_of(2.0), step=2)


@promise("a job that goes back to an older checkpoint is continued, and not what it went back from", exempt=NO_RUN)
def test_the_branch_of_a_job_that_went_back_is_the_latest(place: Place) -> None:
    for step in (1, 2, 3):
        place.save(f"step_{step}", float(step))
    in_killed_job(go_back, in_new_job(place))
    in_killed_job(resumes_at, in_new_job(place), 2)
    assert latest_step(place) == 2
    assert place.load("step_3") == 3.0


@promise("the same command, which names a checkpoint, goes back once, however often it is started", exempt=NO_RUN)
def test_the_same_command_again_and_again(place: Place) -> None:
    for step in (1, 2, 3):
        place.save(f"step_{step}", float(step))
    in_killed_job(train_from, in_new_job(place), 2, 3, "step_2")
    in_killed_job(train_from, in_new_job(place), 3, 4, "step_2")
    in_killed_job(train_from, in_new_job(place), 4, 4)
    in_killed_job(train_from, in_new_job(place), 4, 5, "step_2")
    assert latest_step(place) == 5


@promise("after a rollback, the names of the later steps are free", exempt=NO_RUN)
def test_names_of_an_abandoned_branch_are_free(place: Place) -> None:
    for step in (1, 2, 3):
        place.save(f"step_{step}", float(step))
    in_killed_job(go_back, in_new_job(place))
    in_killed_job(train, in_new_job(place), 4)
    assert latest_step(place) == 4


@promise("what was added to a checkpoint stays its own when another one gets its name", exempt=NO_RUN)
def test_added_metrics_of_an_abandoned_checkpoint(place: Any) -> None:
    for step in (1, 2, 3):
        place.save(f"step_{step}", float(step))
    rankless.add_metrics(place.path, "step_2", {"score": 9.0})
    (before,) = [info for info in rankless.list_checkpoints(place.path) if info.tag == "step_2"]
    rankless.set_alias(place.path, "champion", "step_2")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with rankless.pin(place.path, "step_2"):
            pass
    with warnings.catch_warnings(record=True) as caught, rankless.pin(place.path, "step_2"):
        warnings.simplefilter("always")
        in_killed_job(train_from, in_new_job(place), 1, 3, "step_1")
        clean_up(place.path)
    scores = {info.id: info.metrics.get("score") for info in rankless.list_checkpoints(place.path)}
    assert {scores.pop(before.id), *scores.values()} == {9.0, None}
    assert rankless.open(place.path, "champion").metrics["score"] == 9.0
    assert any("was saved anew while this process had it pinned" in str(warning.message) for warning in caught)


@promise("a run that is moved is continued where it is now", exempt=NO_RUN)
def test_moved_runs(place: Place) -> None:
    place.save("step_1", 1.0)
    place.save("step_2", 2.0)
    copy_run(place, remove=True)
    in_killed_job(train_from, in_new_job(place), 2, 4)
    assert listed(place) == ["step_1", "step_2", "step_3", "step_4"]


@promise("a copy of a run is continued by itself, and the run by itself", exempt=NO_RUN)
def test_copied_runs(place: Place) -> None:
    place.save("step_1", 1.0)
    original = in_new_job(place)
    copy_run(place, remove=False)
    move_to_another_host(place)
    in_killed_job(train_from, in_new_job(place), 1, 3)
    in_killed_job(train_from, original, 1, 2)
    assert listed(place) == ["step_1", "step_2", "step_3"]
    assert listed(original) == ["step_1", "step_2"]


def copy_run(place: Any, *, remove: bool) -> None:
    """Copy all files or objects of a run as other programs do, and go on with the copy."""
    target = place.path.with_name("copy")
    if (bucket := bucket_of(place)) is None:
        shutil.copytree(place.path, target, symlinks=True)
        if remove:
            shutil.rmtree(place.path)
    else:
        for key in [key for key in bucket.objects if key.startswith("run/")]:
            bucket.objects["copy" + key.removeprefix("run")] = replace(bucket.objects[key])
            if remove:
                del bucket.objects[key]
    place.path = target


def everything(place: Place) -> dict[str, bytes]:
    """Return all files, or all objects, hidden ones as well."""
    if (bucket := bucket_of(place)) is not None:
        return {key: stored.data for key, stored in bucket.objects.items()}
    parent = place.locate("one").parent
    return {str(file): file.read_bytes() for file in parent.rglob("*") if file.is_file()}


@promise("loads and lists change nothing")
def test_readers_change_nothing(place: Place) -> None:
    place.save("step_1", 1.0)
    place.save("step_2", 2.0)
    before = everything(place)
    assert [place.load(tag) for tag in ("step_1", "step_2")] == [1.0, 2.0]
    if isinstance(place, Run | Drain):
        assert listed(place) == ["step_1", "step_2"]
        assert latest_step(place) == 2
        in_killed_job(latest_step, in_new_job(place))
    assert everything(place) == before
    place.save("step_3", 3.0)


@promise("retention removes neither what a reader has pinned nor what an alias names", exempt=NO_RUN)
def test_pins_and_aliases(place: Place) -> None:
    for step in (1, 2, 3):
        place.save(f"step_{step}", float(step))
    path = place.path  # type: ignore[attr-defined]
    rankless.set_alias(path, "good", "step_1")
    with rankless.pin(path, "step_2"):
        in_killed_job(train_from, in_new_job(place), 3, 5, keep=1)
        assert listed(place) == ["step_1", "step_2", "step_5"]
    in_killed_job(train_from, in_new_job(place), 5, 6, keep=1)
    assert listed(place) == ["step_1", "step_6"]


@promise("the journal has a line for each save", exempt=NO_RUN)
def test_journals(place: Place) -> None:
    for step in (1, 2, 3):
        place.save(f"step_{step}", float(step))
    saved = [entry.tag for entry in read_journal(place.path) if entry.kind == "saved"]  # type: ignore[attr-defined]
    assert saved == ["step_1", "step_2", "step_3"]
