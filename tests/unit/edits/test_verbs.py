"""Verbs of edits: what they do to states, groups, averages, configurations, and what they refuse."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import rankless
from rankless.edits import slow_patterns
from rankless.errors import FormatError, InvalidArgumentError, MismatchError, NoCheckpointError, UnsupportedTensorError
from rankless.storage.object_path import make_object_path
from tests.helpers.commands import invoke, invoke_json
from tests.helpers.corruption import flip_tensor_bit
from tests.helpers.edit_oracle import Lm, Oracle, make_optimizer, save_training, state_of, train_steps
from tests.helpers.fake_http import BUCKET
from tests.helpers.fake_s3 import AWS, FakeS3


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trained") / "run"
    save_training(path)
    return path


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """An empty folder for a model."""
    folder = tmp_path / "source"
    folder.mkdir()
    return folder


def manifest_of(checkpoint: Path) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads((checkpoint / "manifest.json").read_text())
    return manifest


class TestResults:
    def test_name_their_parents_and_the_recipe(self, run: Path, tmp_path: Path) -> None:
        rankless.edit(run / "step_3", tmp_path / "a", ["average 2", "resize-vocab 12"])
        ids = [manifest_of(run / step)["id"] for step in ("step_3", "step_2")]
        (record,) = manifest_of(tmp_path / "a")["edits"]
        assert record["parents"] == ids
        assert [verb["verb"] for verb in json.loads(record["recipe"])] == ["average", "resize-vocab"]
        rankless.edit(tmp_path / "a", tmp_path / "b", ["freeze lm_head.bias"])
        assert [len(entry["parents"]) for entry in manifest_of(tmp_path / "b")["edits"]] == [2, 1]
        assert manifest_of(tmp_path / "b")["step"] == 3
        shown = invoke("show", tmp_path / "b").stdout
        assert f"average 2, resize-vocab 12 (from {', '.join(ids)})" in " ".join(shown.split())
        assert "freeze lm_head.bias" in shown
        assert len(invoke_json("show", tmp_path / "b")["edits"]) == 2

    def test_in_other_formats_are_equal(self, run: Path, tmp_path: Path) -> None:
        edits = ["resize-vocab 13", "layers order=2,0", "cast bfloat16"]
        rankless.edit(run, tmp_path / "native", edits)
        rankless.edit(run, tmp_path / "one.safetensors", edits, to="safetensors")
        rankless.edit(run, tmp_path / "one.pt", edits, to="torch")
        rankless.edit(run, tmp_path / "dcp", edits, to="dcp")
        expected = Oracle.read(tmp_path / "native").weights
        loaded = torch.load(tmp_path / "one.pt", weights_only=True)
        assert all(torch.equal(loaded["model"][name], tensor) for name, tensor in expected.items())
        stored = load_file(tmp_path / "one.safetensors")
        assert all(torch.equal(stored[name], tensor) for name, tensor in expected.items())
        for path in ("one.pt", "dcp"):  # as sources
            model = Lm(15, 2).to(torch.bfloat16)
            rankless.load_model(model, rankless.edit(tmp_path / path, tmp_path / f"{path}2", ["resize-vocab 15"]))
            assert torch.equal(model.embed_tokens.weight[:13], expected["embed_tokens.weight"])

    def test_appear_in_one_step(self, run: Path, tmp_path: Path) -> None:
        """What does not fit is refused before anything is written."""
        with pytest.raises(InvalidArgumentError, match="no layer 7"):
            rankless.edit(run, tmp_path / "out", ["resize-vocab 12", "layers keep=7"])
        assert list(tmp_path.iterdir()) == []

    def test_are_never_computed_from_corrupt_bytes(self, run: Path, tmp_path: Path) -> None:
        save_training(tmp_path / "run", (1,))
        flip_tensor_bit(tmp_path / "run/step_1/model/model.safetensors", "embed_tokens.weight")
        with pytest.raises(rankless.CorruptCheckpointError, match=r"embed_tokens.weight.*corrupt"):
            rankless.edit(tmp_path / "run", tmp_path / "out", ["resize-vocab 12"])
        with pytest.raises(rankless.CorruptCheckpointError, match=r"embed_tokens.weight.*corrupt"):
            rankless.load_checkpoint(tmp_path / "run", model=Lm(12), edit=["resize-vocab 12"])
        assert not (tmp_path / "out").exists()

    @pytest.mark.parametrize("verify", [True, False])
    def test_links_of_corrupt_files_are_found(self, tmp_path: Path, *, verify: bool) -> None:
        """By the edit, or, if nothing is read back, by a load of the copy."""
        save_training(tmp_path / "run", (1,))
        flip_tensor_bit(tmp_path / "run/step_1/model/model.safetensors", "embed_tokens.weight")
        edit = partial(rankless.edit, tmp_path / "run", tmp_path / "out", ["freeze lm_head.bias"], verify=verify)
        if not verify:
            edit()
        with pytest.raises(rankless.CorruptCheckpointError, match=r"embed_tokens.weight.*corrupt"):
            edit() if verify else rankless.load_checkpoint(tmp_path / "out", model=Lm())
        assert (tmp_path / "out").exists() != verify


class TestResizeVocab:
    def test_new_rows_of_a_model_in_lower_precision_are_those_of_its_master(self, tmp_path: Path) -> None:
        """A moment keeps its own dtype, and zeros."""
        model, optimizer = Lm().to(torch.bfloat16), None
        optimizer = make_optimizer(model)
        train_steps(model, optimizer, [1])
        for parameter, state in optimizer.state.items():
            state["master_param"] = parameter.detach().float() + torch.rand_like(parameter, dtype=torch.float32) / 1000
        rankless.save_checkpoint(tmp_path / "run", "a", model=model, optimizer=optimizer)
        rankless.edit(tmp_path / "run", tmp_path / "out", ["resize-vocab 12"])
        made, before = Oracle.read(tmp_path / "out"), Oracle.read(tmp_path / "run/a")
        master = made.states["embed_tokens.weight"]["master_param"]
        old = before.states["embed_tokens.weight"]["master_param"]
        assert torch.equal(master[:10], old)
        assert torch.allclose(master[10:], old.mean(0).expand(2, 4))
        assert torch.equal(made.weights["embed_tokens.weight"][10:], master[10:].bfloat16())

    def test_factored_moments_follow_and_others_are_refused(self, tmp_path: Path) -> None:
        model = Lm()
        optimizer = torch.optim.Adafactor(model.parameters())
        train_steps(model, optimizer, [1])
        rankless.save_checkpoint(tmp_path / "run", "a", model=model, optimizer=optimizer)
        rankless.edit(tmp_path / "run", tmp_path / "out", ["resize-vocab 12"])
        states, old = Oracle.read(tmp_path / "out").states, optimizer.state[model.embed_tokens.weight]
        row = states["embed_tokens.weight"]["row_var"]
        assert torch.equal(row[:10], old["row_var"])
        assert not row[10:].any()
        assert torch.equal(states["embed_tokens.weight"]["col_var"], old["col_var"])
        for state in optimizer.state.values():
            state["preconditioner"] = torch.eye(10)
        rankless.save_checkpoint(tmp_path / "other", "a", model=model, optimizer=optimizer)
        with pytest.raises(FormatError, match=r"'embed_tokens.weight/preconditioner' is 10x10.*no rule"):
            rankless.edit(tmp_path / "other", tmp_path / "out2", ["resize-vocab 12"])
        rankless.edit(tmp_path / "other", tmp_path / "out2", ["resize-vocab 12"], model_only=True)
        rankless.load_checkpoint(tmp_path / "other", model=Lm(12), edit=["resize-vocab 12"])

    def test_an_average_of_the_model_follows(self, tmp_path: Path) -> None:
        model = Lm()
        optimizer = make_optimizer(model)
        average = torch.optim.swa_utils.AveragedModel(model)
        train_steps(model, optimizer, [1])
        rankless.save_checkpoint(tmp_path / "run", "a", model={"net": model, "ema": average}, optimizer=optimizer)
        rankless.edit(tmp_path / "run", tmp_path / "out", ["resize-vocab 12 rows=zeros", "layers keep=0"])
        larger, its_average = Lm(12, 1), torch.optim.swa_utils.AveragedModel(Lm(12, 1))
        rankless.load_checkpoint(tmp_path / "out", model={"net": larger, "ema": its_average})
        assert torch.equal(its_average.module.embed_tokens.weight[:10], average.module.embed_tokens.weight)
        assert torch.equal(larger.layers[0].norm.weight, model.layers[0].norm.weight)

    def test_random_rows_depend_on_the_seed_alone(self, run: Path, tmp_path: Path) -> None:
        for name, size, seed in (("a", 14, 1), ("b", 12, 1), ("c", 12, 2)):
            rankless.edit(run, tmp_path / name, [f"resize-vocab {size} rows=normal:0.5 seed={seed}"])
        a, b, c = (Oracle.read(tmp_path / name).weights["embed_tokens.weight"] for name in "abc")
        assert torch.equal(a[:12], b)
        assert not torch.equal(b[10:], c[10:])
        assert 0.1 < a[10:].std() < 1.5

    @pytest.mark.parametrize(
        ("edit", "text"),
        [
            ("resize-vocab 12 tensors=nothing*", "has no tensor 'nothing\\*'"),
            ("resize-vocab 12 tensors=embed_tokens.weight,layers.0.norm.weight", "pass tensors="),
            ("resize-vocab 12 rows=median", "rows must be mean"),
            ("resize-vocab 12 rows=copy:10", "has the rows 0 to 9"),
            ("resize-vocab 12 rows=normal:nan", "rows must be"),
            ("resize-vocab -3", "size"),
            ("resize-vocab 0", "size"),
            (f"resize-vocab {2**40}", "size"),
        ],
    )
    def test_what_does_not_fit_is_refused(self, run: Path, tmp_path: Path, edit: str, text: str) -> None:
        with pytest.raises(InvalidArgumentError, match=text):
            rankless.edit(run, tmp_path / "out", [edit])
        assert list(tmp_path.iterdir()) == []

    def test_a_tokenizer_with_more_tokens_is_refused(self, tmp_path: Path, source: Path) -> None:
        save_file({"embed_tokens.weight": torch.ones(10, 4)}, source / "model.safetensors", {"format": "pt"})
        (source / "config.json").write_text(json.dumps({"vocab_size": 10, "text_config": {"vocab_size": 10}}))
        tokenizer = {"model": {"vocab": {"a": 0, "b": 9}}, "added_tokens": [{"id": 11, "content": "<x>"}]}
        (source / "tokenizer.json").write_text(json.dumps(tokenizer))
        with pytest.raises(InvalidArgumentError, match="has the token 11, and the edited model has 11 rows"):
            rankless.edit(source, tmp_path / "small", ["resize-vocab 11"], to="hf")
        made = rankless.edit(source, tmp_path / "large", ["resize-vocab 12"], to="hf")
        config = json.loads((made / "config.json").read_text())
        assert (config["vocab_size"], config["text_config"]["vocab_size"]) == (12, 12)

    def test_tokens_that_the_configuration_names_keep_their_rows(self, tmp_path: Path, source: Path) -> None:
        save_file({"embed_tokens.weight": torch.ones(10, 4)}, source / "model.safetensors", {"format": "pt"})
        tokens = {"vocab_size": 10, "pad_token_id": 7, "eos_token_id": [1, 3], "image_token_id": 40}
        (source / "config.json").write_text(json.dumps(tokens))
        with pytest.raises(InvalidArgumentError, match="has pad_token_id 7, and 7 rows end before that"):
            rankless.edit(source, tmp_path / "small", ["resize-vocab 7"], to="hf")
        made = rankless.edit(source, tmp_path / "out", ["resize-vocab 8"], to="hf")
        assert json.loads((made / "config.json").read_text()) == {**tokens, "vocab_size": 8}

    def test_a_configuration_without_a_size_is_named(self, source: Path) -> None:
        save_file({"embed_tokens.weight": torch.ones(10, 4)}, source / "model.safetensors", {"format": "pt"})
        (source / "config.json").write_text('{"hidden_size": 4}')
        shown = invoke_json("edit", source, "--dry-run", "--to", "hf", "resize-vocab 12")
        assert "model: config.json has no vocab_size, and stays as it is" in shown["changes"]


class TestRename:
    @pytest.mark.parametrize("pattern", [r"^(\w+\.?)+!", r"^((\w+)\.?)*!", r"\w?" * 40 + "!"])
    def test_an_expression_that_searches_for_ever_is_refused(self, tmp_path: Path, source: Path, pattern: str) -> None:
        save_file({f"{'layer' * 10}.weight": torch.ones(2)}, source / "model.safetensors", {"format": "pt"})
        with (
            mock.patch.object(slow_patterns, "_SECONDS", 2.0),
            pytest.raises(InvalidArgumentError, match="searches names for longer than 2 s"),
        ):
            rankless.edit(source, tmp_path / "out", [{"verb": "rename", "names": {pattern: "x"}}], to="hf")
        assert not (tmp_path / "out").exists()

    def test_repeats_that_end_are_allowed(self, run: Path, tmp_path: Path) -> None:
        names = {r"^(?:embed_)+(.*)\.(.*)$": r"embedding.\1.\2"}
        made = rankless.edit(run, tmp_path / "out", [{"verb": "rename", "names": names}])
        assert "model/embedding.tokens.weight" in list(rankless.open(made))


class TestLayers:
    def test_the_configuration_follows(self, tmp_path: Path, source: Path) -> None:
        tensors = {f"model.layers.{n}.w": torch.full((2,), float(n)) for n in range(3)}
        save_file(tensors, source / "model.safetensors", {"format": "pt"})
        config = {"num_hidden_layers": 3, "layer_types": ["a", "b", "c"], "mlp_only_layers": [2]}
        (source / "config.json").write_text(json.dumps(config))
        made = rankless.edit(source, tmp_path / "out", ["layers order=2,2,0"], to="hf")
        stored = load_file(made / "model.safetensors")
        assert [stored[f"model.layers.{n}.w"][0].item() for n in range(3)] == [2, 2, 0]
        changed = json.loads((made / "config.json").read_text())
        assert changed == {"num_hidden_layers": 3, "layer_types": ["c", "c", "a"], "mlp_only_layers": [0, 1]}

    @pytest.mark.parametrize(
        ("stack", "part", "config"),
        [
            ("model.layers", None, {}),
            ("model.text_model.layers", None, {}),
            ("model.vision_tower.encoder.layers", "vision_config", {}),
            ("model.visual.blocks", "vision_config", {"vision_config": {"depth": 3}}),
            ("encoder.layers", "encoder", {"encoder": {"n_layers": 3}, "decoder": {"n_layers": 3}}),
        ],
    )
    def test_only_the_part_of_the_stack_follows(
        self, tmp_path: Path, source: Path, stack: str, part: str | None, config: dict[str, Any]
    ) -> None:
        other = {"num_hidden_layers": 3}
        whole = {**other, "text_config": other, "vision_config": other, **config}
        tensors = {f"{stack}.{n}.w": torch.ones(2) for n in range(3)}
        save_file(tensors, source / "model.safetensors", {"format": "pt"})
        (source / "config.json").write_text(json.dumps(whole))
        made = rankless.edit(source, tmp_path / "out", ["layers keep=0,2"], to="hf")
        changed = json.loads((made / "config.json").read_text())
        expected = {**whole, part: dict.fromkeys(whole[part], 2)} if part else {**whole, **dict.fromkeys(other, 2)}
        if part is None:
            expected["text_config"] = {"num_hidden_layers": 2}
        assert changed == expected

    @pytest.mark.parametrize("stack", ["thinker.model.layers", "thinker.visual.blocks"])
    def test_parts_of_parts_follow(self, tmp_path: Path, source: Path, stack: str) -> None:
        """As in Qwen-Omni."""
        tensors = {f"{stack}.{n}.w": torch.ones(2) for n in range(3)} | {
            "thinker.model.embed_tokens.weight": torch.ones(4, 2)
        }
        save_file(tensors, source / "model.safetensors", {"format": "pt"})
        parts = {"text_config": {"num_hidden_layers": 3, "vocab_size": 4}, "vision_config": {"depth": 3}}
        (source / "config.json").write_text(json.dumps({"thinker_config": parts}))
        made = rankless.edit(source, tmp_path / "out", ["layers keep=0,2", "resize-vocab 6"], to="hf")
        changed = json.loads((made / "config.json").read_text())["thinker_config"]
        assert changed["text_config"] == {"num_hidden_layers": 2 if "model" in stack else 3, "vocab_size": 6}
        assert changed["vision_config"] == {"depth": 2 if "visual" in stack else 3}

    def test_an_empty_or_a_large_configuration_stays_small(self, tmp_path: Path, source: Path) -> None:
        save_file({f"layers.{n}.w": torch.ones(2) for n in range(3)}, source / "model.safetensors", {"format": "pt"})
        for number, inner in enumerate(
            [b"", b'"n_layer": 3, "x": [' + b"[" * 200 + b",".join([b"[]"] * 50_000) + b"]" * 201]
        ):
            (source / "config.json").write_bytes(b"{" + inner + b"}")
            made = rankless.edit(source, tmp_path / f"out{number}", ["layers keep=0"], to="hf")
            assert len((made / "config.json").read_bytes()) < 2 * len(inner) + 100

    def test_a_configuration_that_cannot_be_encoded_is_refused(
        self, tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Later versions of Python parse more than they encode."""
        save_file({f"layers.{n}.w": torch.ones(2) for n in range(3)}, source / "model.safetensors", {"format": "pt"})
        table: Any = [[]]
        for _ in range(3000):
            table = [table]
        (source / "config.json").write_bytes(b'{"n_layer": 3}')
        monkeypatch.setattr("rankless.edits.apply_edits._as_table", lambda _: {"n_layer": 3, "x": table})
        with pytest.raises(InvalidArgumentError, match="nested too deeply"):
            rankless.edit(source, tmp_path / "out", ["layers keep=0"], to="hf")
        assert not (tmp_path / "out").exists()

    def test_entries_of_each_layer_follow(self, tmp_path: Path, source: Path) -> None:
        save_file({f"layers.{n}.w": torch.ones(2) for n in range(3)}, source / "model.safetensors", {"format": "pt"})
        config = {"n_layer": 3, "cross_attention_layers": [1, 2], "layers_block_type": ["a", "b", "c"]}
        (source / "config.json").write_text(json.dumps({**config, "first_k_dense_replace": 1}))
        made = rankless.edit(source, tmp_path / "out", ["layers order=0,0,2"], to="hf")
        expected = {"n_layer": 3, "cross_attention_layers": [2], "layers_block_type": ["a", "a", "c"]}
        assert json.loads((made / "config.json").read_text()) == {**expected, "first_k_dense_replace": 2}
        with pytest.raises(InvalidArgumentError, match="the first 1 layers are dense"):
            rankless.edit(source, tmp_path / "out2", ["layers order=2,0"], to="hf")
        assert not (tmp_path / "out2").exists()

    @pytest.mark.parametrize(
        ("content", "text"),
        [
            (b'{"num_hidden_layers": 5}', "has 3 layers, and config.json has num_hidden_layers 5"),
            (b'{"num_hidden_layers": 4, "text_config": {"n_layer": 5}}', "num_hidden_layers 4, n_layer 5"),
            (b'{"num_hidden_layers": "3"}', "num_hidden_layers '3', where whole numbers are expected"),
            (b'{"num_hidden_layers": true}', "num_hidden_layers True, where whole numbers"),
            (b'{"num_hidden_layers": 3.0}', "num_hidden_layers 3.0, where whole numbers"),
            (b'{"num_hidden_layers": 3, "mlp_only_layers": ["0"]}', r"mlp_only_layers \['0'\], where whole numbers"),
            (b'{"num_hidden_layers": 3, "first_k_dense_replace": "1"}', "first_k_dense_replace '1', where whole"),
            (b"[1]", "no JSON object"),
            (b'{"num_hidden_layers": 3', "no JSON object"),
            (b"\xff", "no JSON object"),
        ],
    )
    def test_a_configuration_that_cannot_follow_is_refused(
        self, tmp_path: Path, source: Path, content: bytes, text: str
    ) -> None:
        save_file({f"layers.{n}.w": torch.ones(2) for n in range(3)}, source / "model.safetensors", {"format": "pt"})
        (source / "config.json").write_bytes(content)
        with pytest.raises(InvalidArgumentError, match=text):
            rankless.edit(source, tmp_path / "out", ["layers keep=0,2"], to="hf")
        assert not (tmp_path / "out").exists()
        made = rankless.edit(source, tmp_path / "renamed", ["rename layers=blocks"], to="hf")
        assert (made / "config.json").read_bytes() == content

    @pytest.mark.parametrize(
        ("edit", "text"),
        [
            ("layers", "one of order, keep and drop"),
            ("layers keep=0 drop=1", "one of order, keep and drop"),
            ("layers drop=0-2", "1 to 10000 layers; these are 0"),
            ("layers order=3", "no layer 3: the model has the layers 0 to 2"),
            ("layers order=-1", "order"),
            (f"layers order={'0,' * 10_001}0", "1 to 10000"),
            ("layers keep=0 stack=blocks", "'blocks' was looked for"),
            ("layers keep=0-99999999", "no layer|keep"),
        ],
    )
    def test_what_does_not_fit_is_refused(self, run: Path, tmp_path: Path, edit: str, text: str) -> None:
        with pytest.raises(InvalidArgumentError, match=text):
            rankless.edit(run, tmp_path / "out", [edit])

    @pytest.mark.parametrize("edit", ["layers order=1,0", "layers drop=0", "layers order=0,0,1"])
    def test_what_only_the_first_layer_has_stays_there(self, tmp_path: Path, source: Path, edit: str) -> None:
        """All layers of T5 use the position bias of the first one."""
        tensors = {f"block.{n}.q.weight": torch.ones(2) for n in range(3)}
        tensors["block.0.relative_attention_bias.weight"] = torch.ones(2)
        save_file(tensors, source / "model.safetensors", {"format": "pt"})
        with pytest.raises(InvalidArgumentError, match="only layer 0 has 'relative_attention_bias"):
            rankless.edit(source, tmp_path / "out", [edit], to="hf")
        made = rankless.edit(source, tmp_path / "out", ["layers order=0,2,2,1"], to="hf")
        assert "block.0.relative_attention_bias.weight" in load_file(made / "model.safetensors")

    def test_one_of_several_stacks_is_named(self, tmp_path: Path) -> None:
        tensors = {f"{side}.block.{n}.w": torch.full((2,), float(n)) for n in range(2) for side in ("enc", "dec")}
        rankless.save_model(tensors, tmp_path / "m.safetensors")
        with pytest.raises(InvalidArgumentError, match=r"found: dec\.block, enc\.block"):
            rankless.edit(tmp_path / "m.safetensors", tmp_path / "out", ["layers keep=0"])
        made = rankless.edit(tmp_path / "m.safetensors", tmp_path / "out", ["layers keep=1 stack=dec.block"])
        assert sorted(names_in(made)) == ["dec.block.0.w", "enc.block.0.w", "enc.block.1.w"]


