"""Tests rankless's version of ColossalAI's Booster: signatures, files, and behaviour with existing directories.

The tests with the real package are in test_colossalai.py.
"""

import contextlib
import inspect
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

import rankless
from rankless.colossalai import Booster
from rankless.errors import (
    CorruptCheckpointError,
    FormatError,
    InvalidArgumentError,
    NoCheckpointError,
    OptimizerMismatchError,
    UnsafePickleError,
)
from tests.helpers import layouts
from tests.helpers.pool import Ranks

#: Positional order and defaults of colossalai.booster.Booster, version 0.5.0.
SIGNATURES = {
    "__init__": "self device=None mixed_precision=None plugin=None",
    "boost": "self model optimizer=None criterion=None dataloader=None lr_scheduler=None",
    "save_model": "self model checkpoint shard=False gather_dtensor=True prefix=None size_per_shard=1024"
    " use_safetensors=False use_async=False",
    "load_model": "self model checkpoint strict=True low_cpu_mem_mode=True num_threads=1",
    "save_optimizer": "self optimizer checkpoint shard=False gather_dtensor=True prefix=None size_per_shard=1024"
    " use_async=False",
    "load_optimizer": "self optimizer checkpoint low_cpu_mem_mode=True num_threads=1",
    "save_lr_scheduler": "self lr_scheduler checkpoint",
    "load_lr_scheduler": "self lr_scheduler checkpoint",
    "load": "self model checkpoint strict=True low_cpu_mem_mode=True num_threads=1",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_the_real_ones(name: str) -> None:
    parameters = inspect.signature(getattr(Booster, name)).parameters.values()
    positional = [p for p in parameters if p.kind == p.POSITIONAL_OR_KEYWORD]
    shown = [p.name if p.default is p.empty else f"{p.name}={p.default}" for p in positional]
    assert " ".join(shown) == SIGNATURES[name]


def test_the_guides_keywords_are_there() -> None:
    assert {"prefix", "size_per_shard"} <= inspect.signature(Booster.load_optimizer).parameters.keys()


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))


