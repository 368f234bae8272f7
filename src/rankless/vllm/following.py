"""Driving the updates of an engine of vLLM that follows published weights: prepare, ask all workers, pause, commit.

The process that has the engine calls it: a server with an ``AsyncLLM``, or a program with an ``LLM``. No worker may
commit before all have said that they are ready.

A commit writes all parameters, so one that has failed is tried again. If the workers serve different versions after
that, the error says to restart the engine.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest

from rankless.errors import StateError
from rankless.vllm.weight_transfer import COMMIT, FAILED, MIXED, PREPARE, PREPARING

#: Seconds between two questions whether all workers are ready. They prepare next to generation.
_POLL_SECONDS = 0.05

#: The method of :class:`rankless.vllm.weight_transfer.FollowingWorker`.
_STATUS = "rankless_status"

#: The statuses of all workers, as their methods return them.
_Statuses = Sequence[dict[str, Any]]


class _Begun:
    """The arguments of both kinds of followers, and the version that was reached."""

    def __init__(self, engine: Any, weights: str, *, folder: str | None = None, timeout: float = 600.0) -> None:
        self._engine = engine
        info = {"weights": str(weights), "folder": folder, "timeout": timeout}
        self._init = WeightTransferInitRequest(info)
        self._has_begun = False
        #: The number of the version that all workers serve; 0 for the weights that the engine was started with.
        self.version_number = 0
        #: For how many seconds generation could not go on in the last update.
        self.paused_seconds = 0.0


class EngineFollower(_Begun):
    """Keeps an ``LLM`` of vLLM at the newest published version.

    ```python
    if __name__ == "__main__":  # vLLM starts its workers as new processes, which import this file
        engine = LLM(
            "model",
            load_format="rankless",
            model_loader_extra_config={"path": "weights"},
            weight_transfer_config=WeightTransferConfig(backend="rankless"),
            worker_extension_cls="rankless.vllm.weight_transfer.FollowingWorker",
        )
        follower = EngineFollower(engine, "weights")
        follower.update()
    ```

    Args:
        engine: The ``LLM``, with the backend and the extension above.
        weights: The weights directory, or its URL.
        folder: The folder of each host for putting versions together; by default a new one in memory.
        timeout: How many seconds workers wait for each other.
    """

    def update(self) -> int | None:
        """Go to the newest version, and return its number; ``None`` if there is no newer one.

        The first call loads the newest version also if the engine was started with it.

        Raises:
            StateError: A worker could not prepare the version, or could not load it. The message says whether all
                workers serve the version that they had.
        """
        engine = self._engine
        if not self._has_begun:
            engine.init_weight_transfer_engine(self._init)
            self._has_begun = True
        engine.start_weight_update()
        number, version = 0, {}
        try:
            engine.update_weights(_request(PREPARE))
            while are_preparing(statuses := engine.collective_rpc(_STATUS)):
                time.sleep(_POLL_SECONDS)
            if number := choose_prepared(statuses):
                began = time.perf_counter()
                engine.update_weights(_request(COMMIT, number))
                if lacks(statuses := engine.collective_rpc(_STATUS), number):
                    engine.update_weights(_request(COMMIT, number))  # it may be repeated
                    statuses = engine.collective_rpc(_STATUS)
                check_committed(statuses, number)
                version = {"weight_version": str(number)}
                self.paused_seconds = time.perf_counter() - began
        finally:
            engine.finish_weight_update(**version)
        if not number:
            return None
        engine.reset_prefix_cache()
        self.version_number = number
        return number


class AsyncEngineFollower(_Begun):
    """Keeps an ``AsyncLLM`` of vLLM at the newest published version, while it generates.

    ``mode`` decides about running requests while the parameters change: ``"keep"``, ``"wait"`` or ``"abort"``, as in
    ``AsyncLLM.pause_generation``. The other arguments are as in :class:`EngineFollower`.
    """

    def __init__(
        self, engine: Any, weights: str, *, folder: str | None = None, timeout: float = 600.0, mode: str = "keep"
    ) -> None:
        super().__init__(engine, weights, folder=folder, timeout=timeout)
        self._mode = mode

    async def update(self) -> int | None:
        """Go to the newest version. See :meth:`EngineFollower.update`.

        Generation goes on while the version is prepared, and is paused for the commit. It stays paused if the workers
        serve two versions.
        """
        engine = self._engine
        if not self._has_begun:
            await engine.init_weight_transfer_engine(self._init)
            self._has_begun = True
        await engine.start_weight_update()
        number, version = 0, {}
        try:
            await engine.update_weights(_request(PREPARE))
            while are_preparing(statuses := await engine.collective_rpc(_STATUS)):  # noqa: ASYNC110 - of processes
                await asyncio.sleep(_POLL_SECONDS)
            if number := choose_prepared(statuses):
                await self._commit(number)
                version = {"weight_version": str(number)}
        finally:
            await engine.finish_weight_update(**version)
        if not number:
            return None
        self.version_number = number
        return number

    async def _commit(self, number: int) -> None:
        engine, began = self._engine, time.perf_counter()
        await engine.pause_generation(mode=self._mode)
        await engine.update_weights(_request(COMMIT, number))
        if lacks(statuses := await engine.collective_rpc(_STATUS), number):
            await engine.update_weights(_request(COMMIT, number))  # it may be repeated
            statuses = await engine.collective_rpc(_STATUS)
        if not is_mixed(statuses):
            await engine.reset_prefix_cache()
            await engine.resume_generation()
        self.paused_seconds = time.perf_counter() - began
        check_committed(statuses, number)


def _request(phase: str, number: int = 0) -> WeightTransferUpdateRequest:
    return WeightTransferUpdateRequest({"phase": phase, "number": number})


def are_preparing(statuses: _Statuses) -> bool:
    """Return whether some workers are not ready yet."""
    return any(status["state"] == PREPARING for status in statuses)


def choose_prepared(statuses: _Statuses) -> int:
    """Return the version that all workers have prepared; 0 if there is none.

    Raises ``StateError`` if a worker has failed: no worker may commit then.
    """
    errors = [f"worker {rank}: {status['error']}" for rank, status in enumerate(statuses) if status["state"] == FAILED]
    numbers = {status["prepared"] for status in statuses}
    if not errors and len(numbers) != 1:
        errors = [f"the workers have prepared the versions {', '.join(map(str, sorted(numbers)))}"]
    if errors:
        raise StateError(f"all workers serve the version that they had: {'; '.join(errors)}")
    return int(numbers.pop())


def lacks(statuses: _Statuses, number: int) -> bool:
    """Return whether some workers do not serve a version."""
    return any(status["version"] != number for status in statuses)


def is_mixed(statuses: _Statuses) -> bool:
    """Return whether workers serve different versions, or one has parameters of two."""
    return len({status["version"] for status in statuses}) != 1 or any(status["state"] == MIXED for status in statuses)


def check_committed(statuses: _Statuses, number: int) -> None:
    """Raise ``StateError`` unless all workers serve a version."""
    if is_mixed(statuses):
        errors = "; ".join(f"worker {rank}: {status['error']}" for rank, status in enumerate(statuses))
        raise StateError(
            f"the workers serve different versions after the commit of {number}: restart the engine; {errors}"
        )
    if lacks(statuses, number):
        raise StateError(f"version {number} was not committed; all workers serve the version that they had")
