"""Replicated state is proven to be replicated before ranks share the writing of it."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import holdfast
from holdfast.engine import replicas
from holdfast.errors import DisagreementError, ReplicaMismatchError
from tests.pool import Ranks
from tests.training import trained


def save_diverged(path: str, rank: int) -> None:
    run = trained("ddp")
    if dist.get_rank() == rank:
        with torch.no_grad():
            run.model.module.body[2].weight[3, 4] += 1e-6
    holdfast.save_checkpoint(path, "s", run.model, run.optimizer)


@pytest.mark.parametrize("rank", [0, 2])
def test_one_changed_weight_is_an_error_naming_tensor_and_ranks(ranks: Ranks, tmp_path: Path, rank: int) -> None:
    for error in ranks.outcomes(3, save_diverged, str(tmp_path), rank):
        assert isinstance(error, ReplicaMismatchError)
        assert "'body.2.weight'" in str(error)
        assert "body.0" not in str(error)
        assert ("rank 0 and rank 1, 2" if rank == 0 else "rank 0 and rank 2") in str(error)
    assert not list(tmp_path.iterdir())


def save_unrelated(path: str) -> None:
    holdfast.save_checkpoint(path, "s", {"layer.weight": torch.full((4, 4), float(dist.get_rank()))})


def test_unrelated_tensors_of_one_name_are_an_error(ranks: Ranks, tmp_path: Path) -> None:
    for error in ranks.outcomes(2, save_unrelated, str(tmp_path)):
        assert isinstance(error, ReplicaMismatchError)
        assert "'layer.weight'" in str(error)


def save_other_shape(path: str) -> None:
    holdfast.save_checkpoint(path, "s", {"same": torch.ones(3), "w": torch.zeros(2 + dist.get_rank())})


def save_other_dtype(path: str) -> None:
    dtype = torch.float64 if dist.get_rank() else torch.float32
    holdfast.save_checkpoint(path, "s", {"same": torch.ones(3), "w": torch.zeros(2, dtype=dtype)})


@pytest.mark.parametrize(
    ("save", "sides"),
    [
        (save_other_shape, ("rank 0 has (2,)", "rank 1 has (3,)")),
        (save_other_dtype, ("rank 0 has F32", "rank 1 has F64")),
    ],
)
def test_ranks_that_disagree_about_a_tensor_name_both_sides(
    ranks: Ranks, tmp_path: Path, save: Callable[[str], None], sides: tuple[str, str]
) -> None:
    for error in ranks.outcomes(2, save, str(tmp_path)):
        assert isinstance(error, DisagreementError)
        assert "'w'" in str(error)
        assert all(side in str(error) for side in sides)


def save_buffers(path: str) -> dict[str, torch.Tensor]:
    run = trained("ddp")
    run.model.module.running.fill_(dist.get_rank() + 1.0)
    holdfast.save_checkpoint(path, "s", run.model)
    holdfast.load_checkpoint(path, model=run.model)
    return {"running": run.model.module.running.clone()}


def test_buffers_may_differ_and_the_lowest_rank_speaks(ranks: Ranks, tmp_path: Path) -> None:
    for found in ranks(3, save_buffers, str(tmp_path)):
        assert torch.equal(found["running"], torch.ones(6))


def save_many(path: str, saves: int, budget: int) -> int:
    """The save, counted from 0, that notices a block that changed on one rank after the first save."""
    patch = pytest.MonkeyPatch()
    patch.setattr(replicas, "BUDGET", budget)
    model = {f"w{i}": torch.ones(64) for i in range(40)}
    holdfast.save_checkpoint(path, "first", model)
    if dist.get_rank() == 1:
        model["w17"][5] = 2.0
    for number in range(saves):
        try:
            holdfast.save_checkpoint(path, f"s{number}", model)
        except ReplicaMismatchError as error:
            assert "'w17'" in str(error)
            patch.undo()
            return number
    patch.undo()
    return -1


def test_later_saves_take_turns_over_what_is_beyond_the_budget(ranks: Ranks, tmp_path: Path) -> None:
    first, second = ranks(2, save_many, str(tmp_path), 16, 40 * 64 * 4 // 16)
    assert first == second
    assert 0 < first < 16


def test_what_is_within_the_budget_is_compared_on_every_save(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2, save_many, str(tmp_path), 2, replicas.BUDGET) == [0, 0]


def bytes_written() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("wchar")))


def save_counted(path: str) -> int:
    """The bytes that this rank wrote in a save of 16 MiB."""
    before = bytes_written()
    holdfast.save_checkpoint(path, "s", {f"w{i}": torch.full((1 << 19,), float(i)) for i in range(8)})
    return bytes_written() - before


def test_replicated_state_is_written_once_and_the_work_is_shared(ranks: Ranks, tmp_path: Path) -> None:
    wrote = ranks(4, save_counted, str(tmp_path))
    assert sum(wrote) < 1.05 * 16 * 2**20
    assert max(wrote) < 1.25 * 4 * 2**20
