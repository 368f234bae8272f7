"""Tests ``rankless show``: its output agrees with the files, and its exit codes with its output."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file

import rankless
from rankless.formats import safetensors
from rankless.observe.units import format_size
from tests.helpers.commands import invoke, invoke_json
from tests.helpers.file_contents import size_on_disk, stored
from tests.helpers.user_content import USER_CONTENT


class TestShow:
    def test_json_lists_what_the_files_hold(self, made: Path) -> None:
        report = invoke_json("show", made / "step_2")
        parts = {part: stored(made / f"step_2/{part}/{part}.safetensors") for part in ("model", "optimizer")}
        expected = {f"{part}/{name}": facts for part, table in parts.items() for name, facts in table.items()}
        assert {t["name"]: (t["dtype"], t["shape"], t["bytes"]) for t in report["tensors"]} == expected
        assert report["tied"] == {"model/head.weight": "model/embed.weight"}
        assert report["bytes"] == size_on_disk(made / "step_2")
        assert {f["path"]: f["bytes"] for f in report["files"]} == {
            str(f): f.stat().st_size for f in (made / "step_2").rglob("*") if f.is_file() and f.name != "manifest.json"
        }
        assert (report["format"], report["tag"], report["step"], report["sequence"]) == ("rankless", "step_2", 2, 2)
        assert (report["world_size"], report["metrics"]) == (1, {"val_loss": 0.5, "bleu": None})

    def test_json_keeps_the_values_and_describes_tensors_in_them(self, made: Path) -> None:
        values = invoke_json("show", made)["values"]
        assert [group["class"] for group in values["optimizer"]["groups"]] == ["AdamW", "AdamW"]
        assert [group["settings"]["weight_decay"] for group in values["optimizer"]["groups"]] == [0.01, 0.1]
        assert values["scheduler"]["state"]["last_epoch"] == 3
        content = values["user_content"]
        assert (content["total_steps"], content["cli_args"], content["best"]) == (3, USER_CONTENT["cli_args"], "nan")
        assert content["losses"] == USER_CONTENT["losses"]
        assert content["ema"] == {"kind": "tensor", "dtype": "F32", "shape": [3, 4]}
        assert content["numbers"] == {"a": 2.5, "b": -7, "c": "(1-2j)", "d": 2**63}
        assert content["types"] == {"dtype": "bfloat16", "device": "cpu", "size": [2, 3]}
        assert content["namespace"] == {"lr": 0.5}

    def test_long_values_end_where_people_stop_reading(self, tmp_path: Path) -> None:
        content = {f"setting_{i}": i for i in range(500)}
        rankless.save_checkpoint(tmp_path, "a", user_content=content)
        text = invoke("show", tmp_path).stdout
        assert "setting_29 " in text
        assert "setting_30 " not in text
        assert "--json lists all" in text
        assert invoke_json("show", tmp_path)["values"]["user_content"] == content

    def test_a_range_longer_than_a_list_can_be(self, tmp_path: Path) -> None:
        long = range(10**60)
        rankless.save_checkpoint(tmp_path, "a", user_content={"r": long, "s": range(5)}, rng=False)
        rankless.save_checkpoint(tmp_path, "b", user_content={"r": range(1, 10**60), "s": range(5)}, rng=False)
        text = invoke("show", tmp_path / "a").stdout
        assert re.search(r"^  r +range\(0, 10{10,}\.\.\.0{10,}\)$", text, re.MULTILINE)
        assert re.search(r"^  s +range\(0, 5\)$", text, re.MULTILINE)
        assert invoke_json("show", tmp_path / "a")["values"]["user_content"]["r"] == str(long)
        assert "1 value differs" in invoke("diff", tmp_path / "a", tmp_path / "b", code=1).stdout

    def test_of_a_run_it_shows_the_latest(self, made: Path) -> None:
        text = invoke("show", made).stdout
        assert re.search(rf"^path +{made / 'step_3'}$", text, re.MULTILINE)
        assert re.search(r"^saved +20\d\d-\d\d-\d\d \d\d:\d\d by 1 rank$", text, re.MULTILINE)
        assert re.search(rf"^size +{format_size(size_on_disk(made / 'step_3'))} in \d+ files$", text, re.MULTILINE)

    def test_text_has_tensors_modules_and_values(self, made: Path) -> None:
        text = invoke("show", made).stdout
        for row in (
            r"model/body\.0\.weight +F32 +\[13, 6\] +312 B",
            r"model/seen +I64 +\[\] +8 B",
            r"model/head\.weight = model/embed\.weight +tied",
            r"  body +3 +676 B +\d+\.\d %",
            r"  group 1  5 parameters, .*weight_decay=0\.1.*",
            r"  last_epoch +3",
            r"  total_steps +3",
            r"  cli_args\.lr +0\.0003",
            r"  losses +\[0\.5, .*\.\.\.\] \(1,000 items\)",
            r"  ema +tensor F32 \[3, 4\]",
            r"  types +\{'dtype': bfloat16, 'device': cpu, 'size': \(2, 3\)\}",
            r"  namespace +\{'lr': 0\.5\}",
        ):
            assert re.search(f"^{row}$", text, re.MULTILINE), row

    @pytest.mark.parametrize(
        ("pattern", "expected"),
        [
            (
                "body.2",
                {"model/body.2.weight", *(f"optimizer/body.2.weight/{s}" for s in ("exp_avg", "exp_avg_sq", "step"))},
            ),
            ("model/norm.*", {"model/norm.weight", "model/norm.bias"}),
            ("norm.?????", set()),
            ("norm.??????", {"model/norm.weight"}),
            ("*[02].bias*step", {"optimizer/body.0.bias/step"}),
        ],
    )
    def test_a_pattern_is_part_of_a_name_or_a_glob(self, made: Path, pattern: str, expected: set[str]) -> None:
        if not expected:
            assert "Without a pattern" in invoke("show", made, pattern, code=1).stderr
            return
        assert {tensor["name"] for tensor in invoke_json("show", made, pattern)["tensors"]} == expected
        text = invoke("show", made, pattern).stdout
        assert set(re.findall(r"^((?:model|optimizer)/\S+)  ", text, re.MULTILINE)) == expected
        assert "scheduler" not in text

    def test_names_are_whole_in_a_pipe_and_cut_in_the_middle_where_columns_are_few(self, tmp_path: Path) -> None:
        name = "model.layers.10." + "deeply." * 12 + "nested.weight"
        rankless.save_checkpoint(tmp_path, "a", {name: torch.zeros(2, 3), "b": torch.zeros(1)})
        assert f"model/{name}  F32" in invoke("show", tmp_path).stdout
        narrow = invoke("show", tmp_path, columns=80).stdout.splitlines()
        assert max(len(row) for row in narrow if not row.startswith("path ")) == 80  # a path is for copying
        assert any(
            re.match(r"model/model\.layers\.10\..*….*nested\.weight +F32 +\[2, 3\] +24 B$", row) for row in narrow
        )

    def test_long_versions_go_on_in_the_next_row(self, tmp_path: Path) -> None:
        with mock.patch("rankless.save.build_manifest.__version__", "0.12.1.dev189+g8ad40ae10.d20261121"):
            rankless.save_checkpoint(tmp_path, "a", {"w": torch.zeros(1)})
        rows = invoke("show", tmp_path, columns=80).stdout.splitlines()
        assert any(re.match(r"with +rankless 0\.12\.1\.dev189\+g8ad40ae10\.d20261121, torch ", row) for row in rows)
        assert any(re.match(r" +Python \d", row) for row in rows)
        assert max(len(row) for row in rows if not row.startswith("path ")) <= 80

    def test_layer_2_comes_before_layer_10(self, tmp_path: Path) -> None:
        rankless.save_checkpoint(tmp_path, "a", {f"{n}.w": torch.zeros(1) for n in (10, 9, 2)})
        assert [t["name"] for t in invoke_json("show", tmp_path)["tensors"]] == ["model/2.w", "model/9.w", "model/10.w"]

    def test_nothing_in_a_checkpoint_can_steer_the_terminal(self, tmp_path: Path) -> None:
        rankless.save_checkpoint(tmp_path, "a", {"w\x1b[2J": torch.zeros(1)}, user_content=USER_CONTENT)
        text = invoke("show", tmp_path).stdout
        assert "\x1b" not in text
        assert "w\\x1b[2J" in text
        assert "\\x1b[31mred" in text

    def test_tensors_among_the_settings_of_an_optimizer_are_described(self, tmp_path: Path) -> None:
        """They are kept inside the values, as several ranks may have them."""
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.5))
        rankless.save_checkpoint(tmp_path, "s", model, optimizer)
        (group,) = invoke_json("show", tmp_path)["values"]["optimizer"]["groups"]
        assert group["settings"]["lr"] == {"kind": "tensor", "dtype": "F32", "shape": []}

    def test_other_formats_are_shown_too(self, tmp_path: Path) -> None:
        save_file({"a.w": torch.zeros(5, dtype=torch.float16)}, tmp_path / "model.safetensors")
        report = invoke_json("show", tmp_path)
        assert (report["format"], report["tag"], report["values"]) == ("huggingface", None, {})
        assert report["tensors"] == [{"name": "model/a.w", "dtype": "F16", "shape": [5], "bytes": 10}]
        assert report["bytes"] == (tmp_path / "model.safetensors").stat().st_size
        assert "model/a.w  F16    [5]     10 B" in invoke("show", tmp_path).stdout

    def test_a_damaged_checkpoint_is_exit_1(self, run: Path) -> None:
        (run / "step_3/model/model.safetensors").unlink()
        assert "model.safetensors is missing" in invoke("show", run, code=1).stderr


def test_the_header_of_a_large_file_is_parsed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parsing is what takes time if a file has very many tensors."""
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    parsed: list[str] = []
    decode = safetensors.header.decode_header

    def decode_and_count(raw: bytes, size: int, file: str) -> Any:
        parsed.append(file)
        return decode(raw, size, file)

    monkeypatch.setattr(safetensors.header, "decode_header", decode_and_count)
    invoke("show", str(tmp_path / "model.safetensors"))
    assert parsed == [str(tmp_path / "model.safetensors")]


