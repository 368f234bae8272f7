"""The real package's side, in its own environment: ``peer.py save|load FOLDER`` in one process or under torchrun.

``save`` trains three steps and saves in every form. ``load`` loads every form and trains five more steps each, and
leaves the results in torch.save files, which the tests read. On the CPU the package lacks ``synchronize``.
"""

import copy
import os
import sys
from pathlib import Path
from typing import Any

import colossalai
import torch
import torch.distributed as dist
from colossalai.accelerator.cpu_accelerator import CpuAccelerator
from colossalai.booster import Booster
from colossalai.booster.plugin import TorchDDPPlugin
from net import cases, save_all, start, state, train

CpuAccelerator.synchronize = lambda *_, **__: None


def boosted(*, tied: bool, seed: int) -> tuple[Any, Any, Any, Any]:
    model, optimizer, scheduler = start(tied=tied, seed=seed)
    if not dist.is_initialized():
        return Booster(), model, optimizer, scheduler
    booster = Booster(plugin=TorchDDPPlugin())
    model, optimizer, _, _, scheduler = booster.boost(model, optimizer, lr_scheduler=scheduler)
    return booster, model, optimizer, scheduler


def plain(model: Any, optimizer: Any) -> tuple[Any, Any]:
    return (model.unwrap(), optimizer.optim) if dist.is_initialized() else (model, optimizer)


def save(folder: Path, *, tied: bool) -> None:
    booster, model, optimizer, scheduler = boosted(tied=tied, seed=0)
    train(model, optimizer, scheduler, 0, 3)
    save_all(booster, folder, (model, optimizer, scheduler), tied=tied, real=True)


def load(folder: Path, *, tied: bool) -> None:
    for model_name, optimizer_name in cases():
        booster, model, optimizer, scheduler = boosted(tied=tied, seed=9)
        booster.load_model(model, str(folder / model_name))
        booster.load_optimizer(optimizer, str(folder / optimizer_name))
        booster.load_lr_scheduler(scheduler, str(folder / "scheduler"))
        loaded = copy.deepcopy(state(*plain(model, optimizer)))
        train(model, optimizer, scheduler, 3, 5)
        if not dist.is_initialized() or dist.get_rank() == 0:
            out = {"loaded": loaded, "trained": state(*plain(model, optimizer))}
            torch.save(out, folder / f"found_{model_name}.pt")


def main() -> None:
    work = {"save": save, "load": load}[sys.argv[1]]
    if "RANK" in os.environ:
        colossalai.launch_from_torch(backend="gloo")
    for tied in (False, True):
        folder = Path(sys.argv[2]) / ("tied" if tied else "plain")
        folder.mkdir(parents=True, exist_ok=True)
        work(folder, tied=tied)
        if dist.is_initialized():
            dist.barrier()


main()
