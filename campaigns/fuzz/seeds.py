"""The inputs of the fuzzer: an intact checkpoint of each format that rankless reads."""

from __future__ import annotations

import dataclasses
import json
import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import rankless
from rankless.dcp import FileSystemWriter
from tests.helpers.deepspeed_files import random_save, write_zero
from tests.helpers.deepspeed_tensor_parallel import write_tensor_parallel
from tests.helpers.megatron_folders import save_bridge, save_fsdp, save_nemo
from tests.helpers.megatron_models import ARGS, build_tensors, save_flat, save_torch_dist
from tests.helpers.megatron_ranks import save_ranks
from tests.helpers.unsafe_pickles import UNSAFE_OBJECTS


def create_seeds(folder: Path) -> dict[str, Path]:
    """Create one checkpoint of each kind. Return their paths by kind."""
    warnings.filterwarnings("ignore")
    native = _save_native(folder / "run")
    made = {"native": native}
    for to, options in CONVERTED.items():
        name = "c.safetensors" if to == "safetensors" else "c.ckpt"
        made[to] = rankless.convert(native, folder / to / name, to=to, **options)
    made["weights"] = _publish_weights(folder / "published/c")
    made["dcp+checksums"] = folder / "dcp+checksums/c"
    dcp.save(_build_state(), storage_writer=FileSystemWriter(made["dcp+checksums"]), no_dist=True)
    if hasattr(dcp, "HuggingFaceStorageWriter"):  # from torch 2.8 on
        made["safetensors shards"] = folder / "shards/c"
        writer = dcp.HuggingFaceStorageWriter(str(made["safetensors shards"]), save_distributed=True)
        tensors = {name: tensor for name, tensor in _build_state()["model"].items() if tensor.ndim}
        dcp.save(tensors, storage_writer=writer)
    for stage in (1, 3):
        made[f"deepspeed ZeRO-{stage}"] = _save_deepspeed(folder / f"zero{stage}/c", stage)
    made["deepspeed universal"] = folder / "universal/c"
    rankless.convert(made["deepspeed ZeRO-1"], made["deepspeed universal"], to="deepspeed-universal")
    made["deepspeed AutoTP"] = folder / "autotp/c"
    write_tensor_parallel(made["deepspeed AutoTP"], folder / "autotp")
    made["accelerate"] = _save_accelerate(folder / "accelerate/c")
    made["accelerate FSDP"] = _save_sharded(folder / "accelerate FSDP/c")
    made["trainer"] = _save_trainer(folder / "trainer/c")
    made |= _save_megatron(folder / "megatron")
    for name, options in {"legacy": {"_use_new_zipfile_serialization": False}, "evil": {}}.items():
        made[name] = folder / name / "c.pt"
        made[name].parent.mkdir()
        tree = {**_build_state(), "evil": UNSAFE_OBJECTS["a shell"]} if name == "evil" else _build_state()
        torch.save(tree, made[name], **options)
    return made


#: Formats that a conversion creates, with its arguments.
CONVERTED: dict[str, dict[str, Any]] = {
    "hf": {"max_shard_size": 300},
    "safetensors": {},
    "torch": {},
    "dcp": {"max_shard_size": 400},
    "lightning": {},
    "lightning-folder": {"max_shard_size": 400},
    "colossalai": {"max_shard_size": 400},
}


def _save_native(run: Path) -> Path:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    content = {"step": 1, "name": "a", "table": torch.arange(50), "pair": (1, [torch.ones(2)])}
    rankless.save_checkpoint(run, "s", model, optimizer, scheduler, content, per_rank_content={"own": torch.ones(3)})
    return run / "s"


def _publish_weights(folder: Path) -> Path:
    """Publish an anchor, and deltas with each encoding."""
    generator = torch.Generator().manual_seed(0)
    state = {f"w{size}": torch.randn(size, generator=generator).bfloat16() for size in (3000, 200, 7)}
    state["far"] = torch.ones(1500).bfloat16()
    with rankless.WeightPublisher(folder, process_group="self", async_save=False) as publisher:
        publisher.publish(state)
        for step in range(3):
            for size in (3000, 200, 7):
                state[f"w{size}"][step :: 1 if step == 1 else 29] *= 1.01
            state["far"][step::700] *= 1.01
            if step == 2:
                state["w200"] = torch.randn(200, generator=generator).bfloat16()
            publisher.publish(state, step=step)
    return folder


