"""NxD's files, written and read with plain torch, for comparison with rankless's.

``nxd.tar.gz`` has checkpoints that NxD 0.18 wrote on CPU (tensor parallel 2, data parallel 2): plain, and with ZeRO-1,
with and without master weights.
"""

import sys
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

GOLDEN = Path(__file__).with_name("nxd.tar.gz")
NAME = "torch_xla.utils.serialization"


class TensorReference:
    """Stands for torch_xla's."""

    def __init__(self, tid: int | None = None) -> None:
        self.tid = tid


class _Written:
    """The same, as it is pickled: by NEWOBJ."""

    def __init__(self, tid: int) -> None:
        self.tid = tid


_Written.__module__, _Written.__name__, _Written.__qualname__ = NAME, "TensorReference", "TensorReference"


@contextmanager
def torch_xla() -> Iterator[None]:
    """As much of torch_xla as a pickle looks for."""
    names = [NAME.rsplit(".", number)[0] for number in (2, 1, 0)]
    names[-1] = NAME
    sys.modules |= {name: ModuleType(name) for name in names}
    sys.modules[NAME].TensorReference = _Written  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]


def extract_golden(folder: Path) -> Path:
    with tarfile.open(GOLDEN) as file:
        file.extractall(folder, filter="data")
    return folder / "nxd"


def save_rank_file(
    path: Path, tree: Any, *, xser: bool = True, info: bool = True, experts: frozenset[str] = frozenset()
) -> None:
    """One rank's file, as NxD saves it. ``experts``: keys of a model that are expert parallel."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors: list[torch.Tensor] = []
    known: dict[int, Any] = {}
    flags: dict[int, bool] = {}

    def walk(value: Any, key: Any = None) -> Any:
        if isinstance(value, torch.Tensor):
            if id(value) not in known:
                known[id(value)] = _Written(len(tensors)) if xser else value.detach().contiguous().clone()
                flags[len(tensors)] = key in experts
                tensors.append(value)
            return known[id(value)]
        if isinstance(value, dict):
            return {name: walk(item, name) for name, item in value.items()}
        if isinstance(value, list | tuple):
            return [walk(item, key) for item in value]
        return value

    built = walk(tree)
    with torch_xla():
        torch.save(built, path)
    if not xser:
        return
    folder = path.with_name(path.name + ".tensors")
    folder.mkdir()
    for tid, tensor in enumerate(tensors):
        torch.save(tensor.detach().contiguous().clone(), folder / f"tensor_{tid}.pt")
    if info:
        rows = {
            tid: {"dtype": item.dtype, "shape": item.shape, "expert_model_parallel": flags[tid]}
            for tid, item in enumerate(tensors)
        }
        torch.save(rows, path.with_name(path.name + ".info.pt"))


def load_rank_file(path: Path) -> Any:
    """One rank's file, with its tensors."""

    def walk(value: Any) -> Any:
        if isinstance(value, TensorReference):
            return torch.load(path.with_name(path.name + ".tensors") / f"tensor_{value.tid}.pt", weights_only=True)
        if isinstance(value, dict):
            return {name: walk(item) for name, item in value.items()}
        return [walk(item) for item in value] if isinstance(value, list) else value

    with torch.serialization.safe_globals([(TensorReference, f"{NAME}.TensorReference")]):
        return walk(torch.load(path, weights_only=True))


def shard_rows(whole: torch.Tensor, dp: int) -> list[torch.Tensor]:
    """What data-parallel ranks have of a parameter under ZeRO-1."""
    padding = -whole.shape[0] % dp
    filled = torch.nn.functional.pad(whole, [*([0, 0] * (whole.ndim - 1)), 0, padding])
    return [part.clone() for part in filled.chunk(dp)]


def is_row(state: torch.Tensor, parameter: torch.Tensor) -> bool:
    return state.ndim > 0 and state.shape == parameter.shape[: state.ndim]


def shard_zero_states(
    parameters: dict[int, torch.Tensor], states: dict[int, dict[str, Any]], dp: int, **more: Any
) -> list[dict[str, Any]]:
    """The states of data-parallel ranks; ``more`` has ``masters`` and ``groups``."""

    def own(value: Any, pid: int, rank: int) -> Any:
        is_divided = isinstance(value, torch.Tensor) and is_row(value, parameters[pid])
        return (
            shard_rows(value, dp)[rank] if is_divided else value.clone() if isinstance(value, torch.Tensor) else value
        )

    result = []
    for rank in range(dp):
        tree = {
            "state": {},
            "param_groups": more.get("groups", [{"lr": 0.1, "betas": (0.9, 0.999), "params": list(parameters)}]),
            "base_state": {
                pid: {name: own(value, pid, rank) for name, value in state.items()} for pid, state in states.items()
            },
            "shape_info": {pid: list(parameter.shape) for pid, parameter in parameters.items()},
        }
        if more.get("masters"):
            tree["sharded_master_weights"] = {
                pid: shard_rows(parameter.float(), dp)[rank] for pid, parameter in parameters.items()
            }
        result.append(tree)
    return result


def rank_file_name(dp: int = 0, tp: int = 0, pp: int = 0, ep: int | None = None) -> str:
    experts = "" if ep is None else f"_ep_rank_{ep:02}"
    return f"dp_rank_{dp:02}{experts}_tp_rank_{tp:02}_pp_rank_{pp:02}.pt"


def equal_trees(left: Any, other: Any) -> bool:
    """Equal trees, bit for bit."""
    if isinstance(left, torch.Tensor):
        return left.dtype == other.dtype and left.shape == other.shape and torch.equal(left, other)
    if isinstance(left, dict):
        return list(left) == list(other) and all(equal_trees(left[key], other[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(other) and all(map(equal_trees, left, other))
    return type(left) is type(other) and left == other


def read_files(folder: Path) -> dict[str, bytes]:
    """The bytes of all files below a folder."""
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}
