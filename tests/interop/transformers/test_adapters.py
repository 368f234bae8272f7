"""Tests adapters in PEFT's format: PEFT loads what rankless saves, and rankless what PEFT saves, bit for bit."""

import json
import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import rankless
from rankless.errors import InvalidArgumentError, MismatchError, StateError
from tests.golden import reader
from tests.helpers.peft_models import COMPUTED, LAYOUTS, STORED, lora, make_base, make_peft, randomize
from tests.helpers.pool import Ranks

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(value, right[name]) for name, value in left.items())


def config_of(folder: Path) -> dict[str, Any]:
    """The configuration; PEFT writes sets in the order in which Python iterates over them."""
    table = json.loads((folder / CONFIG).read_text())
    return {name: sorted(map(str, value)) if isinstance(value, list) else value for name, value in table.items()}


@pytest.mark.parametrize("kind", [*STORED, *COMPUTED])
def test_it_writes_what_peft_writes(tmp_path: Path, kind: str) -> None:
    model = make_peft(kind)
    model.save_pretrained(tmp_path / "theirs")
    rankless.save_model(model, tmp_path / "ours", adapter_only=True)
    assert {path.name for path in (tmp_path / "ours").iterdir()} == {WEIGHTS, CONFIG}
    assert same(load_file(tmp_path / "ours" / WEIGHTS), load_file(tmp_path / "theirs" / WEIGHTS))
    assert config_of(tmp_path / "ours") == config_of(tmp_path / "theirs")
    assert same(
        peft.PeftModel.from_pretrained(make_base(), tmp_path / "ours").state_dict(),
        peft.PeftModel.from_pretrained(make_base(), tmp_path / "theirs").state_dict(),
    )


@pytest.mark.parametrize("kind", STORED)
@pytest.mark.parametrize("writer", ["peft", "peft with torch.save", "rankless"])
def test_it_loads_what_either_writes(tmp_path: Path, kind: str, writer: str) -> None:
    model, other = make_peft(kind), make_peft(kind, seed=1)
    if writer == "rankless":
        rankless.save_model(model, tmp_path, adapter_only=True)
    else:
        model.save_pretrained(tmp_path, safe_serialization=writer == "peft")
    result = rankless.load_model(other, tmp_path)
    assert not result.missing
    assert same(other.state_dict(), model.state_dict())


@pytest.mark.parametrize("kind", COMPUTED)
def test_what_peft_computes_is_not_loaded_into_a_trained_model(tmp_path: Path, kind: str) -> None:
    model = make_peft(kind)
    model.save_pretrained(tmp_path)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(StateError, match="'default' is computed when it is saved"):
        rankless.load_model(model, tmp_path)
    assert same(model.state_dict(), before)


def test_a_model_of_another_size_of_vocabulary_has_its_embeddings_saved(tmp_path: Path) -> None:
    """As PEFT does, if it finds the base model."""
    make_base().save_pretrained(tmp_path / "base")
    base = type(make_base()).from_pretrained(tmp_path / "base")
    base.resize_token_embeddings(40)
    model = randomize(peft.get_peft_model(base, lora()), 0)
    model.save_pretrained(tmp_path / "theirs")
    rankless.save_model(model, tmp_path / "ours", adapter_only=True)
    assert same(load_file(tmp_path / "ours" / WEIGHTS), load_file(tmp_path / "theirs" / WEIGHTS))
    assert "base_model.model.lm_head.weight" in load_file(tmp_path / "ours" / WEIGHTS)
    assert config_of(tmp_path / "ours")["base_model_name_or_path"] == str(tmp_path / "base")


def several(seed: int = 0) -> peft.PeftModel:
    model = peft.get_peft_model(make_base(), lora())
    model.add_adapter("other", lora(r=2, target_modules=["v_proj"]))
    model.set_adapter("other")
    randomize(model, seed)
    model.set_adapter("default")
    return randomize(model, seed)


