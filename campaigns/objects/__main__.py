"""``python -m campaigns.objects``: runs real object stores, and saves into them while ranks are killed and stopped.

It proves "Object stores" of ``docs/failure-model.md``. For each server: the conformance suite of stores; then single
files, conversions and DCP's checkpoints (:mod:`campaigns.objects.outputs`) and chains of jobs
(:mod:`campaigns.objects.chains`), first at the server itself, then through a proxy that breaks connections
(:mod:`campaigns.objects.proxy`). The first run installs the servers into a folder. It needs root, Debian for Ceph, npm
for Azurite, and 2.5 GB. It exits with 1 on any violation.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from uuid import uuid4

from campaigns.objects import oracle
from campaigns.objects.chains import ChainResult, run_chain
from campaigns.objects.outputs import check_outputs
from campaigns.objects.proxy import FaultyProxy
from campaigns.objects.server import Server
from campaigns.objects.servers import SERVERS

_SUITE = "tests/unit/storage/test_store_conformance.py"


def main() -> int:
    """Run the campaign on the chosen servers, and print a line for each part."""
    parser = argparse.ArgumentParser(prog="python -m campaigns.objects", description=__doc__)
    parser.add_argument("servers", nargs="*", help=f"some of {', '.join(SERVERS)} (default: all)")
    parser.add_argument("--folder", type=Path, default=Path(".objects"), help="where servers are installed")
    parser.add_argument("--chains", type=int, default=10, help="chains of jobs at each server (default: 10)")
    parser.add_argument("--seed", type=int, default=0, help="the number of the first chain (default: 0)")
    options = parser.parse_args()
    if unknown := set(options.servers) - SERVERS.keys():
        parser.error(f"there is no server {', '.join(sorted(unknown))}")
    violations = 0
    for name in options.servers or SERVERS:
        folder = options.folder.resolve() / name
        folder.mkdir(parents=True, exist_ok=True)
        with SERVERS[name](folder) as server:
            violations += _check_conformance(name, server)
            for with_proxy in (False, True):
                violations += _check_outputs(name, server, with_proxy, options.seed)
                violations += _run_chains(name, server, range(options.seed, options.seed + options.chains), with_proxy)
    return 1 if violations else 0


def _check_conformance(name: str, server: Server) -> int:
    command = [sys.executable, "-m", "pytest", "-q", "-k", "real", _SUITE]
    done = subprocess.run(command, check=False, env={**os.environ, **server.environment()})
    print(f"{name}: the conformance suite {'failed' if done.returncode else 'passed'}", flush=True)
    return done.returncode


def _check_outputs(name: str, server: Server, with_proxy: bool, seed: int) -> int:
    folder = f"{uuid4().hex}/out"
    with tempfile.TemporaryDirectory() as scratch, _make_proxy(server, seed) if with_proxy else nullcontext() as proxy:
        path = server.path(folder, proxy.url if proxy else "")
        direct = oracle.Run(server.path(folder), server.reader())
        result = check_outputs(path, direct, Path(scratch), server.takes_small_parts)
    return _report(name, with_proxy, "files, conversions and DCP's checkpoints", result.events, result.violations)


def _make_proxy(server: Server, seed: int) -> FaultyProxy:
    return FaultyProxy(server.url, seed, changes_bytes=server.notices_changes)


def _run_chains(name: str, server: Server, seeds: range, with_proxy: bool) -> int:
    started, total = time.monotonic(), ChainResult(Counter())
    with tempfile.TemporaryDirectory() as scratch:
        for seed in seeds:
            with _make_proxy(server, seed) if with_proxy else nullcontext() as proxy:
                name_of_run = f"{uuid4().hex}/run"
                run = server.path(name_of_run, proxy.url if proxy else "")
                direct = oracle.Run(server.path(name_of_run), server.reader())
                result = run_chain(
                    seed,
                    run,
                    direct,
                    Path(scratch),
                    in_small_parts=server.takes_small_parts,
                    count_changes=partial(proxy.faults.__getitem__, "duplicated") if proxy else int,
                )
                result.events.update(proxy.faults if proxy else {})
            total.events.update(result.events)
            total.failures += result.failures
            total.violations += result.violations
        if not with_proxy:
            total.violations += [f"a job failed, although its connections were intact: {why}" for why in total.failures]
    what = f"{len(seeds)} chains, {time.monotonic() - started:.0f} s"
    return _report(name, with_proxy, what, total.events, total.violations)


def _report(name: str, with_proxy: bool, what: str, events: Counter[str], violations: Sequence[str]) -> int:
    """Print what one part has done. Return the number of violations."""
    where = "through a faulty proxy" if with_proxy else "directly"
    counts = ", ".join(f"{count} {event}" for event, count in sorted(events.items()))
    print(f"{name}, {where}: {what}: {counts}", flush=True)
    for violation in violations:
        print(f"VIOLATION {name}, {where}: {violation}", flush=True)
    return len(violations)


if __name__ == "__main__":
    sys.exit(main())
