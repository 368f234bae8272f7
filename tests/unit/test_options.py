"""Options of saves and loads: one list, as an object or as keyword arguments, which have precedence."""

from __future__ import annotations

import inspect
import pydoc
import re
import sys
import typing
from collections.abc import Callable
from dataclasses import FrozenInstanceError, fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rankless
from rankless import InvalidArgumentError, LoadOptions, SaveOptions
from rankless.options import LoadKeywords, SaveKeywords

SAVES: list[Callable[..., Any]] = [
    rankless.save_checkpoint,
    rankless.RunDirectory,
    rankless.RunDirectory.save,
    rankless.Checkpointer,
]
LOADS: list[Callable[..., Any]] = [
    rankless.load_checkpoint,
    rankless.restore,
    rankless.RunDirectory.load,
    rankless.RunDirectory.restore,
    rankless.Checkpointer.resume,
]

#: Lines of a screen of 80 columns that the help of a function may have. Python 3.13 gives each parameter a line: 51.
HELP_LINES = 40 if sys.version_info < (3, 13) else 52


def state() -> dict[str, torch.Tensor]:
    return {"w": torch.arange(1000.0)}


def count_files(checkpoint: Path) -> int:
    return len(list(checkpoint.glob("model/*.safetensors")))


@pytest.mark.parametrize(("options", "keywords"), [(SaveOptions, SaveKeywords), (LoadOptions, LoadKeywords)])
def test_keyword_arguments_are_the_fields_of_the_options(options: type, keywords: type) -> None:
    hints = typing.get_type_hints(options)
    assert typing.get_type_hints(keywords) == {field.name: hints[field.name] for field in fields(options)}


@pytest.mark.parametrize("options", [SaveOptions, LoadOptions])
def test_each_option_is_documented(options: type) -> None:
    documented = re.findall(r"^ {4}(\w+): ", inspect.getdoc(options) or "", re.MULTILINE)
    assert documented == [field.name for field in fields(options)]


@pytest.mark.parametrize("call", [*SAVES, *LOADS], ids=lambda call: call.__qualname__)
def test_no_option_is_an_argument_of_another_kind(call: Callable[..., Any]) -> None:
    names = {field.name for field in fields(SaveOptions if call in SAVES else LoadOptions)}
    assert not names & inspect.signature(call).parameters.keys()
    assert {"options", "more"} <= inspect.signature(call).parameters.keys()


@pytest.mark.parametrize("call", [rankless.save_checkpoint, rankless.load_checkpoint, rankless.restore])
def test_the_help_of_a_function_fits_a_screen(call: Callable[..., Any]) -> None:
    lines = pydoc.plaintext.document(call).splitlines()
    assert sum(max(1, -(-len(line) // 80)) for line in lines) <= HELP_LINES


@pytest.mark.parametrize("options", [SaveOptions(), LoadOptions()], ids=lambda options: type(options).__name__)
def test_options_are_frozen(options: Any) -> None:
    with pytest.raises(FrozenInstanceError):
        options.rng = False


def test_options_of_a_save_are_an_object_or_keyword_arguments(tmp_path: Path) -> None:
    small = SaveOptions(max_shard_size=1000)
    rankless.save_checkpoint(tmp_path, "object", {"a": torch.ones(200), "b": torch.ones(200)}, options=small)
    rankless.save_checkpoint(tmp_path, "keyword", {"a": torch.ones(200), "b": torch.ones(200)}, max_shard_size=1000)
    rankless.save_checkpoint(
        tmp_path, "both", {"a": torch.ones(200), "b": torch.ones(200)}, options=small, max_shard_size="1GB"
    )
    assert [count_files(tmp_path / tag) for tag in ("object", "keyword", "both")] == [2, 2, 1]


def test_options_of_a_save_replace_those_of_the_run_directory(tmp_path: Path) -> None:
    run = rankless.RunDirectory(tmp_path, options=SaveOptions(max_shard_size=1000), rng=False)
    model = {"a": torch.ones(200), "b": torch.ones(200)}
    run.save("default", model)
    run.save("keyword", model, rng=True)
    run.save("object", model, options=SaveOptions())
    assert [count_files(tmp_path / tag) for tag in ("default", "keyword", "object")] == [2, 2, 1]
    has_rng = [b'"rng"' in (tmp_path / tag / "ranks.json").read_bytes() for tag in ("default", "keyword", "object")]
    assert has_rng == [False, True, True]


def test_options_of_a_load_are_an_object_or_keyword_arguments(tmp_path: Path) -> None:
    rankless.save_checkpoint(tmp_path, "a", state())
    for arguments in ({"options": LoadOptions(strict=False)}, {"strict": False}):
        model = {"w": torch.zeros(1000), "new": torch.zeros(1)}
        with pytest.warns(UserWarning, match="new"):
            rankless.load_checkpoint(tmp_path, None, model, **arguments)
        assert torch.equal(model["w"], state()["w"])
    with pytest.raises(rankless.MismatchError, match="new"):
        rankless.restore(tmp_path, None, model, options=LoadOptions(strict=False), strict=True)


@pytest.mark.parametrize(
    ("mistyped", "nearest"),
    [("stagin", "staging"), ("max_shard_bytes", "max_shard_size"), ("use_async", None), ("overwritten", "overwrite")],
)
def test_a_mistyped_argument_names_the_nearest_one(tmp_path: Path, mistyped: str, nearest: str | None) -> None:
    hint = f"did you mean '{nearest}'" if nearest else "it has adapter_only, async_save, dataloader"
    with pytest.raises(InvalidArgumentError, match=f"save_checkpoint has no argument '{mistyped}': {hint}"):
        rankless.save_checkpoint(tmp_path, "a", state(), **{mistyped: 1})  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("call", [rankless.load_checkpoint, rankless.restore])
def test_a_mistyped_argument_of_a_load_names_the_nearest_one(tmp_path: Path, call: Callable[..., Any]) -> None:
    with pytest.raises(InvalidArgumentError, match="has no argument 'cast_dtypes': did you mean 'cast_dtype'"):
        call(tmp_path, None, state(), cast_dtypes=True)


def test_options_of_loads_are_refused_by_saves(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="options must be SaveOptions"):
        rankless.save_checkpoint(tmp_path, "a", state(), options=LoadOptions())  # type: ignore[arg-type]


def test_a_flag_of_a_save_may_come_from_a_comparison_of_numpy(tmp_path: Path) -> None:
    is_best = np.float64(0.5) < np.float64(1.0)
    for value in (0.0, 1.0):
        saved = {"w": torch.full((4,), value)}
        rankless.save_checkpoint(tmp_path, "best", saved, overwrite=is_best, async_save=is_best).wait()
    loaded = {"w": torch.zeros(4)}
    rankless.restore(tmp_path, "best", loaded)
    assert torch.equal(loaded["w"], torch.ones(4))


@pytest.mark.parametrize("flag", ["resume", "again", "cast_dtype", "verify", "rng"])
def test_an_option_must_be_a_flag_of_python(flag: str, tmp_path: Path) -> None:
    rankless.save_checkpoint(tmp_path, "s", state())
    with pytest.raises(InvalidArgumentError, match=rf"pass bool\({flag}\)"):
        rankless.restore(tmp_path, "s", state(), **{flag: np.bool_(False)})


@pytest.mark.parametrize("flag", ["overwrite", "async_save", "rng", "stats", "adapter_only", "state_dict_hooks"])
def test_what_is_no_flag_is_refused(flag: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=f"{flag} must be True or False; got 'no'"):
        rankless.save_checkpoint(tmp_path, "s", state(), **{flag: "no"})
