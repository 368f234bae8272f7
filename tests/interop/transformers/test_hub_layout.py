"""Tests exports of checkpoints whose models transformers stores under other names, or divides, in its files.

The oracle is ``save_pretrained`` of the same model.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import rankless
from rankless.conversion import hub_form
from rankless.engine.plan.split_tensors import SplitLayout
from rankless.errors import CorruptCheckpointError, InvalidArgumentError
from rankless.formats.hub_layout_file import join_tensors
from rankless.formats.native import NativeReader
from rankless.ondisk.data_files import HUB_LAYOUT, TensorInfo
from tests.helpers.corruption import flip_tensor_bit
from tests.helpers.pool import Ranks

SIZES: dict[str, Any] = {"vocab_size": 48, "hidden_size": 32, "intermediate_size": 40, "num_attention_heads": 4}


def make_experts() -> Any:
    torch.manual_seed(0)
    config = transformers.MixtralConfig(**SIZES, num_hidden_layers=2, num_key_value_heads=2, num_local_experts=4)
    return transformers.MixtralForCausalLM(config)


def read_folder(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return the tensors of a folder, and the metadata of its files that is not rankless's own."""
    tensors: dict[str, torch.Tensor] = {}
    metadata: dict[str, str] = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(str(path), "pt") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dict
            metadata |= {key: text for key, text in file.metadata().items() if not key.startswith("rankless.")}
    return tensors, metadata


