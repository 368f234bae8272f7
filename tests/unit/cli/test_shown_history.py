"""Tests what ``ls --tree`` and ``show`` say of the history: which job continued which checkpoint, and what it left."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

import rankless
from rankless.run import stored_history
from rankless.run.history import Branch, Entry, Job
from rankless.run.records_folder import FOLDER
from rankless.run.stored_history import read_entries
from tests.helpers.commands import invoke, invoke_json
from tests.helpers.fake_s3 import FakeS3
from tests.helpers.run_directories import save_step, train_as_job

JOB = rf"{re.escape(socket.gethostname())}, process {os.getpid()}, \d{{4}}-\d\d-\d\d \d\d:\d\d"
SAVED = r"  \d{4}-\d\d-\d\d \d\d:\d\d"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps that went back to the first one, to which three jobs more came, which saved nothing."""
    path = tmp_path_factory.mktemp("tree") / "run"
    train_as_job(path, 3)
    train_as_job(path, 2, "step_1")
    for _ in range(3):
        train_as_job(path, 0)
    rankless.set_alias(path, "good", "step_3")
    return path


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "run"))


def show(path: object, *options: str, code: int = 0) -> list[str]:
    """The lines of the graph, without the hosts, processes and times, and without alignment."""
    text = re.sub(SAVED, "", invoke("ls", path, "--tree", *options, code=code).stdout)
    lines = re.sub(rf" on {JOB}", "", text).splitlines()
    return [re.sub(r"(?<=\S) {3,}", "  ", line).rstrip() for line in lines]


def write_entry(run: Path, entry: Entry) -> None:
    (run / FOLDER / f"{entry.number:08d}.json").write_bytes(msgspec.json.encode(entry))


def newest_entry(run: Path) -> Entry:
    return stored_history.read_history(run)


GRAPH = [
    "run RUN: 4 checkpoints",
    "│ incarnation 1; began the run",
    "● step_1",
    "├─╮",
    "│ ○ step_2@1  abandoned",
    "│ ○ step_3  abandoned, good",
    "│ incarnation 2; went back to step_1",
    "● step_2  latest",
    "┊ 2 jobs that saved nothing: incarnations 3 and 4",
    "│ incarnation 5; continued step_2; has no checkpoint yet",
]


def test_the_graph_has_the_current_line_first_and_branches_where_the_run_left_them(made: Path) -> None:
    run_id = rankless.list_checkpoints(made)[0].run[:6]
    assert show(made) == [line.replace("RUN", run_id) for line in GRAPH]


def test_each_incarnation_has_its_host_its_process_and_its_time(made: Path) -> None:
    lines = invoke("ls", made, "--tree").stdout.splitlines()
    assert re.fullmatch(rf"│ incarnation 2 on {JOB}; went back to step_1", lines[6])


def test_a_terminal_that_has_only_ascii_gets_ascii(made: Path) -> None:
    command = [sys.executable, "-m", "rankless", "ls", str(made), "--tree"]
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    lines = subprocess.run(command, check=True, capture_output=True, env=env).stdout.decode("ascii").splitlines()
    assert [line.split("  ")[0] for line in lines[2:6]] == ["* step_1", "|\\", "| o step_2@1", "| o step_3"]
    assert lines[8] == ": 2 jobs that saved nothing: incarnations 3 and 4"


def test_json_has_the_tree(made: Path) -> None:
    report = invoke_json("ls", made, "--tree")
    plain = invoke_json("ls", made)
    tree = report.pop("tree")
    assert report == plain
    assert (tree["empty_runs"], tree["unreadable_entries"], tree["entries_left_out"]) == (0, 0, 0)
    (run,) = tree["runs"]
    assert (run["run"], run["newest"]) == (plain["checkpoints"][0]["run"], 5)
    for number, entry in enumerate(run["incarnations"], 1):
        job = json.loads((made / FOLDER / f"{number:08d}.json").read_text())["job"]
        assert {name: entry.pop(name) for name in ("host", "pid", "time")} == {
            name: job[name] for name in ("host", "pid", "time")
        }
    nothing = {"begins": False, "goes_back": False, "checkpoints": [], "abandoned": []}
    second = {"incarnation": 2, "sequence": 4, "tag": "step_2"}
    first = {"incarnation": 1, "sequence": 1, "tag": "step_1"}
    assert run["incarnations"] == [
        nothing | {"incarnation": 1, "begins": True, "base": None, "checkpoints": ["step_1", "step_2@1", "step_3"]},
        nothing
        | {
            "incarnation": 2,
            "goes_back": True,
            "base": first,
            "checkpoints": ["step_2"],
            "abandoned": ["step_2@1", "step_3"],
        },
        *(nothing | {"incarnation": number, "base": second} for number in (3, 4, 5)),
    ]


