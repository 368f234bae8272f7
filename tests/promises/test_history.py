"""Promises about a run over several jobs: who is the latest, and which names a job can take."""

from __future__ import annotations

import warnings
from pathlib import Path

import rankless
from rankless.formats.native import read_manifest
from rankless.run.catalog import list_stale_directories
from rankless.storage.object_path import ObjectPath
from tests.promises.jobs import NO_RUN, job, listed, train
from tests.promises.places import Place, state_of
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


@promise("a job goes on from the newest checkpoint, by any job", exempt=NO_RUN)
def test_the_next_job_goes_on(place: Place) -> None:
    place.save("step_1", 1.0)
    place.save("step_2", 2.0)
    assert train(place, 4) == 2
    assert train(place, 5) == 4
    assert listed(place) == [f"step_{step}" for step in range(1, 6)]


@promise("after a fall-back over a corrupt checkpoint its name can be saved again, at every restart", exempt=NO_RUN)
def test_the_name_of_a_corrupt_checkpoint_is_free_after_a_fall_back(place: Place) -> None:
    for step in (1, 2):
        place.save(f"step_{step}", float(step))
    spoil(place.locate("step_2"))
    move_to_another_host(place)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert train(place, 2) == 1
        assert train(place, 3) == 2
    assert place.load("step_2") == 2.0
    assert listed(place) == ["step_1", "step_2", "step_3"]


@promise("what a load found corrupt is hidden, and kept", exempt=NO_RUN)
def test_a_corrupt_checkpoint_is_kept(place: Place) -> None:
    """It may be intact: the memory of a host may be faulty, or a proxy may change what it passes on."""
    for step in (1, 2):
        place.save(f"step_{step}", float(step))
    spoil(place.locate("step_2"))
    move_to_another_host(place)
    with warnings.catch_warnings(), job(place) as directory:
        warnings.simplefilter("ignore")
        directory.restore(None, state_of(0.0), resume=True)
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
