"""Tests the cost of hostile directories: metadata and files that refer to each other, or numbers that cause work.

Like the files in :mod:`tests.hostile.test_cost_of_values`, each of them is refused, or read, before it costs much.
"""

from __future__ import annotations

import io
import itertools
import json
import pickle
import struct
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

import rankless
from rankless.errors import CorruptCheckpointError, FormatError, InvalidArgumentError, RanklessError
from rankless.nxd.reader.numbered_states import PipelineStage
from rankless.nxd.reader.sharding_spec import parse_spec
from tests.helpers.bounded_reads import read_checkpoint
from tests.helpers.cost import HASH_MODULUS, limit_cost, limit_time, pickle_integer, pickle_text
from tests.helpers.nxd_files import rank_file_name
from tests.helpers.pairwise import first_of
from tests.helpers.torch_files import save_tree, write_archive

pytestmark = [pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]

SIZE = torch.Size


@pytest.fixture(scope="module", autouse=True)
def _imported(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What Python imports at first use is no cost of what is read."""
    read_checkpoint(save_tree(tmp_path_factory.mktemp("first"), {"w": torch.ones(1), "a": [torch.float32]}))


def record(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


class Folder:
    """Metadata being forged. Each value and chunk has a place; those of one ``data`` are in one file."""

    def __init__(self, path: Path, value: Any = None) -> None:
        path.mkdir()
        self._path = path
        self._data = record(value)
        self.metadata = Metadata({}, {}, {}, StorageMeta("x"))

    def place(self, offset: int = 0, size: int | None = None) -> _StorageInfo:
        return _StorageInfo("__0_0.distcp", offset, len(self._data) - offset if size is None else size)

    def value(self, fqn: str, path: tuple[Any, ...], place: _StorageInfo) -> None:
        self.metadata.state_dict_metadata[fqn] = BytesStorageMetadata()
        self.metadata.storage_data[MetadataIndex(fqn)] = place
        self.metadata.planner_data[fqn] = path

    def tensor(self, fqn: str, shape: tuple[int, ...], chunks: list[ChunkStorageMetadata], place: _StorageInfo) -> None:
        properties = TensorProperties(dtype=torch.float32)
        self.metadata.state_dict_metadata[fqn] = TensorStorageMetadata(properties, SIZE(shape), chunks)
        for chunk in chunks:
            self.metadata.storage_data[MetadataIndex(fqn, chunk.offsets)] = place
        self.metadata.planner_data[fqn] = (fqn,)

    def written(self) -> Path:
        (self._path / "__0_0.distcp").write_bytes(self._data)
        raw = pickle.dumps(self.metadata, 4)
        assert len(raw) < 1_500_000
        (self._path / ".metadata").write_bytes(raw)
        return self._path


def chunk(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(SIZE(offsets), SIZE(sizes))


def values_of_one_record(folder: Folder) -> None:
    """5,000 names of one value of 1 MB: it is read once, and their tree is not larger than the file."""
    place = folder.place()
    for number in range(5000):
        folder.value(f"v{number}", (f"v{number}",), place)


def records_that_overlap(folder: Folder) -> None:
    for number in range(5000):
        folder.value(f"v{number}", (f"v{number}",), folder.place(number))


def chunks_that_overlap(folder: Folder) -> None:
    for number in range(2000):
        folder.tensor(f"t{number}", (2,), [chunk((0,), (2,))], folder.place(number))


def irregular_chunks(folder: Folder) -> None:
    """A brick wall: no grid, in many tensors."""
    rows = 60
    wall = [chunk((0, row), (row + 1, 1)) for row in range(rows)]
    wall += [chunk((row + 1, row), (rows - row, 1)) for row in range(rows)]
    for number in range(80):
        folder.tensor(f"t{number}", (rows + 1, rows), wall, folder.place())


def chunks_of_many_dimensions(folder: Folder) -> None:
    dims = 64
    for number in range(1200):
        offsets = (0,) * (dims - 2)
        folder.tensor(
            f"t{number}",
            (*([1] * (dims - 2)), 2, 2),
            [chunk((*offsets, 0, 0), (*([1] * (dims - 1)), 1)), chunk((*offsets, 0, 1), (*([1] * (dims - 1)), 1))],
            folder.place(),
        )


def shared_chunks(folder: Folder) -> None:
    chunks = [chunk((number,), (1,)) for number in range(4000)]
    for number in range(8000):
        folder.metadata.state_dict_metadata[f"t{number}"] = TensorStorageMetadata(
            TensorProperties(dtype=torch.float32), SIZE((4000,)), chunks
        )


def long_paths(folder: Folder) -> None:
    path = tuple(f"p{number}" for number in range(2000))
    for number in range(100):
        folder.value(f"v{number}", (*path, number), folder.place())


def paths_of_one_prefix(folder: Folder) -> None:
    path = tuple(f"p{number}" for number in range(95))
    for number in range(2500):
        folder.value(f"v{number}", (*path, f"q{number}"), folder.place())


def offsets_of_one_hash(folder: Folder) -> None:
    for offsets in itertools.islice(
        itertools.product((0, HASH_MODULUS, 2 * HASH_MODULUS, 3 * HASH_MODULUS), repeat=8), 3000
    ):
        folder.metadata.storage_data[MetadataIndex("t", SIZE(offsets))] = folder.place()


def transforms_without_end(folder: Folder) -> None:
    node: Any = ["x"]
    for _ in range(60):
        node = [node, node]
    place = folder.place()
    vars(place)["transform_descriptors"] = node
    folder.metadata.storage_data[MetadataIndex("t")] = place


def petabytes(folder: Folder) -> None:
    folder.tensor("t", (2**40,), [chunk((0,), (2**40,))], folder.place())


#: Folders, with the value in their file of data, and why they are refused; one is odd, but sound.
FOLDERS: dict[str, tuple[Callable[[Folder], None], Any, str | None]] = {
    "values of one record": (values_of_one_record, [0] * 200_000, "more work"),
    "records that overlap": (records_that_overlap, [0] * 200_000, "they overlap"),
    "chunks that overlap": (chunks_that_overlap, torch.ones(1000), "they overlap"),
    "chunks of many dimensions": (chunks_of_many_dimensions, torch.ones(2), ""),
    "chunks that tensors share": (shared_chunks, torch.ones(2), "more work"),
    "long paths": (long_paths, torch.ones(2), "more work|parts"),
    "paths of one prefix": (paths_of_one_prefix, torch.ones(2), None),
    "transforms without end": (transforms_without_end, torch.ones(2), "more work"),
    "petabytes in a record": (petabytes, torch.ones(1).expand(2**40), "chunk of tensor 't' has"),
    "irregular chunks": (irregular_chunks, torch.ones(2), ""),
    "offsets of one hash": (offsets_of_one_hash, torch.ones(2), "same hash"),
}


@first_of(9, "kind", FOLDERS)
def test_a_distributed_checkpoint_costs_little(tmp_path: Path, kind: str) -> None:
    make, value, match = FOLDERS[kind]
    folder = Folder(tmp_path / "c", value)
    make(folder)
    path = folder.written()
    refused = nullcontext() if match is None else pytest.raises(RanklessError, match=rf"(?s){path}.*({match})")
    with limit_cost(memory=False), refused:
        read_checkpoint(path)


# ---------------------------------------------------------------------------------------------------------------
# Files as torch wrote them before version 1.6


def legacy(root: bytes, keys: bytes = b"]", after: bytes = b"") -> bytes:
    magic = pickle.dumps(0x1950A86A20F9469CFC6C, 2)
    machine = pickle.dumps({"little_endian": True}, 2)
    return magic + pickle.dumps(1001, 2) + machine + b"\x80\x02" + root + b"." + b"\x80\x02" + keys + b"." + after


def doubled(levels: int) -> bytes:
    return b"]" + b"".join(b"q\x000(h\x00h\x00l" for _ in range(levels))


OLD = {
    "a small bomb before large storages": legacy(b"(" + b"\x8f" * 900_000 + b"l", after=bytes(30_000_000)),
    "keys without end": legacy(b"}", b"(" + doubled(60) + b"l"),
    "values without end": legacy(doubled(60), after=bytes(20_000_000)),
}


@pytest.mark.parametrize("kind", OLD)
def test_a_legacy_file_costs_little(tmp_path: Path, kind: str) -> None:
    (tmp_path / "x.pt").write_bytes(OLD[kind])
    with limit_cost(memory=False), pytest.raises(CorruptCheckpointError, match=str(tmp_path)):
        read_checkpoint(tmp_path / "x.pt")


# ---------------------------------------------------------------------------------------------------------------
# DeepSpeed's folders


def deepspeed(folder: Path, module: Any, shapes: list[Any], state: dict[str, Any]) -> Path:
    folder.mkdir()
    torch.save({"module": module, "param_shapes": shapes}, folder / "mp_rank_00_model_states.pt")
    torch.save({"optimizer_state_dict": state}, folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    return folder


def states_of_every_parameter(folder: Path) -> Path:
    """A few thousand names of one flat tensor, each of which is a state of a few thousand parameters."""
    number = 5000
    flat = torch.ones(number)
    base = {
        "state": {0: {f"s{n}": flat for n in range(number)}},
        "param_groups": [{"params": [0]}],
    }
    state = {"base_optimizer_state": base, "single_partition_of_fp32_groups": [flat], "partition_count": [1]}
    names = [f"w{n}" for n in range(number)]
    return deepspeed(folder, dict.fromkeys(names, flat[:1]), [dict.fromkeys(names, (1,))], state)


def groups_without_parameters(folder: Path) -> Path:
    number = 100_000
    base = {"state": {}, "param_groups": [{"params": list(range(number))}]}
    state = {
        "base_optimizer_state": base,
        "single_partition_of_fp32_groups": [torch.ones(0)] * number,
        "partition_count": [1] * number,
    }
    return deepspeed(folder, {}, [{}] * number, state)


def parameters_of_exabytes(folder: Path) -> Path:
    base = {"state": {}, "param_groups": [{"params": [0]}]}
    state = {"base_optimizer_state": base, "single_partition_of_fp32_groups": [torch.ones(2)], "partition_count": [1]}
    return deepspeed(folder, {"w": torch.ones(2)}, [{"w": (2**30, 2**28)}], state)


def weights_of_one_hash(folder: Path) -> Path:
    """Without ZeRO, master weights are looked up by their shape and values."""
    empty = {f"w{n}": torch.empty(0, n * HASH_MODULUS % 2**60) for n in range(4000)}
    groups = [{"params": list(range(len(empty)))}]
    wrapped = {"optimizer_state_dict": {"state": {}, "param_groups": groups}, "fp32_groups": [list(empty.values())]}
    folder.mkdir()
    torch.save({"module": empty, "optimizer": wrapped}, folder / "mp_rank_00_model_states.pt")
    return folder


#: Folders, and why they are refused; one is odd, but intact.
DEEPSPEED: dict[str, tuple[Callable[[Path], Path], str | None]] = {
    "states of every parameter": (states_of_every_parameter, "more work"),
    "groups without parameters": (groups_without_parameters, "more work|groups"),
    "parameters of exabytes": (parameters_of_exabytes, "need 288230376151711744"),
    "weights of one hash": (weights_of_one_hash, None),
}


#: The last kind takes longest.
DEEPSPEED_CASES = [*zip(DEEPSPEED, (True, False) * 2, strict=True), *zip(DEEPSPEED, (False, True) * 2, strict=True)]


@first_of(3, "kind, memory", DEEPSPEED_CASES)
def test_a_checkpoint_of_deepspeed_costs_little(tmp_path: Path, kind: str, memory: bool) -> None:
    make, match = DEEPSPEED[kind]
    folder = make(tmp_path / "c")
    refused = nullcontext() if match is None else pytest.raises(RanklessError, match=rf"(?s){folder}.*({match})")
    with limit_cost(memory=memory), refused:
        read_checkpoint(folder)


# ---------------------------------------------------------------------------------------------------------------
# Trees of odd forms


def strides_of_one_hash(number: int) -> bytes:
    """Tensors of one element, whose strides say nothing and have one hash."""
    storage = b"(X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\x000X\x03\0\0\0cpuK\x01tQq\x600"
    made = b"ctorch._utils\n_rebuild_tensor_v2\nq\x610" + storage + b"(" + b"K\x01" * 16 + b"tq\x620"
    raw = made + b"".join(pickle_integer(k * HASH_MODULUS) + b"q" + bytes([k]) + b"0" for k in range(4)) + b"}("
    for row, strides in enumerate(itertools.islice(itertools.product(range(4), repeat=16), number)):
        raw += pickle_text(f"w{row}") + b"h\x61(h\x60K\x00h\x62(" + b"".join(b"h" + bytes([item]) for item in strides)
        raw += b"t\x89NtR"
    return raw + b"u"


TREES: dict[str, Callable[[], bytes]] = {
    "strides of one hash": lambda: strides_of_one_hash(8000),
    "parameters of one hash": lambda: (
        b"}(" + pickle_text("state") + b"}" + pickle_text("param_groups") + b"(}" + pickle_text("params")
        + b"(" + b"".join(pickle_integer(k * HASH_MODULUS) for k in range(80_000)) + b"ls" + b"lu"
    ),
    "names of 4000 characters of one tensor": lambda: pickle_text("x" * 3990) + b"q\x700" + b"}q\x710" + b"".join(
        b"h\x71" + pickle_text(f"k{k}") + b"}h\x70Nss0" for k in range(40_000)
    ) + b"h\x71",
    "dicts of dicts of dicts": lambda: b"}" + pickle_text("w") + b"Nsq\x720" + b"".join(
        b"}(" + pickle_text("a") + b"h\x72" + pickle_text("b") + b"h\x72uq\x720" for _ in range(60)
    ) + b"h\x72",
    "one optimizer many times": lambda: (
        b"}(" + pickle_text("state") + b"}(" + b"".join(b"M" + struct.pack("<H", k) + b"}" for k in range(5000)) + b"u"
        + pickle_text("param_groups") + b"]uq\x740}" + pickle_text("optimizers") + b"(" + b"h\x74" * 300_000 + b"ls"
    ),
    "many models": lambda: (
        b"(N" + b"t0" + b"}" + b"".join(pickle_text(f"k{k}") + b"}" + pickle_text("w") + b"Nss" for k in range(40_000))
    ),
    "schedulers without end": lambda: (
        b"}" + pickle_text("lr_schedulers") + b"}q\x730(" + b"h\x73" * 400_000 + b"ls"
    ),
}  # fmt: skip


@first_of(5, "kind", TREES)
def test_trees_of_odd_forms_cost_little(tmp_path: Path, kind: str) -> None:
    raw = b"\x80\x02" + TREES[kind]() + b"."
    assert len(raw) < 1_500_000
    file = write_archive(tmp_path / "x.pt", {"a/data.pkl": raw, "a/byteorder": b"little", "a/data/0": bytes(4)})
    with limit_cost(memory=False):
        try:
            read_checkpoint(file)
        except RanklessError as error:
            assert str(file) in str(error)


def test_an_array_as_a_key_is_damage(tmp_path: Path) -> None:
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\n)R(K\x01K\x01\x85cnumpy\ndtype\nX\x02\0\0\0u1\x89\x88\x87R\x89C\x01atb"
    )
    for raw in (b"}" + array + b"Ns", b"\x8f(" + array + b"\x90"):
        file = write_archive(tmp_path / "x.pt", {"a/data.pkl": b"\x80\x04" + raw + b".", "a/byteorder": b"little"})
        with pytest.raises(CorruptCheckpointError, match=f"{file}.*unhashable"):
            read_checkpoint(file)


# ---------------------------------------------------------------------------------------------------------------
# NxD, ColossalAI, Hugging Face


def test_names_of_far_away_ranks_cost_little(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    place = tmp_path / "model" / "dp_rank_999999_ep_rank_999999_tp_rank_999999_pp_rank_999999.pt"
    torch.save({"w": torch.ones(1)}, place)
    with limit_cost(memory=True), pytest.raises(CorruptCheckpointError, match="is missing"):
        rankless.open(tmp_path)


def test_experts_without_end_cost_little(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    weight = "layers.0.mlp.down.weight"
    torch.save({weight: torch.ones(1, 2, 2).expand(2**40, 2, 2)}, tmp_path / "model" / rank_file_name())
    layout = json.dumps({"rules": [{"match": weight, "into": ["experts.{}.w"], "experts": True}]})
    with limit_cost(memory=True), pytest.raises(RanklessError, match=r"experts|repeat"):
        rankless.open(tmp_path, keys={"layout": layout})


def test_tensors_that_repeat_one_element_are_refused_in_every_format(tmp_path: Path) -> None:
    wide = torch.ones(1).expand(2**40)
    (tmp_path / "nxd" / "model").mkdir(parents=True)
    torch.save({"w": wide}, tmp_path / "nxd" / "model" / rank_file_name())
    (tmp_path / "bins").mkdir()
    torch.save({"w": wide}, tmp_path / "bins" / "pytorch_model.bin")
    (tmp_path / "lightning").mkdir()
    Folder(tmp_path / "c").written()
    torch.save({"w": wide}, tmp_path / "c" / "meta.pt")
    for folder in ("nxd", "bins", "c"):
        with pytest.raises(FormatError, match=f"{tmp_path / folder}.*repeat elements"):
            rankless.open(tmp_path / folder)


def test_long_names_cost_little_where_a_layout_looks_at_them(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    tree = {"layers.1." * 50_000 + str(number): torch.ones(1) for number in range(3)}
    torch.save(tree, tmp_path / "model" / rank_file_name())
    with limit_cost(memory=False), pytest.raises(RanklessError, match="layers"):
        rankless.open(tmp_path, keys={"layout": "llama"})


@pytest.mark.parametrize("more", [{"stride": 10**9}, {"stride": 2**70}])
def test_a_layout_of_pieces_without_end_is_refused(more: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError, match=r"pieces|layout"):
        parse_spec(json.dumps({"rules": [{"match": "*", "dim": 0, **more}]}), "the layout")


def test_values_in_a_header_are_bounded(tmp_path: Path) -> None:
    """Hugging Face folders of ours have values in the header."""
    groups = {"$set": [{"$uuid": f"{k * HASH_MODULUS:032x}"} for k in range(1, 10_001)]}
    save_file(
        {"w/m": torch.ones(1)},
        tmp_path / "optimizer.safetensors",
        {"rankless.values": json.dumps({"optimizer": groups})},
    )
    with limit_cost(memory=False), pytest.raises(CorruptCheckpointError, match="same hash"):
        read_checkpoint(tmp_path)


def test_one_pickle_under_a_name_given_again_and_again_is_read_once(tmp_path: Path) -> None:
    """ColossalAI's asynchronous optimizers have a list of names in the header."""
    raw = torch.frombuffer(bytearray(pickle.dumps([0] * 100_000, 2)), dtype=torch.uint8)
    group = torch.frombuffer(bytearray(pickle.dumps([{"params": [0]}], 2)), dtype=torch.uint8)
    names = ["state.0.x"] * 100_000 + ["param_groups"]
    save_file(
        {"state.0.x": raw, "param_groups": group}, tmp_path / "x.safetensors", {"non_tensor_keys": json.dumps(names)}
    )
    with limit_cost(memory=False):
        read_checkpoint(tmp_path / "x.safetensors")


@pytest.mark.parametrize("number", ["9" * 5000, "1" * 12])
def test_numbers_of_parameters_that_are_none_are_refused(tmp_path: Path, number: str) -> None:
    torch.save({f"state.{number}.m": torch.ones(1)}, tmp_path / "pytorch_optim-00001.bin")
    torch.save([{"params": [0]}], tmp_path / "pytorch_optim_group.bin")
    (tmp_path / "pytorch_optim.bin.index.json").write_text(
        '{"metadata": {"param_groups": "pytorch_optim_group.bin"}, "weight_map": {"0": "pytorch_optim-00001.bin"}}'
    )
    with pytest.raises(CorruptCheckpointError, match="number of a parameter"):
        rankless.open(tmp_path)


def test_an_index_of_many_names_of_one_file_costs_little(tmp_path: Path) -> None:
    save_file({"w": torch.ones(1)}, tmp_path / "model-1.safetensors")
    weight_map = {f"w{number}": "model-1.safetensors" for number in range(30_000)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with limit_time():
        problems = [check.problem for check in rankless.open(tmp_path).verify() if check.problem]
    assert any("but it does not" in problem for problem in problems)


class Counted(dict[str, Any]):
    """Counts how often its names are looked at as a whole."""

    looks = 0

    def keys(self) -> Any:
        Counted.looks += 1
        return super().keys()


def test_whether_ranks_have_the_same_tensors_is_looked_at_once() -> None:
    """And not once for each tensor, which took time that grew with the square of their number."""
    models = [[Counted({f"w{number}": number for number in range(1000)}) for _ in range(4)]]
    stage = PipelineStage("a stage", models, [])
    assert [stage.shards_of(name)[0][0] for name in stage.tensor_names] == list(range(1000))
    assert Counted.looks <= 3 * len(models[0])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("model/dp_rank_00_tp_rank_00_pp_rank_00.pt", "model/dp_rank_000_tp_rank_00_pp_rank_00.pt"),
        ("tp_rank_00", "tp_rank_00_pp_rank_00"),
        ("tp_rank_00", "tp_rank_00_pp_rank_00_dp_rank_00/checkpoint.pt"),
    ],
)
def test_two_files_of_one_rank_are_refused(tmp_path: Path, one: str, other: str) -> None:
    for number, file in enumerate((one, other)):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        torch.save({"w": torch.full((1,), float(number))}, tmp_path / file)
    with pytest.raises(CorruptCheckpointError, match="are both of Rank"):
        rankless.open(tmp_path)
