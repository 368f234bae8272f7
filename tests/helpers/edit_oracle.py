"""Edits of a training in memory, by torch: what ``rankless edit`` must give, bit for bit."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import rankless

#: The parameters of one state: its tensors by name.
States = dict[str, dict[str, Tensor]]


class Lm(nn.Module):
    """A small language model: an embedding, layers with a gated MLP, and a head, which may be tied."""

    def __init__(self, rows: int = 10, layers: int = 3, *, tied: bool = False, bias: bool = True) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(rows, 4)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.lm_head = nn.Linear(4, rows, bias=bias)
        if tied:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed_tokens(tokens)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        result: Tensor = self.lm_head(hidden)
        return result


class Layer(nn.Module):
    """A norm and a gated MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.mlp = nn.ModuleDict(
            {
                "gate_proj": nn.Linear(4, 6, bias=False),
                "up_proj": nn.Linear(4, 6, bias=False),
                "down_proj": nn.Linear(6, 4, bias=False),
            }
        )

    def forward(self, hidden: Tensor) -> Tensor:
        normed = self.norm(hidden)
        gated = torch.sigmoid(self.mlp["gate_proj"](normed)) * self.mlp["up_proj"](normed)
        result: Tensor = self.mlp["down_proj"](gated)
        return result


def make_optimizer(model: nn.Module) -> torch.optim.AdamW:
    """AdamW with a group for matrices and one for vectors."""
    parameters = list(model.parameters())
    return torch.optim.AdamW(
        [
            {"params": [parameter for parameter in parameters if parameter.ndim > 1]},
            {"params": [parameter for parameter in parameters if parameter.ndim < 2], "weight_decay": 0.0},
        ],
        lr=0.01,
    )