def names_in(checkpoint: Path) -> list[str]:
    return list(load_file(next((checkpoint / "model").glob("*.safetensors"))))


class TestFreezing:
    def test_a_frozen_group_leaves_the_optimizer_and_the_scheduler(self, run: Path, tmp_path: Path) -> None:
        edits = ["freeze *.norm.*,lm_head.bias"]
        rankless.edit(run, tmp_path / "run/step_3", edits)
        model = Lm()
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.ndim > 1], lr=0.5)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        rankless.load_checkpoint(tmp_path / "run", model=model, optimizer=optimizer, scheduler=scheduler)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.001)
        assert len(scheduler.base_lrs) == 1
        assert state_of(model, optimizer)["embed_tokens.weight/exp_avg"].any()

    def test_each_group_keeps_its_momentum_in_a_cycle(self, tmp_path: Path) -> None:
        """The lists of the scheduler lose the entries of a group that leaves the optimizer, all of them."""
        model = nn.Linear(2, 2)
        groups = [{"params": [model.bias]}, {"params": [model.weight]}]
        optimizer = torch.optim.SGD(groups, momentum=0.9)
        cycle: dict[str, Any] = {"base_momentum": [0.1, 0.6], "max_momentum": [0.2, 0.9]}
        scheduler = torch.optim.lr_scheduler.CyclicLR(optimizer, [0.1, 0.2], [0.3, 0.4], **cycle)
        model(torch.ones(2)).sum().backward()
        optimizer.step()
        scheduler.step()
        rankless.save_checkpoint(tmp_path / "run", "a", model, optimizer, scheduler)
        its_optimizer = torch.optim.SGD([model.weight], momentum=0.9)
        its_scheduler = torch.optim.lr_scheduler.CyclicLR(its_optimizer, 0.2, 0.4, base_momentum=0.6, max_momentum=0.9)
        rankless.load_checkpoint(tmp_path / "run", None, model, its_optimizer, its_scheduler, edit=["freeze bias"])
        scheduler.step()
        its_scheduler.step()
        assert its_optimizer.param_groups[0]["momentum"] == optimizer.param_groups[1]["momentum"]

    def test_a_further_name_of_a_tied_weight_means_the_weight(self, tmp_path: Path) -> None:
        save_training(tmp_path / "run", tied=True)
        rankless.edit(tmp_path / "run", tmp_path / "out", ["layers order=0", "freeze lm_head.weight"])
        frozen = Oracle.read(tmp_path / "out")
        assert frozen.tied == {"lm_head.weight": "embed_tokens.weight"}
        assert "embed_tokens.weight" not in frozen.states
        assert all("embed_tokens.weight" not in group for group in frozen.groups)

    def test_what_does_not_fit_is_refused(self, run: Path, tmp_path: Path) -> None:
        for edit, text in (
            ("freeze nothing", "no parameter 'nothing'"),
            ("unfreeze embed_tokens.weight like=lm_head.weight", "has states in .* already"),
            ("unfreeze embed_tokens.weight like=nothing", "'nothing' has no states"),
            ("unfreeze embed_tokens.weight", "like"),
        ):
            with pytest.raises(InvalidArgumentError, match=text):
                rankless.edit(run, tmp_path / "out", [edit])
        rankless.edit(run, tmp_path / "model", ["cast bfloat16"], model_only=True)
        with pytest.raises(InvalidArgumentError, match="has no states of an optimizer"):
            rankless.edit(tmp_path / "model", tmp_path / "out", ["freeze *"])

    def test_a_matrix_does_not_get_the_states_that_adafactor_has_of_a_vector(self, tmp_path: Path) -> None:
        model = Lm()
        optimizer = torch.optim.Adafactor([model.lm_head.weight, model.lm_head.bias])
        train_steps(model, optimizer, [1])
        rankless.save_checkpoint(tmp_path / "run", "a", model=model, optimizer=optimizer)
        with pytest.raises(InvalidArgumentError, match="is a matrix"):
            rankless.edit(tmp_path / "run", tmp_path / "out", ["unfreeze embed_tokens.weight like=lm_head.bias"])
        rankless.edit(tmp_path / "run", tmp_path / "out", ["unfreeze layers.0.norm.bias like=lm_head.bias"])


