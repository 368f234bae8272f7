"""Tests that checkpoints of all releases of NxD are read, whole and by name, without running code in them."""

import io
import json
import os
import re
import shutil
import zipfile
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import rankless
from rankless.errors import (
    CorruptCheckpointError,
    FormatError,
    InvalidArgumentError,
    NoCheckpointError,
    RanklessError,
    UnsafePickleError,
)
from rankless.nxd.offline_zero_conversion import ZeroRequest, convert_zero_checkpoints
from tests.helpers.fake_http import BUCKET
from tests.helpers.fake_s3 import FakeS3
from tests.helpers.nxd_files import (
    NAME,
    extract_golden,
    rank_file_name,
    read_files,
    save_rank_file,
    shard_rows,
    shard_zero_states,
)
from tests.helpers.unsafe_pickles import MARK_FILE, UNSAFE_OBJECTS

LAYOUT = json.dumps(
    {
        "rules": [{"match": "a.*", "dim": 0}, {"match": "b.weight", "dim": 1}, {"match": "*"}],
        "not_trained": ["buf", "frozen"],
    }
)
DIVIDED = {"a.weight": 0, "a.bias": 0, "b.weight": 1}


def opened(path: Path, **keys: str) -> rankless.Checkpoint:
    checkpoint = rankless.open(path, keys={"layout": LAYOUT} | keys)
    checkpoint._reader.check_files()
    for part in checkpoint.verify():
        if part.problem:
            raise CorruptCheckpointError(part.problem)
    return checkpoint


def whole() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    shapes = {
        "buf": (3,),
        "a.weight": (10, 4),
        "a.bias": (10,),
        "b.weight": (3, 10),
        "frozen": (2,),
        "norm.weight": (3,),
    }
    return {key: torch.randn(shape) for key, shape in shapes.items()}


def of_rank(tensors: dict[str, torch.Tensor], tp: int, rank: int) -> dict[str, torch.Tensor]:
    return {
        key: tensor.chunk(tp, DIVIDED[key])[rank].clone() if key in DIVIDED else tensor
        for key, tensor in tensors.items()
    }


TRAINED = ["a.weight", "a.bias", "b.weight", "norm.weight"]


def states() -> dict[str, dict[str, Any]]:
    return {key: {"step": torch.tensor(3.0), "exp_avg": whole()[key] + 1, "n": 5} for key in TRAINED}


def write(folder: Path, *, tp: int = 2, dp: int = 2, zero1: bool = True, **how: Any) -> Path:
    """A checkpoint with everything, as plain torch writes it."""
    masters = how.pop("masters", False)
    for t in range(tp):
        model = of_rank(whole(), tp, t)
        save_rank_file(folder / "model" / rank_file_name(tp=t), model, **how)
        parameters = {pid: model[key] for pid, key in enumerate(TRAINED)}
        own = {
            pid: {
                state: of_rank({key: value}, tp, t)[key] if state == "exp_avg" else value
                for state, value in states()[key].items()
            }
            for pid, key in enumerate(TRAINED)
        }
        if zero1:
            for d, tree in enumerate(shard_zero_states(parameters, own, dp, masters=masters)):
                save_rank_file(folder / "optim" / rank_file_name(d, t), tree, **how)
        else:
            save_rank_file(
                folder / "optim" / rank_file_name(tp=t),
                {"state": own, "param_groups": [{"lr": 0.1, "params": [0, 1, 2, 3]}]},
                **how,
            )
    return folder


def check(actual: rankless.Checkpoint) -> None:
    """It has all of it, under the names of parameters."""
    for key, value in whole().items():
        assert torch.equal(actual[f"model/{key}"], value)
    for key, own in states().items():
        assert torch.equal(actual[f"optimizer/{key}/exp_avg"], own["exp_avg"])
        assert actual[f"optimizer/{key}/step"] == 3.0
    (group,) = actual.values["optimizer"]["groups"]
    assert group["params"] == TRAINED
    assert group["state"]["a.bias"] == {"n": 5}


