"""The modules that the fork server imports, named in :mod:`campaigns.common.fork_server`.

It imports them without the garbage collector, which would go through all of torch several times, and its processes
never look at their objects again.
"""

from __future__ import annotations

import gc
import importlib
from collections.abc import Iterable

#: Torch imports ``_dynamo`` with the first optimizer.
MODULES = (
    *("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.pipelining"),
    *("torch.distributed.tensor.parallel", "rankless.run_directory", "rankless.api", "rankless.data.resumable_loader"),
    *("campaigns.common.points", "campaigns.common.interruption", "campaigns.resume.training"),
    *("campaigns.tier.histories.training", "rankless.save.tier_content", "rankless.load.tier_load"),
    *("rankless.load.fallback", "rankless.save.generation_content"),
    "pytest",  # which the modules import in which the functions of tests are
)


def preload(names: Iterable[str]) -> None:
    """Import modules into the fork server."""
    gc.disable()
    for name in names:
        importlib.import_module(name)
    gc.freeze()
    gc.set_threshold(20_000)  # Python's own is 700, and costs a fifteenth of the time of all tests
    gc.enable()


preload(MODULES)
