"""Tests the cost of hostile input: 1 MB of it takes at most 1 s and 64 MB more than ordinary input of its size.

Without the read budget each bomb took at least ten times as much, most of them minutes or gigabytes; the limits here
leave room for slow machines. Ordinary input of unusual shape is read, in time proportional to its size.
"""

from __future__ import annotations

import collections
import itertools
import json
import pickle
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import rankless
from rankless.errors import CorruptCheckpointError, RanklessError, UnsupportedValueError
from rankless.formats.pickles.builtin_types import PLAIN
from rankless.formats.pickles.unpickle import unpickle
from rankless.formats.tree.tree_contents import classify_tree
from rankless.ondisk import values
from rankless.ondisk.read_budget import ReadBudget
from rankless.state.array_decoder import ArrayDecoder
from tests.helpers.bounded_reads import read_checkpoint
from tests.helpers.cost import HASH_MODULUS, limit_cost, limit_time, pickle_integer, pickle_text
from tests.helpers.pairwise import first_of
from tests.helpers.torch_files import save_tree, write_archive

pytestmark = pytest.mark.timeout(300)


def tree_of(shared: bytes, levels: int, width: int) -> bytes:
    """Lists of lists of … one value, each named again and again."""
    raw = shared + b"q\x010"
    for level in range(levels):
        raw += b"(" + b"h" + bytes([level + 1]) + (b"h" + bytes([level + 1])) * (width - 1) + b"lq" + bytes([level + 2])
        raw += b"0"
    return raw + b"h" + bytes([levels + 1])


def padded(raw: bytes, size: int) -> bytes:
    """With a long text before it, which earns what bytes earn."""
    return pickle_text("a" * (size - len(raw))) + b"0" + raw


def key_of_keys(width: int, depth: int) -> bytes:
    raw = b"}(" + b"N" * width + b"tq\x01"
    for _ in range(depth - 1):
        raw += b"0(" + b"h\x01" * width + b"tq\x01"
    return raw + b"Ns"


def zero_hashes() -> Iterator[bytes]:
    """Tuples of six of eight integers below 2**64 whose hash is 0."""
    for row in itertools.islice(itertools.product(range(8), repeat=6), 60_000):
        yield b"(" + b"".join(b"h" + bytes([number]) for number in row) + b"t"


EIGHT = b"".join(pickle_integer(k * HASH_MODULUS) + b"q" + bytes([k]) + b"0" for k in range(8))


def keys(each: Iterator[bytes], number: int) -> bytes:
    return b"}(" + b"".join(key + b"N" for key in itertools.islice(each, number)) + b"u"


def optimizers(lists: int, length: int, names: int) -> bytes:
    """Keys that name one list of one flattened optimizer, again and again."""
    raw = b"}(" + b"".join(pickle_text(f"param_groups.{i}.lr") + b"N" for i in range(names)) + b"uq\x010"
    raw += b"(" + b"h\x01" * length + b"lq\x020"
    return raw + b"}(" + b"".join(pickle_text(f"k{i}") + b"h\x02" for i in range(lists)) + b"u"


def tensor(dims: int) -> bytes:
    """What makes a tensor of many dimensions of nothing, kept under 5, and its arguments, under 6."""
    storage = b"(X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\x000X\x03\0\0\0cpuK\x00tQ"
    sizes = b"(" + b"K\x00" * dims + b"t"
    return b"ctorch._utils\n_rebuild_tensor_v2\nq\x050(" + storage + b"K\x00" + sizes + sizes + b"\x89Ntq\x060"


def parallel(levels: int) -> bytes:
    """Two models of equal names and parallel values that are endless to compare: is one of them the other again?"""
    raw = b"}("
    for name in ("model", "state_dict"):
        raw += pickle_text(name) + b"}(" + pickle_text("x_extra_state") + b"]"
        raw += b"".join(b"q\x010(h\x01h\x01l" for _ in range(levels)) + pickle_text("w") + b"h\x07u"
    return b"h\x05h\x06Rq\x070" + raw + b"u"


