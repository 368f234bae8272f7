"""``rankless.save_model`` and ``load_model`` against ColossalAI's calls of the same form: sharded safetensors files.

ColossalAI runs in an environment of its own, which is created at its first use. Its process times itself.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial

import rankless
from benchmarks import peers, raw, states
from benchmarks.measure import Contender, Table, time_interleaved
from benchmarks.peers import OURS
from benchmarks.request_process import RequestProcess
from benchmarks.setting import Setting
from tests.interop.colossalai import environment

COLOSSALAI = "ColossalAI"


def measure_colossalai(setting: Setting) -> Iterator[Table]:
    """Measure the weights of a Llama-like model in one process."""
    if reason := environment.ready():
        print(f"skipping the comparison with ColossalAI: {reason}")
        return
    model, folder = states.build_weights(setting.nbytes), setting.folder
    ours, theirs = folder / OURS, folder / COLOSSALAI
    with _start_colossalai(setting.nbytes) as peer:
        peer.wait_until_ready()
        saves = {
            OURS: peers.make_fresh(ours, lambda path: rankless.save_model(model, path, shard=True)),
            COLOSSALAI: peers.make_fresh(theirs, partial(peer.request, "save")),
        }
        loads = {
            OURS: peers.make_cold(folder, partial(rankless.load_model, model, ours)),
            COLOSSALAI: peers.make_cold(folder, partial(peer.request, "load", theirs)),
        }
        case = f"weights of {setting.gigabytes}, sharded safetensors files"
        yield time_interleaved(saves, setting.rounds).build_table(f"save, {case}, durable")
        yield time_interleaved(loads, setting.rounds).build_table(f"load, {case}, cold")
        for load in loads.values():
            load.run()
        warm = {name: Contender(load.run) for name, load in loads.items()}
        yield time_interleaved(warm, setting.rounds).build_table(f"load, {case}, from the page cache")
    raw.empty_directory(folder)


def _start_colossalai(nbytes: int) -> RequestProcess:
    command = [str(environment.PYTHON), "-m", "benchmarks.booster_peer", str(nbytes)]
    quiet = {"PYTHONWARNINGS": "ignore", "HF_HUB_OFFLINE": "1"}
    return RequestProcess(command, {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | quiet)
