"""Tests that rankless loads checkpoints of ``torch.distributed.checkpoint`` from every layout into every other."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel

import rankless
from rankless.engine.plan.element_ranges import IndexBox
from rankless.errors import CorruptCheckpointError
from rankless.state.tensor_views import DTYPES
from rankless.storage.direct_io import BufferedReader
from tests.helpers.boxes import split_box
from tests.helpers.commands import assert_needs_no_torch
from tests.helpers.dcp_checkpoints import save_dcp, state_by_name, train_model, train_step, write_chunks
from tests.helpers.equality import equal_bits
from tests.helpers.layouts import LAYOUTS, LayoutRun, Net, blank_run, clean_name, fill_run, local_tensor, named_tensors
from tests.helpers.pool import Ranks
from tests.helpers.processes import run_command as command
from tests.helpers.torch_limits import HAS_HUGGING_FACE_WRITER, SAVES_WITHOUT_COLLECTIVES

pytestmark = pytest.mark.filterwarnings("ignore")


def fsdp1() -> LayoutRun:
    """Its parameters are flat views, so which are matrices is told by their names."""
    matrices = {name for name, parameter in Net().named_parameters() if parameter.ndim > 1}
    model = Net()
    for number, layer in enumerate(model.layers):
        model.layers[number] = FullyShardedDataParallel(layer, device_id=torch.device("cpu"), use_orig_params=True)
    model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    trained = {clean_name(name): parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    decay = [parameter for name, parameter in trained.items() if name in matrices]
    rest = [parameter for name, parameter in trained.items() if name not in matrices]
    optimizer = torch.optim.AdamW([{"params": decay}, {"params": rest, "weight_decay": 0.0}], lr=0.125)
    return LayoutRun(model, optimizer, [model], [optimizer])


WRITERS = [
    ("plain", 1),
    ("ddp", 2),
    ("fsdp", 2),
    ("fsdp", 4),
    ("hsdp", 4),
    ("tp", 2),
    ("tp", 3),
    ("fsdp_tp", 4),
    ("compiled", 2),
]
READERS = [
    ("plain", 1),
    ("ddp", 2),
    ("fsdp", 3),
    ("hsdp", 4),
    ("offload", 2),
    ("tp", 2),
    ("tp", 3),
    ("fsdp_tp", 4),
    ("hsdp_tp", 4),
    ("pp", 2),
    ("pp_fsdp", 4),
]


def states(run: LayoutRun, **options: Any) -> dict[str, Any]:
    """Model and optimizer as DCP's users get them; those of a pipeline's stages in one dict."""
    chosen = StateDictOptions(**options)
    model: dict[str, Any] = {}
    optimizer: dict[str, Any] = {}
    for part, own in zip(run.parts, run.optimizers, strict=True):
        model |= get_model_state_dict(part, options=chosen)
        optimizer |= get_optimizer_state_dict(part, own, options=chosen)
    return {"model": model, "optim": optimizer}


def write(path: str, layout: str, flat: bool = False) -> None:
    state = states(fill_run(LAYOUTS[layout][0]()), flatten_optimizer_state_dict=flat)
    dcp.save({**state, "step": 3, "loss": torch.tensor(0.5)}, checkpoint_id=path)


@pytest.fixture(scope="module")
def written(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The checkpoint of a layout; each is written once."""
    root = tmp_path_factory.mktemp("dcp")

    def get(layout: str, n: int, *, flat: bool = False) -> Path:
        path = root / f"{layout}-{n}-{flat}"
        if not path.exists():
            ranks(n, write, str(path), layout, flat)
        return path

    return get


