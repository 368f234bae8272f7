"""Tests that malicious checkpoints are refused with an error that names the file, quickly and with little memory.

Unless a test is about the manifest, sizes and CRCs are fixed after the change, so that the contents are refused and not
the checksum.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rankless
from rankless.errors import CorruptCheckpointError, FormatError, NoCheckpointError, RanklessError, UnsafeNameError
from rankless.ondisk.block_crcs import crc64
from tests.helpers.bounded_reads import limit_memory, read_checkpoint
from tests.helpers.forged_values import FORGED_VALUES, UNKNOWN_VALUES
from tests.helpers.pairwise import each_value
from tests.helpers.sealed_checkpoints import (
    DATA,
    FILES,
    MANIFEST,
    MODEL,
    RANK_TENSORS,
    RANKS,
    STATE,
    STATE_TENSORS,
    read_manifest,
    reseal_checkpoint,
    seal_manifest,
)

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("without_garbage")]


NESTED = ["[" * 100_000 + "]" * 100_000, '{"a":' * 100_000 + "1" + "}" * 100_000]


class Training:
    """What is saved, and what hostile checkpoints are loaded into."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Linear(3, 2)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.model(torch.ones(3)).sum().backward()
        self.optimizer.step()
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("good")
    training = Training()
    content = {"array": np.arange(4), "tensor": torch.arange(3), "text": "x"}
    rankless.save_checkpoint(
        run,
        "step_1",
        training.model,
        training.optimizer,
        training.scheduler,
        content,
        per_rank_content={"t": torch.ones(2)},
    )
    assert {str(file.relative_to(run / "step_1")) for file in (run / "step_1").rglob("*.*")} == {*FILES, MANIFEST}
    return run / "step_1"


@pytest.fixture
def folder(good: Path, tmp_path: Path) -> Path:
    """A copy of a good checkpoint, to be tampered with."""
    return Path(shutil.copytree(good, tmp_path / "run" / "step_1"))


def parts_of(file: Path) -> tuple[dict[str, Any], bytes]:
    """The header's JSON and the data of a safetensors file."""
    raw = file.read_bytes()
    size = int.from_bytes(raw[:8], "little") + 8
    return json.loads(raw[8:size]), raw[size:]


def with_header(file: Path, text: str | dict[str, Any], data: bytes | None = None) -> None:
    """Replace the header of a file, and its data where some is given."""
    encoded = (text if isinstance(text, str) else json.dumps(text)).encode()
    kept = parts_of(file)[1] if data is None else data
    file.write_bytes(len(encoded).to_bytes(8, "little") + encoded + kept)


def load(folder: Path) -> None:
    """Resume from a checkpoint."""
    training = Training()
    rankless.load_checkpoint(folder, None, training.model, training.optimizer, training.scheduler)


def assert_refused(
    folder: Path, names: str | Path, kinds: type[RanklessError] | tuple[type[RanklessError], ...] = RanklessError
) -> None:
    """Whoever opens or loads the checkpoint gets an error of ours that names the file."""
    for call in (read_checkpoint, load):
        with limit_memory(), pytest.raises(kinds) as caught:
            call(folder)
        assert str(names) in str(caught.value), call.__name__


def test_the_checkpoint_is_good_before_it_is_tampered_with(folder: Path) -> None:
    reseal_checkpoint(folder)
    with limit_memory():
        read_checkpoint(folder)
        load(folder)


# ---------------------------------------------------------------------------------------------------------------
# Files that are not what the manifest says


