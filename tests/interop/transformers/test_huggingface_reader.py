"""Tests directories of weights as transformers writes them and as the hub's cache stores them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import rankless
from rankless.errors import (
    CorruptCheckpointError,
    FormatError,
    MismatchError,
    NoCheckpointError,
    RanklessError,
    UnsafeNameError,
)

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

INDEX = "model.safetensors.index.json"


def llama() -> transformers.PreTrainedModel:
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_attention_heads=2))


def gpt2() -> transformers.PreTrainedModel:
    """Its head is tied to its embedding."""
    sizes = {"vocab_size": 64, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))


BUILDERS: dict[str, Callable[[], transformers.PreTrainedModel]] = {"llama": llama, "gpt2": gpt2}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What ``save_pretrained`` writes: each model in one file and in several."""
    root = tmp_path_factory.mktemp("hf")
    for name, build in BUILDERS.items():
        torch.manual_seed(1)
        model = build()
        model.save_pretrained(root / name / "one")
        model.save_pretrained(root / name / "several", max_shard_size="8KB")
    return root


@pytest.fixture(params=[(name, kind) for name in BUILDERS for kind in ("one", "several")], ids="-".join)
def folder(written: Path, request: pytest.FixtureRequest) -> Path:
    return written.joinpath(*request.param)


def test_an_index_that_names_nothing_is_checked_as_nothing(tmp_path: Path) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    (tmp_path / "optimizer.safetensors.index.json").write_text('{"weight_map": {}}')
    assert torch.equal(rankless.open(tmp_path)["model/w"], torch.ones(2))
    assert [part.problem for part in rankless.open(tmp_path).verify()] == [None]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """What the safetensors library finds in the folder."""
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def test_every_tensor_is_what_the_safetensors_library_reads(folder: Path) -> None:
    expected = weights(folder)
    opened = rankless.open(folder)
    assert opened.format == "huggingface"
    assert opened.keys() == sorted(f"model/{name}" for name in expected)
    for name, tensor in expected.items():
        actual = opened[f"model/{name}"]
        assert actual.dtype == tensor.dtype
        assert torch.equal(actual, tensor)


def test_the_folders_are_of_one_file_and_of_several(written: Path) -> None:
    for name in BUILDERS:
        assert len(list((written / name / "one").glob("*.safetensors"))) == 1
        assert len(list((written / name / "several").glob("*.safetensors"))) > 2
        assert (written / name / "several" / INDEX).exists()


def test_a_model_is_filled_from_the_folder(folder: Path) -> None:
    torch.manual_seed(7)
    model = BUILDERS[folder.parent.name]()
    restored = rankless.restore(folder, model=model)
    expected = weights(folder)
    state = model.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())
    assert (restored.missing, restored.unexpected) == ((), ())
    assert restored.step is None
    assert not restored.verified


def test_any_part_of_a_tensor_is_read(folder: Path) -> None:
    name, tensor = next((name, tensor) for name, tensor in weights(folder).items() if tensor.ndim == 2)
    opened = rankless.open(folder)
    assert torch.equal(opened.read(f"model/{name}", 5, 37), tensor.flatten()[5:37])
    assert opened.info(f"model/{name}").shape == tuple(tensor.shape)


def test_there_are_no_values_and_verifying_says_what_is_there(folder: Path) -> None:
    opened = rankless.open(folder)
    assert opened.values == {}
    actual = list(opened.verify())
    assert [item.problem for item in actual] == [None] * len(actual)
    assert {item.name for item in actual} == set(opened.keys())
    assert sum(item.nbytes for item in actual) == sum(tensor.nbytes for tensor in weights(folder).values())


def test_one_file_by_itself_is_a_checkpoint(written: Path) -> None:
    file = written / "llama/one/model.safetensors"
    with safe_open(file, "pt") as theirs:
        assert rankless.open(file).keys() == sorted(f"model/{name}" for name in theirs.keys())  # noqa: SIM118


def test_a_model_of_another_architecture_is_a_mismatch_that_names_tensors(written: Path) -> None:
    with pytest.raises(MismatchError, match="wpe"):
        rankless.restore(written / "llama/one", model=gpt2())


