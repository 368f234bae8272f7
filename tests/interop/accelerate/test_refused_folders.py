"""Folders that are incomplete, corrupt or hostile give typed errors; other folders keep their formats."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file

import rankless
from rankless.errors import (
    CorruptCheckpointError,
    FormatError,
    InvalidArgumentError,
    MismatchError,
    UnsafeNameError,
    UnsafePickleError,
)
from rankless.storage import posix
from rankless.storage.object_path import ObjectPath
from tests.helpers.commands import invoke_json
from tests.helpers.equality import equal_bits
from tests.helpers.fake_http import BUCKET
from tests.helpers.fake_s3 import FakeS3
from tests.helpers.unsafe_pickles import MARK_FILE, UNSAFE_OBJECTS
from tests.interop.accelerate.fixtures import CASES, SavedRun, unpack_fixtures

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack_fixtures(tmp_path_factory.mktemp("accelerate"))


@pytest.fixture
def folder(intact: Path, tmp_path: Path) -> Callable[[str], SavedRun]:
    """A function that returns a run with a checkpoint of its own, which a test may change."""

    def copy(case: str) -> SavedRun:
        shutil.copytree(intact / case, tmp_path / case)
        return SavedRun(tmp_path, case)

    return copy


def restore(run: SavedRun, **options: Any) -> rankless.RestoreResult:
    model = run.make_model()
    return rankless.restore(run.folder, model=model, optimizer=run.make_optimizer(model), **options)


@pytest.mark.parametrize("case", CASES)
def test_every_file_cut_short_is_named_or_left_out(folder: Callable[[str], SavedRun], case: str) -> None:
    run = folder(case)
    for file in sorted(path for path in run.folder.rglob("*") if path.is_file()):
        if file.name in {"training_args.bin", "config.json", "generation_config.json"}:
            continue
        raw = file.read_bytes()
        for size in (0, 1, len(raw) // 2, len(raw) - 1):
            file.write_bytes(raw[:size])
            if file.name.endswith(".json") and size == len(raw) - 1:
                continue  # the newline at the end
            with pytest.raises((CorruptCheckpointError, FormatError), match=file.name.replace(".", r"\.")):
                rankless.restore(run.folder, verify=True, model=run.make_model())
        file.write_bytes(raw)
    assert restore(run).exact[:2] == ("model", "optimizer")


@pytest.mark.parametrize(
    ("case", "name", "missing"),
    [
        ("acc_plain_w1", "model.safetensors", "embed.weight"),
        ("acc_plain_w1", "optimizer.bin", "optimizer"),
        ("acc_fsdp2_w2", "optimizer_0", "optimizer"),
        ("trainer_plain_w1", "optimizer.pt", "optimizer"),
    ],
)
def test_a_missing_part_is_named(folder: Callable[[str], SavedRun], case: str, name: str, missing: str) -> None:
    run = folder(case)
    path = run.folder / name
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    with pytest.raises(MismatchError, match=f"missing in the checkpoint: {missing}"):
        restore(run)


@pytest.mark.parametrize("name", ["optimizer_0", "pytorch_model_fsdp_0"])
def test_a_folder_whose_save_did_not_finish_is_named(folder: Callable[[str], SavedRun], name: str) -> None:
    run = folder("acc_fsdp2_w2")
    (run.folder / name / ".metadata").unlink()
    with pytest.raises(CorruptCheckpointError, match=f"{name} has no .metadata: its save did not finish"):
        rankless.open(run.folder)


@pytest.mark.parametrize("tree", [[], 1, {"a": 1}, {"param_groups": {}}, {"state": {}, "param_groups": [1]}])
def test_a_file_that_is_no_optimizer_is_named(folder: Callable[[str], SavedRun], tree: Any) -> None:
    run = folder("acc_plain_w1")
    torch.save(tree, run.folder / "optimizer.bin")
    with pytest.raises((CorruptCheckpointError, FormatError), match="optimizer"):
        rankless.open(run.folder)


@pytest.mark.usefixtures("without_garbage")
@pytest.mark.parametrize("raw", [b"[]", b"{", b"[" * 100_000, b"\xff"])
def test_a_corrupt_state_of_the_trainer_is_named(folder: Callable[[str], SavedRun], raw: bytes) -> None:
    run = folder("trainer_plain_w1")
    (run.folder / "trainer_state.json").write_bytes(raw)
    with pytest.raises(CorruptCheckpointError, match=r"trainer_state\.json"):
        rankless.open(run.folder)


def test_a_loss_may_be_no_number(folder: Callable[[str], SavedRun], tmp_path: Path) -> None:
    run = folder("trainer_plain_w1")
    state = json.loads((run.folder / "trainer_state.json").read_text())
    (run.folder / "trainer_state.json").write_text(json.dumps(state | {"best_metric": float("nan")}))
    assert restore(run).user_content["trainer_state"]["best_metric"] != 0
    rankless.convert(run.folder, tmp_path / "native", to="native")
    best = rankless.open(tmp_path / "native").values["user_content"]["trainer_state"]["best_metric"]
    assert best != best  # noqa: PLR0124 - NaN


def damage_generators(tree: dict[str, Any]) -> list[Any]:
    words = tree["random_state"][1]
    return [
        [],
        {},
        {key: value for key, value in tree.items() if key != "torch_manual_seed"},
        tree | {"random_state": (3, words[:-1], None)},
        tree | {"random_state": (3, (-1, *words[1:]), None)},
        tree | {"random_state": (2, words, None)},
        tree | {"random_state": None},
        tree | {"numpy_random_seed": ("PCG64", *tree["numpy_random_seed"][1:])},
        tree | {"numpy_random_seed": ("MT19937", tree["numpy_random_seed"][1][:-1], 0, 0, 0.0)},
        tree | {"torch_manual_seed": torch.zeros(3)},
        tree | {"torch_manual_seed": 3},
    ]


@pytest.mark.parametrize("number", range(11))
def test_generators_of_an_unknown_form_are_left_out(
    folder: Callable[[str], SavedRun], number: int, caplog: pytest.LogCaptureFixture
) -> None:
    run = folder("acc_plain_w1")
    file = run.folder / "random_states_0.pkl"
    torch.save(damage_generators(torch.load(file, weights_only=False))[number], file)
    result = restore(run)
    assert result.missing == ("rng",)
    assert result.exact[:2] == ("model", "optimizer")
    assert "random_states_0.pkl" in caplog.text


def test_generators_are_left_out_if_those_of_a_rank_are_missing(
    folder: Callable[[str], SavedRun], caplog: pytest.LogCaptureFixture
) -> None:
    run = folder("acc_fsdp2_w2")
    (run.folder / "random_states_0.pkl").unlink()
    assert restore(run).missing == ("rng",)
    assert "is of rank 1, but there is no file of rank 0" in caplog.text


@pytest.mark.parametrize(
    ("case", "name"),
    [
        ("acc_fsdp2_w2", "random_states_1.pkl"),
        ("trainer_fsdp2_w2", "rng_state_1.pth"),
        ("trainer_plain_w2", "rng_state_1.pth"),
    ],
)
def test_generators_of_the_last_rank_are_missed(
    folder: Callable[[str], SavedRun], caplog: pytest.LogCaptureFixture, case: str, name: str
) -> None:
    """Else those of two ranks would pass for those of one process, whose run goes on exactly."""
    run = folder(case)
    (run.folder / name).unlink()
    assert restore(run).missing == ("rng",)
    assert "is of rank 0, but there is no file of rank 1" in caplog.text


def test_generators_of_another_save_are_left_out(
    folder: Callable[[str], SavedRun], caplog: pytest.LogCaptureFixture
) -> None:
    """Files of more ranks stay when fewer write into the same folder."""
    run = folder("trainer_plain_w2")
    shutil.copy(run.folder / "rng_state_0.pth", run.folder / "rng_state.pth")
    assert restore(run).missing == ("rng",)
    assert "rng_state_1.pth is of another save than rng_state.pth" in caplog.text
    (run.folder / "rng_state_0.pth").unlink()
    (run.folder / "rng_state_1.pth").unlink()
    assert "rng" in restore(run).exact

    run = folder("acc_fsdp2_w2")
    file = run.folder / "random_states_1.pkl"
    torch.save(torch.load(file, weights_only=False) | {"step": 5}, file)
    assert restore(run).missing == ("rng",)
    assert "files of ranks have the steps [0, 5]" in caplog.text


@pytest.mark.parametrize(
    ("case", "name", "other"),
    [
        ("acc_plain_w1", "optimizer.bin", "optimizer.pt"),
        ("acc_plain_w1", "scheduler.bin", "scheduler.pt"),
        ("acc_fsdp2_w2", "optimizer_0", "optimizer.bin"),
        ("acc_fsdp2_w2", "pytorch_model_fsdp_0", "pytorch_model_fsdp.bin"),
    ],
)
def test_files_of_two_saves_are_named(folder: Callable[[str], SavedRun], case: str, name: str, other: str) -> None:
    """Accelerate does not remove those of an earlier save with other settings, which would be loaded instead."""
    run = folder(case)
    torch.save({}, run.folder / other)
    with pytest.raises(FormatError, match=rf"{name} and {other} are of two saves"):
        restore(run)


def test_weights_of_two_saves_are_named(folder: Callable[[str], SavedRun]) -> None:
    """transformers does not remove the file of all tensors when it writes several, and then loads it."""
    run = folder("trainer_plain_w1")
    names = dict.fromkeys(run.weights, "model-00001-of-00001.safetensors")
    shutil.copy(run.folder / "model.safetensors", run.folder / "model-00001-of-00001.safetensors")
    (run.folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    with pytest.raises(FormatError, match=r"model\.safetensors and model\.safetensors\.index\.json are of two saves"):
        rankless.open(run.folder)
    model_only = run.folder.parent / "model"
    model_only.mkdir()
    for file in run.folder.glob("model*"):
        shutil.copy(file, model_only)
    with pytest.raises(FormatError, match="are of two saves"):
        rankless.open(model_only)
    (run.folder / "model.safetensors").unlink()
    assert restore(run).exact[:2] == ("model", "optimizer")


def older_optimizer(run: SavedRun) -> None:
    state = torch.load(run.folder / "optimizer.pt")
    for states in state["state"].values():
        states["step"] -= 1
    torch.save(state, run.folder / "optimizer.pt")


def newer_scheduler(run: SavedRun) -> None:
    state = torch.load(run.folder / "scheduler.pt")
    torch.save(state | {"last_epoch": state["last_epoch"] + 1}, run.folder / "scheduler.pt")


def older_trainer(run: SavedRun) -> None:
    state = json.loads((run.folder / "trainer_state.json").read_text())
    (run.folder / "trainer_state.json").write_text(json.dumps(state | {"global_step": 2}))


def older_rank_file(run: SavedRun, *, most: int = 100) -> None:
    """Write the step 2 into one of the two files of the optimizer's ranks, for all parameters in it or for some."""
    reader = rankless.open(run.folder)._reader
    for name in reader.groups["optimizer"]:
        if name.endswith("/step") and most:
            (extent,) = reader.find_extents("optimizer", name, 0, 4)
            place = extent.file.chunks[0].location  # type: ignore[union-attr]
            if place.file.name == "__1_0.distcp":
                most -= 1
                with place.file.open("r+b") as file:
                    file.seek(place.offset)
                    file.write(struct.pack("<f", 2))


