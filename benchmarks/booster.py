"""``holdfast.save_model`` and ``load_model`` against ColossalAI's calls of the same form: sharded safetensors files.

ColossalAI runs in an environment of its own, which is created at its first use. Its process times itself.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Self

import holdfast
from benchmarks import peers, raw, states
from benchmarks.measure import Contender, Table, Told, interleaved
from benchmarks.peers import OURS
from benchmarks.setting import Setting
from tests.interop.colossalai import environment

COLOSSALAI = "ColossalAI"


def colossalai(setting: Setting) -> Iterator[Table]:
    """Measure the weights of a Llama-like model in one process."""
    if reason := environment.ready():
        print(f"skipping the comparison with ColossalAI: {reason}")
        return
    model, folder = states.weights(setting.nbytes), setting.folder
    ours, theirs = folder / OURS, folder / COLOSSALAI
    with Peer(setting.nbytes) as peer:
        saves = {
            OURS: peers.fresh(ours, lambda path: holdfast.save_model(model, path, shard=True)),
            COLOSSALAI: peers.fresh(theirs, partial(peer.ask, "save")),
        }
        loads = {
            OURS: peers.cold(folder, partial(holdfast.load_model, model, ours)),
            COLOSSALAI: peers.cold(folder, partial(peer.ask, "load", theirs)),
        }
        case = f"weights of {setting.gigabytes}, sharded safetensors files"
        yield interleaved(saves, setting.rounds).table(f"save, {case}, durable")
        yield interleaved(loads, setting.rounds).table(f"load, {case}, cold")
        for load in loads.values():
            load.run()
        warm = {name: Contender(load.run) for name, load in loads.items()}
        yield interleaved(warm, setting.rounds).table(f"load, {case}, from the page cache")
    raw.empty(folder)


class Peer:
    """A process that runs ColossalAI."""

    def __init__(self, nbytes: int) -> None:
        command = [str(environment.PYTHON), "-m", "benchmarks.booster_peer", str(nbytes)]
        own = {"PYTHONWARNINGS": "ignore", "HF_HUB_OFFLINE": "1"}
        env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | own
        root, pipe = Path(__file__).parents[1], subprocess.PIPE
        self._process = subprocess.Popen(command, cwd=root, env=env, stdin=pipe, stdout=pipe, text=True)

    def __enter__(self) -> Self:
        self._answer()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def ask(self, work: str, folder: Path) -> Told:
        """Request an action. Return the seconds that it took by the process's own clock."""
        if self._process.stdin is not None:
            print(work, folder, file=self._process.stdin, flush=True)
        return Told(float(self._answer()))

    def _answer(self) -> str:
        line = self._process.stdout.readline() if self._process.stdout is not None else ""
        if not line:
            raise ChildProcessError("ColossalAI's process has ended; what it wrote above says why")
        return line
