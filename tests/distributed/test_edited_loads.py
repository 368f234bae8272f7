"""Loads that edit: on any ranks and layouts they give what an edited copy has, once, and the training goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import rankless
from rankless.errors import CorruptCheckpointError, InvalidArgumentError, RankMismatchError, StateError
from tests.helpers.corruption import flip_tensor_bit
from tests.helpers.edit_oracle import Lm, Oracle, make_optimizer, save_training, state_of, train_steps
from tests.helpers.pool import Ranks

#: Grows the vocabulary, and changes the stack of layers.
EDITS = ["resize-vocab 17", "layers order=1,1,2,0", "freeze layers.0.norm.*"]


def start(layout: str, *shape: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A training with other values than those that are saved."""
    torch.manual_seed(5)
    model: Any = Lm(*shape)
    if layout == "fsdp":
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
    elif layout == "ddp":
        model = DistributedDataParallel(model)
    return model, make_optimizer(model)


def whole(state: Any) -> dict[str, torch.Tensor]:
    """The tensors of all ranks, without the prefix of DDP."""
    return {
        name.removeprefix("module."): tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        for name, tensor in state.items()
    }


def load_edited(path: str, layout: str) -> tuple[dict[str, torch.Tensor], Any]:
    model, _ = start(layout, 17, 4)
    trained = [p for name, p in model.named_parameters() if "layers.0.norm" not in name]
    optimizer = torch.optim.AdamW(
        [{"params": [p for p in trained if p.ndim > 1]}, {"params": [p for p in trained if p.ndim == 1]}]
    )
    result = rankless.restore(path, model=model, optimizer=optimizer, edit=EDITS)
    return whole(state_of(model, optimizer)), (result.verified, result.exact, result.reconstructed)


@pytest.mark.parametrize(("layout", "count"), [("plain", 1), ("ddp", 2), ("fsdp", 3), ("fsdp", 4)])
def test_any_layout_loads_what_the_copy_has(ranks: Ranks, tmp_path: Path, layout: str, count: int) -> None:
    save_training(tmp_path / "run", (1,))
    copy = Oracle.read(rankless.edit(tmp_path / "run", tmp_path / "copy", EDITS))
    expected = {**copy.weights, **{f"{n}/{s}": t for n, states in copy.states.items() for s, t in states.items()}}
    for tensors, (verified, exact, reconstructed) in ranks(count, load_edited, str(tmp_path / "run"), layout):
        assert tensors.keys() == expected.keys()
        assert all(torch.equal(tensors[name], expected[name]) for name in expected)
        assert verified
        assert not {"model", "optimizer"} & {*exact}
        assert {"model", "optimizer", "rows 10 to 16 of embed_tokens.weight"} <= {*reconstructed}


def train_and_save(path: str, steps: list[int], rows: int, edit: list[str] | None) -> list[float]:
    """Train under FSDP2 from a checkpoint on, and save. Return the losses."""
    model, optimizer = start("fsdp", rows)
    if Path(path).exists():
        rankless.load_checkpoint(path, model=model, optimizer=optimizer, edit=edit)
    losses = train_steps(model, optimizer, steps, rows)
    rankless.save_checkpoint(path, f"step_{steps[-1]}", model=model, optimizer=optimizer, step=steps[-1])
    return losses


