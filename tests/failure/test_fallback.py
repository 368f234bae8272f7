"""Tests that a load falls back from a corrupt newest checkpoint to the newest intact one, with a warning, or fails."""

import logging
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import rankless
from rankless.errors import CorruptCheckpointError, NoCheckpointError
from rankless.load.rank_reads import Reads
from tests.helpers.corruption import corrupt_model_of_step
from tests.helpers.pool import Ranks


def fill(path: Path, number: int = 3) -> None:
    for step in range(number):
        rankless.save_checkpoint(path, f"step_{step}", {"w": torch.full((64,), float(step))}, step=step)


def test_it_falls_back_over_damaged_tensors_and_manifests(tmp_path: Path) -> None:
    fill(tmp_path, 4)
    corrupt_model_of_step(tmp_path, 3)
    (tmp_path / "step_2/manifest.json").write_text("{")
    model = {"w": torch.zeros(64)}
    with pytest.warns(UserWarning, match=r"^loaded 'step_1' and .*: step_2, step_3 are corrupt; .*"):
        restored = rankless.restore(tmp_path, model=model)
    assert (restored.tag, restored.skipped_checkpoints, restored.verified) == ("step_1", ("step_2", "step_3"), True)
    assert torch.equal(model["w"], torch.ones(64))


def test_only_corrupt_ones_are_called_so_in_one_short_sentence_also_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One with other weights lies between, sound; and one of a newer version, of which nobody can tell."""
    rankless.save_checkpoint(tmp_path, "step_1", {"w": torch.ones(64)})
    rankless.save_checkpoint(tmp_path, "weights", {"other": torch.ones(64)})
    rankless.save_checkpoint(tmp_path, "step_2", {"w": torch.ones(64)})
    rankless.save_checkpoint(tmp_path, "future", {"w": torch.ones(64)})
    (tmp_path / "future/manifest.json").write_text('{"format": "rankless", "version": 2}')
    corrupt_model_of_step(tmp_path, 2)
    with caplog.at_level(logging.INFO, "rankless"), pytest.warns(UserWarning, match="loaded") as seen:
        restored = rankless.restore(tmp_path, model={"w": torch.zeros(64)})
    assert restored.skipped_checkpoints == ("step_2",)
    (warning,) = [str(item.message) for item in seen if issubclass(item.category, UserWarning)]
    assert warning == (
        "loaded 'step_1' and ignored other checkpoints: step_2 is corrupt; "
        "weights does not match the objects passed; future is unreadable; "
        f"run `rankless verify --all {tmp_path}` for details"
    )
    assert ("rankless", logging.WARNING, warning) in caplog.record_tuples
    reasons = [message for _, level, message in caplog.record_tuples if level == logging.INFO]
    assert any("'w' in" in reason and "step_2" in reason for reason in reasons)
    stale = ("partly filled", "do not use", "strict=False", "were not changed")
    assert not [reason for reason in (warning, *reasons) if any(word in reason for word in stale)]


def test_a_sound_copy_of_a_corrupt_one_is_loaded(tmp_path: Path) -> None:
    """They have one id, and are told by their names."""
    fill(tmp_path)
    shutil.copytree(tmp_path / "step_2", tmp_path / "a_copy")
    corrupt_model_of_step(tmp_path, 2)
    model = {"w": torch.zeros(64)}
    with pytest.warns(UserWarning, match="loaded 'a_copy' and ignored other checkpoints: step_2 is corrupt;"):
        assert rankless.restore(tmp_path, model=model).skipped_checkpoints == ("step_2",)
    assert torch.equal(model["w"], torch.full((64,), 2.0))


def test_a_sound_run_falls_back_from_nothing(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    fill(tmp_path)
    assert rankless.restore(tmp_path, model={"w": torch.zeros(64)}).skipped_checkpoints == ()
    assert not [warning for warning in recwarn if warning.category is UserWarning]


def test_what_was_asked_for_by_name_is_never_replaced_by_another(tmp_path: Path) -> None:
    fill(tmp_path)
    corrupt_model_of_step(tmp_path, 2)
    for path, tag in ((tmp_path, "step_2"), (tmp_path / "step_2", None)):
        with pytest.raises(CorruptCheckpointError, match="step_2"):
            rankless.load_checkpoint(path, tag, model={"w": torch.zeros(64)})


def test_nobody_falls_back_who_does_not_want_to(tmp_path: Path) -> None:
    fill(tmp_path)
    corrupt_model_of_step(tmp_path, 2)
    with pytest.raises(CorruptCheckpointError, match="step_2"):
        rankless.load_checkpoint(tmp_path, model={"w": torch.zeros(64)}, on_corruption="raise")
    (tmp_path / "step_1/manifest.json").write_text("{")
    with pytest.raises(CorruptCheckpointError, match=r"step_1.*may be the newest"):
        rankless.load_checkpoint(tmp_path, model={"w": torch.zeros(64)}, on_corruption="raise")
    with pytest.raises(ValueError, match="on_corruption must be one of"):
        rankless.load_checkpoint(tmp_path, model={"w": torch.zeros(64)}, on_corruption="ignore")


def test_where_all_are_damaged_the_newest_ones_damage_is_told(tmp_path: Path) -> None:
    fill(tmp_path, 2)
    corrupt_model_of_step(tmp_path, 0)
    corrupt_model_of_step(tmp_path, 1)
    with pytest.raises(CorruptCheckpointError, match=r"step_1.*partly filled"):
        rankless.load_checkpoint(tmp_path, model={"w": torch.zeros(64)})
    with pytest.raises(NoCheckpointError):
        rankless.load_checkpoint(tmp_path / "nothing", model={"w": torch.zeros(64)})


def on_ranks(path: str) -> tuple[str, tuple[str, ...], float]:
    model = {"w": torch.zeros(64)}
    restored = rankless.restore(path, model=model)
    return restored.tag, restored.skipped_checkpoints, float(model["w"].sum())


def test_all_ranks_fall_back_to_the_same_one(ranks: Ranks, tmp_path: Path) -> None:
    fill(tmp_path)
    corrupt_model_of_step(tmp_path, 2)
    assert ranks(3, on_ranks, str(tmp_path)) == [("step_1", ("step_2",), 64.0)] * 3


@pytest.mark.parametrize("how", ["overwritten", "retired"])
def test_a_sound_checkpoint_that_goes_while_it_is_loaded_makes_way_for_its_successor(tmp_path: Path, how: str) -> None:
    fill(tmp_path, 2)
    run = Reads.run

    def change(*arguments: Any, **options: Any) -> Any:
        if not changed:
            changed.append(1)
            tensor = torch.full((64,), 9.0)
            if how == "overwritten":
                rankless.save_checkpoint(tmp_path, "step_1", {"w": tensor}, overwrite=True)
            else:
                rankless.save_checkpoint(tmp_path, "step_2", {"w": tensor}, keep=1)
        return run(*arguments, **options)

    changed: list[int] = []
    model = {"w": torch.zeros(64)}
    with mock.patch.object(Reads, "run", change):
        restored = rankless.restore(tmp_path, model=model)
    assert float(model["w"][0]) == 9.0
    assert restored.skipped_checkpoints == ()


def test_what_the_sound_one_would_leave_with_values_of_the_damaged_one_is_not_called_loaded(tmp_path: Path) -> None:
    """It is told to be missing, and the caller takes it for what it was."""
    rankless.save_checkpoint(tmp_path, "step_0", {"w": torch.ones(64), "v": torch.ones(2)})
    rankless.save_checkpoint(tmp_path, "step_1", {"w": torch.ones(64)})
    rankless.save_checkpoint(tmp_path, "step_2", {"w": torch.ones(64), "v": torch.ones(2)})
    corrupt_model_of_step(tmp_path, 2)
    model = {"w": torch.zeros(64), "v": torch.zeros(2)}
    with pytest.warns(UserWarning, match=r"^loaded 'step_0' and .*: step_2 is corrupt; step_1 does not match"):
        restored = rankless.restore(tmp_path, model=model, strict=False)
    assert (restored.tag, restored.missing, restored.skipped_checkpoints) == ("step_0", (), ("step_2",))


def test_values_of_the_damaged_one_are_found_whatever_they_are_called_in_it(tmp_path: Path) -> None:
    """It has one tensor for two of ours, the sound one has it for one of them only."""
    tied = torch.ones(64)
    rankless.save_checkpoint(tmp_path, "step_1", {"v": torch.zeros(64)})
    rankless.save_checkpoint(tmp_path, "step_2", {"v": tied, "w": tied})
    assert rankless.open(tmp_path).keys() == ["model/v"]
    corrupt_model_of_step(tmp_path, 2)
    with pytest.raises(CorruptCheckpointError, match=r"step_2.*may be partly filled"):
        rankless.restore(tmp_path, model={"w": torch.zeros(64), "v": torch.zeros(64)}, strict=False)


def test_where_values_cannot_be_put_in_place_no_other_ones_are_tried(tmp_path: Path) -> None:
    """Some of them are in place by then."""

    class Odd:
        def state_dict(self) -> dict[str, int]:
            return {}

        def load_state_dict(self, _: Any) -> None:
            tried.append(self)
            if len(tried) == 1:
                raise CorruptCheckpointError("not this one")

    tried: list[Odd] = []
    for step in range(2):
        rankless.save_checkpoint(tmp_path, f"step_{step}", {"w": torch.ones(1)}, stateful={"odd": Odd()})
    with pytest.raises(CorruptCheckpointError, match="not this one"):
        rankless.restore(tmp_path, model={"w": torch.zeros(1)}, stateful={"odd": Odd()}, strict=False)


@pytest.mark.parametrize("strict", [True, False])
def test_where_no_sound_one_fits_the_damage_is_what_is_told(tmp_path: Path, strict: bool) -> None:
    """Not that nothing was changed."""
    rankless.save_checkpoint(tmp_path, "step_1", {"w": torch.ones(64)})
    rankless.save_checkpoint(tmp_path, "step_2", {"w": torch.ones(64), "v": torch.ones(2)})
    corrupt_model_of_step(tmp_path, 2)
    with pytest.raises(CorruptCheckpointError, match=r"step_2.*may be partly filled"):
        rankless.restore(tmp_path, model={"w": torch.zeros(64), "v": torch.zeros(2)}, strict=strict)