def load(path: str, layout: str, exchange: str = "never") -> list[str]:
    run = blank_run(LAYOUTS[layout][0]())
    restored = rankless.restore(path, model=run.model, optimizer=run.optimizer, share_reads=exchange)
    assert not restored.verified
    assert restored.missing == ("rng",)
    assert restored.unexpected == ()
    assert restored.user_content["step"] == 3
    assert equal_bits(restored.user_content["loss"], torch.tensor(0.5))
    oracle = dict(named_tensors(fill_run(LAYOUTS[layout][0]())))
    mine = dict(named_tensors(run))
    assert mine.keys() == oracle.keys()
    for name, tensor in mine.items():
        assert tensor.dtype == oracle[name].dtype, name
        assert getattr(tensor, "placements", None) == getattr(oracle[name], "placements", None), name
        assert torch.equal(local_tensor(tensor), local_tensor(oracle[name])), name
    for own, theirs in zip(run.optimizers, LAYOUTS[layout][0]().optimizers, strict=True):
        for group, other in zip(own.param_groups, theirs.param_groups, strict=True):
            assert {k: v for k, v in group.items() if k != "params"} == {
                k: v for k, v in other.items() if k != "params"
            }
    return sorted(mine)


SOME_WRITERS, SOME_READERS = [("tp", 3), ("fsdp_tp", 4)], [("plain", 1), ("fsdp", 3), ("tp", 2)]
PAIRS = sorted({(w, r) for w in WRITERS for r in READERS if w in SOME_WRITERS or r in SOME_READERS})


@pytest.mark.parametrize(("writer", "reader"), PAIRS, ids=lambda case: f"{case[0]}{case[1]}")
def test_every_layout_loads_what_any_other_has_written(
    ranks: Ranks, written: Callable[..., Path], writer: tuple[str, int], reader: tuple[str, int]
) -> None:
    names = {name for own in ranks(reader[1], load, str(written(*writer)), reader[0]) for name in own}
    assert {"model/head.weight", "optimizer/layers.2.up.bias/exp_avg_sq", "model/seen"} <= names


@pytest.mark.parametrize("reader", [("hsdp_tp", 4), ("tp", 3), ("fsdp", 4)], ids=lambda case: f"{case[0]}{case[1]}")
@pytest.mark.parametrize("writer", [("fsdp_tp", 4), ("tp", 3)], ids=lambda case: f"{case[0]}{case[1]}")
def test_each_byte_is_read_once_and_passed_on(
    ranks: Ranks, written: Callable[..., Path], writer: tuple[str, int], reader: tuple[str, int]
) -> None:
    ranks(reader[1], load, str(written(*writer)), reader[0], "always")


@pytest.mark.parametrize("writer", [("fsdp", 2), ("pp", 2)], ids=lambda case: case[0])
@pytest.mark.parametrize("reader", SOME_READERS, ids=lambda case: f"{case[0]}{case[1]}")
def test_flattened_optimizer_states(
    ranks: Ranks, written: Callable[..., Path], writer: tuple[str, int], reader: tuple[str, int]
) -> None:
    """Each parameter has settings of its own then; what was one group is not kept."""
    ranks(reader[1], load, str(written(*writer, flat=True)), reader[0])


def write_fsdp1(path: str) -> None:
    """FSDP1 has shards of ShardedTensors, or of DTensors where it is given a mesh."""
    run = fsdp1()
    rankless.load_checkpoint(f"{path}.native", model=run.model, optimizer=run.optimizer)
    dcp.save({**states(run), "step": 3, "loss": torch.tensor(0.5)}, checkpoint_id=path)


def load_fsdp1(path: str) -> dict[str, torch.Tensor]:
    """What a load into FSDP1 gives, as a save by us tells it."""
    run = fsdp1()
    rankless.load_checkpoint(path, model=run.model, optimizer=run.optimizer)
    rankless.save_checkpoint(f"{path}.again", "s", run.model, run.optimizer)
    opened = rankless.open(f"{path}.again")
    return {name: opened[name] for name in opened}


@pytest.mark.parametrize("n", [1, 2, 4])
def test_fsdp1(ranks: Ranks, tmp_path: Path, n: int) -> None:
    oracle = fill_run(LAYOUTS["plain"][0]())
    path = str(tmp_path / "c")
    rankless.save_checkpoint(f"{path}.native", "s", oracle.model, oracle.optimizer)
    ranks(n, write_fsdp1, path)
    assert len(list(Path(path).glob("*.distcp"))) == n
    for reader, m in SOME_READERS:
        ranks(m, load, path, reader)
    expected = dict(named_tensors(oracle))
    for result in ranks(3, load_fsdp1, path):
        assert result.keys() == expected.keys()
        assert all(equal_bits(tensor, expected[name]) for name, tensor in result.items())


