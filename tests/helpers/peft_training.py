"""A training of a PEFT model with transformers' Trainer, as a script for torchrun: ``RUN STEPS all|adapter``."""

import json
import os
import sys
from pathlib import Path

import rankless
from rankless.transformers import Trainer
from tests.helpers.peft_models import make_peft
from tests.helpers.trainer_runs import Numbers, make_arguments


def train(run: Path, steps: int, content: str) -> list[float]:
    """Train on the ranks of torchrun, or of ``launch``, from the newest checkpoint on; return the losses so far."""
    arguments = make_arguments(run, int(os.environ["WORLD_SIZE"]), steps, save_steps=2)
    trainer = Trainer(make_peft("lora"), arguments, train_dataset=Numbers(), adapter_only=content == "adapter")
    trainer.train(resume_from_checkpoint=rankless.has_checkpoint(run))
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def main(run: str, steps: str, content: str) -> None:
    losses = train(Path(run), int(steps), content)
    if os.environ["RANK"] == "0":
        print(json.dumps(losses), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
