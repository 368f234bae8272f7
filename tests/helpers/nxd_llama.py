"""A small Llama with the names of transformers', and its training, by one process and by NxD's ranks.

It is written out, so that ranks need not import transformers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from tests.helpers.nxd_files import rank_file_name, save_rank_file, shard_rows

#: Keys and values are of one head, which both tensor-parallel ranks have.
LAYOUT = "llama:kv_size_multiplier=2,kv_heads=1"
TP, PP, DP, STEPS = 2, 2, 2, 3
CONFIG = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
}
HEADS, WIDTH = 4, 4


def rotate_positions(x: torch.Tensor) -> torch.Tensor:
    frequencies = 1.0 / 10000 ** (torch.arange(0, WIDTH, 2) / WIDTH)
    angles = torch.outer(torch.arange(x.shape[-2]).float(), frequencies).repeat(1, 2)
    low, high = x.chunk(2, -1)
    return x * angles.cos() + torch.cat([-high, low], -1) * angles.sin()


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.o_proj = (nn.Linear(16, 16, bias=False) for _ in range(2))
        self.k_proj, self.v_proj = (nn.Linear(16, WIDTH, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            project(x).unflatten(-1, (-1, WIDTH)).transpose(1, 2) for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        k, v = k.expand_as(q), v.expand_as(q)
        actual = functional.scaled_dot_product_attention(rotate_positions(q), rotate_positions(k), v, is_causal=True)
        return self.o_proj(actual.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(16, 24, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(24, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(), Mlp()
        self.input_layernorm, self.post_attention_layernorm = (nn.RMSNorm(16, 1e-6) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    def __init__(self) -> None:
        torch.manual_seed(1)
        super().__init__()
        parts = {
            "embed_tokens": nn.Embedding(32, 16),
            "layers": nn.ModuleList([Layer(), Layer()]),
            "norm": nn.RMSNorm(16, 1e-6),
        }
        self.model = nn.ModuleDict(parts)
        self.lm_head = nn.Linear(16, 32, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.model["embed_tokens"](tokens)
        for layer in self.model["layers"]:
            x = layer(x)
        return self.lm_head(self.model["norm"](x))


def make_batch(step: int, half: int) -> torch.Tensor:
    return torch.randint(0, 32, (2, 6), generator=torch.Generator().manual_seed(10 * step + half))


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1, foreach=False)


def compute_loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def train_single(steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Trained by one process; halves of a batch are summed as data-parallel ranks do."""
    model = Llama()
    trained = make_optimizer(model.parameters())
    for step in range(steps):
        halves = []
        for half in range(DP):
            model.zero_grad()
            compute_loss(model, make_batch(step, half)).backward()
            halves.append([parameter.grad.clone() for parameter in model.parameters()])
        for parameter, left, right in zip(model.parameters(), *halves, strict=True):
            parameter.grad = (left + right) / DP
        trained.step()
    return model, trained


def make_stage(key: str) -> int:
    return 0 if "embed_tokens" in key or "layers.0." in key else 1


def stored_name(key: str) -> str:
    """What NxD's Llama has a parameter of transformers' in."""
    for kind in "qkv":
        key = key.replace(f".{kind}_proj.weight", f".qkv_proj.weight_{kind}")
    return key.replace(".gate_proj.", ".gate_up_proj.").replace(".up_proj.", ".gate_up_proj.")


def dim_of(key: str) -> int | None:
    """What tensor-parallel ranks divide; ``None`` where each has all, as of the one head of keys."""
    if "norm" in key or "k_proj" in key or "v_proj" in key:
        return None
    return 1 if "o_proj" in key or "down_proj" in key else 0


def nxd_names(whole: dict[str, torch.Tensor], tp: int, pp: int) -> dict[str, torch.Tensor]:
    """What a rank of NxD's Llama has: heads in their order, keys and values repeated, gates fused."""
    result: dict[str, list[torch.Tensor]] = {}
    for key, value in whole.items():
        if make_stage(key) == pp:
            dim = dim_of(key)
            result.setdefault(stored_name(key), []).append(value if dim is None else value.chunk(TP, dim)[tp])
    return {key: torch.cat(parts).clone() for key, parts in result.items()}


def train_rank(folder: str) -> None:
    """One of 8 ranks: its half of the batch, its part of the model's parameters, and its rows of their states.

    The forward is of the whole model, which the ranks put together after each step.
    """
    rank = dist.get_rank()
    pp, dp, tp = rank // (DP * TP), rank // TP % DP, rank % TP
    groups = [dist.new_group([(p * DP + d) * TP + t for d in range(DP)]) for p in range(PP) for t in range(TP)]
    model = Llama()
    mine = [
        nn.Parameter(shard_rows(tensor, DP)[dp])
        for tensor in nxd_names(dict(model.named_parameters()), tp, pp).values()
    ]
    trained = make_optimizer(mine)
    for step in range(STEPS):
        model.zero_grad()
        compute_loss(model, make_batch(step, dp)).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=groups[pp * TP + tp])
            parameter.grad /= DP
        own = nxd_names({key: parameter.grad for key, parameter in model.named_parameters()}, tp, pp)
        for parameter, gradient in zip(mine, own.values(), strict=True):
            parameter.grad = shard_rows(gradient, DP)[dp]
        trained.step()
        join_ranks(model, mine, (tp, pp))
    save_rank(Path(folder), model, (mine, trained), (dp, tp, pp))


def join_ranks(model: nn.Module, mine: list[nn.Parameter], place: tuple[int, int]) -> None:
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, (place, [parameter.detach() for parameter in mine]))
    names = [list(nxd_names(dict(model.named_parameters()), 0, pp)) for pp in range(PP)]
    for key, parameter in model.named_parameters():
        number, dim = names[make_stage(key)].index(stored_name(key)), dim_of(key)
        parts = [torch.cat([own[number] for where, own in every if where == (tp, make_stage(key))]) for tp in range(TP)]
        if "gate_up" in stored_name(key):
            parts = [part.chunk(2)["up_proj" in key] for part in parts]
        whole = parts[0] if dim is None else torch.cat(parts, dim)
        parameter.data.copy_(whole)


def save_rank(folder: Path, model: nn.Module, training: Any, place: tuple[int, int, int]) -> None:
    (mine, trained), (dp, tp, pp) = training, place
    own = nxd_names(model.state_dict(), tp, pp)
    if dp == 0:
        save_rank_file(folder / "model" / rank_file_name(tp=tp, pp=pp), own)
    settings = {key: value for key, value in trained.param_groups[0].items() if key != "params"}
    tree = {
        "state": {},
        "param_groups": [{**settings, "params": list(range(len(mine)))}],
        "base_state": {pid: dict(trained.state[parameter]) for pid, parameter in enumerate(mine)},
        "shape_info": {pid: list(event.shape) for pid, event in enumerate(own.values())},
        "sharded_master_weights": {pid: parameter.data for pid, parameter in enumerate(mine)},
    }
    save_rank_file(folder / "optim" / rank_file_name(dp, tp, pp), tree)
