"""Tests ``rankless ls``: its output agrees with the files, and its exit codes with its output."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import rankless
from tests.helpers.commands import invoke, invoke_json
from tests.helpers.corruption import cut_file
from tests.helpers.fake_s3 import FakeS3
from tests.helpers.file_contents import size_on_disk
from tests.helpers.pool import Ranks


def unshared_size(checkpoint: Path) -> int:
    """The disk space of the files that have no other name."""
    statuses = [file.stat() for file in checkpoint.rglob("*") if file.is_file()]
    return sum(status.st_blocks * 512 for status in statuses if status.st_nlink == 1)


class TestLs:
    def test_names_each_checkpoint_oldest_first_and_marks_the_latest(self, made: Path) -> None:
        rows = invoke("ls", made).stdout.splitlines()[1:]
        assert [row.split()[0] for row in rows] == ["step_1", "step_2", "step_3"]
        assert ["latest" in row for row in rows] == [False, False, True]
        assert all("complete" in row for row in rows)

    def test_names_what_an_interrupted_copy_has_left(self, made: Path, tmp_path: Path) -> None:
        run = shutil.copytree(made, tmp_path / "run")
        (run / "step_3/manifest.json").unlink()
        (run / "notes").mkdir()
        (run / "notes/state.json").write_text('{"city": "Rome"}')
        assert invoke("ls", run).stdout.splitlines()[-1].startswith("step_3: a part of a checkpoint")
        assert invoke_json("ls", run)["parts"] == ["step_3"]

    def test_shows_step_size_local_time_and_metrics(self, made: Path) -> None:
        row = invoke("ls", made).stdout.splitlines()[3]
        saved = json.loads((made / "step_3/manifest.json").read_text())["time"]
        shown = [
            "step_3",
            "3",
            time.strftime("%Y-%m-%d %H:%M", time.localtime(saved)),
            "AGE",
            f"{size_on_disk(made / 'step_3') / 1000:.1f} kB",
            f"{unshared_size(made / 'step_3') / 1000:.1f} kB",
            "complete (latest)",
            "val_loss=-0.5 bleu=n/a",
        ]
        assert [re.sub(r"^\d+[smhd]$", "AGE", cell) for cell in re.split("  +", row)] == shown

    def test_json_has_the_numbers_of_the_files(self, made: Path) -> None:
        report = invoke_json("ls", made)
        assert (report["path"], report["latest"], report["leftovers"]) == (str(made), "step_3", [])
        for number, entry in enumerate(report["checkpoints"], 1):
            manifest = json.loads((made / f"step_{number}/manifest.json").read_text())
            assert entry["tag"] == f"step_{number}"
            assert entry["path"] == str(made / f"step_{number}")
            assert entry["bytes"] == size_on_disk(made / f"step_{number}")
            assert entry["own_bytes"] == unshared_size(made / f"step_{number}")
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
            "aliases": [],
            "sequence": None,
            "incarnation": None,
            "current": None,
            "time": None,
            "run": None,
            "world_size": None,
            "bytes": None,
            "own_bytes": None,
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

    @pytest.mark.parametrize("command", ["show", "verify", "diff"])
    def test_a_mistyped_tag_names_the_checkpoints_of_the_run(self, run: Path, command: str) -> None:
        paths = [run / "step_33"] * (2 if command == "diff" else 1)
        message = invoke(command, *paths, code=2).stderr
        assert message == f"error: there is no {run}/step_33; in {run} there are step_1, step_2, step_3\n"

    def test_where_there_are_only_leftovers_it_says_how_to_see_them(self, tmp_path: Path) -> None:
        (tmp_path / ".a.fedcba9876543210.0123456789abcdef.partial").mkdir()
        assert "--all also lists 1 interrupted save" in invoke("ls", tmp_path, code=1).stderr
        assert "unfinished" in invoke("ls", tmp_path, "--all", code=1).stdout

    def test_a_checkpoint_is_not_a_run(self, made: Path) -> None:
        assert "rankless show" in invoke("ls", made / "step_1", code=2).stderr

    def test_columns_appear_if_they_tell_checkpoints_apart(self, tmp_path: Path, ranks: Ranks) -> None:
        rankless.save_checkpoint(tmp_path, "a", {"w": torch.ones(2)}, metrics={"loss": 1.0})
        assert invoke("ls", tmp_path).stdout.split("\n")[0].split() == [
            "tag",
            "step",
            "saved",
            "age",
            "size",
            "status",
            "metrics",
        ]
        ranks(2, save_on_ranks, str(tmp_path))
        rankless.set_alias(tmp_path, "good", "a")
        lines = [line.split() for line in invoke("ls", tmp_path, "--best", "loss").stdout.splitlines()]
        assert lines[0] == ["tag", "alias", "step", "saved", "age", "ranks", "run", "size", "status", "metrics"]
        assert [line.count("2") for line in lines] == [0, 0, 1]
        records = invoke_json("ls", tmp_path, "--best", "loss:max")["checkpoints"]
        assert [record["world_size"] for record in records] == [1, 2]
        assert len({record["run"] for record in records}) == 2

    @pytest.mark.parametrize(("option", "best"), [("loss", "b"), ("loss:min", "b"), ("loss:max", "a")])
    def test_marks_the_best(self, tmp_path: Path, option: str, best: str | None) -> None:
        for tag, loss in (("a", 3.0), ("b", 1.0), ("c", 2.0)):
            rankless.save_checkpoint(tmp_path, tag, {"w": torch.ones(2)}, metrics={"loss": loss})
        assert invoke_json("ls", tmp_path, "--best", option)["best"] == best
        marked = [
            line.split()[0] for line in invoke("ls", tmp_path, "--best", option).stdout.splitlines() if "best" in line
        ]
        assert marked == ([best] if best else [])

    def test_an_abandoned_checkpoint_is_not_the_best(self, tmp_path: Path) -> None:
        """A rollback after a spike abandons checkpoints, which may have the best values of all."""
        for tag, loss in (("a", 3.0), ("b", 2.0), ("c", 1.0)):
            rankless.save_checkpoint(tmp_path, tag, {"w": torch.ones(2)}, metrics={"loss": loss})
        invoke("rollback", tmp_path, "b")
        assert invoke_json("ls", tmp_path, "--best", "loss")["best"] == "b"
        assert "(latest, best)" in invoke("ls", tmp_path, "--best", "loss").stdout
        assert rankless.restore(tmp_path, rankless.best("loss"), {"w": torch.ones(2)}, resume=False).tag == "b"

    def test_a_wrong_mode_is_named(self, made: Path) -> None:
        assert "METRIC:max" in invoke("ls", made, "--best", "loss:most", code=2).stderr
        for metric in ("other", "bleu", ""):  # bleu is never finite
            assert "there are: bleu, val_loss" in invoke("ls", made, "--best", metric, code=2).stderr

    def test_watching_shows_new_checkpoints(self, tmp_path: Path) -> None:
        rankless.save_checkpoint(tmp_path, "a", {"w": torch.ones(2)})
        command = [sys.executable, "-u", "-m", "rankless", "ls", str(tmp_path), "--watch"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert [process.stdout.readline().split()[0] for _ in range(2)] == ["tag", "a"]
            rankless.save_checkpoint(tmp_path, "b", {"w": torch.ones(2)})
            while not process.stdout.readline().startswith("b "):
                pass
            process.send_signal(signal.SIGINT)
            assert process.wait() == 130
        assert "--watch and --json" in invoke("ls", tmp_path, "--watch", "--json", code=2).stderr


def save_on_ranks(path: str) -> None:
    rankless.save_checkpoint(path, "b", {"w": torch.ones(2)}, metrics={"loss": 2.0})


class TestRunInAnObjectStore:
    def test_a_list_sends_one_request_for_each_checkpoint(self, monkeypatch: pytest.MonkeyPatch) -> None:
        fake, number = FakeS3(), 40
        with fake.connected():
            path = fake.store_at("http://fake").path("bucket/run")
            run = rankless.RunDirectory(path)
            for step in range(number):
                run.save(f"step_{step}", {"w": torch.ones(1)}, step=step)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        with fake.served() as url:
            monkeypatch.setenv("AWS_ENDPOINT_URL", url)
            fake.requests.clear()
            assert len(invoke_json("ls", path)["checkpoints"]) == number
        assert len(fake.requests) <= number + 13
