"""Tests Lightning's Trainer with rankless's strategies: unchanged callbacks, resumed on other devices and layouts."""

import contextlib
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint

import rankless
from rankless.errors import InvalidArgumentError, RanklessError, StorageError
from rankless.lightning.checkpoints import LightningCheckpoints
from tests.helpers.failing_saves import one_failing_save
from tests.helpers.lightning_trainer import Module, fit_module, make_data, make_trainer, set_environment
from tests.helpers.pool import Ranks
from tests.helpers.run_directories import list_names


def assert_close(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        torch.testing.assert_close(tensor, right[name], rtol=1e-5, atol=1e-6, msg=name)


LAYOUTS = [("plain", 1), ("ddp", 2), ("fsdp1", 2), ("fsdp2", 2)]


@pytest.fixture(scope="module")
def oracle(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, torch.Tensor]]:
    """What a run without a break, on one rank, comes to."""
    return {
        kind: ranks(1, fit_module, str(tmp_path_factory.mktemp(kind)), "plain", 6, None, kind)[0]
        for kind in ("AdamW", "SGD")
    }


@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
@pytest.mark.parametrize(("layout", "n"), LAYOUTS)
def test_a_run_goes_on_in_any_layout_and_number(
    ranks: Ranks, tmp_path: Path, oracle: dict[str, Any], layout: str, n: int, kind: str
) -> None:
    ranks(n, fit_module, str(tmp_path / "a"), layout, 4, None, kind)
    saved = tmp_path / "a/epoch=0-step=4.ckpt"
    assert rankless.open(saved).values["user_content"]["global_step"] == 4
    for number, (other, m) in enumerate([*LAYOUTS, ("fsdp2", 4), ("ddp", 1)]):
        result = ranks(m, fit_module, str(tmp_path / f"b{number}"), other, 6, str(saved), kind)[0]
        assert_close(result, oracle[kind])


def lightnings(layout: str) -> Any:
    """Lightning's own strategy."""
    from lightning.pytorch import strategies

    if layout == "ddp":
        return strategies.DDPStrategy()
    return strategies.ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)


def fit_with(
    folder: str, layout: str, steps: int, how: dict[str, Any], ckpt_path: str | None, options: dict[str, Any] | None
) -> str:
    """Train with one ModelCheckpoint; returns its best path. Without ``options``: by Lightning's own strategy."""
    callback = ModelCheckpoint(folder, **{"every_n_train_steps": 1, **how})
    theirs = mock.patch("tests.helpers.lightning_trainer.make_strategy", return_value=lightnings(layout))
    with set_environment(), theirs if options is None else contextlib.nullcontext():
        run = make_trainer(folder, layout, steps, [callback], **options or {})
        run.fit(Module(layout=layout), make_data(), ckpt_path=ckpt_path)
        assert run.global_step == steps
        if "monitor" in how:
            run.test(dataloaders=make_data(), ckpt_path="best")
    return callback.best_model_path


@pytest.mark.parametrize("options", [{}, {"async_save": True}, {"checkpoint_format": "lightning"}])
@pytest.mark.parametrize(("layout", "n"), [("ddp", 2), ("fsdp2", 2)])
def test_the_best_are_kept_and_last_and_best_are_found_again(
    ranks: Ranks, tmp_path: Path, layout: str, n: int, options: dict[str, Any]
) -> None:
    how = {"monitor": "loss", "save_top_k": 2, "save_last": True}
    best = set()
    for steps, ckpt_path in [(4, None), (6, "last")]:
        for name, chosen in [("ours", options), ("theirs", None)]:
            results = ranks(n, fit_with, str(tmp_path / name), layout, steps, how, ckpt_path, chosen)
            best.add((steps, *{Path(path).name for path in results}))
        assert list_names(tmp_path / "ours") == list_names(tmp_path / "theirs")
        assert len(list_names(tmp_path / "ours")) == 3
    assert len(best) == 2
    if "checkpoint_format" not in options:  # the values that are monitored are the checkpoints' metrics
        kept = [info for info in rankless.list_checkpoints(tmp_path / "ours") if info.tag != "last.ckpt"]
        assert min(kept, key=lambda info: info.metrics["loss"]).tag in {name for _, name in best}


def test_last_may_be_a_link(ranks: Ranks, tmp_path: Path) -> None:
    how = {"save_last": "link", "save_top_k": 1}
    for options in ({}, {"async_save": True}):
        folder = tmp_path / str(len(options))
        ranks(2, fit_with, str(folder), "ddp", 3, how, None, options)
        assert list_names(folder) == ["epoch=0-step=3.ckpt", "last.ckpt"]
        assert (folder / "last.ckpt").is_symlink()
        ranks(2, fit_with, str(folder), "ddp", 5, how, "last", options)
        assert list_names(folder) == ["epoch=0-step=5.ckpt", "last.ckpt"]


