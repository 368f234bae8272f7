"""A training that rankless restores goes on like that of Accelerate or of the ``Trainer``, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
import transformers
from accelerate import Accelerator
from accelerate.state import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, ProjectConfiguration
from torch import nn
from transformers.optimization import Adafactor

import rankless
import rankless.accelerate
from tests.helpers.equality import equal_bits
from tests.helpers.pool import Ranks
from tests.helpers.stateful import Counter
from tests.helpers.trainer_runs import Numbers, launch, make_arguments, make_model, train

pytestmark = pytest.mark.filterwarnings("ignore")

Weights = dict[str, torch.Tensor]


def make_net(seed: int) -> nn.Module:
    """A net with dropout, a frozen and a tied parameter."""
    torch.manual_seed(seed)
    square, last = [nn.Linear(6, 6) for _ in range(3)], nn.Linear(6, 4)
    net = nn.Sequential(square[0], nn.Dropout(0.2), square[1], nn.LayerNorm(6), square[2], last)
    net[2].weight = net[0].weight
    net[4].weight.requires_grad_(requires_grad=False)
    return net


def make_one_group(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=0.1)


def make_trained_only(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([value for value in net.parameters() if value.requires_grad], lr=0.1, momentum=0.9)


def make_several_groups(net: nn.Module) -> torch.optim.Optimizer:
    """Biases come before weights, in another order than in the net."""
    biases = [value for value in net.parameters() if value.ndim == 1]
    weights = [value for value in net.parameters() if value.ndim == 2]
    return torch.optim.AdamW([{"params": [*reversed(biases)], "weight_decay": 0.0}, {"params": weights}], lr=0.1)


def make_factored(net: nn.Module) -> torch.optim.Optimizer:
    """Its states of a matrix are one value for each row, and one for each column."""
    return Adafactor(net.parameters(), lr=0.1, relative_step=False, scale_parameter=False)


OPTIMIZERS = [make_one_group, make_trained_only, make_several_groups, make_factored]


def run_steps(net: nn.Module, optimizer: Any, scheduler: Any, backward: Any) -> None:
    for _ in range(3):
        backward(net(torch.randn(4, 6)).square().sum())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


def go_on_with_accelerate(path: Path, make_optimizer: Any, *, save: bool, **options: Any) -> Weights:
    """Three steps, after which a state is saved, or before which it is loaded."""
    with launch():
        accelerator = Accelerator(cpu=True)
        net = make_net(0 if save else 1)
        optimizer = make_optimizer(net)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        counter = Counter(5 if save else 0)
        accelerator.register_for_checkpointing(counter)
        prepared = accelerator.prepare(net, optimizer, scheduler)
        if not save:
            accelerator.load_state(str(path))
        run_steps(*prepared, accelerator.backward)
        if save:
            accelerator.save_state(str(path), **options)
        assert counter.count == 5
        return {name: value.clone() for name, value in net.state_dict().items()}


def save_with_accelerate(path: Path, make_optimizer: Any, options: dict[str, Any]) -> None:
    go_on_with_accelerate(path, make_optimizer, save=True, **options)


def count_threads() -> int:
    with launch():
        Accelerator(cpu=True)
    return torch.get_num_threads()


def test_both_train_with_the_same_number_of_threads(ranks: Ranks) -> None:
    """On some processors the last bits of a product of matrices depend on it."""
    assert ranks(1, count_threads) == ranks(1, torch.get_num_threads) == [1]


def load_with_accelerate(path: Path, make_optimizer: Any) -> Weights:
    return go_on_with_accelerate(path, make_optimizer, save=False)


def load_with_rankless(path: Path, make_optimizer: Any) -> Weights:
    net, counter = make_net(1), Counter()
    optimizer = make_optimizer(net)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    objects = {"model": net, "optimizer": optimizer, "scheduler": scheduler, "stateful": {"custom_0": counter}}
    result = rankless.restore(path, **objects)
    assert set(result.exact) == {*objects, "rng", "user_content"}
    assert counter.count == 5
    run_steps(net, optimizer, scheduler, torch.Tensor.backward)
    return {name: value.clone() for name, value in net.state_dict().items()}


@pytest.mark.parametrize("options", [{}, {"safe_serialization": False}], ids=["safetensors", "bin"])
@pytest.mark.parametrize("make_optimizer", OPTIMIZERS)
def test_a_plain_training_goes_on_like_with_accelerate(
    ranks: Ranks, tmp_path: Path, make_optimizer: Any, options: dict[str, Any]
) -> None:
    ranks(1, save_with_accelerate, tmp_path / "state", make_optimizer, options)
    expected = ranks(1, load_with_accelerate, tmp_path / "state", make_optimizer)[0]
    actual = ranks(1, load_with_rankless, tmp_path / "state", make_optimizer)[0]
    assert all(equal_bits(actual[name], value) for name, value in expected.items())


def load_with_our_accelerator(path: Path) -> Weights:
    with launch():
        project = ProjectConfiguration(str(path.parent.parent), automatic_checkpoint_naming=True)
        accelerator = rankless.accelerate.Accelerator(cpu=True, project_config=project)
        net, counter = make_net(1), Counter()
        optimizer = make_one_group(net)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        accelerator.register_for_checkpointing(counter)
        prepared = accelerator.prepare(net, optimizer, scheduler)
        accelerator.load_state(str(path))
        assert counter.count == 5
        assert project.iteration == 8
        run_steps(*prepared, accelerator.backward)
        return {name: value.clone() for name, value in net.state_dict().items()}


@pytest.mark.parametrize("is_converted", [False, True])
def test_our_accelerator_loads_states_of_accelerate(ranks: Ranks, tmp_path: Path, is_converted: bool) -> None:
    path = tmp_path / "checkpoints/checkpoint_7"
    ranks(1, save_with_accelerate, path, make_one_group, {})
    expected = ranks(1, load_with_accelerate, path, make_one_group)[0]
    if is_converted:
        rankless.convert(path, tmp_path / "native/checkpoints/checkpoint_7", to="native")
        path = tmp_path / "native/checkpoints/checkpoint_7"
    actual = ranks(1, load_with_our_accelerator, path)[0]
    assert all(equal_bits(actual[name], value) for name, value in expected.items())


def save_several(path: Path) -> list[Weights]:
    with launch():
        accelerator = Accelerator(cpu=True)
        nets = [nn.Linear(2, 2), nn.Linear(3, 3)]
        optimizers = [torch.optim.SGD(net.parameters(), lr=0.1 * (1 + i), momentum=0.9) for i, net in enumerate(nets)]
        schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 1 + i) for i, optimizer in enumerate(optimizers)]
        prepared = accelerator.prepare(*nets, *optimizers, *schedulers)
        for i in range(2):
            accelerator.backward(prepared[i](torch.ones(1, 2 + i)).sum())
            prepared[2 + i].step()
            prepared[4 + i].step()
        accelerator.save_state(str(path))
        return [{name: value.clone() for name, value in net.state_dict().items()} for net in nets]


def test_several_objects_have_the_numbers_of_accelerate(ranks: Ranks, tmp_path: Path) -> None:
    expected = ranks(1, save_several, tmp_path / "state")[0]
    nets = {"0": nn.Linear(2, 2), "1": nn.Linear(3, 3)}
    optimizers = {name: torch.optim.SGD(net.parameters(), momentum=0.9) for name, net in nets.items()}
    schedulers = {name: torch.optim.lr_scheduler.StepLR(optimizers[name], 1) for name in nets}
    rankless.restore(tmp_path / "state", model=nets, optimizer=optimizers, scheduler=schedulers)
    for number, net in nets.items():
        assert all(equal_bits(value, expected[int(number)][name]) for name, value in net.state_dict().items())
        assert all("momentum_buffer" in optimizers[number].state[value] for value in net.parameters())
        assert schedulers[number].step_size == 1 + int(number)
    assert [optimizer.param_groups[0]["lr"] for optimizer in optimizers.values()] == [0.1 * 0.1, 0.2]


def train_fsdp2(path: Path, kind: str, *, load: bool) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    with launch():
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="NO_WRAP", cpu_offload=False, state_dict_type=kind
        )
        PartialState(cpu=True)
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU  # Accelerate shards only there
        accelerator = Accelerator(fsdp_plugin=plugin)
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2))
        optimizer = torch.optim.AdamW(net.parameters())
        net, optimizer = accelerator.prepare(net, optimizer)
        accelerator.backward(net(torch.ones(2, 5)).square().mean())
        optimizer.step()
        if load:
            with torch.no_grad():
                for value in net.parameters():
                    value.zero_()
            result = rankless.restore(path, model=net, optimizer=optimizer)
            assert set(result.exact) == {"model", "optimizer", "rng", "user_content"}
        else:
            accelerator.save_state(str(path))
        moments = [optimizer.state[value]["exp_avg"].full_tensor() for value in net.parameters()]
        return [value.detach().full_tensor() for value in net.parameters()], moments


def save_fsdp2(path: Path, kind: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    return train_fsdp2(path, kind, load=False)


def load_fsdp2(path: Path, kind: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    return train_fsdp2(path, kind, load=True)


@pytest.mark.parametrize("kind", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
def test_states_under_fsdp_are_restored(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    saved = ranks(2, save_fsdp2, tmp_path / "state", kind)[0]
    loaded = ranks(2, load_fsdp2, tmp_path / "state", kind)[0]
    for actual, expected in zip([*loaded[0], *loaded[1]], [*saved[0], *saved[1]], strict=True):
        assert equal_bits(actual, expected)


def run_trainer(path: Path, steps: int, resume: str | None, adapters: bool = False) -> tuple[list[float], Weights]:
    """The losses of all steps, and the weights, with transformers' own ``Trainer``."""
    with launch():
        model = make_model(dropout=0.1)
        if adapters:
            torch.manual_seed(2)
            model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["c_attn"], task_type="CAUSAL_LM"))
        arguments = make_arguments(path, dist.get_world_size(), steps)
        trainer = transformers.Trainer(model, arguments, train_dataset=Numbers())
        trainer.train(resume_from_checkpoint=resume)
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        return losses, {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("size", [1, 2])
def test_our_trainer_goes_on_with_a_converted_checkpoint(ranks: Ranks, tmp_path: Path, size: int) -> None:
    ranks(size, run_trainer, tmp_path / "run", 3, None)
    losses, weights = ranks(size, run_trainer, tmp_path / "run", 6, str(tmp_path / "run/checkpoint-3"))[0]
    rankless.convert(tmp_path / "run/checkpoint-3", tmp_path / "native/checkpoint-3", to="native")
    resumed = ranks(size, train, tmp_path / "native", 6, str(tmp_path / "native/checkpoint-3"), 0.1)[0]
    assert resumed["losses"] == losses
    assert all(
        equal_bits(resumed["weights"][name], value) for name, value in weights.items() if name in resumed["weights"]
    )


def test_adapters_are_restored_with_their_optimizer(ranks: Ranks, tmp_path: Path) -> None:
    _, weights = ranks(1, run_trainer, tmp_path / "run", 3, None, True)[0]
    saved = torch.load(tmp_path / "run/checkpoint-3/optimizer.pt")
    model = peft.get_peft_model(
        make_model(), peft.LoraConfig(r=2, target_modules=["c_attn"], task_type="CAUSAL_LM", init_lora_weights=False)
    )
    trained = [value for value in model.parameters() if value.requires_grad]
    optimizer = torch.optim.AdamW([{"params": trained}, {"params": []}])
    result = rankless.restore(tmp_path / "run/checkpoint-3", model=model, optimizer=optimizer)
    assert "optimizer" in result.exact
    lora = {name: value for name, value in model.state_dict().items() if "lora_" in name}
    assert lora
    assert all(equal_bits(value, weights[name]) for name, value in lora.items())
    for number, value in enumerate(trained):
        assert equal_bits(optimizer.state[value]["exp_avg"], saved["state"][number]["exp_avg"])
    rankless.convert(tmp_path / "run/checkpoint-3", tmp_path / "native", to="native")
    peft.PeftModel.from_pretrained(make_model(), tmp_path / "native/adapter")
