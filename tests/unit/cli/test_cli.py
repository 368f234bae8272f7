"""Tests the command line: its output agrees with the files, and its exit codes with its output."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import holdfast
from holdfast.cli.format_values import format_brief, format_lines
from holdfast.cli.show.modules import summarize_modules
from holdfast.observe.units import format_size
from holdfast.ondisk.files import TensorInfo
from tests.helpers.commands import invoke, invoke_json
from tests.helpers.corruption import cut_file, flip_tensor_bit
from tests.helpers.training import train_run
from tests.helpers.user_content import USER_CONTENT


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with three checkpoints; tests that change it take a copy."""
    path = tmp_path_factory.mktemp("cli") / "run"
    run = train_run("plain")
    for step in (1, 2, 3):
        holdfast.save_checkpoint(
            path,
            f"step_{step}",
            run.model,
            run.optimizer,
            run.scheduler,
            USER_CONTENT,
            step=step,
            metrics={"val_loss": 2.5 - step, "bleu": float("inf")},
        )
    return path


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "run"))


def size_on_disk(checkpoint: Path) -> int:
    """All files but the manifest, which does not list itself."""
    return sum(os.stat(f).st_size for f in checkpoint.rglob("*") if f.is_file() and f.name != "manifest.json")  # noqa: PTH116


def stored(file: Path) -> dict[str, tuple[str, list[int], int]]:
    """Dtype, shape and bytes of the tensors of a file, as the safetensors library sees them."""
    with safe_open(file, "pt") as opened:
        return {
            name: (
                opened.get_slice(name).get_dtype(),
                opened.get_slice(name).get_shape(),
                opened.get_tensor(name).nbytes,
            )
            for name in opened.keys()  # noqa: SIM118 - it is no dict
        }


