r"""Train on several hosts, any of which may fail: each save is complete in their memory.

On each host, with two to four of them:

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    torchrun --nnodes 2:4 --max-restarts 100 --rdzv-backend c10d --rdzv-endpoint HEAD:29400 \
        examples/elastic.py runs/a --memory /dev/shm/a

The variable gives each attempt a store of its own. With a store that all attempts share, as is the default of PyTorch
2.13, gloo may find addresses of ranks that have died: it does not connect, or hangs.

If a process dies, torchrun starts all ranks again, and they load the newest checkpoint from memory. If a host is lost,
the others have copies of its part. If a host joins, torchrun ends all ranks with SIGTERM, they save, and all continue.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import sys
import time
from datetime import timedelta
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import rankless

BATCH = 12  # sequences in each step, over all ranks; the number of ranks divides it
LENGTH = 64  # bytes in a sequence

#: The exit status after a signal. With 0, torchrun on other hosts would take the training for finished.
STOPPED = 75


def main() -> None:
    """Train from the newest checkpoint in the memory of the hosts or in the run directory."""
    options = parse_arguments()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    # How long ranks wait for a host that has vanished without a word.
    dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=timedelta(seconds=options.timeout))
    model = build_model(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = rankless.ResumableLoader(TensorDataset(read_sequences()), BATCH // dist.get_world_size())
    training: dict[str, Any] = {"model": model, "optimizer": optimizer, "dataloader": loader}
    saving: dict[str, Any] = {"save_every": options.save_every, "async_save": True, "timeout": options.timeout}
    tier = rankless.LocalTier(options.memory, copies=1, drain_every=options.drain_every)

    is_stopping = False
    with rankless.Checkpointer(options.run, **training, **saving, local=tier) as checkpointer:
        began = time.perf_counter()
        start = checkpointer.resume()
        seconds = time.perf_counter() - began
        source = "" if checkpointer.restored is None else checkpointer.restored.source
        report(loaded=start, source=source, seconds=seconds, state=hash_state(model, optimizer))
        epochs = chain.from_iterable(repeat(loader))
        for step, (sequences,) in zip(range(start + 1, options.steps + 1), epochs, strict=False):
            loss = train_step(model, optimizer, sequences.to(device))
            report(step=step, loss=loss, state=hash_state(model, optimizer))
            is_stopping = checkpointer.step(step)
            if is_stopping:
                break
    dist.destroy_process_group()
    sys.exit(STOPPED if is_stopping else 0)


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="directory of the run, on a disk that all hosts share")
    parser.add_argument("--memory", type=Path, required=True, help="folder in the memory of each host")
    parser.add_argument("--steps", type=int, default=100, help="train up to this step (default: 100)")
    parser.add_argument("--save-every", type=int, default=1, metavar="STEPS", help="(default: 1)")
    parser.add_argument("--drain-every", type=int, default=10, metavar="SAVES", help="(default: 10)")
    parser.add_argument("--timeout", type=float, default=30.0, metavar="SECONDS", help="(default: 30)")
    return parser.parse_args()


class ByteModel(nn.Module):
    """A small Transformer whose tokens are bytes."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(256, width), nn.Embedding(LENGTH, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(2)
        )
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits of the next tokens, of all sequences one after the other."""
        hidden = self.embedding(tokens) + self.positions.weight
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, device=tokens.device)
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask, is_causal=True)
        logits: torch.Tensor = self.head(hidden.flatten(0, 1))
        return logits


def build_model(device: str) -> nn.Module:
    """Build the model, with each layer sharded over all ranks."""
    torch.manual_seed(0)
    model = ByteModel().to(device)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    return model


def read_sequences() -> torch.Tensor:
    """Return Python's own source of dataclasses in sequences of bytes, each with the byte after it."""
    text = torch.frombuffer(bytearray(Path(dataclasses.__file__).read_bytes()), dtype=torch.uint8)
    return text.unfold(0, LENGTH + 1, LENGTH).long()


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, sequences: torch.Tensor) -> float:
    """Train one step. Return the loss, averaged over all ranks."""
    loss = cross_entropy(model(sequences[:, :-1]), sequences[:, 1:].flatten())
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
    mean = loss.detach() / dist.get_world_size()
    dist.all_reduce(mean)
    return mean.item()


def report(**values: Any) -> None:
    """Print a line, on rank 0."""
    if dist.get_rank() == 0:
        print(json.dumps({**values, "ranks": dist.get_world_size()}), flush=True)


def hash_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Return a hash of the weights and of the optimizer's state, whatever the number of ranks."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        for key, tensor in sorted({"": parameter, **optimizer.state[parameter]}.items()):
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            digest.update(f"{name} {key}".encode() + whole.detach().contiguous().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


if __name__ == "__main__":
    main()
