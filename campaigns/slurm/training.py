"""The training of the campaign, submitted as ``train.py``: what a step does follows from its number alone.

So a training that was interrupted ends with the bits of one that was not. Rank 0 appends to ``events.log`` what the
campaign judges. ``settings.json`` has the number of steps, and the folder of the local tier.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

import rankless

RUN, LOG, SETTINGS = "runs/slurm", "events.log", "settings.json"

#: The bytes of the state: two linear layers of 64 values, each parameter with two moments.
STATE_BYTES = 2 * (64 * 64 + 64) * 4 * 3

#: How often is saved, how long a step takes, and how long ranks wait for a dead one: less than ``--signal`` says.
SAVE_EVERY, SECONDS, WAIT = 10, 0.1, 120


def note(kind: str, value: object) -> None:
    """Append an event to the log, on rank 0."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        attempt = f"{os.environ.get('SLURM_JOB_ID', '')}.{os.environ.get('SLURM_RESTART_COUNT', '0')}"
        with Path(LOG).open("a", encoding="utf-8") as log:
            log.write(json.dumps([attempt, kind, value]) + "\n")


def listen(event: rankless.Event) -> None:
    """Note what is durable, and what is complete in the local tier."""
    if isinstance(event, rankless.Saved):
        note("durable", event.step)
    elif isinstance(event, rankless.SavedLocally):
        note("local", event.step)


def set_gradients(model: torch.nn.Module, step: int) -> None:
    """Give all parameters gradients that depend on the step alone: averages over ranks would be rounded."""
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        whole = torch.randn(parameter.shape, generator=generator)
        if isinstance(parameter, DTensor):
            whole = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.grad = whole


def digest(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Return a digest of all parameters and moments; all ranks call it."""
    states = (state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq"))
    found = hashlib.sha256()
    for tensor in (*model.parameters(), *states):
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        found.update(whole.detach().numpy().tobytes())
    return found.hexdigest()


def train(steps: int, tier: str | None) -> bool:
    """Train up to a step, or until a signal. Return whether it is finished."""
    torch.set_num_threads(1)  # MKL's first square root was seen to be less exact in its second thread
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64))
    if dist.is_initialized():
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters())
    local = None if tier is None else rankless.LocalTier(tier, drain_every=3)
    with rankless.Checkpointer(
        RUN,
        model=model,
        optimizer=optimizer,
        save_every=SAVE_EVERY,
        keep=3,
        async_save=True,
        local=local,
        timeout=WAIT,
        on_event=listen,
    ) as checkpointer:
        note("loading", RUN)
        start = checkpointer.resume()
        note("source", checkpointer.restored.source if checkpointer.restored else "")
        note("resumed", start)
        for step in range(start + 1, steps + 1):
            set_gradients(model, step)
            optimizer.step()
            time.sleep(SECONDS)
            note("step", step)
            if checkpointer.step(step):
                note("stopped", step)
                break
    note("left", checkpointer.last_step)  # the end of the block has made it durable
    if checkpointer.last_step < steps:
        return False
    note("finished", digest(model, optimizer))
    return True


def main() -> int:
    """Train as ``settings.json`` says. Return 0 if no further attempt is needed, as the guide's training does."""
    settings = json.loads(Path(SETTINGS).read_text(encoding="utf-8"))
    if "RANK" in os.environ:
        dist.init_process_group("gloo", timeout=timedelta(seconds=WAIT))
    try:
        is_finished = train(settings["steps"], settings["tier"])
    except rankless.SupersededError as error:
        note("superseded", str(error))
        if os.environ["RANK"] == "0":
            print(error, file=sys.stderr)
        return 0
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0 if is_finished else 1


if __name__ == "__main__":
    sys.exit(main())
