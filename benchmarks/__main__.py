"""``python -m benchmarks`` runs cases, prints their tables and stores them in ``benchmarks/results``."""

from __future__ import annotations

import argparse
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from benchmarks import (
    amplification,
    booster,
    conversion,
    dcp_planning,
    dense,
    edits,
    footprint,
    foreign,
    incremental,
    loop,
    machine,
    many_tensors,
    mergekit_peer,
    nxd,
    object_store,
    parallel,
    planning,
    report,
    several_hosts,
    single,
    split_tensor,
    stall,
    start,
    tensor_statistics,
)
from benchmarks.measure import Table
from benchmarks.setting import Setting

CASES: dict[str, Callable[[Setting], Iterator[Table]]] = {
    "large": single.measure_large,
    "huge": single.measure_huge,
    "small": single.measure_small,
    "memory-disk": single.measure_memory_disk,
    "layouts": parallel.measure_layouts,
    "resharded": parallel.measure_resharding,
    "split-tensor": split_tensor.measure_split_tensor,
    "small-2-ranks": parallel.measure_small,
    "many-tensors": many_tensors.measure_many_tensors,
    "many-parameters": many_tensors.measure_many_parameters,
    "stall": stall.measure_stall,
    "memory": footprint.measure_memory,
    "conversion": conversion.measure_conversion,
    "edits": edits.measure_edits,
    "merges": mergekit_peer.measure_merges,
    "nxd": nxd.measure_nxd,
    "foreign": foreign.measure_foreign,
    "colossalai": booster.measure_colossalai,
    "incremental": incremental.measure_incremental,
    "dense": dense.measure_dense,
    "loop": loop.measure_loop,
    "amplification": amplification.measure_amplification,
    "planning": planning.measure_planning,
    "planning-dcp": dcp_planning.measure_dcp_planning,
    "start": start.measure_start,
    "statistics": tensor_statistics.measure_statistics,
    "several-hosts": several_hosts.measure_several_hosts,
    "object-store": object_store.measure_object_store,
    "object-store-2-ranks": object_store.measure_object_store_ranks,
}


def main() -> None:
    """Run the cases that the command line names."""
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"cases to run (default: all): {', '.join(CASES)}")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--gigabytes", type=float, default=2.0, help="size of a large state (default: 2)")
    parser.add_argument("--folder", type=Path, default=Path.cwd(), help="directory on the disk to measure")
    parser.add_argument("--results", type=Path, default=report.RESULTS, help="directory for tables and the plot")
    options = parser.parse_args()
    if unknown := set(options.cases) - CASES.keys():
        parser.error(f"there is no case {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    setting = Setting(options.folder, options.rounds, int(options.gigabytes * 1e9))
    for name in options.cases or CASES:
        with tempfile.TemporaryDirectory(prefix=".bench-", dir=options.folder, ignore_cleanup_errors=True) as folder:
            for table in CASES[name](replace(setting, folder=Path(folder))):
                print("\n".join(report.format_table(table)), "\n", flush=True)
                report.store_tables([table], options.results, machine.describe_machine(setting, options.cases))


if __name__ == "__main__":
    main()