def cached(written: Path, cache: Path, kind: str) -> Path:
    """The hub's cache: blobs named by a hash, and a snapshot of links to them."""
    repository = cache / "models--someone--something"
    snapshot = repository / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for number, file in enumerate(sorted((written / "llama" / kind).iterdir())):
        blob = repository / "blobs" / f"{number:064x}"
        shutil.copyfile(file, blob)
        (snapshot / file.name).symlink_to(os.path.relpath(blob, snapshot))
    return snapshot


@pytest.mark.parametrize("kind", ["one", "several"])
def test_a_snapshot_in_the_hubs_cache_is_read_through_its_links(written: Path, tmp_path: Path, kind: str) -> None:
    snapshot = cached(written, tmp_path, kind)
    opened = rankless.open(snapshot)
    expected = weights(written / "llama" / kind)
    assert opened.keys() == sorted(f"model/{name}" for name in expected)
    assert all(torch.equal(opened[f"model/{name}"], tensor) for name, tensor in expected.items())
    model = llama()
    rankless.restore(snapshot, model=model)
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in expected.items())


def link_out(snapshot: Path, name: str, target: Path) -> None:
    shutil.move((snapshot / name).resolve(), target)
    (snapshot / name).unlink(missing_ok=True)
    (snapshot / name).symlink_to(target)


@pytest.mark.parametrize(
    "target", ["secret", "models--someone--something/secret", "models--someone--other/blobs/secret"]
)
def test_a_link_in_a_snapshot_that_leads_elsewhere_is_refused(written: Path, tmp_path: Path, target: str) -> None:
    snapshot = cached(written, tmp_path, "one")
    (tmp_path / target).parent.mkdir(parents=True, exist_ok=True)
    link_out(snapshot, "model.safetensors", tmp_path / target)
    with pytest.raises(UnsafeNameError, match=str(snapshot / "model.safetensors")):
        rankless.open(snapshot)


@pytest.mark.parametrize("name", ["model.safetensors", "model-00002-of-", INDEX])
def test_a_link_out_of_a_plain_folder_is_refused(written: Path, tmp_path: Path, name: str) -> None:
    folder = copied(written, tmp_path, "one" if name == "model.safetensors" else "several")
    (file,) = folder.glob(f"{name}*" if name.endswith("-") else name)
    link_out(folder, file.name, tmp_path / "blob")
    with pytest.raises(UnsafeNameError, match=str(file)):
        rankless.open(folder)


def test_a_link_that_stays_in_a_plain_folder_is_fine(written: Path, tmp_path: Path) -> None:
    folder = copied(written, tmp_path, "one")
    (folder / "model.safetensors").rename(folder / "weights")
    (folder / "model.safetensors").symlink_to("weights")
    assert len(rankless.open(folder)) == len(weights(written / "llama/one"))


def copied(written: Path, tmp_path: Path, kind: str) -> Path:
    return Path(shutil.copytree(written / "llama" / kind, tmp_path / "model"))


def edited(written: Path, tmp_path: Path, edit: Callable[[dict], object]) -> Path:
    """A folder of several files whose index was changed."""
    folder = copied(written, tmp_path, "several")
    table = json.loads((folder / INDEX).read_text())
    changed = edit(table)
    (folder / INDEX).write_text(changed if isinstance(changed, str) else json.dumps(table))
    return folder


def first(table: dict) -> str:
    return min(table["weight_map"])


@pytest.mark.parametrize(
    "name",
    ["../model/x.safetensors", "/etc/passwd", "a\\b", "a\0b", "..", ".", "", "a/../../b", "./x.safetensors"],
)
def test_an_index_that_names_a_file_elsewhere_is_refused(written: Path, tmp_path: Path, name: str) -> None:
    folder = edited(written, tmp_path, lambda table: table["weight_map"].update({first(table): name}))
    with pytest.raises(UnsafeNameError, match=INDEX):
        rankless.open(folder)


