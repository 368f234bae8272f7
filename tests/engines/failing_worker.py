"""A worker of vLLM that fails to prepare a version when it is asked to."""

from __future__ import annotations

from typing import Any

from rankless.vllm.weight_transfer import FollowingWorker


class FailingWorker(FollowingWorker):
    """The extension, with a method that lets the next preparation of one worker fail."""

    rank: int

    def fail_next(self, rank: int) -> None:
        engine: Any = self.weight_transfer_engine
        if self.rank != rank:
            return
        check = engine._check_names

        def fail(folder: object) -> None:
            engine._check_names = check
            raise OSError(f"injected for {folder}")

        engine._check_names = fail