def array(data: int, number: int) -> bytes:
    """Many arrays of the same bytes."""
    dtype = b"cnumpy\ndtype\nX\x02\0\0\0u1\x89\x88\x87R(K\x03X\x01\0\0\0|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    made = b"cnumpy.core.multiarray\n_reconstruct\nq\x010"
    state = (
        b"(K\x01"
        + pickle_integer(data)
        + b"\x85"
        + dtype
        + b"\x89B"
        + struct.pack("<I", data)
        + bytes(data)
        + b"tq\x020"
    )
    return made + state + b"(" + b"h\x01)Rh\x02b" * number + b"l"


def uuids() -> Iterator[bytes]:
    for k in itertools.count(1):
        yield b"h\x01)\x81}" + pickle_text("int") + pickle_integer(k * HASH_MODULUS) + b"sb"


def complexes() -> Iterator[bytes]:
    for k in itertools.count(1):
        yield b"h\x01" + pickle_integer(-1000003 * k) + pickle_integer(k) + b"\x86R"


def ranges() -> Iterator[bytes]:
    for k in itertools.count(1):
        yield b"h\x01" + pickle_integer(k * HASH_MODULUS) + pickle_integer(k * HASH_MODULUS + 2) + b"K\x01\x87R"


def numpy_complexes() -> Iterator[bytes]:
    for k in itertools.count(1):
        yield b"h\x01h\x02C\x10" + struct.pack("<dd", -1000003 * k, k) + b"\x86R"


NUMPY_COMPLEX = (
    b"cnumpy.core.multiarray\nscalar\nq\x010cnumpy\ndtype\nX\x03\0\0\0c16\x89\x88\x87R"
    b"(K\x03X\x01\0\0\0<NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tbq\x020"
)

