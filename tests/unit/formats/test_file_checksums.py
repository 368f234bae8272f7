"""Tests that ``verify`` and ``convert`` check the checksums of other systems' files and name all corruption."""

from __future__ import annotations

import json
import shutil
import warnings
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.serialization import set_crc32_options
from typer.testing import CliRunner

import rankless
from rankless.cli.main import app
from rankless.dcp import FileSystemReader, FileSystemWriter
from rankless.errors import CorruptCheckpointError
from tests.helpers.corruption import cut_file, flip_tensor_bit
from tests.helpers.pool import Ranks

MODEL = {f"layer.{n}": torch.arange(5000.0) + n for n in range(3)} | {"none": torch.zeros(0, 3)}


def call(*args: object, code: int = 0) -> Any:
    result = CliRunner().invoke(app, [str(arg) for arg in args])
    assert result.exit_code == code, result.output
    return result


def verdict(path: Path, code: int = 0) -> dict[str, Any]:
    (actual,) = json.loads(call("verify", path, "--json", code=code).stdout)["checkpoints"]
    return dict(actual)


def corrupt(file: Path, tensor: torch.Tensor) -> None:
    """Flip a bit in the middle of a tensor's bytes, wherever these are."""
    raw = bytearray(file.read_bytes())
    at = raw.find(tensor.numpy().tobytes())
    assert at >= 0
    raw[at + tensor.nbytes // 2] ^= 0x10
    file.write_bytes(raw)


def save_dcp(path: Path, state: dict[str, Any], **options: Any) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=path, no_dist=True, **options)
    return path


def convert_file(source: Path, final: Path) -> None:
    rankless.convert(source, final, to="safetensors")


