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
import struct
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
from hypothesis.extra import numpy as st_numpy
from torch import nn

import holdfast
from holdfast.errors import CorruptCheckpointError, UnsupportedValueError
from holdfast.ondisk import values
from holdfast.ondisk.files import TensorInfo
from holdfast.state.arrays import ArrayDecoder, ArrayEncoder
from holdfast.state.tensors import DTYPES, NAMES

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


def fingerprint(value: Any) -> Any:
    """Equal only for values of equal types and equal bits; sets without an order, all else with it."""
    kind = type(value)
    return (kind.__name__, _content(kind, value))


def _content(kind: type, value: Any) -> Any:  # noqa: C901, PLR0911 - one line for each kind of type
    if kind is float:
        return "nan" if math.isnan(value) else struct.pack("d", value)
    if kind is complex:
        return [fingerprint(value.real), fingerprint(value.imag)]
    if kind in {list, tuple, torch.Size}:
        return [fingerprint(item) for item in value]
    if kind in {set, frozenset}:
        return sorted(map(repr, map(fingerprint, value)))
    if kind in {dict, collections.OrderedDict, collections.Counter}:
        return [(fingerprint(key), fingerprint(item)) for key, item in value.items()]
    if kind is collections.deque:
        return value.maxlen, [fingerprint(item) for item in value]
    if kind is Namespace:
        return fingerprint(vars(value))
    if kind in {dt.datetime, dt.time}:
        return repr(value), value.fold
    if isinstance(value, np.ndarray | np.generic):
        return value.dtype.name, value.shape, value.tobytes()
    if kind is torch.Tensor:
        return value.dtype, value.shape, value.contiguous().view(-1).view(torch.uint8).tolist()
    return repr(value)


text = st.text() | st.text(st.characters()) | st.text("\ud83d\ude00\udcff$a", max_size=4)
zones = (
    st.none() | st.just(dt.UTC) | st.builds(dt.timezone, st.timedeltas(dt.timedelta(hours=-23), dt.timedelta(hours=23)))
)
folds = st.integers(0, 1)
plain = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**9_999), 2**9_999)
    | st.floats()
    | st.complex_numbers()
    | text
    | st.binary(max_size=20)
)
times = (
    st.dates()
    | st.timedeltas()
    | st.builds(lambda one, zone, fold: one.replace(tzinfo=zone, fold=fold), st.datetimes(), zones, folds)
    | st.builds(lambda one, zone, fold: one.replace(tzinfo=zone, fold=fold), st.times(), zones, folds)
    | zones
)
words = st.text("abc./\\ é", max_size=6)


def windows_path(word: str) -> pathlib.PureWindowsPath:
    """Written once: of some words, such as ``//.//``, Python makes a path whose text makes another, equal one."""
    return pathlib.PureWindowsPath(str(pathlib.PureWindowsPath(word)))


paths = st.builds(pathlib.Path, words) | st.builds(pathlib.PurePosixPath, words) | st.builds(windows_path, words)
numpy_dtypes = st.sampled_from([np.dtype(name).type for name in (*"?bhilBHILefdF",)])
scalars = (numpy_dtypes | st.just(np.complex128)).flatmap(
    lambda kind: st_numpy.arrays(kind, ()).map(lambda array: array[()])
)
torch_dtypes = st.sampled_from(
    sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
)
devices = st.sampled_from(["cpu", "cuda", "cuda:7", "meta", "mps", "xpu:1"]).map(torch.device)
sizes = st.lists(st.integers(0, 2**40), max_size=4).map(torch.Size)
hashable = st.recursive(
    plain | times | paths | st.uuids() | scalars | torch_dtypes | devices | sizes,
    lambda inner: st.lists(inner, max_size=3).map(tuple) | st.frozensets(inner, max_size=3),
    max_leaves=5,
)
arrays = numpy_dtypes.flatmap(
    lambda kind: st_numpy.arrays(kind, st_numpy.array_shapes(min_dims=0, min_side=0, max_side=3))
)
tensors = st.builds(
    lambda dtype, shape, seed: (
        torch.randint(
            0,
            2 if dtype is torch.bool else 256,
            (*shape, dtype.itemsize),
            dtype=torch.uint8,
            generator=torch.Generator().manual_seed(seed),
        )
        .view(dtype)
        .reshape(shape)
    ),
    st.sampled_from(list(DTYPES.values())),
    st.lists(st.integers(0, 3), max_size=3),
    st.integers(0, 100),
)
whole = st.integers(-100, 100)
steps = st.integers(-5, 5).filter(bool)
leaves = (
    hashable
    | arrays
    | tensors
    | st.binary(max_size=9).map(bytearray)
    | st.builds(range, whole, whole, steps)
    | st.builds(slice, st.none() | whole, st.none() | whole, st.none() | whole)
)


def namespace(table: dict[str, Any]) -> Namespace:
    """With attributes of any name, ``__dict__`` too."""
    space = Namespace()
    vars(space).update(table)
    return space