def trained(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    model(torch.ones(2, 16)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    return left == right


def test_its_files_are_named_and_measured_as_colossalai_does(tmp_path: Path) -> None:
    booster, model = Booster(), net()
    optimizer = trained(model)
    booster.save_model(model, tmp_path / "m", shard=True, size_per_shard=0.003, prefix="foo")
    booster.save_optimizer(optimizer, tmp_path / "o", shard=True, size_per_shard=0.005)
    assert sorted(path.name for path in (tmp_path / "m").iterdir()) == [
        "pytorch_model.bin.index.foo.json",
        "pytorch_model.foo-00001.bin",
        "pytorch_model.foo-00002.bin",
    ]
    index = json.loads((tmp_path / "m/pytorch_model.bin.index.foo.json").read_text())
    assert index["metadata"] == {"total_size": sum(p.nbytes for p in model.parameters()) / 2**20}
    index = json.loads((tmp_path / "o/pytorch_optim.bin.index.json").read_text())
    assert list(index["metadata"]) == ["param_groups", "total_size"]
    assert index["weight_map"].keys() == {"0", "1", "2", "3"}
    states: dict[int, Any] = {}
    for file in sorted(set(index["weight_map"].values())):
        states |= torch.load(tmp_path / "o" / file, weights_only=True)
    assert same(states, optimizer.state_dict()["state"])
    groups = torch.load(tmp_path / "o" / index["metadata"]["param_groups"], weights_only=True)
    assert groups == optimizer.state_dict()["param_groups"]


@pytest.mark.parametrize("shard", [False, True])
@pytest.mark.parametrize("safe", [False, True])
@pytest.mark.parametrize("prefix", [None, "foo"])
def test_what_it_saves_it_loads(tmp_path: Path, *, shard: bool, safe: bool, prefix: str | None) -> None:
    booster, model = Booster(), net()
    optimizer = trained(model)
    names = ("m", "o") if shard else ("m.safetensors" if safe else "m.bin", "o.bin")
    options = {"shard": shard, "prefix": prefix, "size_per_shard": 0.003}
    booster.save_model(model, tmp_path / names[0], use_safetensors=safe, **options)
    booster.save_optimizer(optimizer, tmp_path / names[1], **options)
    other = net()
    nn.init.zeros_(other[0].weight)
    fresh = torch.optim.AdamW(other.parameters(), lr=7.0)
    booster.load(other, tmp_path / names[0])
    booster.load_optimizer(fresh, tmp_path / names[1])
    assert same(other.state_dict(), model.state_dict())
    assert same(fresh.state_dict(), optimizer.state_dict())


class Counting(nn.Linear):
    def get_extra_state(self) -> Any:
        return {"seen": 7}

    def set_extra_state(self, state: Any) -> None:
        self.found = state


@pytest.mark.parametrize("size", [1024, 0.00003])
def test_state_that_is_no_tensor_is_in_one_of_the_files_or_refused(tmp_path: Path, size: float) -> None:
    options = {"shard": True, "size_per_shard": size}
    Booster().save_model(Counting(4, 4), tmp_path / "theirs", **options)
    limit = max(1, int(size * 2**20))
    rankless.save_model(Counting(4, 4), tmp_path / "bins", shard=True, use_safetensors=False, max_shard_size=limit)
    for name in ("theirs", "bins"):
        model = Counting(4, 4)
        rankless.load_model(model, tmp_path / name)
        assert model.found == {"seen": 7}
    with pytest.raises(InvalidArgumentError, match="no place for '_extra_state'"):
        Booster().save_model(Counting(4, 4), tmp_path / "safe", use_safetensors=True, **options)
    assert not (tmp_path / "safe").exists()


def test_with_a_prefix_and_without_both_stay_in_one_folder(tmp_path: Path) -> None:
    booster, model, other = Booster(), net(), net()
    nn.init.ones_(other[0].weight)
    for prefix, item in (("foo", other), (None, model), ("bar", model), (None, model)):
        booster.save_model(item, tmp_path / "m", shard=True, prefix=prefix, size_per_shard=0.003)
    actual = net()
    booster.load_model(actual, tmp_path / "m", prefix="foo")
    assert same(actual.state_dict(), other.state_dict())
    booster.load_model(actual, tmp_path / "m")
    assert same(actual.state_dict(), model.state_dict())
    (tmp_path / "m/pytorch_model.bin.index.json").unlink()
    with pytest.raises(FormatError, match="several variants of a model"):
        booster.load_model(actual, tmp_path / "m")
    booster.load_model(actual, tmp_path / "m/pytorch_model.bin.index.foo.json")
    assert same(actual.state_dict(), other.state_dict())


def test_saving_in_another_format_leaves_a_folder_that_loads(tmp_path: Path) -> None:
    booster = Booster()
    for number, safe in enumerate((False, True, False)):
        model = net()
        nn.init.constant_(model[0].weight, number)
        booster.save_model(model, tmp_path / "m", shard=True, use_safetensors=safe, size_per_shard=0.003)
        assert len(list((tmp_path / "m").iterdir())) == 3
        actual = net()
        booster.load_model(actual, tmp_path / "m")
        assert same(actual.state_dict(), model.state_dict())


def test_model_and_optimizer_may_share_a_folder(tmp_path: Path) -> None:
    booster, model = Booster(), net()
    optimizer = trained(model)
    booster.save_model(model, tmp_path, shard=True)
    booster.save_optimizer(optimizer, tmp_path, shard=True)
    fresh = torch.optim.AdamW(model.parameters())
    booster.load_optimizer(fresh, tmp_path)
    rankless.load_checkpoint(tmp_path, model=model, optimizer=torch.optim.AdamW(model.parameters()))
    assert same(fresh.state_dict(), optimizer.state_dict())


def flat(path: Path, optimizer: torch.optim.Optimizer, pickled: Any = None) -> None:
    """As ColossalAI's asynchronous saves write an optimizer: values that are no tensors are pickled into bytes."""
    state = optimizer.state_dict()
    tensors = {f"state.{i}.{k}": v for i, own in state["state"].items() for k, v in own.items() if k != "step"}
    plain = {f"state.{i}.step": int(own["step"]) for i, own in state["state"].items()}
    plain["param_groups"] = state["param_groups"]
    raw = {key: pickled if pickled and key == "param_groups" else pickle.dumps(value) for key, value in plain.items()}
    tensors |= {key: torch.frombuffer(bytearray(byte), dtype=torch.uint8) for key, byte in raw.items()}
    save_file(tensors, path, {"format": "pt", "non_tensor_keys": json.dumps(list(plain))})


def test_its_asynchronous_optimizers_are_read_and_their_pickles_not_run(tmp_path: Path) -> None:
    model = net()
    optimizer = trained(model)
    flat(tmp_path / "o.safetensors", optimizer)
    fresh = torch.optim.AdamW(model.parameters(), lr=7.0)
    Booster().load_optimizer(fresh, tmp_path / "o.safetensors")
    assert same(fresh.state_dict(), optimizer.state_dict())
    flat(tmp_path / "evil.safetensors", optimizer, b"cos\nsystem\n(S'true'\ntR.")
    with pytest.raises(UnsafePickleError, match=r"os\.system"):
        Booster().load_optimizer(fresh, tmp_path / "evil.safetensors")


@pytest.mark.parametrize(
    ("key", "pickles", "message"),
    [
        ("state.zero.step", "[]", "not the number"),
        ("state.0", "[]", "not the number"),
        ("state.0.step", "[[]]", "must be a list of names"),
    ],
)
def test_damaged_names_in_asynchronous_optimizers_are_told(
    tmp_path: Path, key: str, pickles: str, message: str
) -> None:
    tensors = {key: torch.ones(1), "param_groups": torch.ones(1)}
    save_file(tensors, tmp_path / "o.safetensors", {"format": "pt", "non_tensor_keys": pickles})
    with pytest.raises(CorruptCheckpointError, match=message):
        Booster().load_optimizer(trained(net()), tmp_path / "o.safetensors")


def test_frozen_parameters_may_have_no_number(tmp_path: Path) -> None:
    model = net()
    for parameter in model[0].parameters():
        parameter.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 16)).sum().backward()
    optimizer.step()
    state = optimizer.state_dict()
    zero = {
        "state": {i - 2: own for i, own in state["state"].items()},
        "param_groups": [{**state["param_groups"][0], "params": [0, 1]}],
    }
    torch.save(state, tmp_path / "ddp.bin")
    torch.save(zero, tmp_path / "zero.bin")
    for file in ("ddp.bin", "zero.bin"):
        fresh = torch.optim.AdamW(model.parameters())
        restored = Booster().load_optimizer(fresh, tmp_path / file)
        assert same(fresh.state_dict()["state"], state["state"]), file
        # Nothing in the file tells which parameters were trained.
        assert ("optimizer" in restored.exact) == (file == "ddp.bin")


