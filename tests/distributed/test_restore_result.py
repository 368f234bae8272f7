"""Tests that a load reports for each component whether it was restored exactly, reconstructed, or missing."""

import random
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import rankless
from rankless.errors import CorruptCheckpointError, MismatchError
from rankless.state.rank_states import equal_run_length
from rankless.state.rng import EVERYWHERE
from tests.helpers.pool import Ranks


def trained() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    scaler = torch.amp.GradScaler("cpu")
    rankless.save_checkpoint(tmp_path, "s", *trained(), {"x": 1}, stateful={"scaler": scaler}, per_rank_content=[5])
    return tmp_path


def test_all_that_comes_back_as_it_was_is_exact(run: Path) -> None:
    restored = rankless.restore(run, None, *trained(), stateful={"scaler": torch.amp.GradScaler("cpu")})
    parts = {"model", "optimizer", "scheduler", "stateful", "rng", "user_content", "per_rank_content"}
    assert (set(restored.exact), restored.reconstructed, restored.missing) == (parts, (), ())


def test_what_was_not_asked_for_is_not_mentioned(run: Path) -> None:
    restored = rankless.restore(run, scheduler=trained()[2])
    assert restored.exact == ("scheduler", "user_content", "per_rank_content")


def test_a_model_that_was_cast_is_rederived(run: Path) -> None:
    restored = rankless.restore(run, model=nn.Linear(3, 2, dtype=torch.bfloat16), cast_dtype=True)
    assert (restored.reconstructed, "model" in restored.exact) == (("model",), False)
    same = rankless.restore(run, model=nn.Linear(3, 2), cast_dtype=True)
    assert (same.reconstructed, "model" in same.exact) == ((), True)


@pytest.mark.parametrize("names", [("weight",), ("weight", "bias", "new"), ("weight", "new")])
def test_a_part_that_does_not_match_wholly_is_neither(run: Path, names: tuple[str, ...]) -> None:
    model = {name: torch.zeros((2, 3) if name == "weight" else 2) for name in names}
    restored = rankless.restore(run, model=model, strict=False)
    assert "model" not in restored.exact + restored.reconstructed
    assert (set(restored.missing), set(restored.unexpected)) == (set(names) & {"new"}, {"weight", "bias"} - set(names))


def test_of_several_models_each_is_told_of(tmp_path: Path) -> None:
    rankless.save_checkpoint(tmp_path, "s", {"a": nn.Linear(1, 1), "b": nn.Linear(1, 1)})
    restored = rankless.restore(
        tmp_path, model={"a": nn.Linear(1, 1), "b": nn.Linear(1, 1, dtype=torch.float64)}, cast_dtype=True
    )
    assert (restored.exact, restored.reconstructed) == (("model/a",), ("model/b",))


def test_nothing_is_said_to_be_exact_that_is_not_in_the_checkpoint(tmp_path: Path) -> None:
    rankless.save_checkpoint(tmp_path, "s", nn.Linear(3, 2), rng=False)
    options: dict[str, Any] = {"optimizer": trained()[1], "scheduler": trained()[2]}
    options["stateful"] = {"scaler": torch.amp.GradScaler("cpu")}
    with pytest.warns(UserWarning, match=r"(?s)not all .*: optimizer\n.*: scheduler\n.*'scaler'\n.*: rng$"):
        restored = rankless.restore(tmp_path, model=trained()[0], strict=False, **options)
    assert restored.exact == ("model",)
    assert set(restored.missing) == {"optimizer", "scheduler", "stateful object 'scaler'", "rng"}


def draws() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))  # noqa: NPY002


def seed(number: int) -> None:
    random.seed(number)
    np.random.seed(number)  # noqa: NPY002
    torch.manual_seed(number)


def save(path: str, tag: str, seeds: list[int]) -> tuple[float, float, float]:
    """Save with generators that were seeded with numbers by rank; what each would draw next."""
    seed(seeds[dist.get_rank()])
    rankless.save_checkpoint(path, tag, per_rank_content={"rank": dist.get_rank()})
    return draws()


def resume(path: str, tag: str) -> tuple[tuple[float, float, float], rankless.RestoreResult]:
    seed(123)
    restored = rankless.restore(path, tag, rng=True)
    return draws(), restored


