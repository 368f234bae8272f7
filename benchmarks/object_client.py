"""``python -m benchmarks.object_client REQUEST``: one save or load in a fresh process, for ``object_store``.

It prints the CPU seconds of all threads of this process, and by how much its memory rose, in MB. A small save (and a
small load) of the same kind goes before it: imports and the first connections do not count.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

from benchmarks.footprint import measure_rise
from benchmarks.object_peers import CREDENTIALS, PEERS, ObjectPeer
from benchmarks.object_server import HOST, Endpoint
from benchmarks.peers import State
from benchmarks.request_process import ROOT

#: The bytes of a large tensor, and of the state that is saved and loaded first.
LARGE, WARM = 64 * 10**6, 32 * 10**6

#: The number of small tensors, of 1000 elements each.
SMALL = 8


@dataclass(frozen=True)
class Cost:
    """The CPU seconds, and the memory in addition to one state in MB."""

    processor: float
    memory: float


@dataclass(frozen=True)
class Task:
    """A save or a load by one peer."""

    peer: str
    work: str
    url: str
    ca_file: str
    nbytes: int

    def run_apart(self) -> Cost:
        """Run it in a new process."""
        command = [sys.executable, "-m", "benchmarks.object_client", json.dumps(asdict(self))]
        ended = subprocess.run(command, cwd=ROOT, env=_make_environment(self.ca_file), check=False, capture_output=True)
        if ended.returncode:
            raise ChildProcessError(f"{self} has failed:\n{ended.stderr.decode()}")
        return Cost(**json.loads(ended.stdout.splitlines()[-1]))


def build_state(nbytes: int) -> State:
    """Return large tensors, and a few small ones. Equal calls return equal bytes."""
    generator = torch.Generator().manual_seed(0)
    sizes = [LARGE] * (nbytes // LARGE) + [nbytes % LARGE // 8 * 8]
    tensors = {}
    for number, size in enumerate(filter(None, sizes)):
        words = torch.empty(size // 4, dtype=torch.int32).random_(generator=generator)
        tensors[f"layers.{number}.weight"] = words.view(torch.bfloat16 if number % 2 else torch.float32)
    return tensors | {f"layers.{number}.norm": torch.rand(1000, generator=generator) for number in range(SMALL)}


def check_equal(loaded: State, expected: State) -> None:
    """Raise unless all bytes are equal."""
    if loaded.keys() != expected.keys():
        raise ValueError(f"the loaded tensors are {sorted(loaded)}, and not {sorted(expected)}")
    for name, tensor in expected.items():
        if loaded[name].dtype != tensor.dtype or not torch.equal(as_bytes(loaded[name]), as_bytes(tensor)):
            raise ValueError(f"{name} has other bytes than were saved")


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def main() -> None:
    """Do the task of the command line, and print its cost."""
    warnings.simplefilter("ignore")
    task = Task(**json.loads(sys.argv[1]))
    peer = PEERS[task.peer](Endpoint(task.url, task.ca_file))
    cost = (_save if task.work == "save" else _load)(peer, task.nbytes)
    print(json.dumps(asdict(cost)), flush=True)


def _save(peer: ObjectPeer, nbytes: int) -> Cost:
    peer.save("warm", peer.pack(build_state(WARM)))
    packed = peer.pack(build_state(nbytes))
    return _measure(lambda: peer.save("run", packed))


def _load(peer: ObjectPeer, nbytes: int) -> Cost:
    peer.load("warm", peer.make_target(peer.pack(build_state(WARM))))
    target, loaded = peer.make_target(peer.pack(build_state(nbytes))), []
    cost = _measure(lambda: loaded.append(peer.load("run", target)))
    check_equal(peer.unpack(loaded[0]), build_state(nbytes))
    return Cost(cost.processor, cost.memory - (nbytes / 1e6 if peer.allocates else 0.0))


def _measure(run: Callable[[], object]) -> Cost:
    before: list[float] = []

    def run_timed() -> None:
        started = time.process_time()
        run()
        before.append(time.process_time() - started)

    rise = measure_rise(run_timed)
    return Cost(before[0], rise)


def _make_environment(ca_file: str) -> dict[str, str]:
    """Return an environment without proxies and settings of AWS's tools. Some clients have no argument for a CA."""
    key, secret = CREDENTIALS
    kept = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    return kept | {
        "AWS_ACCESS_KEY_ID": key,
        "AWS_SECRET_ACCESS_KEY": secret,
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_EC2_METADATA_DISABLED": "true",
        "SSL_CERT_FILE": ca_file,
        "no_proxy": HOST,
        "NO_PROXY": HOST,
    }


if __name__ == "__main__":
    main()
