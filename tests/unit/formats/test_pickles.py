"""Tests that pickles are read as data: plain values are restored, and all other names are refused, not run."""

from __future__ import annotations

import collections
import datetime as dt
import pathlib
import pickle
import pickletools
import struct
import subprocess
import sys
import uuid
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rankless.errors import CorruptCheckpointError, RanklessError, UnsafePickleError
from rankless.formats.pickles.builtin_types import PLAIN
from rankless.formats.pickles.unpickle import unpickle
from tests.helpers.bounded_reads import limit_memory
from tests.helpers.cost import limit_cost
from tests.helpers.examples import examples
from tests.helpers.fingerprint import fingerprint
from tests.helpers.unsafe_pickles import UNSAFE_OBJECTS
from tests.helpers.value_strategies import plain_values, texts, time_values

WHAT = "some.pt"

PROTOCOLS = range(2, 6)


def read(raw: bytes) -> Any:
    return unpickle(raw, PLAIN, WHAT)


paths = st.builds(pathlib.Path, texts) | st.builds(pathlib.PurePosixPath, texts)
leaves = plain_values | time_values | paths | st.uuids() | st.binary(max_size=9).map(bytearray)
#: Integers as large as others are no keys of a checkpoint, and a way to make a dict slow.
keys = plain_values.filter(lambda key: not isinstance(key, int) or abs(key) < 2**64)
trees = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.sets(keys, max_size=3)
        | st.frozensets(keys, max_size=3)
        | st.dictionaries(keys, inner, max_size=3)
        | st.dictionaries(texts, inner, max_size=3).map(collections.OrderedDict)
        | st.builds(collections.deque, st.lists(inner, max_size=3), st.none() | st.integers(3, 9))
        | st.dictionaries(st.text("ab", min_size=1), inner, max_size=2).map(lambda names: Namespace(**names))
    ),
    max_leaves=12,
)


def without_fold(tree: Any) -> Any:
    """Protocols before 4 leave out which of two equal hours it is."""
    return tree.replace(fold=0) if isinstance(tree, dt.datetime | dt.time) else tree


@given(trees, st.sampled_from([4, 5]))
@settings(max_examples=examples(300))
def test_plain_values_come_back_as_they_were(tree: Any, protocol: int) -> None:
    raw = pickle.dumps(tree, protocol)
    assert fingerprint(read(raw)) == fingerprint(pickle.loads(raw))  # noqa: S301


@given(leaves, st.sampled_from([2, 3]))
def test_also_from_the_protocol_of_torch(leaf: Any, protocol: int) -> None:
    leaf = without_fold(leaf)
    raw = pickle.dumps([leaf, {"again": leaf}, (leaf,), {1, 2}], protocol)
    assert fingerprint(read(raw)) == fingerprint(pickle.loads(raw))  # noqa: S301


