"""Tests ``rankless verify``: it names all corruption and nothing else."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import rankless
from rankless.observe.units import format_size
from tests.helpers.commands import invoke, invoke_json
from tests.helpers.corruption import cut_file, flip_tensor_bit
from tests.helpers.file_contents import stored


class TestVerify:
    def test_reads_every_tensor_of_the_latest(self, made: Path) -> None:
        (actual,) = invoke_json("verify", made)["checkpoints"]
        sizes = [nbytes for f in (made / "step_3").rglob("*.safetensors") for _, _, nbytes in stored(f).values()]
        assert (actual["path"], actual["status"], actual["problems"]) == (str(made / "step_3"), "verified", [])
        assert (actual["tensors"], actual["checksummed"], actual["bytes"]) == (len(sizes), len(sizes), sum(sizes))
        text = invoke("verify", made).stdout
        assert f"{len(sizes)} tensors, {format_size(sum(sizes))} in " in text
        assert re.search(r"\d B/s\)$", text.replace("k", "").replace("M", "").replace("G", ""), re.MULTILINE)

    def test_names_every_damaged_tensor_and_only_those(self, run: Path) -> None:
        model, optimizer = run / "step_3/model/model.safetensors", run / "step_3/optimizer/optimizer.safetensors"
        flip_tensor_bit(model, "body.0.weight")
        flip_tensor_bit(optimizer, "norm.bias/exp_avg")
        result = invoke("verify", run, code=1)
        problems = result.stdout.splitlines()[1:-1]
        assert len(problems) == 2
        assert "'body.0.weight'" in problems[0]
        assert str(model) in problems[0]
        assert "'norm.bias/exp_avg'" in problems[1]
        assert str(optimizer) in problems[1]
        report = invoke_json("verify", run, code=1)
        assert report["ok"] is False
        assert report["checkpoints"][0]["status"] == "damaged"
        assert len(report["checkpoints"][0]["problems"]) == 2

    @pytest.mark.parametrize("file", ["state.json", "ranks.json", "ranks.safetensors", "manifest.json"])
    def test_names_a_damaged_file(self, run: Path, file: str) -> None:
        cut_file(run / "step_3" / file)
        assert str(run / "step_3" / file) in invoke("verify", run / "step_3", code=1).stdout

    def test_all_of_a_run(self, run: Path) -> None:
        flip_tensor_bit(run / "step_2/model/model.safetensors", "scale")
        assert invoke_json("verify", run)["ok"] is True
        report = invoke_json("verify", run, "--all", code=1)
        assert [Path(entry["path"]).name for entry in report["checkpoints"]] == ["step_1", "step_2", "step_3"]
        assert [entry["status"] for entry in report["checkpoints"]] == ["verified", "damaged", "verified"]

    def test_of_a_run_it_names_a_damaged_manifest_as_that_may_be_the_latest(self, run: Path) -> None:
        cut_file(run / "step_3/manifest.json")
        report = invoke_json("verify", run, code=1)["checkpoints"]
        assert [(Path(item["path"]).name, item["status"]) for item in report] == [
            ("step_3", "damaged"),
            ("step_2", "verified"),
        ]

    def test_where_every_manifest_is_damaged_it_names_all(self, run: Path) -> None:
        for step in (1, 2, 3):
            cut_file(run / f"step_{step}/manifest.json")
        assert invoke("verify", run, code=1).stdout.count("manifest.json") == 3
        assert "none of the 3 checkpoint(s)" in invoke("show", run, code=1).stderr

    def test_says_where_there_are_no_checksums(self, tmp_path: Path) -> None:
        save_file({"w": torch.zeros(5)}, tmp_path / "model.safetensors")
        assert "no checksums" in invoke("verify", tmp_path).stdout
        (actual,) = invoke_json("verify", tmp_path)["checkpoints"]
        assert (actual["status"], actual["tensors"], actual["checksummed"], actual["bytes"]) == ("unchecked", 1, 0, 20)

    def test_says_how_much_has_no_checksums(self, tmp_path: Path) -> None:
        rankless.save_checkpoint(tmp_path, "a", {"ours": torch.zeros(2)})
        model = tmp_path / "a/model"
        save_file({"theirs": torch.zeros(3)}, model / "b.safetensors")
        weight_map = {"ours": "model.safetensors", "theirs": "b.safetensors"}
        (model / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
        assert "1 of 2 tensors has no checksums: only its structure" in invoke("verify", model).stdout

    def test_lists_no_more_problems_than_a_screen_takes(self, tmp_path: Path) -> None:
        rankless.save_checkpoint(tmp_path, "a", {f"w{i}": torch.zeros(1) for i in range(30)})
        for i in range(30):
            flip_tensor_bit(tmp_path / "a/model/model.safetensors", f"w{i}")
        assert "and 10 more problems; --json" in invoke("verify", tmp_path, code=1).stdout
        assert len(invoke_json("verify", tmp_path, code=1)["checkpoints"][0]["problems"]) == 30

    def test_weights_of_ours_have_checksums_outside_of_their_checkpoint_too(self, run: Path) -> None:
        assert invoke_json("verify", run / "step_3/model")["checkpoints"][0]["status"] == "verified"
        flip_tensor_bit(run / "step_3/model/model.safetensors", "scale")
        assert "'scale'" in invoke("verify", run / "step_3/model", code=1).stdout
