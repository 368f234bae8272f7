"""The ranks of one incarnation: they load, and then save a new state at every step."""

from __future__ import annotations

import faulthandler
import random
import signal
import time
import warnings
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import rankless
from campaigns.common.job import Rank
from campaigns.common.points import Point, call_at_point
from campaigns.tier import known_state
from campaigns.tier.histories.notes import NoteWriter, State
from campaigns.tier.histories.plan import Incarnation
from rankless.observe.events import Event, Saved, SavedLocally

#: The seconds that ranks wait for each other.
TIMEOUT = 5.0

#: A rank that gets it writes the stacks of its threads into a file of the history.
SIGNAL_FOR_STACKS = signal.SIGUSR1

#: On rank 0: from then on, this job is newer than those before.
_ANNOUNCED = Point("job announced", "rankless.tier.job.announce", after=True)

#: The saves of an incarnation that ends well.
_STEPS = 4


@dataclass(frozen=True)
class Places:
    """The folder of a history: the run directory, the tiers of the hosts, the notes."""

    folder: Path

    @property
    def run(self) -> Path:
        """The run directory."""
        return self.folder / "run"

    @property
    def notes(self) -> Path:
        """The folder of the notes."""
        return self.folder / "notes"

    def tier(self, host: str) -> Path:
        """Return the folder of the tier of a host."""
        return self.folder / f"host_{host}"


class Net(nn.Module):
    """Layers for tensor parallelism, some of which no number of ranks divides evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(97, 60)
        self.up = nn.Linear(60, 120)
        self.down = nn.Linear(120, 60)
        self.scale = nn.Parameter(torch.ones(3))


class Training:
    """A model and its optimizer in one layout. ``bare`` is the model without its wrapper."""

    def __init__(self, layout: str) -> None:
        self.bare = Net()
        self.model: nn.Module = self.bare
        if layout == "ddp":
            self.model = DistributedDataParallel(self.bare)
        elif layout == "fsdp":
            fully_shard(self.bare)
        elif layout == "tp":
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            parallelize_module(self.bare, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        self.optimizer = torch.optim.AdamW(self.bare.parameters(), lr=1e-3)

    def fill(self, state: State) -> None:
        """Give all elements the values of a state."""
        for parameter in self.bare.parameters():
            self.optimizer.state[parameter] = {
                "step": torch.tensor(float(state.seed)),
                **{name: torch.zeros_like(parameter, requires_grad=False) for name in ("exp_avg", "exp_avg_sq")},
            }
        known_state.fill_state(self.bare, self.optimizer, state.seed)

    def find_wrong(self, state: State) -> list[str]:
        """Return the names of the tensors that are not those of a state."""
        steps = [float(_whole(of_parameter["step"])) for of_parameter in self.optimizer.state.values()]
        wrong = ["step"] if any(step != state.seed for step in steps) else []
        return wrong + known_state.find_wrong(self.bare, self.optimizer, state.seed)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def train(rank: Rank, places: Places, incarnation: Incarnation) -> None:
    """Load the newest state, and save further ones until something happens, as one rank."""
    number = dist.get_rank()
    notes = NoteWriter(places.notes, incarnation.number, number)
    _note_warnings(notes)
    stacks = (places.folder / f"stacks-{incarnation.number}-{number}").open("w")
    faulthandler.register(SIGNAL_FOR_STACKS, stacks)
    options = asdict(incarnation.options)
    directory = rankless.RunDirectory(
        places.run,
        local=rankless.LocalTier(places.tier(incarnation.hosts[number]), **options),
        async_save=incarnation.is_asynchronous,
        timeout=TIMEOUT,
        on_event=lambda event: _note_event(notes, event),
    )
    training = Training(incarnation.layout)
    rank.wait_for_all_ranks()
    with ExitStack() as traps:
        traps.enter_context(call_at_point(_ANNOUNCED, lambda: rank.send_message("load has begun")))
        _set_trap(rank, incarnation, ("load", "loaded drain"), traps)
        state = _load(directory, training, notes, incarnation)
        rank.send_message("loaded")
        _set_trap(rank, incarnation, ("save", "drain"), traps)
        _save_states(directory, training, notes, incarnation, state)


def _set_trap(rank: Rank, incarnation: Incarnation, phases: tuple[str, ...], traps: ExitStack) -> None:
    """Let the incident happen at its moment, if this rank is the victim and its phase is among these."""
    incident = incarnation.incident
    moment = incident.moment
    if moment is None or dist.get_rank() != incident.victim or moment.phase not in phases:
        return
    action = rank.kill_process if incident.kind.startswith("kill") else rank.stop_process
    traps.enter_context(call_at_point(moment.point, action, turn=incident.turn))


def _note_warnings(notes: NoteWriter) -> None:
    def note(message: Warning | str, *_: Any, **__: Any) -> None:
        notes.add("warning", text=str(message))

    warnings.simplefilter("always")
    warnings.showwarning = note


def _note_event(notes: NoteWriter, event: Event) -> None:
    if isinstance(event, Saved | SavedLocally):
        notes.add("durable" if isinstance(event, Saved) else "local", State.of_tag(event.path.name))


def _load(
    directory: rankless.RunDirectory, training: Training, notes: NoteWriter, incarnation: Incarnation
) -> State | None:
    """Load the newest state, and check each element."""
    if incarnation.number % 2:  # half of the incarnations load into an optimizer that has a state
        training.fill(State(999, 999))
    try:
        restored = directory.restore(None, training.model, training.optimizer, rng=False)
    except rankless.NoCheckpointError:
        notes.add("loaded")
        return None
    state = State(*restored.user_content["state"])
    wrong = training.find_wrong(state)
    wrong += [] if restored.tag == state.tag and restored.step == state.step else ["tag"]
    if wrong:
        notes.add("wrong", state, " ".join(wrong))
    notes.add("loaded", state, restored.source)
    return state


def _save_states(
    directory: rankless.RunDirectory,
    training: Training,
    notes: NoteWriter,
    incarnation: Incarnation,
    loaded: State | None,
) -> None:
    draw = random.Random(dist.get_rank())
    ends = incarnation.incident.kind == "end"
    step = 0 if loaded is None else loaded.step
    before: State | None = None
    while not ends or step < _STEPS + (0 if loaded is None else loaded.step):
        step += 1
        state = State(incarnation.number, step)
        training.fill(state)
        notes.add("save", state)
        handle = directory.save(
            state.tag, training.model, training.optimizer, None, {"state": list(state)}, step=step, rng=False
        )
        if before is not None:  # the next save begins when the copies of the one before are made
            notes.add("copied", before)
        if not incarnation.is_asynchronous:
            notes.add("copied", state)
        elif draw.random() < 0.3:
            handle.wait_local()
            notes.add("local", state)
        elif draw.random() < 0.3:
            handle.wait()
            notes.add("copied", state)
        before = state
        time.sleep(incarnation.pause)
    directory.finalize()
    notes.add("durable", before)
