"""Drains of a local tier into an object store that die at a request, or stop there while another job goes on."""

from __future__ import annotations

import gc
import itertools
import threading
from pathlib import Path
from typing import Any

import pytest

import rankless
from rankless.run.catalog import list_stale_directories
from rankless.save.background import background_saves
from tests.helpers.fake_http import FakeStore
from tests.helpers.object_histories import (
    OLD,
    Crash,
    CutAt,
    Moment,
    Start,
    StopAt,
    check_all,
    clean_up,
    do_nothing,
    every_moment,
    run_path,
    state,
)

#: A number of saves of which none is drained.
NEVER = 10**6


def resume(folder: Path, every: int = 1) -> tuple[rankless.RunDirectory, int, str]:
    """Continue the run as a new job. Return its directory, the value that it has loaded, and where it was."""
    directory = rankless.RunDirectory(run_path(), local=rankless.LocalTier(folder, copies=0, drain_every=every))
    model = state(0)
    restored = directory.restore(model={"net": model}, resume=True)
    values = {float(value) for tensor in model.values() for value in tensor}
    assert len(values) == 1, f"{restored.tag} is a mixture: {values}"
    return directory, int(values.pop()), restored.source


def save(folder: Path, step: int, every: int = 1) -> None:
    """Continue the run as a new job, and save, one after the other: a job that is stopped does nothing else."""
    directory, _, _ = resume(folder, every)
    directory.finalize()
    directory.save(f"s{step}", {"net": state(step)}, step=step)
    directory.wait()


def drain_loaded(folder: Path) -> None:
    """Continue the run from the tier, and make durable what was loaded."""
    resume(folder)[0].finalize()


def end_jobs() -> None:
    """Let the jobs that were made here end as processes do: their errors are seen, and their locks released."""
    while True:
        try:
            background_saves.finalize()
            break
        except (Crash, rankless.RanklessError):
            continue
    gc.collect()


def check_nothing_is_left(fake: FakeStore) -> None:
    clean_up()
    assert not fake.uploads
    assert not list_stale_directories(run_path())
    folders = {info.path.name for info in rankless.list_checkpoints(run_path())}
    others = {key.split("/")[1] for key in fake.objects} - folders
    assert others <= {".tags", ".history", ".journal"}
    assert len([key for key in fake.objects if "/.tags/" in key]) == len(folders)


OPERATIONS = {
    "save": lambda folder: save(folder, 4),
    "host drain": lambda folder: rankless.drain(run_path(), folder),
    "load": drain_loaded,
}


#: The names of the folders of tiers: each history has its own.
_numbers = itertools.count()


def prepare(start: Start, base: Path) -> tuple[FakeStore, Path]:
    """Let a job leave the checkpoint s3 in the tier, after s1 and s2 in the store. Return the folder of the tier."""
    fake, folder = start.restore(), base / str(next(_numbers))
    save(folder, 3, NEVER)
    end_jobs()
    fake.requests.clear()
    return fake, folder


def list_requests(start: Start, base: Path, operation: str) -> list[Any]:
    """Return the requests of an operation that nothing disturbs."""
    fake, folder = prepare(start, base)
    OPERATIONS[operation](folder)
    end_jobs()
    return list(fake.requests)


def list_crashes(start: Start, base: Path, operation: str) -> list[Moment]:
    return every_moment(len(list_requests(start, base, operation)))


def list_stops(start: Start, base: Path, operation: str) -> list[Moment]:
    """Return the moments after the job has announced itself: before, the job that wakes up is the later one."""
    requests = list_requests(start, base, operation)
    announced = next(number for number, request in enumerate(requests) if _is_claim(request))
    return every_moment(len(requests))[2 * announced + 1 :]


def _is_claim(request: Any) -> bool:
    return request.method == "PUT" and "/.history/" in request.key


def check_crash(start: Start, base: Path, operation: str, moment: Moment) -> None:
    fake, folder = prepare(start, base)
    fake.on_request = CutAt(*moment)
    with pytest.raises(BaseException) as caught:  # noqa: PT011 - a thread may report it
        OPERATIONS[operation](folder)
    assert isinstance(caught.value, (Crash, rankless.RanklessError)), moment
    del caught
    fake.on_request = do_nothing
    end_jobs()
    assert {**OLD, "s3": 3, "s4": 4}.items() >= check_all().items() >= OLD.items(), moment
    directory, value, _ = resume(folder)
    directory.finalize()
    assert value in ({3, 4} if operation == "save" else {3}), moment
    found = check_all()
    assert found == {**OLD, f"s{value}": value} | ({"s3": 3} if "s3" in found else {}), moment
    check_nothing_is_left(fake)
    del directory
    end_jobs()


def check_stop(start: Start, base: Path, operation: str, moment: Moment) -> None:
    fake, folder = prepare(start, base)
    stop = fake.on_request = StopAt(*moment)
    errors: list[BaseException] = []
    thread = threading.Thread(target=_attempt, args=(operation, folder, errors))
    thread.start()
    while not stop.reached.wait(0.05):
        if not thread.is_alive():
            break
    directory, loaded, _ = resume(folder)
    directory.save("s9", {"net": state(9)}, step=9)
    directory.finalize()
    stop.resume()
    thread.join()
    fake.on_request = do_nothing
    found = check_all()
    where = moment, loaded, found, errors
    assert all(isinstance(error, rankless.RanklessError) for error in errors), where
    assert found.items() >= {**OLD, "s9": 9}.items(), where
    assert found.keys() <= {"s1", "s2", "s3", "s4", "s9"}, where
    assert found[f"s{loaded}"] == loaded, where  # it is durable
    if loaded == 3:
        assert "s4" not in found, where
    latest = rankless.list_checkpoints(run_path())[-1]
    assert latest.tag == "s9", where
    check_nothing_is_left(fake)
    assert check_all() == found, where
    del directory
    end_jobs()


def _attempt(operation: str, folder: Path, errors: list[BaseException]) -> None:
    try:
        OPERATIONS[operation](folder)
    except BaseException as error:  # noqa: BLE001 - compared by the check
        errors.append(error)
