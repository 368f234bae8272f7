"""``python -m benchmarks.scale_tables``: the tables of ``docs/scale.md``, from results of :mod:`benchmarks.scale`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from typing import Any

from benchmarks.scale import RANKS_PER_HOST, RESULTS, SAVES
from benchmarks.simulated_training import LARGE
from rankless.engine.io.upload_target import PART_BYTES
from rankless.ondisk.data_files import parse_size
from rankless.options import SaveOptions

PAGE = Path(__file__).parents[1] / "docs" / "scale.md"

#: The jobs of the tables that are computed.
RANKS = (8, 64, 1024, 16_384, 131_072)

#: The bytes of the buffers of a save on each rank, and of a checkpoint: bfloat16 with two moments in float32.
BUFFERS = 64 * 2**20
STATE = 10 * sum(prod(shape) for _, shape in LARGE.shapes())

#: The seconds in which a save into a store is to end, for the requests per second, and the further requests of a save.
SECONDS, FURTHER_REQUESTS = 60, 12

Results = dict[str, dict[str, dict[str, Any]]]


def main() -> None:
    """Write the tables."""
    results: Results = json.loads(RESULTS.read_text("utf-8"))
    PAGE.write_text(fill_tables(PAGE.read_text("utf-8"), results), "utf-8")


def fill_tables(page: str, results: Results) -> str:
    """Return a page with the tables at their marks."""
    tables: dict[str, Callable[[], Iterator[str]]] = {
        "saves": lambda: list_saves(results["simulated"], results["without generators"]),
        "memory": list_memory,
        "requests": list_requests,
    }
    for name, build in tables.items():
        opening, closing = f"<!-- table: {name} -->\n", "<!-- end -->"
        before, rest = page.split(opening)
        _, after = rest.split(closing, 1)
        page = f"{before}{opening}\n" + "\n".join(build()) + f"\n\n{closing}{after}"
    return page


def list_saves(jobs: dict[str, dict[str, Any]], without_generators: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Yield what saves cost jobs of simulated ranks, and the largest one without the states of random generators."""
    yield "| ranks | own bytes | first save | later save | messages | votes | CRCs | cells | memory |"
    yield "|---:|---:|---:|---:|---:|---:|---:|---:|---:|"
    for job in sorted(jobs.values(), key=lambda job: int(job["ranks"])):
        yield _describe_job(job, f"{job['ranks']:,}")
    largest = max(without_generators.values(), key=lambda job: int(job["ranks"]))
    yield _describe_job(largest, f"{largest['ranks']:,}, `rng=False`")


def _describe_job(job: dict[str, Any], name: str) -> str:
    first, *later = (job["saves"][name] for name in SAVES)
    traffic = later[0]["traffic"]
    seconds, server_seconds = (min(save[key] for save in later) for key in ("seconds", "server_seconds"))
    columns = (
        name,
        _megabytes(job["state_bytes"]),
        f"{first['seconds']:.2f} s, {first['server_seconds']:.2f} s",
        f"{seconds:.2f} s, {server_seconds:.2f} s",
        f"{sum(part[0] + part[2] for part in traffic.values()):,}",
        *(_megabytes(sum(traffic.get(part, [0] * 4)[1::2])) for part in ("votes", "CRCs", "cells")),
        _megabytes(job["memory"]),
    )
    return "| " + " | ".join(columns) + " |"


def list_memory() -> Iterator[str]:
    """Yield the memory that saves take on each host."""
    yield "| ranks | synchronous | asynchronous | tier | tier with one copy |"
    yield "|---:|---:|---:|---:|---:|"
    for ranks in RANKS:
        buffers, share = RANKS_PER_HOST * BUFFERS, STATE * RANKS_PER_HOST / ranks
        sizes = (buffers, buffers + share, buffers + 3 * share, buffers + 5 * share)
        yield f"| {ranks:,} | " + " | ".join(f"{size / 1e9:,.1f} GB" for size in sizes) + " |"


def list_requests() -> Iterator[str]:
    """Yield the requests of a save into an object store."""
    files = STATE // parse_size(SaveOptions().max_shard_size) + 1
    requests = STATE // PART_BYTES + 2 * files + FURTHER_REQUESTS
    size = f"{LARGE.name}, {STATE / 1e12:.2f} TB"
    yield f"{size}: {files:,} files, {requests:,} requests, {requests // SECONDS:,} a second for a save of a minute."


def _megabytes(nbytes: float) -> str:
    return f"{nbytes / 1e6:,.1f} MB"


if __name__ == "__main__":
    main()
