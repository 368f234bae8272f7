"""The ``Trainer`` saves into an object store, and resumes from it, as it does with a folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import rankless
from rankless.errors import NoCheckpointError
from rankless.storage.object_path import ObjectPath
from rankless.storage.s3.s3_store import S3
from rankless.transformers import Trainer
from tests.helpers.fake_http import BUCKET
from tests.helpers.fake_s3 import FakeS3
from tests.helpers.pool import Ranks
from tests.helpers.trainer_runs import Numbers, launch, make_arguments, make_model, train


def place(endpoint: str) -> ObjectPath:
    return S3(endpoint, region="r", credentials=("key", "secret"), retry_seconds=5.0).path(f"{BUCKET}/run")


@pytest.fixture
def endpoint() -> Iterator[str]:
    with FakeS3().served() as url:
        yield url


def run(endpoint: str, path: Path, steps: int, resume: bool | str = False, **options: Any) -> dict[str, Any]:
    """A run on a rank of the pool, which has local files only in ``path``."""
    result = train(path, steps, resume, checkpoint_dir=place(endpoint), **options)
    assert not [*path.glob("checkpoint-*")]
    return result


def test_a_run_resumes_in_another_folder_on_another_number_of_ranks(
    ranks: Ranks, endpoint: str, tmp_path: Path
) -> None:
    whole = ranks(1, train, tmp_path / "whole", 6)[0]
    ranks(2, run, endpoint, tmp_path / "first", 3)
    assert rankless.open(place(endpoint)).step == 3
    results = ranks(1, run, endpoint, tmp_path / "second", 6, True)
    assert results[0]["tags"] == ["checkpoint-3", "checkpoint-6"]
    assert results[0]["losses"] == pytest.approx(whole["losses"], rel=1e-4)


@pytest.mark.parametrize("name", ["", "checkpoint-3"])
def test_a_run_or_a_checkpoint_is_named_by_its_url(ranks: Ranks, endpoint: str, tmp_path: Path, name: str) -> None:
    ranks(1, run, endpoint, tmp_path / "first", 3)
    whole = ranks(1, train, tmp_path / "whole", 6)[0]
    resumed = ranks(1, run, endpoint, tmp_path / "second", 6, place(endpoint) / name if name else place(endpoint))[0]
    assert resumed["losses"] == whole["losses"]
    assert all(torch.equal(value, whole["weights"][key]) for key, value in resumed["weights"].items())


def test_the_best_checkpoint_is_kept_and_loaded(ranks: Ranks, endpoint: str, tmp_path: Path) -> None:
    options = {
        "load_best_model_at_end": True,
        "metric_for_best_model": "loss",
        "save_total_limit": 2,
        "eval_strategy": "steps",
        "eval_steps": 3,
    }
    result = ranks(1, _train_with_evaluation, endpoint, tmp_path, options)[0]
    assert result["best"].startswith(f"{place(endpoint)}/checkpoint-")
    assert len(result["tags"]) == 2
    assert result["best"].rpartition("/")[2] in result["tags"]


def _train_with_evaluation(endpoint: str, path: Path, options: dict[str, Any]) -> dict[str, Any]:
    with launch():
        arguments = make_arguments(path, 1, 12, **options)
        trainer = Trainer(
            make_model(),
            arguments,
            train_dataset=Numbers(),
            eval_dataset=Numbers(),
            checkpoint_dir=place(endpoint),
            async_save=True,
        )
        trainer.train()
        loaded = {name: value.clone() for name, value in trainer.model.state_dict().items()}
        best = str(trainer.state.best_model_checkpoint)
        rankless.restore(place(endpoint), best.rpartition("/")[2], trainer.model)
        assert all(torch.equal(loaded[name], value) for name, value in trainer.model.state_dict().items())
        return {"best": best, "tags": [info.tag for info in rankless.list_checkpoints(place(endpoint))]}


def test_an_empty_run_is_no_run_to_resume(ranks: Ranks, endpoint: str, tmp_path: Path) -> None:
    (error,) = ranks.outcomes(1, run, endpoint, tmp_path, 3, True)
    assert isinstance(error, NoCheckpointError)
    assert "no checkpoint of rankless in s3://bucket/run" in str(error)
