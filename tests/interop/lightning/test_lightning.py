"""Tests Lightning's Trainer with holdfast's strategies: unchanged callbacks, resumed on other devices and layouts."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import holdfast
from holdfast.errors import HoldfastError, StorageError
from tests.helpers.pool import Ranks

lightning = pytest.importorskip("lightning")
from lightning.pytorch import LightningModule, Trainer  # noqa: E402
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint  # noqa: E402
from lightning.pytorch.plugins.environments import LightningEnvironment  # noqa: E402

import holdfast.lightning as ours  # noqa: E402
from holdfast.lightning.checkpoints import LightningCheckpoints  # noqa: E402


class Module(LightningModule):
    """A model whose state tells the step; its data is the same however many ranks there are."""

    def __init__(self, kind: str = "AdamW", layout: str = "plain", **hparams: Any) -> None:
        super().__init__()
        self.save_hyperparameters(hparams)
        self.kind, self.layout = kind, layout
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(4, 7, bias=False), nn.BatchNorm1d(7), nn.ReLU(), nn.Linear(7, 3))

    def configure_model(self) -> None:
        if self.layout == "fsdp2" and not hasattr(self.net[0].weight, "placements"):
            from torch.distributed.fsdp import fully_shard

            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        loss = self.net(batch[0]).square().mean()
        self.log("loss", loss, sync_dist=True)
        return loss

    def test_step(self, batch: Any, batch_idx: int) -> None:  # noqa: ARG002 - Lightning names it
        self.log("test", self.net(batch[0]).square().mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = getattr(torch.optim, self.kind)(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2)]


def data() -> DataLoader:
    torch.manual_seed(2)
    return DataLoader(TensorDataset(torch.randn(8, 4).repeat(8, 1)), batch_size=8)


@contextlib.contextmanager
def environment() -> Iterator[None]:
    rank, size = dist.get_rank(), dist.get_world_size()
    known = {"LOCAL_RANK": rank, "NODE_RANK": 0, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}
    with mock.patch.dict(os.environ, {key: str(value) for key, value in known.items()}):
        yield


def strategy(layout: str, **options: Any) -> Any:
    if layout == "plain":
        return ours.SingleDeviceStrategy(device=torch.device("cpu"), **options)
    if layout == "ddp":
        return ours.DDPStrategy(**options)
    if layout == "fsdp1":
        return ours.FSDPStrategy(state_dict_type="sharded", **options)
    return ours.ModelParallelStrategy(data_parallel_size=dist.get_world_size(), tensor_parallel_size=1, **options)


def trainer(folder: str, layout: str, steps: int, callbacks: list[Callback], **options: Any) -> Trainer:
    return Trainer(
        accelerator="cpu",
        devices=1 if layout == "plain" else dist.get_world_size(),
        strategy=strategy(layout, **options),
        plugins=[LightningEnvironment()],
        max_steps=steps,
        default_root_dir=folder,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=bool(callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )


def fit(
    folder: str, layout: str, steps: int, ckpt_path: str | None = None, kind: str = "AdamW", **options: Any
) -> dict[str, torch.Tensor]:
    """Train to a step; returns the whole state."""
    callback = ModelCheckpoint(folder, save_top_k=-1, every_n_train_steps=2, save_last=options.pop("save_last", None))
    module = Module(kind, "fsdp2" if layout == "fsdp2" else "plain")
    with environment():
        run = trainer(folder, layout, steps, [callback], **options)
        run.fit(module, data(), ckpt_path=ckpt_path)
        run.save_checkpoint(f"{folder}/end.ckpt")
        run.strategy._checkpoints.finish_pending()
    return state(Path(folder, "end.ckpt"))


def state(path: Path) -> dict[str, torch.Tensor]:
    found = holdfast.open(path)
    return {name: found[name] for name in found if not name.startswith("ranks/")}


def assert_close(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        torch.testing.assert_close(tensor, right[name], rtol=1e-5, atol=1e-6, msg=name)


LAYOUTS = [("plain", 1), ("ddp", 2), ("fsdp1", 2), ("fsdp2", 2)]


@pytest.fixture(scope="module")
def oracle(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, torch.Tensor]]:
    """What a run without a break, on one rank, comes to."""
    return {
        kind: ranks(1, fit, str(tmp_path_factory.mktemp(kind)), "plain", 6, None, kind)[0] for kind in ("AdamW", "SGD")
    }


@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
@pytest.mark.parametrize(("layout", "n"), LAYOUTS)
def test_a_run_goes_on_in_any_layout_and_number(
    ranks: Ranks, tmp_path: Path, oracle: dict[str, Any], layout: str, n: int, kind: str
) -> None:
    ranks(n, fit, str(tmp_path / "a"), layout, 4, None, kind)
    saved = tmp_path / "a/epoch=0-step=4.ckpt"
    assert holdfast.open(saved).values["user_content"]["global_step"] == 4
    for number, (other, m) in enumerate([*LAYOUTS, ("fsdp2", 4), ("ddp", 1)]):
        found = ranks(m, fit, str(tmp_path / f"b{number}"), other, 6, str(saved), kind)[0]
        assert_close(found, oracle[kind])


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


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
    theirs = mock.patch("tests.interop.lightning.test_lightning.strategy", return_value=lightnings(layout))
    with environment(), theirs if options is None else contextlib.nullcontext():
        run = trainer(folder, layout, steps, [callback], **options or {})
        run.fit(Module(layout=layout), data(), ckpt_path=ckpt_path)
        assert run.global_step == steps
        if "monitor" in how:
            run.test(dataloaders=data(), ckpt_path="best")
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
            found = ranks(n, fit_with, str(tmp_path / name), layout, steps, how, ckpt_path, chosen)
            best.add((steps, *{Path(path).name for path in found}))
        assert checkpoints(tmp_path / "ours") == checkpoints(tmp_path / "theirs")
        assert len(checkpoints(tmp_path / "ours")) == 3
    assert len(best) == 2


def test_last_may_be_a_link(ranks: Ranks, tmp_path: Path) -> None:
    how = {"save_last": "link", "save_top_k": 1}
    for options in ({}, {"async_save": True}):
        folder = tmp_path / str(len(options))
        ranks(2, fit_with, str(folder), "ddp", 3, how, None, options)
        assert checkpoints(folder) == ["epoch=0-step=3.ckpt", "last.ckpt"]
        assert (folder / "last.ckpt").is_symlink()
        ranks(2, fit_with, str(folder), "ddp", 5, how, "last", options)
        assert checkpoints(folder) == ["epoch=0-step=5.ckpt", "last.ckpt"]


def watched(folder: str) -> list[int]:
    """How many complete checkpoints there were at each step of an asynchronous run that keeps one."""
    seen = []

    class Watch(Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            seen.append(len(holdfast.list_checkpoints(folder)))

    from tests.distributed.test_async_saves import slow

    callback = ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=1)
    with environment(), slow(0.3):
        run = trainer(folder, "ddp", 4, [callback, Watch()], async_save=True)
        run.fit(Module(), data())
    return seen


def test_nothing_is_removed_before_what_replaces_it_is_durable(ranks: Ranks, tmp_path: Path) -> None:
    """Lightning's own asynchronous plugin leaves a moment without any checkpoint (its issue #14035)."""
    for seen in ranks(2, watched, str(tmp_path)):
        assert min(seen[2:]) >= 1
    assert checkpoints(tmp_path) == ["epoch=0-step=4.ckpt"]


