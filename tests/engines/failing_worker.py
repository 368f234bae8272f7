"""A worker of vLLM that fails to prepare a version, or loses what it has prepared, when it is asked to."""

from __future__ import annotations

from typing import Any

from rankless.vllm.weight_transfer import FollowingWorker


class FailingWorker(FollowingWorker):
    """The extension, with methods that disturb the next update."""

    rank: int

    def fail_next(self, rank: int) -> None:
        engine: Any = self.weight_transfer_engine
        if self.rank != rank:
            return
        open_folder = engine._open

        def fail(folder: object) -> None:
            engine._open = open_folder
            raise OSError(f"injected for {folder}")

        engine._open = fail

    def remove_next(self) -> None:
        """Remove the files of the next version after this worker has prepared it."""
        engine: Any = self.weight_transfer_engine
        commit = engine._commit

        def remove_first(number: int) -> None:
            engine._commit = commit
            for file in engine._folders.version_folder.glob("*.safetensors"):
                file.unlink(missing_ok=True)
            commit(number)

        engine._commit = remove_first
