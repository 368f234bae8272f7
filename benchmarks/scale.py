"""``python -m benchmarks.scale``: estimates of a save and a load on many ranks, from measured single operations.

It measures votes over the key-value store, planning, and the merging of CRCs (``benchmarks/crc_merging.py``) on this
machine, and takes the rest (disks, file system, network) from :data:`CLUSTER`. It prints a table for ``docs/scale.md``
and draws its plot.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from math import sqrt
from pathlib import Path

import msgspec
import torch.distributed as dist

from benchmarks import crc_merging
from benchmarks.measure import measure_seconds
from benchmarks.planning import PARAMETERS, build_plan, build_shards
from rankless.engine.comm.host_map import combine_outcomes, separate_outcomes
from rankless.engine.comm.vote import VoteOutcome, unpack_outcomes
from rankless.engine.integrity.crc_gather import MAX_FLAT_RANKS, bucket_size
from rankless.engine.integrity.fragments import FRAGMENT_BYTES
from rankless.ondisk.block_crcs import BLOCK_BYTES

RANKS = (8, 64, 512, 2048, 16384)


@dataclass(frozen=True)
class Cluster:
    """A parallel file system and its clients: bandwidths in bytes/s, latencies in s, as published by their makers."""

    write: float = 1e12
    a_client: float = 5e9
    creates: float = 20e3
    latency: float = 1e-3
    ranks_of_a_client: int = 8
    to_host: float = 25e9


CLUSTER = Cluster()

#: The votes of a save with a cached plan, with the one in which the ranks leave, without the one in which groups of
#: ranks report CRCs, and the data files a rank writes into.
VOTES, FILES = 4, 2

#: The bytes of state of each rank, and the mean time between failures, in seconds, of 16,384 ranks.
STATE, FAILURES = 350e6, 3.09 * 3600


@dataclass(frozen=True)
class Costs:
    """CPU seconds of a key that is set and read by rank 0, of an outcome decoded, of a plan, and of a CRC's work."""

    key: float
    outcome: float
    plan: float
    crc: crc_merging.Costs