class TestForAnEngine:
    """What ranks of an engine would read is tested in tests/engines, with vLLM."""

    @pytest.mark.parametrize("option", [["--tp", "2"], ["--pp", "2"], ["--ep"], ["--config", "base"]])
    def test_its_options_need_an_engine(self, made: Path, option: list[str]) -> None:
        result = invoke("show", made, *option, code=2)
        assert f"{option[0]} needs --for" in result.stderr

    @pytest.mark.parametrize("option", [["*.bias"], ["--all"], ["--depth", "1"]])
    def test_other_options_are_refused(self, made: Path, option: list[str]) -> None:
        result = invoke("show", made, *option, "--for", "vllm", code=2)
        assert "is not possible with --for" in result.stderr

    def test_an_unknown_engine(self, made: Path) -> None:
        options = ("--for", "vlm", "--config", made)
        assert "the engine must be vllm" in invoke("show", made, *options, code=2).stderr

    def test_a_checkpoint_without_a_configuration(self, made: Path) -> None:
        result = invoke("show", made, "--for", "vllm", code=2)
        assert "has no config.json" in result.stderr
        assert "--config FOLDER" in result.stderr

    def test_an_engine_that_is_not_installed(self, made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "vllm", None)  # as if it could not be found
        monkeypatch.delitem(sys.modules, "rankless.vllm.lone_rank", raising=False)
        result = invoke("show", made, "--for", "vllm", "--config", made, code=2)
        assert "vllm is not installed here" in result.stderr
        assert "into one environment" in result.stderr
