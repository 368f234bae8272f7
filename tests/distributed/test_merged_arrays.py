"""Tests of tensors and arrays in what stages of a pipeline keep beside states: in optimizers, schedulers, modules."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn, optim

import rankless
from tests.helpers.fake_http import BUCKET
from tests.helpers.fake_s3 import FakeS3, store_at
from tests.helpers.pairwise import each_value
from tests.helpers.pool import Ranks

#: More elements of float32 than are stored inside the values.
LARGE = 20_000

KINDS = ("own", "own array", "extra", "extra array", "scheduler", "scheduler array", "setting")


class Keeper(optim.SGD):
    """Keeps something by its own state dict."""

    kept: Any = None

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), **({} if self.kept is None else {"kept": self.kept})}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.kept = state_dict.pop("kept", None)
        super().load_state_dict(state_dict)


class Part(nn.Linear):
    """Keeps something as extra state."""

    kept: Any = None

    def get_extra_state(self) -> Any:
        return self.kept

    def set_extra_state(self, state: Any) -> None:
        self.kept = state


class Schedule(optim.lr_scheduler.LambdaLR):
    """Keeps something in its state."""

    def __init__(self, optimizer: optim.Optimizer) -> None:
        super().__init__(optimizer, lambda _: 1.0)
        self.kept: Any = None


class Stage:
    """A stage of a pipeline: a module, its optimizer and its scheduler, one of which keeps something."""

    def __init__(self, number: int, kind: str, kept: Any) -> None:
        self.name, self._kind = f"stage{number}", kind
        self.module = Part(2, 2)
        for parameter in self.module.parameters():
            nn.init.constant_(parameter, number)
        self.optimizer = Keeper(self.module.parameters(), lr=0.1)
        self.schedule = Schedule(self.optimizer)
        self.kept = kept

    @property
    def kept(self) -> Any:
        holder = self._holder()
        return holder["kept"] if isinstance(holder, dict) else holder.kept

    @kept.setter
    def kept(self, value: Any) -> None:
        holder = self._holder()
        if isinstance(holder, dict):
            holder["kept"] = value
        else:
            holder.kept = value

    def _holder(self) -> Any:
        places = {"own": self.optimizer, "extra": self.module, "scheduler": self.schedule}
        return places.get(self._kind.partition(" ")[0], self.optimizer.param_groups[0])


def make_kept(kind: str, number: int) -> Any:
    """Return what stage ``number`` keeps: a large tensor, or a small one, or a small array."""
    value = torch.full((LARGE + number,), number + 1.0)
    return value[:4].numpy() if "array" in kind else value[:4].clone() if "small" in kind else value


def blank(kind: str) -> Any:
    return np.zeros(1, np.float32) if "array" in kind else torch.zeros(1)


def are_equal(kept: Any, expected: Any) -> bool:
    return type(kept) is type(expected) and np.array_equal(np.asarray(kept), np.asarray(expected))


def objects(stages: list[Stage]) -> tuple[Any, ...]:
    return (
        nn.ModuleDict({stage.name: stage.module for stage in stages}),
        [stage.optimizer for stage in stages],
        [stage.schedule for stage in stages],
    )


def save_stage(path: str, kind: str, stages: int) -> None:
    number = dist.get_rank() % stages
    rankless.save_checkpoint(path, "a", *objects([Stage(number, kind, make_kept(kind, number))]))


def load_stage(path: str, kind: str, stages: int) -> tuple[bool, tuple[str, ...], tuple[str, ...]]:
    """Load into stages that hold blanks. Return whether each has its own values back, and the report."""
    number = dist.get_rank() % stages
    stage = Stage(number, kind, blank(kind))
    restored = rankless.restore(path, None, *objects([stage]))
    return are_equal(stage.kept, make_kept(kind, number)), restored.exact, restored.reconstructed


def open_in(run: Path, tiers: Path | None, drain_every: int) -> rankless.RunDirectory:
    """Open a run directory; each rank is a host with a tier of its own, if there are ``tiers``."""
    tier = None if tiers is None else rankless.LocalTier(tiers / f"host{dist.get_rank()}", drain_every=drain_every)
    return rankless.RunDirectory(run, local=tier)


def save_stage_in(run: Path, tiers: Path | None, drain_every: int, kind: str) -> None:
    number = dist.get_rank()
    directory = open_in(run, tiers, drain_every)
    directory.save("a", *objects([Stage(number, kind, make_kept(kind, number))]), step=1)
    directory.wait()


def load_stage_in(run: Path, tiers: Path | None, kind: str) -> tuple[str, bool, tuple[str, ...]]:
    """Return where the stage was loaded from, whether it has its own value back, and what is called exact."""
    number = dist.get_rank()
    stage = Stage(number, kind, blank(kind))
    directory = open_in(run, tiers, 1)
    restored = directory.restore(None, *objects([stage]))
    directory.finalize()
    return restored.source, are_equal(stage.kept, make_kept(kind, number)), restored.exact


@each_value(
    {
        "kind": KINDS,
        "is_bucket": [False, True],
        "has_tier, drain_every, is_lost": [(False, 1, False), (True, 10**6, False), (True, 1, False), (True, 1, True)],
    }
)
def test_every_place_has_them(
    ranks: Ranks, tmp_path: Path, kind: str, is_bucket: bool, has_tier: bool, drain_every: int, is_lost: bool
) -> None:
    """A run directory or a bucket, without a tier, in the tier alone, drained, and drained by hosts that are lost."""
    tiers = tmp_path / "tiers" if has_tier else None
    with FakeS3().served() as url:
        run = store_at(url, retry_seconds=20.0).path(f"{BUCKET}/run") if is_bucket else tmp_path / "run"
        ranks(2, save_stage_in, run, tiers, drain_every, kind)
        if is_lost and tiers is not None:
            shutil.rmtree(tiers)
        outcomes = ranks(2, load_stage_in, run, tiers, kind)
    for source, is_equal, exact in outcomes:
        assert is_equal
        assert {"model", "optimizer", "scheduler"} <= {*exact}
        assert ("tier" in source or "memory" in source) == (has_tier and not is_lost), source


def save_both(path: Path, kind: str) -> None:
    rankless.save_checkpoint(path, "a", *objects([Stage(number, kind, make_kept(kind, number)) for number in range(2)]))


@pytest.mark.parametrize("ranks_each", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_each_stage_gets_its_own_back(ranks: Ranks, tmp_path: Path, kind: str, ranks_each: int) -> None:
    ranks(2 * ranks_each, save_stage, str(tmp_path), kind, 2)
    for is_equal, exact, reconstructed in ranks(2 * ranks_each, load_stage, str(tmp_path), kind, 2):
        assert is_equal
        assert {"model", "optimizer", "scheduler"} <= {*exact}
        assert not {"model", "optimizer", "scheduler"} & {*reconstructed}


@pytest.mark.parametrize("kind", KINDS)
def test_files_are_those_of_one_process(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    save_both(tmp_path / "one", kind)
    ranks(4, save_stage, str(tmp_path / "four"), kind, 2)
    files = {path.relative_to(tmp_path / "one") for path in (tmp_path / "one/a").rglob("*") if path.is_file()}
    assert {path.name for path in files} >= {"state.json", "state.safetensors"}
    for name in (name for name in files if name.name != "manifest.json" and not name.name.startswith("ranks")):
        assert (tmp_path / "four" / name).read_bytes() == (tmp_path / "one" / name).read_bytes(), name


@pytest.mark.parametrize("kind", KINDS)
def test_one_process_with_all_stages_loads_them(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    ranks(2, save_stage, str(tmp_path), kind, 2)
    stages = [Stage(number, kind, blank(kind)) for number in range(2)]
    restored = rankless.restore(tmp_path, None, *objects(stages))
    assert {"model", "optimizer", "scheduler"} <= {*restored.exact}
    assert all(are_equal(stage.kept, make_kept(kind, number)) for number, stage in enumerate(stages))


@pytest.mark.parametrize("kind", KINDS)
def test_a_conversion_has_them(tmp_path: Path, kind: str) -> None:
    save_both(tmp_path / "run", kind)
    rankless.convert(tmp_path / "run/a", tmp_path / "out", to="native")
    stages = [Stage(number, kind, blank(kind)) for number in range(2)]
    rankless.restore(tmp_path / "out", None, *objects(stages))
    assert all(are_equal(stage.kept, make_kept(kind, number)) for number, stage in enumerate(stages))


@pytest.mark.parametrize("kind", KINDS)
def test_stages_on_two_ranks_load_those_of_one_process(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    save_both(tmp_path, kind)
    assert all(is_equal for is_equal, *_ in ranks(2, load_stage, str(tmp_path), kind, 2))


def save_and_load_differing(path: str, kind: str) -> tuple[Any, ...]:
    """Save on replicas that keep other values, of another length. Return the report, what was loaded, and warnings."""
    rank = dist.get_rank()
    stage = Stage(0, kind, make_kept(kind, rank))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rankless.save_checkpoint(path, "a", *objects([stage]))
    stage.kept = blank(kind)
    restored = rankless.restore(path, None, *objects([stage]))
    values = [number for number in range(2) if are_equal(stage.kept, make_kept(kind, number))]
    return restored.exact, restored.reconstructed, values, [str(warning.message) for warning in caught]


@pytest.mark.parametrize("kind", ["own", "own array", "scheduler", "scheduler array"])
def test_replicas_that_differ_are_not_called_exact(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    component = "scheduler" if kind.startswith("scheduler") else "optimizer"
    outcomes = ranks(2, save_and_load_differing, str(tmp_path), kind)
    for exact, reconstructed, values, _ in outcomes:
        assert component not in exact
        assert component in reconstructed
        assert values == [0]
    assert any("different" in text for *_, texts in outcomes for text in texts)


@pytest.mark.parametrize("kind", ["extra", "extra small", "extra array"])
def test_each_replica_gets_its_own_extra_state_back(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    outcomes = ranks(2, save_and_load_differing, str(tmp_path), kind)
    assert [values for _, _, values, _ in outcomes] == [[0], [1]]


def copy_to_blank(kind: str) -> bool:
    """Send the state of ranks 0 and 1 to ranks 2 and 3."""
    rank = dist.get_rank()
    is_source, number = rank < 2, rank % 2
    stage = Stage(number, kind, make_kept(kind, number) if is_source else blank(kind))
    model, optimizer, scheduler = objects([stage])
    rankless.copy_state(model, optimizer, scheduler, sources=[0, 1])
    return are_equal(stage.kept, make_kept(kind, number))


@pytest.mark.parametrize("kind", KINDS)
def test_a_live_copy_has_them(ranks: Ranks, kind: str) -> None:
    assert all(ranks(4, copy_to_blank, kind))
