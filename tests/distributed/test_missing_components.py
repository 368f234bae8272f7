"""Tests that components missing from a checkpoint are an error before any change, or a warning if allowed."""

import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import rankless
from rankless.errors import InvalidArgumentError, MismatchError
from tests.helpers.pool import Ranks
from tests.helpers.stateful import Counter


def parts() -> dict[str, Any]:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return {"model": model, "optimizer": optimizer}


def full() -> dict[str, Any]:
    made = parts()
    schedule = torch.optim.lr_scheduler.StepLR(made["optimizer"], 1)
    return {**made, "scheduler": schedule, "stateful": {"scaler": Counter()}, "dataloader": Counter(), "rng": True}


#: What is missing in a checkpoint of :func:`parts` alone.
LACKING = ["scheduler", "stateful", "dataloader", "rng"]

#: How a message names the one thing of a component that is missing.
NAMED = {"stateful": "stateful/scaler"}


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    rankless.save_checkpoint(tmp_path, "s", **parts(), rng=False)
    return tmp_path


@pytest.mark.parametrize("load", [rankless.load_checkpoint, rankless.restore])
@pytest.mark.parametrize("part", LACKING)
def test_each_part_that_is_missing_is_an_error_that_tells_the_way_out(
    bare: Path, part: str, load: Callable[..., Any]
) -> None:
    asked, named = {**parts(), "rng": False, part: full()[part]}, NAMED.get(part, part)
    before = asked["model"].weight.detach().clone()
    with pytest.raises(MismatchError, match=rf"(?s){part}.*allow_missing=\('{named}',\).*strict=False"):
        load(bare, **asked)
    assert torch.equal(asked["model"].weight, before)


