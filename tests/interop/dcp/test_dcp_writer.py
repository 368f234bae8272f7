"""Tests that ``torch.distributed.checkpoint`` and Lightning load checkpoints that were converted to its format."""

from __future__ import annotations

import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, get_state_dict, set_state_dict

import rankless
from rankless.dcp.writer import dcp_files
from rankless.dcp_versions import DCP_VERSION
from rankless.errors import CorruptCheckpointError, InvalidArgumentError
from tests.helpers import dcp_matrix
from tests.helpers.conversions import MEASURE_CONVERSION, save_training
from tests.helpers.dcp_matrix import Case, are_equal
from tests.helpers.equality import equal_bits
from tests.helpers.pool import Ranks
from tests.helpers.processes import run_command as command
from tests.helpers.torch_limits import HAS_DCP_VERSION
from tests.helpers.training import assert_equal, gather_run, start_run, train_run

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return save_training(tmp_path)


# ---------------------------------------------------------------------------------------------------------------
# Every layout of ours, in every layout of torch's, and back: the whole matrix is ``python -m campaigns.matrix``

SAMPLE = [
    (Case("plain", 1), Case("fsdp1", 2), "adamw"),
    (Case("fsdp1", 2), Case("fsdp_tp", 4), "adamw"),
    (Case("fsdp", 3), Case("tp", 2), "adamw"),
    (Case("fsdp_tp", 4), Case("ddp", 2), "adamw"),
    (Case("hsdp", 4), Case("plain", 1), "momentum"),
    (Case("tp", 2), Case("fsdp1", 4), "momentum"),
    (Case("ddp", 2), Case("hsdp", 4), "sgd"),
    (Case("fsdp1", 4), Case("fsdp", 2), "sgd"),
]


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    root = tmp_path_factory.mktemp("seeds")

    def get(kind: str) -> str:
        if not (root / kind).exists():
            dcp_matrix.write_seed(str(root / kind), kind)
        return str(root / kind)

    return get


@pytest.mark.parametrize(("writer", "reader", "kind"), SAMPLE, ids=str)
def test_what_we_save_in_one_layout_torch_loads_in_another(
    ranks: Ranks, tmp_path: Path, seeds: Callable[[str], str], writer: Case, reader: Case, kind: str
) -> None:
    ranks(writer.ranks, dcp_matrix.write_ours, str(tmp_path / "ours"), writer.layout, kind, seeds(kind))
    path = rankless.convert(tmp_path / "ours", tmp_path / "theirs", to="dcp")
    ranks(reader.ranks, dcp_matrix.load_theirs, str(path), reader.layout, kind)


@pytest.mark.parametrize(("writer", "reader", "kind"), SAMPLE[1::2], ids=str)
def test_what_torch_saves_in_one_layout_we_load_in_another(
    ranks: Ranks, tmp_path: Path, seeds: Callable[[str], str], writer: Case, reader: Case, kind: str
) -> None:
    path = str(tmp_path / "theirs")
    ranks(writer.ranks, dcp_matrix.write_theirs, path, writer.layout, kind, seeds(kind))
    ranks(reader.ranks, dcp_matrix.load_ours, path, reader.layout, kind)


# ---------------------------------------------------------------------------------------------------------------
# What is in such a folder


def load(path: Path, state: dict[str, Any]) -> dict[str, Any]:
    dcp.load(state, checkpoint_id=path, no_dist=True)
    return state


