"""Tests that forged files in the folder of a local tier lead to an older checkpoint: no crash, no wait, no escape.

Their CRCs are right, so nothing but the checks of what they say finds them.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from msgspec.structs import replace

import rankless
from rankless.tier.generation import Common
from rankless.tier.host_folder import TierFolder
from rankless.tier.part import _ROW, _Header, decode_checked, encode_checked
from rankless.tier.part_names import GenerationKey, PartName
from tests.helpers.killed_jobs import run_killed_job
from tests.helpers.pairwise import each_value

_replace = msgspec.structs.replace


def _save(base: Path, step: int, drain_every: int) -> None:
    local = rankless.LocalTier(base / "tier", drain_every=drain_every)
    rankless.save_checkpoint(base / "run", f"step_{step}", {"w": torch.full((300,), float(step))}, local=local)


def _load(base: Path) -> str:
    state = {"w": torch.zeros(300)}
    result = rankless.restore(base / "run", None, state, local=base / "tier")
    rankless.finalize()
    assert torch.equal(state["w"], torch.full((300,), float(result.tag[-1])))
    return result.tag


@pytest.fixture
def folder(tmp_path: Path) -> TierFolder:
    """A tier with the second checkpoint of a run; the first one is in the run directory."""
    base = tmp_path / "a/b"
    base.mkdir(parents=True)
    run_killed_job(_save, base, 1, 1)
    run_killed_job(_save, base, 2, 9)
    return TierFolder.open(base / "tier", base / "run")


def _name_of(folder: TierFolder) -> PartName:
    ((name,),) = folder.list_parts().values()
    return name


def _data_of(folder: TierFolder) -> Path:
    return folder.path / folder.read_part(_name_of(folder)).data


def _label_of(folder: TierFolder) -> Path:
    return folder.path / f"{_name_of(folder).key.name}.common"


def _check_that_the_first_is_loaded(folder: TierFolder) -> None:
    base = folder.path.parent
    assert run_killed_job(_load, base) == "step_1"
    assert {path.name for path in base.iterdir()} == {"run", "tier"}
    assert {path.name for path in base.parent.iterdir()} == {"b"}


def test_the_second_is_loaded_if_nothing_is_forged(folder: TierFolder) -> None:
    assert run_killed_job(_load, folder.path.parent) == "step_2"


@pytest.mark.parametrize(
    "columns",
    [
        {"tensor": 2**32 - 1},
        {"file": 2**32 - 1},
        {"offset": 2**63},
        {"offset": 2**20},
        {"local": 2**64 - 8},
        {"start": 0, "stop": 2**63, "local": 2**63, "crc": 0},
        {"start": 100, "stop": 0},
    ],
    ids=str,
)
def test_ranges_outside(folder: TierFolder, columns: dict[str, int]) -> None:
    path = folder.path / _name_of(folder).name
    header = decode_checked(path.read_bytes(), _Header, "table")
    rows = np.frombuffer(header.rows, np.uint8).copy()
    size = len(folder.read_part(_name_of(folder)).rows.stop)
    # The columns follow each other.
    position = 0
    for column, (kind, _) in (_ROW.fields or {}).items():
        if column in columns:
            rows[position : position + size * kind.itemsize] = np.full(size, columns[column], kind).view(np.uint8)
        position += size * kind.itemsize
    path.write_bytes(encode_checked(_replace(header, rows=rows.tobytes())))
    _check_that_the_first_is_loaded(folder)


@pytest.mark.parametrize(
    "fields", [{"nbytes": 2**62}, {"nbytes": -5}, {"data": "../../x"}, {"data": "a\0b"}, {"data": ""}], ids=str
)
def test_headers_of_tables(folder: TierFolder, fields: dict[str, Any]) -> None:
    path = folder.path / _name_of(folder).name
    path.write_bytes(encode_checked(_replace(decode_checked(path.read_bytes(), _Header, "table"), **fields)))
    _check_that_the_first_is_loaded(folder)


def _with_tag(tag: str) -> Callable[[Common], Common]:
    return lambda common: _replace(
        common, label=_replace(common.label, manifest=_replace(common.label.manifest, tag=tag))
    )


def _with_version(common: Common) -> Common:
    return _replace(common, label=_replace(common.label, manifest=_replace(common.label.manifest, version=99)))


def _with_small_file(common: Common) -> Common:
    return _replace(common, small_files={**common.small_files, "../../x": b"x"})


def _with_data_file(common: Common) -> Common:
    files = {group: [replace(file, path="../../x") for file in of_group] for group, of_group in common.groups.items()}
    return _replace(common, groups=files)


@pytest.mark.parametrize(
    "change", [_with_tag("../../x"), _with_tag(""), _with_version, _with_small_file, _with_data_file]
)
def test_labels(folder: TierFolder, change: Callable[[Common], Common]) -> None:
    path = _label_of(folder)
    path.write_bytes(encode_checked(change(decode_checked(path.read_bytes(), Common, "label"))))
    with pytest.warns(UserWarning, match="ignored in the local tier"):
        assert _load(folder.path.parent) == "step_1"
    assert {found.name for found in folder.path.parent.parent.iterdir()} == {"b"}


@each_value(
    {
        "file_of": [_data_of, _label_of, lambda folder: folder.path / _name_of(folder).name],
        "kind": ["FIFO", "folder", "link"],
    }
)
def test_things_that_are_no_files(folder: TierFolder, file_of: Callable[[TierFolder], Path], kind: str) -> None:
    path = file_of(folder)
    moved = path.rename(folder.path.parent / "run/moved")
    if kind == "FIFO":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(moved)
    _check_that_the_first_is_loaded(folder)


def test_other_things_are_ignored(folder: TierFolder) -> None:
    (folder.path / f"{GenerationKey(9, 9, '0' * 16).name}.000000-of-000001.part").mkdir()
    (folder.path / "0123456789abcdef.lock").mkdir()
    (folder.path / "other").write_text("other")
    assert run_killed_job(_load, folder.path.parent) == "step_2"


def test_a_marker_that_is_no_file_is_named_and_nothing_is_loaded_from_its_folder(folder: TierFolder) -> None:
    (folder.path / "tier.json").unlink()
    os.mkfifo(folder.path / "tier.json")
    with pytest.warns(UserWarning, match="is not the folder of a local tier"):
        assert _load(folder.path.parent) == "step_1"
