"""Tests what loaders do with stored tensors: the result is that of the same code with tensors that were read before."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

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


#: Operations of a library that are one function for all kinds of tensors, which torch calls without dispatching them.
LIBRARY = torch.library.Library("rankless_tests", "DEF")
LIBRARY.define("first(Tensor x) -> float")
LIBRARY.impl("first", lambda x: float(x.numpy()[0, 0]), "CompositeImplicitAutograd")

#: What a loader does with a dict of stored matrices ``a`` to ``c`` (16 x 16), and of complex elements, ``z`` (8 x 4).
LOADERS_OF_SEVERAL: dict[str, Callable[[dict[str, Tensor]], Tensor]] = {
    "a changed one after an unread one": lambda w: _into(
        torch.zeros(16, 16), lambda p: (w["b"].mul_(2), p.copy_(w["a"]), p.copy_(w["b"]))
    ),
    "a partly changed one after a part of an unread one": lambda w: _into(
        torch.zeros(16, 16), lambda p: (w["b"][0].zero_(), p[:4].copy_(w["a"][:4]), p.copy_(w["b"]))
    ),
    "an empty copy before one that overlaps": lambda w: _into(
        torch.zeros(16, 16), lambda p: (p.copy_(w["b"]), p[0:0].copy_(w["b"][:0]), p[9:].copy_(w["a"][9:]))
    ),
    "moved, then changed": lambda w: torch.zeros(16, 16).copy_(w["a"].to("cpu:0").mul_(2)),
    "conjugate": lambda w: torch.zeros(8, 4, dtype=torch.complex64).copy_(w["z"].conj()),
    "conjugate, transposed": lambda w: torch.zeros(4, 8, dtype=torch.complex64).copy_(w["z"].H),
    "changed through its conjugate": lambda w: _change_and_copy(w["z"], lambda z: z.conj().mul_(2j)),
    "a part, changed through its conjugate": lambda w: _change_and_copy(w["z"], lambda z: z[2:5].conj().fill_(1j)),
    "changed through its negative": lambda w: _change_and_copy(w["a"], lambda a: torch._neg_view(a).add_(1)),
    "changed through the imaginary part of its conjugate": lambda w: _change_and_copy(
        w["z"], lambda z: z.conj().imag.add_(1)
    ),
    "imaginary part of a conjugate": lambda w: torch.zeros(8, 4).copy_(w["z"].conj().imag),
    "real part": lambda w: torch.zeros(8, 4).copy_(w["z"].real),
    "array of a parameter": lambda w: torch.from_numpy(torch.zeros(16, 16).copy_(w["a"]).numpy().copy()),
    "array that is changed later": lambda w: _into(
        torch.zeros(16, 16), lambda p: (array := p.numpy(), p.copy_(w["a"]), array.fill(7))
    ),
    "list of a parameter": lambda w: torch.tensor(torch.zeros(16, 16).copy_(w["a"]).tolist()),
    "pickled parameter": lambda w: pickle.loads(pickle.dumps(torch.zeros(16, 16).copy_(w["a"]))),  # noqa: S301
    "copied parameter": lambda w: copy.deepcopy(torch.zeros(16, 16).copy_(w["a"])),
    "alias of a parameter": lambda w: _into(
        torch.zeros(16, 16), lambda p: (other := torch.from_numpy(p.numpy()), p.copy_(w["a"]), other.mul_(2))
    ),
    "copies into both aliases": lambda w: _into(
        torch.zeros(16, 16), lambda p: (other := torch.from_numpy(p.numpy()), p.copy_(w["b"]), other.copy_(w["a"]))
    ),
    "array of a stored tensor, changed": lambda w: _into(
        torch.zeros(16, 16), lambda p: (np.multiply(a := w["a"].numpy(), 2, out=a), p.copy_(w["a"]))
    ),
    "through DLPack": lambda w: torch.from_dlpack(w["a"]) + 0,
    "through its storage": lambda w: torch.zeros(0).set_(w["a"].untyped_storage(), 0, (16, 16), (16, 1)) + 0,
    "data of a parameter": lambda w: _into(
        nn.Parameter(torch.zeros(16, 16), requires_grad=False), lambda p: setattr(p, "data", w["a"].t())
    ),
    "threads": lambda w: torch.stack(list(ThreadPoolExecutor(4).map(lambda name: _load_twice(w[name]), "abc"))),
    "copies of a repeated row, changed apart": lambda w: _into(
        torch.zeros(4, 16), lambda p: ((c := w["a"][0].expand(4, 16).clone())[0].fill_(5), p.copy_(c))
    ),
    "copies of overlapping rows, changed apart": lambda w: _into(
        torch.zeros(125, 8), lambda p: ((c := w["a"].view(-1).unfold(0, 8, 2).clone())[0].zero_(), p.copy_(c))
    ),
    "strides of a copy": lambda w: torch.zeros(16).copy_(w["a"].t().contiguous().as_strided((16,), (1,))),
    "strides of a copy of a part": lambda w: torch.zeros(16).copy_(w["a"][3:].clone().as_strided((16,), (1,), 2)),
    "a copy that is changed, then flattened": lambda w: w["a"].t().contiguous().mul_(2).view(-1) + 0,
    "a parameter in an operation of a library": lambda w: torch.tensor(
        torch.ops.rankless_tests.first(torch.zeros(16, 16).copy_(w["a"]))
    ),
    "a stored tensor in an operation of a library": lambda w: torch.tensor(
        torch.ops.rankless_tests.first.default(w["a"].t())
    ),
    "bytes and elements": lambda w: _load_bytes_too(w["a"].view(-1), torch.uint8),
    "halves and elements": lambda w: _load_bytes_too(w["a"].view(-1), torch.int16),
}


def _change_and_copy(weight: Tensor, change: Callable[[Tensor], object]) -> Tensor:
    change(weight)
    return torch.zeros(weight.shape, dtype=weight.dtype).copy_(weight)


def _load_twice(weight: Tensor) -> Tensor:
    return torch.zeros(16, 16).copy_(weight).mul_(2)


def _load_bytes_too(weight: Tensor, dtype: torch.dtype) -> Tensor:
    part = weight.view(dtype)[1:97]
    torch.zeros(len(part), dtype=dtype).copy_(part)
    return torch.zeros(10).copy_(weight[20:30])


@pytest.fixture
def matrices(tmp_path: Path) -> Path:
    generator = torch.Generator().manual_seed(0)
    stored = {name: torch.randn(16, 16, generator=generator) for name in "abc"}
    save_file(
        {**stored, "z": torch.randn(8, 4, generator=generator, dtype=torch.complex64)}, tmp_path / "m.safetensors"
    )
    return tmp_path / "m.safetensors"


@pytest.mark.parametrize("inference", [False, True], ids=["", "inference mode"])
@pytest.mark.parametrize("name", LOADERS_OF_SEVERAL)
def test_a_loader_of_several_tensors_gets_what_it_gets_from_tensors_that_were_read(
    name: str, inference: bool, matrices: Path
) -> None:
    with torch.inference_mode(inference):
        with rankless.open_weights(matrices) as weights:
            loaded = LOADERS_OF_SEVERAL[name](dict(weights))
        assert torch.equal(loaded, LOADERS_OF_SEVERAL[name](load_file(matrices)))


@pytest.mark.parametrize("name", LOADERS)
def test_in_inference_mode_a_loader_gets_the_same(name: str, stored: Tensor, folder: Path) -> None:
    with torch.inference_mode():
        loaded, _ = load(folder, LOADERS[name])
        assert torch.equal(loaded, LOADERS[name](stored.clone()))


def test_a_stored_number_is_formatted_as_one(folder: Path) -> None:
    with rankless.open_weights(folder) as weights:
        assert f"{dict(weights)['z']:.2f}" == "3.50"


@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickle.dumps])
def test_what_was_not_read_is_not_copied_by_python(duplicate: Callable[[Tensor], object], folder: Path) -> None:
    with rankless.open_weights(folder) as weights, pytest.raises(StateError, match="was not read yet"):
        duplicate(dict(weights)["w"])


@pytest.mark.parametrize(
    "change",
    [
        lambda w: w.t_(),
        lambda w: w.unsqueeze_(0),
        lambda w: w.transpose_(0, 1),
        lambda w: w.set_(torch.ones(2)),
        lambda w: w.resize_(8, 8),
        lambda w: setattr(w, "data", torch.ones(16, 16)),
    ],
)
def test_a_stored_tensor_cannot_get_another_shape_or_other_memory(
    change: Callable[[Tensor], object], matrices: Path
) -> None:
    with rankless.open_weights(matrices) as weights, pytest.raises(StateError, match="stored tensor"):
        change(dict(weights)["a"])


class TestSeveralBlocks:
    def test_the_last_copy_counts(self, stored: Tensor, folder: Path, matrices: Path) -> None:
        parameter = torch.zeros(16, 16)
        with rankless.open_weights(folder) as first:
            parameter.copy_(dict(first)["w"][:16, :16])
            with rankless.open_weights(matrices) as second:
                parameter.copy_(dict(second)["a"])
        assert torch.equal(parameter, load_file(matrices)["a"])

    def test_a_mode_is_left_although_the_block_on_top_of_it_fails(self, folder: Path, matrices: Path) -> None:
        first = rankless.open_weights(folder)
        with pytest.raises(ValueError, match="no such layer"), rankless.open_weights(matrices):
            raise ValueError("no such layer")
        first.__enter__()
        with pytest.raises(ValueError, match="no such layer"), rankless.open_weights(matrices):  # noqa: PT012
            with pytest.raises(StateError, match="reverse order"):
                first.__exit__(None, None, None)
            raise ValueError("no such layer")
        assert not _get_current_dispatch_mode_stack()
        assert not _get_current_function_mode_stack()

    def test_they_end_in_the_reverse_order(self, folder: Path, matrices: Path) -> None:
        first, second = rankless.open_weights(folder), rankless.open_weights(matrices)
        with ExitStack() as stack:
            first.__enter__()
            stack.enter_context(second)
            with pytest.raises(StateError, match="leave blocks in the reverse order"):
                first.__exit__(None, None, None)
        assert not _get_current_dispatch_mode_stack()
        assert not _get_current_function_mode_stack()

    def test_a_block_in_a_generator_ends_with_it(self, matrices: Path) -> None:
        def iterate() -> Iterator[tuple[str, Tensor]]:
            with rankless.open_weights(matrices) as weights:
                yield from weights

        parameter = torch.zeros(16, 16)
        for name, tensor in iterate():
            if name == "a":
                parameter.copy_(tensor)
                break
        assert torch.equal(parameter, load_file(matrices)["a"])


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

    def test_the_search_for_such_modules_warns_of_nothing(self, folder: Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            load(folder, lambda w: w)

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


def test_strides_beyond_the_stored_tensor_are_an_error_as_for_a_real_one(folder: Path) -> None:
    """The bytes behind it in the file are those of the next tensor."""
    with pytest.raises(RuntimeError, match="out of bounds"):
        load(folder, lambda a: torch.zeros(9, dtype=a.dtype).copy_(a.as_strided((9,), (1,))), "a")
    with pytest.raises(RuntimeError, match="out of bounds"):
        load(folder, lambda a: torch.zeros(7, dtype=a.dtype).copy_(a.as_strided((7,), (1,), 1)), "a")