class TestAverages:
    def test_checkpoints_must_have_the_same_tensors(self, run: Path, tmp_path: Path) -> None:
        other = rankless.edit(run, tmp_path / "other", ["resize-vocab 12"])
        with pytest.raises(MismatchError, match=r"'embed_tokens.weight' is F32 \[10, 4\] .* F32 \[12, 4\]"):
            rankless.edit(run, tmp_path / "out", [{"verb": "average", "paths": [str(other)]}])
        with pytest.raises(NoCheckpointError, match="3 checkpoints up to step_3, and not 4"):
            rankless.edit(run, tmp_path / "out", ["average 4"])
        with pytest.raises(InvalidArgumentError, match=r"pass last .* or paths"):
            rankless.edit(run, tmp_path / "out", ["average"])
        with pytest.raises(InvalidArgumentError, match="must be the first verb"):
            rankless.edit(run, tmp_path / "out", ["resize-vocab 12", "average 2"])

    def test_checkpoints_that_the_training_has_abandoned_are_left_out(self, tmp_path: Path) -> None:
        run = tmp_path / "run"
        for value, tag in ((1.0, None), (50.0, None), (2.0, "step_1")):
            model = nn.ParameterDict({"w": torch.full((1,), value)})
            with rankless.Checkpointer(run, model=model, save_every=1) as checkpointer:
                began = checkpointer.resume(tag)
                with torch.no_grad():
                    model["w"].fill_(value)
                checkpointer.step(began + 1)
        rankless.edit(run, tmp_path / "out", ["average 2"])
        loaded = {"w": torch.zeros(1)}
        rankless.load_checkpoint(tmp_path / "out", model=loaded)
        assert loaded["w"].item() == 1.5
        with pytest.raises(NoCheckpointError, match="has 2 checkpoints up to step_2, and not 3: pass a later tag, or"):
            rankless.edit(run, tmp_path / "more", ["average 3"])

    def test_checkpoints_of_a_run_in_a_bucket_are_averaged(self) -> None:
        fake = FakeS3(AWS)
        with fake.connected():
            bucket = make_object_path(fake.store_at("http://fake"), BUCKET)
            for step in (1, 2, 3):
                model = {"w": torch.full((1,), float(step))}
                rankless.save_checkpoint(bucket / "run", f"step_{step}", model, step=step)
            rankless.edit(bucket / "run", bucket / "out", ["average 2"])
            options: dict[str, Any] = {"edit": ["average 2"], "resume": False}
            for path, more in ((bucket / "out", {}), (bucket / "run", options)):
                loaded = {"w": torch.zeros(1)}
                rankless.load_checkpoint(path, model=loaded, **more)
                assert loaded["w"].item() == 2.5

    def test_a_new_run_begins_with_an_edit_that_an_earlier_one_began_with(self, tmp_path: Path) -> None:
        """An edit takes effect once in a run: if its job is started again, but not in a run that begins with it."""
        expected = {"a": 0.0, "b": 2.5, "c": 12.5, "d": 12.5}
        for run, source in (("a", None), ("b", "a"), ("c", "b")):
            model = nn.ParameterDict({"w": torch.zeros(1)})
            with rankless.Checkpointer(tmp_path / run, model=model, save_every=1, signals=()) as checkpointer:
                options: dict[str, Any] = {"init_from": tmp_path / source, "edit": ["average 2"]} if source else {}
                began = checkpointer.resume(**options)
                assert model["w"].item() == expected[run]
                for step in range(began + 1, began + 4):
                    with torch.no_grad():
                        model["w"].fill_(step + (10.0 if run == "b" else 0.0))
                    checkpointer.step(step)
        loaded = {"w": torch.zeros(1)}
        rankless.restore(tmp_path / "b", model=loaded, edit=["average 2"])
        rankless.edit(tmp_path / "b", tmp_path / "d", ["average 2"])
        assert loaded["w"].item() == float(rankless.open(tmp_path / "d")["model/w"][0]) == expected["d"]
        model = nn.ParameterDict({"w": torch.zeros(1)})
        restarted = rankless.Checkpointer(tmp_path / "b", model=model, signals=())
        restarted.resume(init_from=tmp_path / "a", edit=["average 2"])
        assert model["w"].item() == 13.0

    def test_integers_are_those_of_the_newest(self, tmp_path: Path) -> None:
        for step in (1, 2):
            model = {"w": torch.tensor([float(step)]), "n": torch.tensor(step)}
            rankless.save_checkpoint(tmp_path / "run", f"step_{step}", model=model, step=step)
        rankless.edit(tmp_path / "run", tmp_path / "out", ["average 2"])
        loaded = {"w": torch.zeros(1), "n": torch.tensor(0)}
        rankless.load_checkpoint(tmp_path / "out", model=loaded)
        assert (loaded["w"].item(), loaded["n"].item()) == (1.5, 2)