#: Pickles, by what is in them; all refused.
BOMBS: dict[str, Callable[[], bytes]] = {
    "one empty deque everywhere": lambda: padded(tree_of(b"ccollections\ndeque\n)R", 4, 40), 250_000),
    "one empty set everywhere": lambda: padded(tree_of(b"\x8f", 4, 40), 250_000),
    "one ordered dict everywhere": lambda: padded(tree_of(b"ccollections\nOrderedDict\n)R", 4, 40), 250_000),
    "empty sets": lambda: b"(" + b"\x8f" * 1_000_000 + b"l",
    "empty frozensets": lambda: b"(" + b"(\x91" * 400_000 + b"l",
    "empty deques": lambda: b"ccollections\ndeque\nq\x010(" + b"h\x01)R" * 250_000 + b"l",
    "namespaces of one state": lambda: (
        b"cargparse\nNamespace\nq\x010}(" + b"".join(pickle_text(f"n{i}") + b"N" for i in range(20_000)) + b"uq\x020("
        b"" + b"h\x01)Rh\x02b" * 50_000 + b"l"
    ),
    "keys of keys of keys": lambda: key_of_keys(20, 8),
    "a large key in many dicts": lambda: b"(" + b"N" * 5000 + b"tq\x010(" + b"}h\x01Ns" * 150_000 + b"l",
    "UUIDs of one hash": lambda: b"cuuid\nUUID\nq\x010" + keys(uuids(), 20_000),
    "complex numbers of one hash": lambda: b"cbuiltins\ncomplex\nq\x010" + keys(complexes(), 30_000),
    "ranges of one hash": lambda: b"cbuiltins\nrange\nq\x010" + keys(ranges(), 20_000),
    "tuples of one hash": lambda: EIGHT + keys(zero_hashes(), 60_000),
    "tuples of one hash, one by one": lambda: EIGHT + b"}" + b"".join(key + b"Ns" for key in zero_hashes()),
    "tuples of one hash in a set": lambda: EIGHT + b"\x8f(" + b"".join(zero_hashes()) + b"\x90",
    "tuples of one hash in a frozenset": lambda: EIGHT + b"(" + b"".join(zero_hashes()) + b"\x91",
    "tuples of one hash in a list for a set": lambda: (
        EIGHT + b"cbuiltins\nset\n(" + b"".join(zero_hashes()) + b"l\x85R"
    ),
    "scalars of NumPy of one hash": lambda: NUMPY_COMPLEX + keys(numpy_complexes(), 20_000),
    "optimizers in lists": lambda: optimizers(1000, 2000, 1000),
    "more optimizers in lists": lambda: optimizers(20_000, 60_000, 15_000),
    "tensors of 64 dimensions": lambda: tensor(64) + b"(" + b"h\x05h\x06R" * 180_000 + b"l",
    "arrays of the same bytes": lambda: array(500_000, 60_000),
    "values that are endless to compare": lambda: tensor(1) + parallel(60),
    "values that are endless to print": lambda: (
        b"ctorch\nSize\n(" + tree_of(b"]", 40, 2).replace(b"h\x29", b"") + b"h\x29t\x85R"
    ),
    "a product of many numbers": lambda: (
        b"cnumpy.core.multiarray\n_reconstruct\n)R(K\x01(" + pickle_integer(2**62) + b"q\x01" + b"h\x01" * 200_000
        + b"tcnumpy\ndtype\nX\x02\0\0\0u1\x89\x88\x87R\x89C\x00tb"
    ),
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _imported(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What Python imports at first use is no cost of what is read."""
    read_checkpoint(save_tree(tmp_path_factory.mktemp("first"), {"w": torch.ones(1), "a": [torch.float32]}))


#: Those that would take memory rather than time; it takes some time to measure it.
IN_MEMORY = [kind for kind in BOMBS if kind.startswith(("one ", "empty ", "namespaces ", "tensors ", "arrays "))]

#: One of each kind of value.
MEASURED_ALWAYS = {"empty sets", "namespaces of one state", "tensors of 64 dimensions"}


@pytest.mark.parametrize(
    ("kind", "memory"),
    [
        *((kind, False) for kind in BOMBS),
        *(pytest.param(kind, True, marks=() if kind in MEASURED_ALWAYS else pytest.mark.full) for kind in IN_MEMORY),
    ],
)
def test_a_bomb_is_refused_before_it_costs_much(tmp_path: Path, kind: str, memory: bool) -> None:
    raw = b"\x80\x02" + BOMBS[kind]() + b"."
    file = write_archive(tmp_path / "x.pt", {"a/data.pkl": raw, "a/byteorder": b"little", "a/data/0": b""})
    assert len(raw) < 1_100_000
    with limit_cost(memory=memory), pytest.raises(RanklessError, match=str(file)):
        read_checkpoint(file)


#: Our own values, in JSON; all refused.
TABLES: dict[str, Callable[[], Any]] = {
    "UUIDs": lambda: {"$set": [{"$uuid": f"{k * HASH_MODULUS:032x}"} for k in range(1, 10_001)]},
    "complex numbers": lambda: {"$frozenset": [{"$complex": [-1000003 * k, k]} for k in range(1, 10_001)]},
    "ranges": lambda: {
        "$dict": [[{"$range": [k * HASH_MODULUS, k * HASH_MODULUS + 2, 1]}, 0] for k in range(1, 10_001)]
    },
    "integers": lambda: {"$ordereddict": [[k * HASH_MODULUS, 0] for k in range(1, 10_001)]},
    "tuples": lambda: {"$counter": [[{"$tuple": [k * HASH_MODULUS, k]}, 0] for k in range(1, 100)]
                       + [[{"$tuple": [k * HASH_MODULUS, 0]}, 0] for k in range(100, 10_001)]},
    "scalars of NumPy": lambda: {
        "$set": [{"$numpy": ["complex128", struct.pack("<dd", -1000003 * k, k).hex()]} for k in range(1, 10_001)]
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", TABLES)
def test_keys_of_one_hash_in_our_own_values_are_refused(kind: str) -> None:
    raw = json.dumps({"a": TABLES[kind]()}).encode()
    with limit_cost(memory=False), pytest.raises(CorruptCheckpointError, match=r"state\.json.*same hash"):
        values.load_values(raw, ArrayDecoder({}), "state.json")


@pytest.mark.parametrize("make", [set, frozenset, dict.fromkeys, collections.OrderedDict.fromkeys, collections.Counter])
def test_keys_that_no_reader_would_take_are_refused_when_they_are_saved(make: Callable[[Any], Any]) -> None:
    tree = {"top": {"keys": make([complex(-1000003 * k, k) for k in range(1, 40)])}}
    with pytest.raises(UnsupportedValueError, match=r"top\.keys: more than 32 of its keys have the same hash"):
        values.dump_values(tree, ArrayDecoder({}))


def test_many_honest_keys_are_read() -> None:
    grid = range(-2, 3)
    tree = {
        "texts": {f"k{i}": i for i in range(5000)},
        "numbers": dict.fromkeys(range(-5000, 5000), 0),
        "floats": {i / 7: 0 for i in range(5000)},
        "offsets": dict.fromkeys(itertools.product(grid, repeat=4), 0),
        "large": {2**64 + i: 0 for i in range(100)},
        "ranges": {range(i) for i in range(500)},
    }
    actual = unpickle(pickle.dumps(tree, 2), PLAIN, "x")
    assert actual == tree
    assert values.load_values(values.dump_values(tree, ArrayDecoder({})), ArrayDecoder({}), "x") == tree  # type: ignore[arg-type]


def spent(tree: Any) -> int:
    """The steps that it takes to arrange a tree."""
    budget = ReadBudget(10**9)
    classify_tree(tree, {}, budget, "x")
    return budget.spent


FQN = "text_model.encoder.transformer.layers.attention.self.projection."


class _Many:
    """Honest trees with a number of tensors, each of which has a storage of its own."""

    def __init__(self, tmp_path: Path) -> None:
        self._path = tmp_path

    def of(self, make: Callable[[int, torch.Tensor], Any], number: int) -> Path:
        tensors = torch.zeros(number, 1)
        return save_tree(self._path, {"n": 1, "rows": [make(i, tensors[i]) for i in range(number)]})


SHAPES: dict[str, Callable[[int, torch.Tensor], Any]] = {
    "long names": lambda i, tensor: {f"{FQN}{i}": tensor},
    "tuples as keys": lambda i, tensor: {(i, "x"): tensor},
    "one name": lambda _, tensor: {"w": tensor},
    "keys of no name": lambda i, tensor: {frozenset({i}): tensor},
}


@first_of(2, "kind", SHAPES)
def test_honest_files_of_many_tensors_in_values_are_read(tmp_path: Path, kind: str) -> None:
    """12,000 of them were not done after 10 seconds, which grew with the square of their number."""
    file = _Many(tmp_path).of(SHAPES[kind], 12_000)
    with limit_time():
        opened = rankless.open(file)
    assert len(opened._reader.groups["state"]) == 12_000


def test_names_of_one_tree_take_steps_in_proportion() -> None:
    def flattened(number: int) -> dict[str, Any]:
        """Each parameter has settings of its own."""
        return {f"param_groups.layers.{i}.weight.lr": [i] for i in range(number)}

    small, large = (spent({"optimizer": flattened(number)}) for number in (500, 1000))
    plain = [spent({"a": {str(i): {"b": i} for i in range(number)}}) for number in (500, 1000)]
    assert plain[1] < 2.1 * plain[0]
    assert large > 3 * small  # lists are compared with each other, which is paid for
    with pytest.raises(CorruptCheckpointError, match="more work"):
        classify_tree({"optimizer": flattened(20_000)}, {}, ReadBudget(10**6), "x")


def test_what_is_shared_in_a_file_is_shared_in_its_values(tmp_path: Path) -> None:
    tensor, row, table = torch.arange(3.0), [1, 2], collections.OrderedDict(a=1)
    tree = {"n": 0, "a": [tensor, row, table], "b": {"again": tensor, "row": row, "table": table}}
    content = rankless.open(save_tree(tmp_path, tree)).values["user_content"]
    assert content["a"][0] is content["b"]["again"]
    assert content["a"][1] is content["b"]["row"]
    assert content["a"][2] is content["b"]["table"]
    again = rankless.open(save_tree(tmp_path, tree)).values["user_content"]
    assert again["a"][1] is not content["a"][1]
    assert torch.equal(content["a"][0], tensor)