@pytest.mark.parametrize("allowed", [{"allow_missing": LACKING}, {"strict": False}])
def test_what_may_be_missing_is_warned_of_logged_and_told(
    bare: Path, allowed: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.warns(UserWarning, match="but not all that was asked for") as caught:
        restored = rankless.restore(bare, **full(), **allowed)
    assert restored.missing == ("scheduler", "stateful object 'scaler'", "dataloader", "rng")
    (message,) = [str(warning.message) for warning in caught]
    assert all(name in message for name in restored.missing)
    assert [(record.levelno, record.message) for record in caplog.records if record.levelno > logging.INFO] == [
        (logging.WARNING, message)
    ]


@pytest.mark.parametrize("load", [rankless.load_checkpoint, rankless.restore, lambda *_, **__: 0])
def test_a_warning_names_the_line_of_the_caller(tmp_path: Path, load: Callable[..., Any]) -> None:
    rankless.save_checkpoint(tmp_path, "s", {"w": torch.ones(1)})
    run = rankless.RunDirectory(tmp_path)
    load = load if load in {rankless.load_checkpoint, rankless.restore} else lambda _, **options: run.load(**options)
    with pytest.warns(UserWarning, match="not all") as caught:
        load(tmp_path, model={"v": torch.ones(1)}, strict=False)
    assert {warning.filename for warning in caught} == {__file__}


def test_a_fallback_and_an_old_one_that_stays_are_warned_of_at_the_callers_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for step in range(2):
        rankless.save_checkpoint(tmp_path, f"s{step}", {"w": torch.ones(1)})
    (tmp_path / "s1/manifest.json").write_text("{}")
    with pytest.warns(UserWarning, match="s1") as caught:
        rankless.load_checkpoint(tmp_path, model={"w": torch.ones(1)})
    monkeypatch.setattr("rankless.save.folder_output.expired_checkpoints", lambda *_: 1 / 0)
    with pytest.warns(UserWarning, match="could not be removed") as more:
        rankless.save_checkpoint(tmp_path, "s2", {"w": torch.ones(1)}, keep=1)
    assert {warning.filename for warning in [*caught, *more]} == {__file__}
    warned = {str(warning.message) for warning in [*caught, *more]}
    assert warned == {record.message for record in caplog.records if record.levelno == logging.WARNING}


def test_random_states_that_nobody_asked_for_by_name_may_be_missing_but_not_silently(bare: Path) -> None:
    with pytest.warns(UserWarning, match="missing in the checkpoint: rng"):
        assert rankless.restore(bare, **parts()).missing == ("rng",)
    with warnings.catch_warnings(action="error"):
        assert rankless.restore(bare, **parts(), rng=False).missing == ()


def test_a_part_may_be_missing_though_names_stay_strict(bare: Path) -> None:
    other = {**full(), "model": {"weight": torch.ones(2, 2)}, "optimizer": None}
    with pytest.raises(MismatchError, match="only in the checkpoint: bias") as raised:
        rankless.restore(bare, **other, allow_missing=LACKING)
    assert "allow_missing" not in str(raised.value)
    more = {"weight": torch.zeros(2, 2), "bias": torch.zeros(2), "new": torch.zeros(1)}
    with pytest.warns(UserWarning, match="new"):
        assert rankless.restore(bare, model=more, allow_missing="model").missing == ("new",)


def test_only_parts_can_be_allowed_to_be_missing(bare: Path) -> None:
    with pytest.raises(
        InvalidArgumentError, match=r"each of allow_missing must be one of model, .*; got 'data_loader'"
    ):
        rankless.restore(bare, **parts(), allow_missing=["data_loader"])


# ---------------------------------------------------------------------------------------------------------------
# What belongs to single ranks, on other numbers of ranks


def save_own(path: str) -> None:
    rank = dist.get_rank()
    rankless.save_checkpoint(path, "s", **parts(), per_rank_content={"rank": rank}, dataloader=Counter(rank))


def resume(path: str, **options: Any) -> tuple[Any, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = rankless.restore(path, **parts(), **options)
    return result, [str(warning.message) for warning in caught]


def resume_with_loader(path: str) -> tuple[Any, list[str]]:
    return resume(path, dataloader=Counter())


def only_weights(path: str) -> tuple[Any, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = rankless.restore(path, model=parts()["model"])
    return result, [str(warning.message) for warning in caught]


def test_other_numbers_of_ranks_are_told_that_rank_content_is_lost_to_them(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, save_own, str(tmp_path))
    reported = ranks(3, resume, str(tmp_path))
    assert [restored.missing for restored, _ in reported] == [("per_rank_content",)] * 3
    assert [len(warned) for _, warned in reported] == [1, 0, 0]
    assert "per_rank_content: each rank has its own, and 2 ranks saved, 3 load" in reported[0][1][0]
    for error in ranks.outcomes(3, resume_with_loader, str(tmp_path)):
        assert isinstance(error, MismatchError)
        assert "allow_missing=('dataloader',)" in str(error)
    for restored, warned in ranks(2, resume, str(tmp_path)):
        assert (restored.missing, warned) == ((), [])


def test_who_loads_weights_alone_has_not_asked_for_rank_content(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, save_own, str(tmp_path))
    for restored, warned in ranks(1, only_weights, str(tmp_path)):
        assert (restored.missing, warned) == (("per_rank_content",), [])


def test_load_checkpoint_does_not_keep_rank_content_back_in_silence(tmp_path: Path) -> None:
    rankless.save_checkpoint(tmp_path, "s", **parts(), user_content=3, per_rank_content={"seen": 5})
    with pytest.warns(UserWarning, match=r"the checkpoint 's' has per_rank_content, which only restore\(\) returns"):
        assert rankless.load_checkpoint(tmp_path, **parts()) == 3
    with warnings.catch_warnings(action="error"):
        assert rankless.load_checkpoint(tmp_path, model=parts()["model"]) == 3
        assert rankless.restore(tmp_path, **parts()).per_rank_content == {"seen": 5}


def test_a_data_loader_that_was_saved_need_not_be_passed(tmp_path: Path) -> None:
    rankless.save_checkpoint(tmp_path, "s", **parts(), dataloader=Counter(3))
    with warnings.catch_warnings(action="error"):
        restored = rankless.restore(tmp_path, **parts())
    assert (restored.exact, restored.missing) == (("model", "optimizer", "rng"), ())


def uneven(path: str) -> tuple[tuple[str, ...], list[str]]:
    """Rank 1 alone asks for what the checkpoint lacks."""
    state = {"w": torch.ones(1), **({"v": torch.ones(1)} if dist.get_rank() else {})}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        missing = rankless.restore(path, model=state, strict=False).missing
    return missing, [str(warning.message) for warning in caught]


def test_rank_0_tells_what_any_rank_goes_without(ranks: Ranks, tmp_path: Path) -> None:
    rankless.save_checkpoint(tmp_path, "s", {"w": torch.ones(1)})
    (first, (warned,)), (second, none) = ranks(2, uneven, str(tmp_path))
    assert (first, second, none) == ((), ("v",), [])
    assert "missing in the checkpoint: v" in warned
