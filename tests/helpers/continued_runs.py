"""Jobs of frameworks that save each step under a name of the framework's, and continue what they find.

A job adds its own number to the only weight in each step. So a weight tells which jobs have led to it: after three
steps of job 1 and two of job 10 it is 23.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from accelerate.utils import ProjectConfiguration
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint

import rankless
import rankless.accelerate
import rankless.transformers
from rankless import nxd
from tests.helpers import lightning_trainer, trainer_runs
from tests.helpers.lightning_fabric import fabric

#: A start from the latest checkpoint, by the framework's own means.
LATEST = -1


class Job(NamedTuple):
    """One training: its number, its last step, and what it starts from: a step, ``LATEST``, or ``None``."""

    number: int
    last: int
    start: int | None = None


#: That of `make_arguments`, which the loss of a `Trainer` cancels.
_LEARNING_RATE = 0.01

#: Trains in a folder.
Train = Callable[[Path, Job], None]


def make_weight() -> torch.nn.Linear:
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    return model


def make_sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1.0)


def add(model: torch.nn.Module, number: int) -> torch.Tensor:
    """Return the loss of which a step of SGD adds a number to the weight."""
    return -number * model(torch.ones(1, 1)).sum()


def train_by_functions(folder: Path, job: Job, *, by_path: bool = False) -> None:
    model = make_weight()
    optimizer, step = make_sgd(model), 0
    if job.start is not None:
        tag = None if job.start == LATEST else f"step_{job.start}"
        path, tag = (folder / tag, None) if by_path and tag else (folder, tag)
        step = int(rankless.restore(path, tag, model, optimizer).step)
    for number in range(step + 1, job.last + 1):
        optimizer.zero_grad()
        add(model, job.number).backward()
        optimizer.step()
        rankless.save_checkpoint(folder, f"step_{number}", model, optimizer, step=number, overwrite=True)


def train_by_paths(folder: Path, job: Job) -> None:
    train_by_functions(folder, job, by_path=True)


def train_with_nxd(folder: Path, job: Job, **options: Any) -> None:
    model = make_weight()
    optimizer, step = make_sgd(model), 0
    if job.start is not None:
        tag = None if job.start == LATEST else f"step_{job.start}"
        step = nxd.load_checkpoint(folder, tag, model, optimizer)["step"]
    for number in range(step + 1, job.last + 1):
        optimizer.zero_grad()
        add(model, job.number).backward()
        optimizer.step()
        content = {"step": number}
        nxd.save_checkpoint(
            folder, f"step_{number}", model, optimizer, user_content=content, async_save=True, **options
        )
    nxd.finalize_checkpoint()


class Adding(LightningModule):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.layer = number, make_weight()

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        del batch
        return add(self.layer, self.number)

    def test_step(self, batch: Any) -> None:
        del batch

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return make_sgd(self)


def make_lightning(folder: Path, last: int, **options: Any) -> Any:
    chosen = {"every_n_train_steps": 1, "save_top_k": -1, "filename": "{step}", **options}
    callback = ModelCheckpoint(folder, **chosen)
    layout = "plain" if dist.get_world_size() == 1 else "ddp"
    return lightning_trainer.make_trainer(str(folder), layout, last, [callback])


def make_batches() -> torch.utils.data.DataLoader:
    return torch.utils.data.DataLoader(torch.zeros(99, 1))


def train_with_lightning(folder: Path, job: Job, *, latest: str = "last", **options: Any) -> None:
    names = {None: None, LATEST: latest}
    with lightning_trainer.set_environment():
        trainer = make_lightning(folder, job.last, save_last=True, **options)
        trainer.fit(
            Adding(job.number), make_batches(), ckpt_path=names.get(job.start, f"{folder}/step={job.start}.ckpt")
        )


def train_with_lightning_unversioned(folder: Path, job: Job, **options: Any) -> None:
    """Save under the same names again, and find the latest checkpoint by the path of the folder."""
    train_with_lightning(folder, job, latest=str(folder), enable_version_counter=False, **options)


def evaluate_with_lightning(folder: Path, step: int) -> None:
    with lightning_trainer.set_environment():
        module = Adding(0)
        make_lightning(folder, 9).test(module, make_batches(), ckpt_path=f"{folder}/step={step}.ckpt", verbose=False)
        assert module.layer.weight.item() == step


def train_with_fabric(folder: Path, job: Job) -> None:
    with fabric("plain" if dist.get_world_size() == 1 else "ddp", async_save=True) as made:
        model = made.setup_module(make_weight())
        state = {"net": model, "opt": made.setup_optimizers(make_sgd(model)), "step": 0}
        if job.start is not None:
            made.load(folder if job.start == LATEST else folder / f"{job.start}.ckpt", state)
        for number in range(state["step"] + 1, job.last + 1):
            state["opt"].zero_grad()
            made.backward(add(model, job.number))
            state["opt"].step()
            made.save(folder / f"{number}.ckpt", {**state, "step": number})
        rankless.finalize()


class AddingModel(torch.nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.layer = number, make_weight()

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        del input_ids, labels
        return {"loss": add(self.layer, self.number) / _LEARNING_RATE}


def make_trainer(folder: Path, job: Job, **options: Any) -> Any:
    fixed = {"optim": "sgd", "max_grad_norm": 0.0, "save_steps": 1}
    arguments = trainer_runs.make_arguments(folder, dist.get_world_size(), job.last, **fixed, **options)
    return rankless.transformers.Trainer(AddingModel(job.number), arguments, train_dataset=trainer_runs.Numbers())


def train_with_transformers(folder: Path, job: Job, **options: Any) -> None:
    resume = {None: None, LATEST: True}.get(job.start, f"{folder}/checkpoint-{job.start}")
    with trainer_runs.launch():
        warnings.simplefilter("always")
        make_trainer(folder, job, **options).train(resume_from_checkpoint=resume)


def train_with_accelerate(folder: Path, job: Job, **options: Any) -> None:
    """Automatic names begin at 0, and a state says its step by its name."""
    with trainer_runs.launch():
        warnings.simplefilter("always")
        project = ProjectConfiguration(str(folder.parent), automatic_checkpoint_naming=True, **options)
        accelerator = rankless.accelerate.Accelerator(cpu=True, project_config=project)
        model = make_weight()
        model, optimizer = accelerator.prepare(model, make_sgd(model))
        if job.start is not None:
            accelerator.load_state(None if job.start == LATEST else str(folder / f"checkpoint_{job.start - 1}"))
        for _ in range(accelerator.save_iteration, job.last):
            optimizer.zero_grad()
            accelerator.backward(add(model, job.number))
            optimizer.step()
            accelerator.save_state()


ADAPTERS: dict[str, Train] = {
    "functions": train_by_functions,
    "paths": train_by_paths,
    "NxD": train_with_nxd,
    "Lightning": train_with_lightning,
    "Lightning, the same names": train_with_lightning_unversioned,
    "Fabric": train_with_fabric,
    "transformers": train_with_transformers,
    "Accelerate": train_with_accelerate,
}


def folder_of(train: Train, base: Path) -> Path:
    """Return the run directory of a training: Accelerate chooses its name."""
    return base / "checkpoints" if train is train_with_accelerate else base


def run_job(train: Train, folder: Path, *jobs: Job) -> list[str]:
    """Run one job, or several in the same process. Return the warnings about rollbacks."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for job in jobs:
            train(folder, job)
    return [str(one.message) for one in caught if "goes back" in str(one.message)]


def weights(folder: Path) -> list[tuple[int, bool]]:
    """Return the weight of each checkpoint, and whether it is current, oldest first."""
    return [(weight_of(info.path), info.is_current) for info in rankless.list_checkpoints(folder)]


def weight_of(path: Path) -> int:
    checkpoint = rankless.open(path)
    [name] = [name for name in checkpoint if name.startswith("model/")]
    return round(checkpoint[name].item())