def test_a_training_grows_its_vocabulary_and_goes_on_on_more_ranks(ranks: Ranks, tmp_path: Path) -> None:
    """The losses are those of a training whose state was grown in memory."""
    rows, new = 8_190, 8_190 + 4_098
    ranks(2, train_and_save, str(tmp_path / "run"), [1, 2], rows, None)
    oracle = Oracle.read(tmp_path / "run/step_2")
    oracle.resize(new, "mean")
    model = Lm(new)
    model.load_state_dict(oracle.weights)
    optimizer = make_optimizer(model)
    names = {parameter: name for name, parameter in model.named_parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = oracle.states[names[parameter]]
    rankless.save_checkpoint(tmp_path / "grown", "step_2", model=model, optimizer=optimizer, step=2)
    expected = ranks(4, train_and_save, str(tmp_path / "grown"), [3, 4, 5], new, None)
    edited = ranks(4, train_and_save, str(tmp_path / "run"), [3, 4, 5], new, [f"resize-vocab {new}"])
    assert edited == expected
    assert len(json.loads((tmp_path / "run/step_5/manifest.json").read_text())["edits"]) == 1
    again = ranks(3, train_and_save, str(tmp_path / "run"), [6], new, [f"resize-vocab {new}"])
    assert again == ranks(3, train_and_save, str(tmp_path / "grown"), [6], new, None)


def load_other_edits(path: str) -> str:
    rank = torch.distributed.get_rank()
    with pytest.raises(RankMismatchError) as caught:
        rankless.load_checkpoint(path, model=Lm(12 + rank), edit=[f"resize-vocab {12 + rank}"])
    return str(caught.value)


def test_ranks_must_pass_the_same_edit(ranks: Ranks, tmp_path: Path) -> None:
    save_training(tmp_path / "run", (1,))
    assert all("edit" in text for text in ranks(2, load_other_edits, str(tmp_path / "run")))


def load_corrupt(path: str) -> str:
    model, _ = start("fsdp", 17)
    with pytest.raises(CorruptCheckpointError) as caught:
        rankless.load_checkpoint(path, model=model, edit=["resize-vocab 17"])
    return str(caught.value)


def test_a_flipped_bit_is_found_whichever_rank_reads_it(ranks: Ranks, tmp_path: Path) -> None:
    save_training(tmp_path / "run", (1,))
    flip_tensor_bit(tmp_path / "run/step_1/model/model.safetensors", "embed_tokens.weight")
    texts = ranks(3, load_corrupt, str(tmp_path / "run"))
    assert all("'embed_tokens.weight'" in text and "is corrupt" in text for text in texts)


class TestResuming:
    """A job that is started again with the same arguments goes on, and its checkpoints name the edit."""

    def resume(self, run: Path, rows: int, layers: int, **options: Any) -> tuple[int, Lm, rankless.Checkpointer]:
        model = Lm(rows, layers)
        checkpointer = rankless.Checkpointer(run, model=model, optimizer=make_optimizer(model), save_every=1, keep=None)
        return checkpointer.resume(**options), model, checkpointer

    def edits_of(self, checkpoint: Path) -> list[str]:
        return [record["recipe"] for record in json.loads((checkpoint / "manifest.json").read_text()).get("edits", [])]

    def test_an_edit_takes_effect_once(self, tmp_path: Path) -> None:
        run, edits = tmp_path / "run", ["layers order=0,0,1"]
        save_training(run, (1,))
        for step in (2, 3):
            began, model, checkpointer = self.resume(run, 10, 3, edit=edits)
            assert began == step - 1
            first = model.layers[0].norm.weight.detach().clone()
            assert torch.equal(first, model.layers[1].norm.weight) == (step == 2)
            with torch.no_grad():
                model.layers[1].norm.weight += 1
            checkpointer.step(step)
            checkpointer.close()
            assert len(self.edits_of(run / f"step_{step}")) == 1

    def test_later_edits_are_added_and_a_job_without_one_carries_them_on(self, tmp_path: Path) -> None:
        run = tmp_path / "run"
        save_training(run, (1,))
        for step, options in ((2, {"edit": ["layers keep=0,1"]}), (3, {}), (4, {"edit": ["resize-vocab 12"]})):
            _, _, checkpointer = self.resume(run, 12 if step == 4 else 10, 2, **options)
            checkpointer.step(step)
            checkpointer.close()
        assert [len(self.edits_of(run / f"step_{step}")) for step in (1, 2, 3, 4)] == [0, 1, 1, 2]
        began, _, checkpointer = self.resume(run, 12, 2, edit=["layers keep=0,1"])
        checkpointer.close()
        assert began == 4

    def test_what_only_a_local_tier_has_is_refused_before_anything_changes(self, tmp_path: Path) -> None:
        run, local = tmp_path / "run", rankless.LocalTier(tmp_path / "local", drain_every=100)
        directory = rankless.RunDirectory(run, local=local)
        directory.save("a", Lm(), step=1)
        with pytest.raises(StateError, match="with rankless drain"):
            directory.restore(model=Lm(12), edit=["resize-vocab 12"])
        directory.finalize()
        grown = Lm(12)
        assert rankless.restore(run, model=grown, edit=["resize-vocab 12"]).tag == "a"

    def test_a_wrong_recipe_is_refused(self, tmp_path: Path) -> None:
        save_training(tmp_path / "run", (1,))
        with pytest.raises(InvalidArgumentError, match="no edit has the verb"):
            self.resume(tmp_path / "run", 10, 3, edit=["grow 3"])