def test_several_adapters_have_folders_of_their_own(tmp_path: Path) -> None:
    model = several()
    model.save_pretrained(tmp_path / "theirs")
    rankless.save_model(model, tmp_path / "ours", adapter_only=True)
    for folder in (".", "other"):
        ours, theirs = tmp_path / "ours" / folder, tmp_path / "theirs" / folder
        assert same(load_file(ours / WEIGHTS), load_file(theirs / WEIGHTS))
        assert config_of(ours) == config_of(theirs)
    for folder in ("ours", "theirs"):
        other = several(seed=1)
        rankless.load_model(other, tmp_path / folder)
        assert same(other.state_dict(), model.state_dict())


def test_several_adapters_are_all_replaced_by_the_next_save(tmp_path: Path) -> None:
    for seed in (0, 1):
        rankless.save_model(several(seed), tmp_path, adapter_only=True)
    loaded = several()
    rankless.load_model(loaded, tmp_path)
    assert same(loaded.state_dict(), several(1).state_dict())


def test_the_only_adapter_may_have_another_name(tmp_path: Path) -> None:
    """As in PEFT, whose names of adapters belong to the model that they are loaded into."""
    make_peft("lora").save_pretrained(tmp_path / "default")
    model = peft.get_peft_model(make_base(), lora(), adapter_name="mine")
    rankless.load_model(model, tmp_path / "default")
    expected = load_file(tmp_path / "default" / WEIGHTS)
    assert same(peft.get_peft_model_state_dict(model, adapter_name="mine"), expected)
    rankless.save_model(model, tmp_path / "ours", adapter_only=True)
    assert same(load_file(tmp_path / "ours/mine" / WEIGHTS), expected)
    other = make_peft("lora", seed=1)
    rankless.load_model(other, tmp_path / "ours")
    assert same(peft.get_peft_model_state_dict(other), expected)


def test_adapters_that_transformers_has_put_in(tmp_path: Path) -> None:
    model, other = make_base(), make_base()
    for part in (model, other):
        part.add_adapter(lora(init_lora_weights=False))
    model.save_pretrained(tmp_path / "theirs")
    rankless.save_model(model, tmp_path / "ours", adapter_only=True)
    assert same(load_file(tmp_path / "ours" / WEIGHTS), load_file(tmp_path / "theirs" / WEIGHTS))
    rankless.load_model(other, tmp_path / "theirs")
    assert same(other.state_dict(), model.state_dict())


def test_the_names_of_adapters_must_match(tmp_path: Path) -> None:
    make_peft("lora").save_pretrained(tmp_path)
    other = randomize(peft.get_peft_model(make_base(), lora(target_modules=["q_proj", "v_proj"])), 1)
    before = {name: value.clone() for name, value in other.state_dict().items()}
    with pytest.raises(MismatchError, match=r"missing in the checkpoint: base_model\S*v_proj") as caught:
        rankless.load_model(other, tmp_path)
    assert "only in the checkpoint" in str(caught.value)
    assert "embed_tokens" not in str(caught.value)
    assert same(other.state_dict(), before)
    result = rankless.load_model(other, tmp_path, strict=False)
    assert {name.split(".")[6] for name in result.missing} == {"v_proj"}
    assert {name.split(".")[6] for name in result.unexpected} == {"o_proj"}
    saved, loaded = load_file(tmp_path / WEIGHTS), peft.get_peft_model_state_dict(other)
    assert all(torch.equal(saved[name], value) for name, value in loaded.items() if "q_proj" in name)


def test_the_shapes_of_adapters_must_match(tmp_path: Path) -> None:
    make_peft("lora").save_pretrained(tmp_path)
    other = peft.get_peft_model(make_base(), lora(r=8))
    with pytest.raises(MismatchError, match=r"lora_A.weight: shape \[4, 16\] in the checkpoint, \[8, 16\] here"):
        rankless.load_model(other, tmp_path)


