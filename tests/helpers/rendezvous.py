"""The key-value store of ranks in processes that a test starts, at a port that is bound when it is chosen.

A port that a test finds free and passes to its ranks may be taken before they bind it. Here the process that serves the
store binds port 0, and announces the port that it got in a file.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch.distributed as dist

#: Several times what importing torch takes on a busy machine.
_PATIENCE_SECONDS = 240.0


def serve_store(port_file: Path) -> dist.TCPStore:
    """Serve a store in this process. Write its port to a file, which must not exist."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    written = port_file.with_name(f"{port_file.name}.new")
    written.write_text(str(store.port))
    written.rename(port_file)
    return store


def join_store(port_file: Path) -> dist.TCPStore:
    """Connect to the store that another process serves, or will serve soon, and announces in a file."""
    ends = time.monotonic() + _PATIENCE_SECONDS
    while not port_file.exists():
        if time.monotonic() > ends:
            raise TimeoutError(f"no process has announced a store in {port_file} within {_PATIENCE_SECONDS:.0f} s")
        time.sleep(0.01)
    return dist.TCPStore("127.0.0.1", int(port_file.read_text()), is_master=False)
