"""Train a small Llama, byte by byte, on the sources of Python's standard library.

On any number of ranks that divides a batch of 12:

    torchrun --standalone --nproc-per-node 4 examples/train.py runs/a

Kill it at any time, or stop it with SIGTERM, upon which it saves first. Run it again, on the same or another number of
ranks, and it resumes from the latest checkpoint, with the samples that it has not seen yet.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sysconfig
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM

import rankless

BATCH = 12  # sequences in each step, over all ranks
LENGTH = 128  # bytes in a sequence
END = 0  # the separator after each file; no file contains it


def main() -> None:
    """Train from the latest checkpoint, or from scratch if there is none."""
    options = parse_arguments()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    model = build_model(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = LambdaLR(optimizer, lambda step: compute_lr_factor(step, options.steps))
    loader = rankless.ResumableLoader(StandardLibrary(), BATCH // dist.get_world_size())
    training: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "dataloader": loader}

    epochs = chain.from_iterable(repeat(loader))
    with rankless.Checkpointer(options.run, **training, save_every=options.save_every, async_save=True) as checkpointer:
        start = checkpointer.resume()
        for step, sequences in zip(range(start + 1, options.steps + 1), epochs, strict=False):
            loss = train_step(model, optimizer, sequences.to(device))
            scheduler.step()
            if dist.get_rank() == 0:
                print(json.dumps({"step": step, "loss": loss, "ranks": dist.get_world_size()}), flush=True)
            if checkpointer.step(step, {"loss": loss}):  # saves if it is due; true after SIGTERM
                break
    dist.destroy_process_group()


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="directory of the run, for its checkpoints")
    parser.add_argument("--steps", type=int, default=100, help="train up to this step (default: 100)")
    parser.add_argument("--save-every", type=int, default=10, metavar="STEPS", help="(default: 10)")
    return parser.parse_args()


def build_model(device: str) -> LlamaForCausalLM:
    """Build a Llama whose tokens are bytes, with each layer sharded over all ranks."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=512,
        initializer_range=0.1,
        bos_token_id=END,
        eos_token_id=END,
        pad_token_id=END,
    )
    with torch.device(device):
        model = LlamaForCausalLM(config)
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


class StandardLibrary(Dataset[torch.Tensor]):
    """A dataset of the top-level modules of Python's standard library, concatenated and split into sequences."""

    def __init__(self) -> None:
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        text = b"".join(file.read_bytes() + bytes([END]) for file in files)
        self._text = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def __len__(self) -> int:
        return (len(self._text) - 1) // LENGTH

    def __getitem__(self, index: int) -> torch.Tensor:
        """Return a sequence and the byte after it."""
        start = index * LENGTH
        return self._text[start : start + LENGTH + 1].long()


def train_step(model: LlamaForCausalLM, optimizer: torch.optim.Optimizer, sequences: torch.Tensor) -> float:
    """Train one step. Return the loss, averaged over all ranks."""
    logits = model(sequences[:, :-1]).logits
    loss = cross_entropy(logits.flatten(0, 1), sequences[:, 1:].flatten())
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
    mean = loss.detach() / dist.get_world_size()
    dist.all_reduce(mean)
    return mean.item()


def compute_lr_factor(step: int, steps: int) -> float:
    """Return the learning-rate factor: a linear warm-up over the first tenth of the steps, then a cosine."""
    warmup = max(1, steps // 10)
    if step < warmup:
        return (step + 1) / warmup
    return 0.05 + 0.95 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup))) / 2


if __name__ == "__main__":
    main()