def test_a_model_without_adapters_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"has no PEFT adapters.*get_peft_model"):
        rankless.save_model(make_base(), tmp_path / "a", adapter_only=True)
    with pytest.raises(InvalidArgumentError, match=r"has no PEFT adapters.*get_peft_model"):
        rankless.save_checkpoint(tmp_path / "run", "s", make_base(), adapter_only=True)
    assert list(tmp_path.iterdir()) == []
    make_peft("lora").save_pretrained(tmp_path)
    with pytest.raises(MismatchError, match=r"only PEFT adapters.*get_peft_model"):
        rankless.load_model(make_base(), tmp_path)


@pytest.mark.parametrize("name", ["a/b", "a\\b", "x" * 256, "a\0b"])
def test_a_name_that_no_folder_can_have_is_left_out(tmp_path: Path, name: str) -> None:
    def make(seed: int) -> peft.PeftModel:
        return randomize(peft.get_peft_model(make_base(), lora(), adapter_name=name), seed)

    model, other = make(0), make(1)
    with pytest.warns(UserWarning, match="complete, but has no copy of the adapter .*choose another name"):
        rankless.save_checkpoint(tmp_path, "all", model)
    with pytest.raises(StateError, match="choose another name"):
        rankless.save_checkpoint(tmp_path, "adapter", model, adapter_only=True)
    rankless.load_checkpoint(tmp_path, model=other)
    assert same(other.state_dict(), model.state_dict())


def test_an_attribute_that_is_not_from_peft_is_ignored(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    model.peft_config = {"r": 8, "alpha": 16}
    rankless.save_checkpoint(tmp_path, "s", model)
    assert not (tmp_path / "s/adapter").exists()


def test_embeddings_under_other_names_are_stored_as_peft_does(tmp_path: Path) -> None:
    targets = ["q_proj", "model.embed_tokens"]
    model, other = (randomize(peft.get_peft_model(make_base(), lora(target_modules=targets)), seed) for seed in (0, 1))
    model.save_pretrained(tmp_path / "theirs")
    rankless.save_model(model, tmp_path / "ours", adapter_only=True)
    assert same(load_file(tmp_path / "ours" / WEIGHTS), load_file(tmp_path / "theirs" / WEIGHTS))
    rankless.load_model(other, tmp_path / "theirs")
    assert same(other.state_dict(), model.state_dict())


def load_latest(model: nn.Module, path: Path) -> None:
    rankless.load_checkpoint(path, model=model)


@pytest.mark.parametrize("writer", ["peft", "adapter", "all"])
def test_another_configuration_is_named(tmp_path: Path, writer: str) -> None:
    """Nothing in the tensors shows it, and the model would give other results."""
    model = randomize(peft.get_peft_model(make_base(), lora(lora_alpha=64, lora_dropout=0.1)), 0)
    other = peft.get_peft_model(make_base(), lora(lora_alpha=8, use_rslora=True))
    if writer == "peft":
        model.save_pretrained(tmp_path)
        load = rankless.load_model
    else:
        rankless.save_checkpoint(tmp_path, "s", model, adapter_only=writer == "adapter")
        load = load_latest
    with pytest.warns(UserWarning, match="another configuration") as caught:
        load(other, tmp_path)
    (message,) = [str(entry.message) for entry in caught if "another configuration" in str(entry.message)]
    assert "lora_alpha of the adapter 'default' is 64 in the checkpoint, and 8 here" in message
    assert "use_rslora of the adapter 'default' is False in the checkpoint, and True here" in message
    assert "dropout" not in message
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "loaded", UserWarning)
        load(model, tmp_path)


