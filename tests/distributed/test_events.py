"""Tests reports of saves and loads: to listeners, to ``logging``, and on a terminal."""

from __future__ import annotations

import logging
import os
import pty
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import rankless
from rankless.errors import UnsupportedValueError
from tests.helpers.pool import Ranks

BYTES = 3 * 2**20


def state() -> dict[str, torch.Tensor]:
    return {"w": torch.zeros(BYTES // 4), "b": torch.ones(3)}


def of(kind: type, events: list[Any]) -> list[Any]:
    return [event for event in events if isinstance(event, kind)]


class TestSaves:
    def test_a_save_tells_its_progress_and_what_it_took(self, tmp_path: Path) -> None:
        events: list[Any] = []
        handle = rankless.save_checkpoint(tmp_path, "a", state(), step=7, on_event=events.append)
        progress, (saved,) = of(rankless.Progress, events), of(rankless.Saved, events)
        done = [event.done for event in progress]
        assert done == sorted(set(done))
        assert {(event.action, event.path) for event in progress} == {("save", tmp_path / "a")}
        assert done[-1] == progress[-1].total >= BYTES + 12
        assert (saved.path, saved.step) == (tmp_path / "a", 7)
        files = [file for file in (tmp_path / "a").rglob("*") if file.is_file() and file.name != "manifest.json"]
        assert saved.nbytes == sum(file.stat().st_size for file in files)
        assert 0 < saved.seconds == saved.blocking_seconds <= handle.blocking_seconds
        assert saved.gigabytes_per_second == pytest.approx(saved.nbytes / saved.seconds / 1e9)

    def test_of_an_asynchronous_one_the_caller_waits_for_a_part(self, tmp_path: Path) -> None:
        events: list[Any] = []
        checkpointer = rankless.RunDirectory(tmp_path, on_event=events.append, async_save=True)
        handle = checkpointer.save("a", state())
        handle.wait()
        (saved,) = of(rankless.Saved, events)
        assert saved.blocking_seconds == handle.blocking_seconds < saved.seconds

    def test_it_is_told_when_it_can_be_loaded(self, tmp_path: Path) -> None:
        seen = []

        def look(event: rankless.Event) -> None:
            if isinstance(event, rankless.Saved):
                seen.append(rankless.has_checkpoint(tmp_path))

        rankless.save_checkpoint(tmp_path, "a", state(), on_event=look)
        assert seen == [True]

    @pytest.mark.parametrize("asynchronous", [False, True])
    def test_a_failure_is_told_with_its_error(self, tmp_path: Path, asynchronous: bool) -> None:
        events: list[Any] = []
        with pytest.raises(UnsupportedValueError) as raised:
            rankless.save_checkpoint(
                tmp_path, "a", user_content=object(), async_save=asynchronous, on_event=events.append
            )
        assert of(rankless.SaveFailed, events) == [rankless.SaveFailed(tmp_path / "a", raised.value)]

    def test_a_listener_that_raises_harms_nothing(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        def broken(event: rankless.Event) -> None:
            raise ZeroDivisionError(str(event))

        rankless.save_checkpoint(tmp_path, "a", state(), on_event=broken)
        assert rankless.open(tmp_path).keys() == ["model/b", "model/w"]
        assert "a listener to events" in caplog.text

    @pytest.mark.parametrize("with_tier", [False, True], ids=["disk", "tier"])
    @pytest.mark.parametrize("asynchronous", [False, True], ids=["blocking", "async"])
    def test_the_phases_on_each_rank_add_up(
        self, ranks: Ranks, tmp_path: Path, asynchronous: bool, with_tier: bool
    ) -> None:
        for first, later in ranks(2, save_twice, tmp_path, asynchronous, with_tier):
            for saved in (first, later):
                assert sum(saved.phases.values()) == pytest.approx(saved.seconds)
                assert min(saved.phases.values()) >= 0
                assert ("replicate" in saved.phases) == with_tier
                assert asynchronous <= ("copy" in saved.phases)
            assert list(first.phases) == list(later.phases)


def save_twice(path: Path, asynchronous: bool, with_tier: bool) -> list[Any]:
    events: list[Any] = []
    local = rankless.LocalTier(path / f"host{dist.get_rank()}") if with_tier else None
    with rankless.RunDirectory(path / "run", local=local, async_save=asynchronous, on_event=events.append) as run:
        for tag in ("a", "b"):
            run.save(tag, state()).wait()
    return of(rankless.Saved, events)


class TestLoads:
    def test_a_load_tells_its_progress_and_what_it_took(self, tmp_path: Path) -> None:
        rankless.save_checkpoint(tmp_path, "a", state(), step=3, rng=False)
        events: list[Any] = []
        rankless.load_checkpoint(tmp_path, model=state(), on_event=events.append)
        progress, (loaded,) = of(rankless.Progress, events), of(rankless.Loaded, events)
        assert progress[-1].done == progress[-1].total == loaded.nbytes == BYTES + 12
        assert (loaded.path, loaded.step, loaded.verified) == (tmp_path / "a", 3, True)

    def test_what_was_tied_and_is_separate_here_is_read_twice_and_told_so(self, tmp_path: Path) -> None:
        tensor = torch.ones(BYTES // 4)
        rankless.save_checkpoint(tmp_path, "a", {"one": tensor, "other": tensor}, rng=False)
        events: list[Any] = []
        separate = {"one": torch.zeros(BYTES // 4), "other": torch.zeros(BYTES // 4)}
        rankless.load_checkpoint(tmp_path, model=separate, on_event=events.append)
        assert torch.equal(separate["other"], tensor)
        progress, (loaded,) = of(rankless.Progress, events), of(rankless.Loaded, events)
        assert progress[-1].done == progress[-1].total == loaded.nbytes == 2 * BYTES

    @pytest.mark.parametrize("exchange", ["always", "never"])
    def test_every_rank_is_told_of_what_it_moves_itself(self, ranks: Ranks, tmp_path: Path, exchange: str) -> None:
        """Also of stripes, which several ranks put together, and of what is passed on."""
        for reported in ranks(2, save_and_load, tmp_path / exchange, exchange):
            for action in ("save", "load"):
                own = [event for event in reported if isinstance(event, rankless.Progress) and event.action == action]
                assert [event.done for event in own] == sorted({event.done for event in own})
                assert own[-1].done == own[-1].total
            assert len(of(rankless.Saved, reported)) == len(of(rankless.Loaded, reported)) == 1


def save_and_load(path: Path, exchange: str) -> list[Any]:
    mesh = init_device_mesh("cpu", (2,))
    model = {
        "rows": distribute_tensor(torch.arange(2**20, dtype=torch.float32).view(1024, 1024), mesh, [Shard(0)]),
        "columns": distribute_tensor(torch.arange(2**20, dtype=torch.float32).view(1024, 1024), mesh, [Shard(1)]),
        "all": torch.ones(1000),
    }
    events: list[Any] = []
    rankless.save_checkpoint(path, "a", model, on_event=events.append)
    rankless.load_checkpoint(path, model=model, share_reads=exchange, on_event=events.append)
    return events


class TestLogging:
    def test_a_line_for_each_save_and_load(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.INFO, "rankless"):
            rankless.save_checkpoint(tmp_path, "a", state())
            rankless.load_checkpoint(tmp_path, model=state())
        save, load = (record.getMessage() for record in caplog.records)
        size, time, rate = r"3\.1\d MB", r"\d+(\.\d+)? m?s", r"\d+(\.\d+)? [kMG]?B/s"
        assert re.fullmatch(
            rf"saved {tmp_path}/a: {size} in {time} \({rate}\), of which the caller waited {time}", save
        )
        assert re.fullmatch(rf"loaded {tmp_path}/a: {size} in {time} \({rate} a rank\)", load)

    @pytest.mark.parametrize(("nbytes", "text"), [(12, "12 B"), (12_000, "12.0 kB"), (12_000_000, "12.0 MB")])
    def test_units_are_those_of_the_size(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture, nbytes: int, text: str
    ) -> None:
        model = {"w": torch.zeros(nbytes, dtype=torch.uint8)}
        rankless.save_checkpoint(tmp_path, "a", model, rng=False)
        with caplog.at_level(logging.INFO, "rankless"):
            rankless.load_checkpoint(tmp_path, model=model)
        assert f": {text} in " in caplog.text
        assert "e-" not in caplog.messages[-1].removeprefix(f"loaded {tmp_path}")

    def test_of_many_ranks_the_first_speaks(self, ranks: Ranks, tmp_path: Path) -> None:
        assert ranks(2, levels, tmp_path) == [[logging.INFO], [logging.DEBUG]]


def levels(path: Path) -> list[int]:
    seen: list[int] = []
    handler = logging.Handler()
    handler.emit = lambda record: seen.append(record.levelno)  # type: ignore[method-assign]
    logger = logging.getLogger("rankless")
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    rankless.save_checkpoint(path, "a", user_content=1)
    logger.removeHandler(handler)
    return seen


class TestOnATerminal:
    """Only where somebody looks on, and the call takes longer than a second."""

    @contextmanager
    def terminal(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
        """``sys.stderr`` is a terminal; gives what it has shown, at the end."""
        ours, theirs = pty.openpty()
        shown: list[str] = []
        reader = threading.Thread(target=self.copy, args=(ours, shown))
        reader.start()
        with os.fdopen(theirs, "w") as stderr, monkeypatch.context() as patch:
            patch.setenv("TERM", "xterm")
            patch.setenv("COLUMNS", "80")
            patch.setattr(sys, "stderr", stderr)
            yield shown
        reader.join(10)
        os.close(ours)

    @staticmethod
    def copy(terminal: int, shown: list[str]) -> None:
        with suppress(OSError):  # the other end is closed
            while data := os.read(terminal, 65536):
                shown.append(re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", data.decode(errors="replace")))

    def slowly(self, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
        import time

        from rankless.engine.io import read, write

        module = {"save": write, "load": read}[what]
        name = {"save": "_write_chunk", "load": "_read_chunk"}[what]
        quick = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, **options: (time.sleep(0.5), quick(*args, **options))[1])

    @pytest.mark.parametrize("what", ["save", "load"])
    def test_a_bar_for_what_takes_long(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, what: str) -> None:
        model = {"w": torch.zeros(56 * 2**20, dtype=torch.uint8)}
        if what == "load":
            rankless.save_checkpoint(tmp_path, "step_1", model)
        self.slowly(monkeypatch, what)
        with self.terminal(monkeypatch) as shown:
            if what == "save":
                rankless.save_checkpoint(tmp_path, "step_1", model)
            else:
                rankless.load_checkpoint(tmp_path, "step_1", model)
        verb = {"save": "saving", "load": "loading"}[what]
        assert re.search(rf"{verb} step_1 .*\d+\.\d/58\.\d MB +\d+\.\d MB/s +0:00:0\d", "".join(shown)), shown

    @pytest.mark.parametrize("asynchronous", [False, True])
    def test_none_for_what_is_done_at_once_or_in_the_background(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, asynchronous: bool
    ) -> None:
        if asynchronous:
            self.slowly(monkeypatch, "save")
        model = {"w": torch.zeros(56 * 2**20 if asynchronous else 3, dtype=torch.uint8)}
        with self.terminal(monkeypatch) as shown:
            rankless.save_checkpoint(tmp_path, "a", model, async_save=asynchronous)
            rankless.finalize()
        assert shown == []