class Freeze(Callback):
    """Freezes the first parameter."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        next(pl_module.parameters()).requires_grad_(requires_grad=False)


def fit_frozen(folder: str) -> None:
    callback = ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1)
    with set_environment(), mock.patch("rankless.save.folder_output._MIN_SHARED", 0):
        make_trainer(folder, "ddp", 2, [callback, Freeze()], frozen="apart").fit(Module(), make_data())


def test_frozen_parameters_in_files_of_their_own_are_shared(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, fit_frozen, str(tmp_path))
    files = list((tmp_path / "epoch=0-step=2.ckpt/model").glob("*.safetensors"))
    assert sorted(file.stat().st_nlink for file in files) == [1, 2]


def test_lightnings_format_has_no_files_for_frozen_parameters() -> None:
    from rankless.lightning import SingleDeviceStrategy

    with pytest.raises(InvalidArgumentError, match="frozen='apart' needs checkpoint_format='native'"):
        SingleDeviceStrategy("cpu", checkpoint_format="lightning", frozen="apart")


def watched(folder: str) -> list[int]:
    """How many complete checkpoints there were at each step of an asynchronous run that keeps one."""
    seen = []

    class Watch(Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            seen.append(len(rankless.list_checkpoints(folder)))

    from tests.helpers.slow_writes import slow_down_writes

    callback = ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=1)
    with set_environment(), slow_down_writes(0.3):
        run = make_trainer(folder, "ddp", 4, [callback, Watch()], async_save=True)
        run.fit(Module(), make_data())
    return seen


def test_nothing_is_removed_before_what_replaces_it_is_durable(ranks: Ranks, tmp_path: Path) -> None:
    """Lightning's own asynchronous plugin leaves a moment without any checkpoint (its issue #14035)."""
    for seen in ranks(2, watched, str(tmp_path)):
        assert min(seen[2:]) >= 1
    assert list_names(tmp_path) == ["epoch=0-step=4.ckpt"]


def interrupted(folder: str) -> dict[str, Any]:
    class Stop(Callback):
        def on_train_batch_end(self, run: Trainer, *_: Any) -> None:
            if run.global_step == 3:
                raise RuntimeError("out of luck")

    class Keep(OnExceptionCheckpoint):
        def teardown(self, *_: Any, **__: Any) -> None:
            """What Lightning removes when the trainer ends is kept here, as when the process dies."""

    with set_environment():
        run = make_trainer(folder, "ddp", 5, [Keep(folder), Stop()], async_save=True)
        with pytest.raises(RuntimeError, match="out of luck"):
            run.fit(Module(), make_data())
        again = make_trainer(folder, "ddp", 5, [OnExceptionCheckpoint(folder)], async_save=True)
        again.fit(Module(), make_data())
    return {"resumed": again.global_step}


def test_an_exception_leaves_a_checkpoint_that_the_next_fit_takes(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2, interrupted, str(tmp_path)) == [{"resumed": 5}] * 2
    assert not (tmp_path / "on_exception.ckpt").exists()


def weights_only(folder: str) -> bool:
    hparams = {"where": Path("/data"), "sizes": (1, 2), "names": {"a": None}, "rate": 1e-3, "when": {1, 2}}
    with set_environment():
        run = make_trainer(folder, "ddp", 2, [ModelCheckpoint(folder, save_weights_only=True, every_n_train_steps=2)])
        module = Module(**hparams)
        run.fit(module, make_data())
        checkpoint = rankless.open(f"{folder}/epoch=0-step=2.ckpt")
        assert not [name for name in checkpoint if name.startswith("optimizer/")]
        assert checkpoint.values["user_content"]["hyper_parameters"].items() >= hparams.items()
        other = Module()
        trained = [p.clone() for p in module.parameters()]
        run = make_trainer(folder, "ddp", 4, [])
        with pytest.raises((KeyError, RanklessError)):
            run.fit(Module(), make_data(), ckpt_path=f"{folder}/epoch=0-step=2.ckpt")
    rankless.load_checkpoint(f"{folder}/epoch=0-step=2.ckpt", model=other)
    return all(torch.equal(a, b) for a, b in zip(trained, other.parameters(), strict=True))


def test_weights_only_and_hyperparameters_of_any_plain_type(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2, weights_only, str(tmp_path)) == [True, True]


@pytest.mark.parametrize(("layout", "file"), [("ddp", "a file"), ("fsdp2", "a folder")])
def test_lightnings_own_format_goes_both_ways(ranks: Ranks, tmp_path: Path, layout: str, file: str) -> None:
    options = {"checkpoint_format": "lightning"}
    ranks(2, fit_with, str(tmp_path / "ours"), layout, 2, {}, None, options)
    saved = tmp_path / "ours/epoch=0-step=2.ckpt"
    assert saved.is_file() == (file == "a file")
    if saved.is_dir():
        assert list_names(saved) == [".metadata", "__0_0.distcp", "__1_0.distcp", "meta.pt"]
    ranks(2, fit_with, str(tmp_path / "theirs"), layout, 4, {}, str(saved), None)
    theirs = str(tmp_path / "theirs/epoch=0-step=4.ckpt")
    for number, options in enumerate([{}, {"checkpoint_format": "lightning"}]):
        ranks(2, fit_with, str(tmp_path / str(number)), layout, 5, {}, theirs, options)
    records = {".history", ".0.rankless"}
    assert not [path for path in tmp_path.rglob(".*") if path.is_dir() and path.name not in records]


