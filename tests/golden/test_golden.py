"""Tests that the format stays as it is: golden checkpoints of every version are read, and corrupt ones are refused.

Three sources agree on their contents: the formulas in ``golden/states.py``, a reader written from ``docs/format.md``
alone, and rankless. Rankless also still writes the same bytes.
"""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import nn
from typer.testing import CliRunner

import rankless
from rankless.cli.main import app
from rankless.errors import CorruptCheckpointError, NoCheckpointError
from rankless.ondisk import manifest
from rankless.ondisk.dtypes import PACKED_BITS, WIDTHS
from rankless.run import records_folder
from tests.golden import reader
from tests.golden.corruptions import DAMAGES, INDEX, STORED, text
from tests.golden.corruptions import manifest as edited
from tests.golden.make import DAMAGED, ROLLED_BACK, TAG, V1, save, save_rolled_back, stored
from tests.golden.reader import Refused, Tensor
from tests.golden.states import GOLDEN, NAMES, Golden, canonical, seen
from tests.helpers.pool import Ranks

Held = dict[tuple[str, str], Tensor]


def expected(golden: Golden) -> Held:
    return {(group, name): tensor for group, name, tensor in golden.expected()}


def held(objects: dict[str, Any]) -> Held:
    """Every tensor of a model or an optimizer, by group and name, looked up without rankless."""
    result: Held = {}
    for kind, tensors_of in (("model", in_model), ("optimizer", in_optimizer)):
        for slot, item in slots(objects, kind):
            own = dict(slots(objects, "model")).get(slot)
            result |= {(kind + slot, name): seen(tensor) for name, tensor in tensors_of(item, own)}
    return result


def slots(objects: dict[str, Any], kind: str) -> Iterator[tuple[str, Any]]:
    given = objects.get(kind)
    if isinstance(given, dict) and {"gen", "critic"} <= given.keys():
        yield from ((f"/{name}", value) for name, value in given.items())
    elif given is not None:
        yield "", given