def test_only_colossalai_leaves_frozen_parameters_without_a_number(tmp_path: Path) -> None:
    """Two were trained, and here two others are: the counts agree, and the states would go to other parameters."""
    saved, here = (nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in "abc"}) for _ in range(2))
    optimizer = trained_alone([saved["a"].weight, saved["b"].weight])
    here["a"].requires_grad_(requires_grad=False)
    torch.save({"model": saved.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "x.pt")
    Booster().save_optimizer(optimizer, tmp_path / "o", shard=True)
    with pytest.raises(OptimizerMismatchError, match="by position only"):
        rankless.restore(tmp_path / "x.pt", model=here, optimizer=torch.optim.AdamW(here.parameters()), rng=False)
    restored = rankless.load_optimizer(torch.optim.AdamW(here.parameters()), tmp_path / "o")
    assert (restored.exact, restored.reconstructed) == ((), ("optimizer",))


def trained_alone(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(parameters)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


def test_what_an_optimizer_of_another_class_keeps_is_told(tmp_path: Path) -> None:
    model = net()
    sgd = torch.optim.SGD(model.parameters(), momentum=0.9)
    model(torch.ones(2, 16)).sum().backward()
    sgd.step()
    Booster().save_optimizer(sgd, tmp_path / "o", shard=True)
    with pytest.raises(OptimizerMismatchError, match="momentum_buffer; AdamW keeps exp_avg, exp_avg_sq, step"):
        Booster().load_optimizer(torch.optim.AdamW(model.parameters()), tmp_path / "o")


def test_settings_that_hybrid_adam_lacks_are_filled_and_its_steps_become_tensors(tmp_path: Path) -> None:
    model = net()
    optimizer = trained(model)
    state = optimizer.state_dict()
    own = {i: {**item, "step": int(item["step"])} for i, item in state["state"].items()}
    kept = ("lr", "betas", "eps", "weight_decay", "params")
    group = {key: state["param_groups"][0][key] for key in kept} | {"bias_correction": True}
    (tmp_path / "o").mkdir()
    torch.save(own, tmp_path / "o/pytorch_optim-00001.bin")
    torch.save([group], tmp_path / "o/pytorch_optim_group.bin")
    weight_map = {str(i): "pytorch_optim-00001.bin" for i in own}
    metadata = {"param_groups": "pytorch_optim_group.bin", "total_size": 1.5}
    index = {"metadata": metadata, "weight_map": weight_map}
    (tmp_path / "o/pytorch_optim.bin.index.json").write_text(json.dumps(index))
    fresh = torch.optim.AdamW(model.parameters())
    Booster().load_optimizer(fresh, tmp_path / "o")
    assert same(fresh.state_dict()["state"], state["state"])
    model(torch.ones(2, 16)).sum().backward()
    fresh.step()
    (tmp_path / "o/pytorch_optim-00001.bin").unlink()
    with pytest.raises(CorruptCheckpointError, match=r"pytorch_optim-00001\.bin is missing"):
        Booster().load_optimizer(fresh, tmp_path / "o")


def test_stages_of_a_pipeline_are_read_as_one_model(tmp_path: Path) -> None:
    model = net()
    names = [f"pytorch_model-stage-0000{stage}-shard-00001.bin" for stage in (1, 2)]
    state = model.state_dict()
    weight_map = {name: names[int(name[0]) // 2] for name in state}
    for file in names:
        torch.save({name: item for name, item in state.items() if weight_map[name] == file}, tmp_path / file)
    index = {"metadata": {"total_size": 0.1}, "weight_map": weight_map}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    actual = net()
    nn.init.zeros_(actual[0].weight)
    Booster().load_model(actual, tmp_path)
    assert same(actual.state_dict(), state)


def layout(path: str, kind: str) -> list[str]:
    run = layouts.fill_run(layouts.LAYOUTS[kind][0]())
    booster = Booster()
    model, optimizer, *_ = booster.boost(run.model, run.optimizer)
    booster.save_model(model, f"{path}/m", shard=True, size_per_shard=0.001)
    booster.save_model(model, f"{path}/m.safetensors", use_safetensors=True)
    booster.save_optimizer(optimizer, f"{path}/o", shard=True, size_per_shard=0.001)
    other = layouts.blank_run(layouts.LAYOUTS[kind][0]())
    booster.load_model(other.model, f"{path}/m")
    booster.load_optimizer(other.optimizer, f"{path}/o")
    theirs = dict(layouts.named_tensors(run))
    return [
        name
        for name, mine in layouts.named_tensors(other)
        if not torch.equal(layouts.local_tensor(mine), layouts.local_tensor(theirs[name]))
    ]


@pytest.mark.parametrize(("kind", "n"), [("ddp", 2), ("fsdp", 3), ("fsdp_tp", 4)])
def test_over_ddp_fsdp_and_dtensor_models(ranks: Ranks, tmp_path: Path, kind: str, n: int) -> None:
    assert ranks(n, layout, str(tmp_path), kind) == [[]] * n
    alone = layouts.fill_run(layouts.plain())
    assert same(load_file(tmp_path / "m.safetensors"), {k: v.detach() for k, v in alone.model.state_dict().items()})


def test_transformers_takes_a_prefix_for_its_variant(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=64, n_positions=32, n_embd=16, n_layer=2, n_head=2)
    model = transformers.GPT2LMHeadModel(config)
    for prefix, safe in (("foo", True), ("bar", False), (None, False)):
        options = {"prefix": prefix, "use_safetensors": safe, "size_per_shard": 0.004}
        Booster().save_model(model, tmp_path, shard=True, **options)
        loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path, variant=prefix, use_safetensors=safe)
        assert same(loaded.state_dict(), model.state_dict())


def fsdp1(path: str) -> bool:
    def start() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = FullyShardedDataParallel(net(), device_id=torch.device("cpu"))
        return model, torch.optim.AdamW(model.parameters(), lr=7.0)

    model, optimizer = start()
    model(torch.ones(2, 16)).square().sum().backward()
    optimizer.step()
    booster = Booster()
    booster.boost(model, optimizer)
    booster.save_model(model, f"{path}/m", shard=True)
    booster.save_optimizer(optimizer, f"{path}/o", shard=True)
    other, fresh = start()
    booster.boost(other, fresh)
    booster.load_model(other, f"{path}/m")
    booster.load_optimizer(fresh, f"{path}/o")
    alone = net()
    expected = trained(alone, lr=7.0)
    plain = torch.optim.AdamW(alone.parameters())
    Booster().load_optimizer(plain, f"{path}/o")
    torch.testing.assert_close(plain.state_dict(), expected.state_dict())
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return all(torch.equal(left, right) for left, right in pairs) and all(
        same(left, right) for left, right in zip(optimizer.state.values(), fresh.state.values(), strict=True)
    )


def test_over_fsdp1_whose_optimizer_knows_flat_parameters(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2, fsdp1, str(tmp_path)) == [True, True]


def ddp(path: str) -> None:
    booster = Booster()
    model, _, _, _, _ = booster.boost(DistributedDataParallel(net()))
    with booster.no_sync(model):
        booster.backward(model(torch.ones(1, 16)).sum(), None)
    booster.save_model(model, f"{path}/m.bin", use_async=False)
    booster.checkpoint_io.synchronize()
    assert dist.get_world_size() == 2


def test_a_wrapped_model_is_saved_under_its_own_names(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, ddp, str(tmp_path))
    assert torch.load(tmp_path / "m.bin", weights_only=True).keys() == net().state_dict().keys()


def test_in_the_background_it_saves_safetensors_and_says_so(tmp_path: Path) -> None:
    booster, model = Booster(), net()
    with pytest.warns(UserWarning, match="safetensors"):
        handle = booster.save_model(model, tmp_path / "m", shard=True, use_async=True)
    handle.wait()
    assert (tmp_path / "m/model.safetensors.index.json").exists()
    with pytest.raises(InvalidArgumentError, match=r"must end in \.safetensors"):
        booster.save_model(model, tmp_path / "m.bin", use_safetensors=True)


def test_schedulers_are_files_of_torch_save(tmp_path: Path) -> None:
    optimizer = trained(net())
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    scheduler.step()
    Booster().save_lr_scheduler(scheduler, tmp_path / "lr_scheduler")
    assert torch.load(tmp_path / "lr_scheduler", weights_only=True) == scheduler.state_dict()
    other = torch.optim.lr_scheduler.CosineAnnealingLR(trained(net()), 10)
    Booster().load_lr_scheduler(other, tmp_path / "lr_scheduler")
    assert other.state_dict() == scheduler.state_dict()


class ModelWrapper(nn.Module):
    """As plugins of the real package wrap a model."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def unwrap(self) -> nn.Module:
        return self.module


class OptimizerWrapper:
    def __init__(self, optim: torch.optim.Optimizer) -> None:
        self.optim = optim

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()


class LowLevelZeroOptimizer(OptimizerWrapper):
    """Keeps states where only it knows."""


class Plugin:
    def __init__(self, wrapper: type[OptimizerWrapper]) -> None:
        self.wrapper = wrapper

    def configure(self, model: nn.Module, optimizer: torch.optim.Optimizer, *rest: Any) -> tuple[Any, ...]:
        return ModelWrapper(model), self.wrapper(optimizer), *rest

    def no_sync(self, *_: object) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


def test_what_a_plugin_wraps_is_saved_by_its_own_names(tmp_path: Path) -> None:
    booster = Booster(plugin=Plugin(OptimizerWrapper))
    plain = net()
    model, optimizer, _, _, scheduler = booster.boost(plain, torch.optim.AdamW(plain.parameters()))
    assert scheduler is None
    with booster.no_sync(model, optimizer):
        booster.backward(plain(torch.ones(2, 16)).sum(), optimizer)
    optimizer.optim.step()
    booster.save_model(model, tmp_path / "m.bin")
    booster.save_optimizer(optimizer, tmp_path / "o.bin", use_async=True)
    booster.checkpoint_io._sync_io()
    assert torch.load(tmp_path / "m.bin", weights_only=True).keys() == plain.state_dict().keys()
    fresh = torch.optim.AdamW(plain.parameters())
    fresh.load_state_dict(torch.load(tmp_path / "o.bin", weights_only=True))
    assert same(fresh.state_dict()["state"], optimizer.optim.state_dict()["state"])


def test_what_it_cannot_do_it_says(tmp_path: Path) -> None:
    model = net()
    with pytest.raises(InvalidArgumentError, match="mixed_precision"):
        Booster(mixed_precision="fp16")
    with pytest.raises(InvalidArgumentError, match="LowLevelZeroOptimizer keeps optimizer states"):
        Booster(plugin=Plugin(LowLevelZeroOptimizer)).boost(model, torch.optim.AdamW(model.parameters()))
    with pytest.raises(InvalidArgumentError, match="no_sync"), Booster().no_sync(model):
        pass
    with pytest.raises(InvalidArgumentError, match="another ending"):
        Booster().save_optimizer(trained(model), tmp_path / "o.safetensors")
    with pytest.raises(NoCheckpointError, match="prefix 'foo'"):
        Booster().load_model(model, tmp_path, prefix="foo")
    moved, *_ = Booster(device="cpu").boost(model)
    assert moved is model
