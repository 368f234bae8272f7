"""Tests the data of reports against the runs that they are of."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

import rankless
from rankless.inspection.compare import compare_metadata, compare_suspects
from rankless.inspection.inspected_checkpoint import InspectedCheckpoint, inspect_path
from rankless.inspection.tensor_statistics import TensorStatistics
from rankless.ondisk.data_files import TensorInfo
from rankless.report.checkpoint_report import ReportOptions, describe_checkpoint
from rankless.report.difference_report import describe_difference
from rankless.report.run_report import describe_run
from rankless.report.statistics import statistics_columns
from rankless.report.tensor_columns import NamedTensor
from rankless.report.timeline import build_timeline
from rankless.run.journal import JournalEntry
from rankless.run.records_folder import JOURNAL
from tests.helpers.front_coded import decode_names
from tests.helpers.large_pages import make_large_page, measure
from tests.helpers.run_directories import train_as_job


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(10, 4).requires_grad_(False)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4, bias=False) for _ in range(2))


def no_statistics(_: InspectedCheckpoint) -> None:
    return None


PLAIN = ReportOptions(no_statistics)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three saves, of which the second failed first, and the first was removed."""
    path = tmp_path_factory.mktemp("report") / "run"
    model = Net()
    optimizer = torch.optim.AdamW(model.layers.parameters())
    for step in (1, 2, 3):
        for parameter in model.layers.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        if step == 2:
            with pytest.raises(rankless.TagExistsError):
                rankless.save_checkpoint(path, "step_1", model, optimizer, step=step)
        with mock.patch("rankless.save.folder_output._MIN_SHARED", 0):  # small states are written anew
            rankless.save_checkpoint(
                path, f"step_{step}", model, optimizer, step=step, keep=2, frozen="apart", metrics={"loss": 1 / step}
            )
    rankless.load_checkpoint(path, model=model, optimizer=optimizer)
    return path


def column_of(data: Mapping[str, Any], letters: str) -> dict[str, str]:
    groups = data["tensors"]["groups"]
    names = decode_names(data["tensors"]["names"])
    return {
        f"{groups[group]}/{name}": letter
        for group, name, letter in zip(data["tensors"]["group"], names, letters, strict=True)
    }


def test_it_tells_what_happened(run: Path) -> None:
    data = describe_run(run, "step_3", PLAIN)
    entries = data["timeline"]["entries"]
    assert [(entry[0], entry[2], entry[3]) for entry in entries] == [
        ("saved", "step_1", 1),
        ("failed", "step_1", 2),
        ("saved", "step_2", 2),
        ("saved", "step_3", 3),
        ("removed", "step_1", 1),
        ("resumed", "step_3", 3),
    ]
    assert data["findings"][0][0] == "note"
    assert "1 save of 4 failed" in data["findings"][0][1]
    assert [row[0] for row in data["checkpoints"]] == ["step_2", "step_3"]


def test_it_tells_what_is_trained_and_what_is_shared(run: Path) -> None:
    data = describe_run(run, "step_3", PLAIN)
    assert data["before"] == "step_2"
    trained, sharing = (column_of(data, letters) for letters in (data["tensors"]["trained"], data["sharing"]))
    assert (trained["model/embed.weight"], sharing["model/embed.weight"]) == ("f", "s")
    for name in ("model/layers.0.weight", "optimizer/layers.0.weight/exp_avg"):
        assert (trained[name], sharing[name]) == ("t", "c")


def test_a_run_without_a_journal_has_what_manifests_know(run: Path, tmp_path: Path) -> None:
    journal = run / JOURNAL
    journal.rename(tmp_path / "away")
    data = describe_run(run, "step_3", PLAIN)
    (tmp_path / "away").rename(journal)
    assert [(entry[2], entry[3], entry[4]) for entry in data["timeline"]["entries"]] == [
        ("step_2", 2, 1),
        ("step_3", 3, 1),
    ]
    assert not data["timeline"]["journalled"]


def test_one_checkpoint_has_a_report_without_a_run(run: Path, tmp_path: Path) -> None:
    torch.save({"w": torch.ones(3)}, tmp_path / "a.pt")
    data = describe_checkpoint(tmp_path / "a.pt", PLAIN)
    assert column_of(data, data["tensors"]["trained"] or "?").keys() == {"model/w"}
    assert "timeline" not in data


