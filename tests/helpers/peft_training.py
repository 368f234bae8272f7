"""A training of a PEFT model with transformers' Trainer, as a script for torchrun: ``RUN STEPS all|adapter``."""

import json
import os
import sys

import transformers

import holdfast
from holdfast.transformers import Trainer
from tests.helpers.peft_models import make_peft
from tests.helpers.trainer_runs import BATCH, Numbers


def main(run: str, steps: str, content: str) -> None:
    arguments = transformers.TrainingArguments(
        output_dir=run,
        per_device_train_batch_size=BATCH // int(os.environ["WORLD_SIZE"]),
        max_steps=int(steps),
        save_steps=2,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(make_peft("lora"), arguments, train_dataset=Numbers(), adapter_only=content == "adapter")
    trainer.train(resume_from_checkpoint=holdfast.has_checkpoint(run))
    if trainer.is_world_process_zero():
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        print(json.dumps(losses), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