def _save_deepspeed(path: Path, stage: int) -> Path:
    shapes = {"w": (7, 5), "b": (7,), "n": ()}
    save = random_save(shapes, [["w"], ["b", "n"]], ("exp_avg",), stage=stage, step=torch.tensor(3.0))
    write_zero(path, dataclasses.replace(save, frozen={"f": torch.ones(3)}, shared={"tied": "w"}))
    return path


def _save_accelerate(path: Path) -> Path:
    """Save by Accelerate itself."""
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(5, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    accelerator.backward(model(torch.ones(2, 5)).sum())
    optimizer.step()
    accelerator.save_state(str(path), safe_serialization=False)
    return path


def _save_sharded(path: Path) -> Path:
    """Save like Accelerate with FSDP: a model and an optimizer in folders of ``torch.distributed.checkpoint``."""
    model, optimizer, _, generators = _train()
    states = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    for kind, name in (("model", "pytorch_model_fsdp_0"), ("optimizer", "optimizer_0")):
        dcp.save({kind: states[kind]}, checkpoint_id=path / name, no_dist=True)
    torch.save({"step": 0, **generators}, path / "random_states_0.pkl")
    return path


def _save_trainer(path: Path) -> Path:
    """Save like transformers' ``Trainer`` in two processes, with weights in two files."""
    model, optimizer, scheduler, generators = _train()
    path.mkdir(parents=True)
    files = {name: f"model-0000{number}-of-00002.safetensors" for number, name in enumerate(model.state_dict(), 1)}
    for name, file in files.items():
        save_file({name: model.state_dict()[name]}, path / file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    (path / "trainer_state.json").write_text(json.dumps({"global_step": 1, "log_history": [{"loss": 1.5}]}))
    states = dict(zip(("python", "numpy", "cpu"), generators.values(), strict=True))
    trees = {"optimizer.pt": optimizer.state_dict(), "scheduler.pt": scheduler.state_dict()}
    for file, tree in (trees | {f"rng_state_{rank}.pth": states for rank in range(2)}).items():
        torch.save(tree, path / file)
    return path


def _train() -> tuple[nn.Module, torch.optim.Optimizer, Any, dict[str, Any]]:
    """Return a model, an optimizer and a scheduler after one step, and the states of generators."""
    model = nn.Linear(5, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    generators = {
        "random_state": random.getstate(),
        "numpy_random_seed": np.random.get_state(),  # noqa: NPY002
        "torch_manual_seed": torch.get_rng_state(),
    }
    return model, optimizer, scheduler, generators


def _save_megatron(folder: Path) -> dict[str, Path]:
    """Save checkpoints of Megatron: two forms of optimizer states, and one of each other kind of folder."""
    args, tensors = ARGS["gpt_neox"], build_tensors(ARGS["gpt_neox"])
    states = dict.fromkeys(("param", "exp_avg", "exp_avg_sq"), tensors)
    return {
        "megatron": save_torch_dist(folder / "whole/c", tensors, args, states),
        "megatron flat": save_flat(folder / "flat/c", tensors, args, states),
        "megatron fsdp": save_fsdp(folder / "fsdp/iter_0000007"),
        "megatron nemo": save_nemo(folder / "nemo/c"),
        "megatron bridge": save_bridge(folder / "bridge/c"),
        "megatron ranks": save_ranks(folder / "ranks/c", build_tensors(ARGS["llama"]), build_tensors(ARGS["llama"])),
    }


def _build_state() -> dict[str, Any]:
    tensors = {"w": torch.arange(35.0).view(7, 5), "b": torch.ones(7).bfloat16(), "n": torch.tensor(3)}
    return {"model": tensors, "step": 3, "list": [1, {"a": torch.ones(2)}], "pair": (torch.arange(9), "x")}