def test_failures_and_resumes_are_the_last_to_be_left_out() -> None:
    journal = [JournalEntry("saved", float(time), f"step_{time}", run="0" * 16) for time in range(5000)]
    journal += [JournalEntry("failed", 100.5, "x"), JournalEntry("resumed", 200.5, "y")]
    timeline = build_timeline([], sorted(journal, key=lambda entry: entry.time), 100)
    assert (len(timeline.entries), timeline.omitted) == (100, 4902)
    assert [entry.tag for entry in timeline.entries if entry.kind != "saved"] == ["x", "y"]
    assert (timeline.entries[0].tag, timeline.entries[-1].tag) == ("step_0", "step_4999")


def test_a_corrupt_checkpoint_needs_attention(tmp_path: Path) -> None:
    for step in (1, 2):
        rankless.save_checkpoint(tmp_path, f"step_{step}", {"w": torch.ones(3)}, step=step)
    (tmp_path / "step_1/manifest.json").write_text("{")
    findings = describe_run(tmp_path, "step_2", PLAIN)["findings"]
    assert [(level, text.split(":")[0]) for level, text in findings] == [("bad", "step_1 is damaged")]


def test_values_that_are_not_finite_need_attention(run: Path) -> None:
    good, bad = measure(np.array([1.0, -2.0])), measure(np.array([1.0, np.nan]))

    def read(inspected: InspectedCheckpoint) -> dict[str, TensorStatistics]:
        return {"model/layers.0.weight": bad if inspected.path.name == "step_3" else good}

    data = describe_run(run, "step_3", ReportOptions(read))
    assert ("bad", "1 tensor of step_3 with NaN or infinity, such as model/layers.0.weight") in data["findings"]
    statistics = data["statistics"]
    rows = dict(zip(column_of(data, data["sharing"]), statistics["norms"], strict=True))
    assert rows["model/layers.0.weight"][4:] == "_!"
    assert rows["model/embed.weight"] == ""
    assert statistics["tags"] == ["step_2", "step_3"]


def test_a_small_histogram_has_bars_for_both_signs() -> None:
    tensors = [NamedTensor("model", "w", TensorInfo("F32", (8,)))]
    values = np.array([-1.5, -1.5, 0.0, 0.1, 3.0, 3.0, 3.0, 3.0])
    (code,) = statistics_columns(tensors, [("a", {"model/w": measure(values)})])["histograms"]
    bars = code[2:]
    assert len(bars) == 17
    assert bars[8] != "0"  # zeros
    assert bars[16] == "_"  # 3.0, the most
    assert bars[0] != "0"  # -1.5, in the bar of 1 to 4


@pytest.mark.parametrize("checkpoints", [20, 1000])
def test_a_page_of_20_000_tensors_has_at_most_2_mb(checkpoints: int) -> None:
    assert len(make_large_page(checkpoints)) <= 2_000_000


def test_what_differs_between_two_checkpoints(tmp_path: Path) -> None:
    rankless.save_checkpoint(
        tmp_path, "a", {"w": torch.zeros(4), "same": torch.ones(2), "old": torch.ones(1)}, rng=False
    )
    rankless.save_checkpoint(
        tmp_path, "b", {"w": torch.tensor([0, 0, 0, 2.0]), "same": torch.ones(2), "new": torch.ones(1)}, rng=False
    )
    sides = [inspect_path(tmp_path / tag) for tag in ("a", "b")]
    comparison = compare_suspects(compare_metadata(*sides, None), lambda _: None)
    data = describe_difference(comparison, [])
    assert column_of(data, data["states"]) == {"model/new": "+", "model/same": "=", "model/w": "d", "model/old": "-"}
    ((row, share, absolute, relative),) = data["differences"]
    assert list(column_of(data, data["states"]))[row] == "model/w"
    assert (share, absolute, relative) == (0.25, 2.0, 1.0)


