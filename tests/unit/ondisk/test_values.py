"""Tests that trees of plain values are restored to the type and the last bit, and others are refused by name."""

from __future__ import annotations

import collections
import datetime as dt
import enum
import functools
import json
import math
import os
import pathlib
import subprocess
import sys
from argparse import Namespace
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import rankless
from rankless.errors import CorruptCheckpointError, FormatError, UnsupportedValueError
from rankless.ondisk import values
from rankless.ondisk.data_files import TensorInfo
from rankless.state.array_decoder import ArrayDecoder
from rankless.state.array_encoder import ArrayEncoder
from rankless.state.tensor_views import NAMES
from tests.helpers.examples import examples
from tests.helpers.fingerprint import fingerprint
from tests.helpers.forged_values import FORGED_VALUES, UNKNOWN_VALUES
from tests.helpers.value_strategies import make_namespace, trees

FILE = "step_1/state.json"


def there_and_back(tree: dict[str, Any]) -> Any:
    """A tree through JSON and back, its tensors through their bytes."""
    out = ArrayEncoder()
    raw = values.dump_values(tree, out)
    json.loads(raw.decode("ascii"), parse_constant=pytest.fail)
    back = ArrayDecoder({name: TensorInfo(NAMES[t.dtype], tuple(t.shape)) for name, t in out.tensors.items()})
    result = values.load_values(raw, back, FILE)
    for name, tensor in back.tensors.items():
        tensor.copy_(out.tensors[name])
    return result


@given(trees)
@settings(max_examples=examples(250))
def test_every_tree_of_plain_values_comes_back_as_it_was(tree: dict[str, Any]) -> None:
    assert fingerprint(there_and_back(tree)) == fingerprint(tree)


@given(trees)
@settings(max_examples=examples(30))
def test_equal_trees_have_equal_bytes(tree: dict[str, Any]) -> None:
    assert values.dump_values(tree, ArrayEncoder()) == values.dump_values(tree, ArrayEncoder())


@pytest.mark.parametrize(
    "value",
    [
        -0.0,
        math.nan,
        -math.inf,
        5e-324,
        complex(-0.0, math.nan),
        2**10_000 - 1,
        "\ud83d\ude00",
        "\udcff",
        {"\ud83d": 1, "\ud83d\ude00": 2, "\U0001f600": 3},
        {True: 1, 2: {}, None: []},
        {"$tuple": [1], "a": 2},
        {"a": 1, "$set": [2]},
        {1: 2, "1": 3, (1, 2): 4, frozenset({"a"}): 5},
        dt.datetime(2024, 10, 27, 2, 30, fold=1),  # noqa: DTZ001 - a naive one is the case
        dt.time(2, 30, fold=1, tzinfo=dt.UTC),
        dt.datetime(1, 1, 1, tzinfo=dt.timezone(dt.timedelta(hours=1), "CET")),
        dt.datetime(2026, 2, 3, 4, 5, 6, 7).astimezone(),
        dt.timezone(dt.timedelta(microseconds=-1)),
        pathlib.PureWindowsPath("C:\\x"),
        pathlib.PurePosixPath("/x"),
        pathlib.Path("/x"),
        Namespace(**{"$tuple": 1, "a b": Namespace()}),
        collections.deque([1, 2], maxlen=2),
        collections.Counter({"a": 2, None: -1, 1.5: 0.5}),
        np.bool_(1),
        np.float32("nan"),
        np.array([], np.uint16),
        np.array(3, np.complex64),
        np.arange(6).reshape(2, 3).T,
        torch.Size([0, 2**40]),
        torch.device("cuda:3"),
        torch.float8_e5m2,
        UUID(int=7),
        range(10**30),
        slice(None, -1),
    ],
    ids=repr,
)
def test_a_value_comes_back_to_its_type_and_last_bit(value: Any) -> None:
    assert fingerprint(there_and_back({"it": value})) == fingerprint({"it": value})


def test_attributes_of_a_namespace_that_are_no_text_come_back() -> None:
    assert vars(there_and_back({"it": make_namespace({1: "one"})})["it"]) == {1: "one"}


def test_an_empty_tree_is_an_empty_object() -> None:
    assert values.dump_values({}, ArrayEncoder()) == b"{}"


def test_the_same_set_has_the_same_bytes_in_every_process() -> None:
    """Hashes of texts differ from process to process, and with them the order of a set."""
    program = (
        "from rankless.ondisk import values\n"
        "class Codec:\n"
        "    def encode(self, value, key): return NotImplemented\n"
        "words = [f'word{i}' for i in range(9)]\n"
        "tree = {'a': set(words), 'b': {frozenset(words), frozenset(words[:5])}, 'c': {frozenset({1, 'x', None})}}\n"
        "print(values.dump_values(tree, Codec()).hex())\n"
    )
    printed = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": str(seed), "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            check=True,
        ).stdout
        for seed in range(1, 5)
    }
    assert len(printed) == 1


