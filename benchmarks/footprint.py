"""Memory in addition to the state: the increase of a process's peak over its memory before a save or a load.

Each is measured in its own process. Pages of mapped files count too.
"""

from __future__ import annotations

import multiprocessing as mp
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks import peers, raw, states
from benchmarks.measure import Figure, Table
from benchmarks.setting import Setting


def measure_memory(setting: Setting) -> Iterator[Table]:
    """Measure one process with few large tensors."""
    for call, measure in (("save", _measure_save), ("load", _measure_load)):
        figures = {name: Figure((_measure_apart(measure, setting, name),)) for name in _list_names(setting, call)}
        yield Table(f"memory beside the state, {call} of {setting.gigabytes}", "MB", figures)
    raw.empty_directory(setting.folder)


def _list_names(setting: Setting, call: str) -> list[str]:
    of = peers.build_saves if call == "save" else peers.build_loads
    return list(of(setting.folder, {}))


def _measure_apart(measure: Callable[[Setting, str], float], setting: Setting, name: str) -> float:
    context = mp.get_context("spawn")
    results = context.SimpleQueue()
    process = context.Process(target=_measure, args=(measure, setting, name, results))
    process.start()
    process.join()
    return float(results.get())


def _measure(measure: Callable[[Setting, str], float], setting: Setting, name: str, results: Any) -> None:
    results.put(measure(setting, name))


def _measure_save(setting: Setting, name: str) -> float:
    warm, contender = (
        peers.build_saves(setting.folder, state)[name]
        for state in (states.build_large_tensors(2**20), states.build_large_tensors(setting.nbytes))
    )
    warm.run()
    contender.prepare()
    return measure_rise(contender.run)


def _measure_load(setting: Setting, name: str) -> float:
    load = peers.build_loads(setting.folder, states.build_large_tensors(setting.nbytes))[name]
    return measure_rise(load)


def measure_rise(run: Callable[[], object]) -> float:
    """Return by how many MB this process's peak rises, modules imported at first use included."""
    before = _read_status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # this resets the peak
    run()
    return (_read_status("VmHWM") - before) * 1024 / 1e6


def _read_status(field: str) -> int:
    """Return a field of this process's status in KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))
