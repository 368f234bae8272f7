"""Tests that a save or load leaves nothing to the garbage collector, which many trainings turn off.

A cycle keeps, among other things, the memory of a save: as much as this rank's part of the state.
"""

import gc
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path

import torch

import rankless
from tests.helpers.fake_s3 import BUCKET, FakeS3, store_at
from tests.helpers.pairwise import each_value


class Training:
    """A training of one process whose run is a folder or in a bucket, with or without a local tier."""

    def __init__(self, run: Path, local: str | None) -> None:
        self.run, self.local, self.steps = run, local, 0
        self.model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def save(self, **options: object) -> None:
        self.model(torch.ones(8)).sum().backward()
        self.optimizer.step()
        self.steps += 1
        arguments = (self.run, f"s{self.steps}", self.model, self.optimizer)
        rankless.save_checkpoint(*arguments, step=self.steps, keep=2, local=self.local, **options)
        rankless.finalize()

    def fail_to_save(self) -> None:
        with suppress(rankless.RanklessError):
            rankless.save_checkpoint(self.run, "s1", self.model, user_content={"a": object()}, local=self.local)

    def load(self) -> None:
        rankless.load_checkpoint(self.run, model=self.model, optimizer=self.optimizer, local=self.local)

    def resume(self) -> None:
        with rankless.Checkpointer(self.run, model=self.model, local=self.local) as checkpointer:
            checkpointer.resume()
            checkpointer.save("resumed", overwrite=True)

    def exchange_model(self) -> None:
        folder = self.run.with_name(f"model_{self.steps}")
        rankless.save_model(self.model, folder)
        rankless.load_model(self.model, folder)
        self.steps += 1

    def open(self) -> None:
        assert dict(rankless.open(self.run, f"s{self.steps}").items())


ACTIONS: dict[str, Callable[[Training], None]] = {
    "save": Training.save,
    "eager": lambda training: training.save(async_save=True, staging="eager"),
    "overlapped": lambda training: training.save(async_save=True, staging="overlapped"),
    "incremental": lambda training: training.save(incremental=True),
    "fail to save": Training.fail_to_save,
    "load": Training.load,
    "resume": Training.resume,
    "model": Training.exchange_model,
    "open": Training.open,
}


@each_value({"action": ACTIONS, "place": ["folder", "tier", "bucket", "bucket and tier"]})
def test_nothing_of_a_save_or_load_waits_for_the_garbage_collector(tmp_path: Path, action: str, place: str) -> None:
    local = str(tmp_path / "tier") if "tier" in place else None
    with FakeS3().served() if "bucket" in place else nullcontext() as url:
        training = Training(store_at(url).path(f"{BUCKET}/run") if "bucket" in place else tmp_path / "run", local)
        for _ in range(2):
            training.save()
            ACTIONS[action](training)
        gc.collect()
        gc.disable()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            ACTIONS[action](training)
            gc.collect()
            kept = {type(thing).__qualname__ for thing in gc.garbage if type(thing).__module__.startswith("rankless")}
            nbytes = sum(thing.nbytes for thing in gc.garbage if isinstance(thing, torch.Tensor))
        finally:
            rankless.finalize()
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
    assert (kept, nbytes) == (set(), 0)
