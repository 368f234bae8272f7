"""Tests Fabric with rankless's strategies: a state under the user's keys, on any devices and in any layout."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.fabric import Fabric
from torch import nn

import rankless
from rankless.errors import InvalidArgumentError, MismatchError
from rankless.ondisk.hidden_names import HiddenName
from tests.helpers.lightning_fabric import fabric, strategy
from tests.helpers.pool import Ranks


def set_up(made: Fabric) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = made.setup_module(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)))
    return model, made.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=0.1))


def step(made: Fabric, model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    loss = model(torch.linspace(-1, 1, 32).view(8, 4)).square().mean()
    made.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def train(path: str, layout: str, options: dict[str, Any]) -> list[float]:
    """Losses of steps 3 and 4, after a save at 2."""
    with fabric(layout, **options) as made:
        model, optimizer = set_up(made)
        for _ in range(2):
            step(made, model, optimizer)
        made.save(path, {"net": model, "opt": optimizer, "step": 2, "note": "two"})
        losses = [step(made, model, optimizer) for _ in range(2)]
        rankless.finalize()
    return losses


def resume(path: str, layout: str) -> list[float]:
    with fabric(layout) as made:
        model, optimizer = set_up(made)
        state = {"net": model, "opt": optimizer, "step": 0}
        assert made.load(path, state) == {"note": "two"}
        assert state["step"] == 2
        return [step(made, model, optimizer) for _ in range(2)]


@pytest.mark.parametrize("options", [{}, {"async_save": True}])
@pytest.mark.parametrize(("layout", "n"), [("plain", 1), ("ddp", 2), ("fsdp1", 2), ("fsdp2", 2)])
def test_a_state_goes_on_in_any_layout(
    ranks: Ranks, tmp_path: Path, layout: str, n: int, options: dict[str, Any]
) -> None:
    path = str(tmp_path / "state")
    losses = ranks(n, train, path, layout, options)[0]
    for other, m in [("plain", 1), ("ddp", 3), ("fsdp1", 2), ("fsdp2", 3)]:
        for result in ranks(m, resume, path, other):
            assert result == pytest.approx(losses, rel=1e-5)


def several(path: str) -> None:
    with fabric("ddp") as made:
        gen, gen_opt = set_up(made)
        disc, disc_opt = set_up(made)
        step(made, gen, gen_opt)
        scheduler = torch.optim.lr_scheduler.StepLR(gen_opt, 1)
        scheduler.step()
        made.save(path, {"gen": gen, "disc": disc, "g": gen_opt, "d": disc_opt, "scheduler": scheduler})
        expected = [p.detach().clone() for p in gen.parameters()]
        for p in [*gen.parameters(), *disc.parameters()]:
            p.data.zero_()
        other = torch.optim.lr_scheduler.StepLR(gen_opt, 1)
        rest = made.load(path, {"gen": gen, "g": gen_opt, "scheduler": other})
        assert rest == {}
        assert other.last_epoch == scheduler.last_epoch
        assert all(torch.equal(a, b) for a, b in zip(expected, gen.parameters(), strict=True))
        assert not any(p.any() for p in disc.parameters())
        with pytest.raises(MismatchError, match="no 'critic'"):
            made.load(path, {"critic": gen})
        assert made.load(path, {"critic": gen}, strict=False) != {"critic": gen}


def test_several_models_and_optimizers_have_their_own_keys(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, several, str(tmp_path / "state"))


def filtered(path: str) -> None:
    with fabric("ddp") as made:
        model, optimizer = set_up(made)
        made.save(path, {"net": model, "step": 1}, filter={"net": lambda name, _: "bias" not in name})
        assert sorted(name for name in rankless.open(path) if name.startswith("model/")) == [
            "model/0.weight",
            "model/2.weight",
        ]
        with pytest.raises(InvalidArgumentError, match="without optimizers"):
            made.save(path + "2", {"net": model, "opt": optimizer}, filter={"net": lambda *_: True})


def test_a_filter_says_what_is_saved(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, filtered, str(tmp_path / "state"))


@pytest.mark.parametrize("layout", ["fsdp1", "fsdp2"])
def test_lightnings_own_format_is_read_again(ranks: Ranks, tmp_path: Path, layout: str) -> None:
    path = str(tmp_path / "state")
    losses = ranks(2, train, path, layout, {"checkpoint_format": "lightning"})[0]
    assert sorted(os.listdir(path)) == [".metadata", "__0_0.distcp", "__1_0.distcp", "meta.pt"]  # noqa: PTH208
    for result in ranks(2, resume, path, layout):
        assert result == pytest.approx(losses, rel=1e-5)


PRUNE = """
import sys
from pathlib import Path
from rankless.run.cleanup import clean_up
print(*[folder.name for folder in clean_up(Path(sys.argv[1]))])
"""


def pruned_meanwhile(path: str, layout: str) -> list[str]:
    """What ``prune --leftovers`` of another process removes in the middle of a save."""
    removed, write = [], torch.save

    def write_and_prune(*arguments: Any, **options: Any) -> None:
        write(*arguments, **options)
        command = [sys.executable, "-c", PRUNE, str(Path(path).parent)]
        removed.extend(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())

    with fabric(layout, checkpoint_format="lightning") as made, mock.patch.object(torch, "save", write_and_prune):
        model, optimizer = set_up(made)
        made.save(path, {"net": model, "opt": optimizer, "step": 1})
    return removed


@pytest.mark.parametrize("layout", ["ddp", "fsdp1", "fsdp2"])
def test_a_running_save_in_lightnings_format_is_not_pruned(ranks: Ranks, tmp_path: Path, layout: str) -> None:
    """Of a dead one, what is left goes with the next save of the path."""
    path = tmp_path / "state"
    left = tmp_path / HiddenName("state", "0" * 16, "1" * 16, "partial").name
    (left / "state").mkdir(parents=True)
    assert ranks(2, pruned_meanwhile, str(path), layout) == [[], []]
    assert os.listdir(tmp_path) == ["state"]  # noqa: PTH208
    assert "model/0.weight" in rankless.open(path, keys={"model": "net"})


@pytest.mark.parametrize(("checkpoint_format", "address"), [("native", "memory://a"), ("lightning", "s3://bucket/a")])
def test_unsuitable_addresses_are_no_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkpoint_format: str, address: str
) -> None:
    monkeypatch.chdir(tmp_path)
    chosen = strategy("plain", checkpoint_format=checkpoint_format)
    for call in (lambda: chosen.save_checkpoint(address, {}), lambda: chosen.load_checkpoint(address)):
        with pytest.raises(InvalidArgumentError, match=r"object stores are not supported|no store that rankless knows"):
            call()
    assert list(tmp_path.iterdir()) == []
