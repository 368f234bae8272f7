"""Tests that intact checkpoints that this process cannot read are not called corrupt: no load goes back over them."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from numpy.random import mtrand

import rankless
from rankless.errors import FormatError, MismatchError, RanklessError, UnsupportedValueError
from rankless.state import rng
from tests.helpers.sealed_checkpoints import RANKS, STATE, reseal_checkpoint

KINDS = [np.random.MT19937, np.random.PCG64, np.random.PCG64DXSM, np.random.Philox, np.random.SFC64]


@contextmanager
def numpy_generator(kind: Any) -> Iterator[None]:
    """Let NumPy's global generator be one of this kind in the block."""
    before = mtrand.get_bit_generator()
    mtrand.set_bit_generator(kind(3))
    try:
        yield
    finally:
        mtrand.set_bit_generator(before)


def save(path: Path, step: int, content: Any = None) -> None:
    state = {"w": torch.full((2,), float(step))}
    rankless.save_checkpoint(path, f"step_{step}", state, user_content=content, step=step)


@pytest.mark.parametrize("kind", KINDS)
def test_any_generator_of_numpy_goes_on_in_a_process_that_has_another(tmp_path: Path, kind: Any) -> None:
    with numpy_generator(kind):
        np.random.standard_normal()  # noqa: NPY002 - the global generator
        save(tmp_path, 1)
        expected = np.random.random(5)  # noqa: NPY002
    with numpy_generator(np.random.PCG64 if kind is np.random.MT19937 else np.random.MT19937):
        rankless.restore(tmp_path, model={"w": torch.zeros(2)}, rng=True)
        assert type(mtrand.get_bit_generator()) is kind
        assert np.random.random(5).tolist() == expected.tolist()  # noqa: NPY002


def test_a_generator_without_legacy_seeding_gets_another_seed_on_each_rank() -> None:
    drawn = set()
    for text in ("rank 0", "rank 1", "rank 0"):
        with numpy_generator(np.random.PCG64):
            rng.seed_generators(rng.NUMPY, text)
            assert type(mtrand.get_bit_generator()) is np.random.PCG64
            drawn.add(np.random.random())  # noqa: NPY002
    assert len(drawn) == 2


def replace_in(name: str, old: str, new: str) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        text = (folder / name).read_text()
        assert re.search(old, text)
        (folder / name).write_text(re.sub(old, new, text))
        reseal_checkpoint(folder)

    return edit


@pytest.mark.parametrize(
    ("edit", "error"),
    [
        (replace_in(RANKS, '"MT19937"', '"Future"'), MismatchError),
        (replace_in(RANKS, '"numpy"', '"other"'), MismatchError),
        (replace_in(STATE, "tuple", "future"), FormatError),
        (replace_in(STATE, '"float16"', '"float12"'), FormatError),
        (replace_in(STATE, '"cpu"', '"future"'), FormatError),
        (replace_in(STATE, '"complex64"', '"complex99"'), FormatError),
    ],
    ids=["generator", "missing generator", "type of value", "dtype", "device", "dtype of NumPy"],
)
def test_no_load_goes_back_over_what_another_version_has_saved(
    tmp_path: Path, edit: Callable[[Path], None], error: type[RanklessError]
) -> None:
    content = [(1, 2), torch.float16, torch.device("cpu"), np.complex64(1)]
    save(tmp_path, 1, content)
    save(tmp_path, 2, content)
    edit(tmp_path / "step_2")
    with pytest.raises(error, match="step_2"):
        rankless.restore(tmp_path, model={"w": torch.zeros(2)}, rng=True)
    save(tmp_path, 3)
    assert [info.tag for info in rankless.list_checkpoints(tmp_path)] == ["step_1", "step_2", "step_3"]


@contextmanager
def integer_digits(limit: int) -> Iterator[None]:
    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(limit)
    try:
        yield
    finally:
        sys.set_int_max_str_digits(before)


@pytest.mark.parametrize("number", [-(10**639), 10**640, -(7**3500), 2**10_000 - 1])
def test_integers_are_read_whatever_limit_of_digits_a_process_has(tmp_path: Path, number: int) -> None:
    save(tmp_path, 1, {"n": number})
    with integer_digits(640):
        assert rankless.restore(tmp_path).user_content == {"n": number}


def test_a_save_names_an_integer_that_this_process_may_not_write(tmp_path: Path) -> None:
    with integer_digits(640), pytest.raises(UnsupportedValueError, match="n: an integer of more than 2122 bits"):
        save(tmp_path, 1, {"n": 10**640})


@contextmanager
def shallow_calls() -> Iterator[None]:
    """Let a process that is near its limit of nested calls decode values."""
    from rankless.ondisk import values

    with mock.patch.object(values, "_decode_any", side_effect=RecursionError):
        yield


@contextmanager
def shallow_json() -> Iterator[None]:
    from rankless.ondisk import strict_json

    with (
        mock.patch.object(strict_json, "_parse_canonical", return_value=None),
        mock.patch("rankless.ondisk.strict_json.json.loads", side_effect=RecursionError),
    ):
        yield


@pytest.mark.parametrize("limit", [shallow_calls, shallow_json])
def test_a_limit_of_nested_calls_is_none_of_the_file(tmp_path: Path, limit: Any) -> None:
    save(tmp_path, 1)
    with limit(), pytest.raises(MismatchError, match=r"call sys.setrecursionlimit\(\)"):
        rankless.restore(tmp_path, "step_1", model={"w": torch.zeros(2)})


def test_short_memory_is_none_of_the_file(tmp_path: Path) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2, {"t": torch.ones(100_000)})
    with (
        mock.patch.object(torch, "empty_permuted", side_effect=RuntimeError("can't allocate memory")),
        pytest.raises(MemoryError, match="no memory for a tensor of F32"),
    ):
        rankless.restore(tmp_path)
    assert rankless.restore(tmp_path).tag == "step_2"
