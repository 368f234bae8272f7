"""Lets the fork server of these tests import the other systems once: each rank would take seconds for it."""

from campaigns.common.fork_server import CONTEXT

CONTEXT.set_forkserver_preload(["campaigns.common.preloaded", "tests.preloaded", "tests.interop.preloaded"])
