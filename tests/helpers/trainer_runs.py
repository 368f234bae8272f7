"""Training runs under transformers' own Trainer and under Accelerate, on the ranks of the pool."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import transformers
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

import rankless
from rankless.transformers import Trainer

transformers.logging.set_verbosity_error()

#: Samples in a step, over all ranks.
BATCH = 4


class Numbers(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, 32, (6,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def make_model(dropout: float = 0.0) -> transformers.PreTrainedModel:
    torch.manual_seed(1)
    config = transformers.GPT2Config(
        vocab_size=32,
        n_positions=8,
        n_embd=16,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
        loss_type="ForCausalLM",
    )
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = dropout
    return transformers.GPT2LMHeadModel(config)


@contextmanager
def launch() -> Iterator[None]:
    """As torchrun would have started this rank, with one thread; Accelerate forgets it at the end."""
    size, rank = str(dist.get_world_size()), str(dist.get_rank())
    about = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    # Without it Accelerate takes all processors, and sums round otherwise than those of a rank with one thread.
    about["OMP_NUM_THREADS"] = "1"
    # Accelerate ends the group at the end of the process, which the pool does here.
    cpu = mock.patch("torch.distributed.fsdp._init_utils._get_device_from_device_id", return_value=None)
    with mock.patch.dict(os.environ, about | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}), cpu:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)
            PartialState._reset_state()


def make_arguments(path: Path, ranks: int, steps: int, **options: Any) -> transformers.TrainingArguments:
    return transformers.TrainingArguments(
        output_dir=str(path),
        per_device_train_batch_size=BATCH // ranks,
        max_steps=steps,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        **{"save_steps": 3, **options},
    )


def make_trainer(path: Path, steps: int, dropout: float = 0.0, **options: Any) -> Trainer:
    asynchronous, checkpoint_dir = options.pop("async_save", False), options.pop("checkpoint_dir", None)
    if options.get("fsdp"):
        # Synchronised from the device of a first rank; here all ranks make the same model.
        options["fsdp_config"] |= {"sync_module_states": False, "transformer_layer_cls_to_wrap": ["GPT2Block"]}
    args = make_arguments(path, dist.get_world_size(), steps, **options)
    if options.get("fsdp") and dist.get_world_size() > 1:
        # Accelerate leaves FSDP to accelerators, and torch has it on CPUs, too.
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    return Trainer(
        make_model(dropout), args, train_dataset=Numbers(), async_save=asynchronous, checkpoint_dir=checkpoint_dir
    )


def train(path: Path, steps: int, resume: bool | str = False, dropout: float = 0.0, **options: Any) -> dict[str, Any]:
    """The losses of all steps, the weights, and the checkpoints that are there in the end."""
    with launch():
        run = make_trainer(path, steps, dropout, **options)
        run.train(resume_from_checkpoint=resume or None)
        return {
            "losses": [entry["loss"] for entry in run.state.log_history if "loss" in entry],
            "weights": {name: value.clone() for name, value in _whole(run.model_wrapped).items()},
            "kind": type(run.model_wrapped).__name__,
            "tags": [info.tag for info in rankless.list_checkpoints(options.get("checkpoint_dir", path))],
            "best": run.state.best_model_checkpoint,
        }


def _whole(wrapped: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The weights, under FSDP put together by torch."""
    return get_model_state_dict(wrapped, options=StateDictOptions(full_state_dict=True))


def train_with_accelerate(path: Path) -> dict[str, torch.Tensor]:
    """Saved as Accelerate gives it; returns the weights."""
    with launch():
        accelerator = Accelerator(cpu=True)
        torch.manual_seed(3)
        plain = torch.nn.Linear(6, 6)
        optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        net, optimizer, scheduler = accelerator.prepare(plain, optimizer, scheduler)
        for _ in range(3):
            accelerator.backward(net(torch.ones(2, 6)).square().sum())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        rankless.save_checkpoint(path, "a", net, optimizer, scheduler)
        return {name: value.clone() for name, value in plain.state_dict().items()}