def test_tensors_are_named_by_their_place_and_no_name_comes_twice() -> None:
    out = ArrayEncoder()
    item = torch.zeros(1)
    values.dump_values({"a": {"b": item, 1: [item, (item,)]}, "a.b": item, "\ud800": item}, out, "7/")
    assert list(out.tensors) == ["7/a.b", "7/a.1.0", "7/a.1.1.0", "7/a.b#2", "7/\\ud800"]


def test_a_tensor_is_stored_as_it_is_seen() -> None:
    base = torch.randn(2, 3, dtype=torch.complex64)
    actual = there_and_back({"conj": base.conj(), "transposed": base.T, "parameter": torch.nn.Parameter(base)})
    assert torch.equal(actual["conj"], base.conj().resolve_conj())
    assert torch.equal(actual["transposed"], base.T)
    assert torch.equal(actual["parameter"], base)


def test_a_parameter_comes_back_as_one_and_keeps_what_it_says_of_gradients(tmp_path: pathlib.Path) -> None:
    frozen = nn.Parameter(torch.ones(2, dtype=torch.int8), requires_grad=False)
    plain = torch.zeros(1)
    content = {"w": nn.Parameter(torch.arange(3.0)), "frozen": frozen, "x@parameter": plain, "x": nn.Parameter(plain)}
    rankless.save_checkpoint(tmp_path, "s", user_content=content, per_rank_content=[content["w"]])
    restored = rankless.restore(tmp_path)
    kinds = {name: (type(value), value.requires_grad) for name, value in restored.user_content.items()}
    assert kinds == {
        "w": (nn.Parameter, True),
        "frozen": (nn.Parameter, False),
        "x@parameter": (torch.Tensor, False),
        "x": (nn.Parameter, True),
    }
    assert all(torch.equal(value, content[name]) for name, value in restored.user_content.items())
    assert type(restored.per_rank_content[0]) is nn.Parameter
    opened = rankless.open(tmp_path).values["user_content"]
    assert type(opened["w"]) is nn.Parameter
    assert torch.equal(opened["w"], content["w"])


class Colour(enum.IntEnum):
    RED = 1


class Words(str):
    __slots__ = ()


