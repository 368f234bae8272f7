"""All common layouts over one model whose state is a function of names: an oracle without training."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from tests.helpers.torch_limits import SHARDS_UNEVENLY

WIDTH, LAYERS = 8, 4
#: Uneven parts on each mesh, if torch itself can make them.
WORDS = 11 if SHARDS_UNEVENLY else 12


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 3 * WIDTH)
        self.down = nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    """Blocks for tensor parallelism, a scalar, a frozen parameter, a tied head, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.scale = nn.Parameter(torch.ones(1))
        self.frozen = nn.Parameter(torch.ones(5, 3), requires_grad=False)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x * self.scale)


def expected_tensor(name: str, shape: torch.Size | tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """What a tensor of this name holds, in any layout."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    if not dtype.is_floating_point:
        return torch.randint(0, 100, tuple(shape), generator=generator).to(dtype)
    return torch.rand(tuple(shape), generator=generator).to(dtype)


@dataclass
class LayoutRun:
    """What is saved or loaded: model and optimizer as a user passes them, with the parts that can be looked into."""

    model: Any
    optimizer: Any
    parts: list[nn.Module]
    optimizers: list[torch.optim.Optimizer]


WRAPPERS = {"module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}


def clean_name(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def make_optimizer(model: nn.Module, kind: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW) -> Any:
    trained = [p for p in model.parameters() if p.requires_grad]
    decay = [p for p in trained if p.ndim > 1]
    return kind([{"params": decay}, {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0}], lr=0.125)


def named_tensors(run: LayoutRun) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter, buffer and state of a run by its clean name, live."""
    for part in run.parts:
        yield from ((f"model/{clean_name(n)}", t) for n, t in (*part.named_parameters(), *part.named_buffers()))
        names = {id(p): clean_name(n) for n, p in part.named_parameters()}
        for optimizer in run.optimizers:
            for p, states in optimizer.state.items():
                if id(p) in names:
                    yield from ((f"optimizer/{names[id(p)]}/{k}", t) for k, t in states.items())


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def fill_run(run: LayoutRun) -> LayoutRun:
    """Give a run the state that names tell, Adam's moments included, with torch's means alone."""
    with torch.no_grad():
        for part in run.parts:
            for name, tensor in (*part.named_parameters(), *part.named_buffers()):
                assign_tensor(tensor, expected_tensor(f"model/{clean_name(name)}", tensor.shape, tensor.dtype))
            for name, p in part.named_parameters():
                if p.requires_grad:
                    for optimizer in run.optimizers:
                        if any(p is q for group in optimizer.param_groups for q in group["params"]):
                            optimizer.state[p] = make_moments(clean_name(name), p)
    return run


def make_moments(name: str, p: torch.Tensor) -> dict[str, torch.Tensor]:
    states = {"step": torch.tensor(3.0)}
    for state in ("exp_avg", "exp_avg_sq"):
        states[state] = torch.zeros_like(p, dtype=torch.float32, requires_grad=False)
        assign_tensor(states[state], expected_tensor(f"optimizer/{name}/{state}", p.shape, torch.float32))
    return states


def assign_tensor(tensor: torch.Tensor, whole: torch.Tensor) -> None:
    if isinstance(tensor, DTensor):
        if tensor.device_mesh.get_coordinate() is not None:
            spread = distribute_tensor(whole, tensor.device_mesh, tensor.placements, src_data_rank=None)
            tensor.to_local().copy_(spread.to_local())
    else:
        tensor.copy_(whole)


def blank_run(run: LayoutRun) -> LayoutRun:
    """The same run before it got any state, and with other values."""
    with torch.no_grad():
        for _, tensor in named_tensors(run):
            local_tensor(tensor).fill_(7)
    for optimizer in run.optimizers:
        optimizer.state.clear()
    return run


def make_run(model: nn.Module) -> LayoutRun:
    optimizer = make_optimizer(model)
    return LayoutRun(model, optimizer, [model], [optimizer])


def make_mesh(*shape: int, names: tuple[str, ...]) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def plain() -> LayoutRun:
    return make_run(Net())


def ddp() -> LayoutRun:
    return make_run(DistributedDataParallel(Net()))


def shard_fsdp2(model: Net, over: DeviceMesh | None = None, **options: Any) -> nn.Module:
    for layer in model.layers:
        fully_shard(layer, mesh=over, **options)
    return fully_shard(model, mesh=over, **options)


def fsdp() -> LayoutRun:
    return make_run(shard_fsdp2(Net()))


def hsdp() -> LayoutRun:
    return make_run(shard_fsdp2(Net(), make_mesh(2, dist.get_world_size() // 2, names=("replicate", "shard"))))


def offload() -> LayoutRun:
    return make_run(shard_fsdp2(Net(), offload_policy=CPUOffloadPolicy(pin_memory=False)))


def mixed() -> LayoutRun:
    return make_run(shard_fsdp2(Net(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)))


def checkpointed() -> LayoutRun:
    model = Net()
    for number, layer in enumerate(model.layers):
        model.layers[number] = checkpoint_wrapper(layer)
    return make_run(shard_fsdp2(model))


def compiled() -> LayoutRun:
    model = Net()
    for number, layer in enumerate(model.layers):
        model.layers[number] = torch.compile(layer, backend="eager")
    return make_run(torch.compile(DistributedDataParallel(model), backend="eager"))


def parallelize(model: Net, over: DeviceMesh) -> Net:
    """Column-wise, row-wise, norms over the sequence; the head by columns, too."""
    block = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    }
    for layer in model.layers:
        parallelize_module(layer, over, block)
    ends = {"embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))}
    return parallelize_module(
        model, over, ends | {"head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())}
    )


def tp() -> LayoutRun:
    return make_run(parallelize(Net(), make_mesh(dist.get_world_size(), names=("tp",))))


def fsdp_tp() -> LayoutRun:
    """Parameters that tensor parallelism does not know live on the data-parallel sub-meshes only."""
    both = make_mesh(2, dist.get_world_size() // 2, names=("dp", "tp"))
    return make_run(shard_fsdp2(parallelize(Net(), both["tp"]), both["dp"]))


def hsdp_tp() -> LayoutRun:
    every = make_mesh(2, 2, dist.get_world_size() // 4, names=("replicate", "shard", "tp"))
    return make_run(shard_fsdp2(parallelize(Net(), every["tp"]), every["replicate", "shard"]))


class Stage(nn.Module):
    """The layers of one stage of a pipeline under the names that they have in the whole model."""

    def __init__(self, model: Net, number: int, stages: int) -> None:
        super().__init__()
        self.layers = nn.ModuleDict(
            {str(i): layer for i, layer in enumerate(model.layers) if i * stages // LAYERS == number}
        )
        if number == 0:
            self.embed, self.scale, self.frozen, self.seen = model.embed, model.scale, model.frozen, model.seen
            del self.seen
            self.register_buffer("seen", model.seen)
        if number == stages - 1:
            self.head = model.head


def pipeline(stages: int) -> LayoutRun:
    """Stages dealt out in turn: with more of them than ranks, each rank has several."""
    n, me = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    parts = [Stage(Net(), number, stages) for number in range(stages) if number % n == me]
    optimizers = [make_optimizer(part) for part in parts]
    return LayoutRun(parts, optimizers, parts, optimizers)


def pp_ddp() -> LayoutRun:
    """Two stages, each replicated over half of the ranks."""
    both = make_mesh(2, dist.get_world_size() // 2, names=("pp", "dp"))
    stage = Stage(Net(), both["pp"].get_local_rank(), 2)
    return make_run(DistributedDataParallel(stage, process_group=both["dp"].get_group()))


def pp_fsdp() -> LayoutRun:
    """Two stages, each sharded over half of the ranks."""
    both = make_mesh(2, dist.get_world_size() // 2, names=("pp", "dp"))
    stage = fully_shard(Stage(Net(), both["pp"].get_local_rank(), 2), mesh=both["dp"])
    return make_run(stage)


LAYOUTS: dict[str, tuple[Callable[[], LayoutRun], tuple[int, ...]]] = {
    "plain": (plain, (1, 2)),
    "ddp": (ddp, (1, 2, 3)),
    "fsdp": (fsdp, (1, 2, 3, 4)),
    "hsdp": (hsdp, (2, 4)),
    "offload": (offload, (2,)),
    "mixed": (mixed, (2,)),
    "checkpointed": (checkpointed, (2,)),
    "compiled": (compiled, (2,)),
    "tp": (tp, (1, 2, 3, 4)),
    "fsdp_tp": (fsdp_tp, (2, 4)),
    "hsdp_tp": (hsdp_tp, (4, 8)),
    "pp": (functools.partial(pipeline, 4), (1, 2, 3, 4)),
    "pp_ddp": (pp_ddp, (2, 4)),
    "pp_fsdp": (pp_fsdp, (2, 4)),
}
CASES = [(name, n) for name, (_, sizes) in LAYOUTS.items() for n in sizes]