class TestFilesOfTorchSave:
    def test_a_sound_one_is_verified(self, tmp_path: Path) -> None:
        torch.save({"model": MODEL, "step": 3}, tmp_path / "x.pt")
        actual = verdict(tmp_path / "x.pt")
        assert (actual["status"], actual["tensors"], actual["checksummed"]) == ("verified", 4, 4)
        text = call("verify", tmp_path / "x.pt").stdout
        assert "verified" in text
        assert "no checksums" not in text

    def test_every_tensor_that_is_not_what_was_saved_is_named(self, tmp_path: Path) -> None:
        file = tmp_path / "x.pt"
        views = {"whole": MODEL["layer.0"], "turned": MODEL["layer.0"].view(50, 100).T}
        torch.save({"model": {**views, "sound": MODEL["layer.1"], "other": MODEL["layer.2"]}}, file)
        corrupt(file, MODEL["layer.0"])
        corrupt(file, MODEL["layer.2"])
        with zipfile.ZipFile(file) as opened:
            bad = opened.testzip()
        assert bad is not None
        problems = verdict(file, code=1)["problems"]
        assert sorted(item.split("'")[1] for item in problems) == ["other", "turned", "whole"]
        assert all("do not match their CRC-32" in item and str(file) in item for item in problems)
        assert any(bad in item for item in problems)

    def test_an_entry_without_tensors_is_looked_at_too(self, tmp_path: Path) -> None:
        file = tmp_path / "x.pt"
        torch.save({"model": MODEL}, file)
        with zipfile.ZipFile(file) as opened:
            (identity,) = (name for name in opened.namelist() if name.endswith("serialization_id"))
            text = opened.read(identity)
        file.write_bytes(file.read_bytes().replace(text, text[:-1] + bytes([text[-1] ^ 1]), 1))
        (problem,) = verdict(file, code=1)["problems"]
        assert identity in problem

    @pytest.mark.parametrize("kind", ["legacy", "without"])
    def test_where_there_are_none_it_says_so(self, tmp_path: Path, kind: str) -> None:
        set_crc32_options(kind != "without")
        try:
            torch.save({"model": MODEL}, tmp_path / "x.pt", _use_new_zipfile_serialization=kind != "legacy")
        finally:
            set_crc32_options(True)
        assert "no checksums" in call("verify", tmp_path / "x.pt").stdout
        assert (verdict(tmp_path / "x.pt")["status"], verdict(tmp_path / "x.pt")["checksummed"]) == ("unchecked", 0)

    def test_shards_of_transformers(self, tmp_path: Path) -> None:
        names = [f"pytorch_model-{n}-of-00002.bin" for n in ("00001", "00002")]
        for name, key in zip(names, ("layer.0", "layer.1"), strict=True):
            torch.save({key: MODEL[key]}, tmp_path / name)
        weight_map = dict(zip(("layer.0", "layer.1"), names, strict=True))
        index = {"metadata": {}, "weight_map": weight_map}
        (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
        assert verdict(tmp_path)["status"] == "verified"
        for key, name in weight_map.items():
            corrupt(tmp_path / name, MODEL[key])
        problems = verdict(tmp_path, code=1)["problems"]
        assert [name in item for name, item in zip(names, problems, strict=True)] == [True] * 2

    @pytest.mark.parametrize("to", ["lightning", "lightning-folder", "dcp", "nxd", "colossalai"])
    def test_of_what_rankless_writes_nothing_is_called_damaged(self, tmp_path: Path, to: str) -> None:
        rankless.save_checkpoint(tmp_path / "run", "a", {"w": MODEL["layer.0"]}, rng=False)
        rankless.convert(tmp_path / "run", tmp_path / "out", to=to)
        assert verdict(tmp_path / "out")["status"] == ("verified" if to == "nxd" else "unchecked")

    def test_tensors_of_nxd(self, tmp_path: Path) -> None:
        rankless.save_checkpoint(tmp_path / "run", "a", {"w": MODEL["layer.0"], "v": MODEL["layer.1"]}, rng=False)
        rankless.convert(tmp_path / "run", tmp_path / "out", to="nxd")
        for number, key in enumerate(("layer.1", "layer.0")):
            (file,) = (tmp_path / "out").rglob(f"tensor_{number}.pt")
            corrupt(file, MODEL[key])
        assert len(verdict(tmp_path / "out", code=1)["problems"]) == 2


class TestDistributedCheckpoints:
    def test_records_of_torch(self, tmp_path: Path) -> None:
        path = save_dcp(tmp_path / "dcp", {"model": MODEL, "step": 3})
        assert verdict(path)["status"] == "verified"
        (file,) = path.glob("*.distcp")
        for key in ("layer.0", "layer.2"):
            corrupt(file, MODEL[key])
        problems = verdict(path, code=1)["problems"]
        assert [
            key in item and "CRC-32" in item for key, item in zip(("layer.0", "layer.2"), problems, strict=True)
        ] == [
            True,
            True,
        ]

    def test_checksums_of_ours(self, tmp_path: Path) -> None:
        """Also where the CRC-32s are right, as those of another save's file are."""
        paths = [tmp_path / name for name in ("one", "two")]
        for number, path in enumerate(paths):
            state = {"model": {name: tensor + number for name, tensor in MODEL.items()}}
            save_dcp(path, state, storage_writer=FileSystemWriter(path))
            assert (verdict(path)["status"], (path / "checksums.json").exists()) == ("verified", True)
        shutil.copy(paths[1] / "__0_0.distcp", paths[0] / "__0_0.distcp")
        with pytest.raises(dcp.api.CheckpointException):
            dcp.load({"model": dict(MODEL)}, storage_reader=FileSystemReader(paths[0]), no_dist=True)
        problems = verdict(paths[0], code=1)["problems"]
        assert [name for name in MODEL if any(f"'{name}'" in item for item in problems)] == list(MODEL)[:3]
        assert all("CRC-64" in item for item in problems[:3])
        with pytest.raises(CorruptCheckpointError, match="CRC-64"):
            rankless.convert(paths[0], tmp_path / "out", to="safetensors")

    def test_every_damaged_record_of_values_is_named(self, tmp_path: Path) -> None:
        """Although the first keeps the folder from being opened."""
        content = {f"text{n}": f"{n}" * 300 for n in range(3)}
        path = save_dcp(tmp_path / "dcp", {"model": MODEL, **content})
        (file,) = path.glob("*.distcp")
        raw = file.read_bytes()
        for text in (content["text0"], content["text2"]):
            raw = raw.replace(text.encode(), text.encode()[:-1] + b"?", 1)
        file.write_bytes(raw)
        corrupt(file, MODEL["layer.1"])
        problems = verdict(path, code=1)["problems"]
        assert len([item for item in problems if "/data.pkl'" in item]) >= 2
        assert len([item for item in problems if "/data/0'" in item]) == 1


class TestConversions:
    @pytest.mark.parametrize("to", ["native", "torch", "nxd"])
    def test_what_is_not_what_was_saved_is_not_passed_on(self, tmp_path: Path, to: str) -> None:
        torch.save({"model": MODEL}, tmp_path / "x.pt")
        save_dcp(tmp_path / "dcp", {"model": MODEL})
        for source, file in (("x.pt", tmp_path / "x.pt"), ("dcp", tmp_path / "dcp/__0_0.distcp")):
            corrupt(file, MODEL["layer.1"])
            with pytest.raises(CorruptCheckpointError, match="CRC-32"):
                rankless.convert(tmp_path / source, tmp_path / "out", to=to)
        assert {path.name for path in tmp_path.iterdir()} == {"x.pt", "dcp"}

    def test_ranks_share_it_and_all_raise(self, ranks: Ranks, tmp_path: Path) -> None:
        torch.save({"model": MODEL}, tmp_path / "x.pt")
        ranks(2, convert_file, tmp_path / "x.pt", tmp_path / "sound")
        assert torch.equal(rankless.open(tmp_path / "sound")["model/layer.2"], MODEL["layer.2"])
        corrupt(tmp_path / "x.pt", MODEL["layer.2"])
        for error in ranks.outcomes(2, convert_file, tmp_path / "x.pt", tmp_path / "out"):
            assert isinstance(error, CorruptCheckpointError)
            assert "CRC-32" in str(error)

    def test_what_is_left_out_need_not_be_sound(self, tmp_path: Path) -> None:
        torch.save({"model": MODEL}, tmp_path / "x.pt")
        corrupt(tmp_path / "x.pt", MODEL["layer.1"])
        rankless.convert(tmp_path / "x.pt", tmp_path / "out", to="safetensors", exclude="layer.1")
        assert torch.equal(rankless.open(tmp_path / "out")["model/layer.0"], MODEL["layer.0"])


class TestOurOwn:
    @pytest.fixture
    def saved(self, tmp_path: Path) -> Path:
        stateful = torch.nn.Linear(3, 4)
        optimizer = torch.optim.AdamW(stateful.parameters())
        stateful(torch.ones(3)).sum().backward()
        optimizer.step()
        rankless.save_checkpoint(
            tmp_path, "a", {"model": stateful}, optimizer, user_content={"ema": torch.ones(3)}, max_shard_size=40
        )
        return tmp_path / "a"

    def test_every_damaged_file_is_named(self, saved: Path) -> None:
        shards = sorted((saved / "model").rglob("*.safetensors"))
        others = sorted((saved / "optimizer").rglob("*.safetensors"))
        cut_file(shards[0])
        others[0].unlink()
        cut_file(saved / "state.json")
        cut_file(saved / "ranks.json")
        names = list(json.loads(others[1].read_bytes()[8 : 8 + int.from_bytes(others[1].read_bytes()[:8], "little")]))
        (tensor,) = (name for name in names if name != "__metadata__")
        flip_tensor_bit(others[1], tensor)
        problems = verdict(saved, code=1)["problems"]
        for file in (shards[0], others[0], saved / "state.json", saved / "ranks.json", others[1]):
            assert [str(file) in item for item in problems].count(True) == 1, problems
        assert len(problems) == 5

    def test_weights_that_no_manifest_names_are_told(self, tmp_path: Path) -> None:
        model = {"v": torch.zeros(20), "w": torch.zeros(20)}
        rankless.save_checkpoint(tmp_path, "a", model, rng=False, max_shard_size=100)
        folder = tmp_path / "a/model"
        assert verdict(tmp_path)["notes"] == []
        (folder / "config.json").write_text("{}")
        for name in ("model.safetensors", "adapter_config.json", "pytorch_model.bin"):
            (folder / name).write_bytes(b"x")
        notes = verdict(tmp_path)["notes"]
        assert [item.split()[0] for item in notes] == [
            str(folder / name) for name in ("adapter_config.json", "model.safetensors", "pytorch_model.bin")
        ]
        assert ["transformers loads it instead" in item for item in notes] == [True, True, False]
        assert "its manifest does not name it" in call("verify", tmp_path).stdout
