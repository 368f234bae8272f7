"""Tests that the real ColossalAI 0.5.0 and rankless load each other's checkpoints, and training continues exactly.

It is a test group of its own, ``make test-colossalai``: the package is installed into ``.venv-colossalai``.
"""

import copy
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import rankless
from rankless.colossalai import Booster
from tests.helpers.pool import Ranks
from tests.interop.colossalai import environment
from tests.interop.colossalai.net import MODELS, OPTIMIZERS, cases, save_all, start, state, train

pytestmark = pytest.mark.colossalai

FOLDERS = {"plain": False, "tied": True}
SIDES = [(1, 1), (1, 2), (2, 1), (2, 2)]


@pytest.fixture(scope="module", autouse=True)
def _environment() -> None:
    why_not = environment.ready()
    if why_not:
        pytest.skip(why_not)


def oracle(steps: int, *, tied: bool) -> dict[str, Any]:
    """One process, plain torch."""
    torch.set_num_threads(1)
    model, optimizer, scheduler = start(tied=tied)
    train(model, optimizer, scheduler, 0, steps)
    return copy.deepcopy(state(model, optimizer))


def assert_same(actual: Any, expected: Any, where: str) -> None:
    if isinstance(expected, torch.Tensor):
        assert torch.equal(actual, expected), where
    elif isinstance(expected, dict):
        assert expected.keys() <= actual.keys(), where
        for key, value in expected.items():
            assert_same(actual[key], value, f"{where}.{key}")
    elif isinstance(expected, list):
        for number, (mine, theirs) in enumerate(zip(actual, expected, strict=True)):
            assert_same(mine, theirs, f"{where}.{number}")
    else:
        assert actual == expected, where


def boosted(*, tied: bool, seed: int) -> tuple[Booster, Any, Any, Any]:
    booster = Booster()
    model, optimizer, scheduler = start(tied=tied, seed=seed)
    wrapped = DistributedDataParallel(model) if dist.is_initialized() else model
    model, optimizer, _, _, scheduler = booster.boost(wrapped, optimizer, lr_scheduler=scheduler)
    return booster, model, optimizer, scheduler


def save(path: str) -> None:
    for name, tied in FOLDERS.items():
        folder = Path(path) / name
        folder.mkdir(exist_ok=True)
        booster, model, optimizer, scheduler = boosted(tied=tied, seed=0)
        train(model, optimizer, scheduler, 0, 3)
        save_all(booster, folder, (model, optimizer, scheduler), tied=tied, real=False)


def load(path: str, cases: list[tuple[str, str]], *, tied: bool) -> list[Any]:
    result = []
    for model_name, optimizer_name in cases:
        booster, model, optimizer, scheduler = boosted(tied=tied, seed=9)
        booster.load_model(model, f"{path}/{model_name}")
        booster.load_optimizer(optimizer, f"{path}/{optimizer_name}")
        booster.load_lr_scheduler(scheduler, f"{path}/scheduler")
        plain = model.module if isinstance(model, DistributedDataParallel) else model
        loaded = copy.deepcopy(state(plain, optimizer))
        train(model, optimizer, scheduler, 3, 5)
        result.append((loaded, copy.deepcopy(state(plain, optimizer))))
    return result


def load_plain(path: str, cases: list[tuple[str, str]]) -> list[Any]:
    return load(path, cases, tied=False)


def load_tied(path: str, cases: list[tuple[str, str]]) -> list[Any]:
    return load(path, cases, tied=True)


@pytest.mark.parametrize(("ours", "theirs"), SIDES)
def test_it_loads_what_ours_saves(ranks: Ranks, tmp_path: Path, ours: int, theirs: int) -> None:
    if ours > 1:
        ranks(ours, save, str(tmp_path))
    else:
        save(str(tmp_path))
    assert_it_loads(tmp_path, theirs)


def assert_it_loads(path: Path, theirs: int) -> None:
    environment.peer("load", path, theirs)
    for name, tied in FOLDERS.items():
        for model_name in MODELS:
            loaded = torch.load(path / name / f"found_{model_name}.pt", weights_only=False)
            assert_same(loaded["loaded"], oracle(3, tied=tied), f"{name} {model_name} loaded")
            assert_same(loaded["trained"], oracle(8, tied=tied), f"{name} {model_name} trained")


@pytest.mark.parametrize("theirs", [1, 2])
def test_it_loads_what_is_converted_for_it(tmp_path: Path, theirs: int) -> None:
    save(str(tmp_path))
    for name, tied in FOLDERS.items():
        model, optimizer, scheduler = start(tied=tied)
        train(model, optimizer, scheduler, 0, 3)
        rankless.save_checkpoint(tmp_path / "run", name, model, optimizer, scheduler)
        made = rankless.convert(
            tmp_path / "run" / name, tmp_path / f"{name}-made", to="colossalai", max_shard_size="4KB"
        )
        for part, place in (("modeling", "model_bins"), ("optimizer", "optimizer_bins"), ("lr_scheduler", "scheduler")):
            remove(tmp_path / name / place)
            (made / part).rename(tmp_path / name / place)
    assert_it_loads(tmp_path, theirs)


def remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


@pytest.mark.parametrize(("theirs", "ours"), SIDES)
def test_ours_loads_what_it_saves(ranks: Ranks, tmp_path: Path, theirs: int, ours: int) -> None:
    environment.peer("save", tmp_path, theirs)
    for name, tied in FOLDERS.items():
        wanted = [case for case in cases() if (tmp_path / name / case[0]).exists()]
        assert {optimizer for _, optimizer in wanted} == set(OPTIMIZERS)
        assert len(wanted) == (3 if tied else len(MODELS))
        work = load_tied if tied else load_plain
        every = ranks(ours, work, str(tmp_path / name), wanted) if ours > 1 else [work(str(tmp_path / name), wanted)]
        for actual in every:
            for case, (loaded, trained) in zip(wanted, actual, strict=True):
                assert_same(loaded, oracle(3, tied=tied), f"{name} {case} loaded")
                assert_same(trained, oracle(8, tied=tied), f"{name} {case} trained")
