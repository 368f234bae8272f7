"""A load says of each part whether it is what was saved, was made from it, or is missing."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import holdfast
from holdfast.errors import DamagedError
from holdfast.state.belongings import neighbours
from tests.pool import Ranks


def trained() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    scaler = torch.amp.GradScaler("cpu")
    holdfast.save_checkpoint(tmp_path, "s", *trained(), {"x": 1}, stateful={"scaler": scaler}, rank_content=[5])
    return tmp_path


def test_all_that_comes_back_as_it_was_is_exact(run: Path) -> None:
    found = holdfast.restore(run, None, *trained(), stateful={"scaler": torch.amp.GradScaler("cpu")})
    parts = {"model", "optimizer", "scheduler", "stateful", "rng", "user_content", "rank_content"}
    assert (set(found.exact), found.rederived, found.missing) == (parts, (), ())


def test_what_was_not_asked_for_is_not_mentioned(run: Path) -> None:
    found = holdfast.restore(run, scheduler=trained()[2])
    assert found.exact == ("scheduler", "user_content", "rank_content")


def test_a_model_that_was_cast_is_rederived(run: Path) -> None:
    found = holdfast.restore(run, model=nn.Linear(3, 2, dtype=torch.bfloat16), map_dtype=True)
    assert (found.rederived, "model" in found.exact) == (("model",), False)
    same = holdfast.restore(run, model=nn.Linear(3, 2), map_dtype=True)
    assert (same.rederived, "model" in same.exact) == ((), True)


@pytest.mark.parametrize("names", [("weight",), ("weight", "bias", "new"), ("weight", "new")])
def test_a_part_that_does_not_match_wholly_is_neither(run: Path, names: tuple[str, ...]) -> None:
    model = {name: torch.zeros((2, 3) if name == "weight" else 2) for name in names}
    found = holdfast.restore(run, model=model, strict=False)
    assert "model" not in found.exact + found.rederived
    assert (set(found.missing), set(found.unexpected)) == (set(names) & {"new"}, {"weight", "bias"} - set(names))


def test_of_several_models_each_is_told_of(tmp_path: Path) -> None:
    holdfast.save_checkpoint(tmp_path, "s", {"a": nn.Linear(1, 1), "b": nn.Linear(1, 1)})
    found = holdfast.restore(
        tmp_path, model={"a": nn.Linear(1, 1), "b": nn.Linear(1, 1, dtype=torch.float64)}, map_dtype=True
    )
    assert (found.exact, found.rederived) == (("model/a",), ("model/b",))


def test_nothing_is_said_to_be_exact_that_is_not_in_the_checkpoint(tmp_path: Path) -> None:
    holdfast.save_checkpoint(tmp_path, "s", nn.Linear(3, 2), rng=False)
    options: dict[str, Any] = {"optimizer": trained()[1], "scheduler": trained()[2]}
    options["stateful"] = {"scaler": torch.amp.GradScaler("cpu")}
    found = holdfast.restore(tmp_path, model=trained()[0], strict=False, **options)
    assert found.exact == ("model",)
    assert set(found.missing) == {"optimizer", "scheduler", "stateful object 'scaler'", "rng"}


def draws() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))  # noqa: NPY002


def seed(number: int) -> None:
    random.seed(number)
    np.random.seed(number)  # noqa: NPY002
    torch.manual_seed(number)


def save(path: str, tag: str, seeds: list[int]) -> tuple[float, float, float]:
    """Save with generators that were seeded with numbers by rank; what each would draw next."""
    seed(seeds[dist.get_rank()])
    holdfast.save_checkpoint(path, tag, rank_content={"rank": dist.get_rank()})
    return draws()


def resume(path: str, tag: str) -> tuple[tuple[float, float, float], holdfast.Restored]:
    seed(123)
    found = holdfast.restore(path, tag, rng=True)
    return draws(), found


def test_on_as_many_ranks_each_goes_on_drawing_where_it_was(ranks: Ranks, tmp_path: Path) -> None:
    before = ranks(3, save, str(tmp_path), "s", [1, 2, 3])
    after = ranks(3, resume, str(tmp_path), "s")
    assert [drawn for drawn, _ in after] == before
    for rank, (_, found) in enumerate(after):
        assert (found.exact, found.rank_content) == (("rng", "rank_content"), {"rank": rank})


@pytest.mark.parametrize("number", [2, 4])
def test_on_other_numbers_of_ranks_generators_start_anew_in_the_same_way_each_time(
    ranks: Ranks, tmp_path: Path, number: int
) -> None:
    saved = ranks(3, save, str(tmp_path), "s", [1, 2, 3])
    ranks(3, save, str(tmp_path), "other", [1, 2, 3])
    once, again, other = (ranks(number, resume, str(tmp_path), tag) for tag in ("s", "s", "other"))
    drawn = [numbers for numbers, _ in once]
    assert drawn == [numbers for numbers, _ in again]
    assert len({*drawn, *saved, *(numbers for numbers, _ in other)}) == 2 * number + 3
    for _, found in once:
        assert (found.exact, found.rederived, found.missing) == ((), ("rng",), ("rank_content",))
        assert found.rank_content is None


@pytest.mark.parametrize("number", [1, 2, 4])
def test_generators_that_all_ranks_had_alike_are_given_to_any_number_of_them(
    ranks: Ranks, tmp_path: Path, number: int
) -> None:
    before = ranks(3, save, str(tmp_path), "s", [7, 7, 7])
    for drawn, found in ranks(number, resume, str(tmp_path), "s"):
        assert (drawn, found.exact, found.rederived) == (before[0], ("rng",), ())


def test_neighbours_that_drew_alike_do_so_again(ranks: Ranks, tmp_path: Path) -> None:
    """Ranks of one model under tensor parallelism must drop the same activations."""
    ranks(4, save, str(tmp_path), "s", [1, 1, 2, 2])
    first, second = ranks(2, resume, str(tmp_path), "s")
    assert first[0] == second[0]
    drawn = [numbers for numbers, _ in ranks(6, resume, str(tmp_path), "s")]
    assert drawn[0::2] == drawn[1::2]
    assert len(set(drawn)) == 3


def save_mixed(path: str) -> None:
    seed(5)
    torch.manual_seed(dist.get_rank())
    holdfast.save_checkpoint(path, "s")


def test_each_generator_is_looked_at_by_itself(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, save_mixed, str(tmp_path))
    results = ranks(3, resume, str(tmp_path), "s")
    seed(5)
    expected = draws()
    assert all(drawn[:2] == expected[:2] for drawn, _ in results)
    assert len({drawn[2] for drawn, _ in results}) == 3
    assert all("rng" in found.rederived for _, found in results)


@given(st.lists(st.integers(0, 2), min_size=1, max_size=12))
def test_neighbours_are_the_largest_groups_of_equals(states: list[int]) -> None:
    def fits(size: int) -> bool:
        groups = [states[at : at + size] for at in range(0, len(states), size)]
        return all(len(group) == size and len(set(group)) == 1 for group in groups)

    assert neighbours(states) == max(size for size in range(1, len(states) + 1) if fits(size))


@pytest.mark.parametrize("entry", ["5", '{"rng":5}', '{"rng":{"torch":{"$tensor":"no"}}}', '{"rng":{"torch":{}}}'])
def test_forged_generators_are_refused_by_other_numbers_of_ranks_too(tmp_path: Path, entry: str) -> None:
    from tests.test_hostile import reseal

    holdfast.save_checkpoint(tmp_path, "s")
    (tmp_path / "s/ranks.json").write_text(f'{{"ranks":[{entry},{entry}]}}')
    reseal(tmp_path / "s")
    with pytest.raises(DamagedError, match=str(tmp_path)):
        holdfast.restore(tmp_path, "s", rng=True)


def test_another_generator_of_numpy_is_kept(tmp_path: Path) -> None:
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(3))
    try:
        model = nn.Linear(1, 1)
        holdfast.save_checkpoint(tmp_path, "s", model)
        expected = np.random.random(3).tolist()  # noqa: NPY002
        holdfast.load_checkpoint(tmp_path, model=model, rng=True)
        assert np.random.random(3).tolist() == expected  # noqa: NPY002
    finally:
        np.random.set_bit_generator(before)