def test_a_run_goes_on_from_it(saved: Path, tmp_path: Path) -> None:
    path = rankless.convert(saved, tmp_path / "dcp", to="dcp")
    run, expected = start_run("plain", seed=1), train_run("plain")
    model, optim = get_state_dict(run.model, run.optimizer)
    scheduler = run.scheduler.state_dict()
    state = load(
        path, {"model": model, "optim": optim, "scheduler": scheduler, "step": 0, "table": torch.zeros(40_000)}
    )
    set_state_dict(run.model, run.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    assert_equal(gather_run(run), gather_run(expected))
    assert state["step"] == 3
    assert torch.equal(state["table"], torch.arange(40_000.0))
    assert state["scheduler"]["last_epoch"] == 3


def test_an_optimizer_that_was_given_names_finds_them(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.named_parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()  # with gradients, torch gives no state of an optimizer that has not stepped
    rankless.save_checkpoint(tmp_path / "run", "s", model, optimizer)
    path = rankless.convert(tmp_path / "run", tmp_path / "dcp", to="dcp")
    state = load(path, {"optim": get_optimizer_state_dict(model, torch.optim.AdamW(model.named_parameters()))})
    assert are_equal(state["optim"], get_optimizer_state_dict(model, optimizer))


def test_torch_s_own_tool_reads_all_of_it(saved: Path, tmp_path: Path) -> None:
    path = rankless.convert(saved, tmp_path / "dcp", to="dcp")
    dcp_to_torch_save(path, tmp_path / "whole.pt")
    loaded = torch.load(tmp_path / "whole.pt", weights_only=False)
    assert loaded.keys() == {"model", "optim", "scheduler", "step", "table", "nested"}
    assert torch.equal(loaded["nested"][0]["array"], torch.arange(5))
    assert loaded["nested"][1] == (1, "two")
    assert all(
        equal_bits(loaded["model"][name], tensor) for name, tensor in train_run("plain").model.state_dict().items()
    )


def test_a_tied_weight_lies_in_it_once(saved: Path, tmp_path: Path) -> None:
    path = rankless.convert(saved, tmp_path / "dcp", to="dcp", model_only=True)
    places = {index.fqn: info for index, info in metadata(path).storage_data.items()}
    assert places["model.head.weight"] == places["model.embed.weight"]
    assert rankless.open(path)["model/head.weight"].shape == (11, 6)


def metadata(path: Path) -> Any:
    return pickle.loads((path / ".metadata").read_bytes())  # noqa: S301 - our own


def test_each_record_is_what_torch_writes(tmp_path: Path) -> None:
    """But for the tensors' CRCs, which torch.load does not look at, and a name that is made of them."""
    tensors = {"a": torch.arange(7.0), "b": torch.zeros(0, 3), "c": torch.tensor(2.5), "d": torch.ones(3, 2).bool()}
    torch.save(tensors, tmp_path / "a.pt")
    ours = rankless.convert(tmp_path / "a.pt", tmp_path / "ours", to="dcp")
    dcp.save({"model": tensors}, checkpoint_id=tmp_path / "theirs", no_dist=True)
    mine, theirs = metadata(ours), metadata(tmp_path / "theirs")
    assert mine.state_dict_metadata == theirs.state_dict_metadata
    assert mine.planner_data == theirs.planner_data
    assert mine.version == (theirs.version if HAS_DCP_VERSION else DCP_VERSION)
    assert mine.storage_data == theirs.storage_data
    raw, other = (path.joinpath("__0_0.distcp").read_bytes() for path in (ours, tmp_path / "theirs"))
    assert len(raw) == len(other)
    differ = sum(left != right for left, right in zip(raw, other, strict=True))
    assert differ <= len(tensors) * (2 * 4 + 40)


def test_large_tensors_are_chunks_and_files_are_not_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dcp_files, "_CHUNK", 100)
    tensors = {"long": torch.arange(250.0), "wide": torch.arange(120.0).view(3, 40), "one": torch.tensor(1.0)}
    tensors["deep"] = torch.arange(240).view(10, 4, 6).to(torch.int16)
    torch.save(tensors, tmp_path / "a.pt")
    path = rankless.convert(tmp_path / "a.pt", tmp_path / "dcp", to="dcp", max_shard_size=400)
    kept = metadata(path)
    assert {name: len(value.chunks) for name, value in kept.state_dict_metadata.items()} == {
        "model.long": 10,
        "model.wide": 6,
        "model.one": 1,
        "model.deep": 5,
    }
    names = sorted(file.name for file in path.iterdir())
    assert names[1:] == [f"__0_{number}.distcp" for number in range(len(names) - 1)]
    assert len(names) > 4
    actual = load(path, {"model": {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}})["model"]
    assert all(equal_bits(actual[name], tensors[name]) for name in tensors)
    assert all(equal_bits(rankless.open(path)[f"model/{name}"], tensors[name]) for name in tensors)


def test_values_of_any_form(tmp_path: Path) -> None:
    """Tensors inside of tuples are in records of their own kind: a file of torch.save with all of the tuple."""
    shared = torch.arange(3000.0)
    inside = {"pair": (shared, {"x": (torch.tensor([1, 2]),)}), "list": [torch.ones(2), 5, shared], "none": None}
    torch.save({"model": {"w": torch.ones(2)}, **inside}, tmp_path / "a.pt")
    path = rankless.convert(tmp_path / "a.pt", tmp_path / "dcp", to="dcp")
    dcp_to_torch_save(path, tmp_path / "whole.pt")
    for actual in (torch.load(tmp_path / "whole.pt"), rankless.open(path).values["user_content"]):
        assert torch.equal(actual["pair"][0], shared)
        assert torch.equal(actual["list"][2], shared)
        assert torch.equal(actual["pair"][1]["x"][0], torch.tensor([1, 2]))
        assert torch.equal(actual["list"][0], torch.ones(2))
        assert actual["none"] is None


def test_values_whose_keys_are_taken(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    rankless.save_checkpoint(tmp_path / "run", "s", model, user_content={"model": "gpt", "step": 1})
    path = rankless.convert(tmp_path / "run", tmp_path / "dcp", to="dcp")
    state = load(path, {"model": model.state_dict(), "user_content": {"model": "", "step": 0}})
    assert state["user_content"] == {"model": "gpt", "step": 1}


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ({"a": [{1: 2}]}, "the key 1 in 'a.0' is loaded as '1'"),
        ({"a": {0.9: torch.ones(2)}}, "the key 0.9 in 'a' is loaded as '0.9'"),
        ({"a": {"b": {}}}, "the empty table 'a.b' is left out"),
        ({"a": {}, "b": 1}, "the empty table 'a' is left out"),
    ],
)
def test_tables_that_torch_s_names_cannot_describe_are_named(content: Any, text: str, tmp_path: Path) -> None:
    rankless.save_checkpoint(tmp_path / "run", "a", torch.nn.Linear(1, 1), user_content=content)
    with pytest.warns(UserWarning, match=text):
        rankless.convert(tmp_path / "run" / "a", tmp_path / "dcp", to="dcp")