class TestUpcycling:
    def test_it_computes_what_the_dense_model_computes(self, tmp_path: Path) -> None:
        """transformers opens the folder as a mixture of experts, which gives the same logits."""
        transformers = pytest.importorskip("transformers")
        config = transformers.Qwen3Config(
            hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
            head_dim=4, vocab_size=11,
        )  # fmt: skip
        torch.manual_seed(0)
        dense = transformers.Qwen3ForCausalLM(config).eval()
        dense.save_pretrained(tmp_path / "dense")
        edits = ["upcycle 4 per_token=2 style=qwen3-moe"]
        rankless.edit(tmp_path / "dense", tmp_path / "moe", edits, to="hf")
        sparse = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "moe").eval()
        assert type(sparse).__name__ == "Qwen3MoeForCausalLM"
        tokens = torch.arange(11)[None]
        torch.testing.assert_close(sparse(tokens).logits, dense(tokens).logits, rtol=1e-4, atol=1e-5)
        assert sparse.model.layers[0].mlp.gate.weight.std() > 0

    def test_fused_experts_continue_a_training(self, tmp_path: Path) -> None:
        """The names and shapes of the modules of transformers 5, with moments."""
        transformers = pytest.importorskip("transformers")
        options: dict[str, Any] = {
            "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2,
            "num_key_value_heads": 1, "head_dim": 4, "vocab_size": 11,
        }  # fmt: skip
        dense = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**options))
        optimizer = torch.optim.AdamW(dense.parameters())
        dense(torch.arange(11)[None], labels=torch.arange(11)[None]).loss.backward()
        optimizer.step()
        rankless.save_checkpoint(tmp_path / "run", "a", model=dense, optimizer=optimizer)
        moe = transformers.Qwen3MoeForCausalLM(
            transformers.Qwen3MoeConfig(**options, num_experts=3, num_experts_per_tok=2, moe_intermediate_size=12)
        )
        its_optimizer = torch.optim.AdamW(moe.parameters())
        rankless.load_checkpoint(
            tmp_path / "run", model=moe, optimizer=its_optimizer, edit=["upcycle 3 style=fused router=zeros"]
        )
        mlp, experts = dense.model.layers[0].mlp, moe.model.layers[0].mlp.experts
        for expert in range(3):
            joined = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])
            assert torch.equal(experts.gate_up_proj[expert], joined)
            assert torch.equal(experts.down_proj[expert], mlp.down_proj.weight)
        moment = its_optimizer.state[experts.gate_up_proj]["exp_avg"]
        assert torch.equal(moment[2, 12:], optimizer.state[mlp.up_proj.weight]["exp_avg"])
        assert not its_optimizer.state[moe.model.layers[0].mlp.gate.weight]["exp_avg"].any()

    @pytest.mark.parametrize(
        ("edit", "text"),
        [
            ("upcycle 1", "experts must be 2 to 4096"),
            ("upcycle 5000", "experts must be 2 to 4096"),
            ("upcycle 2 per_token=3", "per_token 1 to experts"),
            ("upcycle 2 style=other", "style must be one of"),
            ("upcycle 2 router=mean", "router must be zeros or normal"),
            ("upcycle 2 mlp=ffn", "no module 'ffn'"),
        ],
    )
    def test_what_does_not_fit_is_refused(self, run: Path, tmp_path: Path, edit: str, text: str) -> None:
        with pytest.raises(InvalidArgumentError, match=text):
            rankless.edit(run, tmp_path / "out", [edit])


