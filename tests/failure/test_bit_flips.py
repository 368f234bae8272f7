"""Tests that a flipped bit anywhere in a checkpoint is detected, and that the error names the file or tensor."""

import random
import shutil
from pathlib import Path

import pytest
import torch

import rankless
from rankless.engine.integrity.block_verification import ChecksumVerifier
from rankless.errors import CorruptCheckpointError, NoCheckpointError, RanklessError, UnstableReadError
from rankless.formats.native import NativeReader
from rankless.ondisk.block_crcs import Fragment
from tests.helpers.pool import Ranks
from tests.helpers.training import Run, start_run, train_run

FLIPS = 520


def save(path: Path) -> Path:
    run = train_run("plain")
    content = {"note": "text", "table": torch.arange(1000), "pair": (1, 2.5)}
    own = {"mine": torch.ones(50)}
    options = {"per_rank_content": own, "metrics": {"loss": 0.25}, "max_shard_size": 900}
    rankless.save_checkpoint(path, "s", run.model, run.optimizer, run.scheduler, content, **options)
    return path / "s"


def load(path: Path, run: Run) -> None:
    rankless.load_checkpoint(path, "s", run.model, run.optimizer, run.scheduler)


def flip(file: Path, position: int, bit: int) -> None:
    data = bytearray(file.read_bytes())
    data[position] ^= 1 << bit
    file.write_bytes(data)


def test_every_flipped_bit_is_found_and_named(tmp_path: Path) -> None:
    folder = save(tmp_path / "run")
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    generator = random.Random(5)
    run = start_run("plain")
    load(tmp_path / "run", run)
    names = {key.partition("/")[2] for key in rankless.open(folder)}
    for number in range(FLIPS):
        # Every file in turn, so that the small ones get their share.
        file = files[number % len(files)]
        position, bit = generator.randrange(file.stat().st_size), generator.randrange(8)
        original = file.read_bytes()
        flip(file, position, bit)
        with pytest.raises(RanklessError) as caught:
            load(tmp_path / "run", run)
        message = str(caught.value)
        where = f"{file.name} byte {position} bit {bit}: {message}"
        if file.name == "manifest.json":
            assert "manifest.json" in message, where
        else:
            assert isinstance(caught.value, CorruptCheckpointError), where
            assert file.name in message or any(repr(name) in message for name in names), where
        file.write_bytes(original)
    load(tmp_path / "run", run)


def test_a_damaged_tensor_says_what_may_not_be_used(tmp_path: Path) -> None:
    folder = save(tmp_path / "run")
    file = sorted((folder / "optimizer").glob("*.safetensors"))[1]
    flip(file, file.stat().st_size - 3, 1)
    run = start_run("plain")
    with pytest.raises(CorruptCheckpointError, match="The model and optimizer passed may be partly filled"):
        load(tmp_path / "run", run)


@pytest.mark.parametrize("keep", [0, 7, 4000, -1])
def test_a_file_cut_short_is_named_before_anything_is_changed(tmp_path: Path, keep: int) -> None:
    folder = save(tmp_path / "run")
    file = next(iter(sorted((folder / "model").glob("*.safetensors"))))
    file.write_bytes(file.read_bytes()[:keep])
    run = start_run("plain", seed=4)
    before = run.model.embed.weight.clone()
    with pytest.raises(CorruptCheckpointError, match=file.name):
        load(tmp_path / "run", run)
    assert torch.equal(run.model.embed.weight, before)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    folder = save(tmp_path / "run")
    (folder / "state.json").unlink()
    with pytest.raises(CorruptCheckpointError, match=r"state\.json is missing"):
        load(tmp_path / "run", start_run("plain"))


def test_verify_false_reads_without_looking_at_crcs(tmp_path: Path) -> None:
    folder = save(tmp_path / "run")
    file = min((folder / "model").glob("*.safetensors"))
    flip(file, file.stat().st_size - 1, 0)
    run = start_run("plain")
    result = rankless.restore(tmp_path / "run", model=run.model, verify=False)
    assert not result.verified


def load_on_ranks(path: str) -> None:
    run = start_run("fsdp")
    rankless.load_checkpoint(path, model=run.model, optimizer=run.optimizer)


def test_damage_that_one_rank_reads_is_the_same_error_on_all(ranks: Ranks, tmp_path: Path) -> None:
    folder = save(tmp_path / "run")
    file = sorted((folder / "model").glob("*.safetensors"))[1]
    flip(file, 4096 + 300, 0)
    errors = ranks.outcomes(3, load_on_ranks, str(tmp_path / "run"))
    assert {type(error) for error in errors} == {CorruptCheckpointError}
    assert all(file.name in str(error) for error in errors)
    assert len({str(error) for error in errors}) == 1


def test_a_copied_run_has_the_same_latest_whatever_its_files_times(tmp_path: Path) -> None:
    for tag in ("b", "a", "c"):
        rankless.save_checkpoint(tmp_path / "run", tag, {"w": torch.zeros(1)})
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    for tag in ("c", "a", "b"):
        (tmp_path / "copy" / tag / "manifest.json").touch()
    assert [info.tag for info in rankless.list_checkpoints(tmp_path / "copy")] == ["b", "a", "c"]
    assert rankless.open(tmp_path / "copy").path.name == "c"


def test_a_damaged_manifest_is_not_the_latest_and_is_listed(tmp_path: Path) -> None:
    for tag in ("a", "b"):
        rankless.save_checkpoint(tmp_path, tag, {"w": torch.zeros(1)})
    (tmp_path / "b/manifest.json").write_text("{")
    assert [(info.tag, info.status) for info in rankless.list_checkpoints(tmp_path)] == [
        ("b", "damaged"),
        ("a", "complete"),
    ]
    assert rankless.open(tmp_path).path.name == "a"
    (tmp_path / "a/manifest.json").write_text("{")
    assert not rankless.has_checkpoint(tmp_path)
    with pytest.raises(NoCheckpointError, match="none of the 2"):
        rankless.load_checkpoint(tmp_path, model={"w": torch.zeros(1)})


def test_ranks_that_read_one_range_differently_have_read_wrong(tmp_path: Path) -> None:
    rankless.save_checkpoint(tmp_path, "s", {"w": torch.arange(10.0)})
    reader = NativeReader(tmp_path / "s")
    checks = ChecksumVerifier(reader, [("model", "w")])
    with pytest.raises(UnstableReadError, match="'w'"):
        checks.verify_across_ranks({0: [Fragment(0, 20, 1), Fragment(0, 20, 2), Fragment(20, 40, 3)]})