@pytest.mark.parametrize(
    ("case", "mix", "expected"),
    [
        ("trainer_plain_w1", older_optimizer, "optimizer.pt of step 2, scheduler.pt of step 3, trainer_state"),
        ("trainer_plain_w1", newer_scheduler, "optimizer.pt of step 3, scheduler.pt of step 4, trainer_state"),
        ("trainer_plain_w1", older_trainer, "scheduler.pt of step 3, trainer_state.json of step 2"),
        ("trainer_ds_z2_w2", newer_scheduler, "optim_states.pt of step 3, scheduler.pt of step 4"),
        ("trainer_fsdp2_w2", older_rank_file, "optimizer_0/__1_0.distcp of step 2"),
        ("acc_fsdp2_w2", older_rank_file, "optimizer_0/__1_0.distcp of step 2"),
    ],
)
@pytest.mark.filterwarnings("default")
def test_files_of_another_step_are_named(
    folder: Callable[[str], SavedRun], case: str, mix: Callable[[SavedRun], None], expected: str
) -> None:
    run = folder(case)
    mix(run)
    with pytest.warns(UserWarning, match=f"files of different saves: .*{expected}"):
        rankless.open(run.folder)


@pytest.mark.filterwarnings("default")
def test_whatever_reads_a_folder_says_that_its_files_are_of_different_saves(folder: Callable[[str], SavedRun]) -> None:
    run = folder("trainer_plain_w1")
    older_optimizer(run)
    with pytest.warns(UserWarning, match="files of different saves"):
        restore(run)
    with pytest.warns(UserWarning, match="files of different saves"):
        rankless.convert(run.folder, run.folder.parent / "converted", to="native")
    assert "files of different saves" in " ".join(invoke_json("show", run.folder)["notes"])
    assert "files of different saves" in " ".join(invoke_json("verify", run.folder)["checkpoints"][0]["notes"])


