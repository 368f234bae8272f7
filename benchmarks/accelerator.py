"""``python -m benchmarks.accelerator``: what saves and loads cost a training on an accelerator.

It prints Markdown tables for ``docs/performance.md``: for how long asynchronous saves block, how much longer steps take
with them, the rate of loads, and the memory that these need on the device. The limits are copies of one buffer of as
many bytes between the device and pinned memory. Peers are ``dcp.async_save``, pinned if this version of torch can,
``torch_checkpointing``, which stages in a thread, and safetensors. The first save, in which memory is allocated and
pinned, does not count; its time is a row of its own.

It takes about seven times the bytes of the state on the disk, and four times in the memory of the host.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch_checkpointing import CheckpointManager
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

import rankless
from benchmarks import raw, states

#: Begins a save of the n-th checkpoint, and returns a function that waits until it is durable.
Begin = Callable[[int], Callable[[], object]]


@dataclass(frozen=True)
class Saver:
    """A way to save. Steps of the optimizer are in a ``guard``, which waits for what must not change yet."""

    begin: Begin
    guard: Callable[[], AbstractContextManager[object]] = nullcontext


#: A row of a table.
Row = tuple[str, str]

#: The steps of a training, and the steps from one save to the next.
_STEPS, _EVERY = 50, 10

#: The least seconds of a step.
_STEP_SECONDS = 0.5


def main() -> None:
    """Measure, if there is an accelerator."""
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accelerator", description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=12.0, help="size of parameters and states (default: 12)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path.cwd(), help="directory on the disk to measure")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no measurement after them")
    options = parser.parse_args()
    deadline = time.monotonic() + options.seconds
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        print("There is no accelerator on this machine: nothing was measured.")
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory(prefix=".bench-", dir=options.folder) as folder:
        run = AcceleratorRun(device, Path(folder), int(options.gigabytes * 1e9), options.rounds, deadline)
        for title, rows in run.measure_all():
            print(f"\n| {title} | |\n|---|---:|", flush=True)
            for name, value in rows:
                print(f"| {name} | {value} |", flush=True)
        run.close()


class AcceleratorRun:
    """A training on a device, and the measurements of its saves and loads in a folder."""

    def __init__(self, device: torch.device, folder: Path, nbytes: int, rounds: int, deadline: float) -> None:
        self._device, self._folder, self._rounds, self._deadline = device, folder, rounds, deadline
        self._module: Any = torch.get_device_module(device)
        with device:
            self._model = states.Llama(nbytes)
        self._optimizer = torch.optim.AdamW(self._model.parameters())
        self._set_gradients()
        self._optimizer.step()
        self._state = states.list_tensors(self._model, self._optimizer)
        self._nbytes = sum(tensor.nbytes for tensor in self._state.values())
        self._dcp_options = _pinned_options()
        # It cannot write past the page cache on ext4.
        self._manager = CheckpointManager.Config(
            storage_config=LocalFileSystemStorageConfig(use_direct_io=False)
        ).build()

    def close(self) -> None:
        """End the process that writes for ``torch_checkpointing``."""
        self._manager.close()

    def measure_all(self) -> Iterator[tuple[str, Iterator[Row]]]:
        """Yield tables: the title, and the rows, which are measured when they are asked for. The longest is last."""
        name = getattr(self._module, "get_device_name", lambda: self._device.type)()
        size = f"{self._nbytes / 1e9:.1f} GB, {name}, PyTorch {torch.__version__}"
        yield f"time that a save blocks, {size}", self._measure_blocking()
        yield f"load, {size}", self._measure_loads()
        yield f"{_STEPS} steps with a save every {_EVERY}, {size}", self._measure_steps()

    def _contenders(self) -> dict[str, Saver]:
        ours = {f"rankless, {staging}": Saver(partial(self._begin, staging)) for staging in ("eager", "overlapped")}
        kind = "pinned" if self._dcp_options else "pageable"
        savers = {**ours, f"dcp.async_save, {kind}": Saver(self._begin_dcp)}
        if self._device.type == "cuda":  # it takes any accelerator for CUDA
            savers["torch_checkpointing"] = Saver(self._begin_manager, self._manager.lock)
        return savers

    def _begin(self, staging: str, number: int) -> Callable[[], object]:
        return rankless.save_checkpoint(
            self._folder / "run", f"step_{number}", self._model, self._optimizer, async_save=True, staging=staging,
            rng=False, keep=1,
        ).wait  # fmt: skip

    def _begin_dcp(self, number: int) -> Callable[[], object]:
        del number  # it overwrites
        saving: Any = dcp.async_save(self._state, checkpoint_id=self._folder / "dcp", **self._dcp_options)
        wait: Callable[[], object] = getattr(saving, "upload_completion", saving).result
        return wait

    def _begin_manager(self, number: int) -> Callable[[], object]:
        writing = self._manager.save(str(self._folder / f"manager_{number}"), {"state": self._state})
        return writing.result if writing is not None else lambda: None

    def _measure_blocking(self) -> Iterator[Row]:
        yield "pinned copy of as many bytes", _format_seconds(self._time_pinned_copies(to_host=True))
        for name, saver in self._contenders().items():
            yield from self._rows_or_error(name, partial(self._measure_saver, name, saver))
            self._remove_files()

    def _measure_saver(self, name: str, saver: Saver) -> Iterator[Row]:
        blocked = []
        self._module.reset_peak_memory_stats()
        before = self._module.memory_allocated()
        for number in range(self._rounds + 1):
            self._module.synchronize()
            started = time.perf_counter()
            wait = saver.begin(number)
            blocked.append(time.perf_counter() - started)
            wait()
        yield f"{name}, first save", _format_seconds(blocked[:1])
        yield name, _format_seconds(blocked[1:])
        extra = self._module.max_memory_allocated() - before
        yield f"{name}, memory on the device in addition", f"{extra / 2**20:.0f} MiB"

    def _measure_steps(self) -> Iterator[Row]:
        work = self._choose_work()
        self._run_steps(work, None)
        alone = self._run_steps(work, None)
        yield "without saves", f"{alone:.2f} s"
        for name, saver in self._contenders().items():
            yield from self._rows_or_error(name, partial(self._measure_steps_with, name, saver, work, alone))
            self._remove_files()

    def _measure_steps_with(self, name: str, saver: Saver, work: Callable[[], None], alone: float) -> Iterator[Row]:
        saver.begin(0)()
        seconds = self._run_steps(work, saver)
        yield name, f"{seconds:.2f} s ({seconds / alone:.3f} times)"

    def _run_steps(self, work: Callable[[], None], saver: Saver | None) -> float:
        """Return the seconds of the steps, without what is still written after them."""
        waits: list[Callable[[], object]] = []
        self._module.synchronize()
        started = time.perf_counter()
        for step in range(1, _STEPS + 1):
            work()
            with nullcontext() if saver is None else saver.guard():
                self._optimizer.step()
            if saver is not None and step % _EVERY == 0:
                for wait in waits:
                    wait()
                waits = [saver.begin(step)]
        self._module.synchronize()
        seconds = time.perf_counter() - started
        for wait in waits:
            wait()
        return seconds

    def _choose_work(self) -> Callable[[], None]:
        """Return what stands for forward and backward: enough products of matrices."""
        matrix = torch.ones(8192, 8192, device=self._device, dtype=torch.bfloat16)
        out = torch.empty_like(matrix)

        def multiply(times: int) -> None:
            for _ in range(times):
                torch.mm(matrix, matrix, out=out)

        multiply(10)
        self._module.synchronize()
        started = time.perf_counter()
        multiply(100)
        self._module.synchronize()
        return partial(multiply, round(100 * _STEP_SECONDS / (time.perf_counter() - started)) + 1)

    def _measure_loads(self) -> Iterator[Row]:
        yield "pinned copy to the device", self._format_rate(self._time_pinned_copies(to_host=False))
        self._begin("eager", 0)()
        checkpoint = self._folder / "run" / "step_0"
        files = sorted(checkpoint.glob("*/*.safetensors"))
        yield (
            "reading the files, from the page cache",
            self._format_rate(self._time(lambda: raw.read_into_cache(checkpoint))),
        )
        load = partial(rankless.load_checkpoint, self._folder / "run", model=self._model, optimizer=self._optimizer)
        yield "rankless, from the page cache, verified", self._format_rate(self._time(load))
        name, device = "safetensors, from the page cache", f"{self._device.type}:0"
        yield from self._rows_or_error(
            name,
            lambda: [(name, self._format_rate(self._time(lambda: [load_file(file, device) for file in files])))],
        )
        yield "rankless, cold", self._format_rate(self._time(load, before=lambda: raw.evict_from_cache(checkpoint)))
        self._remove_files()

    def _time_pinned_copies(self, *, to_host: bool) -> list[float]:
        pinned = torch.empty(self._nbytes // 4, dtype=torch.uint8, pin_memory=True)
        on_device = torch.empty_like(pinned, device=self._device)
        target, source = (pinned, on_device) if to_host else (on_device, pinned)

        def copy() -> None:
            for _ in range(4):
                target.copy_(source, non_blocking=True)

        return self._time(copy)

    def _time(self, work: Callable[[], object], before: Callable[[], object] = lambda: None) -> list[float]:
        """Return the seconds of each round but the first."""
        seconds = []
        for _ in range(self._rounds + 1):
            before()
            self._module.synchronize()
            started = time.perf_counter()
            work()
            self._module.synchronize()
            seconds.append(time.perf_counter() - started)
        return seconds[1:]

    def _format_rate(self, seconds: list[float]) -> str:
        return f"{self._nbytes / statistics.median(seconds) / 1e9:.1f} GB/s"

    def _set_gradients(self) -> None:
        for parameter in self._model.parameters():
            parameter.grad = torch.full_like(parameter, 1e-3)

    def _rows_or_error(self, name: str, measure: Callable[[], Iterable[Row]]) -> list[Row]:
        """Return the rows of a measurement; one with its error if it fails: the others still count."""
        if time.monotonic() > self._deadline:
            return [(name, "not measured: no time was left")]
        try:
            return list(measure())
        except Exception as error:  # noqa: BLE001 - of any peer
            return [(name, f"failed: {error!r:.200}")]

    def _remove_files(self) -> None:
        rankless.finalize()  # frees its memory
        for folder in self._folder.iterdir():
            shutil.rmtree(folder)


def _pinned_options() -> dict[str, Any]:
    """Return the options with which ``dcp.async_save`` stages in pinned memory; none if torch is too old."""
    with suppress(ImportError, TypeError):
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions  # noqa: PLC0415 - torch 2.9

        options = StagingOptions(
            use_pinned_memory=True, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=True
        )
        return {"async_stager": DefaultStager(options)}
    return {}


def _format_seconds(seconds: list[float]) -> str:
    return f"{statistics.median(seconds) * 1000:.1f} ms"


if __name__ == "__main__":
    main()