def branches(inner: st.SearchStrategy) -> st.SearchStrategy:
    tables = st.dictionaries(hashable, inner, max_size=3)
    named = st.dictionaries(text | st.sampled_from(["$tuple", "$", "__metadata__"]), inner, max_size=3)
    lists = st.lists(inner, max_size=3)
    return (
        lists
        | lists.map(tuple)
        | st.sets(hashable, max_size=3)
        | tables
        | named
        | tables.map(collections.OrderedDict)
        | st.dictionaries(hashable, st.integers() | st.floats(), max_size=3).map(collections.Counter)
        | st.builds(collections.deque, lists, st.none() | st.integers(3, 9))
        | named.map(namespace)
    )


trees = st.dictionaries(text, st.recursive(leaves, branches, max_leaves=12), max_size=4)


@given(trees)
@settings(max_examples=250)
def test_every_tree_of_plain_values_comes_back_as_it_was(tree: dict[str, Any]) -> None:
    assert fingerprint(there_and_back(tree)) == fingerprint(tree)


@given(trees)
@settings(max_examples=30)
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
    assert vars(there_and_back({"it": namespace({1: "one"})})["it"]) == {1: "one"}


def test_an_empty_tree_is_an_empty_object() -> None:
    assert values.dump_values({}, ArrayEncoder()) == b"{}"