def test_on_as_many_ranks_each_goes_on_drawing_where_it_was(ranks: Ranks, tmp_path: Path) -> None:
    before = ranks(3, save, str(tmp_path), "s", [1, 2, 3])
    after = ranks(3, resume, str(tmp_path), "s")
    assert [drawn for drawn, _ in after] == before
    for rank, (_, actual) in enumerate(after):
        assert (actual.exact, actual.per_rank_content) == (("rng", "per_rank_content"), {"rank": rank})


@pytest.mark.parametrize("number", [2, 4])
def test_on_other_numbers_of_ranks_generators_start_anew_in_the_same_way_each_time(
    ranks: Ranks, tmp_path: Path, number: int
) -> None:
    """From the states that were saved, in whichever checkpoint: a job that is run once more goes on alike."""
    saved = ranks(3, save, str(tmp_path), "s", [1, 2, 3])
    ranks(3, save, str(tmp_path), "again", [1, 2, 3])
    ranks(3, save, str(tmp_path), "other", [1, 2, 4])
    once, again, other = (ranks(number, resume, str(tmp_path), tag) for tag in ("s", "again", "other"))
    drawn = [numbers for numbers, _ in once]
    assert drawn == [numbers for numbers, _ in again]
    assert len({*drawn, *saved, *(numbers for numbers, _ in other)}) == 2 * number + 3
    for _, actual in once:
        assert (actual.exact, actual.reconstructed, actual.missing) == ((), ("rng",), ("per_rank_content",))
        assert actual.per_rank_content is None


@pytest.mark.parametrize(("saved", "number"), [(1, 2), (1, 3), (2, 1), (2, 3), (3, 2)])
def test_ranks_that_were_seeded_alike_draw_apart_in_another_number(
    ranks: Ranks, tmp_path: Path, saved: int, number: int
) -> None:
    """One process says nothing of how several would draw; the same dropout and noise on all of them is never meant."""
    (before, *_) = ranks(saved, save, str(tmp_path), "s", [7] * saved)
    results = ranks(number, resume, str(tmp_path), "s")
    for place in range(3):
        assert len({before[place], *(drawn[place] for drawn, _ in results)}) == 1 + number
    assert all((actual.exact, actual.reconstructed) == ((), ("rng",)) for _, actual in results)


def test_streams_depend_on_the_number_of_ranks_that_load(ranks: Ranks, tmp_path: Path) -> None:
    ranks(1, save, str(tmp_path), "s", [7])
    drawn = [drawn for number in (2, 3, 4) for drawn, _ in ranks(number, resume, str(tmp_path), "s")]
    assert len(set(drawn)) == 2 + 3 + 4


class Device:
    """What torch has for an accelerator's generator, with a generator of the CPU."""

    generator = torch.Generator()

    @classmethod
    def get_rng_state(cls) -> torch.Tensor:
        return cls.generator.get_state()

    @classmethod
    def set_rng_state(cls, state: torch.Tensor) -> None:
        cls.generator.set_state(state)

    @classmethod
    def manual_seed(cls, number: int) -> None:
        cls.generator.manual_seed(number)


def on_device(path: str, action: str) -> tuple[float, Any]:
    """Save or load where there is such an accelerator; what its generator draws next."""
    Device.manual_seed(5)
    with (
        mock.patch("rankless.state.rng.generator_names", return_value=[*EVERYWHERE, "device"]),
        mock.patch("torch.get_device_module", return_value=Device),
    ):
        if action == "save":
            rankless.save_checkpoint(path, "s")
            actual = None
        else:
            torch.rand((), generator=Device.generator)
            actual = rankless.restore(path, rng=True)
    return float(torch.rand((), generator=Device.generator)), actual


def test_generators_of_accelerators_are_derived_and_restored_alike(ranks: Ranks, tmp_path: Path) -> None:
    ((saved, _),) = ranks(1, on_device, str(tmp_path), "save")
    ((drawn, actual),) = ranks(1, on_device, str(tmp_path), "load")
    assert (drawn, actual.exact, actual.reconstructed) == (saved, ("rng",), ())
    elsewhere = ranks(3, on_device, str(tmp_path), "load")
    assert len({saved, *(drawn for drawn, _ in elsewhere)}) == 4
    assert [drawn for drawn, _ in elsewhere] == [drawn for drawn, _ in ranks(3, on_device, str(tmp_path), "load")]
    assert all((actual.exact, actual.reconstructed) == ((), ("rng",)) for _, actual in elsewhere)


