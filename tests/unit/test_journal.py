"""Tests the journal of a run directory: what it tells, what it survives, and that it never harms a save."""

import json
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import rankless
from rankless.report.checkpoint_report import ReportOptions
from rankless.report.run_report import describe_run
from rankless.run import folder_run_store, journal, object_journal, object_run_store
from rankless.run.cleanup import clean_up
from rankless.run.journal import MAX_PLACEMENT, JournalEntry, append_entry, read_journal
from rankless.run.records_folder import JOURNAL, OLDER_JOURNAL
from rankless.storage.http.connection import HttpResponse
from tests.helpers.fake_http import FakeStore
from tests.helpers.fake_s3 import AWS, FakeS3, failure
from tests.helpers.object_histories import check_all, run_path, save, state, store_with_two_checkpoints
from tests.helpers.pool import Ranks
from tests.helpers.run_directories import list_tags, save_step
from tests.helpers.simulated_hosts import simulated_host


@pytest.fixture(autouse=True)
def _forget_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "_failed", set())


def entry(tag: str, time: float = 1.0, kind: str = "saved") -> JournalEntry:
    return JournalEntry(kind, time, tag)  # type: ignore[arg-type]


def test_it_tells_saves_resumes_failures_and_removals_of_a_training(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in (1, 2, 3):
        rankless.save_checkpoint(tmp_path, f"step_{step}", model, optimizer, step=step, keep=2)
    with pytest.raises(rankless.TagExistsError):
        rankless.save_checkpoint(tmp_path, "step_3", model, optimizer, step=3)
    rankless.load_checkpoint(tmp_path, model=model, optimizer=optimizer)
    lines = [json.loads(line) for line in (tmp_path / JOURNAL).read_text().splitlines() if line]
    assert [(line["kind"], line["tag"], line.get("step")) for line in lines] == [
        ("saved", "step_1", 1),
        ("saved", "step_2", 2),
        ("saved", "step_3", 3),
        ("removed", "step_1", 1),
        ("failed", "step_3", 3),
        ("resumed", "step_3", 3),
    ]
    info, saved = rankless.list_checkpoints(tmp_path)[-1], lines[2]
    assert (saved["nbytes"], saved["run"]) == (info.nbytes, info.run)
    assert (saved["world_size"], saved["hosts"]) == (1, 1)
    assert 0 < saved["blocking_seconds"] <= saved["seconds"]
    assert [name for name, _ in saved["phases"]] == ["prepare", "write", "commit"]
    assert sum(seconds for _, seconds in saved["phases"]) == pytest.approx(saved["seconds"], abs=1e-5)
    assert "step_3" in lines[4]["error"]


def save_and_resume(rank_path: str) -> None:
    model = torch.nn.Linear(2, 2)
    rankless.save_checkpoint(rank_path, "a", model, step=1, async_save=True).wait()
    rankless.restore(rank_path, model=model, dataloader=None, optimizer=None)


def test_one_of_several_ranks_writes_it(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, save_and_resume, str(tmp_path))
    (saved,) = read_journal(tmp_path)  # a load without an optimizer continues no training
    assert (saved.kind, saved.world_size, saved.hosts) == ("saved", 2, 1)


def save_on_hosts(run: str, folder: str, names: list[str]) -> None:
    with simulated_host(names[dist.get_rank()], folder):
        directory = rankless.RunDirectory(run)
        for step in (1, 2):
            directory.save(f"step_{step}", {"w": torch.ones(3)}, step=step)


def test_it_tells_the_hosts_of_ranks(ranks: Ranks, tmp_path: Path) -> None:
    ranks(4, save_on_hosts, tmp_path / "run", str(tmp_path), ["node-1", "node-1", "node-1", "\x1b[31m ü"])
    entries = read_journal(tmp_path / "run")
    assert [(line.kind, line.hosts) for line in entries] == [("saved", 2), ("saved", 2)]
    assert {line.placement for line in entries} == {(("node-1", 3), ("?[31m??", 1))}


def test_the_hosts_in_a_line_are_bounded() -> None:
    host_of = [rank // 2 for rank in range(4000)]
    placement = journal.describe_placement(host_of, dict.fromkeys(range(2000), "n" * 64))
    assert placement == (("n" * 64, 2),) * MAX_PLACEMENT


def test_it_is_no_checkpoint_and_survives_all_clean_ups(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save_step(tmp_path, step, keep=1)
    clean_up(tmp_path)
    assert list_tags(tmp_path) == ["step_3"]
    assert len(read_journal(tmp_path)) == 5


def test_what_is_no_entry_is_skipped(tmp_path: Path) -> None:
    append_entry(tmp_path, entry("a"))
    with (tmp_path / JOURNAL).open("ab") as file:
        file.write(
            b'{"kind":"saved","time":2,"ta\xff\xfe\n[1]\n{}\n\x00\x00\n{"kind":"eaten","time":1,"tag":"x"}\n{"kind'
        )
    append_entry(tmp_path, entry("b", 3.0))
    assert [line.tag for line in read_journal(tmp_path)] == ["a", "b"]


@pytest.mark.parametrize(
    "numbers",
    [
        '"time":1e308',
        '"time":-1',
        '"time":1,"seconds":1e99',
        '"time":1,"world_size":-3',
        f'"time":1,"nbytes":{10**400}',
        f'"time":1,"hosts":{2**62}',
        '"time":1,"placement":[["a",-1]]',
    ],
)
def test_a_line_with_numbers_that_cannot_be_is_skipped(tmp_path: Path, numbers: str) -> None:
    (tmp_path / JOURNAL).write_text(f'{{"kind":"saved","tag":"x",{numbers}}}\n')
    append_entry(tmp_path, entry("a"))
    assert [line.tag for line in read_journal(tmp_path)] == ["a"]


def test_a_line_that_is_too_long_is_skipped(tmp_path: Path) -> None:
    (tmp_path / JOURNAL).write_text(f'{{"kind":"saved","time":1,"tag":"{"x" * 5000}"}}\n')
    append_entry(tmp_path, entry("a"))
    assert [line.tag for line in read_journal(tmp_path)] == ["a"]


def test_it_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_run_store, "MAX_BYTES", 1000)
    for number in range(200):
        append_entry(tmp_path, entry(f"tag_{number}", float(number)))
    assert {path.name for path in tmp_path.iterdir()} == {JOURNAL, OLDER_JOURNAL}
    assert all(path.stat().st_size < 1100 for path in tmp_path.iterdir())
    tags = [line.tag for line in read_journal(tmp_path)]
    assert tags == [f"tag_{number}" for number in range(200 - len(tags), 200)]
    assert len(tags) > 15


def test_a_line_is_bounded_whatever_the_error_says(tmp_path: Path) -> None:
    append_entry(tmp_path, entry("a"))
    event = rankless.SaveFailed(tmp_path / ("t" * 255), ValueError("\x00" * 10_000))
    failed = journal.describe_event(event, 2.0)
    assert failed is not None
    append_entry(tmp_path, failed)
    assert len(read_journal(tmp_path)) == 2
    assert (tmp_path / JOURNAL).stat().st_size < 2 * 4096


@pytest.mark.parametrize("kind", ["failed", "resumed", "removed"])
def test_only_a_committed_save_creates_it(tmp_path: Path, kind: str) -> None:
    append_entry(tmp_path, entry("a", kind=kind))
    append_entry(tmp_path / "absent", entry("a"))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("obstacle", ["directory", "pipe", "link", "dangling link"])
def test_a_save_succeeds_if_it_cannot_be_written(tmp_path: Path, obstacle: str) -> None:
    run, outside = tmp_path / "run", tmp_path / "outside"
    run.mkdir()
    if obstacle == "directory":
        (run / JOURNAL).mkdir()
    elif obstacle == "pipe":
        os.mkfifo(run / JOURNAL)
    else:
        (run / JOURNAL).symlink_to(outside)
    if obstacle == "link":
        outside.write_text("text")
    with pytest.warns(UserWarning, match="its report will lack"):
        save_step(run, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save_step(run, 2)
    assert list_tags(run) == ["step_1", "step_2"]
    assert read_journal(run) == []
    assert not outside.exists() or outside.read_text() == "text"


def append_many(path: str) -> None:
    for number in range(500):
        append_entry(Path(path), entry(f"{os.getpid()}_{number}"))


def test_two_processes_append_at_once(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, append_many, str(tmp_path))
    tags = [line.tag for line in read_journal(tmp_path)]
    assert len(set(tags)) == len(tags) == 1000


class TestInAnObjectStore:
    """In an object store each entry is an object."""

    @pytest.fixture(autouse=True)
    def fake(self) -> Iterator[FakeStore]:
        with store_with_two_checkpoints(FakeS3(AWS)) as fake:
            yield fake

    def test_it_tells_saves_resumes_failures_and_removals(self) -> None:
        with pytest.raises(rankless.TagExistsError):
            rankless.save_checkpoint(run_path(), "s2", {"net": state(2)}, step=2)
        save(3, keep=2)
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.AdamW(model.parameters())
        rankless.save_checkpoint(run_path(), "s4", model, optimizer, step=4)
        rankless.load_checkpoint(run_path(), model=model, optimizer=optimizer)
        found = read_journal(run_path())
        assert [(line.kind, line.tag, line.step) for line in found] == [
            ("saved", "s1", 1),
            ("saved", "s2", 2),
            ("failed", "s2", 2),
            ("saved", "s3", 3),
            ("removed", "s1", 1),
            ("saved", "s4", 4),
            ("resumed", "s4", 4),
        ]
        info, saved = rankless.list_checkpoints(run_path())[-2], found[3]
        assert (saved.nbytes, saved.run, saved.world_size) == (info.nbytes, info.run, 1)
        assert [name for name, _ in saved.phases] == ["prepare", "write", "commit"]
        assert sum(seconds for _, seconds in saved.phases) == pytest.approx(saved.seconds, abs=1e-5)

    def test_a_report_shows_it(self) -> None:
        data = describe_run(run_path(), "s2", ReportOptions(lambda checkpoint: None))  # noqa: ARG005
        assert data["timeline"]["journalled"]
        assert [row[0] for row in data["timeline"]["entries"]] == ["saved", "saved"]

    def test_a_save_needs_two_requests_for_it(self, fake: FakeStore) -> None:
        fake.requests.clear()
        save(3)
        assert [request.kind for request in fake.requests if object_journal.FOLDER in str(vars(request))] == [
            "list",
            "put",
        ]

    def test_only_a_committed_save_creates_it(self, fake: FakeStore) -> None:
        other = run_path().parent / "other"
        for kind in ("failed", "resumed", "removed"):
            append_entry(other, entry("a", kind=kind))
        assert not [key for key in fake.objects if "/other/" in key]
        append_entry(other, entry("a"))
        append_entry(other, entry("a", 2.0, "removed"))
        assert [line.kind for line in read_journal(other)] == ["saved", "removed"]

    def test_it_is_bounded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(object_run_store, "MAX_OBJECTS", 5)
        notes = run_path() / object_journal.FOLDER / "0 notes.txt"
        notes.store.replace_small(notes, b"mine")
        for number in range(3, 13):
            save(number, keep=3)
        assert notes.store.read_small(notes) == b"mine"
        assert [line.tag for line in read_journal(run_path()) if line.kind == "saved"] == ["s11", "s12"]
        assert len(read_journal(run_path())) == 5

    def test_what_is_no_entry_is_skipped(self) -> None:
        folder, store = run_path() / object_journal.FOLDER, run_path().store
        store.replace_small(folder / f"{0:020}.{0:08x}.json", b"\xff{")
        store.replace_small(folder / f"{1:020}.{0:08x}.json", b"x" * 5000)
        store.replace_small(folder / "0.json", b"{}")
        store.replace_small(folder / "deeper" / "2.json", b"{}")
        assert [line.tag for line in read_journal(run_path())] == ["s1", "s2"]

    def test_only_the_newest_are_read_if_few_are_asked_for(self) -> None:
        assert [line.tag for line in read_journal(run_path(), 1)] == ["s2"]

    def test_a_save_succeeds_if_it_cannot_be_written(self, fake: FakeStore) -> None:
        def refuse(request: Any, stage: str) -> HttpResponse | None:
            is_entry = request.kind == "put" and f"/{object_journal.FOLDER}/" in request.key
            return failure(403, "AccessDenied") if is_entry and stage == "before" else None

        fake.on_request = refuse
        with pytest.warns(UserWarning, match=r"its report will lack this and later events: .*AccessDenied"):
            save(3)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            save(4)
        assert check_all().keys() == {"s1", "s2", "s3", "s4"}
