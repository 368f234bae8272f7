"""Draws of training states: what a case consists of, and what one rank changes in it."""

from __future__ import annotations

import random
from dataclasses import dataclass

#: Layouts in which each rank holds some parts of the model, one after the other or every n-th one.
PIPELINES = ("pipeline", "interleaved")
LAYOUTS = ("plain", "ddp", "fsdp2", "hsdp", "tensor", "reversed", "grid", *PIPELINES)
OPTIMIZERS = ("sgd", "adam", "adamw", "rmsprop", "adagrad", "nadam", "own")
SCHEDULERS = ("none", "step", "lambda", "cosine", "plateau")
LOADERS = ("none", "resumable", "torchdata")
MODULES = ("linear", "embedding", "norm", "batchnorm", "scalar", "frozen", "tied", "buffer", "unset", "extra", "named")
CHANGES = (
    "nothing",
    "parameter",
    "buffer",
    "extra",
    "stateful",
    "user_content",
    "moment",
    "own",
    "setting",
    "scheduler",
    "loader",
)


@dataclass(frozen=True)
class Case:
    """One draw. ``change`` is made on rank ``changed`` before the last of ``saves`` saves.

    With ``is_meta`` the model alone is loaded, from the meta device, and not its optimizer.
    """

    seed: int
    modules: tuple[str, ...]
    optimizer: str
    groups: int
    scheduler: str
    loader: str
    layout: str
    world: int
    loaded_layout: str
    loaded_world: int
    is_meta: bool
    change: str
    changed: int
    is_large: bool
    saves: int
    background: bool

    @property
    def is_same_world(self) -> bool:
        """Whether as many ranks load as have saved."""
        return self.world == self.loaded_world


def draw_case(seed: int) -> Case:
    """Draw a case. The same seed gives the same case everywhere."""
    drawn = random.Random(seed)
    world = drawn.choice([2, 2, 2, 3, 4])
    layout = drawn.choice(LAYOUTS)
    is_same = drawn.random() < 0.5
    loaded_world = world if is_same else drawn.choice([1, 2, 3])
    loaded_layout = layout if is_same else drawn.choice(LAYOUTS)
    is_pipeline = not {layout, loaded_layout}.isdisjoint(PIPELINES)
    return Case(
        seed,
        # Each rank of a pipeline has a part.
        tuple(drawn.sample(MODULES, drawn.randint(max(world, loaded_world) - 1 if is_pipeline else 1, 5))),
        drawn.choice(OPTIMIZERS),
        drawn.choice([1, 2]),
        drawn.choice(SCHEDULERS),
        drawn.choice(LOADERS),
        layout,
        world,
        loaded_layout,
        loaded_world,
        loaded_layout != "ddp" and drawn.random() < 0.25,
        drawn.choice(CHANGES),
        drawn.randrange(world),
        drawn.random() < 0.5,
        drawn.choice([1, 1, 2, 3]),
        drawn.random() < 0.3,
    )