def test_tensors_of_several_models_have_the_name_of_their_model(tmp_path: Path) -> None:
    """Their weights have equal names, and only one of them is trained."""
    models = {name: torch.nn.Linear(2, 2, bias=False) for name in ("gen", "disc")}
    models["gen"].weight.grad = torch.ones(2, 2)
    optimizer = torch.optim.SGD(models["gen"].parameters(), lr=0.1, momentum=0.9)
    optimizer.step()
    rankless.save_checkpoint(tmp_path, "a", models, optimizer, rng=False)
    tensors = describe_checkpoint(tmp_path / "a", PLAIN)["tensors"]
    trained = dict(zip(decode_names(tensors["names"]), tensors["trained"], strict=True))
    assert trained == {"disc/weight": "f", "gen/weight": "t", "gen/weight/momentum_buffer": "t"}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps, and of another job that went back to the first one and saved another second step."""
    path = tmp_path_factory.mktemp("back") / "run"
    train_as_job(path, 3)
    train_as_job(path, 2, "step_1")
    return path


class TestRunThatWentBack:
    @staticmethod
    def abandoned_saves(data: Mapping[str, Any]) -> list[tuple[str, bool]]:
        left = data["timeline"]["abandoned"]
        entries = enumerate(data["timeline"]["entries"])
        return [(entry[2], place in left) for place, entry in entries if entry[0] == "saved"]

    def test_the_timeline_has_abandoned_saves_apart(self, path: Path) -> None:
        data = describe_run(path, "step_2", PLAIN)
        expected = [("step_1", False), ("step_2", True), ("step_3", True), ("step_2", False)]
        assert self.abandoned_saves(data) == expected

    def test_saves_are_known_to_be_abandoned_after_they_are_removed(self, path: Path, tmp_path: Path) -> None:
        copy = shutil.copytree(path, tmp_path / "run")
        shutil.rmtree(copy / "step_3")
        assert ("step_3", True) in self.abandoned_saves(describe_run(copy, "step_2", PLAIN))

    def test_without_a_journal_the_manifests_tell_it(self, path: Path, tmp_path: Path) -> None:
        copy = shutil.copytree(path, tmp_path / "run")
        (copy / JOURNAL).unlink()
        data = describe_run(copy, "step_2", PLAIN)
        expected = [("step_1", False), ("step_2", True), ("step_3", True), ("step_2", False)]
        assert self.abandoned_saves(data) == expected

    def test_the_timeline_has_the_job_that_went_back(self, path: Path) -> None:
        data = describe_run(path, "step_2", PLAIN)
        claimed = json.loads((path / ".history/00000002.json").read_text())["job"]
        assert data["timeline"]["rollbacks"] == [[claimed["time"], "step_1", claimed["host"], 2, 2]]
        text = "2 checkpoints are abandoned: the run went back, last to step_1 (rankless ls --tree)"
        assert ("note", text) in data["findings"]

    def test_the_table_of_checkpoints_says_which_are_current(self, path: Path) -> None:
        rows = describe_run(path, "step_2", PLAIN)["checkpoints"]
        assert [(row[0], row[11]) for row in rows] == [
            ("step_2@1", False),
            ("step_3", False),
            ("step_1", True),
            ("step_2", True),
        ]

    @pytest.mark.parametrize(
        ("tag", "led"), [("step_2", ["step_1", "step_2"]), ("step_3", ["step_1", "step_2@1", "step_3"])]
    )
    def test_statistics_are_those_of_the_checkpoints_that_led_to_the_one_shown(
        self, path: Path, tag: str, led: list[str]
    ) -> None:
        statistics = {"model/w": measure(np.array([1.0]))}
        data = describe_run(path, tag, ReportOptions(lambda _: statistics))
        assert data["statistics"]["tags"] == led
        assert data["before"] == led[-2]

    def test_without_a_history_all_older_checkpoints_of_the_run_led_to_it(self, path: Path, tmp_path: Path) -> None:
        copy = shutil.copytree(path, tmp_path / "run")
        shutil.rmtree(copy / ".history")
        data = describe_run(copy, "step_2", ReportOptions(lambda _: {"model/w": measure(np.array([1.0]))}))
        assert data["statistics"]["tags"] == ["step_1", "step_2@1", "step_3", "step_2"]
        assert (data["timeline"]["abandoned"], data["timeline"]["rollbacks"]) == ([], [])