def skip_a_step(run: SavedRun) -> None:
    older_optimizer(run)
    torch.save({"scale": 1.0, "growth_factor": 2.0}, run.folder / "scaler.pt")


def plateau(run: SavedRun) -> None:
    torch.save({"last_epoch": 1, "num_bad_epochs": 0, "best": 1.0}, run.folder / "scheduler.pt")


def unfreeze(run: SavedRun) -> None:
    older_rank_file(run, most=3)


@pytest.mark.parametrize(
    ("case", "change"),
    [("trainer_plain_w1", skip_a_step), ("trainer_plain_w1", plateau), ("trainer_fsdp2_w2", unfreeze)],
)
@pytest.mark.filterwarnings("error:.*files of different saves")
def test_steps_may_differ_within_one_save(
    folder: Callable[[str], SavedRun], case: str, change: Callable[[SavedRun], None]
) -> None:
    """A loss scaler skips steps, some schedulers count evaluations, and parameters may be trained later than others."""
    run = folder(case)
    change(run)
    rankless.open(run.folder)


def test_a_step_that_is_too_large_is_left_out(folder: Callable[[str], SavedRun], tmp_path: Path) -> None:
    run = folder("trainer_plain_w1")
    (run.folder / "trainer_state.json").write_text(json.dumps({"global_step": 2**63}))
    rankless.convert(run.folder, tmp_path / "native", to="native")
    content = rankless.open(tmp_path / "native").values["user_content"]
    assert content["trainer_state"]["global_step"] == 2**63