class TestRecipes:
    def test_a_file_and_the_command_give_the_same(self, run: Path, tmp_path: Path) -> None:
        recipe = tmp_path / "grow.toml"
        recipe.write_text(
            '[[edit]]\nverb = "resize-vocab"\nsize = 12\n\n[[edit]]\nverb = "rename"\n'
            'names = { "^layers" = "blocks" }\n'
        )
        rankless.edit(run, tmp_path / "a", recipe)
        invoke("edit", run, "-o", tmp_path / "b", "--recipe", recipe)
        invoke("edit", run, "-o", tmp_path / "c", "resize-vocab 12", "rename ^layers=blocks")
        first = Oracle.read(tmp_path / "a")
        for other in "bc":
            first.assert_equals(Oracle.read(tmp_path / other))

    def test_a_dry_run_writes_nothing(self, run: Path, tmp_path: Path) -> None:
        shown = invoke_json("edit", run, "--dry-run", "resize-vocab 12", "freeze lm_head.bias")
        assert "model: embed_tokens.weight: 10 to 12 rows" in shown["changes"]
        assert "model: 18 tensors: 15 as stored, 3 computed" in shown["groups"]
        assert "optimizer: lm_head.bias: frozen, its states are dropped" in shown["changes"]
        assert "rows 10 to 11 of lm_head.weight" in shown["new"]
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize(
        "options",
        [("--to", "bogus"), ("--to", "nxd"), ("--max-shard-size", "bogus"), ("--to", "safetensors", "--step", "3")],
    )
    def test_a_dry_run_refuses_what_the_edit_refuses(self, run: Path, tmp_path: Path, options: tuple[str, ...]) -> None:
        refused = [
            invoke("edit", run, *target, *options, "resize-vocab 12", code=2).stderr
            for target in (["--dry-run"], ["-o", tmp_path / "out"])
        ]
        assert refused[0] == refused[1]

    @pytest.mark.parametrize(
        "text",
        [
            *("", "[[edit]]", '[[edit]]\nverb = "grow"', "edit = 3", "\0", "a = 1"),
            *('[[edit]]\nverb = "layers"\nkeep = "all"', '[[edit]]\nverb = "cast"\ndtype = "int8"'),
            '[[edit]]\nverb = "cast"\ndtype = "bfloat16"\nspeed = 3',
            *("[[edit]]\nverb = 'rename'\nnames = {'(' = 'a'}", "[[edit]]\nverb = 'rename'\nnames = {'.*' = 'a'}"),
        ],
    )
    def test_a_recipe_that_is_wrong_is_refused(self, run: Path, tmp_path: Path, text: str) -> None:
        (tmp_path / "r.toml").write_text(text)
        with pytest.raises(InvalidArgumentError):
            rankless.edit(run, tmp_path / "out", tmp_path / "r.toml")
        assert not (tmp_path / "out").exists()

    @pytest.mark.parametrize(
        "edits", [[], 3, [3], ["'"], ["grow 3"], ["cast"], ["cast bfloat16 fast"], [{}], ["cast a"] * 101]
    )
    def test_edits_that_are_wrong_are_refused(self, run: Path, tmp_path: Path, edits: Any) -> None:
        with pytest.raises(InvalidArgumentError):
            rankless.edit(run, tmp_path / "out", edits)

    def test_the_command_says_what_is_missing(self, run: Path, tmp_path: Path) -> None:
        assert "pass edits such as" in invoke("edit", run, "-o", tmp_path / "x", code=2).stderr
        assert "pass one of --output PATH and --dry-run" in invoke("edit", run, "cast bfloat16", code=2).stderr