def train_steps(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: Sequence[int], rows: int = 10
) -> list[float]:
    """Train on tokens that depend on the step alone. Return the losses."""
    losses = []
    for step in steps:
        tokens = torch.randint(0, rows, (8,), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(tokens).float(), tokens.roll(1))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def save_training(
    run: Path, steps: Sequence[int] = (1, 2, 3), *, dtype: torch.dtype = torch.float32, tied: bool = False
) -> None:
    """Train, and save a checkpoint after each step."""
    torch.manual_seed(1)
    model = Lm(tied=tied).to(dtype)
    optimizer = make_optimizer(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for step in steps:
        train_steps(model, optimizer, [step])
        scheduler.step()
        rankless.save_checkpoint(
            run, f"step_{step}", model=model, optimizer=optimizer, scheduler=scheduler, step=step, keep=None
        )


@dataclass
class Oracle:
    """A checkpoint in memory: weights, further names of tied ones, states, and the parameter groups."""

    weights: dict[str, Tensor]
    tied: dict[str, str]
    states: States
    groups: list[list[str]]
    before: list[Oracle] = field(default_factory=list)

    @classmethod
    def read(cls, checkpoint: Path) -> Oracle:
        """Read a checkpoint with safetensors and JSON alone."""
        weights = _load(checkpoint / "model")
        states: States = {}
        for key, tensor in _load(checkpoint / "optimizer").items():
            name, _, state = key.rpartition("/")
            states.setdefault(name, {})[state] = tensor
        shared = json.loads((checkpoint / "state.json").read_text())
        groups = [group["params"] for group in shared["optimizer"]["groups"]]
        if "scheduler" in shared:
            assert shared["scheduler"]["params"] == groups
            assert len(shared["scheduler"]["state"]["base_lrs"]) == len(groups)
        return cls(weights, _read_ties(checkpoint / "model"), states, groups)

    def assert_equals(self, other: Oracle) -> None:
        """Compare every bit."""
        assert self.weights.keys() == other.weights.keys()
        assert self.tied == other.tied
        assert [sorted(group) for group in self.groups] == [sorted(group) for group in other.groups]
        assert {name: states.keys() for name, states in self.states.items()} == {
            name: states.keys() for name, states in other.states.items()
        }
        for name, tensor in self.weights.items():
            _assert_equal(name, tensor, other.weights[name])
        for name, states in self.states.items():
            for state, tensor in states.items():
                _assert_equal(f"{name}/{state}", tensor, other.states[name][state])

    def names(self) -> list[str]:
        """All names of weights, those of ties too."""
        return sorted([*self.weights, *self.tied])

    def average(self, last: int) -> None:
        """The mean of the last checkpoints, from the oldest to this one."""
        others = [*self.before[-(last - 1) :], self] if last > 1 else [self]
        self.weights = {name: _mean([other.weights[name] for other in others]) for name in self.weights}
        self.states = {
            name: {
                state: states[state] if state == "step" else _mean([other.states[name][state] for other in others])
                for state in states
            }
            for name, states in self.states.items()
        }

    def resize(self, size: int, rule: str) -> None:
        """Other rows of embedding and head."""
        for name in [name for name in self.weights if re.search(r"(embed_tokens|lm_head)\.(weight|bias)$", name)]:
            old = self.weights[name]
            if len(old) == size:
                continue
            self.weights[name] = torch.cat([old[:size], _new_rows(old, size - len(old), rule)])
            for state, tensor in self.states.get(name, {}).items():
                if tensor.ndim:
                    zeros = torch.zeros(max(0, size - len(tensor)), *tensor.shape[1:], dtype=tensor.dtype)
                    self.states[name][state] = torch.cat([tensor[:size], zeros])

    def reorder(self, order: Sequence[int]) -> None:
        """Another order of layers."""
        self._rename(lambda name: _moved(name, order))

    def rename(self, pattern: str, replacement: str) -> None:
        """Other names."""
        self._rename(lambda name: [re.sub(pattern, replacement, name)])

    def cast(self, dtype: torch.dtype) -> None:
        """Another dtype of all weights."""
        self.weights = {name: tensor.to(dtype) for name, tensor in self.weights.items()}

    def freeze(self, pattern: str) -> None:
        """Without states of some parameters. A further name of a tied weight means the parameter itself."""
        frozen = {self.tied.get(name, name) for name in self.names() if fnmatchcase(name, pattern)}
        self.states = {name: states for name, states in self.states.items() if name not in frozen}
        groups = [[name for name in group if name not in frozen] for group in self.groups]
        self.groups = [group for group in groups if group]

    def unfreeze(self, name: str, like: str) -> None:
        """With states of one more parameter."""
        weights = self.weights[name]
        self.states[name] = {
            state: torch.zeros(weights.shape if tensor.ndim else (), dtype=tensor.dtype)
            for state, tensor in self.states[like].items()
        }
        for group in self.groups:
            if like in group:
                group.append(name)

    def upcycle(self, experts: int) -> None:
        """Experts instead of MLPs, and routers of zeros."""
        mlps = sorted({match[1] for name in self.weights if (match := re.match(r"(.*)\.mlp\.", name))})
        siblings = {mlp: f"{mlp}.mlp.experts.0.gate_proj.weight" for mlp in mlps}

        def rename(name: str) -> list[str]:
            prefix, mlp, rest = name.partition(".mlp.")
            return [f"{prefix}.mlp.experts.{n}.{rest}" for n in range(experts)] if mlp else [name]

        self._rename(rename)
        for mlp, sibling in siblings.items():
            router = f"{mlp}.mlp.router.weight"
            self.weights[router] = torch.zeros(experts, 4, dtype=self.weights[sibling].dtype)
            if sibling in self.states:
                self.unfreeze(router, sibling)

    def _rename(self, names_of: Callable[[str], Sequence[str]]) -> None:
        self.weights = {new: tensor for name, tensor in self.weights.items() for new in names_of(name)}
        self.tied = {names_of(alias)[0]: names_of(name)[0] for alias, name in self.tied.items()}
        self.states = {new: deepcopy(states) for name, states in self.states.items() for new in names_of(name)}
        groups = [[new for name in group for new in names_of(name)] for group in self.groups]
        self.groups = [group for group in groups if group]


def _load(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def _read_ties(folder: Path) -> dict[str, str]:
    ties: dict[str, str] = {}
    for file in folder.glob("*.safetensors"):
        raw = file.read_bytes()
        header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
        ties |= json.loads(header["__metadata__"].get("rankless.tied", "{}"))
    return ties


def _mean(tensors: Sequence[Tensor]) -> Tensor:
    total = torch.zeros(tensors[0].shape, dtype=torch.float64)
    for tensor in tensors:
        total += tensor.double()
    return (total / len(tensors)).to(tensors[0].dtype)


def _new_rows(old: Tensor, count: int, rule: str) -> Tensor:
    shape = max(0, count), *old.shape[1:]
    if rule == "zeros" or count <= 0:
        return torch.zeros(shape, dtype=old.dtype)
    if rule.startswith("copy:"):
        return old[int(rule[5:])].expand(shape)
    total = torch.zeros(old.shape[1:], dtype=torch.float64)
    for row in old.double():
        total += row
    return (total / len(old)).to(old.dtype).expand(shape)


def _moved(name: str, order: Sequence[int]) -> list[str]:
    match = re.fullmatch(r"((?:.*\.)?layers\.)(\d+)(\..*)", name)
    if match is None:
        return [name]
    return [f"{match[1]}{new}{match[3]}" for new, old in enumerate(order) if old == int(match[2])]


def _assert_equal(name: str, tensor: Tensor, other: Tensor) -> None:
    assert (tensor.dtype, tensor.shape) == (other.dtype, other.shape), name
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    assert torch.equal(tensor.contiguous().view(width), other.contiguous().view(width)), name


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Mapping[str, Tensor]:
    """All tensors of a training by name."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    states = {
        f"{names[parameter]}/{state}": value
        for parameter, values in optimizer.state.items()
        for state, value in values.items()
    }
    return {**model.state_dict(), **states}
