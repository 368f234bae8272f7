"""Tests of traces of one process. What is written is read by code that follows the description of the format."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

import rankless
from rankless.errors import InvalidArgumentError, RankTimeoutError, StorageError
from rankless.observe.spans import span, tracer
from rankless.observe.trace_format import Clock
from rankless.storage import posix
from tests.helpers.chrome_traces import ChromeTrace
from tests.helpers.slow_writes import slow_down_writes

STATE = {"w": torch.arange(1000.0), "b": torch.ones(3)}


def save(path: Path, tag: str = "a", **options: Any) -> Any:
    return rankless.save_checkpoint(path / "run", tag, STATE, **options)


def names(trace: ChromeTrace) -> set[str]:
    return {each.name for each in trace.slices}


#: The spans of a save whose last syncs fail, outermost first.
FAILED_STEPS = ("save", "writing", "commit", "write the headers and the manifest", "sync")


def failing_syncs() -> Any:
    """Of files: the folder of a run is made durable before."""
    sync = posix.fsync_path

    def sync_folder(path: Path, flags: int = 0) -> None:
        if path.is_file():
            raise StorageError(28, "the disk is full")
        sync(path, flags)

    return mock.patch.object(posix, "fsync_path", sync_folder)


class TestWhatIsRecorded:
    def test_the_phases_of_a_save_nest_in_the_call(self, tmp_path: Path) -> None:
        with rankless.trace(tmp_path / "t.json"):
            save(tmp_path)
        trace = ChromeTrace(tmp_path / "t.json")
        call = trace.only("save")
        assert (call.category, call.detail, call.error) == ("call", "a", "")
        steps = [each.name for each in trace.children(call) if each.category == "step"]
        assert steps == ["looking at what to save", "preparing the save", "writing"]
        writing = trace.only("writing")
        assert [each.name for each in trace.children(writing)] == ["write", "commit"]
        assert "sync" in {each.name for each in trace.children(trace.only("write"))}
        assert [each.category for each in trace.slices if each.name == "plan"] == ["plan"]

    def test_those_of_a_load_too(self, tmp_path: Path) -> None:
        save(tmp_path)
        with rankless.trace(tmp_path / "t.json"):
            rankless.load_checkpoint(tmp_path / "run", model={name: tensor.clone() for name, tensor in STATE.items()})
        trace = ChromeTrace(tmp_path / "t.json")
        assert trace.only("load").category == "call"
        assert all(trace.only("load").contains(each) for each in trace.slices if each.name != "load")
        assert {"plan", "read", "verify", "apply"} <= {each.category for each in trace.slices}

    @pytest.mark.parametrize("async_save", [False, True])
    def test_the_phases_of_the_calling_thread_add_up_to_the_call(self, tmp_path: Path, *, async_save: bool) -> None:
        """The best of up to three saves: a busy host stops the thread between two phases."""
        best = 0.0
        for attempt in range(3):
            run, file = tmp_path / f"run {attempt}", tmp_path / f"{attempt}.json"
            save(run, "first")
            with slow_down_writes(0.5), rankless.trace(file) as traced:
                save(run, incremental=False, async_save=async_save).wait()
            traced.wait(60)
            trace = ChromeTrace(file)
            best = max(best, trace.covered(trace.only("save in the background" if async_save else "save")))
            if best >= 0.95:
                break
        assert 0.95 <= best <= 1.0

    def test_the_number_of_spans_does_not_depend_on_the_number_of_tensors(self, tmp_path: Path) -> None:
        counts = []
        for count in (10, 1000):
            state = {f"w{n}": torch.ones(10) for n in range(count)}
            with rankless.trace(tmp_path / "t.json"):
                rankless.save_checkpoint(tmp_path / f"of {count}", "a", state)
            counts.append(len(ChromeTrace(tmp_path / "t.json").slices))
        assert counts[0] == counts[1] < 40

    def test_threads_have_names(self, tmp_path: Path) -> None:
        with rankless.trace(tmp_path / "t.json") as traced:
            thread = threading.Thread(target=save, args=(tmp_path,), name="evaluator")
            thread.start()
            thread.join()
            save(tmp_path, "b", async_save=True).wait()
        traced.wait(60)
        trace = ChromeTrace(tmp_path / "t.json")
        assert sorted(trace.threads.values()) == ["MainThread", "evaluator", "rankless b"]
        assert trace.processes[0].startswith("rank 0 (")
        assert f"pid {os.getpid()})" in trace.processes[0]

    def test_without_a_trace_nothing_is_made_and_nothing_is_kept(self, tmp_path: Path) -> None:
        assert span("a", "plan") is span("b", "write", "detail")
        assert not tracer.recordings
        save(tmp_path)
        assert not tracer.recordings


class Gate:
    """A listener that keeps a save in progress until it is opened."""

    def __init__(self) -> None:
        self._opened = threading.Event()

    def __call__(self, _: rankless.Event) -> None:
        assert self._opened.wait(60)

    def open(self) -> None:
        self._opened.set()


class TestAsynchronousSaves:
    def test_the_block_does_not_wait_and_the_file_has_all_of_the_save(self, tmp_path: Path) -> None:
        gate = Gate()
        with rankless.trace(tmp_path / "t.json") as traced:
            handle = save(tmp_path, async_save=True, on_event=gate)
        left_at = time.time_ns()
        assert not (tmp_path / "t.json").exists()
        with pytest.raises(RankTimeoutError, match=r"t\.json is not written yet"):
            traced.wait(0.01)
        gate.open()
        handle.wait()
        assert traced.wait(60) == tmp_path / "t.json"
        trace = ChromeTrace(tmp_path / "t.json")
        background = trace.only("save in the background")
        assert trace.threads[background.pid, background.tid] == "rankless a"
        assert trace.threads[0, trace.only("save").tid] == "MainThread"
        assert background.stop * 1000 + background.base > left_at
        assert background.contains(trace.only("rename"))

    def test_a_save_that_was_begun_after_the_block_does_not_delay_the_file(self, tmp_path: Path) -> None:
        first, second = Gate(), Gate()
        with rankless.trace(tmp_path / "t.json") as traced:
            rankless.save_checkpoint(tmp_path / "first", "a", STATE, async_save=True, on_event=first)
        later = rankless.save_checkpoint(tmp_path / "second", "b", STATE, async_save=True, on_event=second)
        first.open()
        traced.wait(60)
        assert not later.done()
        assert not tracer.recordings
        second.open()
        later.wait()
        assert [each.detail for each in ChromeTrace(tmp_path / "t.json").named("save in the background")] == ["a"]


class TestFailures:
    def test_the_spans_of_a_failed_save_are_closed_and_marked(self, tmp_path: Path) -> None:
        with (
            rankless.trace(tmp_path / "t.json"),
            failing_syncs(),
            pytest.raises(StorageError),
        ):
            save(tmp_path)
        trace = ChromeTrace(tmp_path / "t.json")
        marked = {each.name: each.error for each in trace.slices if each.error}
        assert marked == dict.fromkeys(FAILED_STEPS, "StorageError")

    def test_in_the_background_too(self, tmp_path: Path) -> None:
        with rankless.trace(tmp_path / "t.json") as traced, failing_syncs():
            handle = save(tmp_path, async_save=True)
            with pytest.raises(StorageError):
                handle.wait()
        with pytest.raises(StorageError):
            rankless.finalize()  # else a later test would get the error
        traced.wait(60)
        trace = ChromeTrace(tmp_path / "t.json")
        assert trace.only("save").error == ""
        assert trace.only("save in the background").error == "StorageError"

    def test_a_block_that_raises_writes_its_trace_and_raises_its_own_error(self, tmp_path: Path) -> None:
        def train() -> None:
            with rankless.trace(tmp_path / "t.json"):
                save(tmp_path)
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            train()
        assert "save" in names(ChromeTrace(tmp_path / "t.json"))

    def test_a_trace_that_cannot_be_written_is_an_error_at_the_end_of_the_block(self, tmp_path: Path) -> None:
        (tmp_path / "traces").mkdir()
        with pytest.raises(StorageError, match="traces"), rankless.trace(tmp_path / "traces/t.json"):
            shutil.rmtree(tmp_path / "traces")
        assert not tracer.recordings

    def test_only_a_file_is_replaced(self, tmp_path: Path) -> None:
        pipe = tmp_path / "pipe"
        os.mkfifo(pipe)
        with pytest.raises(InvalidArgumentError, match="not a regular file"), rankless.trace(pipe):
            pass
        with rankless.trace(tmp_path / "a.json"):
            pass
        with pytest.raises(InvalidArgumentError, match="not a regular file"):
            rankless.merge_traces(pipe, [tmp_path / "a.json"])
        assert pipe.is_fifo()

    def test_in_the_background_it_is_logged_and_the_save_succeeds(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        (tmp_path / "traces").mkdir()
        gate = Gate()
        with rankless.trace(tmp_path / "traces/t.json") as traced:
            handle = save(tmp_path, async_save=True, on_event=gate)
        shutil.rmtree(tmp_path / "traces")
        gate.open()
        assert handle.wait().tag == "a"
        with pytest.raises(StorageError):
            traced.wait(60)
        assert "t.json could not be written" in caplog.text


class TestTheBuffer:
    def test_the_oldest_spans_are_dropped_and_the_trace_says_how_many(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        with rankless.trace(tmp_path / "all.json"), rankless.trace(tmp_path / "few.json", max_spans=5):
            save(tmp_path)
        every, few = ChromeTrace(tmp_path / "all.json"), ChromeTrace(tmp_path / "few.json")
        last = sorted(every.slices, key=lambda each: each.stop)[-5:]
        assert {each.name for each in last} == names(few)
        assert "save" in names(few)  # what surrounds all others ended last
        dropped = len(every.slices) - 5
        assert few.raw["otherData"]["dropped_spans"] == dropped
        assert every.raw["otherData"]["dropped_spans"] == 0
        labels = [event["args"]["labels"] for event in few.raw["traceEvents"] if event["name"] == "process_labels"]
        assert labels == [f"{dropped} spans dropped"]
        assert f"few.json lacks its oldest {dropped} spans" in caplog.text


class TestSeveralTraces:
    def test_each_has_all_that_happens_until_it_ends(self, tmp_path: Path) -> None:
        with rankless.trace(tmp_path / "outer.json"):
            save(tmp_path, "first")
            with rankless.trace(tmp_path / "inner.json"):
                save(tmp_path, "second")
            save(tmp_path, "third")
        outer, inner = ChromeTrace(tmp_path / "outer.json"), ChromeTrace(tmp_path / "inner.json")
        assert [each.detail for each in outer.named("save")] == ["first", "second", "third"]
        assert [each.detail for each in inner.named("save")] == ["second"]

    def test_one_can_be_used_once(self, tmp_path: Path) -> None:
        with rankless.trace(tmp_path / "t.json") as traced:
            pass
        with pytest.raises(InvalidArgumentError, match="can be used once"), traced:
            pass

    def test_a_file_of_an_earlier_trace_is_replaced(self, tmp_path: Path) -> None:
        for tag in ("a", "b"):
            with rankless.trace(tmp_path / "t.json"):
                save(tmp_path, tag)
        assert ChromeTrace(tmp_path / "t.json").only("save").detail == "b"
        assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "t.json"]


@pytest.mark.parametrize(
    ("path", "options", "message"),
    [
        ("missing/t.json", {}, "folder of the trace .* does not exist"),
        ("s3://bucket/t.json", {}, "not a path of a file system"),
        ("t.json", {"max_spans": 0}, "max_spans must be at least 1"),
    ],
)
def test_invalid_arguments(path: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        rankless.trace(path, **options)


def test_a_forked_process_has_no_trace(tmp_path: Path) -> None:
    with rankless.trace(tmp_path / "t.json") as traced, span("around the fork", "plan"):
        child = os.fork()
        if child == 0:  # leaves the block, as a worker does that returns
            try:
                recorded = len(tracer.recordings)
                traced.__exit__(None, None, None)
                os._exit(recorded + (tmp_path / "t.json").exists())
            finally:
                os._exit(100)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert names(ChromeTrace(tmp_path / "t.json")) == {"around the fork"}


class TestTheClock:
    def test_it_is_that_of_the_profiler_of_torch(self, tmp_path: Path) -> None:
        with (
            rankless.trace(tmp_path / "t.json"),
            profile(activities=[ProfilerActivity.CPU]) as profiler,
            span("sleep", "plan"),
            record_function("mark"),
        ):
            time.sleep(0.05)
        profiler.export_chrome_trace(str(tmp_path / "profile.json"))
        profiled = json.loads((tmp_path / "profile.json").read_text())
        mark = next(event for event in profiled["traceEvents"] if event.get("name") == "mark" and event["ph"] == "X")
        slept = ChromeTrace(tmp_path / "t.json").only("sleep")
        assert slept.base == profiled["baseTimeNanoseconds"]
        # On a busy machine, the process may wait between two readings of the clock; another clock would be far off.
        assert slept.start == pytest.approx(mark["ts"], abs=2_000_000)
        assert slept.stop == pytest.approx(mark["ts"] + mark["dur"], abs=2_000_000)

        rankless.merge_traces(tmp_path / "all.json", [tmp_path / "t.json", tmp_path / "profile.json"])
        merged = json.loads((tmp_path / "all.json").read_text())["traceEvents"]
        assert len(merged) == len(profiled["traceEvents"]) + len(ChromeTrace(tmp_path / "t.json").raw["traceEvents"])

    def test_it_is_that_of_the_host(self, tmp_path: Path) -> None:
        before = time.time_ns()
        with rankless.trace(tmp_path / "t.json"), span("a", "plan"):
            pass
        recorded = ChromeTrace(tmp_path / "t.json").only("a")
        moments = [recorded.base + 1000 * at for at in (recorded.start, recorded.stop)]
        assert before - 1e6 <= moments[0] <= moments[1] <= time.time_ns() + 1e6

    def test_a_pause_between_its_readings_does_not_shift_it(self) -> None:
        read, has_paused = time.time_ns, []

        def read_and_pause_once() -> int:
            now = read()
            if not has_paused:
                has_paused.append(True)
                time.sleep(0.05)
            return now

        with mock.patch.object(time, "time_ns", read_and_pause_once):
            clock = Clock.read()
        assert clock.offset == pytest.approx(read() - time.perf_counter_ns(), abs=5e6)


class TestMerging:
    def write(self, path: Path, base: int, *starts: float) -> Path:
        events = [{"name": "a", "ph": "X", "ts": start, "dur": 1, "pid": 0, "tid": 0} for start in starts]
        path.write_text(json.dumps({"traceEvents": [{"name": "m", "ph": "M"}, *events], "baseTimeNanoseconds": base}))
        return path

    def test_times_are_those_of_the_first_file(self, tmp_path: Path) -> None:
        first = self.write(tmp_path / "1.json", 10**18, 5.0)
        second = self.write(tmp_path / "2.json", 10**18 + 3_000_000, 5.0, 7.0)
        rankless.merge_traces(tmp_path / "all.json", [first, second])
        merged = json.loads((tmp_path / "all.json").read_text())
        assert merged["baseTimeNanoseconds"] == 10**18
        assert [event["ts"] for event in merged["traceEvents"] if event["ph"] == "X"] == [5.0, 3005.0, 3007.0]

    def test_a_device_of_a_profile_with_the_number_of_a_rank_gets_another_one(self, tmp_path: Path) -> None:
        with rankless.trace(tmp_path / "t.json"):
            save(tmp_path)
        profiles = [self.write(tmp_path / f"{name}.json", 0, 1.0) for name in ("profile", "another")]
        rankless.merge_traces(tmp_path / "all.json", [*profiles, tmp_path / "t.json"])
        rankless.merge_traces(tmp_path / "more.json", [tmp_path / "all.json", tmp_path / "t.json"])
        for name, calls in (("all", 1), ("more", 2)):
            events = json.loads((tmp_path / f"{name}.json").read_text())["traceEvents"]
            assert {event["pid"] for event in events if event.get("cat")} == {0}
            assert sum(event["name"] == "save" for event in events) == calls
            foreign = [event["pid"] for event in events if event["name"] == "a"]
            assert len(set(foreign)) == 2
            assert 0 not in foreign

    @pytest.mark.usefixtures("without_garbage")
    @pytest.mark.parametrize(
        "text",
        [
            "",
            "[1",
            "[]",
            "{}",
            '{"traceEvents": 1}',
            "\xff",
            "[" * 100_000,
            '{"traceEvents": [1]}',
            '{"traceEvents": [{"ts": "now"}]}',
            '{"traceEvents": [{"ts": NaN}]}',
            f'{{"traceEvents": [{{"ts": {10**400}}}]}}',
            '{"traceEvents": [{"pid": {}}]}',
            '{"traceEvents": [], "baseTimeNanoseconds": "x"}',
            '{"traceEvents": [], "baseTimeNanoseconds": 1e400}',
        ],
    )
    def test_what_is_no_trace_is_named(self, tmp_path: Path, text: str) -> None:
        first = self.write(tmp_path / "1.json", 0, 1.0)
        (tmp_path / "2.json").write_bytes(text.encode("latin-1"))
        with pytest.raises(InvalidArgumentError, match=r"2\.json"):
            rankless.merge_traces(tmp_path / "all.json", [first, tmp_path / "2.json"])
        assert not (tmp_path / "all.json").exists()

    def test_no_files_are_refused(self, tmp_path: Path) -> None:
        with pytest.raises(InvalidArgumentError, match="no traces to merge"):
            rankless.merge_traces(tmp_path / "all.json", [])