def interrupted(folder: str) -> dict[str, Any]:
    class Stop(Callback):
        def on_train_batch_end(self, run: Trainer, *_: Any) -> None:
            if run.global_step == 3:
                raise RuntimeError("out of luck")

    class Keep(OnExceptionCheckpoint):
        def teardown(self, *_: Any, **__: Any) -> None:
            """What Lightning removes when the trainer ends is kept here, as when the process dies."""

    with environment():
        run = trainer(folder, "ddp", 5, [Keep(folder), Stop()], async_save=True)
        with pytest.raises(RuntimeError, match="out of luck"):
            run.fit(Module(), data())
        again = trainer(folder, "ddp", 5, [OnExceptionCheckpoint(folder)], async_save=True)
        again.fit(Module(), data())
    return {"resumed": again.global_step}


def test_an_exception_leaves_a_checkpoint_that_the_next_fit_takes(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2, interrupted, str(tmp_path)) == [{"resumed": 5}] * 2
    assert not (tmp_path / "on_exception.ckpt").exists()


def weights_only(folder: str) -> bool:
    hparams = {"where": Path("/data"), "sizes": (1, 2), "names": {"a": None}, "rate": 1e-3, "when": {1, 2}}
    with environment():
        run = trainer(folder, "ddp", 2, [ModelCheckpoint(folder, save_weights_only=True, every_n_train_steps=2)])
        module = Module(**hparams)
        run.fit(module, data())
        found = holdfast.open(f"{folder}/epoch=0-step=2.ckpt")
        assert not [name for name in found if name.startswith("optimizer/")]
        assert found.values["user_content"]["hyper_parameters"].items() >= hparams.items()
        other = Module()
        trained = [p.clone() for p in module.parameters()]
        run = trainer(folder, "ddp", 4, [])
        with pytest.raises((KeyError, HoldfastError)):
            run.fit(Module(), data(), ckpt_path=f"{folder}/epoch=0-step=2.ckpt")
    holdfast.load_checkpoint(f"{folder}/epoch=0-step=2.ckpt", model=other)
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
        assert checkpoints(saved) == [".metadata", "__0_0.distcp", "__1_0.distcp", "meta.pt"]
    ranks(2, fit_with, str(tmp_path / "theirs"), layout, 4, {}, str(saved), None)
    theirs = str(tmp_path / "theirs/epoch=0-step=4.ckpt")
    for number, options in enumerate([{}, {"checkpoint_format": "lightning"}]):
        ranks(2, fit_with, str(tmp_path / str(number)), layout, 5, {}, theirs, options)
    assert not [path for path in tmp_path.rglob(".*") if path.is_dir()]


