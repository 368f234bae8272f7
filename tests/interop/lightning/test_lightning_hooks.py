"""Tests that a checkpoint dict changed by hooks and callbacks is saved and loaded, as by Lightning's own strategies."""

import copy
import io
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch import strategies as theirs
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

import rankless
import rankless.lightning as ours
from rankless.errors import InvalidArgumentError, MismatchError
from rankless.view import Checkpoint
from tests.helpers.lightning_trainer import Module, make_data, make_strategy, make_trainer, set_environment
from tests.helpers.pool import Ranks
from tests.helpers.run_directories import list_names

Hook = Callable[[dict[str, Any]], None]

#: What the oracle saves and loads with, and what is tried.
STRATEGIES = {
    "theirs": lambda: theirs.SingleDeviceStrategy(torch.device("cpu")),
    "native": lambda: ours.SingleDeviceStrategy(torch.device("cpu")),
    "lightning": lambda: ours.SingleDeviceStrategy(torch.device("cpu"), checkpoint_format="lightning"),
}


class Hooked(Module):
    """A module with the hooks it is given. Its weights differ from run to run, so that nothing is right by itself."""

    def __init__(self, saving: Hook | None = None, loading: Hook | None = None, seed: int = 1, **options: Any) -> None:
        super().__init__(**options)
        torch.manual_seed(seed)
        for parameter in self.net.parameters():
            nn.init.normal_(parameter)
        self.saving, self.loading = saving, loading

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.saving is not None:
            self.saving(checkpoint)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.loading is not None:
            self.loading(checkpoint)


def run(folder: Path, kind: str, steps: int, callbacks: list[Callback] | None = None) -> Trainer:
    return Trainer(
        accelerator="cpu",
        devices=1,
        strategy=STRATEGIES[kind](),
        plugins=[LightningEnvironment()],
        max_steps=steps,
        default_root_dir=folder,
        callbacks=callbacks or [],
        logger=False,
        enable_checkpointing=any(isinstance(item, ModelCheckpoint) for item in callbacks or ()),
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )


def saved(folder: Path, kind: str, hook: Hook | None = None, steps: int = 2) -> Path:
    path = folder / f"{kind}.ckpt"
    trained = run(folder, kind, steps)
    trained.fit(Hooked(hook), make_data())
    trained.save_checkpoint(path)
    return path


def loaded(path: Path, kind: str, hook: Hook | None = None, steps: int = 2, **options: Any) -> dict[str, Any]:
    """All that a fit from a checkpoint has at the end, by name."""
    module = Hooked(loading=hook, seed=5)
    for name, value in options.items():
        setattr(module, name, value)
    resumed = run(path.parent, kind, steps)
    resumed.fit(module, make_data(), ckpt_path=str(path))
    optimizer = resumed.optimizers[0]
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    moments = {(names[id(p)], key): value for p, state in optimizer.state.items() for key, value in state.items()}
    return {**module.state_dict(), **moments, "lr": optimizer.param_groups[0]["lr"], "step": resumed.global_step}


def assert_equal(left: dict[Any, Any], right: dict[Any, Any]) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        torch.testing.assert_close(value, right[name], rtol=0, atol=0, msg=str(name))


def doubled(checkpoint: dict[str, Any]) -> None:
    checkpoint["state_dict"] = {name: value * 2 for name, value in checkpoint["state_dict"].items()}


def one_replaced(checkpoint: dict[str, Any]) -> None:
    checkpoint["state_dict"]["net.3.bias"] = torch.full((3,), 7.0)


def one_changed_in_place(checkpoint: dict[str, Any]) -> None:
    checkpoint["state_dict"]["net.3.bias"][1] = 9.0


def swapped(checkpoint: dict[str, Any]) -> None:
    state = checkpoint["state_dict"]
    state["net.1.weight"], state["net.1.bias"] = state.pop("net.1.bias"), state.pop("net.1.weight")


def only_looked_at(checkpoint: dict[str, Any]) -> None:
    assert {name: tuple(value.shape) for name, value in checkpoint["state_dict"].items()}["net.3.bias"] == (3,)
    assert "net.3.bias" in checkpoint["state_dict"]
    assert "net.9.bias" not in checkpoint["state_dict"]
    assert len(checkpoint["state_dict"]) == len(list(checkpoint["state_dict"]))


