"""The CPU time and the memory of a client of an object store, against other clients, by HTTP and by HTTPS.

A server in another process keeps the objects in memory (:mod:`benchmarks.object_server`). The network is the loopback
interface, so the cost of packets in the kernel is part of each figure. Each save and each load runs in a new process
(:mod:`benchmarks.object_client`), and each loaded tensor is compared with the saved one. ``make bench-objects``.
"""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from benchmarks import object_ranks
from benchmarks.measure import Figure, Table
from benchmarks.object_client import Cost, Task
from benchmarks.object_peers import BARE, BARE_CRC, PACKAGES, PEERS, S3FS, TRANSFERS
from benchmarks.object_server import Endpoint, ObjectServer
from benchmarks.parallel import run_on_ranks
from benchmarks.peers import OURS
from benchmarks.setting import Setting

#: The peers that save as another one does.
_LOADS_ONLY = frozenset({"obstore, one request a load"})

#: The costs of all rounds, by work and peer.
Costs = dict[str, dict[str, list[Cost]]]


def measure_object_store(setting: Setting) -> Iterator[Table]:
    """Measure one process."""
    if _skip():
        return
    with ObjectServer(setting.folder) as server:
        for endpoint in (server.plain, server.secure):
            costs: Costs = {"save": {name: [] for name in PEERS}, "load": {name: [] for name in PEERS}}
            order = random.Random(0)
            for _ in range(setting.rounds):
                for name in order.sample(list(PEERS), len(PEERS)):
                    _measure_peer(name, endpoint, setting.nbytes, costs)
                    server.clear()
            yield from _build_tables(f"{setting.gigabytes}, {_name_protocol(endpoint)}", setting.nbytes, costs)


def measure_object_store_ranks(setting: Setting) -> Iterator[Table]:
    """Measure two ranks, with the CPU seconds of both."""
    if _skip():
        return
    with ObjectServer(setting.folder) as server:
        for endpoint in (server.plain, server.secure):
            part = partial(object_ranks.measure_ranks, endpoint, _name_protocol(endpoint))
            for table in run_on_ranks(object_ranks.RANKS, setting, part):
                yield _compare_in_note(table)
            server.clear()


def _skip() -> bool:
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        print(f"skipping the object store, because of missing packages: {', '.join(missing)}; see make bench-objects")
    return bool(missing)


def _name_protocol(endpoint: Endpoint) -> str:
    return "HTTP" if endpoint.is_plain else "HTTPS"


def _measure_peer(name: str, endpoint: Endpoint, nbytes: int, costs: Costs) -> None:
    for work, of_peers in costs.items():
        of_peers[name].append(Task(name, work, endpoint.url, endpoint.ca_file, nbytes).run_apart())


def _build_tables(case: str, nbytes: int, costs: Costs) -> Iterator[Table]:
    for work, of_peers in costs.items():
        shown = {name: rounds for name, rounds in of_peers.items() if work == "load" or name not in _LOADS_ONLY}
        title = f"object store, {work} of {case}"
        processor = {name: _build_figure([cost.processor * 1e9 / nbytes for cost in of]) for name, of in shown.items()}
        yield _compare_in_note(Table(f"CPU: {title}", "CPU s/GB", processor, (BARE, BARE_CRC)))
        memory = {name: Figure((max(cost.memory for cost in of),)) for name, of in shown.items()}
        yield Table(f"memory in addition to one state: {title}", "MB", memory, note="The most of all rounds.")


def _build_figure(values: Sequence[float]) -> Figure:
    return Figure(tuple(values))


def _compare_in_note(table: Table) -> Table:
    """Return the table with the ratios of rankless to the best transfer client, and to DCP."""
    medians = {name: figure.median for name, figure in table.figures.items()}
    best = min((name for name in TRANSFERS if name in medians), key=lambda name: medians[name], default=S3FS)
    ratios = "; ".join(f"{_divide(medians, name):.2f} of {name}" for name in dict.fromkeys((best, S3FS)))
    return Table(table.title, table.unit, table.figures, table.limits, f"{OURS}: {ratios}.")


def _divide(medians: Mapping[str, float], name: str) -> float:
    return medians[OURS] / medians[name]