def in_model(model: Any, _: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(model, nn.Module):
        yield from (*model.named_parameters(), *model.named_buffers())
    else:
        yield from ((name, value) for name, value in model.items() if isinstance(value, torch.Tensor))


def in_optimizer(optimizer: Any, model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(optimizer, dict):
        yield "0/a%2Fb%25c", optimizer["state"][0]["a/b%c"]
        return
    for name, parameter in model.named_parameters():
        yield from ((f"{name}/{state}", value) for state, value in optimizer.state[parameter].items())


def settings(objects: dict[str, Any]) -> Any:
    """What of the objects is no tensor."""
    result: dict[str, Any] = {}
    for slot, model in slots(objects, "model"):
        module = isinstance(model, nn.Module)
        result[f"model{slot}"] = getattr(model, "noted", None) and model.noted.kept if module else plain(model)
    for slot, optimizer in slots(objects, "optimizer"):
        groups = optimizer["param_groups"] if isinstance(optimizer, dict) else optimizer.param_groups
        result[f"optimizer{slot}"] = [
            {name: value for name, value in group.items() if name != "params"} | {"of": len(group["params"])}
            for group in groups
        ]
    for slot, scheduler in slots(objects, "scheduler"):
        result[f"scheduler{slot}"] = scheduler.state
    result["scaler"] = objects["stateful"]["scaler"].state if "stateful" in objects else None
    return canonical(result)


def plain(model: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in model.items() if not isinstance(value, torch.Tensor)}


def verify(path: Path) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["verify", str(path)], env={"COLUMNS": "1000"})
    assert "Traceback" not in done.output
    return done.exit_code, done.output


# ------------------------------------------------------------------------------------------------------------------
# Sound ones


@pytest.mark.parametrize("name", GOLDEN)
def test_a_reader_written_from_the_specification_finds_what_was_saved(name: str) -> None:
    golden = GOLDEN[name]()
    actual = reader.read(V1 / name / TAG)
    tensors = {
        (group, key): tensor
        for group, names in actual.tensors.items()
        if group not in {"state", "ranks"}
        for key, tensor in names.items()
    }
    assert tensors == expected(golden)
    assert {group: tied for group, tied in actual.tied.items() if tied} == golden.tied
    assert canonical(actual.state) == canonical(golden.state)
    own = [{key: value for key, value in rank.items() if key != "rng"} for rank in actual.ranks]
    assert canonical(own) == canonical(list(golden.own))
    assert set(actual.others) == set(golden.others)


#: The parameters of the golden optimizers as these list them: it is not the order of their names.
ORDER = ["scale", "none", "embed.weight", "body.0.weight", "body.0.bias", "body.1.weight", "weight", "bias", "0"]


@pytest.mark.parametrize("name", GOLDEN)
def test_open_finds_what_was_saved(name: str) -> None:
    golden = GOLDEN[name]()
    checkpoint = rankless.open(V1 / name)
    groups = sorted(golden.tensors, key=len, reverse=True)
    split = {key: next(group for group in groups if key.startswith(f"{group}/")) for key in checkpoint}
    assert {(group, key.removeprefix(f"{group}/")): seen(checkpoint[key]) for key, group in split.items()} == expected(
        golden
    )
    values = checkpoint.values
    for group in (group for slot, value in values.items() if slot.startswith("optimizer") for group in value["groups"]):
        # In ranks.json is the order of the optimizer itself: weights come before biases.
        assert group.pop("ordered") is True
        assert group["params"] == sorted(group["params"], key=ORDER.index)
        group["params"].sort()
    assert canonical(values) == canonical(golden.state)
    for group, tied in golden.tied.items():
        assert all(
            torch.equal(checkpoint[f"{group}/{left}"], checkpoint[f"{group}/{other}"]) for left, other in tied.items()
        )
    assert verify(V1 / name)[0] == 0


@pytest.mark.parametrize("name", GOLDEN)
def test_show_describes_every_value(name: str) -> None:
    assert CliRunner().invoke(app, ["show", str(V1 / name)]).exit_code == 0
    shown = json.loads(CliRunner().invoke(app, ["show", "--json", str(V1 / name)]).stdout)
    assert set(shown["values"]) == set(GOLDEN[name]().state)


@pytest.mark.parametrize("name", GOLDEN)
def test_a_load_brings_back_what_was_saved(name: str) -> None:
    golden = GOLDEN[name]()
    objects = golden.blank
    assert held(objects) != expected(golden)
    content = rankless.load_checkpoint(V1 / name, None, **objects)
    assert held(objects) == expected(golden)
    assert settings(objects) == settings(golden.saved)
    assert canonical(content) == canonical(golden.state.get("user_content"))


def resume(path: str) -> tuple[Any, Any, list[float]]:
    golden = GOLDEN["training"]()
    loader = golden.saved["scheduler"].__class__()
    random.seed(1)
    torch.manual_seed(1)
    restored = rankless.restore(path, dataloader=loader, **golden.blank)
    assert not restored.missing
    assert held(golden.blank) == expected(golden)
    drawn = [random.random(), float(np.random.rand()), float(torch.rand(()))]  # noqa: NPY002
    return canonical(restored.per_rank_content), canonical(loader.state), drawn


def test_each_rank_gets_its_own_back(ranks: Ranks) -> None:
    seeded = [
        random.Random(0).random(),
        float(np.random.RandomState(0).rand()),
        float(torch.rand((), generator=torch.Generator().manual_seed(0))),
    ]
    own = GOLDEN["training"]().own
    for rank, result in enumerate(ranks(3, resume, str(V1 / "training"))):
        assert result == (canonical(own[rank]["content"]), canonical(own[rank]["dataloader"]), seeded)


def of_the_libraries(name: str, path: str) -> bool:
    """Whether a file's bytes depend on the state of a library's random generator, too."""
    return name == "training" and path in {"ranks.safetensors", "manifest.json"}


@pytest.mark.parametrize("name", GOLDEN)
def test_what_is_written_today_is_what_was_written_then(name: str, ranks: Ranks, tmp_path: Path) -> None:
    ranks(len(GOLDEN[name]().own), save, name, str(tmp_path))
    then, now = contents(V1 / name), contents(tmp_path)
    records = {records_folder.JOURNAL, records_folder.FOLDER}
    for file in [file for file in now if Path(file).parts[0] in records]:
        del now[file]  # they differ from save to save
    assert now.keys() == then.keys()
    for path, raw in now.items():
        assert raw == then[path] or of_the_libraries(name, Path(path).name), path


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("file", sorted(V1.rglob("*.safetensors")), ids=lambda file: str(file.relative_to(V1)))
def test_the_safetensors_library_reads_every_data_file(file: Path) -> None:
    raw = file.read_bytes()
    size = 8 + int.from_bytes(raw[:8], "little")
    ours = reader.read_data(file, raw, {"header_size": size, "header_crc64nvme": reader.crc64(raw[:size])})
    with safe_open(file, "pt") as theirs:
        assert set(theirs.keys()) == set(ours.tensors)
        assert all(seen(theirs.get_tensor(name)) == tensor for name, tensor in ours.tensors.items())
    assert size % 4096 == 0


@pytest.mark.parametrize("name", GOLDEN)
def test_manifests_are_of_the_published_schema(name: str) -> None:
    raw = (V1 / name / TAG / "manifest.json").read_bytes()
    jsonschema.validate(json.loads(raw), json.loads(manifest.manifest_schema()))


def test_every_dtype_is_among_them() -> None:
    assert {dtype for names in GOLDEN["dtypes"]().tensors.values() for dtype, _ in names.values()} == set(reader.WIDTHS)
    assert set(NAMES.values()) == set(reader.WIDTHS)
    assert (WIDTHS, PACKED_BITS) == (reader.WIDTHS, reader.PACKED_BITS)


def test_the_crc_is_the_one_that_the_page_names() -> None:
    assert reader.crc64(b"123456789") == "ae8b14860a799888"
    assert reader.crc64(b"") == "0" * 16


def test_they_are_small() -> None:
    assert sum(file.stat().st_size for folder in (V1, DAMAGED) for file in folder.rglob("*") if file.is_file()) < 1.5e6


# ------------------------------------------------------------------------------------------------------------------
# Damaged ones


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "run"


#: The checkpoints of the run that went back, oldest first, and whether each is current.
ROLLED_BACK_TO_1 = {"step_2@1": False, "step_3": False, "step_1": True, "step_2": True}


def test_the_history_says_which_checkpoints_are_current(tmp_path: Path) -> None:
    run = shutil.copytree(V1 / ROLLED_BACK, tmp_path / "run")
    history = reader.newest_entry(run)
    assert {info.tag: info.is_current for info in rankless.list_checkpoints(run)} == ROLLED_BACK_TO_1
    assert {
        folder.name: reader.is_current(reader.read_manifest(folder), history) for folder in run.glob("step_*")
    } == ROLLED_BACK_TO_1
    assert reader.latest(run).name == rankless.restore(run, None, state := {"step": torch.tensor(0)}, rng=False).tag
    assert state["step"] == 22


def test_without_its_history_all_checkpoints_are_current(tmp_path: Path) -> None:
    run = shutil.copytree(V1 / ROLLED_BACK, tmp_path / "run", ignore=shutil.ignore_patterns(".history"))
    assert reader.latest(run).name == rankless.restore(run, None, {"step": torch.tensor(0)}, rng=False).tag == "step_2"


def test_the_history_of_today_is_that_of_then(tmp_path: Path) -> None:
    save_rolled_back(tmp_path)
    now, then = contents(tmp_path), contents(V1 / ROLLED_BACK)
    assert now.keys() == then.keys()
    for name, raw in now.items():
        assert without_tokens(raw) == without_tokens(then[name]), name


def without_tokens(raw: bytes) -> bytes:
    """Jobs draw them, also in loads."""
    return re.sub(rb'"token":"[0-9a-f]{16}"', b"", raw)


def damaged(name: str, run: Path) -> Path:
    folder = shutil.copytree(V1 / DAMAGES[name].of / TAG, run / TAG)
    DAMAGES[name].do(folder)
    return folder


@pytest.mark.parametrize("name", DAMAGES)
def test_a_load_says_what_is_wrong_and_so_does_verify(name: str, run: Path) -> None:
    folder = damaged(name, run)
    judge(name, folder)


@pytest.mark.parametrize("name", STORED)
def test_one_that_was_damaged_then_is_refused_as_it_was(name: str) -> None:
    judge(name, stored(name))


def judge(name: str, folder: Path) -> None:
    damage, golden = DAMAGES[name], GOLDEN[DAMAGES[name].of]()
    if damage.sound:
        reader.read(folder)
    else:
        with pytest.raises(Refused):
            reader.read(folder)
    assert verify(folder)[0] == (0 if damage.sound else 2 if damage.error is NoCheckpointError else 1)
    if damage.error is None:
        rankless.load_checkpoint(folder.parent, TAG, **golden.blank)
        assert held(golden.blank) == expected(golden)
        return
    with pytest.raises(damage.error, match=f"(?s){damage.words}") as caught:
        rankless.load_checkpoint(folder.parent, TAG, **golden.blank)
    assert type(caught.value) is damage.error
    assert TAG in str(caught.value)


#: By day each kind of error of each checkpoint; what a load says of every damage is by day, too.
FALLS_BACK = {(damage.of, damage.error, damage.falls_back): name for name, damage in DAMAGES.items() if damage.error}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in FALLS_BACK.values() else pytest.mark.full)
        for name, damage in DAMAGES.items()
        if damage.error is not None
    ],
)
def test_a_run_falls_back_to_the_sound_one_before(name: str, run: Path) -> None:
    damage, golden = DAMAGES[name], GOLDEN[DAMAGES[name].of]()
    damaged(name, run)
    older = shutil.copytree(V1 / damage.of / TAG, run / "older")
    edited(lambda table: table.update(sequence=0, id="0" * 16))(older)
    if not damage.falls_back:
        with pytest.raises(damage.error, match=TAG):
            rankless.load_checkpoint(run, **golden.blank)
        return
    if damage.error is NoCheckpointError:  # what has no manifest is no checkpoint, and nothing to speak of
        assert rankless.restore(run, **golden.blank).skipped_checkpoints == ()
    else:
        is_corrupt = issubclass(damage.error, CorruptCheckpointError)  # of a newer or another format nobody can tell
        adjective = "corrupt" if is_corrupt else "unreadable"
        with pytest.warns(UserWarning, match=f"loaded 'older' and ignored other checkpoints: {TAG} is {adjective};"):
            restored = rankless.restore(run, **golden.blank)
        assert (restored.tag, restored.skipped_checkpoints) == ("older", (TAG,) if is_corrupt else ())
        with pytest.raises((CorruptCheckpointError, damage.error), match=TAG):
            rankless.restore(run, on_corruption="raise", **GOLDEN[damage.of]().blank)
    assert held(golden.blank) == expected(golden)


