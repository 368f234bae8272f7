"""A fork server that has imported torch and rankless: importing takes seconds, a fork milliseconds."""

from __future__ import annotations

import multiprocessing as mp

#: One server per process, started at the first use. Torch imports ``_dynamo`` with the first optimizer.
CONTEXT = mp.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        *("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.pipelining"),
        *("torch.distributed.tensor.parallel", "rankless.run_session", "rankless.api", "rankless.data.loader"),
        *("campaigns.common.points", "campaigns.common.interruption", "campaigns.resume.training"),
        *("campaigns.tier.histories.training", "rankless.save.folder_tier_save", "rankless.load.tier_load"),
        *("rankless.load.fallback", "rankless.save.folder_drain"),
    ]
)
