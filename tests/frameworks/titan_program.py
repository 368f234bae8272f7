"""A training by torchtitan's own ``Trainer``, on the CPU: ``torchrun … titan_program.py MANAGER FOLDER STEPS``.

It prints ``LOSS STEP VALUE`` for each step. torchtitan trains on accelerators only. So this program gives the module of
the CPU the functions that torchtitan asks, and takes PyTorch's attention in place of one without a backward pass there.
Model, data, optimizer, schedule, loop and the calls of the checkpoint manager are torchtitan's.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch._utils
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.nn.functional import scaled_dot_product_attention

#: What torchtitan asks of the module of a device.
_OF_DEVICES: dict[str, Any] = {
    "current_device": lambda: 0,
    "device_count": lambda: 8,
    "empty_cache": lambda: None,
    "get_device_name": lambda *_: "cpu",
    "get_device_properties": lambda *_: SimpleNamespace(total_memory=1, name="cpu"),
    "max_memory_allocated": lambda *_: 0,
    "memory_allocated": lambda *_: 0,
    "memory_stats": lambda *_: {},
    "reset_peak_memory_stats": lambda *_: None,
}


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, scale: Any = None, **options: Any) -> Any:
    """Causal attention."""
    out = scaled_dot_product_attention(
        q, k, v, is_causal=True, scale=scale, enable_gqa=options.get("enable_gqa", False)
    )
    is_pair = options.get("return_aux") is not None or options.get("return_lse") is not None
    return (out, None) if is_pair else out


def prepare_cpu() -> None:
    """Let torchtitan take the CPU for an accelerator, before it is imported."""
    torch._utils._get_available_device_type = lambda: "cpu"
    torch._utils._get_device_module = lambda _: torch.cpu
    for name, function in _OF_DEVICES.items():
        setattr(torch.cpu, name, function)
    sys.modules["torchtitan.distributed.minimal_async_ep.kernels"] = mock.MagicMock()  # compiled for GPUs on import
    dist.set_timeout = lambda *_, **__: None
    divide = FSDPModule.set_gradient_divide_factor

    def divide_on_gloo(self: Any, factor: float) -> None:
        self.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM
        divide(self, factor)

    FSDPModule.set_gradient_divide_factor = divide_on_gloo


def configure(manager: str, folder: str, steps: int) -> Any:
    """Return torchtitan's configuration of its debug model, with one of the two checkpoint managers."""
    from torchtitan.models.common import attention
    from torchtitan.models.llama3 import model_registry
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    import rankless.torchtitan

    attention.FlexAttention._compiled_flex_attn = attend
    config = llama3_debugmodel()
    config.model_spec = model_registry("debugmodel", attn_backend="flex")
    config.dump_folder, config.activation_checkpoint = folder, None
    config.training.local_batch_size, config.training.seq_len, config.training.steps = 2, 64, steps
    config.training.disable_cuda_graphs, config.parallelism.spmd_backend = True, "partial_dtensor"
    config.lr_scheduler.total_steps = 8  # the same in a job that is stopped before
    config.validator.enable, config.debug.seed = False, 0
    kinds = {"rankless": rankless.torchtitan.CheckpointManager, "torchtitan": type(config.checkpoint)._owner}
    config.checkpoint = kinds[manager].Config(enable=True, interval=2, keep_latest_k=2, last_save_model_only=False)
    return config


def main() -> None:
    manager, folder, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
    torch.set_num_threads(1)
    prepare_cpu()
    trainer = configure(manager, folder, steps).build()
    log = trainer.metrics_processor.log

    def log_loss(step: int, *args: Any, **options: Any) -> None:
        if dist.get_rank() == 0:
            print(f"LOSS {step} {float(args[0]).hex()}", flush=True)
        log(step, *args, **options)

    trainer.metrics_processor.log = log_loss
    trainer.train()
    trainer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
