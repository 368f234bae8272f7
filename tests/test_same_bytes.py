"""The same state saved from any number of ranks, in any layout, gives the same files, byte for byte."""

from pathlib import Path

import pytest

import holdfast
from tests.pool import Ranks
from tests.training import trained

CASES = [(layout, n) for layout in ("ddp", "fsdp") for n in (1, 2, 3, 4)]


def save(path: str, layout: str, optimizer: str) -> None:
    run = trained(layout, optimizer)
    content = {"epoch": 1, "losses": (1.5, float("inf"))}
    holdfast.save_checkpoint(path, "s", run.model, run.optimizer, run.scheduler, content, step=3, max_shard_size=600)


def contents(folder: Path) -> dict[str, bytes]:
    """The files whose bytes depend on the state alone: all but the manifest and what belongs to single ranks."""
    files = {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    return {name: data for name, data in files.items() if name != "manifest.json" and not name.startswith("ranks")}


@pytest.mark.parametrize("optimizer", ["adamw", "momentum"])
def test_files_do_not_depend_on_the_ranks(ranks: Ranks, tmp_path: Path, optimizer: str) -> None:
    save(str(tmp_path / "plain"), "plain", optimizer)
    expected = contents(tmp_path / "plain/s")
    assert {"model/model.safetensors.index.json", "optimizer/optimizer.safetensors.index.json", "state.json"} <= set(
        expected
    )
    for layout, n in CASES:
        path = tmp_path / f"{layout}{n}"
        ranks(n, save, str(path), layout, optimizer)
        assert contents(path / "s") == expected, (layout, n)


def test_two_saves_of_one_state_are_equal(tmp_path: Path) -> None:
    for name in "ab":
        save(str(tmp_path / name), "plain", "adamw")
    assert contents(tmp_path / "a/s") == contents(tmp_path / "b/s")
