"""Tests that tensor-parallel shards are joined to whole tensors as NxD's own layers and converter split them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import rankless
from rankless.conversion.convert import convert
from rankless.errors import CorruptCheckpointError, InvalidArgumentError
from tests.helpers.fake_http import BUCKET
from tests.helpers.fake_s3 import FakeS3
from tests.helpers.nxd_files import load_rank_file, rank_file_name, save_rank_file


def local(whole: torch.Tensor, dim: int, stride: int, tp: int, rank: int) -> torch.Tensor:
    """As ``create_local_weight`` has it: of ``tp * stride`` equal parts, every ``tp``-th from the rank's on."""
    return torch.cat(whole.chunk(tp * stride, dim)[rank::tp], dim)


def order_of_queries(q: torch.Tensor, heads: int, kv_heads: int, copies: int) -> torch.Tensor:
    """As ``scripts/checkpoint_converter.py`` has it for a row of heads, in its own way of indexing."""
    tp = kv_heads * copies
    groups = q.reshape(-1, heads // (kv_heads * copies), q.shape[0] // heads, q.shape[1])
    places = torch.arange(kv_heads) * tp // kv_heads
    return torch.cat([groups[places + i] for i in range(tp // kv_heads)]).reshape(q.shape)


def write(folder: Path, ranks: list[dict[str, torch.Tensor]]) -> Path:
    for rank, model in enumerate(ranks):
        save_rank_file(folder / "model" / rank_file_name(tp=rank), model)
    return folder


def read(folder: Path, layout: Any) -> dict[str, torch.Tensor]:
    keys = {"layout": layout if isinstance(layout, str) else json.dumps(layout)}
    checkpoint = rankless.open(folder, keys=keys)
    checkpoint._reader.check_files()
    return {key.removeprefix("model/"): checkpoint[key] for key in checkpoint.keys()}  # noqa: SIM118 - it is no dict


@settings(max_examples=40)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(0, 2), st.integers(1, 3))
def test_any_dimension_and_stride(
    tmp_path_factory: pytest.TempPathFactory, tp: int, stride: int, size: int, dim: int, other: int
) -> None:
    shape = [other, other + 1, other + 2]
    shape[dim] = tp * stride * size
    whole, all_of_it = torch.randn(shape), torch.randn(3)
    ranks = [{"w": local(whole, dim, stride, tp, rank), "n": all_of_it} for rank in range(tp)]
    layout = {"rules": [{"match": "w", "dim": dim, "stride": stride}, {"match": "n"}]}
    actual = read(write(tmp_path_factory.mktemp("tp"), ranks), layout)
    assert torch.equal(actual["w"], whole)
    assert torch.equal(actual["n"], all_of_it)


@pytest.mark.parametrize(("heads", "kv_heads", "copies"), [(8, 2, 2), (8, 4, 1), (12, 2, 3), (4, 1, 4)])
@pytest.mark.parametrize("fused", [False, True])
def test_attention_with_repeated_keys(tmp_path: Path, heads: int, kv_heads: int, copies: int, fused: bool) -> None:
    size, hidden, tp = 3, 5, kv_heads * copies
    q, k, v = (torch.randn(number * size, hidden) for number in (heads, kv_heads, kv_heads))
    o = torch.randn(hidden, heads * size)
    queries = order_of_queries(q, heads, kv_heads, copies).chunk(tp)
    outs = order_of_queries(o.T, heads, kv_heads, copies).T.chunk(tp, 1)
    keys, values = (item.repeat(copies, 1).chunk(tp) for item in (k, v))
    ranks = []
    for rank in range(tp):
        own = {"weight_q": queries[rank], "weight_k": keys[rank], "weight_v": values[rank]}
        own = {"weight_qkv": torch.cat(list(own.values()))} if fused else own
        ranks.append({f"x.qkv_proj.{key}": event for key, event in own.items()} | {"x.o_proj.weight": outs[rank]})
    folder = write(tmp_path, ranks)
    said = f"llama:kv_size_multiplier={copies},heads={heads},kv_heads={kv_heads}"
    actual = read(folder, said)
    expected = {"x.q_proj.weight": q, "x.k_proj.weight": k, "x.v_proj.weight": v, "x.o_proj.weight": o}
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[key], value) for key, value in expected.items())
    with pytest.raises(InvalidArgumentError, match="kv_size_multiplier"):
        read(folder, "llama")


def test_gate_and_up_are_taken_apart(tmp_path: Path) -> None:
    gate, up = torch.randn(8, 3), torch.randn(8, 3)
    ranks = [{"x.gate_up_proj.weight": torch.cat([gate.chunk(4)[r], up.chunk(4)[r]])} for r in range(4)]
    actual = read(write(tmp_path, ranks), "llama")
    assert torch.equal(actual["x.gate_proj.weight"], gate)
    assert torch.equal(actual["x.up_proj.weight"], up)


def test_mixtral_experts_over_both_kinds_of_ranks(tmp_path: Path) -> None:
    """Gate and up of all experts lie in one tensor, with columns for rows; two ranks have half of the experts each."""
    tp, ep, experts, hidden, inner = 2, 2, 4, 3, 6
    w1, w2, w3 = (
        torch.randn(experts, inner, hidden),
        torch.randn(experts, hidden, inner),
        torch.randn(experts, inner, hidden),
    )
    router, norm = torch.randn(experts, hidden), torch.randn(hidden)
    at = "m.layers.0.mlp"
    for e in range(ep):
        of_rank = slice(e * experts // ep, (e + 1) * experts // ep)
        for t in range(tp):
            gate, up = (item.transpose(1, 2).chunk(tp, 2)[t][of_rank] for item in (w1, w3))
            model = {
                f"{at}.router.linear_router.weight": router,
                f"{at}.expert_mlps.mlp_op.gate_up_proj.weight": torch.cat([gate, up], 2),
                f"{at}.expert_mlps.mlp_op.down_proj.weight": w2.transpose(1, 2).chunk(tp, 1)[t][of_rank],
                "m.norm.weight": norm,
            }
            file = tmp_path / "model" / rank_file_name(tp=t, ep=e)
            save_rank_file(file, model, experts=frozenset(key for key in model if "expert" in key))
            if e:  # NxD writes of further expert-parallel ranks the experts only
                for tid in (0, 3):
                    (file.with_name(file.name + ".tensors") / f"tensor_{tid}.pt").unlink()
    actual = read(tmp_path, "mixtral")
    moe = "m.layers.0.block_sparse_moe"
    assert torch.equal(actual[f"{moe}.gate.weight"], router)
    assert torch.equal(actual["m.norm.weight"], norm)
    for number in range(experts):
        for key, item in (("w1", w1), ("w2", w2), ("w3", w3)):
            assert torch.equal(actual[f"{moe}.experts.{number}.{key}.weight"], item[number])


def test_gpt_neox_is_what_its_forward_makes_of_heads(tmp_path: Path) -> None:
    qkv, dense = torch.randn(12, 4), torch.randn(4, 4)
    ranks = [
        {"x.query_key_value.weight": qkv.chunk(2)[r], "x.attention.dense.weight": dense.chunk(2, 1)[r]}
        for r in range(2)
    ]
    actual = read(write(tmp_path, ranks), "gpt-neox")
    assert torch.equal(actual["x.query_key_value.weight"], qkv)
    assert torch.equal(actual["x.attention.dense.weight"], dense)


def test_nothing_is_guessed(tmp_path: Path) -> None:
    ranks = [{"w": torch.ones(4, 4) * rank, "n": torch.ones(3)} for rank in range(2)]
    folder = write(tmp_path, ranks)
    wrong: list[tuple[Any, type[Exception], str]] = [
        ({"rules": [{"match": "w", "dim": 0}]}, InvalidArgumentError, "no rule for 'n'"),
        ({"rules": [{"match": "w"}, {"match": "n"}]}, CorruptCheckpointError, "w differs between"),
        ({"rules": [{"match": "w", "dim": 5}, {"match": "n"}]}, InvalidArgumentError, "dimension 5"),
        ({"rules": [{"match": "w", "dim": 0, "stride": 3}, {"match": "n"}]}, InvalidArgumentError, "into 3 parts"),
        ({"rules": [{"match": "w", "dim": 0, "copies": [3]}, {"match": "n"}]}, InvalidArgumentError, "3 copies"),
        ({"rules": [{"match": "w", "dim": -1}]}, InvalidArgumentError, "not a valid layout"),
        ({"rules": [{"match": "*", "into": ["a"]}]}, InvalidArgumentError, "as many"),
        ({"rule": []}, InvalidArgumentError, "not a valid layout"),
        ("nemotron", InvalidArgumentError, "neither one of gpt-neox, llama, mixtral"),
        ("llama:layers=3", InvalidArgumentError, "layers=3"),
    ]
    for layout, error, message in wrong:
        with pytest.raises(error, match=message):
            read(folder, layout)
    with pytest.raises(InvalidArgumentError, match=r"2 tensor-parallel ranks.*layout"):
        rankless.open(folder)


def back(folder: Path, layout: Any, tp: int, scratch: Path) -> list[dict[str, torch.Tensor]]:
    """What the ranks of NxD get of the whole tensors that are in a folder of theirs."""
    layout = layout if isinstance(layout, str) else json.dumps(layout)
    convert(folder, scratch / "native", to="native", layout=layout)
    convert(scratch / "native", scratch / "nxd", to="nxd", layout=layout, tp_size=tp)
    return [load_rank_file(scratch / "nxd" / "model" / rank_file_name(tp=rank)) for rank in range(tp)]


@settings(max_examples=15)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(0, 2))
def test_the_way_back_of_any_dimension_and_stride(
    tmp_path_factory: pytest.TempPathFactory, tp: int, stride: int, size: int, dim: int
) -> None:
    folder = tmp_path_factory.mktemp("tp")
    shape = [2, 3, 4]
    shape[dim] = tp * stride * size
    whole = torch.randn(shape)
    ranks = [{"w": local(whole, dim, stride, tp, rank), "n": torch.ones(3)} for rank in range(tp)]
    layout = {"rules": [{"match": "w", "dim": dim, "stride": stride}, {"match": "n"}]}
    actual = back(write(folder / "a", ranks), layout, tp, folder)
    for item, rank in zip(actual, ranks, strict=True):
        assert all(torch.equal(item[key], rank[key]) for key in ("w", "n"))


@pytest.mark.parametrize(("heads", "kv_heads", "copies"), [(8, 2, 2), (12, 2, 3), (4, 1, 4), (8, 4, 1)])
def test_the_way_back_of_attention(tmp_path: Path, heads: int, kv_heads: int, copies: int) -> None:
    tp, size, hidden = kv_heads * copies, 2, 5
    q, k = torch.randn(heads * size, hidden), torch.randn(kv_heads * size, hidden)
    ranks = [
        {
            "x.qkv_proj.weight_q": order_of_queries(q, heads, kv_heads, copies).chunk(tp)[rank],
            "x.qkv_proj.weight_k": k.repeat(copies, 1).chunk(tp)[rank],
        }
        for rank in range(tp)
    ]
    layout = f"llama:kv_size_multiplier={copies},kv_heads={kv_heads}"
    actual = back(write(tmp_path / "a", ranks), layout, tp, tmp_path)
    for item, rank in zip(actual, ranks, strict=True):
        assert all(torch.equal(item[key], rank[key]) for key in rank)


def test_the_way_back_of_experts(tmp_path: Path) -> None:
    at = "m.layers.0.mlp.expert_mlps.mlp_op"
    gate_up, down = torch.randn(11, 3, 8), torch.randn(11, 4, 3)
    ranks = [
        {f"{at}.gate_up_proj.weight": local(gate_up, 2, 2, 2, rank), f"{at}.down_proj.weight": down.chunk(2, 1)[rank]}
        for rank in range(2)
    ]
    actual = back(write(tmp_path / "a", ranks), "mixtral", 2, tmp_path)
    for item, rank in zip(actual, ranks, strict=True):
        assert all(torch.equal(item[key], rank[key]) for key in rank)


def test_repeated_keys_over_other_numbers_of_ranks_are_refused(tmp_path: Path) -> None:
    """NxD's own converter would take heads in a wrong order."""
    folder = write(tmp_path, [{"x.qkv_proj.weight_q": torch.randn(4, 2)} for _ in range(4)])
    with pytest.raises(InvalidArgumentError, match=r"2 copies of 4 heads .* and there are 4"):
        read(folder, "llama:kv_size_multiplier=2,kv_heads=4")
    with pytest.raises(InvalidArgumentError, match="kv_heads=8"):
        read(folder, "llama:kv_size_multiplier=2")


def test_tied_weights_have_both_names(tmp_path: Path) -> None:
    model = nn.ModuleDict({"embed_tokens": nn.Embedding(8, 4), "lm_head": nn.Linear(4, 8, bias=False)})
    model["lm_head"].weight = model["embed_tokens"].weight
    rankless.save_checkpoint(tmp_path / "run", "s", model)
    convert(tmp_path / "run", tmp_path / "nxd", to="nxd", layout="llama", tp_size=2)
    for rank in range(2):
        actual = load_rank_file(tmp_path / "nxd" / "model" / rank_file_name(tp=rank))
        own = model["lm_head"].weight.chunk(2)[rank]
        assert torch.equal(actual["embed_tokens.weight"], own)
        assert torch.equal(actual["lm_head.weight"], own)


@pytest.mark.parametrize("xser", [False, True])
def test_the_files_in_an_object_store_are_those_on_a_disk(tmp_path: Path, xser: bool) -> None:
    model, fake = nn.ModuleDict({"embed_tokens": nn.Embedding(8, 4), "lm_head": nn.Linear(4, 8, bias=False)}), FakeS3()
    optimizer = torch.optim.AdamW(model.parameters())
    sum(parameter.sum() for parameter in model.parameters()).backward()
    optimizer.step()
    rankless.save_checkpoint(tmp_path / "run", "s", model, optimizer, step=3)
    with fake.connected():
        path = fake.store_at("http://fake").path(f"{BUCKET}/out")
        for folder in (tmp_path, path):
            assert convert(tmp_path / "run", folder / "nxd", to="nxd", layout="llama", xser=xser) == folder / "nxd"
        stored = path.store.list_objects(path / "nxd")
        found = {str(info.path.relative_to(path / "nxd")): path.store.read_small(info.path) for info in stored}
        written = [request.key for request in fake.requests if request.kind in {"put", "complete"}]
    files = [file for file in (tmp_path / "nxd").rglob("*") if file.is_file()]
    assert found == {str(file.relative_to(tmp_path / "nxd")): file.read_bytes() for file in files}
    assert [key.rpartition("/")[2] for key in written[-2:]] == ["checkpoint", "done"]