@pytest.mark.parametrize("kind", UNSAFE_OBJECTS)
@pytest.mark.parametrize(
    "name",
    ["custom_checkpoint_0.pkl", "random_states_0.pkl", "scheduler.bin", "optimizer.bin", "sampler.bin", "scaler.pt"],
)
def test_pickles_run_nothing_and_prevent_only_what_is_in_them(
    folder: Callable[[str], SavedRun], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, kind: str
) -> None:
    monkeypatch.chdir(tmp_path)
    run = folder("acc_plain_w1")
    torch.save({"param_groups": [UNSAFE_OBJECTS[kind]]}, run.folder / name)
    model = run.make_model()
    assert "model" in rankless.restore(run.folder, model=model).exact
    assert all(equal_bits(value, run.weights[key]) for key, value in model.state_dict().items())
    if name == "optimizer.bin":
        with pytest.raises(UnsafePickleError, match=r"optimizer\.bin"):
            restore(run)
    elif name == "scheduler.bin":
        optimizer = run.make_optimizer(model)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        with pytest.raises(UnsafePickleError, match=r"scheduler\.bin"):
            rankless.restore(run.folder, model=model, optimizer=optimizer, scheduler=scheduler)
    else:
        with pytest.raises(FormatError, match=name.replace(".", r"\.")):
            _ = rankless.open(run.folder).values
    assert not (tmp_path / MARK_FILE).exists()


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.bin", "scheduler.bin", "random_states_0.pkl"])
def test_links_out_of_the_folder_are_refused(folder: Callable[[str], SavedRun], tmp_path: Path, name: str) -> None:
    run = folder("acc_plain_w1")
    (run.folder / name).rename(tmp_path / "outside")
    (run.folder / name).symlink_to(tmp_path / "outside")
    with pytest.raises(UnsafeNameError):
        rankless.open(run.folder)