@pytest.mark.parametrize("kind", ["plain_xser1", "z1_xser1", "z1_nomaster"])
def test_what_nxd_wrote(tmp_path: Path, kind: str) -> None:
    folder = extract_golden(tmp_path) / kind
    before = read_files(folder)
    actual = opened(folder, copies="first")  # it was trained on ranks that did not talk to each other
    files = [folder / "model" / f"{rank_file_name(tp=t)}.tensors" for t in (0, 1)]
    weights = [torch.load(file / "tensor_3.pt", weights_only=True) for file in files]
    assert torch.equal(actual["model/b.weight"], torch.cat(weights, 1))
    if kind != "plain_xser1":
        parts = [folder / "optim" / f"{rank_file_name(d, t)}.tensors" / "tensor_1.pt" for t in (0, 1) for d in (0, 1)]
        own = [torch.load(part, weights_only=True) for part in parts]
        own = [torch.cat(pair)[:5] for pair in (own[:2], own[2:])]
        assert torch.equal(actual["optimizer/a.weight/exp_avg"], torch.cat(own))
    if kind == "z1_xser1":
        assert actual.values["user_content"]["step"] == 3
        assert torch.equal(actual.values["user_content"]["t"], torch.ones(2))
        assert actual.values["scheduler"]["state"]["base_lrs"] == [0.01]
    with pytest.raises(CorruptCheckpointError, match=r"b.bias.* differs between .*tp_rank_00.* and .*tp_rank_01"):
        opened(folder)
    assert read_files(folder) == before


def test_torchs_distributed_checkpoint_gets_all_of_it(tmp_path: Path) -> None:
    folder, keys = extract_golden(tmp_path) / "z1_xser1", {"copies": "first"}
    rankless.convert(folder, tmp_path / "dcp", to="dcp", layout=LAYOUT, keys=keys)
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "by_torch.pt")
    theirs, ours = torch.load(tmp_path / "by_torch.pt", weights_only=True), opened(folder, **keys)
    assert theirs["model"].keys() == {key.removeprefix("model/") for key in ours if key.startswith("model/")}
    for key in ours:
        group, _, name = key.partition("/")
        if group == "model":
            assert torch.equal(theirs["model"][name], ours[key]), key
        elif group == "optimizer":
            fqn, _, state = name.rpartition("/")
            assert torch.equal(theirs["optim"]["state"][fqn][state], ours[key]), key
    assert theirs["step"] == 3
    assert torch.equal(theirs["t"], torch.ones(2))
    assert theirs["scheduler"]["base_lrs"] == [0.01]


HOW: dict[str, dict[str, Any]] = {
    "0.18": {},
    "without xser": {"xser": False},
    "0.6 and before, without info": {"info": False},
    "without ZeRO-1": {"zero1": False},
    "without ZeRO-1 and xser": {"zero1": False, "xser": False},
    "with master weights": {"masters": True},
    "one tensor-parallel rank": {"tp": 1, "dp": 3},
    "more ranks than rows": {"dp": 8, "masters": True},
}


@pytest.mark.parametrize("how", HOW)
def test_releases_and_options(tmp_path: Path, how: str) -> None:
    check(opened(write(tmp_path / "a", **HOW[how])))