# ---------------------------------------------------------------------------------------------------------------
# Whatever else torch writes


def opened(path: Path, keys: dict[str, str] | None = None) -> dict[str, torch.Tensor]:
    checkpoint = rankless.open(path, keys=keys)
    return {name: checkpoint[name] for name in checkpoint}


class App:
    """Stateful, as in torch's own tutorial."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        model = get_model_state_dict(self.model)
        return {"model": model, "optim": get_optimizer_state_dict(self.model, self.optimizer)}

    def load_state_dict(self, _: dict[str, Any]) -> None:
        raise AssertionError


def torchtitan(model: nn.Module, optimizer: Any, scheduler: Any) -> dict[str, Any]:
    """The model's names at the top, beside the rest."""
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    return {
        **get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=flat),
        "lr_scheduler": scheduler.state_dict(),
        "train_state": {"step": torch.tensor(3, dtype=torch.int32), "ntokens_seen": torch.tensor(2**40)},
        "dataloader": {"dp_rank_0": b"pickled", "world_size": 1},
    }


def by_number(model: nn.Module, optimizer: Any, scheduler: Any) -> dict[str, Any]:
    return {
        "network": model.state_dict(),
        "opt": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
    }


def application(model: nn.Module, optimizer: Any, scheduler: Any) -> dict[str, Any]:
    return {"app": App(model, optimizer), "scheduler": scheduler.state_dict(), "args": {"lr": 0.1}}


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("form", [state_by_name, torchtitan, by_number, application])
def test_a_run_resumes_from_what_people_save(tmp_path: Path, form: Any, kind: Any) -> None:
    """Stateless SGD too, whose empty state DCP drops, so that torch itself cannot load it everywhere."""
    model, optimizer, scheduler = train_model(kind=kind)
    path = save_dcp(tmp_path / "c", form(model, optimizer, scheduler))
    other, again, schedule = train_model(0, kind)
    rankless.load_checkpoint(path, model=other, optimizer=again, scheduler=schedule)
    for number in range(3, 6):
        train_step(model, optimizer, scheduler, number)
        train_step(other, again, schedule, number)
    assert all(equal_bits(a, b) for a, b in zip(other.state_dict().values(), model.state_dict().values(), strict=True))
    assert schedule.get_last_lr() == scheduler.get_last_lr()


def test_the_rest_is_user_content(tmp_path: Path) -> None:
    path = save_dcp(tmp_path / "c", torchtitan(*train_model()))
    content = rankless.open(path).values["user_content"]
    assert content["train_state"] == {"step": torch.tensor(3), "ntokens_seen": torch.tensor(2**40)}
    assert content["dataloader"] == {"dp_rank_0": b"pickled", "world_size": 1}
    assert content.keys() == {"train_state", "dataloader"}


VALUES = {
    "flat": 1,
    "list": [1, 2.5, "three", None],
    "mixed": [torch.ones(2), {"a": torch.zeros(3), "b": [torch.ones(1)]}, 5],
    "tuple": (torch.arange(3), {"x": (1,)}),
    "deep": {"a": {"b": {"c": [{"d": 1}]}}},
    "dotted.name": {"also.dotted": 2},
    "0": {"1": "numbers as names"},
}


def test_values_of_any_form(tmp_path: Path) -> None:
    """Numbers as keys come back as text: that is how DCP saves them."""
    path = save_dcp(tmp_path / "c", {"model": {"w": torch.ones(1)}, "all": {**VALUES, 7: "seven"}})
    content = rankless.open(path).values["user_content"]["all"]
    assert repr(content) == repr({**VALUES, "7": "seven"}) or set(content) == {*VALUES, "7"}
    for name, value in VALUES.items():
        assert repr(content[name]) == repr(value), name