@pytest.mark.parametrize("name", ["optimizer_0", "pytorch_model_fsdp_0"])
def test_folders_that_are_links_out_of_the_folder_are_refused(
    folder: Callable[[str], SavedRun], tmp_path: Path, name: str
) -> None:
    run = folder("acc_fsdp2_w2")
    (run.folder / name).rename(tmp_path / "outside")
    (run.folder / name).symlink_to(tmp_path / "outside")
    with pytest.raises(UnsafeNameError):
        rankless.open(run.folder)


@pytest.mark.parametrize("name", ["random_states_1.pkl", "pytorch_model_1.bin", "scheduler_1.bin", "dl_state_dict.bin"])
def test_a_name_that_is_no_file_is_not_opened(folder: Callable[[str], SavedRun], name: str) -> None:
    run = folder("acc_plain_w1")
    os.mkfifo(run.folder / name)
    assert restore(run).exact[:2] == ("model", "optimizer") if name != "dl_state_dict.bin" else True


def test_many_ranks_are_not_made_from_a_name(folder: Callable[[str], SavedRun]) -> None:
    run = folder("acc_plain_w1")
    shutil.copy(run.folder / "random_states_0.pkl", run.folder / "random_states_999999999.pkl")
    assert restore(run).missing == ("rng",)


@pytest.mark.parametrize("tag", ["../other", "/", "", "missing"])
def test_a_forged_name_of_a_folder_of_deepspeed_is_not_followed(folder: Callable[[str], SavedRun], tag: str) -> None:
    run = folder("acc_plain_w1")
    (run.folder / "latest").write_text(tag)
    assert restore(run).exact[:2] == ("model", "optimizer")


def test_shards_of_single_ranks_are_refused(folder: Callable[[str], SavedRun]) -> None:
    run = folder("acc_fsdp2_w2")
    shutil.rmtree(run.folder / "pytorch_model_fsdp_0")
    torch.save({"_flat_param": torch.ones(3)}, run.folder / "pytorch_model_fsdp_rank0.bin")
    with pytest.raises(FormatError, match=r"pytorch_model_fsdp_rank0\.bin.*SHARDED_STATE_DICT or FULL_STATE_DICT"):
        restore(run)


def test_weights_with_the_state_of_a_trainer_are_a_hugging_face_folder(folder: Callable[[str], SavedRun]) -> None:
    run = folder("trainer_plain_w1")
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        (run.folder / name).unlink()
    assert rankless.open(run.folder).format == "huggingface"


