"""One rank of one version of rankless: it saves and loads on request, for ``python -m benchmarks.compare``.

``python -m benchmarks.version_rank WORKLOAD BYTES RANK RANKS STORE`` answers each line ``WORK PATH`` with the seconds
taken. It uses only public names of rankless, because the version may be an older one than that of this file.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

answers, sys.stdout = sys.stdout, sys.stderr  # warnings of the packages must not mix with the answers

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import rankless  # noqa: E402
from benchmarks import states  # noqa: E402

#: Works on a path. Returns the seconds that count, or ``None`` if all of them do.
Work = Callable[[Path], float | None]


def main() -> None:
    """Answer requests until the input ends."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    workload, nbytes, rank, ranks, store = sys.argv[1], *map(int, sys.argv[2:5]), sys.argv[5]
    if ranks > 1:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    works = WORKLOADS[workload](nbytes)
    print(rankless.__file__, file=answers, flush=True)
    for line in sys.stdin:
        work, _, path = line.rstrip("\n").partition(" ")
        print(_time_work(works[work], Path(path)), file=answers, flush=True)


def _time_work(work: Work, path: Path) -> float:
    _wait_for_all_ranks()
    started = time.perf_counter()
    seconds = work(path)
    _wait_for_all_ranks()
    return time.perf_counter() - started if seconds is None else seconds


def _wait_for_all_ranks() -> None:
    if dist.is_initialized():
        dist.barrier()


def _build_large(nbytes: int) -> Mapping[str, Work]:
    return _build_tensor_works(states.build_large_tensors(nbytes))


def _build_small(nbytes: int) -> Mapping[str, Work]:
    del nbytes
    return _build_tensor_works(states.build_small_tensors())


def _build_tensor_works(state: dict[str, torch.Tensor]) -> Mapping[str, Work]:
    target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    return {"save": partial(_save_tensors, state), "load": partial(_load_tensors, target)}


def _save_tensors(state: dict[str, torch.Tensor], path: Path) -> None:
    rankless.save_checkpoint(path, "s", state, rng=False)


def _load_tensors(target: dict[str, torch.Tensor], path: Path) -> None:
    rankless.load_checkpoint(path, model=target)


def _build_training(layout: str, nbytes: int) -> Mapping[str, Work]:
    model, optimizer = states.build_training(layout, nbytes)

    def save(path: Path) -> None:
        rankless.save_checkpoint(path, "s", model, optimizer, rng=False)

    def load(path: Path) -> None:
        rankless.load_checkpoint(path, model=model, optimizer=optimizer)

    def measure_stall(staging: str, path: Path) -> float:
        started = time.perf_counter()
        handle = rankless.save_checkpoint(path, "s", model, optimizer, async_save=True, staging=staging, rng=False)
        seconds = time.perf_counter() - started
        handle.wait()
        return seconds

    stalls = {staging: partial(measure_stall, staging) for staging in ("eager", "overlapped")}
    return {"save": save, "load": load, **stalls}


WORKLOADS: dict[str, Callable[[int], Mapping[str, Work]]] = {
    "large": _build_large,
    "small": _build_small,
    **{layout: partial(_build_training, layout) for layout in states.LAYOUTS},
}

if __name__ == "__main__":
    main()