def test_an_accelerator_that_was_not_there_starts_its_generator_from_the_others(ranks: Ranks, tmp_path: Path) -> None:
    saved = ranks(2, save, str(tmp_path), "s", [1, 2])
    results = ranks(2, on_device, str(tmp_path), "load")
    assert len({drawn for drawn, _ in results}) == 2
    assert all((actual.exact, actual.reconstructed) == (("per_rank_content",), ("rng",)) for _, actual in results)
    assert [drawn for drawn, _ in results] == [drawn for drawn, _ in ranks(2, on_device, str(tmp_path), "load")]
    assert [drawn for drawn, _ in ranks(2, resume, str(tmp_path), "s")] == saved


@pytest.mark.parametrize("number", [1, 3])
def test_as_many_ranks_that_were_seeded_alike_go_on_alike(ranks: Ranks, tmp_path: Path, number: int) -> None:
    before = ranks(number, save, str(tmp_path), "s", [7] * number)
    for expected, (drawn, actual) in zip(before, ranks(number, resume, str(tmp_path), "s"), strict=True):
        assert (drawn, actual.exact, actual.reconstructed) == (expected, ("rng", "per_rank_content"), ())


def test_neighbours_that_drew_alike_do_so_again(ranks: Ranks, tmp_path: Path) -> None:
    """Ranks of one model under tensor parallelism must drop the same activations."""
    ranks(4, save, str(tmp_path), "s", [1, 1, 2, 2])
    first, second = ranks(2, resume, str(tmp_path), "s")
    assert first[0] == second[0]
    drawn = [numbers for numbers, _ in ranks(6, resume, str(tmp_path), "s")]
    assert drawn[0::2] == drawn[1::2]
    assert len(set(drawn)) == 3


def save_mixed(path: str) -> None:
    seed(dist.get_rank())
    torch.manual_seed(dist.get_rank() // 2)
    rankless.save_checkpoint(path, "s")


def test_each_generator_is_looked_at_by_itself(ranks: Ranks, tmp_path: Path) -> None:
    """Under tensor parallelism only torch's may be seeded by model."""
    ranks(4, save_mixed, str(tmp_path))
    drawn = [numbers for numbers, _ in ranks(6, resume, str(tmp_path), "s")]
    assert len({numbers[0] for numbers in drawn}) == len({numbers[1] for numbers in drawn}) == 6
    assert [numbers[2] for numbers in drawn[0::2]] == [numbers[2] for numbers in drawn[1::2]]
    assert len({numbers[2] for numbers in drawn}) == 3


@given(st.lists(st.integers(0, 2), min_size=1, max_size=12))
def test_neighbours_are_the_largest_groups_of_equals(states: list[int]) -> None:
    def fits(size: int) -> bool:
        groups = [states[at : at + size] for at in range(0, len(states), size)]
        return all(len(group) == size and len(set(group)) == 1 for group in groups)

    assert equal_run_length(states) == max(size for size in range(1, len(states) + 1) if fits(size))


@pytest.mark.parametrize(
    ("entry", "error"),
    [
        ("5", CorruptCheckpointError),
        ('{"rng":5}', CorruptCheckpointError),
        ('{"rng":{"torch":{"$tensor":"no"}}}', CorruptCheckpointError),
        ('{"rng":{"torch":{}}}', MismatchError),
    ],
)
def test_forged_generators_are_refused_by_other_numbers_of_ranks_too(
    tmp_path: Path, entry: str, error: type[Exception]
) -> None:
    from tests.helpers.sealed_checkpoints import reseal_checkpoint

    rankless.save_checkpoint(tmp_path, "s")
    (tmp_path / "s/ranks.json").write_text(f'{{"ranks":[{entry},{entry}]}}')
    reseal_checkpoint(tmp_path / "s")
    with pytest.raises(error, match=str(tmp_path)):
        rankless.restore(tmp_path, "s", rng=True)


def test_another_generator_of_numpy_is_kept(tmp_path: Path) -> None:
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(3))
    try:
        model = nn.Linear(1, 1)
        rankless.save_checkpoint(tmp_path, "s", model)
        expected = np.random.random(3).tolist()  # noqa: NPY002
        rankless.load_checkpoint(tmp_path, model=model, rng=True)
        assert np.random.random(3).tolist() == expected  # noqa: NPY002
    finally:
        np.random.set_bit_generator(before)
