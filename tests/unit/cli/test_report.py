"""Tests ``rankless report``: which page it writes, and what it refuses."""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import rankless
from rankless.errors import StorageError
from rankless.ondisk.block_crcs import crc64
from rankless.report import run_report
from tests.helpers.commands import invoke
from tests.helpers.processes import run_command


def read_data(page: Path) -> Any:
    match = re.search(r'<script type="application/json" id="data">(.*?)</script>', page.read_text(), re.DOTALL)
    assert match
    return json.loads(match[1])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "run"
    for step in (1, 2):
        rankless.save_checkpoint(path, f"step_{step}", {"w": torch.full((4,), float(step))}, step=step)
    return path


def test_a_run(run: Path, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    result = invoke("report", run, "-o", page)
    assert f"wrote {page}" in result.stdout.replace("\n", "")
    data = read_data(page)
    assert (data["kind"], data["focus"], data["statistics"]) == ("run", "step_2", None)
    assert list(tmp_path.iterdir()) == [page]


def test_only_a_file_is_replaced(run: Path, tmp_path: Path) -> None:
    """A rename to a device such as /dev/null, or to a pipe, would remove it."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    (tmp_path / "to_pipe").symlink_to(pipe)
    for output in (pipe, tmp_path / "to_pipe", tmp_path):
        assert "is not a regular file" in invoke("report", run, "-o", output, code=2).stderr.replace("\n", " ")
    assert pipe.is_fifo()
    assert len(list(tmp_path.iterdir())) == 2


def test_a_link_to_a_file_stays_one(run: Path, tmp_path: Path) -> None:
    page, link = tmp_path / "page.html", tmp_path / "link.html"
    page.write_text("old")
    link.symlink_to(page)
    invoke("report", run, "-o", link)
    assert link.is_symlink()
    assert read_data(page)["kind"] == "run"


def test_a_checkpoint_of_a_run_by_its_path_or_tag(run: Path, tmp_path: Path) -> None:
    for arguments in ((run / "step_1",), (run, "--tag", "step_1")):
        invoke("report", *arguments, "-o", tmp_path / "a.html")
        data = read_data(tmp_path / "a.html")
        assert (data["kind"], data["focus"], data["step"]) == ("run", "step_1", 1)


def test_statistics_are_computed_if_asked_for(run: Path, tmp_path: Path) -> None:
    invoke("report", run, "--stats", "-o", tmp_path / "a.html")
    statistics = read_data(tmp_path / "a.html")["statistics"]
    assert statistics["tags"] == ["step_1", "step_2"]
    assert 4.0 in statistics["norm"]  # four times two


def flip_a_bit(checkpoint: Path) -> None:
    (file,) = (checkpoint / "model").glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.unlink()  # another checkpoint may share it
    file.write_bytes(data)


@pytest.mark.parametrize("corrupt", ["step_1", "step_2"])
def test_a_corrupt_checkpoint_does_not_hide_the_run(run: Path, tmp_path: Path, corrupt: str) -> None:
    copy = shutil.copytree(run, tmp_path / "run")
    flip_a_bit(copy / corrupt)
    invoke("report", copy, "--stats", "-o", tmp_path / "a.html")
    data = read_data(tmp_path / "a.html")
    assert data["statistics"]["tags"] == [tag for tag in ("step_1", "step_2") if tag != corrupt]
    ((level, text),) = data["findings"]
    assert level == "bad"
    assert text.startswith(f"{corrupt}: ")
    assert "'w'" in text


def test_a_corrupt_checkpoint_that_is_alone_has_a_page(run: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(run / "step_1", tmp_path / "alone")
    flip_a_bit(copy)
    invoke("report", copy, "--stats", "--verify", "-o", tmp_path / "a.html")
    data = read_data(tmp_path / "a.html")
    assert data["statistics"] is None
    assert {level for level, _ in data["findings"]} == {"bad"}


def test_checkpoints_may_be_removed_meanwhile(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As retention of a running training does."""
    copy = shutil.copytree(run, tmp_path / "run")
    read_journal = run_report._read_journal

    def remove_and_read(path: Path) -> Any:
        shutil.rmtree(path / "step_1")
        return read_journal(path)

    monkeypatch.setattr(run_report, "_read_journal", remove_and_read)
    invoke("report", copy, "--stats", "-o", tmp_path / "a.html")
    data = read_data(tmp_path / "a.html")
    assert data["statistics"]["tags"] == ["step_2"]
    assert data["findings"] == []


def test_the_latest_checkpoint_may_be_removed_meanwhile(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = shutil.copytree(run, tmp_path / "run")
    inspect = run_report.inspect_exact_path

    def remove_and_inspect(path: Path) -> Any:
        if (copy / "step_2").exists():
            shutil.rmtree(copy / "step_2")
        return inspect(path)

    monkeypatch.setattr(run_report, "inspect_exact_path", remove_and_inspect)
    invoke("report", copy, "-o", tmp_path / "a.html")
    assert read_data(tmp_path / "a.html")["focus"] == "step_1"


def test_a_journal_that_cannot_be_read_is_a_note(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> None:
        raise StorageError(13, f"could not read {path}: Permission denied")

    monkeypatch.setattr(run_report, "read_journal", refuse)
    invoke("report", run, "-o", tmp_path / "a.html")
    data = read_data(tmp_path / "a.html")
    assert [level for level, _ in data["findings"]] == ["note"]
    assert "Permission denied" in data["findings"][0][1]


def test_a_verification_is_reported(run: Path, tmp_path: Path) -> None:
    invoke("report", run, "--verify", "-o", tmp_path / "a.html")
    assert read_data(tmp_path / "a.html")["verified"]["step_2"]["status"] == "verified"


def test_two_checkpoints(run: Path, tmp_path: Path) -> None:
    invoke("report", run / "step_1", run / "step_2", "-o", tmp_path / "a.html")
    data = read_data(tmp_path / "a.html")
    assert (data["kind"], data["sides"][0]["tag"], data["sides"][1]["tag"]) == ("difference", "step_1", "step_2")


def test_options_of_a_run_are_refused_for_two(run: Path) -> None:
    result = run_command("report", str(run), str(run), "--stats")
    assert result.returncode != 0
    assert "leave them out" in result.stderr


def publish(directory: Path, versions: int) -> None:
    model = torch.nn.Linear(8, 8)
    with rankless.WeightPublisher(directory, anchor_every=3) as publisher:
        for step in range(versions):
            with torch.no_grad():
                model.weight[0, 0] += 1
            publisher.publish(model, step=step, metrics={"reward": step / 2})


@pytest.mark.parametrize("option", ["", "--verify", "--stats", "--full"])
def test_published_weights(tmp_path: Path, option: str) -> None:
    publish(tmp_path / "weights", 4)
    invoke("report", tmp_path / "weights", "-o", tmp_path / "report.html", *([option] if option else []))
    data = read_data(tmp_path / "report.html")
    versions = rankless.list_weight_versions(tmp_path / "weights")
    assert (data["kind"], data["focus"], data["step"]) == ("weights", "4", 3)
    assert [finding for finding in data["findings"] if finding[0] != "note"] == []
    assert [(row[0], row[2], row[6], row[7], row[8], row[9]) for row in data["checkpoints"]] == [
        (
            str(version.number),
            version.step,
            version.nbytes,
            version.written_bytes,
            ["anchor" if version.number in {1, 4} else "delta"],
            {"reward": (version.number - 1) / 2},
        )
        for version in versions
    ]
    assert list(data["verified"]) == (["4"] if option == "--verify" else [])
    assert (data["statistics"] is None) == (option != "--stats")


def test_published_weights_with_a_corrupt_manifest(tmp_path: Path) -> None:
    publish(tmp_path / "weights", 3)
    second, third = (rankless.list_weight_versions(tmp_path / "weights")[place].path for place in (1, 2))
    second.write_bytes(second.read_bytes()[:-9])
    invoke("report", tmp_path / "weights", "-o", tmp_path / "report.html")
    data = read_data(tmp_path / "report.html")
    found = {text[:2]: level for level, text in data["findings"]}
    assert found == {"2:": "bad", "3:": "bad"}, "the third is based on the second"
    assert ([row[0] for row in data["checkpoints"]], data["focus"]) == (["1", "3"], "1")
    third.write_bytes(b"")
    invoke("report", tmp_path / "weights", "-o", tmp_path / "report.html", "--verify")
    verified = read_data(tmp_path / "report.html")
    assert {text[:2] for level, text in verified["findings"] if level == "bad"} == {"2:", "3:"}
    (tmp_path / "weights/versions" / second.name.replace("2", "1")).write_bytes(b"{}")
    assert "no version in" in invoke("report", tmp_path / "weights", "-o", tmp_path / "none.html", code=1).stderr


def test_published_weights_without_a_folder_that_others_are_based_on(tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    publish(weights, 3)
    shutil.rmtree(next(weights.glob("delta-2-*")))
    invoke("report", weights, "-o", tmp_path / "report.html")
    data = read_data(tmp_path / "report.html")
    assert [(level, text[:2], "is missing" in text) for level, text in data["findings"]] == [
        ("bad", "3:", True),
        ("bad", "2:", True),
    ]
    assert data["focus"] == "1"
    shutil.rmtree(next(weights.glob("anchor-1-*")))
    assert "is missing" in invoke("report", weights, "-o", tmp_path / "none.html", code=1).stderr


def test_published_weights_of_a_newer_format(tmp_path: Path) -> None:
    publish(tmp_path / "weights", 2)
    newest = rankless.list_weight_versions(tmp_path / "weights")[-1].path
    body = newest.read_bytes().rpartition(b',"crc64nvme"')[0].replace(b'"version":1', b'"version":2', 1)
    newest.write_bytes(body + b',"crc64nvme":"%016x"}\n' % crc64(body))
    invoke("report", tmp_path / "weights", "-o", tmp_path / "report.html")
    data = read_data(tmp_path / "report.html")
    assert data["focus"] == "1"
    assert [text[:2] for level, text in data["findings"] if level == "bad"] == ["2:"]
    publish(tmp_path / "weights", 1)
    invoke("report", tmp_path / "weights", "-o", tmp_path / "report.html")
    assert read_data(tmp_path / "report.html")["focus"] == "3"
