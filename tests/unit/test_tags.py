"""Tests of what may be passed as the tag of an existing checkpoint: tags, aliases, the best and the latest one."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rankless
from rankless.errors import (
    CorruptCheckpointError,
    InvalidArgumentError,
    NoCheckpointError,
    StorageError,
    TagExistsError,
)
from rankless.run import tag_arguments
from rankless.run.checkpoint_info import CheckpointInfo
from rankless.run.retention import sort_by_metric
from tests.helpers.commands import invoke, invoke_json
from tests.helpers.corruption import cut_file
from tests.helpers.examples import examples

LOSSES = {"a": 3.0, "b": 1.0, "c": 1.0, "d": float("nan"), "e": 2.0}


def save(path: Path, tag: str, loss: float | None = None, **options: Any) -> None:
    metrics = {} if loss is None else {"loss": loss}
    rankless.save_checkpoint(path, tag, {"w": torch.ones(2)}, user_content=tag, metrics=metrics, **options)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for tag, loss in LOSSES.items():
        save(tmp_path, tag, loss)
    save(tmp_path, "f")
    return tmp_path


def open_by(run: Path, tag: Any) -> str:
    return str(rankless.open(run, tag).values["user_content"])


def load_by(run: Path, tag: Any) -> str:
    return str(rankless.load_checkpoint(run, tag))


def restore_by(run: Path, tag: Any) -> str:
    return rankless.restore(run, tag).tag


def pin_by(run: Path, tag: Any) -> str:
    with rankless.pin(run, tag) as checkpoint:
        return checkpoint.tag


WAYS = pytest.mark.parametrize("select", [open_by, load_by, restore_by, pin_by])


@WAYS
def test_each_kind_of_tag(run: Path, select: Callable[[Path, Any], str]) -> None:
    rankless.set_alias(run, "production", "b")
    tags = [None, rankless.LATEST, "c", rankless.best("loss"), rankless.best("loss", "max"), "production"]
    assert [select(run, tag) for tag in tags] == ["f", "f", "c", "c", "a", "b"]


@WAYS
@pytest.mark.parametrize("tag", [rankless.best("accuracy"), "g"])
def test_what_is_not_there(run: Path, select: Callable[[Path, Any], str], tag: Any) -> None:
    with pytest.raises(NoCheckpointError, match="their metrics are loss" if tag != "g" else "no checkpoint 'g'"):
        select(run, tag)


@pytest.mark.parametrize("tag", [3, b"a", ["a"], "", "a/b"])
def test_what_is_no_tag(run: Path, tag: Any) -> None:
    for select in (open_by, load_by, pin_by):
        with pytest.raises(InvalidArgumentError, match="tag"):
            select(run, tag)
    with pytest.raises(InvalidArgumentError, match="mode must be one of min, max"):
        rankless.best("loss", "least")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="name of a metric"):
        rankless.best(3)  # type: ignore[arg-type]


@given(values=st.lists(st.none() | st.floats(), max_size=8), mode=st.sampled_from(["min", "max"]))
@settings(max_examples=examples(100), deadline=None)
def test_the_best_is_first_and_of_equal_ones_the_newest(values: list[float | None], mode: str) -> None:
    infos = [CheckpointInfo(str(n), Path(str(n)), metrics={"m": value}, id=str(n)) for n, value in enumerate(values)]
    finite = [(value, n) for n, value in enumerate(values) if value is not None and abs(value) < float("inf")]
    expected = sorted(finite, key=lambda entry: (entry[0] if mode == "min" else -entry[0], -entry[1]))
    assert [info.tag for info in sort_by_metric(infos, "m", mode)] == [str(n) for _, n in expected]


def test_an_alias_is_set_moved_listed_and_removed(run: Path) -> None:
    assert rankless.set_alias(run, "production").tag == "f"
    assert rankless.set_alias(run, "production", rankless.best("loss")).tag == "c"
    rankless.set_alias(run, "old", "a")
    assert rankless.list_aliases(run) == {"old": "a", "production": "c"}
    rankless.remove_alias(run, "old")
    assert rankless.list_aliases(run) == {"production": "c"}
    with pytest.raises(NoCheckpointError, match="no alias 'old'"):
        rankless.remove_alias(run, "old")
    assert not rankless.list_aliases(run / "nothing")


def test_aliases_are_not_checkpoints(run: Path) -> None:
    before = [info.tag for info in rankless.list_checkpoints(run)]
    rankless.set_alias(run, "production", "a")
    assert [info.tag for info in rankless.list_checkpoints(run)] == before
    assert invoke("verify", run, "--all").exit_code == 0


@WAYS
def test_a_stale_alias_names_both(run: Path, select: Callable[[Path, Any], str]) -> None:
    rankless.set_alias(run, "production", "b")
    save(run, "b", 0.0, overwrite=True)
    with pytest.raises(
        NoCheckpointError, match=r"the alias 'production' in .* means the checkpoint 'b', which was removed or replaced"
    ):
        select(run, "production")


def test_a_checkpoint_with_this_very_tag_is_preferred(run: Path) -> None:
    rankless.set_alias(run, "production", "b")
    save(run, "production")
    assert open_by(run, "production") == load_by(run, "production") == "production"
    with pytest.raises(TagExistsError, match="choose another alias"):
        rankless.set_alias(run, "production", "b")


@pytest.mark.usefixtures("without_garbage")
def test_an_alias_whose_file_is_corrupt_is_an_error_for_who_uses_it(run: Path) -> None:
    rankless.set_alias(run, "production", "b")
    rankless.set_alias(run, "old", "a")
    for content in (b"", b"{}", b'{"tag": 3, "id": ""}', b"[" * 9000):
        (run / ".production.alias").write_bytes(content)
        with pytest.raises(CorruptCheckpointError, match=r"production\.alias is corrupt: set the alias"):
            open_by(run, "production")
        assert rankless.list_aliases(run) == {"old": "a"}
    with pytest.warns(UserWarning, match=r"an old one could not be removed: .*production\.alias is corrupt"):
        save(run, "g", keep=1)
    assert len(rankless.list_checkpoints(run)) == len(LOSSES) + 2
    rankless.set_alias(run, "production", "c")
    assert open_by(run, "production") == "c"


@pytest.mark.parametrize("kind", ["fifo", "device", "folder", "outside", "loop"])
def test_an_alias_that_is_no_regular_file_is_not_read(run: Path, kind: str) -> None:
    """A process that opened the FIFO would wait for ever, and one that read the device would need all memory."""
    file = run / ".odd.alias"
    links = {"device": "/dev/zero", "outside": "/etc/hostname", "loop": ".odd.alias"}
    if kind in links:
        file.symlink_to(links[kind])
    else:
        os.mkfifo(file) if kind == "fifo" else file.mkdir()
    with pytest.raises((CorruptCheckpointError, StorageError), match=r"\.odd\.alias"):
        open_by(run, "odd")
    assert rankless.list_aliases(run) == {}
    assert invoke("ls", run).exit_code == 0
    with pytest.warns(UserWarning, match="an old one could not be removed"):
        save(run, "g", keep=1)


def test_an_alias_of_a_checkpoint_that_is_removed_meanwhile_is_not_set(run: Path) -> None:
    """Retention looks for aliases before the alias is written, and then renames the checkpoint."""
    write, moved = tag_arguments.write_alias, []

    def move_and_write(path: Path, name: str, info: CheckpointInfo) -> None:
        if not moved:
            moved.append(info.tag)
            info.path.rename(path.with_name(f"{path.name}-moved"))
        write(path, name, info)

    with mock.patch.object(tag_arguments, "write_alias", move_and_write):
        assert rankless.set_alias(run, "production", rankless.best("loss")).tag == "b"
    assert moved == ["c"]
    assert open_by(run, "production") == "b"


def test_a_full_disk_leaves_nothing(run: Path) -> None:
    before = sorted(path.name for path in run.iterdir())
    full = mock.patch("rankless.storage.atomic_rename.replace_file", side_effect=StorageError(28, "No space left"))
    with full, pytest.raises(StorageError):
        rankless.set_alias(run, "production")
    assert sorted(path.name for path in run.iterdir()) == before


@pytest.mark.parametrize("alias", ["", "a/b", ".hidden", "x" * 300])
def test_names_that_no_alias_can_have(run: Path, alias: str) -> None:
    with pytest.raises(InvalidArgumentError):
        rankless.set_alias(run, alias, "a")


def test_a_corrupt_checkpoint_gets_no_alias(run: Path) -> None:
    cut_file(run / "b/manifest.json")
    with pytest.raises(NoCheckpointError, match=r"no checkpoint 'b' in .* that can be read"):
        rankless.set_alias(run, "production", "b")


def test_retention_leaves_what_has_an_alias(run: Path) -> None:
    rankless.set_alias(run, "production", "b")
    save(run, "g", keep=1)
    save(run, "h", keep=1)
    assert [info.tag for info in rankless.list_checkpoints(run)] == ["b", "h"]
    assert "kept b: it has an alias" in invoke("prune", run, "--keep", "1").stdout
    rankless.remove_alias(run, "production")
    save(run, "i", keep=1)
    assert [info.tag for info in rankless.list_checkpoints(run)] == ["i"]


def test_the_command_alias(run: Path) -> None:
    assert invoke("alias", run, "production", "b").stdout == "production means b\n"
    assert invoke("alias", run, "last").stdout == "last means f\n"
    assert invoke_json("alias", run) == {"aliases": {"last": "f", "production": "b"}}
    assert invoke("alias", run).stdout.splitlines()[1:] == ["last        f", "production  b"]
    assert re_split(invoke("ls", run).stdout.splitlines()[2])[:2] == ["b", "production"]
    assert invoke_json("ls", run)["checkpoints"][5]["aliases"] == ["last"]
    assert "removed the alias last" in invoke("alias", run, "last", "--remove").stdout
    assert invoke_json("alias", run) == {"aliases": {"production": "b"}}
    assert invoke("show", run, "--tag", "production").exit_code == 0
    for arguments in (["last", "--remove"], ["x", "nothing"], ["--remove"], ["a", "b", "--remove"]):
        assert invoke("alias", run, *arguments, code=2).stdout == ""


def re_split(row: str) -> list[str]:
    return [cell for cell in row.split("  ") if cell.strip()]
