"""``python -m campaigns.objects.listing SERVER``: times ``rankless ls`` of 1,000 checkpoints at a real object store.

One checkpoint is saved, and its objects are copied under the names of the others. The requests are counted by
``tests/unit/cli/test_ls.py``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from uuid import uuid4

import torch

import rankless
from campaigns.objects.server import S3Server
from campaigns.objects.servers import SERVERS
from rankless.run.pointers import pointer_path
from rankless.storage.http.object_reads import as_object
from rankless.storage.object_path import ObjectPath
from rankless.storage.store import map_requests

_ROUNDS = 3


def main() -> None:
    """Start the server, make the checkpoints, and print the seconds of a list."""
    parser = argparse.ArgumentParser(prog="python -m campaigns.objects.listing", description=__doc__)
    parser.add_argument("server", help=f"one of {', '.join(SERVERS)} that has the API of S3")
    parser.add_argument("--folder", type=Path, default=Path(".objects"), help="where servers are installed")
    parser.add_argument("--checkpoints", type=int, default=1000)
    options = parser.parse_args()
    folder = options.folder.resolve() / options.server
    folder.mkdir(parents=True, exist_ok=True)
    with SERVERS[options.server](folder) as server:
        if not isinstance(server, S3Server):
            parser.error(f"{options.server} has no API of S3")
        run = server.path(f"{uuid4().hex}/run")
        _make_checkpoints(run, options.checkpoints)
        seconds = median(_time_list(server, run, options.checkpoints) for _ in range(_ROUNDS))
    print(f"{options.server}: rankless ls of {options.checkpoints} checkpoints took {seconds:.1f} s")


def _make_checkpoints(run: ObjectPath, count: int) -> None:
    rankless.RunDirectory(run).save("step_0", {"w": torch.ones(100)}, step=0)
    store, folder = run.store, as_object(rankless.list_checkpoints(run)[0].path)
    files = {info.path.relative_to(folder): store.read_small(info.path) for info in store.list_objects(folder)}
    pointer = json.loads(store.read_small(pointer_path(run, "step_0", 1)))

    def copy(number: int) -> None:
        checkpoint_id, tag = f"{number:016x}", f"step_{number}"
        named = {"id": checkpoint_id, "step": number, "sequence": number + 1}
        for name, data in files.items():
            is_manifest = name.name == "manifest.json"
            content = json.dumps({**json.loads(data), **named, "tag": tag}).encode() if is_manifest else data
            store.replace_small(run / f"{tag}.{checkpoint_id}" / name, content)
        store.replace_small(pointer_path(run, tag, 1), json.dumps({**pointer, **named}).encode())

    map_requests(copy, range(1, count))


def _time_list(server: S3Server, run: ObjectPath, count: int) -> float:
    keys = {"AWS_ACCESS_KEY_ID": server.access_key, "AWS_SECRET_ACCESS_KEY": server.secret_key}
    command = [sys.executable, "-m", "rankless", "ls", str(run), "--json"]
    started = time.monotonic()
    done = subprocess.run(
        command, env={**os.environ, **keys, "AWS_ENDPOINT_URL": server.url}, check=True, capture_output=True, text=True
    )
    seconds = time.monotonic() - started
    listed = len(json.loads(done.stdout)["checkpoints"])
    if listed != count:
        raise RuntimeError(f"{listed} of {count} checkpoints were listed")
    return seconds


if __name__ == "__main__":
    main()
