"""Tests what loaders do with stored tensors: the result is that of the same code with tensors that were read before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import rankless
from rankless.errors import StateError
from rankless.inference.open_weights import ModelWeights


def _into(parameter: Tensor, load: Callable[[Tensor], object]) -> Tensor:
    load(parameter)
    return parameter


def _move_data(weight: Tensor) -> Tensor:
    parameter = nn.Parameter(torch.zeros(1, dtype=weight.dtype), requires_grad=False)
    loaded = torch.zeros(64, 32, dtype=weight.dtype)
    loaded.copy_(weight)
    parameter.data = loaded
    return parameter


def _and_original(weight: Tensor, changed: Tensor) -> Tensor:
    return torch.stack([torch.zeros(64, 32, dtype=weight.dtype).copy_(part) for part in (weight, changed)])


def _change_part(weight: Tensor) -> Tensor:
    before, part = weight[8:24], weight[16:32]
    part.zero_()
    return torch.cat([torch.zeros(16, 32, dtype=weight.dtype).copy_(before), torch.zeros_like(weight).copy_(weight)])


#: What a loader does with a stored matrix of 64 x 32 bfloat16 elements: returns what it has loaded.
LOADERS: dict[str, Callable[[Tensor], Tensor]] = {
    "all": lambda w: torch.zeros(64, 32, dtype=w.dtype).copy_(w),
    "rows": lambda w: torch.zeros(16, 32, dtype=w.dtype).copy_(w.narrow(0, 16, 16)),
    "columns": lambda w: torch.zeros(64, 8, dtype=w.dtype).copy_(w[:, 8:16]),
    "a column": lambda w: torch.zeros(64, dtype=w.dtype).copy_(w[:, 3]),
    "every third row": lambda w: torch.zeros(22, 32, dtype=w.dtype).copy_(w[::3]),
    "transposed": lambda w: torch.zeros(32, 64, dtype=w.dtype).copy_(w.t()),
    "transposed rows of a copy": lambda w: torch.zeros(4, 64, dtype=w.dtype).copy_(w.t().contiguous()[4:8]),
    "reshaped": lambda w: torch.zeros(4, 16, 32, dtype=w.dtype).copy_(w.view(4, 16, 32)),
    "one expert": lambda w: torch.zeros(16, 32, dtype=w.dtype).copy_(w.view(4, 16, 32)[2]),
    "permuted": lambda w: torch.zeros(32, 4, 16, dtype=w.dtype).copy_(w.view(4, 16, 32).permute(2, 0, 1)),
    "interleaved heads": lambda w: torch.zeros(4, 4, 32, dtype=w.dtype).copy_(w.view(4, 16, 32)[:, 4:8]),
    "as integers": lambda w: torch.zeros(64, 32, dtype=torch.int16).copy_(w.view(torch.int16)),
    "cast by the copy": lambda w: torch.zeros(64, 32).copy_(w),
    "cast before": lambda w: torch.zeros(64, 32).copy_(w.to(torch.float32)),
    "to where it is": lambda w: torch.zeros(64, 32, dtype=w.dtype).copy_(w.to("cpu", w.dtype)),
    "repeated": lambda w: torch.zeros(3, 64, 32, dtype=w.dtype).copy_(w),
    "expanded": lambda w: torch.zeros(3, 64, 32, dtype=w.dtype).copy_(w.unsqueeze(0).expand(3, -1, -1)),
    "a row in all rows": lambda w: torch.zeros(5, 32, dtype=w.dtype).copy_(w[7]),
    "into columns": lambda w: _into(torch.zeros(64, 96, dtype=w.dtype), lambda p: p[:, 32:64].copy_(w)),
    "into a transposed parameter": lambda w: _into(torch.zeros(32, 64, dtype=w.dtype), lambda p: p.t().copy_(w)),
    "chunks, last first": lambda w: _into(
        torch.zeros(64, 32, dtype=w.dtype), lambda p: (p[:32].copy_(w.chunk(2)[1]), p[32:].copy_(w.chunk(2)[0]))
    ),
    "columns of two, interleaved": lambda w: _into(
        torch.zeros(64, 64, dtype=w.dtype), lambda p: (p[:, ::2].copy_(w), p[:, 1::2].copy_(w.flip(0)))
    ),
    "twice into the same rows": lambda w: _into(
        torch.zeros(8, 32, dtype=w.dtype), lambda p: (p.copy_(w[:8]), p.copy_(w[8:16]))
    ),
    "overlapping rows": lambda w: _into(
        torch.zeros(12, 32, dtype=w.dtype), lambda p: (p[4:].copy_(w[:8]), p[:8].copy_(w[8:16]))
    ),
    "used after the copy": lambda w: _into(
        torch.zeros(64, 32, dtype=w.dtype), lambda p: (p.copy_(w), p[:32].mul_(2), p[40].zero_())
    ),
    "summed after the copy": lambda w: torch.zeros(64, 32, dtype=w.dtype).copy_(w).sum(0),
    "data of another": _move_data,
    "unbound": lambda w: torch.stack([torch.zeros(32, dtype=w.dtype).copy_(row) for row in w.unbind(0)]),
    "split": lambda w: torch.cat([torch.zeros(16, 32, dtype=w.dtype).copy_(part) for part in w.split(16)]),
    "concatenated before": lambda w: torch.zeros(128, 32, dtype=w.dtype).copy_(torch.cat([w, w])),
    "computed": lambda w: -torch.exp(w[5:7].float()),
    "computed in place on a copy": lambda w: _and_original(w, w.clone().mul_(2)),
    "changed in place": lambda w: torch.zeros(64, 32, dtype=w.dtype).copy_(w.mul_(2)),
    "a part changed in place": _change_part,
    "a copy was noted, then changed": lambda w: _into(
        torch.zeros(64, 32, dtype=w.dtype), lambda p: (p.copy_(w), w.zero_())
    ),
    "zeros of its shape": lambda w: torch.zeros_like(w[4:8]),
    "new ones": lambda w: w.new_ones(3),
    "as a list": lambda w: torch.tensor(w[0].float().tolist()),
    "as an array": lambda w: torch.from_numpy(w.view(torch.int16).numpy()),
    "one element": lambda w: torch.tensor(w[3, 4].item()),
    "compared": lambda w: torch.tensor(torch.equal(w, w + 0)),
    "mixed by as_strided": lambda w: torch.zeros(3, 3, dtype=w.dtype).copy_(w.as_strided((3, 3), (1, 1))),
    "nothing": lambda w: torch.zeros(0, 32, dtype=w.dtype).copy_(w[5:5]),
    "not used": lambda w: torch.zeros(1, dtype=w.dtype),
    "flattened after a transpose": lambda w: torch.zeros(2048, dtype=w.dtype).copy_(w.t().reshape(-1)),
    "padded": lambda w: _into(torch.full((70, 32), 9.0, dtype=w.dtype), lambda p: (p[:64].copy_(w), p[64:].fill_(0))),
    "in an output argument": lambda w: torch.add(w, 1, out=torch.empty_like(w)),
}


@pytest.fixture
def stored() -> Tensor:
    return torch.randn(64, 32, generator=torch.Generator().manual_seed(0)).bfloat16()


@pytest.fixture
def folder(stored: Tensor, tmp_path: Path) -> Path:
    others = {"a": torch.arange(7, dtype=torch.uint8), "z": torch.tensor(3.5), "empty": torch.zeros(0, 4)}
    save_file({"w": stored, **others}, tmp_path / "model.safetensors")
    return tmp_path


def load(folder: Path, loader: Callable[[Tensor], Tensor], name: str = "w") -> tuple[Tensor, ModelWeights]:
    with rankless.open_weights(folder) as weights:
        loaded = loader(dict(weights)[name])
    return loaded, weights


@pytest.mark.parametrize("name", LOADERS)
def test_a_loader_gets_what_it_gets_from_tensors_that_were_read(name: str, stored: Tensor, folder: Path) -> None:
    loaded, _ = load(folder, LOADERS[name])
    expected = LOADERS[name](stored.clone())
    assert type(loaded) is type(expected)
    assert torch.equal(loaded, expected)


@pytest.mark.parametrize(
    ("name", "nbytes"),
    [("rows", 16 * 64), ("one expert", 16 * 64), ("computed", 2 * 64), ("nothing", 0), ("not used", 0)],
)
def test_just_the_bytes_of_contiguous_elements_are_read(name: str, nbytes: int, folder: Path) -> None:
    _, weights = load(folder, LOADERS[name])
    assert weights.report.needed == weights.report.read == nbytes


def test_scalars_and_empty_tensors(folder: Path) -> None:
    assert load(folder, lambda w: torch.zeros(1).copy_(w), "z")[0] == 3.5
    assert load(folder, lambda w: torch.zeros(0, 4).copy_(w), "empty")[0].shape == (0, 4)


def test_the_report_names_what_was_not_copied(folder: Path) -> None:
    report = load(folder, LOADERS["computed"])[1].report
    assert report.computed == {"w": "aten._to_copy.default"}
    assert "computed with: 1 tensor, such as w (aten._to_copy.default)" in str(report)
    assert load(folder, LOADERS["changed in place"])[1].report.whole == {"w": "aten.mul_.Tensor"}


class TestAfterTheBlock:
    def test_a_stored_tensor_cannot_be_used(self, folder: Path) -> None:
        kept, _ = load(folder, lambda w: w)
        for use in (lambda: torch.zeros(64, 32).copy_(kept), lambda: kept + 1, kept.zero_):
            with pytest.raises(StateError, match="'w' was used after the end of open_weights"):
                use()

    @pytest.mark.parametrize("view", [lambda w: w, lambda w: w[3:5], lambda w: w.t().contiguous()])
    def test_no_module_may_hold_one(self, view: Callable[[Tensor], Tensor], folder: Path) -> None:
        module = nn.Linear(1, 1)

        def replace(weight: Tensor) -> Tensor:
            module.weight = nn.Parameter(view(weight), requires_grad=False)
            return weight

        with pytest.raises(StateError, match="'weight' of a Linear was replaced by LazyTensor"):
            load(folder, replace)

    def test_copies_of_a_loader_that_failed_are_dropped(self, folder: Path) -> None:
        parameter = torch.zeros(64, 32)

        def fail(weight: Tensor) -> Tensor:
            parameter.copy_(weight)
            raise ValueError("no such layer")

        with pytest.raises(ValueError, match="no such layer"):
            load(folder, fail)
        assert not parameter.any()


def test_an_engine_may_count_first_on_meta_tensors(stored: Tensor, folder: Path) -> None:
    def count_and_load(weight: Tensor) -> Tensor:
        assert torch.empty(64, 32, device="meta").copy_(weight).is_meta
        return torch.zeros(64, 32, dtype=weight.dtype).copy_(weight)

    loaded, weights = load(folder, count_and_load)
    assert torch.equal(loaded, stored)
    assert weights.report.needed == stored.nbytes
