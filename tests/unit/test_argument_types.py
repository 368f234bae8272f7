"""Arguments of a wrong type give an error that names them, not one of the code that uses them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import rankless
from rankless.errors import InvalidArgumentError

#: A wrong value of each argument.
COMMON: dict[str, list[Any]] = {"process_group": ["x", [], 3], "timeout": ["x", [], None, True]}
OBJECTS: dict[str, list[Any]] = {"model": [[], 3], "stateful": [3, "x", [1]]}
RULES: dict[str, list[Any]] = {"allow_missing": [3, None]}
SECONDS: list[Any] = ["x", [], True, 1j, -1.0, float("nan"), float("inf"), 1e300]


def save(path: Path, **wrong: Any) -> None:
    rankless.save_checkpoint(path, "b", **{"model": torch.nn.Linear(1, 1), **wrong})


def restore(path: Path, **wrong: Any) -> None:
    rankless.restore(path, **{"model": torch.nn.Linear(1, 1), **wrong})


def copy_state(path: Path, **wrong: Any) -> None:
    del path
    rankless.copy_state(**{"model": torch.nn.Linear(1, 1), "sources": [0], **wrong})


def watch(path: Path, **wrong: Any) -> None:
    del path
    rankless.watch(**wrong).close()


def list_cases() -> list[Any]:
    wrong: dict[Callable[..., None], dict[str, list[Any]]] = {
        save: COMMON | OBJECTS,
        restore: COMMON | OBJECTS | RULES | {"keys": [3, "x"]},
        copy_state: COMMON | OBJECTS | RULES | {name: ["x", 3, None] for name in ("strict", "cast_dtype")},
        watch: {"process_group": ["x", []], "interval": [*SECONDS, None], "timeout": [*SECONDS, None]}
        | {"exit_after": SECONDS},
    }
    return [
        pytest.param(call, name, value, id=f"{call.__name__}-{name}-{value!r:.12}")
        for call, arguments in wrong.items()
        for name, values in arguments.items()
        for value in values
    ]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run")
    rankless.save_checkpoint(path, "a", torch.nn.Linear(1, 1))
    return path


@pytest.mark.parametrize(("call", "name", "value"), list_cases())
def test_the_error_names_the_argument(run: Path, call: Callable[..., None], name: str, value: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=name):
        call(run, **{name: value})
    assert [found.tag for found in rankless.list_checkpoints(run)] == ["a"]
