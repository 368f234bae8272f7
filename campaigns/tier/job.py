"""A job of the measurements: a rank on each of some hosts."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from campaigns.tier import ranks
from campaigns.tier.hosts import Host


def _call(function: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    return function(*args, **options)


_ports = itertools.count(29500)


class Job:
    """The ranks of a job, which make the same calls."""

    def __init__(self, hosts: Sequence[Host]) -> None:
        """Start a rank on each host."""
        self._hosts = hosts
        self._workers = [host.worker() for host in hosts]
        port = next(_ports)
        for rank, worker in enumerate(self._workers):
            worker.send(ranks.join, hosts[0].address, port, rank, len(hosts))
        self.receive()

    def call(self, function: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
        """Call a function on all ranks, and return their results."""
        self.send(function, *args, **options)
        return self.receive()

    def send(self, function: Callable[..., Any], *args: Any, **options: Any) -> None:
        """Begin a call on all ranks."""
        for worker in self._workers:
            worker.send(_call, function, args, options)

    def receive(self) -> list[Any]:
        """Return the results of the call that was begun."""
        return [worker.receive() for worker in self._workers]

    def kill_rank(self, rank: int) -> None:
        """Kill the process of a rank."""
        pid = self._workers[rank].call(os.getpid)
        self._hosts[rank].execute("kill", "-9", str(pid))

    def close(self) -> None:
        """End all processes."""
        for worker in self._workers:
            worker.close()


@contextmanager
def running_job(hosts: Sequence[Host]) -> Iterator[Job]:
    """Start a job, and end it at the end of the context."""
    job = Job(hosts)
    try:
        yield job
    finally:
        job.close()