def test_a_crash_loop_is_one_line(run: Path) -> None:
    entry = newest_entry(run)
    ((name, branch),) = entry.runs.items()
    for number in range(6, 1001):
        claimed = Branch(number, branch.sequence + number, branch.line, branch.rolled_back_to)
        write_entry(run, Entry(number, Job("t", "node", 7, 1e9), name, 0, {name: claimed}))
    lines = show(run)
    assert len(lines) == len(GRAPH)
    assert lines[-2] == "┊ 997 jobs that saved nothing: incarnations 3 to 999"
    assert lines[-1].startswith("│ incarnation 1000 on node, process 7")


def test_reading_is_bounded_and_says_what_it_left_out(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries of jobs that have saved something are read first."""
    monkeypatch.setattr(stored_history, "_MAX_SHOWN", 3)
    lines = show(run)
    assert lines[1:7] == GRAPH[1:7]
    assert lines[8:] == [
        "│ incarnation 5; continued step_2; has no checkpoint yet",
        f"2 older entries in {FOLDER} were not read",
    ]
    assert invoke_json("ls", run, "--tree")["tree"]["entries_left_out"] == 2


def test_the_newest_entry_is_always_read(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_history, "_MAX_SHOWN", 2)
    assert [entry.number for entry in read_entries(run, {1, 2, 3}).entries] == [5, 3]


def test_the_bytes_that_are_read_are_bounded(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_history, "_MAX_SHOWN_BYTES", 1)
    monkeypatch.setattr(stored_history, "_BATCH", 2)
    history = read_entries(run)
    assert ([entry.number for entry in history.entries], history.left_out) == ([5, 4], 3)


@pytest.mark.parametrize("damage", ["lost", "corrupt", "of another number"])
def test_without_an_entry_the_rest_is_shown(run: Path, damage: str) -> None:
    path = run / FOLDER / "00000002.json"
    if damage == "lost":
        path.unlink()
    elif damage == "corrupt":
        path.write_text("{")
    else:
        shutil.copy(run / FOLDER / "00000005.json", path)
    note = f"1 of its entries in {FOLDER} cannot be read: their jobs are not known, nor all that they continued"
    lines = show(run)
    assert lines[2:6] == GRAPH[2:6]
    assert lines[6] == "│ incarnation 2, whose job is not known; went back to step_1"
    assert lines[9:] == [GRAPH[9], *([] if damage == "lost" else [note])]


def test_a_copy_without_hidden_names_has_only_checkpoints(run: Path) -> None:
    shutil.rmtree(run / FOLDER)
    lines = show(run)
    assert [line.split(":")[0] for line in lines[1:]] == [
        "│ incarnation 1, whose job is not known",
        "● step_1",
        "● step_2@1",
        "● step_3  good",
        "│ incarnation 2, whose job is not known",
        "● step_2  latest",
        f"{run} has no history",
    ]


def test_several_runs_are_apart_and_those_without_a_checkpoint_are_counted(run: Path) -> None:
    for _ in range(2):
        write_entry(run, newest_entry(run).begin_run(os.urandom(8).hex(), Job("t", "node", 7, 1e9), []))
    save_step(run, 9)
    lines = show(run)
    heads = [line for line in lines if line.startswith("run ")]
    assert [head.split(": ")[1] for head in heads] == ["4 checkpoints", "1 checkpoint"]
    assert lines[-3:] == ["│ incarnation 8; began the run", "● step_9  latest", "2 more runs without a checkpoint"]
    assert invoke_json("ls", run, "--tree")["tree"]["empty_runs"] == 2


def test_a_conversion_belongs_to_no_job(run: Path) -> None:
    invoke("convert", run / "step_1", run / "converted", "--to", "native")
    lines = show(run)
    assert [line for line in lines if not line.startswith("run ")][-2:] == [
        "│ no known incarnation",
        "● converted  latest",
    ]
    assert show_header(run / "converted")["saved by"] == "no known incarnation"


def test_a_rollback_without_a_job_is_shown_before_the_next_save(run: Path) -> None:
    invoke("rollback", run, "step_3")
    lines = show(run)
    assert lines[3:] == [
        "├─╮",
        "│ │ incarnation 2; went back to step_1",
        "│ ○ step_2  abandoned",
        "│ ┊ 2 jobs that saved nothing: incarnations 3 and 4",
        "│ ┊ incarnation 5; continued step_2; has no checkpoint",
        "● step_2@1",
        "● step_3  latest, good",
        "│ incarnation 6; went back to step_3; has no checkpoint yet",
    ]


def test_what_is_in_no_tree_is_in_a_table_before_it(run: Path) -> None:
    (run / "step_1/manifest.json").write_text("{")
    (run / ".step_9.fedcba9876543210.0123456789abcdef.partial").mkdir()
    lines = show(run, "--all", code=1)
    assert [line.split()[0] for line in lines[1:4]] == ["step_1", "step_9", "step_1:"]
    assert "│ incarnation 2; went back to a checkpoint that is no longer in the list" in lines


def test_hostile_texts_are_escaped(run: Path) -> None:
    entry = newest_entry(run)
    write_entry(run, msgspec.structs.replace(entry, job=Job("t", "a\x1b[2Jb\nc", 7, 1e300)))
    (run / "step_1").rename(run / "step\x1b[2J\n1")
    text = invoke("ls", run, "--tree").stdout
    assert "\x1b" not in text
    assert r"incarnation 5 on a\x1b[2Jb\nc, process 7, 1e+300; continued step_2" in text
    assert r"● step\x1b[2J\n1" in text
    assert r"went back to step\x1b[2J\n1" in text


def test_a_list_without_the_tree_reads_the_newest_entry_only(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    decode = stored_history._decode_entry

    def note(path: Path) -> Any:
        read.append(path.name)
        return decode(path)

    monkeypatch.setattr(stored_history, "_decode_entry", note)
    monkeypatch.setattr(stored_history, "_look_at_entry", lambda *_: pytest.fail("an entry is read to show it"))
    invoke("ls", run)
    assert set(read) == {"00000005.json"}


def test_it_cannot_be_watched(run: Path) -> None:
    assert "--watch and --tree" in invoke("ls", run, "--watch", "--tree", code=2).stderr


def test_in_a_bucket_each_entry_is_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeS3()
    with fake.connected():
        path = fake.store_at("http://fake").path("bucket/run")
        train_as_job(path, 3)
        train_as_job(path, 2, "step_1")
        for _ in range(3):
            train_as_job(path, 0)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    with fake.served() as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        fake.requests.clear()
        invoke("ls", path)
        plain = len(fake.requests)
        lines = show(path)
    assert [line.removesuffix(", good") for line in lines[1:]] == [line.removesuffix(", good") for line in GRAPH[1:]]
    assert len(fake.requests) - 2 * plain <= 5 + 1


def show_header(path: Path, *options: str) -> dict[str, str]:
    """The first lines of ``show`` by their names, each as one line, without hosts, processes and times."""
    text = invoke("show", path, *options).stdout.split("\n\n")[0]
    joined = re.sub(r"\n +", " ", text)
    lines = [re.split(r" {2,}", re.sub(rf" on {JOB}", "", line), maxsplit=1) for line in joined.splitlines()]
    return dict(lines)


class TestShow:
    def test_a_current_checkpoint(self, made: Path) -> None:
        header = show_header(made)
        assert header["saved by"] == "incarnation 2, which went back to step_1"
        assert header["state"] == "current"
        record = invoke_json("show", made)
        assert (record["incarnation"], record["current"], record["abandoned_by"]) == (2, True, None)
        assert record["saved_by"] == invoke_json("ls", made, "--tree")["tree"]["runs"][0]["incarnations"][1]

    def test_an_abandoned_checkpoint(self, made: Path) -> None:
        header = show_header(made / "step_3")
        assert header["saved by"] == "incarnation 1, which began the run"
        assert header["state"] == "abandoned by incarnation 2, which went back to step_1"
        record = invoke_json("show", made, "--tag", "good")
        first, second = invoke_json("ls", made, "--tree")["tree"]["runs"][0]["incarnations"][:2]
        assert (record["incarnation"], record["current"]) == (1, False)
        assert (record["saved_by"], record["abandoned_by"]) == (first, second)

    def test_if_the_entries_are_lost_no_job_is_known(self, run: Path) -> None:
        for number in (1, 2):
            (run / FOLDER / f"{number:08d}.json").unlink()
        header = show_header(run / "step_3")
        assert header["saved by"] == "incarnation 1, whose job is not known"
        assert header["state"] == "abandoned by incarnation 2, whose job is not known, which went back to step_1"

    def test_a_history_that_cannot_be_read_hides_nothing_else(self, run: Path) -> None:
        (run / FOLDER / "00000009.json").symlink_to("nowhere")
        assert "00000009.json" in invoke("ls", run, code=1).stderr
        header = show_header(run / "step_3")
        assert (header["tag"], header["incarnation"], "state" in header) == ("step_3", "1", False)

    def test_without_a_history_it_has_the_number_only(self, run: Path, tmp_path: Path) -> None:
        shutil.copytree(run / "step_3", tmp_path / "alone" / "step_3")
        header = show_header(tmp_path / "alone" / "step_3")
        assert (header["incarnation"], "saved by" in header, "state" in header) == ("1", False, False)
        record = invoke_json("show", tmp_path / "alone" / "step_3")
        assert (record["incarnation"], record["current"], record["saved_by"]) == (1, None, None)

    def test_hostile_texts_are_escaped(self, run: Path) -> None:
        entry = read_entries(run).entries[3]
        write_entry(run, msgspec.structs.replace(entry, job=Job("t", "a\x1b[2Jb", 7, 1e9)))
        text = invoke("show", run / "step_3").stdout
        assert "\x1b" not in text
        assert r"on a\x1b[2Jb" in text
