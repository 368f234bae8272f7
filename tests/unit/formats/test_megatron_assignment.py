"""Tests of the assignment of positions in Megatron's buffers to parameters whose weights are equal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest

from rankless.engine.plan.element_ranges import IndexBox
from rankless.errors import FormatError
from rankless.megatron.reader.bucket_assignment import assign_parts
from rankless.megatron.reader.bucket_search import BufferMatch
from rankless.megatron.reader.content_proof import round_masters
from rankless.megatron.reader.rank_parts import RankPart

BUFFER = cast("Any", None)


def part(name: str, index: int = 0, shards: int = 1) -> RankPart:
    return RankPart(name, (IndexBox((index,), (1,)),), shards, index)


def norm(layer: int, kind: str = "linear_qkv") -> RankPart:
    module = "mlp" if kind == "linear_fc1" else "self_attention"
    return part(f"decoder.layers.{layer}.{module}.{kind}.layer_norm_weight")


def proj(layer: int, index: int = 0) -> RankPart:
    return part(f"decoder.layers.{layer}.self_attention.linear_proj.weight", index, 2)


FINAL, OUTPUT = part("decoder.final_layernorm.weight"), part("output_layer.weight", 0, 2)
NORMS = (*(norm(layer, kind) for layer in range(4) for kind in ("linear_qkv", "linear_fc1")), FINAL)


def assign(*rows: Sequence[RankPart]) -> list[str]:
    """The name that each position gets."""
    matches = [BufferMatch(BUFFER, number, tuple(row)) for number, row in enumerate(rows)]
    names = {match.start: part.name for part, match in assign_parts(matches, "buffers").items()}
    return [names[number] for number in range(len(rows))]


def test_the_last_stage_has_the_last_norm() -> None:
    """Layers 2 and 3 of 4: those of the others are told by the matrices, which differ."""
    order = [FINAL, norm(3, "linear_fc1"), norm(3), norm(2, "linear_fc1"), norm(2)]
    rows = [[OUTPUT], NORMS, NORMS, [proj(3)], NORMS, NORMS, [proj(2)], NORMS]
    assert assign(*rows) == [
        OUTPUT.name,
        *(norm.name for norm in order[:2]),
        proj(3).name,
        *(norm.name for norm in order[2:4]),
        proj(2).name,
        order[4].name,
    ]


def test_the_first_stage_has_not_the_last_norm() -> None:
    rows = [NORMS, [proj(1)], NORMS, NORMS, [proj(0)], NORMS]
    assert assign(*rows) == [
        norm(1, "linear_fc1").name,
        proj(1).name,
        norm(1).name,
        norm(0, "linear_fc1").name,
        proj(0).name,
        norm(0).name,
    ]


def test_shards_are_those_of_the_rank() -> None:
    tied = (proj(1, 0), proj(1, 1))
    rows = [[norm(1, "linear_fc1")], tied, [proj(0, 1)]]
    matches = [BufferMatch(BUFFER, number, tuple(row)) for number, row in enumerate(rows)]
    assert proj(1, 1) in assign_parts(matches, "buffers")


def test_too_few_positions_are_refused() -> None:
    with pytest.raises(FormatError, match=r"5 parts of parameters .* have equal weights, .* of 2 positions"):
        assign(NORMS, [proj(1)], NORMS, [proj(0)])


def test_another_order_is_refused() -> None:
    with pytest.raises(FormatError, match=r"layers\.1.*comes after a parameter that is before it in the model"):
        assign([proj(0)], [proj(1)])


def test_a_part_that_is_there_twice_is_refused() -> None:
    with pytest.raises(FormatError, match="are in it twice"):
        assign([proj(0)], [proj(0)])


def test_masters_are_rounded_as_torch_does() -> None:
    torch = pytest.importorskip("torch")
    bits = torch.randint(-(2**31), 2**31, (100_000,), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    masters = bits.view(torch.float32)
    masters = masters[masters.isfinite()]
    masters = torch.cat([masters, torch.tensor([0.0, -0.0, 1e-8, 65504.0, 65520.0, 3.4e38, -1e-41])])
    for name, dtype in {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}.items():
        expected = masters.to(dtype).view(torch.uint8).numpy().tobytes()
        assert round_masters(masters.numpy().tobytes(), name) == expected