def failing(folder: str) -> list[str]:
    """A save in Lightning's format that one rank cannot write, over one that there is."""
    from lightning.pytorch import strategies

    with set_environment():
        run = make_trainer(folder, "fsdp2", 1, [], checkpoint_format="lightning")
        run.fit(Module(layout="fsdp2"), make_data())
        run.save_checkpoint(f"{folder}/a.ckpt")
        before = state_of(Path(folder))
        broken = mock.patch.object(
            strategies.ModelParallelStrategy, "save_checkpoint", side_effect=OSError(28, "no space left")
        )
        with broken, pytest.raises(RanklessError, match="no space left"):
            run.save_checkpoint(f"{folder}/a.ckpt")
        torch.distributed.barrier()  # rank 0 removes the draft when the others have heard of the failure
        assert state_of(Path(folder)) == before
    return [path.name for path in Path(folder).iterdir()]


@pytest.mark.parametrize("layout", ["ddp", "fsdp2"])
def test_a_run_of_lightnings_goes_on_in_its_folder(ranks: Ranks, tmp_path: Path, layout: str) -> None:
    """Its last checkpoint, a file or a folder, makes room for ours, when that is durable."""
    how = {"save_last": True}
    ranks(2, fit_with, str(tmp_path), layout, 2, how, None, None)
    assert not (tmp_path / "last.ckpt/manifest.json").exists()
    ranks(2, fit_with, str(tmp_path), layout, 4, how, "last", {"async_save": True})
    assert (tmp_path / "last.ckpt/manifest.json").exists()
    assert not list(tmp_path.glob("*.before.ckpt"))


@pytest.mark.parametrize("theirs", ["ddp", "fsdp2"])
def test_what_lightning_wrote_goes_on_in_any_strategy(
    ranks: Ranks, tmp_path: Path, oracle: dict[str, Any], theirs: str
) -> None:
    """Lightning's own strategies cannot read each other's."""
    ranks(2, fit_with, str(tmp_path / "theirs"), theirs, 4, {}, None, None)
    saved = str(tmp_path / "theirs/epoch=0-step=4.ckpt")
    for number, (layout, n) in enumerate([("plain", 1), ("ddp", 3), ("fsdp1", 2), ("fsdp2", 4)]):
        result = ranks(n, fit_module, str(tmp_path / str(number)), layout, 6, saved)[0]
        assert_close(result, oracle["AdamW"])


def in_the_way(folder: str) -> None:
    refused = mock.patch(
        "rankless.lightning.checkpoints.rename_noreplace", side_effect=StorageError(13, "could not rename it")
    )
    with refused:
        LightningCheckpoints("native", async_save=False).save(
            Path(folder, "a.ckpt"), {"w": torch.ones(2)}, None, {}, step=None
        )


def test_what_cannot_be_put_aside_is_an_error_of_all_ranks(ranks: Ranks, tmp_path: Path) -> None:
    torch.save({"pytorch-lightning_version": "2.5"}, tmp_path / "a.ckpt")
    for error in ranks.outcomes(2, in_the_way, str(tmp_path)):
        assert isinstance(error, StorageError)
        assert "could not rename it" in str(error)
    assert [path.name for path in tmp_path.iterdir()] == ["a.ckpt"]


def test_the_last_save_is_made_although_an_earlier_one_has_failed(tmp_path: Path) -> None:
    checkpoints = LightningCheckpoints("native", async_save=True)
    with one_failing_save(1):
        checkpoints.save(tmp_path / "a.ckpt", {"w": torch.ones(2)}, None, {}, step=1)
        with pytest.raises(StorageError, match="an error for a moment") as caught:
            checkpoints.save(tmp_path / "last.ckpt", {"w": torch.ones(2)}, None, {}, step=2)
    checkpoints.finish_pending()
    assert [info.tag for info in rankless.list_checkpoints(tmp_path)] == ["last.ckpt"]
    assert "last.ckpt has begun all the same" in "".join(caught.value.__notes__)


def test_rank_0_removes_nothing_and_raises_nothing_while_a_save_has_failed(tmp_path: Path) -> None:
    """The other ranks are not asked to remove, and go on: the next save or load raises the error on all of them."""
    checkpoints, removed = LightningCheckpoints("native", async_save=True), []
    with one_failing_save(1):
        checkpoints.save(tmp_path / "a.ckpt", {"w": torch.ones(2)}, None, {}, step=1)
        with suppress(StorageError):
            checkpoints._handle.wait()  # type: ignore[attr-defined]
        checkpoints.remove_when_durable(lambda: removed.append("b.ckpt"))
        assert not removed
        with pytest.raises(StorageError, match="an error for a moment"):
            checkpoints.finish_pending()
    checkpoints.finish_pending()
    assert removed == ["b.ckpt"]


def state_of(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_a_failed_save_leaves_what_was_there(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2, failing, str(tmp_path)) == [["a.ckpt"]] * 2
