"""Tests of pipelines whose stages share a layer, and of experts that several ranks have copies of.

The files are written by DeepSpeed's rules; each rank's part is cut from known tensors.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import rankless
from rankless.errors import CorruptCheckpointError, FormatError
from tests.helpers.deepspeed_files import ZeroSave, random_save, write_zero
from tests.helpers.equality import equal_bits

TIED = "tied_modules.embed.weight"

STAGES = [{TIED: (4, 3), "1.weight": (3, 3), "1.bias": (3,)}, {"3.weight": (3, 5), TIED: (4, 3)}]


def write_pipeline(
    folder: Path, layers: dict[int, dict[str, str]], same: bool = True, mp_world_size: int = 1
) -> list[ZeroSave]:
    """Two stages, of which both have the embedding. ``layers`` says under which names a layer's file has parameters."""
    saves = [random_save(shapes, [list(shapes)], ("exp_avg",), step=torch.tensor(3.0)) for shapes in STAGES]
    if same:
        for group in ("masters", "exp_avg"):
            first, second = (save.masters if group == "masters" else save.states[group] for save in saves)
            second[TIED] = first[TIED]  # type: ignore[index]
    tag = folder / "global_step7"
    for number, save in enumerate(saves):
        written = write_zero(folder / f"stage{number}", save)
        tag.mkdir(exist_ok=True)
        for file in written.iterdir():
            tree = torch.load(file, weights_only=False) if "model_states" in file.name else None
            target = tag / file.name.replace("mp_rank_00", f"mp_rank_0{number}")
            if tree is None:
                file.rename(target)
            else:
                torch.save({**tree, "module": None, "mp_world_size": mp_world_size}, target)
    values = {**saves[1].masters, **saves[0].masters}
    for number, names in layers.items():
        torch.save({local: values[name] for local, name in names.items()}, tag / f"layer_0{number}-model_states.pt")
    (folder / "latest").write_text("global_step7")
    return saves


LAYERS = {0: {"weight": TIED}, 1: {"weight": "1.weight", "bias": "1.bias"}, 3: {"weight": "3.weight"}}


def test_a_layer_of_two_stages_is_one_parameter(tmp_path: Path) -> None:
    """It has the name of the layer. A model may also have it under the name that DeepSpeed gives it."""
    saves = write_pipeline(tmp_path, LAYERS)
    opened = rankless.open(tmp_path)
    for save in saves:
        for name, tensor in save.masters.items():
            layer_name = "0.weight" if name == TIED else name
            assert equal_bits(opened[f"optimizer/{layer_name}/exp_avg"], save.states["exp_avg"][name])
            assert equal_bits(opened[f"model/{layer_name}"], tensor)
    names = {name for name in opened if name.startswith("model/")}
    assert names == {"model/0.weight", "model/1.weight", "model/1.bias", "model/3.weight"}
    model = torch.nn.Module()
    model.tied_modules = torch.nn.ModuleDict({"embed": torch.nn.Linear(3, 4, bias=False)})
    rankless.restore(tmp_path, model=model, strict=False)
    assert equal_bits(model.tied_modules["embed"].weight, saves[0].masters[TIED])
    (group,) = opened.values["optimizer"]["groups"]
    assert group["params"] == ["0.weight", "1.weight", "1.bias", "3.weight"]
    assert [check.problem for check in opened.verify() if check.problem] == []


def test_stages_that_differ_in_a_shared_layer_are_found(tmp_path: Path) -> None:
    write_pipeline(tmp_path, LAYERS, same=False)
    (problem,) = [check.problem for check in rankless.open(tmp_path).verify() if check.problem]
    assert "master weight of 'tied_modules.embed.weight' differs between ranks or stages" in problem


