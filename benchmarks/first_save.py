"""One process that imports a library, saves a small state for the first time, and saves it again.

``python -m benchmarks.first_save LIBRARY FOLDER SAVES``, which :mod:`benchmarks.start` runs, steps AdamW before it
imports the library. It prints the seconds of processor time of the import, the first save and the first load together,
and the median of the wall seconds of ``SAVES`` further saves, each after a step and a rest. Processor time, because
other programs of the machine must not count. DCP syncs its files by default, as rankless does, but no directory: after
a power failure its checkpoint may have no name. The limits are loops that only write and sync.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from benchmarks.measure import REST
from benchmarks.raw import sync_path

#: 33 kB of parameters and moments.
_WIDTH = 52

#: A save into a new path, and a load from it.
Save = Callable[[Path], object]
Load = Callable[[Path], object]


def main() -> None:
    """Measure one library, which the command line names."""
    library, folder, saves = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    model, optimizer = _build_state()
    began = time.process_time()
    save, load = (LIBRARIES | LIMITS)[library](model, optimizer, folder)
    save(folder / "first")
    load(folder / "first")
    first = time.process_time() - began
    later = []
    for number in range(saves):
        optimizer.step()
        time.sleep(REST)
        later.append(_time_save(save, folder / f"later_{number}"))
    print(json.dumps({"first": first, "later": statistics.median(later) if later else 0.0}))


def _build_state() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Linear(_WIDTH, _WIDTH)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(_WIDTH)).sum().backward()
    optimizer.step()
    return model, optimizer


def _time_save(save: Save, path: Path) -> float:
    began = time.perf_counter()
    save(path)
    return time.perf_counter() - began


def _import_functions(model: torch.nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> tuple[Save, Load]:
    import rankless  # noqa: PLC0415 - the import is measured, here and below

    def save(path: Path) -> None:
        rankless.save_checkpoint(folder, path.name, model, optimizer)

    def load(path: Path) -> None:
        rankless.load_checkpoint(folder, path.name, model, optimizer)

    return save, load


def _import_checkpointer(model: torch.nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> tuple[Save, Load]:
    import rankless  # noqa: PLC0415

    checkpointer = rankless.Checkpointer(folder, model=model, optimizer=optimizer)

    def save(path: Path) -> None:
        checkpointer.save(path.name)

    def load(path: Path) -> None:
        checkpointer.resume(path.name)

    return save, load


def _import_dcp(model: torch.nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> tuple[Save, Load]:
    import torch.distributed.checkpoint as dcp  # noqa: PLC0415

    del folder

    def save(path: Path) -> None:
        dcp.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=path)

    def load(path: Path) -> None:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        dcp.load(state, checkpoint_id=path)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    return save, load


def _import_durable_dcp(model: torch.nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> tuple[Save, Load]:
    save, load = _import_dcp(model, optimizer, folder)

    def save_durably(path: Path) -> None:
        save(path)
        sync_path(path)
        sync_path(path.parent)

    return save_durably, load


def _build_bare(model: torch.nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> tuple[Save, Load]:
    save, _ = _import_functions(model, optimizer, folder)
    save(folder / "files")
    return _repeat_writes(folder / "files"), _load_nothing


def _build_bare_file(model: torch.nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> tuple[Save, Load]:
    save, _ = _import_functions(model, optimizer, folder)
    save(folder / "files")
    joined = folder / "joined"
    joined.mkdir()
    (joined / "file").write_bytes(
        b"".join(path.read_bytes() for path in (folder / "files").rglob("*") if path.is_file())
    )
    return _repeat_writes(joined), _load_nothing


def _repeat_writes(source: Path) -> Save:
    """Return the least that writes the files in ``source`` anew such that they appear at once, and are durable then."""
    folders = [path.relative_to(source) for path in sorted(source.rglob("*")) if path.is_dir()]
    files = {path.relative_to(source): path.read_bytes() for path in sorted(source.rglob("*")) if path.is_file()}

    def save(path: Path) -> None:
        pending = path.parent / f".{path.name}"
        pending.mkdir()
        for name in folders:
            (pending / name).mkdir()
        for name, data in files.items():
            (pending / name).write_bytes(data)
        with ThreadPoolExecutor() as pool:  # syncs at the same time wait for one commit of the file system
            list(pool.map(sync_path, [pending, *pending.rglob("*")]))
        pending.rename(path)
        sync_path(path.parent)

    return save


def _load_nothing(path: Path) -> None:
    del path


LIBRARIES: dict[str, Callable[[torch.nn.Module, torch.optim.Optimizer, Path], tuple[Save, Load]]] = {
    "rankless": _import_functions,
    "rankless, Checkpointer": _import_checkpointer,
    "PyTorch DCP": _import_dcp,
    "PyTorch DCP, its directories synced": _import_durable_dcp,
}


#: What no library that makes the same promise can beat: as many files, and as few as possible.
LIMITS: dict[str, Callable[[torch.nn.Module, torch.optim.Optimizer, Path], tuple[Save, Load]]] = {
    "bare writes and syncs of the same files": _build_bare,
    "bare write and sync of one file": _build_bare_file,
}


if __name__ == "__main__":
    main()