def other_dtype(checkpoint: dict[str, Any]) -> None:
    checkpoint["state_dict"]["net.3.bias"] = torch.tensor([0.5, 1.5, 2.5], dtype=torch.float64)


def no_optimizer(checkpoint: dict[str, Any]) -> None:
    checkpoint["optimizer_states"] = []


def other_rate(checkpoint: dict[str, Any]) -> None:
    checkpoint["optimizer_states"][0]["param_groups"][0]["lr"] = 0.25
    checkpoint["lr_schedulers"] = []


def no_moments(checkpoint: dict[str, Any]) -> None:
    for state in checkpoint["optimizer_states"][0]["state"].values():
        state["exp_avg"].zero_()


CHANGES = [doubled, one_replaced, swapped, only_looked_at, other_dtype, no_optimizer]


@pytest.mark.parametrize("kind", ["native", "lightning"])
@pytest.mark.parametrize("hook", CHANGES)
def test_what_a_hook_makes_of_it_is_saved(tmp_path: Path, kind: str, hook: Hook) -> None:
    expected = torch.load(saved(tmp_path, "theirs", hook), weights_only=False)
    path = saved(tmp_path, kind, hook)
    checkpoint = rankless.open(path)
    model = {name.removeprefix("model/"): checkpoint[name] for name in checkpoint if name.startswith("model/")}
    assert_equal(model, expected["state_dict"])
    assert_equal(loaded(path, kind), loaded(tmp_path / "theirs.ckpt", "theirs"))


@pytest.mark.parametrize("source", ["native", "theirs"])
@pytest.mark.parametrize("hook", [*CHANGES, one_changed_in_place, other_rate, no_moments])
def test_what_a_hook_makes_of_it_is_loaded(tmp_path: Path, source: str, hook: Hook) -> None:
    path, expected = saved(tmp_path, source), saved(tmp_path, "theirs")
    assert_equal(loaded(path, "native", hook, steps=3), loaded(expected, "theirs", hook, steps=3))


def assert_state_dicts(checkpoint: dict[str, Any]) -> None:
    """The states are of the types, and in the order, that torch gives them, and C code sees their entries."""
    state, (optimizer,) = checkpoint["state_dict"], checkpoint["optimizer_states"]
    expected = Module().state_dict()
    assert type(state) is OrderedDict
    assert list(state) == list(expected)
    assert state._metadata == expected._metadata
    assert type(optimizer) is dict
    assert sum(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(state)) == len(expected)
    assert sum(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(optimizer)) == 15
    file = io.BytesIO()
    torch.save(checkpoint["state_dict"], file)
    file.seek(0)
    assert torch.load(file, weights_only=True).keys() == expected.keys()


@pytest.mark.parametrize("kind", ["native", "lightning", "theirs"])
def test_hooks_get_the_state_dicts_of_torch(tmp_path: Path, kind: str) -> None:
    path = saved(tmp_path, kind, assert_state_dicts)
    loaded(path, "theirs" if kind == "theirs" else "native", assert_state_dicts)
    loaded(path, "native", assert_state_dicts)


class PlainHooks(Module):
    """A module that overrides no hook."""