@pytest.mark.usefixtures("without_garbage")
@pytest.mark.parametrize("content", [b"[]", b"garbage", b"[" * 100_000])
def test_a_configuration_that_cannot_be_read_does_not_prevent_a_load(tmp_path: Path, content: bytes) -> None:
    model, other = make_peft("lora"), make_peft("lora", seed=1)
    model.save_pretrained(tmp_path)
    (tmp_path / CONFIG).write_bytes(content)
    with pytest.warns(UserWarning, match="configuration of the adapter 'default' cannot be compared"):
        rankless.load_model(other, tmp_path)
    assert same(other.state_dict(), model.state_dict())


def test_trained_parameters_outside_of_the_adapter_are_named(tmp_path: Path) -> None:
    model = make_peft("lora")
    model.get_base_model().model.norm.weight.requires_grad_(requires_grad=True)
    with pytest.warns(UserWarning, match=r"1 of them, such as \S*\.norm\.weight'.* save the whole"):
        rankless.save_checkpoint(tmp_path, "s", model, adapter_only=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "PEFT does not store all", UserWarning)
        rankless.save_checkpoint(tmp_path, "t", make_peft("lora with whole modules"), adapter_only=True)


def test_a_merged_adapter_is_neither_saved_nor_loaded(tmp_path: Path) -> None:
    """The weights have it already, and a checkpoint would not say so."""
    model = make_peft("lora")
    rankless.save_checkpoint(tmp_path, "s", model)
    model.merge_adapter()
    for call in (
        lambda: rankless.save_checkpoint(tmp_path, "t", model),
        lambda: rankless.save_model(model, tmp_path / "model"),
        lambda: rankless.load_checkpoint(tmp_path, model=model),
    ):
        with pytest.raises(StateError, match="unmerge_adapter"):
            call()
    model.unmerge_adapter()
    rankless.save_checkpoint(tmp_path, "t", model)


def test_a_prefix_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="leave out prefix"):
        rankless.save_model(make_peft("lora"), tmp_path, prefix="a.", adapter_only=True)


def test_a_folder_of_peft_is_replaced_and_its_other_files_are_kept(tmp_path: Path) -> None:
    make_peft("lora", seed=1).save_pretrained(tmp_path / "a", safe_serialization=False)
    model = make_peft("lora")
    rankless.save_model(model, tmp_path / "a", adapter_only=True)
    assert {path.name for path in (tmp_path / "a").iterdir()} == {WEIGHTS, CONFIG, "README.md"}
    assert same(load_file(tmp_path / "a" / WEIGHTS), peft.get_peft_model_state_dict(model))


def saved(path: Path, kind: str, layout: str) -> None:
    rankless.save_model(LAYOUTS[layout](make_peft(kind)), path, adapter_only=True)


def loaded(path: Path, kind: str, layout: str) -> bool:
    """Whether the parameters of this rank are those of a model with the saved adapter that is put into the layout."""
    model, expected = LAYOUTS[layout](make_peft(kind, seed=1)), LAYOUTS[layout](make_peft(kind))
    rankless.load_model(model, path)
    pairs = zip(model.parameters(), expected.parameters(), strict=True)
    return all(torch.equal(_local(left), _local(right)) for left, right in pairs)


def _local(parameter: nn.Parameter) -> torch.Tensor:
    local = getattr(parameter, "to_local", None)
    return parameter.detach() if local is None else local().detach()


@pytest.mark.parametrize("kind", ["lora", "lora with whole modules", "dora", "ia3", "prompt tuning"])
@pytest.mark.parametrize("layout", ["ddp", "fsdp1", "fsdp2", "tp"])
def test_adapters_of_any_layout(ranks: Ranks, tmp_path: Path, kind: str, layout: str) -> None:
    make_peft(kind).save_pretrained(tmp_path / "theirs")
    ranks(2, saved, tmp_path / "ours", kind, layout)
    assert same(load_file(tmp_path / "ours" / WEIGHTS), load_file(tmp_path / "theirs" / WEIGHTS))
    assert config_of(tmp_path / "ours") == config_of(tmp_path / "theirs")
    assert all(ranks(2, loaded, tmp_path / "ours", kind, layout))
    assert all(ranks(2, loaded, tmp_path / "theirs", kind, layout))


