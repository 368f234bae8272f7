"""The backend ``rankless`` for weight transfers of vLLM: an engine follows published weights while it serves.

vLLM makes one :class:`RanklessWeightTransfer` in each worker, and calls it in the thread of the worker. A version is
prepared in a thread next to generation: one worker of each host puts it into a folder in memory, where every block is
proven. The commit loads from there.

**Nothing here raises in an update.** vLLM 0.32 leaves the answers of the other workers in their queues if one raises,
and the next call gets them. So each worker notes its status, and who drives the update asks all workers
(:class:`FollowingWorker`) before it lets them commit.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed import get_world_group
from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.logger import init_logger
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from rankless.engine.comm.process_group_argument import SELF, ProcessGroupArgument
from rankless.errors import MismatchError, StateError
from rankless.observe.units import format_count
from rankless.storage.location import parse_location
from rankless.storage.posix import list_names, wrap_os_errors
from rankless.vllm.used_names import find_missing_names
from rankless.weights.host_folders import HostFolders

_log = init_logger("vllm.rankless")

#: The phases of an update: both at once, or one after the other.
UPDATE, PREPARE, COMMIT = "update", "prepare", "commit"

#: The states of a worker. A mixed one has parameters of two versions: it must not serve.
IDLE, PREPARING, READY, FAILED, MIXED = "idle", "preparing", "ready", "failed", "mixed"

#: How often a commit is tried: it may be repeated, because it writes all parameters.
_ATTEMPTS = 2


@dataclass
class WeightsInitInfo:
    """The argument of ``init_weight_transfer_engine``.

    ``weights`` is the weights directory, ``folder`` the folder of each host for putting versions together; by default a
    new one in memory. ``timeout``: how many seconds workers wait for each other.
    """

    weights: str
    folder: str | None = None
    timeout: float = 600.0


@dataclass
class WeightsUpdateInfo:
    """The argument of ``update_weights``: the phase, ``"update"``, ``"prepare"`` or ``"commit"``.

    ``number`` is the version to commit, which all workers have prepared.
    """

    phase: str = UPDATE
    number: int = 0


@dataclass(frozen=True)
class WorkerStatus:
    """The status of a worker: the version that it serves, the one that it has prepared, and its error."""

    state: str = IDLE
    version: int = 0
    prepared: int = 0
    error: str = ""


class FollowingWorker:
    """The methods that ``worker_extension_cls="rankless.vllm.weight_transfer.FollowingWorker"`` adds to workers."""

    weight_transfer_engine: RanklessWeightTransfer | None

    def rankless_status(self) -> dict[str, Any]:
        """Return the status of this worker. ``collective_rpc("rankless_status")`` returns the status of all workers."""
        engine = self.weight_transfer_engine
        return asdict(WorkerStatus(FAILED, error="no weights are followed") if engine is None else engine.status)


class RanklessWeightTransfer(WeightTransferEngine[WeightsInitInfo, WeightsUpdateInfo]):  # type: ignore[misc]
    """The weights of one worker, as they follow the published versions."""

    init_info_cls, update_info_cls = WeightsInitInfo, WeightsUpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: WeightTransferConfig, vllm_config: Any, device: torch.device, model: nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self.status = WorkerStatus()
        self._folders: HostFolders | None = None
        #: The tensors of the version that was prepared.
        self._prepared: list[tuple[str, torch.Tensor]] | None = None
        self._thread: threading.Thread | None = None

    def init_transfer_engine(self, init_info: WeightsInitInfo) -> None:
        """Begin to follow a weights directory. Nothing is read yet."""
        self.shutdown()
        try:
            self._folders = HostFolders(
                parse_location(init_info.weights),
                None if init_info.folder is None else parse_location(init_info.folder),
                _group(),
                init_info.timeout,
                is_single=False,
            )
            self.status = WorkerStatus(IDLE, self.status.version)
        except Exception as error:  # noqa: BLE001 - see the module
            self._fail(error)

    def start_weight_update(self) -> None:
        """Begin an update: nothing to do, since a version is prepared apart from the parameters."""

    def finish_weight_update(self) -> None:
        """End an update: nothing to do."""

    def receive_weights(self, update_info: WeightsUpdateInfo) -> None:
        """Prepare the newest version, commit it, or both. It never raises: see :attr:`status`."""
        phase = update_info.phase
        if phase == PREPARE:
            self._begin_to_prepare()
        if phase == UPDATE:
            self._prepare()
        if phase == COMMIT or (phase == UPDATE and self.status.state == READY):
            self._commit(update_info.number or self.status.prepared)
        if phase not in {UPDATE, PREPARE, COMMIT}:
            self._fail(StateError(f"there is no phase {phase!r} of an update: it is prepare or commit"))

    def _begin_to_prepare(self) -> None:
        """Let a thread prepare the newest version, next to generation."""
        if self._thread is not None and self._thread.is_alive():
            return
        self.status = WorkerStatus(PREPARING, self.status.version)
        self._thread = threading.Thread(target=self._prepare, name="rankless follow", daemon=True)
        self._thread.start()

    def _prepare(self) -> None:
        """Put the newest version into the folder of this host, and check its names. All workers do it together."""
        if self._folders is None:
            self._fail(StateError("no weights are followed: call init_weight_transfer_engine() first"))
            return
        try:
            self._folders.go_to_newest(self.status.version)
            folder, manifest = self._folders.version_folder, self._folders.manifest
            if folder is None or manifest is None or manifest.number == self.status.version:
                self.status = WorkerStatus(IDLE, self.status.version)
                return
            self._prepared = self._open(folder)
            self.status = WorkerStatus(READY, self.status.version, manifest.number)
        except Exception as error:  # noqa: BLE001 - see the module
            self._folders.doubt()
            self._fail(error)

    def _open(self, folder: Path) -> list[tuple[str, torch.Tensor]]:
        """Map the tensors of a version. Raises ``MismatchError`` if some that this model was loaded from are missing.

        They stay mapped until the commit, so nothing that happens to the folder meanwhile lets the commit of one worker
        fail after another one's. Their bytes were proven when they were put together, and are in memory: the commit
        reads them there. A copy of the bytes that this worker needs, as ``open_weights`` makes it, takes 1.5 to 3 times
        as long, while generation waits.
        """
        tensors = []
        for name in list_names(folder):
            if name.endswith(".safetensors"):
                with wrap_os_errors("open", folder / name), safe_open(folder / name, "pt") as file:
                    tensors += [(key, file.get_tensor(key)) for key in file.keys()]  # noqa: SIM118 - it is no mapping
        if missing := find_missing_names(self.model, [name for name, _ in tensors]):
            raise MismatchError(
                f"{folder} lacks {format_count(len(missing), 'tensor')} of this model, such as {missing[0]!r}"
            )
        return tensors

    def _commit(self, number: int) -> None:
        """Load the prepared version. If that fails it is tried again; if it fails then, the parameters are mixed.

        It may be called again: a version that this worker serves already is not loaded again.
        """
        prepared = self._prepared
        if number == self.status.version and self.status.state == IDLE:
            return
        if prepared is None or self.status.prepared != number:
            self._fail(StateError(f"version {number} is not prepared: all workers must be ready before the commit"))
            return
        for attempt in range(_ATTEMPTS):
            try:
                self._load(prepared)
                break
            except Exception as error:  # noqa: BLE001 - see the module
                if attempt == _ATTEMPTS - 1:
                    self.status = WorkerStatus(MIXED, self.status.version, number, repr(error))
                    _log.exception("the parameters of this worker are of two versions: restart the engine")
                    return
        self._prepared = None
        self.status = WorkerStatus(IDLE, number)

    def _load(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        """Load tensors with the layerwise reload of vLLM: it repacks and quantizes layer by layer."""
        initialize_layerwise_reload(self.model)
        self.model.load_weights(iter(tensors))
        finalize_layerwise_reload(self.model, self.model_config)

    def _fail(self, error: Exception) -> None:
        _log.warning("weights were not updated: %s", error)
        self._prepared = None
        self.status = WorkerStatus(FAILED, self.status.version, 0, str(error) or repr(error))

    def shutdown(self) -> None:
        """Let the folder of this host go."""
        folders, self._folders = self._folders, None
        if self._thread is not None:
            self._thread.join()
        if folders is not None:
            with suppress(Exception):
                folders.close()


def _group() -> ProcessGroupArgument:
    ranks = get_world_group()
    group: ProcessGroupArgument = ranks.cpu_group if ranks.world_size > 1 else SELF
    return group
