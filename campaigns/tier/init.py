"""``python -m campaigns.tier.init NUMBER [MODULE …]``: the first process of a host. If it ends, so do all others."""

from __future__ import annotations

import importlib
import socket
import sys

from campaigns.common.programs import run
from campaigns.hosts.workers import PORT, serve


def main() -> None:
    """Give the host a name and a memory of its own, import modules once, and serve calls."""
    number, *modules = sys.argv[1:]
    socket.sethostname(f"host{number}")
    run("mount", "-t", "tmpfs", "-o", "huge=within_size,mode=1777", "none", "/dev/shm")
    for module in modules:
        importlib.import_module(module)
    serve("", PORT)


if __name__ == "__main__":
    main()