def test_the_bytes_do_not_depend_on_the_layout(ranks: Ranks, tmp_path: Path) -> None:
    for layout in ("plain", "fsdp2", "tp"):
        ranks(1 if layout == "plain" else 2, saved, tmp_path / layout, "dora", layout)
    contents = {
        layout: [(tmp_path / layout / name).read_bytes() for name in (WEIGHTS, CONFIG)]
        for layout in ("plain", "fsdp2", "tp")
    }
    assert contents["plain"] == contents["fsdp2"] == contents["tp"]


def saved_all(path: Path, kind: str, layout: str) -> str:
    model = LAYOUTS[layout](make_peft(kind))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"the checkpoint is complete, but has no copy of the adapter", UserWarning)
        rankless.save_checkpoint(path, "all", model)
    try:
        rankless.save_checkpoint(path, "adapter", model, adapter_only=True)
    except StateError as error:
        return str(error)
    return ""


def loaded_tag(path: Path, tag: str, kind: str, layout: str) -> bool:
    model, expected = LAYOUTS[layout](make_peft(kind, seed=1)), LAYOUTS[layout](make_peft(kind))
    rankless.load_checkpoint(path, tag, model=model)
    pairs = zip(model.parameters(), expected.parameters(), strict=True)
    return all(torch.equal(_local(left), _local(right)) for left, right in pairs)


@pytest.mark.parametrize("layout", ["plain", "ddp", "fsdp2", "tp"])
def test_a_checkpoint_has_a_folder_that_peft_opens(ranks: Ranks, tmp_path: Path, layout: str) -> None:
    n = 1 if layout == "plain" else 2
    assert ranks(n, saved_all, tmp_path, "dora", layout) == [""] * n
    expected = make_peft("dora").state_dict()
    for tag in ("all", "adapter"):
        assert same(peft.PeftModel.from_pretrained(make_base(), tmp_path / tag / "adapter").state_dict(), expected)
        assert all(ranks(n, loaded_tag, tmp_path, tag, "dora", layout))
        assert all(ranks(1, loaded_tag, tmp_path, tag, "dora", "plain"))
    assert (tmp_path / "all/model").is_dir()
    assert not (tmp_path / "adapter/model").exists()


