"""What older versions of torch cannot do by themselves, so that no test can ask for it."""

import torch
from torch.distributed.fsdp import FSDPModule

TORCH = tuple(int(number) for number in torch.__version__.split(".")[:2])

#: torch 2.8 is the first whose ``fully_shard`` takes parameters that tensor parallelism and it divide unevenly.
SHARDS_UNEVENLY = TORCH >= (2, 8)

#: torch 2.8 is the first whose stores list their keys; without that, the keys of a gloo group cannot be removed.
LISTS_KEYS = TORCH >= (2, 8)

#: torch 2.8 is the first with a storage writer for Hugging Face folders.
HAS_HUGGING_FACE_WRITER = TORCH >= (2, 8)

#: torch 2.7 leaves a rank waiting if an optimizer's step of a DTensor fails on another one.
STEPS_FAIL_TOGETHER = TORCH >= (2, 8)

#: torch 2.9 is the first whose FSDP1 takes over a parameter that was replaced, if there is only one rank.
TAKES_OVER_ON_ONE_RANK = TORCH >= (2, 9)

#: torch 2.9 is the first with Muon.
HAS_MUON = TORCH >= (2, 9)


def average_gradients(model: FSDPModule, ranks: int) -> None:
    """Let FSDP2 average gradients over its ranks, which it does by itself except for torch 2.7 with gloo."""
    if TORCH < (2, 8):
        model.set_reduce_scatter_divide_factor(ranks)
