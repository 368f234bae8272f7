"""Tests that checkpoints of Lightning 2.6.6 are resumed without it on other numbers of ranks and in other layouts.

``tests/interop/lightning/lightning.tar.xz`` has one of each kind; if Lightning is installed, it also writes new ones.
Torch's own readers give the expected contents.
"""

from __future__ import annotations

import json
import os
import tarfile
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import rankless
from rankless.errors import CorruptCheckpointError, MismatchError, OptimizerMismatchError, UnsafePickleError
from tests.helpers.commands import assert_needs_no_torch
from tests.helpers.equality import equal_bits
from tests.helpers.lightning_net import build_net, gather_contents
from tests.helpers.pool import Ranks
from tests.helpers.processes import run_command
from tests.helpers.unsafe_pickles import UNSAFE_OBJECTS

pytestmark = pytest.mark.filterwarnings("ignore")

KINDS = {
    "single": ["adamw"],
    "ddp": ["adamw"],
    "fsdp": ["adamw", "sgd"],
    "fsdp2": ["adamw", "sgd"],
    "fsdp2-full": ["adamw"],
    "tp": ["adamw"],
    "fabric": ["adamw"],
}
CASES = [(kind, optimizer) for kind, optimizers in KINDS.items() for optimizer in optimizers]
READERS = [("plain", 1), ("ddp", 2), ("fsdp", 3), ("tp", 2)]


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("lightning")
    with tarfile.open(Path(__file__).parent / "lightning.tar.xz") as archive:
        archive.extractall(path, filter="data")
    return path


def expected(path: Path, scratch: Path) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
    """Tensors by FQN and state, and the groups of the optimizer, as torch reads them."""
    if path.is_dir():
        dcp_to_torch_save(path, scratch / "whole.pt")
        loaded = torch.load(scratch / "whole.pt", weights_only=False)
        optimizer = loaded.get("optimizer_0", loaded.get("opt"))
    else:
        loaded = torch.load(path, weights_only=False)
        (optimizer,) = loaded["optimizer_states"]
    model = loaded["model"] if "model" in loaded else loaded["state_dict"]
    order = [key for group in optimizer["param_groups"] for key in group["params"]]
    numbers = dict(zip(order, named([name for name in model if not name.endswith("scale")]), strict=True))
    states = {
        f"optimizer/{numbers[key] if isinstance(key, int) else key}/{state}": tensor
        for key, own in optimizer.get("state", {}).items()
        for state, tensor in own.items()
    }
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer["param_groups"]]
    return {f"model/{name}": tensor for name, tensor in model.items()} | states, groups


def named(parameters: list[str]) -> list[str]:
    """In the order in which the run's optimizer has them: its two groups one after the other.

    What numbers stand for is told by where they are listed: those of FSDP are places in the model.
    """
    return sorted(parameters, key=lambda name: not name.endswith("weight"))


def load(path: str, layout: str, kind: str) -> Any:
    module, optimizer, scheduler = build_net(layout, kind)
    restored = rankless.restore(path, model=module, optimizer=optimizer, scheduler=scheduler)
    assert (restored.unexpected, restored.verified) == ((), False)
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    return gather_contents(module, optimizer), groups, scheduler.state_dict(), restored.user_content


def check(ranks: Ranks, path: Path, kind: str, scratch: Path) -> None:
    tensors, groups = expected(path, scratch)
    for layout, n in READERS:
        for result, own, schedule, content in ranks(n, load, str(path), layout, kind):
            assert result.keys() == tensors.keys()
            assert all(equal_bits(tensor, tensors[name]) for name, tensor in result.items())
            assert own == groups
            assert schedule["last_epoch"] == 3
            assert content["global_step"] == 3


@pytest.mark.parametrize(("kind", "optimizer"), CASES)
def test_what_lightning_wrote_is_resumed(ranks: Ranks, golden: Path, tmp_path: Path, kind: str, optimizer: str) -> None:
    """Also plain SGD from FSDP, which Lightning itself cannot load."""
    check(ranks, golden / f"{kind}-{optimizer}.ckpt", optimizer, tmp_path)


@pytest.mark.parametrize(("kind", "optimizer"), CASES)
def test_what_lightning_writes_is_resumed(ranks: Ranks, tmp_path: Path, kind: str, optimizer: str) -> None:
    from tests.helpers.lightning_runs import KINDS as SIZES
    from tests.helpers.lightning_runs import fit

    ranks(SIZES[kind], fit, str(tmp_path), kind, optimizer)
    check(ranks, tmp_path / "saved.ckpt", optimizer, tmp_path)


def test_the_rest_is_user_content(golden: Path) -> None:
    for kind in ("fsdp", "single"):
        content = rankless.open(golden / f"{kind}-adamw.ckpt").values["user_content"]
        assert content.keys() == {
            *("callbacks", "epoch", "global_step", "hparams_name", "hyper_parameters", "loops"),
            "pytorch-lightning_version",
        }
        assert content["hyper_parameters"]["extra"] == Namespace(lr=0.1, path=Path("x"), parts=(1, {"a"}))
        (callback,) = content["callbacks"].values()
        assert callback["best_model_score"].shape == ()


def test_parameters_known_by_number_are_refused_in_another_order(golden: Path) -> None:
    module, _, _ = build_net("plain", "adamw")
    for order in (list(module.parameters())[::-1], list(module.parameters())):
        with pytest.raises(OptimizerMismatchError):
            rankless.load_checkpoint(golden / "ddp-adamw.ckpt", model=module, optimizer=torch.optim.AdamW(order))


