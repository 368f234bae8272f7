"""Tests tensors of every kind: lazy views have torch's values, and unsupported ones are refused by type."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import rankless
from rankless.errors import MismatchError, UnsupportedTensorError


def buffers(**tensors: torch.Tensor) -> nn.Module:
    module = nn.Module()
    for name, tensor in tensors.items():
        module.register_buffer(name, tensor)
    return module


def frequencies() -> dict[str, torch.Tensor]:
    """One memory, seen as it is, conjugated and negated; and once more as it is."""
    z = torch.complex(torch.arange(6.0), torch.arange(6.0) + 7).reshape(2, 3)
    return {"z": z, "conj": z.conj(), "imag": z.imag, "neg": z.conj().imag, "same": z.view(2, 3)}


def resolved(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.resolve_conj().resolve_neg().clone() for name, tensor in tensors.items()}


def test_lazy_conjugates_and_negations_are_no_ties(tmp_path: Path) -> None:
    expected = resolved(frequencies())
    rankless.save_checkpoint(tmp_path, "s", buffers(**frequencies()))
    separate = buffers(**{name: torch.zeros_like(value) for name, value in expected.items()})
    rankless.load_checkpoint(tmp_path, model=separate)
    for name, tensor in separate.named_buffers():
        assert torch.equal(tensor, expected[name]), name
    assert {"model/conj", "model/neg"} <= set(rankless.open(tmp_path).keys())


def test_lazy_views_of_one_memory_are_filled_with_what_they_show(tmp_path: Path) -> None:
    expected = resolved(frequencies())
    rankless.save_checkpoint(tmp_path, "s", buffers(**frequencies()))
    blank = frequencies()
    blank["z"].zero_()
    rankless.load_checkpoint(tmp_path, model=buffers(**blank))
    for name, value in blank.items():
        assert torch.equal(value.resolve_conj().resolve_neg(), expected[name]), name


def test_a_lazy_conjugate_among_a_models_values_is_stored_as_it_is_seen(tmp_path: Path) -> None:
    class Told(nn.Module):
        reported: torch.Tensor | None = None

        def get_extra_state(self) -> Any:
            return torch.tensor([1 + 2j]).conj()

        def set_extra_state(self, state: Any) -> None:
            self.told = state

    module = Told()
    rankless.save_checkpoint(tmp_path, "s", module)
    rankless.load_checkpoint(tmp_path, model=module)
    assert torch.equal(module.told, torch.tensor([1 - 2j]))


def two_meshes(path: Path) -> None:
    """One memory as a row of a tensor, and as two columns of another."""
    memory = torch.full((1, 2), float(torch.distributed.get_rank()))
    mesh = DeviceMesh("cpu", [0, 1])
    parts = {
        "rows": DTensor.from_local(memory, mesh, [Shard(0)], run_check=False, shape=(2, 2), stride=(2, 1)),
        "columns": DTensor.from_local(memory, mesh, [Shard(1)], run_check=False, shape=(1, 4), stride=(4, 1)),
    }
    rankless.save_checkpoint(path, "s", parts)
    state = {"rows": torch.zeros(2, 2), "columns": torch.zeros(1, 4)}
    rankless.load_checkpoint(path, model=state)
    assert state["rows"].tolist() == [[0, 0], [1, 1]]
    assert state["columns"].tolist() == [[0, 0, 1, 1]]


def test_one_memory_laid_out_twice_is_two_tensors(ranks: Any, tmp_path: Path) -> None:
    ranks(2, two_meshes, tmp_path)


def lazy() -> nn.Module:
    return nn.LazyLinear(3)


def lazy_buffer() -> nn.Module:
    return nn.LazyBatchNorm1d(affine=False)


def nested() -> nn.Module:
    return buffers(weight=torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]))


def jagged() -> nn.Module:
    return buffers(weight=torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged))


def fake() -> nn.Module:
    with FakeTensorMode():
        return nn.Linear(2, 2)


def quantized() -> nn.Module:
    return buffers(weight=torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8))


def sparse() -> nn.Module:
    return buffers(weight=torch.eye(3).to_sparse())


def compressed() -> nn.Module:
    return buffers(weight=torch.eye(3).to_sparse_csr())


def meta() -> nn.Module:
    return nn.Linear(2, 2, device="meta")


KINDS = {
    lazy: "'weight' is uninitialized.*run one forward pass",
    lazy_buffer: "'running_mean' is uninitialized",
    nested: "'weight' is a nested tensor",
    jagged: "'weight' is a nested tensor",
    fake: "'weight' is a FakeTensor",
    quantized: "'weight' is a quantized tensor",
    sparse: r"'weight' is a torch\.sparse_coo tensor",
    compressed: r"'weight' is a torch\.sparse_csr tensor",
    meta: "'weight' is on the meta device",
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", KINDS)
def test_what_has_no_elements_in_memory_is_named_when_it_is_saved(
    make: Callable[[], nn.Module], tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedTensorError, match=KINDS[make]):
        rankless.save_checkpoint(tmp_path, "s", make())
    assert not list(tmp_path.iterdir())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [make for make in KINDS if make is not meta])
def test_and_when_it_is_loaded(make: Callable[[], nn.Module], tmp_path: Path) -> None:
    rankless.save_checkpoint(tmp_path, "s", nn.Linear(2, 2))
    with pytest.raises(UnsupportedTensorError, match=KINDS[make]):
        rankless.load_checkpoint(tmp_path, model=make())


def test_a_lazy_module_that_has_run_is_a_module_like_any_other(tmp_path: Path) -> None:
    model, other = nn.LazyLinear(3), nn.LazyLinear(3)
    for item in (model, other):
        item(torch.ones(1, 2))
    rankless.save_checkpoint(tmp_path, "s", model)
    rankless.load_checkpoint(tmp_path, model=other)
    assert torch.equal(other.weight, model.weight)


def test_an_expanded_view_is_saved_whole_and_refused_before_anything_is_filled(tmp_path: Path) -> None:
    rankless.save_checkpoint(tmp_path, "s", buffers(weight=torch.ones(3), mask=torch.arange(2.0).expand(4, 2)))
    blank = buffers(weight=torch.zeros(3), mask=torch.zeros(2).expand(4, 2))
    with pytest.raises(MismatchError, match=r"mask: an expanded view.*clone\(\)"):
        rankless.load_checkpoint(tmp_path, model=blank)
    assert not blank.weight.any()
    blank.mask = blank.mask.clone()
    rankless.load_checkpoint(tmp_path, model=blank)
    assert torch.equal(blank.mask, torch.arange(2.0).expand(4, 2))


def test_an_expanded_dimension_of_one_element_can_be_filled(tmp_path: Path) -> None:
    rankless.save_checkpoint(tmp_path, "s", buffers(positions=torch.arange(4).expand(1, -1)))
    blank = buffers(positions=torch.zeros(4, dtype=torch.int64).expand(1, -1))
    rankless.load_checkpoint(tmp_path, model=blank)
    assert torch.equal(blank.positions, torch.arange(4)[None])


@pytest.mark.parametrize(
    ("stored", "here"),
    [
        (torch.complex64, torch.float32),
        (torch.float32, torch.complex64),
        (torch.float32, torch.int8),
        (torch.float32, torch.bool),
        (torch.int64, torch.float32),
        (torch.int64, torch.int32),
        (torch.bool, torch.uint8),
    ],
)
def test_only_floating_point_is_cast_into_floating_point(
    stored: torch.dtype, here: torch.dtype, tmp_path: Path
) -> None:
    rankless.save_checkpoint(tmp_path, "s", {"x": torch.ones(2, dtype=stored), "y": torch.ones(2)})
    state = {"x": torch.zeros(2, dtype=here), "y": torch.zeros(2, dtype=torch.bfloat16)}
    with pytest.raises(MismatchError, match=r"x: dtype .*\(no cast keeps these values\)"):
        rankless.load_checkpoint(tmp_path, model=state, cast_dtype=True)
    with pytest.raises(MismatchError, match="x: dtype"):
        rankless.load_model(state, tmp_path / "s")
    assert not state["y"].any()