def test_a_folder_that_was_renamed_is_what_it_was_under_its_new_name(run: Path) -> None:
    shutil.copytree(V1 / "training" / TAG, run / "best")
    golden = GOLDEN["training"]()
    assert rankless.restore(run, "best", **golden.blank).tag == "best"
    assert held(golden.blank) == expected(golden)
    assert [info.tag for info in rankless.list_checkpoints(run)] == ["best"]


def test_a_checkpoint_that_says_nothing_of_its_writer_is_shown(run: Path) -> None:
    folder = shutil.copytree(V1 / "training" / TAG, run / TAG)
    edited(lambda table: table.update(provenance={}))(folder)
    done = CliRunner().invoke(app, ["show", str(run)], env={"COLUMNS": "200"})
    assert done.exit_code == 0
    assert "with" not in {line.split(" ")[0] for line in done.output.splitlines()}


def test_a_model_alone_says_which_file_its_index_misses(run: Path) -> None:
    folder = shutil.copytree(V1 / "files" / TAG, run / TAG)
    assert {f"model/{name}" for name in GOLDEN["files"]().tensors["model"]} == set(rankless.open(folder / "model"))
    text(INDEX, "00003-of", "00009-of")(folder)
    with pytest.raises(CorruptCheckpointError, match=r"model-00009-of-00004\.safetensors is missing"):
        rankless.open(folder / "model")