def test_what_its_converter_leaves_is_inline_beside_an_empty_folder(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", xser=False)
    for file in list((folder / "optim").iterdir()):
        (folder / "optim" / f"{file.name}.tensors").mkdir()
    check(opened(folder))


def test_a_reference_that_nxd_never_restores(tmp_path: Path) -> None:
    """Tensors in lists are pickled as another class, and are missing from what says their shapes."""
    folder = write(tmp_path / "a", tp=1, dp=1)
    path = folder / "optim" / rank_file_name()
    shutil.rmtree(folder / "optim")
    save_rank_file(
        path,
        {"state": {}, "param_groups": [{"lr": torch.tensor(0.25), "params": []}], "base_state": {}, "shape_info": {}},
    )
    raw = path.read_bytes()
    other = b"neuronx_distributed.trainer.checkpoint\n_InternalTensorReference"
    old = NAME.encode() + b"\nTensorReference"
    assert raw.count(old) == 1
    with zipfile.ZipFile(io.BytesIO(raw)) as source:
        entries = {entry: source.read(entry).replace(old, other) for entry in source.namelist()}
    with zipfile.ZipFile(path, "w") as target:
        for entry, data in entries.items():
            target.writestr(entry, data)
    torch.save({}, path.with_name(path.name + ".info.pt"))
    layout = json.dumps({"rules": [{"match": "*"}], "not_trained": ["*"]})
    checkpoint = rankless.open(folder, keys={"layout": layout})
    assert checkpoint.values["optimizer"]["groups"][0]["settings"]["lr"] == torch.tensor(0.25)


@pytest.mark.parametrize("left_out", [False, True])
def test_master_weights_are_what_training_goes_on_from(tmp_path: Path, left_out: bool) -> None:
    """With avoid_saving_lower_precision_weights the model's file names tensors that were never written."""
    folder = write(tmp_path / "a", masters=True)
    for t in range(2):
        file = folder / "model" / rank_file_name(tp=t)
        shutil.rmtree(file.with_name(file.name + ".tensors"))
        file.unlink()
        file.with_name(file.name + ".info.pt").unlink()
        save_rank_file(file, {key: value.bfloat16() for key, value in of_rank(whole(), 2, t).items()})
        if left_out:
            for tensor in file.with_name(file.name + ".tensors").iterdir():
                tensor.unlink()
    actual = opened(folder)
    for key in TRAINED:
        assert torch.equal(actual[f"model/{key}"], whole()[key])
    assert ("model/buf" in actual) != left_out
    if left_out:
        with pytest.raises(CorruptCheckpointError, match="left out of it"):
            opened(folder, weights="model")
    else:
        assert torch.equal(actual["model/frozen"], whole()["frozen"].bfloat16())
        low = opened(folder, weights="model")
        assert torch.equal(low["model/a.weight"], whole()["a.weight"].bfloat16())


@pytest.mark.parametrize("xser", [False, True])
def test_what_came_before_nxd_s_own_trainer(tmp_path: Path, xser: bool) -> None:
    """A folder with a file for each rank, or a file without an ending and a folder of tensors."""
    for t in range(2):
        tree = {"model": of_rank(whole(), 2, t), "optimizer": {"state": {}, "param_groups": []}, "epoch": 4}
        at = tmp_path / "a" / f"tp_rank_{t:02}_pp_rank_00"
        save_rank_file(at if xser else at / "checkpoint.pt", tree, xser=xser, info=False)
    actual = opened(tmp_path / "a")
    assert all(torch.equal(actual[f"model/{key}"], value) for key, value in whole().items())
    assert actual.values["user_content"] == {"epoch": 4}


def test_lightning_s_files_of_all_data_parallel_ranks(tmp_path: Path) -> None:
    model = whole()
    trees = shard_zero_states(
        {pid: model[key] for pid, key in enumerate(TRAINED)},
        {pid: dict(states()[key]) for pid, key in enumerate(TRAINED)},
        2,
    )
    for d, tree in enumerate(trees):
        whole_tree = {"state_dict": model, "optimizer_states": [tree], "lr_schedulers": [{"last_epoch": 3}], "epoch": 1}
        save_rank_file(tmp_path / "a" / f"tp_rank_00_pp_rank_00_dp_rank_{d:02}", whole_tree, info=False)
    actual = opened(tmp_path / "a")
    check(actual)
    assert actual.values["scheduler"]["state"] == {"last_epoch": 3}
    assert actual.values["user_content"] == {"epoch": 1}


def test_early_zero_files(tmp_path: Path) -> None:
    for d in range(2):
        tree = {
            "base_state": {0: {"m": shard_rows(torch.arange(5.0), 2)[d]}},
            "shape_info": {0: [5]},
            "param_groups": [{"params": [0]}],
        }
        save_rank_file(
            tmp_path / "a" / f"optim.dp_rank_{d:02}.tp_rank_00", {**tree, "dp_rank": d, "tp_rank": 0}, xser=False
        )
    checkpoint = rankless.open(tmp_path / "a")
    assert torch.equal(checkpoint["optimizer/0/m"], torch.arange(5.0))


def test_stages_of_a_pipeline_are_one_model(tmp_path: Path) -> None:
    tensors = {f"l{stage}.weight": torch.randn(5, 2) for stage in range(3)}
    for stage, (key, item) in enumerate(tensors.items()):
        save_rank_file(tmp_path / "model" / rank_file_name(pp=stage), {key: item})
        groups = [{"lr": torch.tensor(0.5), "betas": (0.9, 0.99), "params": [0]}]
        for d, tree in enumerate(shard_zero_states({0: item}, {0: {"exp_avg": item + 1}}, 2, groups=groups)):
            save_rank_file(tmp_path / "optim" / rank_file_name(d, pp=stage), tree)
    checkpoint = rankless.open(tmp_path)
    checkpoint._reader.check_files()
    assert all(torch.equal(checkpoint[f"model/{key}"], tensor) for key, tensor in tensors.items())
    assert all(torch.equal(checkpoint[f"optimizer/{key}/exp_avg"], tensor + 1) for key, tensor in tensors.items())
    assert checkpoint.values["optimizer"]["groups"][0]["params"] == list(tensors)


def test_experts_under_zero_have_groups_of_their_own(tmp_path: Path) -> None:
    """Data-parallel rank d has experts d % ep, and rows of them as the (d // ep)-th of its group."""
    ep, dp, experts = 2, 4, torch.randn(4, 3, 2)
    norm = torch.randn(5)
    for e in range(ep):
        save_rank_file(
            tmp_path / "model" / rank_file_name(ep=e),
            {"n": norm, "mlp.experts": experts.chunk(ep)[e]},
            experts=frozenset({"mlp.experts"}),
        )
    for d in range(dp):
        own = shard_rows(experts.chunk(ep)[d % ep] + 1, dp // ep)[d // ep]
        tree = {
            "state": {},
            "param_groups": [{"lr": 0.1, "params": [0]}, {"lr": 0.1, "params": [1]}],
            "base_state": {0: {"m": shard_rows(norm + 1, dp)[d]}, 1: {"m": own}},
            "shape_info": {0: [5], 1: [2, 3, 2]},
            **{f"ep_{kind}_offset": 1 for kind in ("param_id", "param_group", "base_state", "shape_info")},
        }
        save_rank_file(tmp_path / "optim" / rank_file_name(d), tree)
    checkpoint = rankless.open(
        tmp_path, keys={"layout": json.dumps({"rules": [{"match": "*experts", "experts": True}, {"match": "*"}]})}
    )
    checkpoint._reader.check_files()
    assert torch.equal(checkpoint["model/mlp.experts"], experts)
    assert torch.equal(checkpoint["optimizer/mlp.experts/m"], experts + 1)
    assert torch.equal(checkpoint["optimizer/n/m"], norm + 1)


def test_the_newest_is_told_by_its_number_and_by_its_end(tmp_path: Path) -> None:
    for step in (5, 100, 20, 200):
        folder = tmp_path / f"step_{step}"
        save_rank_file(folder / "model" / rank_file_name(), {"w": torch.tensor([float(step)])})
        (folder / "checkpoint").write_text("1")
        if step != 200:
            (folder / "done").write_text("1")
    os.utime(tmp_path / "step_20" / "done", (2e9, 2e9))
    assert rankless.open(tmp_path)["model/w"] == 100
    with pytest.raises(CorruptCheckpointError, match="step_200 was begun and has no 'done'"):
        rankless.open(tmp_path / "step_200")
    (tmp_path / "newest").write_text("step_100\nstep_5\n")
    assert rankless.open(tmp_path)["model/w"] == 5
    (tmp_path / "newest").write_text("step_7\n")  # names nothing that is there
    assert rankless.open(tmp_path)["model/w"] == 100
    for step in (5, 100, 20):
        (tmp_path / f"step_{step}" / "done").unlink()
    (tmp_path / "newest").unlink()
    with pytest.raises(NoCheckpointError, match="none of the checkpoints"):
        rankless.open(tmp_path)


@pytest.mark.parametrize("attack", UNSAFE_OBJECTS)
def test_nothing_is_run(tmp_path: Path, attack: str) -> None:
    folder = write(tmp_path / "a", tp=1, dp=1)
    torch.save({"step": UNSAFE_OBJECTS[attack]}, folder / "user_content.pt")
    with pytest.raises(UnsafePickleError, match="user_content"):
        rankless.open(folder)
    assert not Path(MARK_FILE).exists()


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", masters=True)
    cases = [
        (folder / "optim" / rank_file_name(1, 0), "dp_rank_01_tp_rank_00.* is missing"),
        (folder / "model" / rank_file_name(tp=0), "tp_rank_00.* is missing"),
        (folder / "model" / f"{rank_file_name(tp=1)}.tensors" / "tensor_2.pt", "tp_rank_01.*tensor_2.pt is missing"),
        (
            folder / "optim" / f"{rank_file_name(1, 1)}.tensors" / "tensor_3.pt",
            "dp_rank_01_tp_rank_01.*tensor_3.pt is missing",
        ),
    ]
    for file, message in cases:
        aside = tmp_path / "aside"
        file.rename(aside)
        with pytest.raises(CorruptCheckpointError, match=message):
            opened(folder)
        aside.rename(file)
    opened(folder)


def test_a_folder_whose_files_hold_nothing_of_training_is_named(tmp_path: Path) -> None:
    torch.save({"epoch": 3}, tmp_path / "tp_rank_00")
    with pytest.raises(FormatError, match=f"files in {tmp_path} hold neither"):
        rankless.open(tmp_path)


def test_numbers_of_parameters_get_names_only_where_it_is_certain(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", tp=1)
    with pytest.raises(InvalidArgumentError, match="4 parameters, and the layout puts 6"):
        rankless.open(folder)
    wrong = json.dumps({"rules": [{"match": "*"}], "not_trained": ["norm.weight", "frozen"]})
    with pytest.raises(InvalidArgumentError, match=r"parameter 0 of the optimizer has shape \[10, 4\], and 'buf'"):
        rankless.open(folder, keys={"layout": wrong})
    shutil.rmtree(folder / "optim")
    groups = [{"lr": 0.1, "params": [0, 1]}, {"lr": 0.2, "params": [2, 3]}]
    parameters = {pid: whole()[key] for pid, key in enumerate(["a.weight", "b.weight", "a.bias", "norm.weight"])}
    save_rank_file(folder / "optim" / rank_file_name(), shard_zero_states(parameters, {}, 1, groups=groups)[0])
    with pytest.raises(InvalidArgumentError, match="2 groups, and the layout does not say"):
        rankless.open(folder, keys={"layout": LAYOUT})
    spec = json.loads(LAYOUT) | {"groups": [["a.weight", "b.weight"], ["*"]]}
    checkpoint = rankless.open(folder, keys={"layout": json.dumps(spec)})
    assert [group["params"] for group in checkpoint.values["optimizer"]["groups"]] == [
        ["a.weight", "b.weight"],
        ["a.bias", "norm.weight"],
    ]


def test_whole_states_of_the_converter(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", masters=True)
    check(opened(convert_zero_checkpoints(ZeroRequest(folder, tmp_path / "b", None))))


def test_shards_of_two_steps_are_told(tmp_path: Path) -> None:
    folder = write(tmp_path / "a")
    other = write(tmp_path / "b")
    step = other / "optim" / f"{rank_file_name(1, 1)}.tensors" / "tensor_0.pt"
    torch.save(torch.tensor(4.0), step)
    shutil.copyfile(step, folder / "optim" / f"{rank_file_name(1, 1)}.tensors" / "tensor_0.pt")
    with pytest.raises(CorruptCheckpointError, match=r"step differs between .* and .*dp_rank_01_tp_rank_01"):
        opened(folder)


def test_bytes_that_are_not_nxd_s_are_refused_and_never_crash(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", tp=1)
    random = Random(0)
    files = [file for file in folder.rglob("*.pt") if file.is_file()]
    refused = 0
    for _ in range(150):
        file = random.choice(files)
        raw = file.read_bytes()
        broken = bytearray(raw)
        for _ in range(random.choice((1, 3))):
            broken[random.randrange(len(raw))] = random.randrange(256)
        file.write_bytes(broken[: random.choice((len(raw), random.randrange(len(raw))))])
        try:
            opened(folder, optimizer="read")
        except RanklessError:
            refused += 1
        finally:
            file.write_bytes(raw)
    assert refused > 50
    check(opened(folder))


def test_nothing_of_ours_asks_for_torch_xla() -> None:
    for file in (Path(rankless.__file__).parent).rglob("*.py"):
        names = re.findall(r"^\s*(?:from|import) (\S+)", file.read_text(), re.MULTILINE)
        assert not [item for item in names if item.startswith(("torch_xla", "neuronx"))], file


@pytest.mark.parametrize("kind", ["plain_xser1", "z1_xser1", "z1_nomaster"])
def test_what_nxd_wrote_is_read_from_an_object_store(tmp_path: Path, kind: str) -> None:
    folder, fake = extract_golden(tmp_path) / kind, FakeS3()
    with fake.connected():
        path = fake.store_at("http://fake").path(f"{BUCKET}/{kind}")
        for file in folder.rglob("*"):
            if file.is_file():
                path.store.replace_small(path / str(file.relative_to(folder)), file.read_bytes())
        stored, local = opened(path, copies="first"), opened(folder, copies="first")
        assert [*stored] == [*local]
        assert all(torch.equal(stored[key], local[key]) for key in local if isinstance(local[key], torch.Tensor))
        assert repr(stored.values) == repr(local.values)
