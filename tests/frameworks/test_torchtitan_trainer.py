"""Tests torchtitan's own ``Trainer`` on two ranks with rankless's checkpoint manager: it saves, stops and goes on.

The oracle is a run that is not interrupted, with torchtitan's own manager.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torchtitan.trainer", exc_type=ImportError)

from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

import rankless
from rankless.run.journal import read_journal

PROGRAM = Path(__file__).with_name("titan_program.py")

#: Seconds that a job may take.
_TIMEOUT = 900.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with what torchtitan's debug model reads: a tokenizer of bytes, and texts."""
    assets = tmp_path_factory.mktemp("titan") / "tests/assets"
    (assets / "tokenizer").mkdir(parents=True)
    (assets / "c4_test").mkdir()
    tokenizer = Tokenizer(BPE({letter: number for number, letter in enumerate(sorted(ByteLevel.alphabet()))}, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(assets / "tokenizer/tokenizer.json"))
    (assets / "tokenizer/tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    texts = [{"text": f"{n} times {m} is {n * m}. " * 5} for n in range(40) for m in range(5)]
    (assets / "c4_test/data.json").write_text("".join(json.dumps(text) + "\n" for text in texts))
    return assets.parents[1]


def train(folder: Path, manager: str, output: str, steps: int) -> dict[int, float]:
    """Train on two ranks, and return the loss of each step."""
    command = ["-m", "torch.distributed.run", "--nproc-per-node", "2", str(PROGRAM), manager, output, str(steps)]
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=_TIMEOUT,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    losses = [line.split() for line in done.stdout.splitlines() if line.startswith("LOSS ")]
    return {int(step): float.fromhex(loss) for _, step, loss in losses}


@pytest.fixture(scope="module")
def whole(folder: Path) -> dict[int, float]:
    losses = train(folder, "torchtitan", "whole", 6)
    assert [*losses] == [1, 2, 3, 4, 5, 6]
    return losses


def test_a_training_goes_on_as_if_it_had_not_stopped(folder: Path, whole: dict[int, float]) -> None:
    assert train(folder, "rankless", "ours", 4) == {step: whole[step] for step in range(1, 5)}
    assert train(folder, "rankless", "ours", 6) == {step: whole[step] for step in (5, 6)}
    checkpoints = folder / "ours/checkpoint"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step-4", "step-6"]
    kinds = [entry.kind for entry in read_journal(checkpoints) if entry.kind != "removed"]
    assert kinds == ["saved", "saved", "resumed", "saved"]
    assert int(rankless.open(checkpoints).values["stateful"]["train_state"]["step"]) == 6


def test_a_run_of_torchtitans_manager_goes_on_with_rankless(folder: Path, whole: dict[int, float]) -> None:
    train(folder, "torchtitan", "changed", 4)
    assert train(folder, "rankless", "changed", 6) == {step: whole[step] for step in (5, 6)}
