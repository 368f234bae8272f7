"""A training on an accelerator, and copies of its state that the device makes: an oracle in the device's order."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

#: Tensors by the names of their components and their own.
Tensors = dict[str, torch.Tensor]


class Net(nn.Module):
    """Large and small parameters, one that is not contiguous, a frozen one, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Parameter(torch.randn(1100, 1000))
        self.small = nn.ParameterList(torch.randn(5, n) for n in range(1, 20))
        self.strided = nn.Parameter(torch.randn(300, 500).t())
        self.rows = nn.Parameter(torch.randn(40, 90)[:, ::2])
        self.frozen = nn.Parameter(torch.randn(50, 50), requires_grad=False)
        self.register_buffer("statistics", torch.randn(100))


class Training:
    """A model and an optimizer, which has stepped once."""

    def __init__(self, device: str) -> None:
        torch.manual_seed(0)
        self.net = Net()
        for name, parameter in list(self.net.named_parameters()):
            self._replace(name, nn.Parameter(_move(parameter.detach(), device), parameter.requires_grad))
        self.net.statistics = self.net.statistics.to(device)
        trained = [parameter for parameter in self.net.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=0.1, foreach=False)
        self.step()

    def _replace(self, name: str, parameter: nn.Parameter) -> None:
        owner, _, own = name.rpartition(".")
        setattr(self.net.get_submodule(owner), own, parameter)

    def step(self) -> None:
        """Enqueue a step, which changes all that is trained."""
        for parameter in self.net.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()

    def tensors(self) -> Tensors:
        """Return the live tensors under the names that they have in a checkpoint."""
        found = {f"model/{name}": tensor.detach() for name, tensor in self.net.named_parameters()}
        found |= {f"model/{name}": tensor for name, tensor in self.net.named_buffers()}
        for name, parameter in self.net.named_parameters():
            states = self.optimizer.state.get(parameter, {})
            found |= {f"optimizer/{name}/{state}": tensor for state, tensor in states.items()}
        return found

    def change_all(self, value: float) -> None:
        """Enqueue a change of each tensor, in the order in which they are."""
        for tensor in self.tensors().values():
            tensor.fill_(value)

    def copies(self) -> Tensors:
        """Enqueue copies of all tensors on the device: how they are now, in the order of the current stream."""
        return {name: tensor.clone() for name, tensor in self.tensors().items()}


def _move(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """Return a tensor on a device with the same strides."""
    moved = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)
    return moved.copy_(tensor)


def read_saved(checkpoint: Path) -> Tensors:
    """Read the tensors of a checkpoint with the library of the format."""
    return {
        f"{file.parent.name}/{name}": tensor
        for file in checkpoint.glob("*/*.safetensors")
        for name, tensor in load_file(file).items()
    }


def find_differences(actual: Tensors, expected: Tensors) -> list[str]:
    """Return the names of the tensors that are missing, or not equal bit for bit."""
    return [
        name
        for name in sorted(actual.keys() | expected.keys())
        if name not in actual or name not in expected or not _are_equal(actual[name].cpu(), expected[name].cpu())
    ]


def _are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.contiguous(), other.contiguous())