@pytest.mark.parametrize("kind", UNSAFE_OBJECTS)
def test_a_meta_file_that_runs_code(golden: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    folder = tmp_path / "c.ckpt"
    folder.mkdir()
    for file in (golden / "fsdp-sgd.ckpt").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    torch.save({"epoch": 1, "callbacks": UNSAFE_OBJECTS[kind]}, folder / "meta.pt")
    monkeypatch.chdir(folder)
    before = sorted(folder.iterdir())
    with pytest.raises(UnsafePickleError, match=str(folder / "meta.pt")):
        load(str(folder), "plain", "sgd")
    assert sorted(folder.iterdir()) == before
    torch.save([1], folder / "meta.pt")
    with pytest.raises(CorruptCheckpointError, match=str(folder / "meta.pt")):
        rankless.open(folder)
    os.truncate(folder / "meta.pt", 500)
    with pytest.raises(CorruptCheckpointError, match=str(folder / "meta.pt")):
        rankless.open(folder)


@pytest.mark.parametrize("name", ["fsdp-adamw.ckpt", "ddp-adamw.ckpt"])
def test_the_commands_take_them(golden: Path, name: str) -> None:
    table = json.loads(run_command("show", "--json", str(golden / name)).stdout)
    assert table["format"] == "lightning"
    assert table["values"]["user_content"]["global_step"] == 3
    assert run_command("verify", str(golden / name)).returncode == 0
    assert_needs_no_torch("show", str(golden / name))


def a_module_state() -> dict[str, torch.Tensor]:
    return dict(nn.Linear(2, 3).state_dict())


def an_optimizer_state(steps: int = 1) -> dict[str, Any]:
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([weight])
    for _ in range(steps):
        weight.square().sum().backward()
        optimizer.step()
    return optimizer.state_dict()


#: What hooks add to a checkpoint, each of which looks like a component.
ADDED = {
    "optimizer_ema": an_optimizer_state(2),
    "optimizers": [an_optimizer_state(2)],
    "optimizer_0": an_optimizer_state(2),
    "critic": {"optimizer": an_optimizer_state(2), "model": a_module_state()},
    "sgd": torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0).state_dict(),
    "model": a_module_state(),
    "ema": a_module_state(),
    "module": a_module_state(),
    "scheduler": {"last_epoch": 3},
}


@pytest.mark.parametrize("added", ADDED)
def test_of_a_file_only_lightnings_own_keys_are_components(tmp_path: Path, added: str) -> None:
    state, optimizer = a_module_state(), an_optimizer_state()
    tree = {"pytorch-lightning_version": "2.6.1", "epoch": 0, "global_step": 1, "lr_schedulers": [{"last_epoch": 1}]}
    torch.save({**tree, added: ADDED[added], "state_dict": state, "optimizer_states": [optimizer]}, tmp_path / "a.ckpt")
    checkpoint = rankless.open(tmp_path / "a.ckpt")
    names = [name.removeprefix("optimizer/").replace("/", ".") for name in checkpoint if "optimizer/" in name[:10]]
    assert sorted(names) == sorted(f"0.{key}" for key in ("exp_avg", "exp_avg_sq", "step"))
    assert sorted(name for name in checkpoint if name.startswith("model")) == ["model/bias", "model/weight"]
    assert all(torch.equal(checkpoint[f"model/{name}"], value) for name, value in state.items())
    assert checkpoint.values["scheduler"]["state"] == {"last_epoch": 1}
    assert added in checkpoint.values["user_content"]


def test_a_file_without_state_dict_has_no_model(tmp_path: Path) -> None:
    torch.save({"pytorch-lightning_version": "2.6.1", "ema": a_module_state()}, tmp_path / "a.ckpt")
    with pytest.raises(MismatchError, match="missing in the checkpoint: weight"):
        rankless.load_checkpoint(tmp_path / "a.ckpt", model=nn.Linear(2, 3))
    module = nn.Linear(2, 3)
    rankless.load_checkpoint(tmp_path / "a.ckpt", model=module, keys={"model": "ema"})


def test_a_key_of_a_hook_that_is_named_as_an_optimizer_of_the_folder_is_user_content(tmp_path: Path) -> None:
    net, folder = nn.Linear(2, 2), tmp_path / "a.ckpt"
    optimizer = torch.optim.SGD(net.named_parameters(), momentum=0.9)
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    dcp.save({"model": net.state_dict(), "optimizer_0": get_optimizer_state_dict(net, optimizer)}, checkpoint_id=folder)
    hooked = {"optimizer_0": {"mine": 5, "values": torch.arange(3)}, "model": "of the hook"}
    torch.save({"epoch": 1, "pytorch-lightning_version": "2.6.6", **hooked}, folder / "meta.pt")
    resumed = nn.Linear(2, 2)
    other = torch.optim.SGD(resumed.named_parameters(), momentum=0.9)
    content = rankless.restore(folder, model=resumed, optimizer=other, rng=False).user_content
    assert equal_bits(resumed.weight, net.weight)
    assert equal_bits(other.state[resumed.bias]["momentum_buffer"], optimizer.state[net.bias]["momentum_buffer"])
    assert (content["epoch"], content["model"], content["optimizer_0"]["mine"]) == (1, "of the hook", 5)
    assert content["optimizer_0"]["values"].tolist() == [0, 1, 2]
