"""Engines of DeepSpeed for the tests: a small model with everything that makes partitions hard, and its whole state.

All ranks compute the same gradients. So their mean over a power of two of ranks is the same on any number of them, and
runs on several numbers can be compared bit for bit.
"""

from __future__ import annotations

from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.adam import FusedAdam
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
)
from torch import nn

#: The states of Adam.
MOMENTS = ("exp_avg", "exp_avg_sq")


class FusedAdamOnCpu(FusedAdam):
    """DeepSpeed's fused Adam with a kernel in plain torch, as its own needs a GPU. In fp16 it is in FP16_Optimizer."""

    def __init__(self, params: Any, lr: float) -> None:
        defaults = {"lr": lr, "bias_correction": True, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
        torch.optim.Optimizer.__init__(self, params, defaults)
        self.adam_w_mode, self.set_grad_none = 1, True
        self._dummy_overflow_buf = torch.zeros(1, dtype=torch.int)
        self.multi_tensor_adam = _adam_kernel


def _adam_kernel(
    chunk: int,
    overflow: torch.Tensor,
    lists: list[list[torch.Tensor]],
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    mode: int,
    corrects: int,
    decay: float,
) -> None:
    for grad, value, first, second in zip(*lists, strict=True):
        first.mul_(beta1).add_(grad, alpha=1 - beta1)
        second.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        update = (first / (1 - beta1**step)) / ((second / (1 - beta2**step)).sqrt() + eps)
        value.add_(update + decay * value, alpha=-lr)


class Term(nn.Module):
    """A term of the loss that is linear in its parameters, so that their gradients are known: noise of each step."""

    def __init__(self, *shape: int, with_bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape) / 8)
        self.bias = nn.Parameter(torch.randn(shape[0]) / 8) if with_bias else None

    def forward(self, seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        total = (self.weight * draw_noise(self.weight, generator)).float().sum()
        return total if self.bias is None else total + (self.bias * draw_noise(self.bias, generator)).float().sum()


def draw_noise(like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(like.shape, generator=generator).to(like.device, like.dtype)


class Net(nn.Module):
    """A model with tied weights, a frozen parameter, a buffer, and parameters of odd sizes.

    Its gradients do not depend on how a processor computes a product of matrices. With ``wide`` all sizes are multiples
    of 256: then no part of a tensor on up to four ranks has a remainder that the processor computes with other
    instructions, and so with other rounding, than the rest. Then runs in all divisions are equal bit for bit.
    """

    def __init__(self, *, frozen: bool = True, wide: bool = False) -> None:
        super().__init__()
        inner, outer, words = (256, 512, 16) if wide else (7, 13, 11)
        self.embed = Term(words, inner)
        self.up = Term(outer, inner, with_bias=True)
        self.norm = Term(outer, with_bias=True)
        self.down = Term(inner, outer, with_bias=True)
        self.scale = Term(256 if wide else 1)
        self.fixed = Term(inner, inner)
        self.head = Term(words, inner)
        self.head.weight = self.embed.weight
        self.fixed.weight.requires_grad = not frozen
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, step: int) -> torch.Tensor:
        self.seen += 1
        terms = [child(1000 * step + number) for number, child in enumerate(self.children())]
        return torch.stack(terms).sum()


def make_net(seed: int, **options: Any) -> Net:
    torch.manual_seed(seed)
    return Net(**options)


def make_engine(stage: int, dtype: str = "fp32", *, seed: int = 0, **options: Any) -> Any:
    """Create an engine. ``options``: ``zero`` (settings of ZeRO), ``config``, ``groups``, ``frozen``, ``wide``."""
    net = make_net(seed, frozen=options.get("frozen", True), wide=options.get("wide", False))
    trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
    groups: list[dict[str, Any]] = [{"params": trained}]
    if options.get("groups", 2) == 2:
        matrices = [parameter for parameter in trained if parameter.ndim > 1]
        vectors = [parameter for parameter in trained if parameter.ndim <= 1]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    name = options.get("optimizer", "AdamW")
    optimizer_class = FusedAdamOnCpu if name == "FusedAdam" else getattr(torch.optim, name)
    optimizer = optimizer_class(groups, lr=0.01, **options.get("optimizer_options", {}))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        # A norm is a sum, whose rounding depends on the division.
        "gradient_clipping": 0.0,
        # The memory efficient linear layer of ZeRO-3 rounds otherwise, also in later engines of the process.
        "zero_optimization": {"stage": stage, "memory_efficient_linear": False, **options.get("zero", {})},
        "zero_allow_untested_optimizer": True,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.02, "warmup_num_steps": 10}},
        **({dtype: {"enabled": True}} if dtype != "fp32" else {}),
        **options.get("config", {}),
    }
    if dtype == "fp16":
        # DeepSpeed refuses it on a CPU, where torch has all that it needs.
        get_accelerator().is_fp16_supported = lambda: True
        config["fp16"] = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 3, "hysteresis": 1}
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=config)
    return engine


def train(engine: Any, steps: range) -> list[float]:
    """Train for some steps, and return the loss of each."""
    losses = []
    for step in steps:
        loss = engine(step)
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return losses


