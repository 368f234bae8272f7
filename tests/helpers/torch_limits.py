"""What older versions of torch cannot do by themselves, so that no test can ask for it."""

import torch

TORCH = tuple(int(number) for number in torch.__version__.split(".")[:2])

#: torch 2.8 is the first whose ``fully_shard`` takes parameters that tensor parallelism and it divide unevenly.
SHARDS_UNEVENLY = TORCH >= (2, 8)

#: torch 2.9 is the first whose FSDP1 takes over a parameter that was replaced, if there is only one rank.
TAKES_OVER_ON_ONE_RANK = TORCH >= (2, 9)

#: torch 2.9 is the first with Muon.
HAS_MUON = TORCH >= (2, 9)