@pytest.mark.parametrize("name", [*FILES, MANIFEST])
@pytest.mark.parametrize("keep", ["nothing", "a byte", "half", "all but a byte"])
def test_a_file_cut_short_is_named(folder: Path, name: str, keep: str) -> None:
    size = (folder / name).stat().st_size
    os.truncate(folder / name, {"nothing": 0, "a byte": 1, "half": size // 2, "all but a byte": size - 1}[keep])
    assert_refused(folder, folder / name, CorruptCheckpointError)


@pytest.mark.parametrize("name", DATA)
@pytest.mark.parametrize("keep", [0, 1, 7, 8, 9, 4095, 4096])
def test_a_data_file_cut_short_is_named_when_the_manifest_says_the_same(folder: Path, name: str, keep: int) -> None:
    os.truncate(folder / name, keep)
    reseal_checkpoint(folder)
    assert_refused(folder, folder / name, CorruptCheckpointError)


@pytest.mark.parametrize("name", FILES)
def test_a_file_with_bytes_to_spare_is_named(folder: Path, name: str) -> None:
    with (folder / name).open("ab") as file:
        file.write(b" ")
    assert_refused(folder, folder / name, CorruptCheckpointError)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kind", ["nothing", "folder", "FIFO", "link to a device"])
def test_something_else_in_place_of_a_file_is_named(folder: Path, name: str, kind: str) -> None:
    replace(folder / name, kind)
    assert_refused(folder, folder / name)


def replace(path: Path, kind: str) -> None:
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind == "FIFO":
        os.mkfifo(path)
    elif kind == "link to a device":
        path.symlink_to("/dev/zero")


@pytest.mark.parametrize("kind", ["nothing", "folder", "FIFO", "link to a device"])
def test_a_folder_without_a_manifest_is_no_checkpoint(folder: Path, kind: str) -> None:
    replace(folder / MANIFEST, kind)
    assert_refused(folder, folder, NoCheckpointError)
    assert not rankless.has_checkpoint(folder.parent)


@pytest.mark.parametrize("name", [*FILES, MANIFEST])
def test_a_link_out_of_the_folder_is_refused(folder: Path, name: str) -> None:
    outside = folder.parent / "outside"
    shutil.move(folder / name, outside)
    (folder / name).symlink_to(outside)
    assert_refused(folder, folder / name, UnsafeNameError)


def test_a_folder_that_is_a_link_out_is_refused(folder: Path) -> None:
    shutil.move(folder / "model", folder.parent / "outside")
    (folder / "model").symlink_to(folder.parent / "outside")
    assert_refused(folder, folder / MODEL, UnsafeNameError)


@pytest.mark.parametrize("name", FILES)
def test_a_link_to_itself_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    (folder / name).symlink_to(folder / name)
    assert_refused(folder, folder / name)


# ---------------------------------------------------------------------------------------------------------------
# The manifest


@pytest.mark.parametrize("name", ["../step_1/state", "model/../../x", "/etc/passwd", "a\\b", "a\0b", "a//b", "./a"])
@pytest.mark.parametrize("ending", ["", ".safetensors", "/..", "/"])
def test_a_name_in_the_manifest_that_may_lead_out_is_refused(folder: Path, name: str, ending: str) -> None:
    reseal_checkpoint(folder, lambda table: table["files"].update({name + ending: table["files"][MODEL]}))
    assert_refused(folder, folder / MANIFEST, UnsafeNameError)


@pytest.mark.parametrize("name", ["x" * 300, "é" * 128, "x" * 5000, "x/" * 3000 + "x"], ids=len)
@pytest.mark.parametrize("ending", ["", ".safetensors"])
def test_a_name_longer_than_any_file_has_is_refused(folder: Path, name: str, ending: str) -> None:
    reseal_checkpoint(folder, lambda table: table["files"].update({name + ending: table["files"][MODEL]}))
    assert_refused(folder, folder / MANIFEST, UnsafeNameError)


@pytest.mark.parametrize("name", ["absent", "absent.safetensors", "state.json/x", "state.json/x.safetensors"])
def test_a_name_of_no_file_is_named(folder: Path, name: str) -> None:
    reseal_checkpoint(folder, lambda table: table["files"].update({name: table["files"][MODEL]}))
    assert_refused(folder, folder / name, CorruptCheckpointError)


def test_a_newer_version_is_named_as_such(folder: Path) -> None:
    reseal_checkpoint(folder, lambda table: table.update(version=2, more={}))
    assert_refused(folder, "update rankless", FormatError)
    assert_refused(folder, folder / MANIFEST, FormatError)


@pytest.mark.parametrize("text", ['{"format": "other"}', "{}", '{"format": "rankless", "version": 0}'])
def test_a_manifest_of_something_else_is_named_as_such(folder: Path, text: str) -> None:
    (folder / MANIFEST).write_text(text)
    assert_refused(folder, folder / MANIFEST, FormatError)


@pytest.mark.parametrize(
    "edit",
    [
        pytest.param(lambda table: table["files"].clear(), id="no files"),
        pytest.param(lambda table: table["files"].pop(STATE), id="no state.json"),
        pytest.param(lambda table: table["files"].pop(RANKS), id="no ranks.json"),
        pytest.param(lambda table: table["files"].pop(STATE_TENSORS), id="no tensors of the values"),
        pytest.param(lambda table: table["files"].pop(RANK_TENSORS), id="no tensors of the ranks"),
        pytest.param(lambda table: table["files"][MODEL].update(size=2**63), id="a file of exabytes"),
        pytest.param(lambda table: table["files"][MODEL].update(size=-1), id="a file of less than nothing"),
        pytest.param(lambda table: table["files"][MODEL].update(header_size=2**63), id="a header of exabytes"),
        pytest.param(lambda table: table["files"][MODEL].pop("header_size"), id="no size of a header"),
        pytest.param(lambda table: table["files"][MODEL].pop("header_crc64nvme"), id="no CRC of a header"),
        pytest.param(lambda table: table["files"][MODEL].update(header_crc64nvme="0" * 16), id="another header"),
        pytest.param(lambda table: table["files"][STATE].update(crc64nvme="0" * 16), id="another state.json"),
        pytest.param(lambda table: table["files"][RANKS].update(size=2**62), id="another size of ranks.json"),
        pytest.param(lambda table: table.update(files=[]), id="a list of files"),
        pytest.param(lambda table: table.pop("sequence"), id="a missing field"),
    ],
)
def test_a_manifest_that_lies_is_refused(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    reseal_checkpoint(folder, edit)
    assert_refused(folder, folder, CorruptCheckpointError)


@pytest.mark.parametrize("nested", NESTED, ids=["lists", "objects"])
@pytest.mark.parametrize("sealed", [True, False])
def test_a_manifest_nested_without_end_is_refused(folder: Path, nested: str, sealed: bool) -> None:
    text = json.dumps({**read_manifest(folder), "metrics": "HERE"}, indent=2).replace('"HERE"', nested)
    (folder / MANIFEST).write_bytes(seal_manifest(text) if sealed else nested.encode())
    assert_refused(folder, folder / MANIFEST, CorruptCheckpointError)


def test_a_manifest_with_a_key_twice_is_refused(folder: Path) -> None:
    text = json.dumps(read_manifest(folder), indent=2).replace('"sequence": 1', '"sequence": 9, "sequence": 1')
    (folder / MANIFEST).write_bytes(seal_manifest(text))
    assert_refused(folder, folder / MANIFEST, CorruptCheckpointError)


def test_two_files_with_one_tensor_are_refused(folder: Path) -> None:
    shutil.copyfile(folder / MODEL, folder / "model/again.safetensors")
    reseal_checkpoint(folder, lambda table: table["files"].update({"model/again.safetensors": table["files"][MODEL]}))
    assert_refused(folder, folder / "model", CorruptCheckpointError)


def test_a_damaged_checkpoint_does_not_hide_the_others_of_its_run(folder: Path) -> None:
    shutil.copytree(folder, folder.parent / "step_2")
    (folder.parent / "step_2" / MANIFEST).write_bytes(seal_manifest(NESTED[0]))
    listed = rankless.list_checkpoints(folder.parent)
    assert {info.tag: info.status for info in listed} == {"step_1": "complete", "step_2": "damaged"}
    read_checkpoint(folder.parent)


# ---------------------------------------------------------------------------------------------------------------
# Headers of data files


def forged_entry(**changes: Any) -> Callable[[dict[str, Any]], object]:
    """An edit of a header's first tensor."""

    def edit(table: dict[str, Any]) -> None:
        name = next(name for name in table if name != "__metadata__")
        table[name] |= changes

    return edit


def shifted(by: int) -> Callable[[dict[str, Any]], object]:
    """An edit that moves the last tensor of a header."""

    def edit(table: dict[str, Any]) -> None:
        last = max((value for name, value in table.items() if name != "__metadata__"), key=lambda e: e["data_offsets"])
        last["data_offsets"] = [offset + by for offset in last["data_offsets"]]

    return edit


HEADERS = {
    "an unknown dtype": forged_entry(dtype="O"),
    "a dtype of half bytes": forged_entry(dtype="F4"),
    "a product beyond 64 bits": forged_entry(shape=[2**40, 2**40]),
    "a product that wraps to nothing": forged_entry(shape=[2**32, 2**32]),
    "dimensions beyond 64 bits": forged_entry(shape=[2**64 + 1]),
    "an unsigned dimension": forged_entry(shape=[2**64 - 1]),
    "a negative dimension": forged_entry(shape=[-1, -6]),
    "a product that takes minutes": forged_entry(shape=[2**63] * 20_000),
    "dimensions without end": forged_entry(shape=[1] * 100_000),
    "a fraction of a dimension": forged_entry(shape=[1.5]),
    "a text for a shape": forged_entry(shape="23"),
    "offsets beyond the file": forged_entry(data_offsets=[2**40, 2**40 + 24]),
    "offsets beyond 64 bits": forged_entry(data_offsets=[2**64, 2**64 + 24]),
    "offsets before the data": forged_entry(data_offsets=[-24, 0]),
    "offsets backwards": forged_entry(data_offsets=[24, 0]),
    "an overlap": shifted(-4),
    "a hole": shifted(4),
    "a surprise in an entry": lambda table: table.update(extra=5),
    "no metadata": lambda table: table.pop("__metadata__"),
    "metadata that is a list": lambda table: table.update(__metadata__=[]),
    "metadata of numbers": lambda table: table["__metadata__"].update(a=1),
    "no CRCs": lambda table: table["__metadata__"].pop("rankless.crc64nvme"),
    "a CRC too few": lambda table: table["__metadata__"].update({"rankless.crc64nvme": ""}),
    "a CRC too many": lambda table: table["__metadata__"].update({"rankless.crc64nvme": "0" * 16 * 99}),
    "CRCs that are none": lambda table: table["__metadata__"].update({"rankless.crc64nvme": "g" * 16}),
    "CRCs of other bytes": lambda table: table["__metadata__"].update(
        {"rankless.crc64nvme": "0" * len(table["__metadata__"]["rankless.crc64nvme"])}
    ),
    "a tie to nothing": lambda table: table["__metadata__"].update({"rankless.tied": '{"a":"nothing"}'}),
    "a tie to a number": lambda table: table["__metadata__"].update({"rankless.tied": '{"a":1}'}),
    "a tie of another tensor": lambda table: table["__metadata__"].update(
        {"rankless.tied": json.dumps({list(table)[-1]: list(table)[-2]})}
    ),
    "a tie to a list": lambda table: table["__metadata__"].update({"rankless.tied": '{"a":["b"]}'}),
    "ties that are no object": lambda table: table["__metadata__"].update({"rankless.tied": "[1]"}),
    "ties that are no JSON": lambda table: table["__metadata__"].update({"rankless.tied": "{"}),
    "ties nested without end": lambda table: table["__metadata__"].update({"rankless.tied": NESTED[0]}),
}


@each_value({"attack": HEADERS, "name": [MODEL, STATE_TENSORS]})
def test_a_forged_header_is_refused(folder: Path, attack: str, name: str) -> None:
    table, _ = parts_of(folder / name)
    HEADERS[attack](table)
    with_header(folder / name, table)
    reseal_checkpoint(folder)
    assert_refused(folder, folder / name, (CorruptCheckpointError, FormatError))


@pytest.mark.parametrize("claimed", [0, 1, 2**31, 2**63, 2**64 - 1, 2**64 - 8, 100_000_001])
def test_a_header_of_an_absurd_length_is_refused(folder: Path, claimed: int) -> None:
    raw = (folder / MODEL).read_bytes()
    (folder / MODEL).write_bytes(claimed.to_bytes(8, "little") + raw[8:])
    reseal_checkpoint(folder)
    assert_refused(folder, folder / MODEL, CorruptCheckpointError)


@pytest.mark.parametrize("text", [*NESTED, '{"__metadata__":{"a":' + NESTED[0] + "}}", '{"w":' + NESTED[0] + "}"])
def test_a_header_nested_without_end_is_refused(folder: Path, text: str) -> None:
    with_header(folder / MODEL, text)
    reseal_checkpoint(folder)
    assert_refused(folder, folder / MODEL, CorruptCheckpointError)


@pytest.mark.parametrize("shape", [[0, 2**62, 2**62], [2**62, 2**62, 0], [0, 2**64]], ids=str)
def test_an_empty_tensor_of_an_impossible_shape_is_refused(folder: Path, shape: list[int]) -> None:
    table = {"__metadata__": {"rankless.crc64nvme": ""}, "w": {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}}
    with_header(folder / STATE_TENSORS, table, b"")
    (folder / STATE).write_text('{"user_content":{"$tensor":"w"}}')
    reseal_checkpoint(folder)
    assert_refused(folder, folder / STATE_TENSORS, CorruptCheckpointError)


# ---------------------------------------------------------------------------------------------------------------
# Values


@each_value({"forged": FORGED_VALUES, "name": [STATE, RANKS]})
def test_forged_values_are_refused(folder: Path, forged: str, name: str) -> None:
    put_value(folder, forged, name)
    assert_refused(folder, folder / name, CorruptCheckpointError)


@each_value({"value": UNKNOWN_VALUES, "name": [STATE, RANKS]})
def test_values_of_a_newer_version_are_refused(folder: Path, value: str, name: str) -> None:
    put_value(folder, value, name)
    assert_refused(folder, folder / name, FormatError)


def put_value(folder: Path, value: str, name: str) -> None:
    raw = (folder / name).read_text()
    if name == STATE:
        (folder / name).write_text(raw.removesuffix("}") + f',"more":{value}}}')
    else:
        (folder / name).write_text(f'{{"ranks":[{{"content":{value}}}]}}')
    reseal_checkpoint(folder)


@pytest.mark.parametrize("name", [STATE, RANKS])
@pytest.mark.parametrize("text", ["", "null", "[]", "5", '"text"', "{", "\0", *NESTED], ids=lambda text: text[:9])
def test_values_that_are_no_table_are_refused(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)
    reseal_checkpoint(folder)
    assert_refused(
        folder, folder / name if text not in {"null", "[]", "5", '"text"'} else folder, CorruptCheckpointError
    )


@pytest.mark.parametrize("junk", ["null", "5", "[]", '["a"]', '"text"', '{"a":{"b":{}}}'])
@pytest.mark.parametrize("part", ["optimizer", "model"])
def test_parts_that_are_not_what_they_should_be_are_refused(folder: Path, part: str, junk: str) -> None:
    table = json.loads((folder / STATE).read_text())
    table[part] = json.loads(junk)
    (folder / STATE).write_text(json.dumps(table))
    reseal_checkpoint(folder)
    with limit_memory(), pytest.raises(RanklessError, match=str(folder)):
        load(folder)


OPTIMIZERS = {
    "no class": lambda saved: saved["groups"][0].pop("class"),
    "settings that are a list": lambda saved: saved["groups"][0].update(settings=[1]),
    "no groups": lambda saved: saved.pop("groups"),
    "groups that are a number": lambda saved: saved.update(groups=1),
    "a group that is a number": lambda saved: saved.update(groups=[1]),
    "a group without parameters": lambda saved: saved["groups"][0].pop("params"),
    "parameters that are a number": lambda saved: saved["groups"][0].update(params=1),
    "parameters that are lists": lambda saved: saved["groups"][0].update(params=[["weight"], ["bias"]]),
    "a state that is a list": lambda saved: saved["groups"][0].update(state=["a"]),
    "a state of a parameter that is a number": lambda saved: saved["groups"][0].update(state={"weight": 5}),
}


@pytest.mark.parametrize("attack", OPTIMIZERS)
def test_a_forged_optimizer_is_refused(folder: Path, attack: str) -> None:
    table = json.loads((folder / STATE).read_text())
    OPTIMIZERS[attack](table["optimizer"])
    (folder / STATE).write_text(json.dumps(table))
    reseal_checkpoint(folder)
    with limit_memory(), pytest.raises(RanklessError, match=str(folder)):
        load(folder)


RANK_PARTS = ["5", "[]", '"text"', '{"rng":5}', '{"rng":[]}', '{"rng":"text"}', '{"rng":{}}', '{"rng":{"python":{}}}']


@pytest.mark.parametrize(
    "ranks",
    ["{}", '{"ranks":{}}', '{"ranks":5}', *(f'{{"ranks":[{part}]}}' for part in RANK_PARTS)],
)
def test_what_belongs_to_ranks_is_refused_where_it_is_forged(folder: Path, ranks: str) -> None:
    """Nothing of the caller's is changed by it."""
    (folder / RANKS).write_text(ranks)
    reseal_checkpoint(folder)
    training, before = Training(), Training()
    with torch.no_grad():
        training.model.weight += 1
        before.model.weight += 1
    with limit_memory(), pytest.raises(RanklessError, match=str(folder)):
        rankless.load_checkpoint(folder, None, training.model, training.optimizer, training.scheduler)
    assert torch.equal(training.model.weight, before.model.weight)


def test_generators_forged_to_wrong_states_are_refused(folder: Path) -> None:
    """The table of generators is as it should be, but the words of one are too few."""
    table = json.loads((folder / RANKS).read_text())
    words = json.dumps(table["ranks"][0]["rng"]["torch"])
    (folder / RANKS).write_text(json.dumps(table).replace(words, '{"$tensor":"0/content.t"}'))
    reseal_checkpoint(folder)
    with limit_memory(), pytest.raises(RanklessError, match=str(folder)):
        load(folder)


def test_nothing_in_a_checkpoint_is_ever_run(folder: Path) -> None:
    """A pickle that would leave a trace lies where other libraries look for one, and the manifest names it."""
    trace = folder.parent / "trace"
    pickled = f"cos\nsystem\n(S'touch {trace}'\ntR.".encode()
    for name in ("model/pytorch_model.bin", "optimizer.pt", "state.pkl", "model/training_args.bin"):
        (folder / name).write_bytes(pickled)
    names = [str(path.relative_to(folder)) for path in folder.rglob("*.*") if path.suffix in {".bin", ".pt", ".pkl"}]
    table = read_manifest(folder)
    record = {"size": len(pickled), "crc64nvme": f"{crc64(pickled):016x}"}
    reseal_checkpoint(folder, lambda actual: actual["files"].update(dict.fromkeys(names, record)))
    assert len(names) == 4
    assert set(table["files"]) == set(FILES)
    read_checkpoint(folder)
    load(folder)
    assert not trace.exists()


@pytest.mark.parametrize("order", ["[[0,0]]", "[[0]]", "[[0,2]]", "[[0,1],[0]]", '["01"]', "[[0.0,true]]"])
def test_an_order_of_parameters_that_is_none(tmp_path: Path, order: str) -> None:
    layer = torch.nn.Linear(2, 2)
    rankless.save_checkpoint(tmp_path, "s", layer, torch.optim.SGD(layer.parameters()), rng=False)
    raw = (tmp_path / "s/ranks.json").read_text()
    assert '"order":{"optimizer":[[1,0]]}' in raw  # the weight comes before the bias
    (tmp_path / "s" / RANKS).write_text(raw.replace("[[1,0]]", order))
    reseal_checkpoint(tmp_path / "s")
    with pytest.raises(CorruptCheckpointError, match="order"):
        rankless.load_checkpoint(tmp_path, model=layer, optimizer=torch.optim.SGD(layer.parameters()))