def test_what_is_shared_stays_shared_and_loops_stay_loops() -> None:
    shared: list[Any] = [1]
    shared.append(shared)
    actual = read(pickle.dumps({"a": shared, "b": shared}, 4))
    assert actual["a"] is actual["b"] is actual["a"][1]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_default_dict_is_a_dict(protocol: int) -> None:
    table = collections.defaultdict(list, {"a": [1]})
    actual = read(pickle.dumps(table, protocol))
    assert type(actual) is dict
    assert actual == {"a": [1]}


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("kind", UNSAFE_OBJECTS)
def test_whatever_else_is_named_is_refused_by_name_and_not_run(
    kind: str, protocol: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    raw = pickle.dumps({"weights": [1.0], "evil": UNSAFE_OBJECTS[kind]}, protocol)
    with pytest.raises(UnsafePickleError, match=WHAT) as caught:
        read(raw)
    name = UNSAFE_OBJECTS[kind].call[0].__qualname__.split(".")[0]
    assert name in str(caught.value) or "getattr" in str(caught.value)  # which early protocols have methods by
    assert not list(tmp_path.iterdir())


def test_names_that_lead_to_other_names_are_refused() -> None:
    for name in (b"cos\nsystem\n", b"cbuiltins\n__import__\n", b"ccollections\nabc.sys.modules\n", b"cdatetime\nsys\n"):
        with pytest.raises(UnsafePickleError):
            read(name + b"(tR.")


def test_what_may_be_named_cannot_be_changed_by_a_pickle() -> None:
    """Python's own would set attributes on it, or items in it."""
    for name in ("collections.OrderedDict", "builtins.set", "datetime.datetime"):
        module, _, kind = name.rpartition(".")
        for tail in (b"}(X\x01\x00\x00\x00xK\x01ub.", b"(X\x01\x00\x00\x00xK\x01u.", b"K\x01a."):
            with pytest.raises(CorruptCheckpointError):
                read(b"\x80\x02c%s\n%s\n" % (module.encode(), kind.encode()) + tail)
    assert not hasattr(collections.OrderedDict, "x")


LARGE = b"\xff" * 4

#: Few bytes that would cost a lot.
BOMBS = {
    "a text": b"X" + LARGE + b".",
    "bytes": b"\x8e" + b"\xff" * 7 + b"\x7f.",
    "a bytearray": b"\x96" + b"\xff" * 7 + b"\x7f.",
    "an integer": b"\x8b" + struct.pack("<I", 2**30) + b"\x01" * 100 + b".",
    "a bytearray by its size": b"c__builtin__\nbytearray\nJ\xff\xff\xff\x7f\x85R.",
    "bytes by their size": b"c__builtin__\nbytes\nJ\xff\xff\xff\x7f\x85R.",
    "a set of a range": b"c__builtin__\nset\nc__builtin__\nxrange\nK\x00J\xff\xff\xff\x7fK\x01\x87R\x85R.",
    "a dict of a range": b"ccollections\nOrderedDict\nc__builtin__\nxrange\nK\x00J\xff\xff\xff\x7fK\x01\x87R\x85R.",
    "a deep key": b"}" + b")" + b"\x85" * 1_000_000 + b"Ns.",
    "a deep element of a set": b"\x8f(" + b")" + b"\x85" * 1_000_000 + b"\x90.",
    "copies of copies": pickle.dumps(list(range(100_000)), 2)[:-1]
    + b"q\x010"
    + b"("
    + b"c__builtin__\nset\nh\x01\x85R" * 10_000
    + b"l.",
    "keys with equal hashes": pickle.dumps([k * (2**61 - 1) for k in range(50_000)], 2)[:-1]
    + b"q\x010c__builtin__\nset\nh\x01\x85R.",
}


@pytest.mark.parametrize("kind", BOMBS)
@pytest.mark.timeout(300)
def test_few_bytes_cannot_cost_much(kind: str) -> None:
    with limit_cost(memory=False), pytest.raises(CorruptCheckpointError, match=WHAT):
        read(BOMBS[kind])


def test_what_would_cost_others_much_is_no_harm() -> None:
    with limit_memory():
        assert read(b"\x80\x02Nr" + LARGE + b".") is None
        assert read(b"\x80\x04\x95" + LARGE * 2 + b"N.") is None
        assert len(read(b"]" * 100_000 + b"a" * 99_999 + b".")) == 1


SAMPLE = pickle.dumps(
    {
        "a": [1, 2.5, "text", b"bytes", (1, 2, 3)],
        "t": dt.datetime(2024, 1, 2, tzinfo=dt.UTC),
        "u": uuid.UUID(int=5),
        "s": {1, 2},
    },
    4,
)


def test_a_pickle_cut_short_anywhere_is_damage() -> None:
    for size in range(len(SAMPLE)):
        with pytest.raises(CorruptCheckpointError, match=WHAT):
            read(SAMPLE[:size])


@given(st.data())
@settings(max_examples=examples(500))
def test_any_bytes_are_read_or_refused_by_an_error_of_ours(data: st.DataObject) -> None:
    """Also those that are almost a pickle."""
    raw = bytearray(data.draw(st.sampled_from([SAMPLE, *BOMBS.values()]))[:2000])
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        read(bytes(raw))
    except RanklessError as error:
        assert WHAT in str(error)


def test_every_opcode_that_is_not_read_is_refused() -> None:
    for opcode in pickletools.opcodes:
        with pytest.raises(RanklessError):
            read(opcode.code.encode("latin-1"))


def test_numpy_is_not_imported_to_read_plain_values() -> None:
    code = (
        "import sys, pickle\nfrom rankless.formats.pickles.builtin_types import PLAIN\n"
        "from rankless.formats.pickles.unpickle import unpickle\n"
        "assert unpickle(pickle.dumps([1]), PLAIN, 'x') == [1]\n"
        "sys.exit(int('numpy' in sys.modules or 'torch' in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