def test_the_same_set_has_the_same_bytes_in_every_process() -> None:
    """Hashes of texts differ from process to process, and with them the order of a set."""
    program = (
        "from holdfast.ondisk import values\n"
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
    one = torch.zeros(1)
    values.dump_values({"a": {"b": one, 1: [one, (one,)]}, "a.b": one, "\ud800": one}, out, "7/")
    assert list(out.tensors) == ["7/a.b", "7/a.1.0", "7/a.1.1.0", "7/a.b#2", "7/\\ud800"]


def test_a_tensor_is_stored_as_it_is_seen() -> None:
    base = torch.randn(2, 3, dtype=torch.complex64)
    found = there_and_back({"conj": base.conj(), "transposed": base.T, "parameter": torch.nn.Parameter(base)})
    assert torch.equal(found["conj"], base.conj().resolve_conj())
    assert torch.equal(found["transposed"], base.T)
    assert torch.equal(found["parameter"], base)


def test_a_parameter_comes_back_as_one_and_keeps_what_it_says_of_gradients(tmp_path: pathlib.Path) -> None:
    frozen = nn.Parameter(torch.ones(2, dtype=torch.int8), requires_grad=False)
    plain = torch.zeros(1)
    content = {"w": nn.Parameter(torch.arange(3.0)), "frozen": frozen, "x@parameter": plain, "x": nn.Parameter(plain)}
    holdfast.save_checkpoint(tmp_path, "s", user_content=content, per_rank_content=[content["w"]])
    found = holdfast.restore(tmp_path)
    kinds = {name: (type(one), one.requires_grad) for name, one in found.user_content.items()}
    assert kinds == {
        "w": (nn.Parameter, True),
        "frozen": (nn.Parameter, False),
        "x@parameter": (torch.Tensor, False),
        "x": (nn.Parameter, True),
    }
    assert all(torch.equal(one, content[name]) for name, one in found.user_content.items())
    assert type(found.per_rank_content[0]) is nn.Parameter
    opened = holdfast.open(tmp_path).values["user_content"]
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


FORGED = [
    '{"$unknown":1}',
    '{"$":1}',
    '{"$tuple":[],"$set":[]}',
    '{"$tuple":[],"a":1}',
    '{"a":1,"$tuple":[]}',
    '{"$tuple":{}}',
    '{"$tuple":"ab"}',
    '{"$set":[[1]]}',
    '{"$set":[{}]}',
    '{"$frozenset":[{"$set":[]}]}',
    '{"$set":"abc"}',
    '{"$dict":[[[1],2]]}',
    '{"$dict":[[1]]}',
    '{"$dict":[[1,2,3]]}',
    '{"$dict":[1]}',
    '{"$dict":{"a":1}}',
    '{"$dict":[[1,2],[1,3]]}',
    '{"$ordereddict":[["a",1],["a",1]]}',
    '{"$counter":[[1,2],[true,3]]}',
    '{"$ordereddict":[[{},1]]}',
    '{"$counter":[["a"]]}',
    '{"$counter":{"a":1}}',
    '{"$float":"nonsense"}',
    '{"$float":"1.5"}',
    '{"$float":1.5}',
    '{"$float":null}',
    '{"$bytes":"*"}',
    '{"$bytes":[1]}',
    '{"$bytes":"AAA"}',
    '{"$bytearray":"é"}',
    '{"$bytearray":9999999999999}',
    '{"$str":"AAA"}',
    '{"$str":"/w=="}',
    '{"$complex":[1]}',
    '{"$complex":[1,2,3]}',
    '{"$complex":["1","2"]}',
    '{"$complex":"12"}',
    '{"$range":[]}',
    '{"$range":[1,2,0]}',
    '{"$range":[1,2,3,4]}',
    '{"$range":[1.5]}',
    '{"$range":10}',
    '{"$slice":[1,2]}',
    '{"$datetime":"2024-01-01"}',
    '{"$datetime":["2024-13-01T00:00:00",null,0]}',
    '{"$datetime":["2024-01-01T00:00:00",null,2]}',
    '{"$datetime":["2024-01-01T00:00:00","UTC",0]}',
    '{"$time":["25:00:00",null,0]}',
    '{"$timezone":[1]}',
    '{"$timezone":[]}',
    '{"$timezone":[{"$timedelta":[2,0,0]}]}',
    '{"$date":"tomorrow"}',
    '{"$date":5}',
    '{"$timedelta":[1,2]}',
    '{"$timedelta":["1",2,3]}',
    '{"$timedelta":[999999999999,0,0]}',
    '{"$timedelta":[1e308,0,0]}',
    '{"$uuid":"1"}',
    '{"$uuid":1}',
    '{"$path":1}',
    '{"$path":["/"]}',
    '{"$namespace":[]}',
    '{"$deque":[]}',
    '{"$deque":[[1],-1]}',
    '{"$deque":[[1],"2"]}',
    '{"$deque":[[1],99999999999999999999]}',
    '{"$deque":5}',
    '{"$numpy":["object","00"]}',
    '{"$numpy":["O","0000000000000000"]}',
    '{"$numpy":["<U1","41000000"]}',
    '{"$numpy":["V8","0000000000000000"]}',
    '{"$numpy":["int32",""]}',
    '{"$numpy":["int32","0000"]}',
    '{"$numpy":["int32","0000000000000000"]}',
    '{"$numpy":["int32","nothex!!"]}',
    '{"$numpy":["int32",7]}',
    '{"$numpy":[["int32"],"00000000"]}',
    '{"$numpy":"int32"}',
    '{"$numpy":[]}',
    '{"$numpy":{}}',
    '{"$dtype":"float33"}',
    '{"$dtype":"nn"}',
    '{"$dtype":["float32"]}',
    '{"$dtype":null}',
    '{"$device":"toaster"}',
    '{"$device":"cpu:x"}',
    '{"$device":3}',
    '{"$device":null}',
    '{"$device":["cpu"]}',
    '{"$size":["a"]}',
    '{"$size":"12"}',
    '{"$size":5}',
    '{"$size":{"a":1}}',
    '{"$size":[1.5]}',
    '{"$tensor":"missing"}',
    '{"$tensor":["t"]}',
    '{"$tensor":{}}',
    '{"$tensor":null}',
    '{"$array":"missing"}',
    '{"$array":"brain"}',
    '{"$set":[{"$array":"t"}]}',
    '{"a":1,"a":2}',
    '{"$tuple":[1],"$tuple":[2]}',
    "NaN",
    "Infinity",
    "1e999",
    "[" + "9" * 5_000 + "]",
    '"\\ud800"',
    "[1,]",
    "",
    "[" * 100_000 + "]" * 100_000,
    '{"a":' * 100_000 + "1" + "}" * 100_000,
    '{"$tuple":[' * 100_000 + "]}" * 100_000,
    "[" * 900 + "]" * 900,
    '{"$tuple":[' * 400 + "]}" * 400,
]


@pytest.mark.parametrize("forged", FORGED, ids=lambda text: text[:40] if len(text) < 400 else f"{text[:11]}…")
def test_values_that_holdfast_could_not_have_written_are_refused(forged: str) -> None:
    infos = {"t": TensorInfo("F32", (2,)), "brain": TensorInfo("BF16", (2,))}
    for raw in (f'{{"a":{forged}}}', forged):
        with pytest.raises(CorruptCheckpointError, match=FILE):
            values.load_values(raw.encode(), ArrayDecoder(infos), FILE)


def test_a_huge_range_is_only_its_ends() -> None:
    assert values.load_values(b'{"$range":[0,1%s]}' % (b"0" * 300), ArrayDecoder({}), FILE) == range(10**300)


def test_a_tag_inside_of_a_name_is_no_tag() -> None:
    assert there_and_back({"a$tuple": [1]}) == {"a$tuple": [1]}


@given(st.binary(max_size=60))
def test_noise_is_refused(noise: bytes) -> None:
    try:
        found = values.load_values(noise, ArrayDecoder({}), FILE)
    except CorruptCheckpointError as error:
        assert FILE in str(error)
    else:
        assert fingerprint(found) == fingerprint(json.loads(noise))


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
@settings(max_examples=300)
def test_forged_json_is_refused_by_name_or_is_some_value(tree: Any) -> None:
    infos = {"": TensorInfo("F32", (2,))}
    try:
        found = values.load_values(json.dumps(tree).encode(), ArrayDecoder(infos), FILE)
    except CorruptCheckpointError as error:
        assert FILE in str(error)
    else:
        assert isinstance(fingerprint(found), tuple)