def named_parameters(engine: Any) -> dict[str, nn.Parameter]:
    return dict(engine.module.named_parameters())


def full_state(engine: Any) -> dict[str, torch.Tensor]:
    """Return the whole state as DeepSpeed's own functions return it: masters, moments, frozen weights, buffers."""
    state: dict[str, torch.Tensor] = {}
    for name, parameter in named_parameters(engine).items():
        with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
            state[f"weights/{name}"] = parameter.detach().clone()
        if not parameter.requires_grad:
            continue
        if engine.zero_optimization():
            state[f"master/{name}"] = safe_get_full_fp32_param(parameter).clone()
            if engine.zero_optimization_stage() == 3:
                for moment in moments_of(engine):
                    state[f"{moment}/{name}"] = safe_get_full_optimizer_state(parameter, moment).clone()
    if not engine.zero_optimization():
        state |= _whole_state(engine)
    elif engine.zero_optimization_stage() < 3:
        state |= _joined_moments(engine)
        if engine.zero_round_robin_gradients():  # where DeepSpeed's function returns other values
            state |= {f"master/{name}": state[f"weights/{name}"].float().clone() for name in _trained(engine)}
    state |= {f"buffer/{name}": buffer.clone() for name, buffer in engine.module.named_buffers()}
    return {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}


def _trained(engine: Any) -> list[str]:
    return [name for name, parameter in named_parameters(engine).items() if parameter.requires_grad]


def moments_of(engine: Any) -> tuple[str, ...]:
    return MOMENTS if "Adam" in type(engine.basic_optimizer).__name__ else ("momentum_buffer",)


def _joined_moments(engine: Any) -> dict[str, torch.Tensor]:
    """Return the moments of ZeRO-1 and 2, from the flat tensors of all ranks.

    DeepSpeed's own function finds those of the first group only, if there are several.
    """
    names = {id(parameter): name for name, parameter in named_parameters(engine).items()}
    optimizer, moments = engine.optimizer, {}
    is_bf16 = hasattr(optimizer, "bf16_groups")
    for number, group in enumerate(optimizer.optimizer.param_groups):
        parameters = optimizer.bf16_groups[number] if is_bf16 else optimizer.round_robin_bit16_groups[number]
        paddings = [0] * len(parameters) if is_bf16 else optimizer.round_robin_bit16_padding[number]
        for moment in moments_of(engine):
            part = optimizer.optimizer.state[group["params"][0]][moment]
            parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, part.contiguous())
            flat, at = torch.cat(parts), 0
            for parameter, padding in zip(parameters, paddings, strict=True):
                whole = flat[at : at + parameter.numel()].view(parameter.shape)
                moments[f"{moment}/{names[id(parameter)]}"] = whole.clone()
                at += parameter.numel() + padding
    return moments


def _whole_state(engine: Any) -> dict[str, torch.Tensor]:
    """Return the masters and moments without ZeRO."""
    names = {id(parameter): name for name, parameter in named_parameters(engine).items()}
    if hasattr(engine.optimizer, "fp32_groups_flat"):
        return _unflatten(engine.optimizer, names)
    masters = getattr(engine.optimizer, "fp32_groups", None)
    weights = getattr(engine.optimizer, "fp16_groups", None)
    if masters is None:
        masters = weights = [group["params"] for group in engine.optimizer.param_groups]
    state = {}
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    for group, copies in zip(masters, weights, strict=True):
        for master, weight in zip(group, copies, strict=True):
            if weight.requires_grad:
                name = names[id(weight)]
                state[f"master/{name}"] = master.detach().float().clone()
                state |= {f"{moment}/{name}": inner.state[master][moment].clone() for moment in moments_of(engine)}
    return state


def _unflatten(optimizer: Any, names: dict[int, str]) -> dict[str, torch.Tensor]:
    """Return the masters and moments of FP16_Optimizer, which has one flat tensor a group."""
    state = {}
    for flat, weights in zip(optimizer.fp32_groups_flat, optimizer.fp16_groups, strict=True):
        moments = {moment: optimizer.optimizer.state[flat][moment] for moment in MOMENTS}
        for key, whole in {"master": flat.detach(), **moments}.items():
            parts = whole.split([weight.numel() for weight in weights])
            for weight, part in zip(weights, parts, strict=True):
                state[f"{key}/{names[id(weight)]}"] = part.view(weight.shape).clone()
    return state


def plain_values(engine: Any) -> dict[str, Any]:
    """Return the counters and settings that a resumed run must have."""
    inner = engine.basic_optimizer
    scaler = getattr(engine.optimizer, "loss_scaler", None) or getattr(engine.optimizer, "loss_scale_config", None)
    return {
        "global_steps": engine.global_steps,
        "global_samples": engine.global_samples,
        "skipped_steps": engine.skipped_steps,
        "micro_steps": engine.micro_steps,
        "scheduler": engine.lr_scheduler.state_dict(),
        "lr": [group["lr"] for group in inner.param_groups],
        "weight_decay": [group["weight_decay"] for group in inner.param_groups],
        "scale": getattr(scaler, "cur_scale", None),
        "scale_iteration": getattr(scaler, "cur_iter", None),
        "steps": sorted({int(state["step"]) for state in inner.state.values() if "step" in state}),
    }