def main() -> None:
    """Measure, print and draw."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__)
    parser.add_argument("--plot", type=Path, default=Path("docs/scale.svg"))
    options = parser.parse_args()
    costs = measure_costs()
    small = f"{costs.key * 1e6:.0f} us a key, {costs.outcome * 1e6:.2f} us an outcome"
    print(f"measured: {small}, {costs.plan:.2f} s a plan; a CRC: {costs.crc}\n")
    terms = {ranks: compute_save_terms(ranks, costs) for ranks in RANKS}
    names = list(next(iter(terms.values())))
    print("| ranks | " + " | ".join(names) + " | stall, eager | lost to stalls |")
    print("|---:|" + "---:|" * (len(names) + 2))
    for ranks, seconds in terms.items():
        stall = STATE / CLUSTER.to_host + VOTES * compute_vote_seconds(ranks, costs) / 2
        row = [f"{term:.2f}" for term in seconds.values()]
        print(f"| {ranks} | " + " | ".join(row) + f" | {stall:.2f} | {compute_lost_share(stall, ranks):.2%} |")
    print_hybrid(costs.crc)
    draw_plot(terms, options.plot)


def print_hybrid(costs: crc_merging.Costs, ranks: int = 16384) -> None:
    """Print how long CRCs of hybrid sharding take to merge, in buckets by the numbers of ranks and by their bytes."""
    tensors, buckets = 4 * PARAMETERS, count_groups(ranks)
    print("\n| shards | buckets | fragments at a bucket | at rank 0 | combine CRCs |\n|---:|---|---:|---:|---:|")
    for shards in (64, 256, 1024, 4096):
        job = crc_merging.Hybrid(ranks, shards, tensors, int(STATE * ranks / tensors))
        for name, (at_bucket, merged) in (
            ("by number, replicas first", job.count_by_number(replicas_first=True)),
            ("by number, shards first", job.count_by_number(replicas_first=False)),
            ("by bytes", job.count_by_place()),
        ):
            seconds = (at_bucket + buckets * merged) * costs.fold + (
                tensors + STATE * ranks / BLOCK_BYTES
            ) * costs.block
            print(f"| {shards} | {name} | {at_bucket} | {buckets * merged} | {seconds:.2f} |")


def compute_save_terms(ranks: int, costs: Costs) -> dict[str, float]:
    """Return the seconds of each part of a background save, by name."""
    total, clients = STATE * ranks, max(1, ranks / CLUSTER.ranks_of_a_client)
    tensors = 4 * PARAMETERS
    return {
        "plan": costs.plan,
        "votes": (VOTES + (ranks > MAX_FLAT_RANKS)) * compute_vote_seconds(ranks, costs),
        "open files": FILES * ranks / CLUSTER.creates + CLUSTER.latency,
        "write": max(total / CLUSTER.write, total / clients / CLUSTER.a_client),
        "CRCs told": count_store_fragments(ranks, tensors) * FRAGMENT_BYTES * costs.crc.byte,
        "CRCs folded": compute_merge_seconds(ranks, tensors, costs.crc),
    }


def compute_vote_seconds(ranks: int, costs: Costs) -> float:
    """Return the time of rank 0 in one vote: each host sends one key if there are several hosts."""
    hosts = -(-ranks // CLUSTER.ranks_of_a_client)
    return (ranks if hosts == 1 else hosts) * costs.key + ranks * costs.outcome


def count_store_fragments(ranks: int, tensors: int) -> float:
    """Return the fragments that go through the store: those of all ranks, and the merged ones of groups."""
    by_groups = count_groups(ranks) * count_group_fragments(ranks, tensors) if ranks > MAX_FLAT_RANKS else 0
    return ranks * tensors + by_groups


def compute_merge_seconds(ranks: int, tensors: int, costs: crc_merging.Costs) -> float:
    """Return the time to merge: the first ranks of all groups in parallel; then rank 0, to the CRCs of all blocks."""
    at_a_group = bucket_size(ranks) * tensors if ranks > MAX_FLAT_RANKS else 0
    at_rank_0 = (
        count_groups(ranks) * count_group_fragments(ranks, tensors) if ranks > MAX_FLAT_RANKS else ranks * tensors
    )
    return (at_a_group + at_rank_0) * costs.fold + (tensors + STATE * ranks / BLOCK_BYTES) * costs.block


def count_groups(ranks: int) -> int:
    """Return how many groups report to rank 0."""
    return -(-ranks // bucket_size(ranks))


def count_group_fragments(ranks: int, tensors: int) -> float:
    """Return a group's merged fragments: one for each tensor, and one for each further block that it spans."""
    return tensors + bucket_size(ranks) * STATE / BLOCK_BYTES


def compute_lost_share(stall: float, ranks: int) -> float:
    """Return the share of time lost to stalls and repeated work at the best interval (Young 1974, Daly 2006)."""
    between = FAILURES * 16384 / ranks
    return sqrt(2 * stall / between)


def measure_costs() -> Costs:
    """Measure the costs of single operations on this machine."""
    plan = measure_seconds(lambda: build_plan(*build_shards(4096)))
    return Costs(_measure_key(), _measure_outcome(), plan, crc_merging.measure_costs())


def draw_plot(terms: Mapping[int, Mapping[str, float]], path: Path) -> None:
    """Plot the stacked parts of a save by the number of ranks."""
    import matplotlib as mpl  # noqa: PLC0415 - only here, and slow to import

    mpl.use("agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    chart, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
    for name in next(iter(terms.values())):
        axes.plot(list(terms), [seconds[name] for seconds in terms.values()], marker="o", label=name)
    axes.set(xscale="log", yscale="log", xlabel="ranks", ylabel="seconds of a background save")
    axes.grid(which="both", alpha=0.25)
    axes.legend(fontsize=8)
    chart.savefig(path)
    plt.close(chart)


def _measure_key(number: int = 4096) -> float:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    keys = [f"vote/{rank}" for rank in range(number)]

    def vote() -> None:
        for key in keys:
            store.set(key, "0" * 64)
        store.multi_get(keys)

    return measure_seconds(vote) / number


def _measure_outcome(hosts: int = 512) -> float:
    ranks = range(CLUSTER.ranks_of_a_client)
    pack = msgspec.msgpack.Encoder().encode
    messages = [
        combine_outcomes([pack(VoteOutcome(f"{host} {rank}".encode().ljust(80))) for rank in ranks])
        for host in range(hosts)
    ]

    def decode() -> None:
        unpack_outcomes([outcome for message in messages for outcome in separate_outcomes(message)])

    return measure_seconds(decode) / (hosts * len(ranks))


if __name__ == "__main__":
    main()