Point = collections.namedtuple("Point", "x y")  # noqa: PYI024 - what users have


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (object(), "builtins.object"),
        (lambda: 0, "function"),
        (functools.partial(print), "functools.partial"),
        (Colour.RED, "Colour"),
        (Words("x"), "Words"),
        (Point(1, 2), "Point"),
        (collections.defaultdict(list), "defaultdict"),
        (dt.datetime(2024, 1, 1, tzinfo=ZoneInfo("Europe/Berlin")), "ZoneInfo"),
        (np.array(["text"]), "dtype"),
        (np.array([object()]), "object"),
        (np.zeros(2, np.complex128), "complex128"),
        (np.zeros(2, ">f4"), ">f4"),
        (np.zeros(2, [("a", "f4")]), "dtype"),
        (np.datetime64("2024-01-01"), "datetime64"),
        (np.longdouble(1), "longdouble"),
        (np.ma.zeros(2), "MaskedArray"),
        (torch.zeros(2, dtype=torch.complex128), "complex128"),
        (torch.zeros(2, device="meta"), "meta"),
        (torch.eye(2).to_sparse(), "sparse"),
        (torch.Generator(), "Generator"),
        (2**10_000, "10000 bits"),
        (10**5_000, "10000 bits"),
        ({10**5_000: 1}, "10000 bits"),
        ({(10**5_000,): 1}, "10000 bits"),
        ({10**5_000}, "10000 bits"),
        ({10**5_000: object()}, "object"),
        ({"\ud800": object()}, "object"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_come_back_is_refused_by_its_name(value: Any, named: str) -> None:
    with pytest.raises(UnsupportedValueError, match=named) as caught:
        values.dump_values({"top": [0, {"deep": value}]}, ArrayEncoder())
    assert "top[1].deep" in str(caught.value)
    assert str(caught.value).encode()


def test_all_that_cannot_be_stored_is_named_at_once() -> None:
    tree = {"a": object(), "b": {"c": [object(), 1]}, "many": [object() for _ in range(30)]}
    with pytest.raises(UnsupportedValueError) as caught:
        values.dump_values(tree, ArrayEncoder())
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("32 value(s)")
    assert [line.split(":")[0].strip() for line in lines[1:4]] == ["a", "b.c[0]", "many[0]"]
    assert "  and 12 more" in lines


NESTINGS = {
    "list": lambda inner: [inner],
    "tuple": lambda inner: (inner,),
    "dict": lambda inner: {"a": inner},
    "dict of numbers": lambda inner: {1: inner},
    "key": lambda inner: {(inner,): 1},
    "ordered dict": lambda inner: collections.OrderedDict(a=inner),
    "deque": lambda inner: collections.deque([inner]),
    "namespace": lambda inner: Namespace(a=inner),
    "namespace of odd names": lambda inner: Namespace(**{"$": inner}),
    "set": lambda inner: frozenset([inner]),
}


def nested(kind: str, levels: int) -> Any:
    inner: Any = 1
    for _ in range(levels):
        inner = NESTINGS[kind](inner)
    return inner


@pytest.mark.parametrize("kind", sorted(set(NESTINGS) - {"key"}))
def test_a_deep_tree_comes_back_or_is_refused_when_it_is_saved(kind: str) -> None:
    deepest = 0
    for levels in (10, values.MAX_DEPTH // 2, values.MAX_DEPTH - 2, values.MAX_DEPTH + 2, 3 * values.MAX_DEPTH):
        tree = {"a": nested(kind, levels)}
        try:
            raw = values.dump_values(tree, ArrayEncoder())
        except UnsupportedValueError as error:
            assert "deeper" in str(error)
            continue
        deepest = levels
        assert values.load_values(raw, ArrayDecoder({}), FILE) == tree
    assert values.MAX_DEPTH // 2 <= deepest < 3 * values.MAX_DEPTH


def test_keys_nested_deep_come_back() -> None:
    tree = {"a": nested("list", 1), "b": {(((1, 2),),): 1}}
    assert there_and_back(tree) == tree


def test_a_tree_that_holds_itself_is_refused() -> None:
    for loop in ([], {}):
        tree = {"a": loop}
        loop.append(tree) if isinstance(loop, list) else loop.update(tree=tree)
        with pytest.raises(UnsupportedValueError, match="inside itself"):
            values.dump_values(tree, ArrayEncoder())


@pytest.mark.usefixtures("without_garbage")
@pytest.mark.parametrize("forged", FORGED_VALUES, ids=lambda text: text[:40] if len(text) < 400 else f"{text[:11]}…")
def test_values_that_rankless_could_not_have_written_are_refused(forged: str) -> None:
    infos = {"t": TensorInfo("F32", (2,)), "brain": TensorInfo("BF16", (2,))}
    for raw in (f'{{"a":{forged}}}', forged):
        with pytest.raises(CorruptCheckpointError, match=FILE):
            values.load_values(raw.encode(), ArrayDecoder(infos), FILE)


@pytest.mark.parametrize("value", UNKNOWN_VALUES)
def test_values_of_a_newer_version_are_not_called_corrupt(value: str) -> None:
    with pytest.raises(FormatError, match=FILE):
        values.load_values(f'{{"a":{value}}}'.encode(), ArrayDecoder({}), FILE)


def test_a_huge_range_is_only_its_ends() -> None:
    assert values.load_values(b'{"$range":[0,1%s]}' % (b"0" * 300), ArrayDecoder({}), FILE) == range(10**300)


def test_a_tag_inside_of_a_name_is_no_tag() -> None:
    assert there_and_back({"a$tuple": [1]}) == {"a$tuple": [1]}


@given(st.binary(max_size=60))
def test_noise_is_refused(noise: bytes) -> None:
    try:
        actual = values.load_values(noise, ArrayDecoder({}), FILE)
    except CorruptCheckpointError as error:
        assert FILE in str(error)
    else:
        assert fingerprint(actual) == fingerprint(json.loads(noise))


tags = st.sampled_from(sorted({*values._DECODERS, "$numpy", "$dtype", "$device", "$size", "$tensor", "$array", "$x"}))
junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=3), inner, max_size=2)
        | st.builds(lambda tag, payload: {tag: payload}, tags, inner)
    ),
    max_leaves=8,
)


@given(junk)
@settings(max_examples=examples(300))
def test_forged_json_is_refused_by_name_or_is_some_value(tree: Any) -> None:
    infos = {"": TensorInfo("F32", (2,))}
    try:
        actual = values.load_values(json.dumps(tree).encode(), ArrayDecoder(infos), FILE)
    except (CorruptCheckpointError, FormatError) as error:
        assert FILE in str(error)
        assert isinstance(error, CorruptCheckpointError) or "is unknown" in str(error) or "this version" in str(error)
    else:
        assert isinstance(fingerprint(actual), tuple)
