"""What older versions of torch cannot do by themselves, so that no test can ask for it."""

import torch
import torch.utils.backend_registration
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

TORCH = tuple(int(number) for number in torch.__version__.split(".")[:2])

#: torch 2.8 is the first whose ``fully_shard`` takes parameters that tensor parallelism and it divide unevenly.
SHARDS_UNEVENLY = TORCH >= (2, 8)

#: torch 2.8 is the first whose stores list their keys; without that, the keys of a gloo group cannot be removed.
LISTS_KEYS = TORCH >= (2, 8)

#: torch 2.8 is the first with a storage writer for Hugging Face folders.
HAS_HUGGING_FACE_WRITER = TORCH >= (2, 8)

#: torch 2.8 is the first whose FSDP2 averages gradients over gloo; 2.7 adds them up.
AVERAGES_GRADIENTS = TORCH >= (2, 8)

#: torch 2.8 is the first with ``use_collectives=False``.
SAVES_WITHOUT_COLLECTIVES = TORCH >= (2, 8)

#: torch 2.7 leaves a rank waiting if an optimizer's step of a DTensor fails on another one.
STEPS_FAIL_TOGETHER = TORCH >= (2, 8)

#: torch 2.9 is the first whose distributed checkpoints have a version.
HAS_DCP_VERSION = TORCH >= (2, 9)

#: torch 2.9 is the first whose FSDP1 takes over a parameter that was replaced, if there is only one rank.
TAKES_OVER_ON_ONE_RANK = TORCH >= (2, 9)

#: torch 2.9 is the first with Muon.
HAS_MUON = TORCH >= (2, 9)

#: Newer versions of torch divide one dimension of a mesh into several.
HAS_UNFLATTEN = hasattr(DeviceMesh, "_unflatten")

#: Devices that are written in Python come with a later version than 2.9.
HAS_PYTHON_DEVICES = hasattr(torch.utils.backend_registration, "_setup_privateuseone_for_python_backend")


def forget_meshes() -> None:
    """Clear the caches in which torch 2.7 finds meshes of process groups that were destroyed."""
    if TORCH < (2, 8):
        DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear()
