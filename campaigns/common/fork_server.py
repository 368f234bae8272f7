"""A fork server that has imported torch and rankless: importing takes seconds, a fork milliseconds."""

from __future__ import annotations

import multiprocessing as mp

#: One server per process, started at the first use.
CONTEXT = mp.get_context("forkserver")
CONTEXT.set_forkserver_preload(["campaigns.common.preloaded"])