@pytest.mark.usefixtures("without_garbage")
@pytest.mark.parametrize(
    "edit",
    [
        pytest.param(lambda _: "[" * 100_000 + "]" * 100_000, id="lists without end"),
        pytest.param(lambda _: '{"weight_map":' * 100_000 + "1" + "}" * 100_000, id="objects without end"),
        pytest.param(lambda _: '{"metadata":' + "[" * 100_000 + "]" * 100_000 + "}", id="metadata without end"),
        pytest.param(lambda _: "", id="empty"),
        pytest.param(lambda _: "{}", id="no map"),
        pytest.param(lambda _: "[]", id="a list"),
        pytest.param(lambda _: '{"weight_map": {"a": 1}}', id="a number for a file"),
        pytest.param(lambda _: '{"weight_map": ["a"]}', id="a list for a map"),
        pytest.param(lambda table: json.dumps(table)[:-20], id="cut short"),
        pytest.param(lambda table: table["weight_map"].update({first(table): "absent.safetensors"}), id="absent file"),
        pytest.param(lambda table: table["weight_map"].update({first(table): "x" * 300}), id="name too long"),
        pytest.param(lambda table: table["weight_map"].update({first(table): "config.json"}), id="no weights"),
        pytest.param(lambda table: table["weight_map"].update({first(table): INDEX}), id="itself"),
    ],
)
def test_an_index_that_is_none_is_damage_that_names_a_file(written: Path, tmp_path: Path, edit) -> None:
    folder = edited(written, tmp_path, edit)
    for call in (rankless.open, lambda path: rankless.load_checkpoint(path, model=llama())):
        with pytest.raises((CorruptCheckpointError, FormatError), match=str(folder)):
            call(folder)


def test_an_index_that_says_a_tensor_is_where_it_is_not_is_damage(written: Path, tmp_path: Path) -> None:
    def move(table: dict) -> None:
        files = sorted(set(table["weight_map"].values()))
        table["weight_map"][first(table)] = next(file for file in files if file != table["weight_map"][first(table)])

    folder = edited(written, tmp_path, move)
    problems = [check.problem for check in rankless.open(folder).verify() if check.problem]
    assert len(problems) == 1
    assert str(folder / INDEX) in problems[0]
    with pytest.raises(CorruptCheckpointError, match=str(folder / INDEX)):
        rankless.restore(folder, model=llama())


def test_a_tensor_in_two_files_is_damage(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save_file({"w": torch.ones(2)}, tmp_path / f"{name}.safetensors")
    (tmp_path / INDEX).write_text('{"weight_map": {"w": "a.safetensors", "v": "b.safetensors"}}')
    with pytest.raises(CorruptCheckpointError, match="same name"):
        rankless.open(tmp_path)


def test_a_shard_that_is_cut_short_is_named(written: Path, tmp_path: Path) -> None:
    folder = copied(written, tmp_path, "several")
    shard = min(folder.glob("*.safetensors"))
    os.truncate(shard, shard.stat().st_size - 1)
    with pytest.raises(CorruptCheckpointError, match=str(shard)):
        rankless.open(folder)


@pytest.mark.parametrize("kind", ["folder", "FIFO"])
@pytest.mark.timeout(300)
def test_a_shard_that_is_no_file_is_refused(written: Path, tmp_path: Path, kind: str) -> None:
    folder = copied(written, tmp_path, "several")
    shard = min(folder.glob("*.safetensors"))
    shard.unlink()
    shard.mkdir() if kind == "folder" else os.mkfifo(shard)
    with pytest.raises(RanklessError, match=str(shard)):
        rankless.open(folder)


def test_what_is_no_checkpoint_is_called_so(tmp_path: Path) -> None:
    with pytest.raises(NoCheckpointError, match=str(tmp_path)):
        rankless.open(tmp_path)
    with pytest.raises(NoCheckpointError, match="absent"):
        rankless.open(tmp_path / "absent")
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(FormatError, match=r"notes\.txt"):
        rankless.open(tmp_path / "notes.txt")
    (tmp_path / "empty.safetensors").write_bytes(b"")
    with pytest.raises(CorruptCheckpointError, match=r"empty\.safetensors"):
        rankless.open(tmp_path / "empty.safetensors")


def test_the_model_folder_of_a_checkpoint_is_read_as_any_other_and_verified(tmp_path: Path) -> None:
    model = llama()
    rankless.save_checkpoint(tmp_path, "s", model, max_shard_size="8KB")
    other = llama()
    restored = rankless.restore(tmp_path / "s/model", model=other)
    assert restored.verified
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