class LoadHook(Callback):
    """A callback that gets the checkpoint."""

    def on_load_checkpoint(self, trainer: Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Look at nothing."""


@pytest.mark.parametrize(("callbacks", "is_read"), [([], False), ([LoadHook()], True)])
def test_the_states_are_read_only_if_a_hook_gets_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, callbacks: list[Callback], is_read: bool
) -> None:
    path = saved(tmp_path, "native")
    opened = []
    monkeypatch.setattr(Checkpoint, "__getitem__", spied(Checkpoint.__getitem__, opened))
    module = PlainHooks()
    resumed = run(tmp_path, "native", 2, callbacks)
    resumed.fit(module, make_data(), ckpt_path=str(path))
    assert bool(opened) == is_read
    assert_equal(dict(module.state_dict()), {name[6:]: value for name, value in read_model(path).items()})


def spied(function: Callable[..., Any], calls: list[Any]) -> Callable[..., Any]:
    """Return a function that also notes its arguments."""

    def call(self: Any, name: str) -> Any:
        calls.append(name)
        return function(self, name)

    return call


def read_model(path: Path) -> dict[str, torch.Tensor]:
    checkpoint = rankless.open(path)
    return {name: checkpoint[name] for name in checkpoint if name.startswith("model/")}


def merged(checkpoint: dict[str, Any]) -> None:
    checkpoint["state_dict"] |= {"net.3.bias": torch.full((3,), 7.0)}


def mapped(checkpoint: dict[str, Any]) -> None:
    checkpoint["state_dict"] = tree_map_only(torch.Tensor, lambda value: value * 2, checkpoint["state_dict"])
    checkpoint["optimizer_states"] = tree_map_only(
        torch.Tensor, lambda value: value * 3, checkpoint["optimizer_states"]
    )


def by_position(checkpoint: dict[str, Any]) -> None:
    module = Module()
    values = list(checkpoint["state_dict"].values())
    checkpoint["state_dict"] = dict(zip(module.state_dict(), values, strict=True))


def copied(checkpoint: dict[str, Any]) -> None:
    other = copy.deepcopy(checkpoint)
    checkpoint.clear()
    checkpoint.update(other)


def moved_to_another_key(checkpoint: dict[str, Any]) -> None:
    checkpoint["kept"] = [checkpoint["optimizer_states"]]


WHOLE_CHANGES = [merged, mapped, by_position, copied, moved_to_another_key]


@pytest.mark.parametrize("hook", WHOLE_CHANGES)
@pytest.mark.parametrize("when", ["saving", "loading"])
def test_what_torch_and_python_do_to_state_dicts_has_lightnings_effect(tmp_path: Path, when: str, hook: Hook) -> None:
    saving, loading = (hook, None) if when == "saving" else (None, hook)
    expected = loaded(saved(tmp_path, "theirs", saving), "theirs", loading, steps=3)
    assert_equal(loaded(saved(tmp_path, "native", saving), "native", loading, steps=3), expected)
    assert_equal(loaded(tmp_path / "theirs.ckpt", "native", loading, steps=3), expected)


def one_group_more(checkpoint: dict[str, Any]) -> None:
    groups = checkpoint["optimizer_states"][0]["param_groups"]
    groups.append({**groups[0], "params": []})


@pytest.mark.parametrize("kind", ["native", "theirs"])
def test_a_parameter_group_too_many_is_refused(tmp_path: Path, kind: str) -> None:
    with pytest.raises(MismatchError, match="2 parameter groups, and the optimizer 1"):
        loaded(saved(tmp_path, kind), "native", one_group_more)


def no_states_at_all(checkpoint: dict[str, Any]) -> None:
    del checkpoint["optimizer_states"]


@pytest.mark.parametrize("kind", ["native", "theirs"])
def test_without_the_states_of_optimizers_there_is_nothing_to_resume(tmp_path: Path, kind: str) -> None:
    path = saved(tmp_path, kind, no_states_at_all)
    with pytest.raises(KeyError, match="contains only the model"):
        loaded(path, "native")


def without_head(checkpoint: dict[str, Any]) -> None:
    for name in [name for name in checkpoint["state_dict"] if name.startswith("net.3")]:
        checkpoint["state_dict"].pop(name)


def more(checkpoint: dict[str, Any]) -> None:
    checkpoint["state_dict"]["teacher.weight"] = torch.ones(2)


@pytest.mark.parametrize("hook", [without_head, more])
@pytest.mark.parametrize("where", ["saving", "loading"])
def test_names_must_match_unless_the_module_says_otherwise(tmp_path: Path, hook: Hook, where: str) -> None:
    hooks = {"saving": (hook, None), "loading": (None, hook)}[where]
    expected, path = saved(tmp_path, "theirs", hooks[0]), saved(tmp_path, "native", hooks[0])
    with pytest.raises(RuntimeError, match=r"Missing|Unexpected"):
        loaded(expected, "theirs", hooks[1])
    with pytest.raises(MismatchError, match=r"net\.3|teacher"):
        loaded(path, "native", hooks[1])
    free = {"strict_loading": False}
    assert_equal(loaded(path, "native", hooks[1], **free), loaded(expected, "theirs", hooks[1], **free))


def test_a_frozen_teacher_is_dropped_and_put_back(tmp_path: Path) -> None:
    def put_back(checkpoint: dict[str, Any]) -> None:
        assert "net.3.bias" not in checkpoint["state_dict"]
        checkpoint["state_dict"]["net.3.weight"] = torch.ones(3, 7)
        checkpoint["state_dict"]["net.3.bias"] = torch.ones(3)

    path, expected = saved(tmp_path, "native", without_head), saved(tmp_path, "theirs", without_head)
    assert not [name for name in rankless.open(path) if name.startswith("model/net.3")]
    assert_equal(loaded(path, "native", put_back), loaded(expected, "theirs", put_back))


class Resizing(Hooked):
    """Takes in a buffer of any size, which no load in place could."""

    def __init__(self, saving: Hook | None = None, loading: Hook | None = None, seed: int = 1) -> None:
        super().__init__(saving, loading, seed)
        self.register_buffer("seen", torch.arange(3 if seed == 1 else 0))

    def load_state_dict(self, state_dict: Any, *args: Any, **options: Any) -> Any:
        self.seen = torch.empty_like(state_dict["seen"])
        return super().load_state_dict(state_dict, *args, **options)


@pytest.mark.parametrize("kind", ["native", "lightning"])
def test_a_module_that_loads_by_itself_does_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr("tests.interop.lightning.test_lightning_hooks.Hooked", Resizing)
    path, expected = saved(tmp_path, kind), saved(tmp_path, "theirs")
    actual = loaded(path, kind, steps=3)
    assert actual["seen"].tolist() == [0, 1, 2]
    assert_equal(actual, loaded(expected, "theirs", steps=3))


def other_state(checkpoint: dict[str, Any]) -> None:
    checkpoint["optimizer_states"][0]["state"] = {}


@pytest.mark.parametrize("hook", [other_state, other_rate, no_moments])
def test_other_optimizer_states_are_saved(tmp_path: Path, hook: Hook) -> None:
    """The optimizer that is trained is left as it is, unless the hook changes its tensors in place."""
    expected = loaded(saved(tmp_path, "theirs", hook), "theirs", steps=3)
    assert_equal(loaded(saved(tmp_path, "native", hook), "native", steps=3), expected)


def one_optimizer_more(checkpoint: dict[str, Any]) -> None:
    checkpoint["optimizer_states"] = checkpoint["optimizer_states"] * 2


def one_group_fewer(checkpoint: dict[str, Any]) -> None:
    checkpoint["optimizer_states"][0]["param_groups"].pop()


@pytest.mark.parametrize("hook", [one_optimizer_more, one_group_fewer])
def test_optimizer_states_that_do_not_fit_are_not_saved(tmp_path: Path, hook: Hook) -> None:
    with pytest.raises(InvalidArgumentError, match="optimizer_states"):
        saved(tmp_path, "native", hook)
    assert list_names(tmp_path) == []


def other_divided_state(checkpoint: dict[str, Any]) -> None:
    checkpoint["optimizer_states"] = copy.deepcopy(checkpoint["optimizer_states"])


def test_divided_optimizer_states_are_saved_unchanged_or_not_at_all(ranks: Ranks, tmp_path: Path) -> None:
    for error in ranks.outcomes(2, sharded, str(tmp_path), "fsdp2", other_divided_state, None):
        assert isinstance(error, InvalidArgumentError)
        assert "are divided among ranks" in str(error)


@pytest.mark.parametrize("kind", ["native", "lightning"])
def test_averages_are_saved_and_go_on(tmp_path: Path, kind: str) -> None:
    """The file has the average as the model, and the model that is trained beside it; both are resumed."""

    def fit(name: str, steps: int, ckpt_path: str | None = None) -> dict[str, torch.Tensor]:
        keep = ModelCheckpoint(tmp_path / name, filename="at", every_n_train_steps=2, save_top_k=-1)
        module = Hooked()
        run(tmp_path, name, steps, [EMAWeightAveraging(decay=0.5), keep]).fit(module, make_data(), ckpt_path=ckpt_path)
        return dict(module.state_dict())

    fit("theirs", 2)
    fit(kind, 2)
    expected = torch.load(tmp_path / "theirs/at.ckpt", weights_only=False)
    checkpoint = rankless.open(tmp_path / kind / "at.ckpt")
    model = {name.removeprefix("model/"): checkpoint[name] for name in checkpoint if name.startswith("model/")}
    assert_equal(model, expected["state_dict"])
    content = checkpoint.values["user_content"]
    assert_equal(content["current_model_state"], dict(expected["current_model_state"]))
    assert_equal(content["averaging_state"], expected["averaging_state"])
    resumed = fit(kind, 4, str(tmp_path / kind / "at.ckpt"))
    assert_equal(resumed, fit("theirs", 4, str(tmp_path / "theirs/at.ckpt")))
    assert not torch.equal(resumed["net.3.bias"], model["net.3.bias"])


@pytest.mark.parametrize("kind", ["native", "lightning"])
def test_hooks_come_when_lightnings_own_strategies_call_them(tmp_path: Path, kind: str) -> None:
    def order(name: str) -> list[str]:
        calls = []

        class Told(Hooked):
            def configure_optimizers(self) -> Any:
                calls.append("configure_optimizers")
                return super().configure_optimizers()

            def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
                calls.append(f"on_load_checkpoint {sorted(checkpoint)}")

            def on_fit_start(self) -> None:
                calls.append("on_fit_start")

        path = saved(tmp_path, name)
        run(tmp_path, name, 3).fit(Told(), make_data(), ckpt_path=str(path))
        return calls

    assert order(kind) == order("theirs")


def sharded(folder: str, layout: str, hook: Hook | None, loading: Hook | None) -> dict[str, torch.Tensor]:
    """Saved after two steps under one hook, and loaded under another one into a model of other values."""
    sharding = "fsdp2" if layout == "fsdp2" else "plain"
    with set_environment():
        first = make_trainer(folder, layout, 2, [])
        first.fit(Hooked(hook, layout=sharding), make_data())
        first.save_checkpoint(f"{folder}/a.ckpt")
        module = Hooked(loading=loading, layout=sharding, seed=5)
        again = make_trainer(folder, layout, 2, [])
        again.fit(module, make_data(), ckpt_path=f"{folder}/a.ckpt")
        again.save_checkpoint(f"{folder}/b.ckpt")
    return {name: rankless.open(f"{folder}/b.ckpt")[name] for name in rankless.open(f"{folder}/b.ckpt")}


@pytest.mark.parametrize("layout", ["ddp", "fsdp2"])
def test_hooks_see_sharded_models_and_what_they_make_of_them_counts(ranks: Ranks, tmp_path: Path, layout: str) -> None:
    plain = ranks(1, sharded, str(tmp_path / "plain"), "plain", doubled, one_replaced)[0]
    result = ranks(2, sharded, str(tmp_path / layout), layout, doubled, one_replaced)[0]
    assert result.keys() == plain.keys()
    for name, tensor in plain.items():
        if not name.startswith("ranks/"):
            torch.testing.assert_close(result[name], tensor, rtol=1e-5, atol=1e-6, msg=name)
    assert result["model/net.3.bias"].tolist() == [7.0] * 3


def test_fsdp1_loads_what_hooks_make_of_it(ranks: Ranks, tmp_path: Path) -> None:
    result = ranks(2, sharded, str(tmp_path), "fsdp1", None, one_replaced)[0]
    assert result["model/net.3.bias"].tolist() == [7.0] * 3


def refused(folder: str) -> None:
    with set_environment():
        run = make_trainer(folder, "fsdp1", 1, [])
        run.fit(Hooked(more), make_data())
        run.save_checkpoint(f"{folder}/a.ckpt")


def test_fsdp1_refuses_to_save_another_state_dict(ranks: Ranks, tmp_path: Path) -> None:
    for error in ranks.outcomes(2, refused, str(tmp_path)):
        assert isinstance(error, InvalidArgumentError)
        assert "ModelParallelStrategy" in str(error)
    assert list_names(tmp_path) == []


@pytest.mark.parametrize("states", [[], {}])
def test_weights_that_were_handed_on_without_states_are_trained_on(tmp_path: Path, states: Any) -> None:
    path = saved(tmp_path, "theirs")
    content = torch.load(path, weights_only=False)
    torch.save({**content, "optimizer_states": states, "lr_schedulers": []}, path)
    assert_equal(loaded(path, "native", steps=3), loaded(path, "theirs", steps=3))


@pytest.mark.parametrize(("address", "kind"), [("s3://bucket/run", "lightning"), ("memory://run", "native")])
def test_unsuitable_addresses_are_no_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str, kind: str
) -> None:
    monkeypatch.chdir(tmp_path)
    chosen = STRATEGIES[kind]()
    for call in (
        lambda: chosen.save_checkpoint({}, f"{address}/a.ckpt"),
        lambda: chosen.load_checkpoint(f"{address}/a.ckpt"),
        lambda: chosen.remove_checkpoint(f"{address}/a.ckpt"),
    ):
        with pytest.raises(InvalidArgumentError, match=r"object stores are not supported|no store that rankless knows"):
            call()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["native", "lightning"])
def test_a_folder_that_is_an_unsuitable_address_is_refused_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.chdir(tmp_path)
    trained = run(tmp_path, kind, 2, [ModelCheckpoint("memory://run", every_n_train_steps=1)])
    with pytest.raises(InvalidArgumentError, match=r"object stores are not supported|no store that rankless knows"):
        trained.fit(Hooked(), make_data())
    assert trained.global_step == 0
    assert list(tmp_path.iterdir()) == []


class Sized(Module):
    def __init__(self, width: int = 7, names: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.extra = nn.Linear(width, 1)
        self.seen: list[str] = list(names)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.seen += sorted(checkpoint["state_dict"])


@pytest.mark.parametrize("kind", ["native", "theirs"])
def test_modules_are_made_from_a_checkpoint(tmp_path: Path, kind: str) -> None:
    module, path = Sized(5, ("a",)), tmp_path / "a.ckpt"
    trained = run(tmp_path, kind, 2)
    trained.fit(module, make_data())
    trained.save_checkpoint(path)
    actual = ours.load_from_checkpoint(Sized, path)
    assert type(actual) is Sized
    assert_equal(actual.state_dict(), module.state_dict())
    assert actual.hparams == module.hparams
    assert actual.seen == ["a", *sorted(module.state_dict())]
    other = ours.load_from_checkpoint(Sized, path, names=("b",), map_location="cpu", strict=True)
    assert other.seen[0] == "b"
    with pytest.raises(RuntimeError, match="size mismatch"):
        ours.load_from_checkpoint(Sized, path, width=6)


def test_of_several_ranks_any_may_look(ranks: Ranks, tmp_path: Path) -> None:
    result = ranks(2, sharded, str(tmp_path), "ddp", None, looked_at_on_rank_0)[0]
    assert result["model/net.3.bias"].shape == (3,)


def on_rank_0(checkpoint: dict[str, Any]) -> None:
    if torch.distributed.get_rank() == 0:
        doubled(checkpoint)


def test_hooks_may_run_on_rank_0_alone(ranks: Ranks, tmp_path: Path) -> None:
    """Where ranks hold the same, Lightning writes what rank 0 has."""
    result = ranks(2, sharded, str(tmp_path / "one"), "ddp", on_rank_0, None)[0]
    expected = ranks(2, sharded, str(tmp_path / "all"), "ddp", doubled, None)[0]
    assert_equal(result, expected)


def test_a_dump_that_was_not_saved_does_not_count(tmp_path: Path) -> None:
    trained = run(tmp_path, "native", 2)
    trained.fit(Hooked(), make_data())
    trained._checkpoint_connector.dump_checkpoint(weights_only=False)
    trained.save_checkpoint(tmp_path / "a.ckpt")
    assert [name for name in rankless.open(tmp_path / "a.ckpt") if name.startswith("optimizer/")]


def looked_at_on_rank_0(checkpoint: dict[str, Any]) -> None:
    if torch.distributed.get_rank() == 0:
        assert checkpoint["state_dict"]["net.3.bias"].isfinite().all()
        assert checkpoint["optimizer_states"][0]["param_groups"]


def test_strategies_of_all_layouts_take_no_address() -> None:
    for layout in ("plain", "ddp", "fsdp1"):
        with pytest.raises(InvalidArgumentError, match="no store that rankless knows"):
            make_strategy(layout).load_checkpoint("memory://a")


@pytest.mark.parametrize("kind", ["theirs", "native", "lightning"])
def test_a_missing_checkpoint_is_named_in_lightnings_words(tmp_path: Path, kind: str) -> None:
    with pytest.raises(FileNotFoundError, match=r"Checkpoint file not found: missing\.ckpt"):
        run(tmp_path, kind, 2).fit(Hooked(), make_data(), ckpt_path="missing.ckpt")
