"""Tests migration from NxD to plain PyTorch and back: a Llama of 8 ranks (TP 2, PP 2, DP 2, ZeRO-1) on one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from typer.testing import CliRunner

import rankless
from rankless.cli.main import app
from rankless.conversion.convert import convert
from rankless.errors import InvalidArgumentError, TagExistsError
from tests.helpers.nxd_files import load_rank_file, rank_file_name, read_files
from tests.helpers.nxd_llama import (
    CONFIG,
    DP,
    LAYOUT,
    PP,
    STEPS,
    TP,
    Llama,
    compute_loss,
    make_batch,
    make_optimizer,
    train_rank,
    train_single,
)
from tests.helpers.pool import Ranks


@pytest.fixture(scope="module")
def trained(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nxd") / "step_3"
    ranks(TP * PP * DP, train_rank, str(folder))
    return folder


def test_to_transformers(trained: Path, tmp_path: Path) -> None:
    import transformers

    before = read_files(trained)
    model, _ = train_single(STEPS)
    convert(trained, tmp_path / "hf", to="hf", layout=LAYOUT)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG)).config.save_pretrained(tmp_path / "hf")
    actual, info = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert all(torch.equal(tensor, model.state_dict()[key]) for key, tensor in actual.state_dict().items())
    tokens = make_batch(9, 0)
    torch.testing.assert_close(actual(tokens).logits, model(tokens))
    assert read_files(trained) == before


def test_to_torchs_distributed_checkpoint(trained: Path, tmp_path: Path) -> None:
    model, own = train_single(STEPS)
    convert(trained, tmp_path / "dcp", to="dcp", layout=LAYOUT, max_shard_size=5000)
    other = Llama()
    fresh = make_optimizer(other.parameters())
    actual = {"model": get_model_state_dict(other), "optim": get_optimizer_state_dict(other, fresh)}
    dcp.load(actual, checkpoint_id=tmp_path / "dcp", no_dist=True)
    for key, tensor in model.state_dict().items():
        assert torch.equal(actual["model"][key], tensor), key
    expected = get_optimizer_state_dict(model, own)
    assert actual["optim"]["param_groups"][0]["lr"] == 0.01
    for key, states in expected["state"].items():
        for state, value in states.items():
            assert torch.equal(actual["optim"]["state"][key][state], value), (key, state)


def go_on(folder: str, keys: dict[str, str]) -> dict[str, Any]:
    model = Llama()
    for layer in model.model["layers"]:
        fully_shard(layer)
    fully_shard(model)
    trained = make_optimizer(model.parameters())
    rankless.load_checkpoint(folder, model=model, optimizer=trained, keys=keys)
    for step in range(STEPS, STEPS + 2):
        model.zero_grad()
        (sum(compute_loss(model, make_batch(step, half)) for half in range(DP)) / DP).backward()
        trained.step()
    return {key: tensor.full_tensor().detach() for key, tensor in model.named_parameters()}


@pytest.mark.parametrize("direct", [False, True])
def test_fsdp_on_three_ranks_goes_on_as_one_process_does(
    ranks: Ranks, trained: Path, tmp_path: Path, direct: bool
) -> None:
    model, _ = train_single(STEPS + 2)
    if direct:
        results = ranks(3, go_on, str(trained), {"layout": LAYOUT})
    else:
        convert(trained, tmp_path / "native", to="native", layout=LAYOUT)
        results = ranks(3, go_on, str(tmp_path / "native"), {})
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(results[0][key], parameter.detach(), rtol=1e-5, atol=1e-6)


def test_and_back(trained: Path, tmp_path: Path) -> None:
    """One process's checkpoint, laid out for NxD's ranks, is what these ranks would have saved."""
    model, own = train_single(STEPS)
    rankless.save_checkpoint(tmp_path / "run", "s", model=model, optimizer=own)
    options: dict[str, Any] = {"tp_size": TP, "pp_size": PP, "dp_size": DP, "master_weights": True, "layout": LAYOUT}
    made = convert(tmp_path / "run", tmp_path / "nxd", to="nxd", **options)
    again = convert(trained, tmp_path / "again", to="nxd", **options)
    files = [file.relative_to(trained) for kind in ("model", "optim") for file in (trained / kind).glob("*_00.pt")]
    files += [file.relative_to(trained) for kind in ("model", "optim") for file in (trained / kind).glob("*_01.pt")]
    assert len(files) == TP * PP * (DP + 1)
    for file in files:
        for other in (made, again):
            assert equal(load_rank_file(other / file), load_rank_file(trained / file)), (file, other)
    assert (made / "done").read_bytes() == (made / "checkpoint").read_bytes() == b"1"


def equal(left: Any, other: Any) -> bool:
    """The same, whatever the order of keys."""
    if isinstance(left, dict):
        return left.keys() == other.keys() and all(equal(left[key], other[key]) for key in left)
    if isinstance(left, torch.Tensor):
        return left.dtype == other.dtype and torch.equal(left, other)
    return left == other


def test_the_model_in_16_bits_and_its_masters_in_32(trained: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"tp_size": 2, "dp_size": 2, "layout": LAYOUT, "master_weights": True, "xser": False}
    made = convert(trained, tmp_path / "nxd", to="nxd", dtype="bfloat16", **options)
    model = load_rank_file(made / "model" / rank_file_name())
    masters = load_rank_file(made / "optim" / rank_file_name())["sharded_master_weights"]
    key = "model.embed_tokens.weight"
    whole = train_single(STEPS)[0].state_dict()[key]
    assert torch.equal(model[key], whole.chunk(2)[0].bfloat16())
    assert torch.equal(masters[list(model).index(key)], whole.chunk(2)[0].chunk(2)[0])
    back = rankless.open(made, keys={"layout": LAYOUT})
    assert torch.equal(back[f"model/{key}"], whole)
    low = rankless.open(made, keys={"layout": LAYOUT, "weights": "model"})
    assert torch.equal(low[f"model/{key}"], whole.bfloat16())


def test_what_cannot_be_asked_for(trained: Path, tmp_path: Path) -> None:
    before = read_files(trained)
    asked: list[tuple[dict[str, Any], str]] = [
        ({"tp_size": 2}, "need a layout"),
        ({"layout": LAYOUT, "tp_size": 0}, "at least 1"),
        ({"layout": LAYOUT, "tp_size": 2, "dp_size": 0}, "at least 1"),
        ({"layout": LAYOUT, "tp_size": 2, "master_weights": True}, "pass dp_size"),
        ({"layout": LAYOUT, "tp_size": 2, "pp_size": 3}, "2 layers cannot be divided"),
        ({"layout": LAYOUT, "tp_size": 6}, "6 tensor-parallel ranks need|no multiple"),
        ({"layout": LAYOUT, "zero": 1}, "got zero"),
    ]
    for options, message in asked:
        with pytest.raises(InvalidArgumentError, match=message):
            convert(single_checkpoint(tmp_path), tmp_path / "out", to="nxd", **options)
    with pytest.raises(InvalidArgumentError, match="inside the other"):
        convert(trained, trained / "out", to="nxd", layout=LAYOUT, tp_size=2)
    (tmp_path / "there").mkdir()
    with pytest.raises(TagExistsError):
        convert(trained, tmp_path / "there", to="nxd", layout=LAYOUT, tp_size=2)
    assert read_files(trained) == before
    assert not (tmp_path / "out").exists()
    assert not [file for file in tmp_path.iterdir() if file.name.startswith(".")]


def single_checkpoint(folder: Path) -> Path:
    if not (folder / "one").exists():
        rankless.save_checkpoint(folder / "one", "s", model=Llama())
    return folder / "one"


def test_the_command(trained: Path, tmp_path: Path) -> None:
    def run(*args: str) -> Any:
        return CliRunner().invoke(app, ["convert", *args])

    there = run(str(trained), str(tmp_path / "native"), "--to", "native", "--layout", LAYOUT)
    assert there.exit_code == 0, there.output
    sizes = ["--tp-size", "2", "--pp-size", "2", "--dp-size", "3", "--master-weights"]
    back = run(str(tmp_path / "native"), str(tmp_path / "nxd"), "--to", "nxd", "--layout", LAYOUT, *sizes)
    assert back.exit_code == 0, back.output
    assert len(list((tmp_path / "nxd" / "optim").glob("*.pt.tensors"))) == 12
    wrong = run(str(trained), str(tmp_path / "hf"), "--to", "hf")
    assert wrong.exit_code == 2
    assert "name a layout" in " ".join(wrong.stderr.split())
    low = run(str(trained), str(tmp_path / "hf"), "--to", "hf", "--layout", LAYOUT, "--key", "weights=model")
    assert low.exit_code == 0, low.output
