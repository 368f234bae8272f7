"""Tests calls whose arguments are wrong on one rank only: all ranks raise the error at once, and can go on together."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import rankless
from rankless import nxd
from rankless.colossalai import Booster
from rankless.errors import InvalidArgumentError
from tests.helpers.pool import Ranks

#: Longer than any of these tests takes: a rank that waits for it has not heard of the error.
WAITS = 60.0


def _save(folder: Path, **wrong: Any) -> None:
    arguments = {"path": folder / "run", "tag": "step_1", "model": nn.Linear(2, 2), "timeout": WAITS, **wrong}
    rankless.save_checkpoint(**arguments)


def _restore(folder: Path, **wrong: Any) -> None:
    arguments = {"path": folder / "run", "tag": "base", "model": nn.Linear(2, 2), "timeout": WAITS, **wrong}
    rankless.restore(**arguments)


def _load(folder: Path, **wrong: Any) -> None:
    rankless.load_checkpoint(**{"path": folder / "run", "model": nn.Linear(2, 2), "timeout": WAITS, **wrong})


def _save_model(folder: Path, **wrong: Any) -> None:
    arguments = {"model": nn.Linear(2, 2), "path": folder / "m.safetensors", "timeout": WAITS, **wrong}
    rankless.save_model(**arguments)


def _load_model(folder: Path, **wrong: Any) -> None:
    rankless.load_model(**{"model": nn.Linear(2, 2), "path": folder / "run" / "base", "timeout": WAITS, **wrong})


def _copy(_folder: Path, **wrong: Any) -> None:
    rankless.copy_state(**{"model": nn.Linear(2, 2), "sources": [0], "timeout": WAITS, **wrong})


def _convert(folder: Path, **wrong: Any) -> None:
    arguments = {"path": folder / "run" / "base", "output": folder / "out", "to": "hf", "timeout": WAITS, **wrong}
    rankless.convert(**arguments)


def _export(folder: Path, **wrong: Any) -> None:
    rankless.export_model(**{"path": folder / "run" / "base", "output": folder / "out", "timeout": WAITS, **wrong})


def _resume(folder: Path, **wrong: Any) -> None:
    with rankless.Checkpointer(folder / "run", model=nn.Linear(2, 2), timeout=WAITS, signals=()) as checkpointer:
        checkpointer.resume(**wrong)


def _save_as_nxd(folder: Path, **wrong: Any) -> None:
    nxd.save_checkpoint(**{"checkpoint_dir_str": folder / "run", "tag": "t", "model": nn.Linear(2, 2), **wrong})


def _save_as_colossalai(folder: Path, **wrong: Any) -> None:
    Booster().save_model(**{"model": nn.Linear(2, 2), "checkpoint": folder / "model.bin", **wrong})


CALLS = [
    (_save, {"keep": "x"}),
    (_save, {"keep": 0}),
    (_save, {"unknown": 1}),
    (_save, {"options": 5}),
    (_save, {"path": 5}),
    (_save, {"path": ""}),
    (_save, {"local": 5}),
    (_save, {"timeout": -1}),
    (_save, {"tag": "a/b"}),
    (_save, {"files": 5}),
    (_save, {"metrics": {"loss": torch.ones(2)}}),
    (_save, {"on_event": 5}),
    (_save, {"rng": 5}),
    (_save, {"optimizer": {"state": {}, "param_groups": [{"params": [0], "param_names": [5]}]}}),
    (_save, {"stateful": {"\ud800": nn.Linear(2, 2)}}),
    (_restore, {"tag": "a/b"}),
    (_restore, {"tag": 5}),
    (_restore, {"strict": 5}),
    (_restore, {"allow_missing": 5}),
    (_restore, {"keys": 5}),
    (_restore, {"verify": 5}),
    (_restore, {"cast_dtype": 5}),
    (_restore, {"resume": 5}),
    (_restore, {"on_event": 5}),
    (_restore, {"unknown": 1}),
    (_load, {"path": 5}),
    (_load, {"local": ""}),
    (_save_model, {"max_shard_size": "x"}),
    (_save_model, {"path": 5}),
    (_save_model, {"adapter_only": True, "prefix": "x."}),
    (_load_model, {"path": 5}),
    (_copy, {"sources": 5}),
    (_copy, {"timeout": "x"}),
    (_convert, {"to": "x"}),
    (_convert, {"dtype": "x"}),
    (_convert, {"an_option": 1}),
    (_export, {"max_shard_size": "x"}),
    (_resume, {"unknown": 1}),
    (_resume, {"new_ok": ["x"]}),
    (_resume, {"new_ok": 5}),
    (_save_as_nxd, {"tag": None}),
    (_save_as_colossalai, {"size_per_shard": 0, "shard": True}),
]


def _call_wrongly(calls: list[tuple[Callable[..., None], dict[str, Any]]], folder: Path) -> list[tuple[float, str]]:
    """Make each call, wrongly on rank 1; and a right one after it, which all ranks must be able to make together."""
    rankless.save_checkpoint(folder / "run", "base", nn.Linear(2, 2), timeout=WAITS)
    results = []
    for call, wrong in calls:
        began = time.monotonic()
        try:
            call(folder, **(wrong if dist.get_rank() == 1 else {}))
            message = "nothing"
        except Exception as error:  # noqa: BLE001 - its type is compared
            message = f"{type(error).__name__}: {error}"
        results.append((time.monotonic() - began, message))
        rankless.restore(folder / "run", "base", nn.Linear(2, 2), timeout=WAITS)
    return results


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("calls", [CALLS[::3], CALLS[1::3], CALLS[2::3]], ids=["first", "second", "third"])
def test_all_ranks_raise_what_is_wrong_on_one_of_them(
    ranks: Ranks, tmp_path: Path, calls: list[tuple[Callable[..., None], dict[str, Any]]]
) -> None:
    here, there, last = ranks(3, _call_wrongly, calls, tmp_path)
    for (call, wrong), (seconds, message), (_, own), (_, other) in zip(calls, here, there, last, strict=True):
        case = f"{call.__name__} with {wrong}: {own} | {message}"
        assert own.startswith(InvalidArgumentError.__name__), case
        cause = own.partition(": ")[2].removeprefix("rank 1 of 3").partition(": ")[2] or own
        assert message.startswith(f"{InvalidArgumentError.__name__}: rank 1 of 3"), case
        assert cause[:20] in message, case
        assert other == message, case
        assert seconds < WAITS / 2, case


def _call_wrongly_on_all(folder: Path) -> str:
    try:
        _save(folder, unknown=1)
    except InvalidArgumentError as error:
        return str(error)
    return ""


def test_what_is_wrong_on_all_ranks_names_no_rank(ranks: Ranks, tmp_path: Path) -> None:
    assert {message.partition(":")[0] for message in ranks(2, _call_wrongly_on_all, tmp_path)} == {
        "save_checkpoint has no argument 'unknown'"
    }


def _fork_and_save(folder: Path) -> str:
    """Rank 1 forks a child before its first call, which calls wrongly. Then the ranks save together."""
    message = ""
    if dist.get_rank() == 1:
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            try:
                _save(folder, tag=3)
            except Exception as error:  # noqa: BLE001 - its type is compared
                os.write(writer, type(error).__name__.encode())
            os._exit(0)
        os.waitpid(child, 0)
        message = os.read(reader, 100).decode()
    rankless.save_checkpoint(folder / "run", "right", nn.Linear(2, 2), timeout=WAITS)
    return message


def test_a_forked_child_that_calls_wrongly_disturbs_nothing(tmp_path: Path) -> None:
    fresh = Ranks()  # whose ranks have made no call
    try:
        assert fresh(2, _fork_and_save, tmp_path) == ["", "RankFailedError"]
    finally:
        fresh.close()


def _save_with_a_wrong_group(folder: Path) -> str:
    message = ""
    try:
        _save(folder, **({"process_group": "sefl"} if dist.get_rank() == 1 else {}))
    except InvalidArgumentError as error:
        message = str(error)
    _save(folder)
    return message


def test_a_wrong_process_group_on_one_rank(ranks: Ranks, tmp_path: Path) -> None:
    here, there = ranks(2, _save_with_a_wrong_group, tmp_path)
    assert here.startswith("rank 1 of 2")
    assert "process_group must be" in there
