"""``python -m campaigns.hosts.agent NUMBER [MODULE …]``, on a host: imports modules, and serves calls."""

from __future__ import annotations

import importlib
import sys
import time

from campaigns.hosts import network
from campaigns.hosts.workers import PORT, serve


def main() -> None:
    """Import modules once, so that a process of a call, which is a fork, has them. Then serve."""
    number, *modules = sys.argv[1:]
    started = time.monotonic()
    for module in modules:
        importlib.import_module(module)
    print(f"imported {modules} in {time.monotonic() - started:.1f} s", flush=True)
    serve(f"{network.CONTROL}.{number}", PORT)


if __name__ == "__main__":
    main()