def test_files_with_common_names_do_not_change_a_format(tmp_path: Path) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth", "scaler.pt"):
        torch.save({"a": 1}, tmp_path / name)
    assert rankless.open(tmp_path).format == "huggingface"


def test_a_checkpoint_of_rankless_stays_one(tmp_path: Path) -> None:
    rankless.save_checkpoint(tmp_path, "a", torch.nn.Linear(2, 2))
    torch.save({}, tmp_path / "a/random_states_0.pkl")
    assert rankless.open(tmp_path / "a").format == "rankless"


def upload(folder: Path, place: ObjectPath) -> None:
    for file in folder.rglob("*"):
        if file.is_file():
            path = place / str(file.relative_to(folder))
            path.store.replace_small(path, file.read_bytes())


@pytest.mark.parametrize("case", CASES)
def test_folders_are_read_from_an_object_store(intact: Path, case: str) -> None:
    fake, run = FakeS3(), SavedRun(intact, case)
    with fake.connected():
        place = fake.store_at("http://fake", retry_seconds=1.0).path(f"{BUCKET}/run/checkpoint-3")
        upload(run.folder, place)
        model = run.make_model()
        result = rankless.restore(place, model=model, optimizer=run.make_optimizer(model))
    assert result.exact[:2] == ("model", "optimizer")
    assert all(equal_bits(value, run.weights[name]) for name, value in model.state_dict().items())


def test_opening_reads_the_names_of_a_folder_a_few_times(intact: Path) -> None:
    with mock.patch.object(posix, "list_names", wraps=posix.list_names) as listed:
        rankless.open(intact / "trainer_plain_w1/ckpt")
    assert listed.call_count <= 4


class TestFoldersWithoutTheStatesOfGenerators:
    """``save_state`` writes them last, and users remove them: the folder is the same without."""

    @pytest.mark.parametrize("case", [case for case in CASES if case.startswith("acc")])
    def test_all_else_is_restored(self, folder: Callable[[str], SavedRun], case: str) -> None:
        run = folder(case)
        before = rankless.open(run.folder)
        for file in run.folder.glob("random_states_*.pkl"):
            file.unlink()
        opened = rankless.open(run.folder)
        assert opened.format == before.format
        assert [key for key in before.keys() if not key.startswith("ranks/")] == list(opened.keys())  # noqa: SIM118
        assert {"model", "optimizer"} <= set(restore(run, rng=False).exact)
        with pytest.warns(UserWarning, match="rng"):
            restore(run)

    @pytest.mark.parametrize("kept", ["optimizer.bin", "scheduler.bin", "custom_checkpoint_0.pkl"])
    def test_one_of_the_other_files_is_enough(self, folder: Callable[[str], SavedRun], kept: str) -> None:
        run = folder("acc_plain_w1")
        for file in run.folder.iterdir():
            if file.name not in {kept, "model.safetensors"}:
                file.unlink()
        assert rankless.open(run.folder).format == "accelerate"

    def test_states_of_some_ranks_are_not_restored(self, folder: Callable[[str], SavedRun]) -> None:
        run = folder("acc_fsdp2_w2")
        (run.folder / "random_states_0.pkl").unlink()
        with pytest.warns(UserWarning, match="rng"):
            restore(run)
        assert {"model", "optimizer"} <= set(restore(run, rng=False).exact)


@pytest.mark.parametrize("case", ["acc_plain_w1", "trainer_fsdp2_w2"])
def test_keys_that_would_have_no_effect_are_refused(
    folder: Callable[[str], SavedRun], tmp_path: Path, case: str
) -> None:
    """An optimizer that was to be skipped would be converted."""
    run = folder(case)
    with pytest.raises(InvalidArgumentError, match="keys: optimizer would have no effect"):
        rankless.convert(run.folder, tmp_path / "out", to="native", keys={"optimizer": "skip"})
    assert not (tmp_path / "out").exists()