@pytest.mark.parametrize("kind", ["p-tuning", "projected prefixes"])
def test_shards_of_what_peft_computes_are_saved_only_with_the_model(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    for message in ranks(2, saved_all, tmp_path, kind, "fsdp2"):
        assert "'default'" in message
        assert "only shards" in message
    assert not (tmp_path / "adapter").exists()
    assert not (tmp_path / "all/adapter").exists()
    assert all(ranks(2, loaded_tag, tmp_path, "all", kind, "fsdp2"))


def test_a_failure_of_peft_does_not_prevent_a_save_of_the_whole_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, other = make_peft("lora"), make_peft("lora", seed=1)
    monkeypatch.setattr(model.peft_config["default"], "target_modules", [object()])  # JSON cannot hold it
    with pytest.warns(UserWarning, match=r"complete, but has no copy of the adapter 'default' for PEFT: .*JSON"):
        rankless.save_checkpoint(tmp_path, "all", model)
    with pytest.raises(TypeError, match="JSON"):
        rankless.save_checkpoint(tmp_path, "adapter", model, adapter_only=True)
    assert not (tmp_path / "all/adapter").exists()
    rankless.load_checkpoint(tmp_path, model=other)
    assert same(other.state_dict(), model.state_dict())


@pytest.mark.parametrize("tag", ["all", "adapter"])
def test_a_checkpoint_is_converted_into_a_folder_of_peft(tmp_path: Path, tag: str) -> None:
    model = several()
    optimizer = torch.optim.AdamW(parameter for parameter in model.parameters() if parameter.requires_grad)
    rankless.save_checkpoint(tmp_path / "run", tag, model, optimizer, adapter_only=tag == "adapter")
    model.save_pretrained(tmp_path / "theirs")
    rankless.convert(tmp_path / "run" / tag, tmp_path / "ours", to="peft")
    assert sorted(path.relative_to(tmp_path / "ours") for path in (tmp_path / "ours").rglob("*.*")) == sorted(
        map(Path, (CONFIG, WEIGHTS, f"other/{CONFIG}", f"other/{WEIGHTS}"))
    )
    for folder in (".", "other"):
        ours, theirs = tmp_path / "ours" / folder, tmp_path / "theirs" / folder
        assert same(load_file(ours / WEIGHTS), load_file(theirs / WEIGHTS))
        assert config_of(ours) == config_of(theirs)
    other = several(seed=1)
    rankless.load_model(other, tmp_path / "ours")
    assert same(other.state_dict(), model.state_dict())


@pytest.mark.parametrize("adapter_only", [False, True])
def test_a_converted_checkpoint_keeps_its_adapters(tmp_path: Path, adapter_only: bool) -> None:
    model, other = make_peft("dora"), make_peft("dora", seed=1)
    rankless.save_checkpoint(tmp_path / "run", "s", model, adapter_only=adapter_only)
    rankless.convert(tmp_path / "run", tmp_path / "copy/s", to="native")
    assert same(
        peft.PeftModel.from_pretrained(make_base(), tmp_path / "copy/s/adapter").state_dict(), model.state_dict()
    )
    rankless.load_checkpoint(tmp_path / "copy", model=other)
    assert same(other.state_dict(), model.state_dict())


def test_a_folder_of_peft_becomes_a_checkpoint(tmp_path: Path) -> None:
    model, other = make_peft("lora"), make_peft("lora", seed=1)
    model.save_pretrained(tmp_path / "theirs")
    rankless.convert(tmp_path / "theirs", tmp_path / "run/s", to="native")
    rankless.load_checkpoint(tmp_path / "run", model=other)
    assert same(other.state_dict(), model.state_dict())
    rankless.convert(tmp_path / "run", tmp_path / "again", to="peft")
    assert config_of(tmp_path / "again") == config_of(tmp_path / "theirs")


def test_what_cannot_be_converted_is_refused_by_name(tmp_path: Path) -> None:
    rankless.save_checkpoint(tmp_path / "plain", "s", make_base())
    with pytest.raises(InvalidArgumentError, match=r"plain\S* contains no adapters"):
        rankless.convert(tmp_path / "plain", tmp_path / "out", to="peft")
    rankless.save_checkpoint(tmp_path / "run", "s", make_peft("lora"), adapter_only=True)
    for to in ("hf", "safetensors", "torch"):
        with pytest.raises(InvalidArgumentError, match=r"adapters without a base model.*'peft'"):
            rankless.convert(tmp_path / "run", tmp_path / "out", to=to)
    with pytest.raises(InvalidArgumentError, match="leave out include, exclude, rename and dtype"):
        rankless.convert(tmp_path / "run", tmp_path / "out", to="peft", dtype="bfloat16")
    assert not (tmp_path / "out").exists()


def test_another_reader_finds_the_adapters_as_groups(tmp_path: Path) -> None:
    """The reader that was written from the description of format version 1."""
    model = several()
    rankless.save_checkpoint(tmp_path, "s", model)
    checkpoint = reader.read(tmp_path / "s")
    for group, name in (("adapter", "default"), ("adapter/other", "other")):
        expected = peft.get_peft_model_state_dict(model, adapter_name=name)
        assert checkpoint.tensors[group].keys() == expected.keys()
        assert all(checkpoint.tensors[group][key].data == value.numpy().tobytes() for key, value in expected.items())
        assert f"{group}/{CONFIG}" in checkpoint.others
