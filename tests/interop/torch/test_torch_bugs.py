"""Tests that failures of torch 2.13's state dicts and checkpoints do not occur in rankless."""

import json
import struct
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import rankless
from tests.helpers.pool import Ranks


def test_empty_dicts_int_keys_and_tuples_come_back(tmp_path: Path) -> None:
    """DCP drops empty dicts, makes text of integer keys, and loads nothing into them."""
    content = {"empty": {}, "by step": {5: 3, 10: torch.tensor([1.0])}, "pair": (1, torch.tensor(2))}
    rankless.save_checkpoint(tmp_path, "s", user_content=content)
    actual = rankless.load_checkpoint(tmp_path)
    assert actual["empty"] == {}
    assert list(actual["by step"]) == [5, 10]
    assert type(actual["pair"]) is tuple
    assert torch.equal(actual["pair"][1], torch.tensor(2))


def test_names_with_dots_do_not_collide_with_trees(tmp_path: Path) -> None:
    """DCP raises for these, as both flatten to ``a.b``."""
    content = {"a.b": torch.tensor(1), "a": {"b": torch.tensor(2)}}
    rankless.save_checkpoint(tmp_path, "s", user_content=content)
    actual = rankless.load_checkpoint(tmp_path)
    assert (int(actual["a.b"]), int(actual["a"]["b"])) == (1, 2)


def test_an_optimizer_without_state_keeps_its_groups(tmp_path: Path) -> None:
    """Flattened optimizer state dicts lose SGD without momentum: there is nothing but groups."""
    model = nn.Linear(2, 2)
    rankless.save_checkpoint(tmp_path, "s", model, torch.optim.SGD(model.parameters(), lr=0.25))
    optimizer = torch.optim.SGD(model.parameters(), lr=9)
    rankless.load_checkpoint(tmp_path, model=model, optimizer=optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert not optimizer.state


def test_a_fresh_optimizer_is_not_stepped(tmp_path: Path) -> None:
    """``get_optimizer_state_dict`` steps it, and weights with decay would change."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1, weight_decay=1)
    steps: list[int] = []
    optimizer.register_step_pre_hook(lambda *_: steps.append(1))
    before = model.weight.detach().clone()
    rankless.save_checkpoint(tmp_path, "s", model, optimizer)
    rankless.load_checkpoint(tmp_path, model=model, optimizer=optimizer)
    assert not steps
    assert not optimizer.state
    assert model.weight.grad is None
    assert torch.equal(model.weight, before)


def test_float32_moments_of_bfloat16_parameters_are_not_cast(tmp_path: Path) -> None:
    """``Optimizer.load_state_dict`` casts them to the parameter's dtype."""
    model = nn.Linear(2, 2, dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())
    moment = torch.tensor([[1 + 2**-20, 0.1], [0.2, 0.3]])
    optimizer.state[model.weight] = {"step": torch.tensor(1.0), "exp_avg": moment, "exp_avg_sq": moment * 3}
    rankless.save_checkpoint(tmp_path, "s", model, optimizer)
    fresh = torch.optim.AdamW(model.parameters())
    rankless.load_checkpoint(tmp_path, model=model, optimizer=fresh)
    assert torch.equal(fresh.state[model.weight]["exp_avg"], moment)
    assert fresh.state[model.weight]["exp_avg"].dtype == torch.float32


def own_values(path: str) -> Any:
    rank = dist.get_rank()
    rankless.save_checkpoint(path, "s", per_rank_content={"seen": rank, "noise": torch.full((2,), float(rank))})
    return rankless.restore(path).per_rank_content


def test_values_of_each_rank_are_kept_apart(ranks: Ranks, tmp_path: Path) -> None:
    """DCP keeps one rank's, whichever wrote it."""
    for rank, content in enumerate(ranks(3, own_values, str(tmp_path))):
        assert content["seen"] == rank
        assert torch.equal(content["noise"], torch.full((2,), float(rank)))


def frozen_and_unused(path: str) -> Any:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    model[0].weight.requires_grad_(False)
    model.register_parameter("unused", nn.Parameter(torch.ones(1)))
    fully_shard(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    rankless.save_checkpoint(path, "s", model, optimizer)
    fresh = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    rankless.load_checkpoint(path, model=model, optimizer=fresh)
    assert len(optimizer.state) == 3
    return [p in fresh.state for p in model.parameters()], [p in optimizer.state for p in model.parameters()]


def test_frozen_parameters_and_unused_ones_keep_the_state_they_have_and_no_more(ranks: Ranks, tmp_path: Path) -> None:
    """``get_optimizer_state_dict`` raises for frozen ones, and gives unused ones a state."""
    for result, trained in ranks(2, frozen_and_unused, str(tmp_path)):
        assert result == trained


def without_a_piece(path: str) -> float:
    module = nn.Linear(1, 1)
    nn.init.constant_(module.weight, 0.5)
    model = FullyShardedDataParallel(module, device_id=torch.device("cpu"), use_orig_params=True)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    rankless.save_checkpoint(path, "s", model, optimizer)
    fresh = torch.optim.AdamW(model.parameters())
    rankless.load_checkpoint(path, model=model, optimizer=fresh)
    return sum(state["exp_avg"].sum().item() for state in fresh.state.values())


def test_ranks_without_a_piece_of_a_parameter_under_fsdp1_load(ranks: Ranks, tmp_path: Path) -> None:
    """``get_state_dict`` with DCP raises there: missing key optim.param_groups."""
    results = ranks(4, without_a_piece, str(tmp_path))
    assert results.count(0) == 2
    assert sum(results) > 0


def metadata_bytes(folder: Path) -> int:
    """All that is not tensor data, but for the CRCs of blocks."""
    total = 0
    for file in folder.rglob("*"):
        if file.suffix == ".safetensors":
            raw = file.read_bytes()
            size = struct.unpack("<Q", raw[:8])[0]
            crcs = json.loads(raw[8 : 8 + size])["__metadata__"]["rankless.crc64nvme"]
            total += 8 + size - len(crcs)
        elif file.is_file():
            total += file.stat().st_size
    return total


def many(path: str) -> None:
    model = nn.ParameterDict({f"layers/{n}/attention/wq/weight": nn.Parameter(torch.ones(4, 3)) for n in range(1000)})
    if dist.is_initialized():
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for p in model.parameters():
        optimizer.state[p] = {"step": torch.ones(()), "exp_avg": p.detach().clone(), "exp_avg_sq": p.detach().clone()}
    rankless.save_checkpoint(path, "s", model, optimizer, rng=False, max_shard_size=20_000)


def test_metadata_takes_a_few_hundred_bytes_for_each_tensor_whatever_the_world_size(
    ranks: Ranks, tmp_path: Path
) -> None:
    """DCP: 180 bytes for each chunk of each rank, and 1.5 kB inside the data files."""
    many(str(tmp_path / "1"))
    sizes = [metadata_bytes(tmp_path / "1/s")]
    for n in (2, 4):
        ranks(n, many, str(tmp_path / str(n)))
        sizes.append(metadata_bytes(tmp_path / str(n) / "s"))
    assert max(sizes) <= 400 * 4000
    assert max(sizes) - min(sizes) < 100  # the number of ranks that saved, and empty entries of theirs