def failing(folder: str) -> list[str]:
    """A save in Lightning's format that one rank cannot write, over one that there is."""
    from lightning.pytorch import strategies

    with environment():
        run = trainer(folder, "fsdp2", 1, [], checkpoint_format="lightning")
        run.fit(Module(layout="fsdp2"), data())
        run.save_checkpoint(f"{folder}/a.ckpt")
        before = state_of(Path(folder))
        broken = mock.patch.object(
            strategies.ModelParallelStrategy, "save_checkpoint", side_effect=OSError(28, "no space left")
        )
        with broken, pytest.raises(HoldfastError, match="no space left"):
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
        found = ranks(n, fit, str(tmp_path / str(number)), layout, 6, saved)[0]
        assert_close(found, oracle["AdamW"])


def in_the_way(folder: str) -> None:
    refused = mock.patch(
        "holdfast.lightning.checkpoints.rename_path", side_effect=StorageError(13, "could not rename it")
    )
    with refused:
        LightningCheckpoints("native", async_save=False).save(
            Path(folder, "a.ckpt"), {"w": torch.ones(2)}, None, {}, None
        )


def test_what_cannot_be_put_aside_is_an_error_of_all_ranks(ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "a.ckpt").write_bytes(b"Lightning's")
    for error in ranks.outcomes(2, in_the_way, str(tmp_path)):
        assert isinstance(error, StorageError)
        assert "could not rename it" in str(error)
    assert [path.name for path in tmp_path.iterdir()] == ["a.ckpt"]


def state_of(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_a_failed_save_leaves_what_was_there(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2, failing, str(tmp_path)) == [["a.ckpt"]] * 2