def assert_equal_folders(folder: Path, expected: Path) -> None:
    (tensors, metadata), (their_tensors, their_metadata) = read_folder(folder), read_folder(expected)
    assert tensors.keys() == their_tensors.keys()
    assert all(torch.equal(tensors[name], theirs) for name, theirs in their_tensors.items())
    assert metadata == their_metadata


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Return a run with the checkpoint ``s``, next to the folder ``expected`` of ``save_pretrained``."""
    model = make_experts()
    model.save_pretrained(tmp_path / "expected")
    rankless.save_checkpoint(tmp_path / "run", "s", model)
    return tmp_path / "run"


def test_exports_have_the_tensors_of_save_pretrained(checkpoint: Path, tmp_path: Path) -> None:
    rankless.convert(checkpoint, tmp_path / "converted", to="hf")
    rankless.export_model(checkpoint, tmp_path / "exported", max_shard_size="20KB")
    assert_equal_folders(tmp_path / "converted", tmp_path / "expected")
    assert_equal_folders(tmp_path / "exported", tmp_path / "expected")
    assert HUB_LAYOUT not in {path.name for path in (tmp_path / "converted").iterdir()}


def test_a_cast_export_has_the_tensors_of_the_cast_model(checkpoint: Path, tmp_path: Path) -> None:
    make_experts().bfloat16().save_pretrained(tmp_path / "cast")
    rankless.convert(checkpoint, tmp_path / "converted", to="hf", dtype="bfloat16")
    assert_equal_folders(tmp_path / "converted", tmp_path / "cast")


def test_a_copy_of_a_checkpoint_exports_the_same(checkpoint: Path, tmp_path: Path) -> None:
    rankless.convert(checkpoint, tmp_path / "copies/s", to="native")
    rankless.convert(tmp_path / "copies", tmp_path / "converted", to="hf")
    assert_equal_folders(tmp_path / "converted", tmp_path / "expected")
    rankless.convert(checkpoint, tmp_path / "others/s", to="native", exclude=["model.norm.*"])
    assert not (tmp_path / "others/s/model" / HUB_LAYOUT).exists()


def test_the_checkpoint_itself_opens_as_before(checkpoint: Path) -> None:
    opened = transformers.MixtralForCausalLM.from_pretrained(checkpoint / "s/model")
    expected = make_experts().state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in opened.state_dict().items())


def test_a_part_of_the_experts_keeps_the_names_of_the_checkpoint(checkpoint: Path, tmp_path: Path) -> None:
    rankless.convert(checkpoint, tmp_path / "part", to="hf", include=["*.layers.0.mlp.experts.*", "model.norm.*"])
    expected, _ = read_folder(tmp_path / "expected")
    tensors, _ = read_folder(tmp_path / "part")
    assert tensors.keys() == {name for name in expected if ".layers.0." in name and ".experts." in name} | {
        "model.norm.weight"
    }
    rankless.convert(checkpoint, tmp_path / "renamed", to="hf", rename={r"\.experts\.gate_up_proj": ".fused"})
    tensors, _ = read_folder(tmp_path / "renamed")
    assert "model.layers.0.mlp.fused" in tensors
    assert "model.layers.0.block_sparse_moe.experts.0.w2.weight" in tensors


def test_a_new_name_that_the_hub_has_for_another_tensor_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    taken = "model.layers.0.block_sparse_moe.experts.0.w2.weight"
    with pytest.raises(InvalidArgumentError, match=taken):
        rankless.convert(checkpoint, tmp_path / "renamed", to="hf", rename={r"model\.norm\.weight": taken})


def test_a_corrupt_tensor_that_is_divided_is_named(checkpoint: Path, tmp_path: Path) -> None:
    flip_tensor_bit(checkpoint / "s/model/model.safetensors", "model.layers.0.mlp.experts.gate_up_proj")
    with pytest.raises(CorruptCheckpointError, match=r"layers\.0\.mlp\.experts\.gate_up_proj"):
        rankless.convert(checkpoint, tmp_path / "converted", to="hf")


def save_sharded(path: Path) -> None:
    model, mesh = make_experts(), init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    rankless.save_checkpoint(path, "s", fully_shard(model, mesh=mesh))


def test_sharded_ranks_store_the_same_layout(ranks: Ranks, checkpoint: Path, tmp_path: Path) -> None:
    ranks(2, save_sharded, tmp_path / "sharded")
    assert (tmp_path / "sharded/s/model" / HUB_LAYOUT).read_bytes() == (
        checkpoint / "s/model" / HUB_LAYOUT
    ).read_bytes()


def test_tensors_that_transformers_does_not_store_are_left_out(tmp_path: Path) -> None:
    config = transformers.MarianConfig(
        vocab_size=48, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, max_position_embeddings=16,
        pad_token_id=1, decoder_start_token_id=1,
    )  # fmt: skip
    model = transformers.MarianMTModel(config)
    model.save_pretrained(tmp_path / "expected")
    rankless.save_checkpoint(tmp_path / "run", "s", model)
    rankless.convert(tmp_path / "run", tmp_path / "converted", to="hf")
    assert_equal_folders(tmp_path / "converted", tmp_path / "expected")


def whole(name: str, numel: int, at: int = 0, offset: int = 0, size: int | None = None) -> SplitLayout:
    return SplitLayout(name, (numel,), at, offset, (numel if size is None else size,), (1,))


@pytest.mark.parametrize(
    "splits",
    [
        {"a": ()},
        {"a": (whole("x", 4),)},
        {"a": (whole("x", 8),) * 2},
        {"a": (whole("x", 8, at=1),)},
        {"a": (whole("x", 8, offset=-1),)},
        {"a": (whole("x", -8),)},
        {"a": (whole("x", 8, size=10**30),)},
        {"a": (SplitLayout("x", (8,), 0, 0, (10**30, 8), (0, 1)),)},
        {"a": (SplitLayout("x", (-8, -1), 0, 0, (8,), (1,)),)},
        {"a": (whole("x", 8),), "b": (whole("x", 8),)},
        {"a": (whole("x", 8),), "c": (whole("x", 8, at=8),)},
    ],
)
def test_a_forged_layout_is_corrupt(splits: Mapping[str, tuple[SplitLayout, ...]]) -> None:
    infos = {"a": TensorInfo("F32", (8,)), "b": TensorInfo("F32", (8,)), "c": TensorInfo("F16", (8,))}
    with pytest.raises(CorruptCheckpointError, match=HUB_LAYOUT):
        join_tensors(splits, infos)


def test_a_layout_of_other_tensors_is_corrupt(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = hub_form.read_layout(NativeReader(checkpoint / "s"))
    forged = type(layout)({**layout.splits, "unknown": ()})
    monkeypatch.setattr(hub_form, "read_layout", lambda _: forged)
    with pytest.raises(CorruptCheckpointError, match="unknown"):
        rankless.convert(checkpoint, tmp_path / "converted", to="hf")