WRITES: dict[str, Callable[[Path], Any]] = {
    "one file": dcp.FileSystemWriter,
    "threads": lambda path: dcp.FileSystemWriter(path, thread_count=3),
    "a file for each": lambda path: dcp.FileSystemWriter(path, single_file_per_rank=False),
}


@pytest.mark.parametrize("kind", WRITES)
def test_several_files_of_a_rank(tmp_path: Path, kind: str) -> None:
    model, optimizer, scheduler = train_model()
    dcp.save(state_by_name(model, optimizer, scheduler), storage_writer=WRITES[kind](tmp_path / "c"), no_dist=True)
    assert (len(list((tmp_path / "c").glob("*.distcp"))) == 1) == (kind == "one file")
    actual = opened(tmp_path / "c")
    assert all(equal_bits(actual[f"model/{name}"], tensor) for name, tensor in model.state_dict().items())


def test_a_state_that_was_not_flattened(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    state = {"w": torch.ones(3), "inner": {"v": torch.arange(4.0), "n": 1}}
    save_dcp(tmp_path / "c", state, planner=DefaultSavePlanner(flatten_state_dict=False))
    assert equal_bits(opened(tmp_path / "c")["model/w"], torch.ones(3))
    content = rankless.open(tmp_path / "c").values["user_content"]["inner"]
    assert equal_bits(content["v"], torch.arange(4.0))


def alone(path: str) -> None:
    """Each rank writes what it has, and its own metadata: torch loads that on as many ranks only."""
    state = states(fill_run(LAYOUTS["fsdp"][0]()))
    dcp.save({**state, "step": 3, "loss": torch.tensor(0.5)}, checkpoint_id=path, use_collectives=False)


needs_saves_without_collectives = pytest.mark.skipif(
    not SAVES_WITHOUT_COLLECTIVES, reason="torch always uses collectives"
)


@needs_saves_without_collectives
def test_ranks_that_save_each_for_itself(ranks: Ranks, tmp_path: Path) -> None:
    ranks(3, alone, str(tmp_path / "c"))
    for reader, n in SOME_READERS:
        ranks(n, load, str(tmp_path / "c"), reader)


@needs_saves_without_collectives
def test_a_rank_that_is_missing_is_missed(ranks: Ranks, tmp_path: Path) -> None:
    ranks(3, alone, str(tmp_path / "c"))
    (tmp_path / "c/__1.metadata").unlink()
    with pytest.raises(CorruptCheckpointError, match="is incomplete: no chunk has"):
        rankless.open(tmp_path / "c")


needs_hugging_face_writer = pytest.mark.skipif(not HAS_HUGGING_FACE_WRITER, reason="torch has no such writer")


def sharded_safetensors(path: str) -> None:
    state = get_model_state_dict(fill_run(LAYOUTS["fsdp_tp"][0]()).model)
    state = {name: tensor for name, tensor in state.items() if tensor.ndim and tensor.dtype.is_floating_point}
    dcp.save(state, storage_writer=dcp.HuggingFaceStorageWriter(path, save_distributed=True))


def whole_safetensors(path: str) -> None:
    dcp.save(
        {"a": torch.ones(3), "b": torch.arange(4.0)},
        storage_writer=dcp.HuggingFaceStorageWriter(path, fqn_to_index_mapping={"a": 1, "b": 2}),
    )


@needs_hugging_face_writer
def test_safetensors_in_shards(ranks: Ranks, tmp_path: Path) -> None:
    ranks(4, sharded_safetensors, str(tmp_path / "c"))
    assert len(list((tmp_path / "c").glob("shard-*.safetensors"))) == 4
    expected = {
        name: tensor for name, tensor in named_tensors(fill_run(LAYOUTS["plain"][0]())) if name.startswith("model/")
    }
    actual = opened(tmp_path / "c")
    assert len(actual) == len(expected) - 1
    assert all(equal_bits(tensor, expected[name]) for name, tensor in actual.items())
    (tmp_path / "c/shard-00002-model-00001-of-00001.safetensors").unlink()
    with pytest.raises(CorruptCheckpointError, match="is incomplete"):
        rankless.open(tmp_path / "c")


@needs_hugging_face_writer
def test_safetensors_that_are_whole(ranks: Ranks, tmp_path: Path) -> None:
    ranks(1, whole_safetensors, str(tmp_path / "c"))
    assert equal_bits(opened(tmp_path / "c")["model/b"], torch.arange(4.0))


# ---------------------------------------------------------------------------------------------------------------
# Any chunks of any tensor


@st.composite
def chunked(draw: st.DrawFn) -> tuple[torch.Tensor, list[IndexBox]]:
    """A tensor, cut into boxes in any way."""
    dtype = draw(st.sampled_from([dtype for name, dtype in DTYPES.items() if name != "F4"]))  # has no scalars
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=4)))
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (math.prod(shape) * dtype.itemsize,), dtype=torch.uint8)
    return raw.view(dtype).reshape(shape), draw(st.permutations(split_box(draw, IndexBox((0,) * len(shape), shape))))