def test_keys_of_a_training_are_all_described(saved: Path, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rankless.convert(saved, tmp_path / "dcp", to="dcp")


def test_keys_that_torch_cannot_tell_apart(tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.ones(1)}, "a.b": 1, "a": {"b": 2}}, tmp_path / "a.pt")
    with pytest.raises(InvalidArgumentError, match=r"a\.b"):
        rankless.convert(tmp_path / "a.pt", tmp_path / "dcp", to="dcp")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.pt"]


@pytest.mark.parametrize("way", [["dcp"], ["dcp", "native"], ["torch", "dcp", "torch"], ["lightning-folder", "native"]])
def test_there_and_back_a_run_goes_on_as_before(saved: Path, tmp_path: Path, way: list[str]) -> None:
    at = saved
    for number, to in enumerate(way):
        at = rankless.convert(at, tmp_path / f"{number}.ckpt", to=to)
    run, expected = start_run("plain", seed=1), train_run("plain")
    scheduler = run.scheduler if "lightning-folder" not in way else None
    rankless.load_checkpoint(at, model=run.model, optimizer=run.optimizer, scheduler=scheduler)
    assert_equal(gather_run(run), gather_run(expected))
    if scheduler is not None:
        assert scheduler.state_dict() == expected.scheduler.state_dict()


def test_weights_alone(tmp_path: Path) -> None:
    save_file({"w": torch.arange(6.0).view(2, 3)}, tmp_path / "w.safetensors")
    path = rankless.convert(tmp_path / "w.safetensors", tmp_path / "dcp", to="dcp", dtype="bfloat16")
    actual = load(path, {"model": {"w": torch.zeros(2, 3, dtype=torch.bfloat16)}})
    assert torch.equal(actual["model"]["w"], torch.arange(6.0).view(2, 3).bfloat16())


# ---------------------------------------------------------------------------------------------------------------
# How it is written


def together(src: str, dst: str, to: str) -> None:
    rankless.convert(src, dst, to=to, max_shard_size=500)


@pytest.mark.parametrize("to", ["dcp", "lightning-folder"])
def test_ranks_share_the_work_and_the_result_is_the_same(
    ranks: Ranks,
    saved: Path,
    tmp_path: Path,
    to: str,
) -> None:
    ranks(3, together, str(saved), str(tmp_path / "three"), to)
    together(str(saved), str(tmp_path / "one"), to)
    file, three = ({f.name: f.read_bytes() for f in (tmp_path / name).iterdir()} for name in ("one", "three"))
    assert file == three
    assert len(file) > 3


@pytest.mark.parametrize("to", ["dcp", "lightning-folder"])
def test_damage_in_the_source_is_found_and_nothing_is_left(
    saved: Path,
    tmp_path: Path,
    to: str,
) -> None:
    file = saved / "model/model.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-3] ^= 1
    file.write_bytes(raw)
    with pytest.raises(CorruptCheckpointError, match=r"model tensor .* is corrupt"):
        rankless.convert(saved, tmp_path / "out", to=to)
    assert {path.name for path in tmp_path.iterdir()} == {"run"}


def test_memory_does_not_grow_with_the_checkpoint(tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(10)}, tmp_path / "small")
    torch.save({f"w{n}": torch.zeros(100 * 2**18) for n in range(3)}, tmp_path / "big")
    done = subprocess.run(
        [sys.executable, "-c", MEASURE_CONVERSION, str(tmp_path), "dcp"], check=True, capture_output=True, text=True
    )
    assert int(done.stdout) < 64 * 2**20


def test_the_command(saved: Path, tmp_path: Path) -> None:
    done = command("convert", str(saved), str(tmp_path / "dcp"), "--to", "dcp")
    assert done.returncode == 0, done.stderr
    assert rankless.open(tmp_path / "dcp").format == "dcp"
