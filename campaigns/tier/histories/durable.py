"""Looks at the checkpoints in the run directory of a history, without rankless."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file

from campaigns.common.state import ViolationError
from campaigns.tier.histories.notes import State
from campaigns.tier.histories.training import Training
from rankless.ondisk.hidden_names import parse_hidden_name


def check_run_directory(run: Path, saved: Sequence[set[State]], durable: set[State]) -> None:
    """Raise ``ViolationError`` unless each checkpoint is one whole state, and those that were ``durable`` are there.

    ``saved`` are the states that each incarnation has begun to save.
    """
    visible = (entry.name for entry in run.iterdir() if parse_hidden_name(entry.name) is None)
    found = {State.of_tag(name) for name in visible if not name.startswith(".")}
    for state in sorted(found):
        if state not in saved[state.incarnation]:
            raise ViolationError(f"{run / state.tag} is there, and nobody has saved it")
        _check_checkpoint(run / state.tag, state)
    if lost := durable - found:
        raise ViolationError(f"{sorted(lost)} were drained, and are not in the run directory")


def _check_checkpoint(folder: Path, state: State) -> None:
    training = Training("plain")
    training.fill(state)
    expected = {f"model/{name}": parameter.detach() for name, parameter in training.bare.named_parameters()}
    for name, parameter in training.bare.named_parameters():
        of_parameter = training.optimizer.state[parameter]
        expected |= {f"optimizer/{name}/{key}": tensor for key, tensor in of_parameter.items()}
    try:
        files = {group: load_file(folder / group / f"{group}.safetensors") for group in ("model", "optimizer")}
        content = json.loads((folder / "state.json").read_bytes())["user_content"]
    except Exception as error:
        raise ViolationError(f"{folder} is visible, and not whole: {error!r}") from error
    stored = {f"{group}/{name}": tensor for group, tensors in files.items() for name, tensor in tensors.items()}
    wrong = [name for name in expected if name not in stored or not torch.equal(stored[name], expected[name])]
    if wrong or stored.keys() != expected.keys() or content["state"] != list(state):
        raise ViolationError(f"{folder} is a mixture: {wrong or content}")