@pytest.mark.parametrize("missing", ["mp_rank_01_model_states.pt", "*mp_rank_01_*"])
def test_a_missing_stage_is_found(tmp_path: Path, missing: str) -> None:
    """The files of its layers alone have the weights, without their masters and the states of the optimizer."""
    write_pipeline(tmp_path, LAYERS, mp_world_size=2)
    for file in (tmp_path / "global_step7").glob(missing):
        file.unlink()
    with pytest.raises(CorruptCheckpointError, match=r"1 of 2 model-parallel ranks|rank_01.* without a file of its"):
        rankless.open(tmp_path)


def test_missing_layers_are_found(tmp_path: Path) -> None:
    """Universal checkpoints that DeepSpeed converts lack them."""
    write_pipeline(tmp_path, {}, mp_world_size=2)
    with pytest.raises(CorruptCheckpointError, match="2 stages of a pipeline, and none of their layers"):
        rankless.open(tmp_path)


def test_a_shared_layer_that_could_be_two_is_refused(tmp_path: Path) -> None:
    write_pipeline(tmp_path, {**LAYERS, 2: {"weight": TIED}})
    with pytest.raises(FormatError, match=r"the layers \[0, 2\] could be tied_modules.embed"):
        rankless.open(tmp_path)


def write_experts(folder: Path, experts: int = 4, expert_ranks: int = 2, ranks: int = 4) -> dict[str, torch.Tensor]:
    """Ranks 0 and 2 have the first experts, ranks 1 and 3 the last ones; two ranks divide each optimizer state."""
    name = "moe.experts.deepspeed_experts.{}.weight"
    local = experts // expert_ranks
    whole = {name.format(number): torch.randn(3, 5) for number in range(experts)}
    dense = {"gate.weight": torch.randn(4, 6)}
    folder.mkdir()
    shapes = [{"gate.weight": (4, 6)}, {name.format(number): (3, 5) for number in range(local)}]
    torch.save({"module": dense, "param_shapes": shapes}, folder / "mp_rank_00_model_states.pt")
    for number in range(experts):
        stored = {name.format(number): whole[name.format(number)]}
        torch.save(stored, folder / f"layer_0_expert_{number}_mp_rank_00_model_states.pt")
    for rank in range(ranks):
        mine = [whole[name.format(rank % expert_ranks * local + number)] for number in range(local)]
        parts = [
            _part(torch.cat([tensor.reshape(-1) for tensor in tensors]), count, place)
            for tensors, count, place in (([*dense.values()], ranks, rank), (mine, 2, rank // expert_ranks))
        ]
        groups: list[dict[str, Any]] = [{"lr": 1.0, "params": [0]}, {"lr": 1.0, "moe": True, "params": [1]}]
        state = {
            "base_optimizer_state": {
                "state": {n: {"sum": 2 * part} for n, part in enumerate(parts)},
                "param_groups": groups,
            },
            "single_partition_of_fp32_groups": parts,
            "partition_count": [ranks, 2],
        }
        torch.save({"optimizer_state_dict": state}, folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    return {**whole, **dense}


def _part(flat: torch.Tensor, ranks: int, rank: int) -> torch.Tensor:
    padded = torch.cat([flat, torch.zeros(-len(flat) % (2 * ranks))])
    size = len(padded) // ranks
    return padded[rank * size : (rank + 1) * size].clone()


def test_experts_are_counted_over_all_ranks(tmp_path: Path) -> None:
    tensors = write_experts(tmp_path / "c")
    opened = rankless.open(tmp_path / "c")
    assert {name for name in opened if name.startswith("model/")} == {f"model/{name}" for name in tensors}
    for name, tensor in tensors.items():
        assert equal_bits(opened[f"model/{name}"], tensor)
        assert equal_bits(opened[f"optimizer/{name}/sum"], 2 * tensor)
    assert [check.problem for check in opened.verify() if check.problem] == []


def test_a_missing_expert_is_found(tmp_path: Path) -> None:
    write_experts(tmp_path / "c")
    (tmp_path / "c/layer_0_expert_3_mp_rank_00_model_states.pt").unlink()
    with pytest.raises(CorruptCheckpointError, match=r"deepspeed_experts.3.weight' has the shape \[3, 5\].*no tensor"):
        rankless.open(tmp_path / "c")