class TestDequantising:
    @pytest.mark.parametrize("shape", [(256, 384), (3, 128, 256)])
    def test_blocks_are_those_of_transformers(self, tmp_path: Path, shape: tuple[int, ...]) -> None:
        fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
        weight = torch.randn(shape).to(torch.float8_e4m3fn)
        scales = torch.rand(*shape[:-2], shape[-2] // 128, shape[-1] // 128) + 0.1
        folder = tmp_path / "quantized"
        folder.mkdir()
        tensors = {"a.weight": weight, "a.weight_scale_inv": scales, "norm.weight": torch.ones(3)}
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        config = {"quantization_config": {"weight_block_size": [128, 128]}, "torch_dtype": "float32"}
        (folder / "config.json").write_text(json.dumps(config))
        made = rankless.edit(folder, tmp_path / "out", ["dequantise"], to="hf")
        stored = load_file(made / "model.safetensors")
        expected = fp8.Fp8Dequantize(None)._dequantize_one(weight, scales, torch.bfloat16)
        assert stored.keys() == {"a.weight", "norm.weight"}
        assert torch.equal(stored["a.weight"], expected)
        assert json.loads((made / "config.json").read_text()) == {"torch_dtype": "bfloat16"}

    def test_blocks_at_the_edges_are_smaller(self, tmp_path: Path, source: Path) -> None:
        """DeepSeek's matrices are no multiples of the block."""
        weight, scales = torch.randn(576, 200).to(torch.float8_e4m3fn), torch.rand(5, 2)
        save_file({"a.weight": weight, "a.weight_scale_inv": scales}, source / "model.safetensors", {"format": "pt"})
        (source / "config.json").write_text(json.dumps({"quantization_config": {"weight_block_size": [128, 128]}}))
        rankless.edit(source, tmp_path / "out.safetensors", ["dequantise dtype=float32"], to="safetensors")
        spread = scales.repeat_interleave(128, 0)[:576].repeat_interleave(128, 1)[:, :200]
        assert torch.equal(load_file(tmp_path / "out.safetensors")["a.weight"], weight.float() * spread)

    @pytest.mark.parametrize("scales", [torch.tensor(0.5), torch.rand(6), torch.rand(6, 1), torch.tensor([0.25])])
    def test_scales_of_rows_and_tensors(self, tmp_path: Path, scales: torch.Tensor) -> None:
        weight = torch.randn(6, 8).to(torch.float8_e5m2)
        tensors = {"a.weight": weight, "a.weight_scale": scales, "a.input_scale": torch.ones(())}
        save_file(tensors, tmp_path / "m.safetensors")
        rankless.edit(tmp_path / "m.safetensors", tmp_path / "out.safetensors", ["dequantise"], to="safetensors")
        spread = scales.reshape(-1, 1) if scales.numel() > 1 else scales
        stored = load_file(tmp_path / "out.safetensors")
        assert torch.equal(stored["a.weight"], (weight.float() * spread).bfloat16())
        assert stored.keys() == {"a.weight"}

    def test_mxfp4_is_that_of_transformers(self, tmp_path: Path) -> None:
        mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
        blocks = torch.randint(0, 256, (3, 10, 4, 16), dtype=torch.uint8)
        scales = torch.randint(100, 140, (3, 10, 4), dtype=torch.uint8)
        save_file({"e.gate_up_proj_blocks": blocks, "e.gate_up_proj_scales": scales}, tmp_path / "m.safetensors")
        rankless.edit(tmp_path / "m.safetensors", tmp_path / "out.safetensors", ["dequantise"], to="safetensors")
        stored = load_file(tmp_path / "out.safetensors")
        assert torch.equal(stored["e.gate_up_proj"], mxfp4.convert_moe_packed_tensors(blocks, scales))

    def test_what_has_no_scale_is_refused(self, tmp_path: Path) -> None:
        save_file({"a.weight": torch.ones(4, 4).to(torch.float8_e4m3fn)}, tmp_path / "m.safetensors")
        with pytest.raises(UnsupportedTensorError, match=r"'a.weight' is F8_E4M3 and has no scale"):
            rankless.edit(tmp_path / "m.safetensors", tmp_path / "o", ["dequantise"])
        save_file({"a.weight": torch.ones(4)}, tmp_path / "n.safetensors")
        with pytest.raises(InvalidArgumentError, match="has no FP8 weights"):
            rankless.edit(tmp_path / "n.safetensors", tmp_path / "o", ["dequantise"])
        tensors = {"a.weight": torch.ones(6, 8).to(torch.float8_e4m3fn), "a.weight_scale": torch.ones(5, 3)}
        save_file(tensors, tmp_path / "p.safetensors")
        with pytest.raises(UnsupportedTensorError, match="they do not divide it into blocks"):
            rankless.edit(tmp_path / "p.safetensors", tmp_path / "o", ["dequantise"])


def test_adapters_are_refused(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(nn.Sequential(nn.Linear(4, 4)), peft.LoraConfig(target_modules=["0"]))
    rankless.save_checkpoint(tmp_path / "run", "a", model=model)
    with pytest.raises(InvalidArgumentError, match="has PEFT adapters, which do not follow"):
        rankless.edit(tmp_path / "run", tmp_path / "out", ["layers keep=0"])


def test_a_rename_that_changes_nothing_is_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="no parameter with '\\^nothing' in its name"):
        rankless.edit(run, tmp_path / "out", ["rename ^nothing=x"])