class TestLs:
    def test_names_each_checkpoint_oldest_first_and_marks_the_latest(self, made: Path) -> None:
        rows = invoke("ls", made).stdout.splitlines()[1:]
        assert [row.split()[0] for row in rows] == ["step_1", "step_2", "step_3"]
        assert ["latest" in row for row in rows] == [False, False, True]
        assert all("complete" in row for row in rows)

    def test_shows_step_size_local_time_and_metrics(self, made: Path) -> None:
        row = invoke("ls", made).stdout.splitlines()[3]
        saved = json.loads((made / "step_3/manifest.json").read_text())["time"]
        shown = [
            "step_3",
            "3",
            time.strftime("%Y-%m-%d %H:%M", time.localtime(saved)),
            f"{size_on_disk(made / 'step_3') / 1000:.1f} kB",
            "complete (latest)",
            "val_loss=-0.5 bleu=n/a",
        ]
        assert re.split("  +", row) == shown

    def test_json_has_the_numbers_of_the_files(self, made: Path) -> None:
        report = invoke_json("ls", made)
        assert (report["path"], report["latest"], report["leftovers"]) == (str(made), "step_3", [])
        for number, entry in enumerate(report["checkpoints"], 1):
            manifest = json.loads((made / f"step_{number}/manifest.json").read_text())
            assert entry["tag"] == f"step_{number}"
            assert entry["path"] == str(made / f"step_{number}")
            assert entry["bytes"] == size_on_disk(made / f"step_{number}")
            assert entry["metrics"] == {"val_loss": 2.5 - number, "bleu": None}
            assert (entry["status"], entry["problem"]) == ("complete", None)
            assert all(entry[name] == manifest[name] for name in ("step", "sequence", "time"))

    def test_a_damaged_manifest_is_shown_as_damaged_and_is_exit_1(self, run: Path) -> None:
        cut_file(run / "step_3/manifest.json")
        lines = invoke("ls", run, code=1).stdout.splitlines()
        assert re.split("  +", lines[1]) == ["step_3", "damaged"]
        assert lines[3].startswith("step_2")
        assert "latest" in lines[3]
        assert str(run / "step_3/manifest.json") in lines[4]
        report = invoke_json("ls", run, code=1)
        assert report["latest"] == "step_2"
        assert report["checkpoints"][0] | {"problem": ""} == {
            "tag": "step_3",
            "path": str(run / "step_3"),
            "status": "damaged",
            "problem": "",
            "step": None,
            "metrics": {},
            "sequence": None,
            "time": None,
            "bytes": None,
        }

    def test_saves_that_never_ended_are_shown_on_request_only(self, run: Path) -> None:
        name = ".step_4.fedcba9876543210.0123456789abcdef.partial"
        (run / name / "model").mkdir(parents=True)
        (run / name / "model/model.safetensors").write_bytes(bytes(50_000))
        (run / ".unrelated").mkdir()
        assert "step_4" not in invoke("ls", run).stdout
        text = invoke("ls", run, "--all").stdout
        assert re.search(r"^step_4 .* unfinished$", text, re.MULTILINE)
        assert "unrelated" not in text
        (leftover,) = invoke_json("ls", run, "--all")["leftovers"]
        assert (leftover["name"], leftover["tag"]) == (name, "step_4")
        assert leftover["bytes"] >= 50_000

    def test_an_empty_folder_is_exit_1_and_one_line(self, tmp_path: Path) -> None:
        result = invoke("ls", tmp_path, code=1)
        assert (result.stdout, result.stderr) == ("", f"error: there is no checkpoint in {tmp_path}\n")

    @pytest.mark.parametrize("command", ["ls", "show", "verify", "prune --keep 1", "diff", "consolidate"])
    @pytest.mark.parametrize("more", [[], ["--json"]], ids=["text", "json"])
    def test_a_missing_folder_is_exit_2_everywhere(self, tmp_path: Path, command: str, more: list[str]) -> None:
        name, *options = command.split()
        paths = [tmp_path / "nothing"] * (2 if name == "diff" else 1)
        result = invoke(name, *paths, *options, *more, code=2)
        assert result.stdout == ""
        assert re.match(f"error: there is no .*{tmp_path}/nothing\n", result.stderr)

    def test_where_there_are_only_leftovers_it_says_how_to_see_them(self, tmp_path: Path) -> None:
        (tmp_path / ".a.fedcba9876543210.0123456789abcdef.partial").mkdir()
        assert "--all also lists 1 interrupted save" in invoke("ls", tmp_path, code=1).stderr
        assert "unfinished" in invoke("ls", tmp_path, "--all", code=1).stdout

    def test_a_checkpoint_is_not_a_run(self, made: Path) -> None:
        assert "holdfast show" in invoke("ls", made / "step_1", code=2).stderr


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
        assert (report["format"], report["tag"], report["step"], report["sequence"]) == ("holdfast", "step_2", 2, 2)
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
        holdfast.save_checkpoint(tmp_path, "a", user_content=content)
        text = invoke("show", tmp_path).stdout
        assert "setting_29 " in text
        assert "setting_30 " not in text
        assert "--json lists all" in text
        assert invoke_json("show", tmp_path)["values"]["user_content"] == content

    def test_a_range_longer_than_a_list_can_be(self, tmp_path: Path) -> None:
        long = range(10**60)
        holdfast.save_checkpoint(tmp_path, "a", user_content={"r": long, "s": range(5)}, rng=False)
        holdfast.save_checkpoint(tmp_path, "b", user_content={"r": range(1, 10**60), "s": range(5)}, rng=False)
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
        holdfast.save_checkpoint(tmp_path, "a", {name: torch.zeros(2, 3), "b": torch.zeros(1)})
        assert f"model/{name}  F32" in invoke("show", tmp_path).stdout
        narrow = invoke("show", tmp_path, columns=80).stdout.splitlines()
        assert max(len(row) for row in narrow if not row.startswith("path ")) == 80  # a path is for copying
        assert any(
            re.match(r"model/model\.layers\.10\..*….*nested\.weight +F32 +\[2, 3\] +24 B$", row) for row in narrow
        )

    def test_long_versions_go_on_in_the_next_row(self, tmp_path: Path) -> None:
        with mock.patch("holdfast.save.operation.__version__", "0.12.1.dev189+g8ad40ae10.d20261121"):
            holdfast.save_checkpoint(tmp_path, "a", {"w": torch.zeros(1)})
        rows = invoke("show", tmp_path, columns=80).stdout.splitlines()
        assert any(re.match(r"with +holdfast 0\.12\.1\.dev189\+g8ad40ae10\.d20261121, torch ", row) for row in rows)
        assert any(re.match(r" +Python \d", row) for row in rows)
        assert max(len(row) for row in rows if not row.startswith("path ")) <= 80

    def test_layer_2_comes_before_layer_10(self, tmp_path: Path) -> None:
        holdfast.save_checkpoint(tmp_path, "a", {f"{n}.w": torch.zeros(1) for n in (10, 9, 2)})
        assert [t["name"] for t in invoke_json("show", tmp_path)["tensors"]] == ["model/2.w", "model/9.w", "model/10.w"]

    def test_nothing_in_a_checkpoint_can_steer_the_terminal(self, tmp_path: Path) -> None:
        holdfast.save_checkpoint(tmp_path, "a", {"w\x1b[2J": torch.zeros(1)}, user_content=USER_CONTENT)
        text = invoke("show", tmp_path).stdout
        assert "\x1b" not in text
        assert "w\\x1b[2J" in text
        assert "\\x1b[31mred" in text

    def test_tensors_among_the_settings_of_an_optimizer_are_described(self, tmp_path: Path) -> None:
        """They are kept inside the values, as several ranks may have them."""
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.5))
        holdfast.save_checkpoint(tmp_path, "s", model, optimizer)
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
        holdfast.save_checkpoint(tmp_path, "a", {"ours": torch.zeros(2)})
        model = tmp_path / "a/model"
        save_file({"theirs": torch.zeros(3)}, model / "b.safetensors")
        weight_map = {"ours": "model.safetensors", "theirs": "b.safetensors"}
        (model / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
        assert "1 of 2 tensors has no checksums: only its structure" in invoke("verify", model).stdout

    def test_lists_no_more_problems_than_a_screen_takes(self, tmp_path: Path) -> None:
        holdfast.save_checkpoint(tmp_path, "a", {f"w{i}": torch.zeros(1) for i in range(30)})
        for i in range(30):
            flip_tensor_bit(tmp_path / "a/model/model.safetensors", f"w{i}")
        assert "and 10 more problems; --json" in invoke("verify", tmp_path, code=1).stdout
        assert len(invoke_json("verify", tmp_path, code=1)["checkpoints"][0]["problems"]) == 30

    def test_weights_of_ours_have_checksums_outside_of_their_checkpoint_too(self, run: Path) -> None:
        assert invoke_json("verify", run / "step_3/model")["checkpoints"][0]["status"] == "verified"
        flip_tensor_bit(run / "step_3/model/model.safetensors", "scale")
        assert "'scale'" in invoke("verify", run / "step_3/model", code=1).stdout


class TestCalls:
    @pytest.mark.parametrize("command", ["show", "verify"])
    def test_what_is_no_checkpoint_is_exit_2_and_two_lines(self, tmp_path: Path, command: str) -> None:
        (tmp_path / "text.txt").write_text("hello")
        for path in (tmp_path, tmp_path / "text.txt", tmp_path / "nothing", "s3://bucket/run"):
            result = invoke(command, path, code=2)
            assert result.stdout == ""
            assert result.stderr.startswith("error: ")
            assert len(result.stderr.splitlines()) <= 2

    @pytest.mark.parametrize("args", [["ls"], ["frobnicate"], ["show", "x", "--frobnicate"], ["ls", "a", "b"]])
    def test_wrong_arguments_are_exit_2(self, args: list[str]) -> None:
        assert "Usage" in invoke(*args, code=2).stderr

    @pytest.mark.parametrize("options", [["--keep", "1"], ["--leftovers"]])
    def test_a_checkpoint_is_no_run_to_be_pruned(self, made: Path, options: list[str]) -> None:
        assert "is a checkpoint itself" in invoke("prune", made / "step_1", *options, code=2).stderr

    @pytest.mark.parametrize("number", [0, -1])
    def test_one_checkpoint_is_always_kept(self, run: Path, number: int) -> None:
        assert f"--keep must be a number above 0; got {number}" in invoke("prune", run, "--keep", number, code=2).stderr
        assert len(list(run.iterdir())) == 3

    @pytest.mark.parametrize(
        ("options", "said"),
        [
            (["--tp-size", "2"], "'hf' has no options tp_size"),
            (["--no-xser", "--dp-size", "1"], "'hf' has no options dp_size, xser"),
            (["--layout", "llama"], "layout is only for NxD"),
            (["--key", "model="], "--key takes PART=PATH"),
        ],
    )
    def test_an_option_that_would_do_nothing_is_refused(
        self, made: Path, tmp_path: Path, options: list[str], said: str
    ) -> None:
        assert said in invoke("convert", made, tmp_path / "out", "--to", "hf", *options, code=2).stderr
        assert list(tmp_path.iterdir()) == []

    def test_version(self) -> None:
        assert invoke("--version").stdout == f"holdfast {holdfast.__version__}\n"

    def test_as_a_module_in_a_pipe_without_torch_and_without_colour(self, made: Path) -> None:
        """``ls`` and ``show`` answer at once: they do not import torch."""
        command = [sys.executable, "-X", "importtime", "-m", "holdfast"]
        for name in ("ls", "show"):
            done = subprocess.run([*command, name, str(made)], capture_output=True, text=True, check=True)
            assert "step_3" in done.stdout
            assert "\x1b" not in done.stdout
            assert not re.search(r"\| +(torch|numpy)$", done.stderr, re.MULTILINE)

    def test_a_reader_that_goes_away_is_no_error(self, tmp_path: Path) -> None:
        many = {f"a.rather.long.name.{i}": torch.zeros(1) for i in range(3000)}  # more than a pipe takes
        save_file(many, tmp_path / "model.safetensors")
        for more in ("", "--json"):
            command = f"{sys.executable} -m holdfast show {tmp_path} {more} | head -c 4; echo ${{PIPESTATUS[0]}}"
            done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
            assert re.fullmatch(r'(path|{"pa)141\n', done.stdout)  # what cat, grep and git give there
            assert done.stderr == ""

    @pytest.mark.parametrize("args", ["ls RUN", "ls RUN --json", "verify RUN", "convert RUN OUT --to dcp", "--help"])
    def test_closed_streams_are_no_error_and_get_nothing(self, made: Path, tmp_path: Path, args: str) -> None:
        """Not even what the files that are opened in their place would get."""
        args = args.replace("RUN", str(made)).replace("OUT", str(tmp_path / "out"))
        for closed in (">&-", "2>&-", "<&- >&- 2>&-"):
            shutil.rmtree(tmp_path / "out", ignore_errors=True)
            command = f"{sys.executable} -W always -m holdfast {args} {closed}"
            done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
            assert (done.returncode, done.stderr) == (0, "")
            assert bool(done.stdout) == (">&-" not in closed.split())
            if "convert" in args:
                assert invoke_json("diff", made, tmp_path / "out", "model/*")["equal"]

    @pytest.mark.parametrize("args", ["ls", "show", "ls --json"])
    def test_what_cannot_be_written_is_exit_1(self, made: Path, args: str) -> None:
        command = f"{sys.executable} -m holdfast {args} {made} > /dev/full"
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (1, "error: No space left on device\n")


class TestProgress:
    SCRIPT = """
import sys, time
from holdfast.observe.terminal import show_progress
with show_progress("verifying a", 4_000_000_000) as done:
    for _ in range(3):
        time.sleep(float(sys.argv[1]))
        done(1_000_000_000)
"""

    def on_terminal(self, seconds: float) -> str:
        """What the bar writes to a terminal in a task of three steps of so many seconds."""
        ours, theirs = pty.openpty()
        env = {**os.environ, "COLUMNS": "80", "TERM": "xterm"}
        with subprocess.Popen([sys.executable, "-c", self.SCRIPT, str(seconds)], stderr=theirs, env=env) as process:
            os.close(theirs)
            written = b""
            try:
                while data := os.read(ours, 65536):
                    written += data
            except OSError:  # the terminal's other end is closed
                pass
        os.close(ours)
        assert process.returncode == 0
        return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", written.decode())

    def test_a_bar_with_rate_and_time_left_after_a_second(self) -> None:
        shown = self.on_terminal(0.7)
        assert re.search(r"verifying a .*2\.0/4\.0 GB +\d\.\d GB/s +0:00:0\d", shown)
        assert max(len(line.rstrip()) for line in re.split("[\r\n]+", shown)) <= 80

    def test_no_bar_for_what_is_done_at_once(self) -> None:
        assert self.on_terminal(0.0) == ""


class TestWords:
    @pytest.mark.parametrize(
        ("nbytes", "text"),
        [
            (0, "0 B"),
            (999, "999 B"),
            (1000, "1.00 kB"),
            (12_345, "12.3 kB"),
            (999_499, "999 kB"),
            (999_501, "1.00 MB"),
            (5_000_000_000, "5.00 GB"),
            (123_456 * 10**12, "123456 TB"),
        ],
    )
    def test_sizes_have_three_digits(self, nbytes: int, text: str) -> None:
        assert format_size(nbytes) == text

    def test_a_module_that_holds_nearly_everything_is_shown_by_its_parts(self) -> None:
        def big(n: int) -> TensorInfo:
            return TensorInfo("U8", (n,))

        llama = {f"model.layers.{i}.w": big(100) for i in range(32)}
        llama |= {"model.embed.weight": big(500), "model.norm.weight": big(1), "lm_head.weight": big(99)}
        actual = {part.name: part.nbytes for part in summarize_modules({"model": llama})}
        assert actual == {"": 3800, "model.layers": 3200, "model.embed": 500, "lm_head": 99, "model.norm": 1}

    def test_values_take_a_line_each_unless_they_fit_on_one(self) -> None:
        tree = {"a": {"b": 1}, "long": {"first": "x" * 40, "second": "y" * 40}, "many": [{"k": "z" * 30}] * 9}
        assert dict(format_lines(tree)) == {
            "a": "{'b': 1}",
            "long.first": repr("x" * 40),
            "long.second": repr("y" * 40),
            **{f"many[{i}]": repr({"k": "z" * 30}) for i in range(5)},
            "many[5:]": "4 more",
        }
        assert len(format_brief("x" * 10_000)) < 80
