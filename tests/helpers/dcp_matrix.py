"""Checkpoints of rankless and of ``torch.distributed.checkpoint``, each loaded by the other, in any layout.

Names define the expected state (``tests/helpers/layouts.py``).
Torch's own gathering gives the state of a run after a load.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

import rankless
from tests.helpers import layouts
from tests.helpers.layouts import (
    WIDTH,
    LayoutRun,
    assign_tensor,
    blank_run,
    clean_name,
    expected_tensor,
    fill_run,
    make_mesh,
    parallelize,
    shard_fsdp2,
)

Kind = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Kind] = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.125),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=0.125, momentum=0.5),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.125),
}

#: Numbers of ranks for each layout.
SIZES = {
    "plain": (1,),
    "ddp": (1, 2, 3, 4),
    "fsdp1": (1, 2, 3, 4),
    "fsdp": (1, 2, 3, 4),
    "hsdp": (2, 4),
    "tp": (1, 2, 3, 4),
    "fsdp_tp": (2, 4),
}


class Case(NamedTuple):
    layout: str
    ranks: int

    def __str__(self) -> str:
        return f"{self.layout}{self.ranks}"


CASES = [Case(layout, n) for layout, sizes in SIZES.items() for n in sizes]


class Net(layouts.Net):
    """Each rank has a part of each parameter: where one has none, torch's FSDP1 loads nothing by DCP.

    It says "Missing key in checkpoint state_dict: optim.param_groups." then, also of what it has saved itself.
    """

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.frozen = nn.Parameter(torch.ones(WIDTH, 3), requires_grad=False)


def fsdp1() -> nn.Module:
    model = Net()
    options = {"device_id": torch.device("cpu"), "use_orig_params": True}
    for number, layer in enumerate(model.layers):
        model.layers[number] = FullyShardedDataParallel(layer, **options)
    return FullyShardedDataParallel(model, **options)


def hsdp() -> nn.Module:
    return shard_fsdp2(Net(), make_mesh(2, dist.get_world_size() // 2, names=("replicate", "shard")))


def fsdp_tp() -> nn.Module:
    both = make_mesh(2, dist.get_world_size() // 2, names=("dp", "tp"))
    return shard_fsdp2(parallelize(Net(), both["tp"]), both["dp"])


LAYOUTS: dict[str, Callable[[], nn.Module]] = {
    "plain": Net,
    "ddp": lambda: DistributedDataParallel(Net()),
    "fsdp1": fsdp1,
    "fsdp": lambda: shard_fsdp2(Net()),
    "hsdp": hsdp,
    "tp": lambda: parallelize(Net(), make_mesh(dist.get_world_size(), names=("tp",))),
    "fsdp_tp": fsdp_tp,
}

#: FSDP1 has flat parameters, so which of them are matrices is told by names.
MATRICES = {name for name, parameter in Net().named_parameters() if parameter.ndim > 1}


def build_model(layout: str, kind: str) -> LayoutRun:
    """A run in a layout, with two groups of parameters."""
    model = LAYOUTS[layout]()
    trained = {clean_name(name): parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    decay = [parameter for name, parameter in trained.items() if name in MATRICES]
    rest = [parameter for name, parameter in trained.items() if name not in MATRICES]
    optimizer = OPTIMIZERS[kind]([{"params": decay}, {"params": rest, "weight_decay": 0.0}])
    return LayoutRun(model, optimizer, [model], [optimizer])


def build_filled(run: LayoutRun, kind: str) -> LayoutRun:
    """With the state that names tell."""
    fill_run(run)
    if kind == "sgd":
        run.optimizer.state.clear()
    if kind == "momentum":
        names = {id(parameter): clean_name(name) for name, parameter in run.model.named_parameters()}
        for parameter in list(run.optimizer.state):
            buffer = torch.zeros_like(parameter, requires_grad=False)
            whole = expected_tensor(f"optimizer/{names[id(parameter)]}/momentum_buffer", parameter.shape, torch.float32)
            assign_tensor(buffer, whole)
            run.optimizer.state[parameter] = {"momentum_buffer": buffer}
    return run


def expected_states(kind: str) -> dict[str, Any]:
    return gather_states(build_filled(build_model("plain", kind), kind), whole=True)


def gather_states(run: LayoutRun, *, whole: bool) -> dict[str, Any]:
    model, optim = get_state_dict(run.model, run.optimizer, options=StateDictOptions(full_state_dict=whole))
    return {"model": model, "optim": optim}


def check_states(run: LayoutRun, kind: str) -> None:
    """A run holds what names tell, to the bit."""
    actual, expected = gather_states(run, whole=True), expected_states(kind)
    assert are_equal(actual["model"], expected["model"])
    assert are_equal(actual["optim"]["state"], expected["optim"]["state"])
    for mine, theirs in zip(actual["optim"]["param_groups"], expected["optim"]["param_groups"], strict=True):
        assert {**mine, "params": sorted(mine["params"])} == {**theirs, "params": sorted(theirs["params"])}


def are_equal(mine: Any, theirs: Any) -> bool:
    if isinstance(mine, dict):
        return mine.keys() == theirs.keys() and all(are_equal(mine[key], theirs[key]) for key in mine)
    if isinstance(mine, torch.Tensor):
        return mine.dtype == theirs.dtype and torch.equal(mine, theirs)
    return bool(mine == theirs)


def write_ours(path: str, layout: str, kind: str, seed: str) -> None:
    """A run of this layout saves by rankless; FSDP1's is filled by a load of what a single process saved."""
    run = start_training(layout, kind, seed)
    rankless.save_checkpoint(path, "s", run.model, run.optimizer, user_content={"step": 3, "loss": torch.tensor(0.5)})


def write_theirs(path: str, layout: str, kind: str, seed: str) -> None:
    """The same by torch."""
    run = start_training(layout, kind, seed)
    dcp.save({**gather_states(run, whole=False), "step": 3, "loss": torch.tensor(0.5)}, checkpoint_id=path)


def start_training(layout: str, kind: str, seed: str) -> LayoutRun:
    run = build_model(layout, kind)
    if layout != "fsdp1":
        return build_filled(run, kind)
    rankless.load_checkpoint(seed, model=run.model, optimizer=run.optimizer)
    return run


def write_seed(path: str, kind: str) -> None:
    run = build_filled(build_model("plain", kind), kind)
    rankless.save_checkpoint(path, "seed", run.model, run.optimizer)


def load_ours(path: str, layout: str, kind: str) -> None:
    """rankless loads into this layout."""
    run = blank_run(build_model(layout, kind))
    content = rankless.load_checkpoint(path, model=run.model, optimizer=run.optimizer)
    assert are_equal(content, {"step": 3, "loss": torch.tensor(0.5)})
    check_states(run, kind)


def load_theirs(path: str, layout: str, kind: str) -> None:
    """The same by torch."""
    run = blank_run(build_model(layout, kind))
    actual = {**gather_states(run, whole=False), "step": 0, "loss": torch.tensor(0.0)}
    dcp.load(actual, checkpoint_id=path)
    assert are_equal({key: actual[key] for key in ("step", "loss")}, {"step": 3, "loss": torch.tensor(0.5)})
    optim = actual["optim"] if actual["optim"].get("state") or kind != "sgd" else {**actual["optim"], "state": {}}
    set_state_dict(run.model, run.optimizer, model_state_dict=actual["model"], optim_state_dict=optim)
    check_states(run, kind)