@given(st.dictionaries(st.text("ab", min_size=1), chunked(), min_size=1, max_size=3), st.booleans(), st.data())
@settings(max_examples=80)
def test_any_range_of_any_chunks(states: dict[str, Any], backwards: bool, data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "c"
        write_chunks(path, states, lambda n: tuple(range(n))[:: -1 if backwards else 1])
        checkpoint = rankless.open(path)
        assert checkpoint.keys() == sorted(f"model/{name}" for name in states)
        for name, (tensor, _) in states.items():
            assert equal_bits(checkpoint[f"model/{name}"], tensor)
            start = data.draw(st.integers(0, tensor.numel()))
            stop = data.draw(st.integers(start, tensor.numel()))
            assert equal_bits(checkpoint.read(f"model/{name}", start, stop), tensor.flatten()[start:stop])


def test_torch_reads_what_the_test_above_writes(tmp_path: Path) -> None:
    """So that it is a test of torch's format."""
    tensor = torch.arange(24.0).reshape(4, 6)
    boxes = [IndexBox((0, 0), (4, 2)), IndexBox((0, 2), (1, 4)), IndexBox((1, 2), (3, 4))]
    write_chunks(tmp_path / "c", {"w": (tensor, boxes)}, lambda n: tuple(range(n)))
    target = {"w": torch.zeros(4, 6)}
    dcp.load(target, checkpoint_id=tmp_path / "c", no_dist=True)
    assert equal_bits(target["w"], tensor)
    assert equal_bits(opened(tmp_path / "c")["model/w"], tensor)


def test_a_range_of_a_large_chunk_reads_no_more_than_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    big = torch.arange(16 * 2**20, dtype=torch.int32)
    checkpoint = rankless.open(save_dcp(tmp_path / "c", {"model": {"w": big}}))
    sizes, plain = [], BufferedReader.read
    monkeypatch.setattr(
        BufferedReader, "read", lambda self, at, into: (sizes.append(len(into)), plain(self, at, into))[1]
    )
    assert equal_bits(checkpoint.read("model/w", 9_000_000, 9_000_010), big[9_000_000:9_000_010])
    assert sum(sizes) < 16 * 2**20 + 10_000  # a block, and what tells where the chunk lies


# ---------------------------------------------------------------------------------------------------------------
# The commands


def test_the_commands_take_such_a_folder(tmp_path: Path) -> None:
    path = save_dcp(tmp_path / "c", state_by_name(*train_model()))
    table = json.loads(command("show", "--json", str(path)).stdout)
    assert table["format"] == "dcp"
    assert {entry["name"] for entry in table["tensors"]} >= {"model/0.weight", "optimizer/0.weight/exp_avg"}
    assert table["values"]["user_content"] == {"step": 3}
    verified = command("verify", str(path))
    assert (verified.returncode, " verified" in verified.stdout) == (0, True)
    os.truncate(path / "__0_0.distcp", 5000)
    assert command("verify", str(path)).returncode == 1


def test_to_show_such_a_folder_takes_neither_torch_nor_numpy(tmp_path: Path) -> None:
    assert_needs_no_torch("show", str(save_dcp(tmp_path / "c", state_by_name(*train_model()))))
