"""Tests that replicated state is checked to be equal before ranks divide the writing of it."""

import logging
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import rankless
from rankless.engine.integrity import sampling
from rankless.errors import InvalidArgumentError, RankMismatchError, ReplicaMismatchError
from tests.helpers.pool import Ranks
from tests.helpers.training import train_run


def save_diverged(path: str, rank: int) -> None:
    run = train_run("ddp")
    if dist.get_rank() == rank:
        with torch.no_grad():
            run.model.module.body[2].weight[3, 4] += 1e-6
    rankless.save_checkpoint(path, "s", run.model, run.optimizer)


@pytest.mark.parametrize("rank", [0, 2])
def test_one_changed_weight_is_an_error_naming_tensor_and_ranks(ranks: Ranks, tmp_path: Path, rank: int) -> None:
    for error in ranks.outcomes(3, save_diverged, str(tmp_path), rank):
        assert isinstance(error, ReplicaMismatchError)
        assert "'body.2.weight'" in str(error)
        assert "body.0" not in str(error)
        assert ("rank 0 and rank 1, 2" if rank == 0 else "rank 0 and rank 2") in str(error)
    assert not list(tmp_path.iterdir())


def save_unrelated(path: str) -> None:
    rankless.save_checkpoint(path, "s", {"layer.weight": torch.full((4, 4), float(dist.get_rank()))})


def test_unrelated_tensors_of_one_name_are_an_error(ranks: Ranks, tmp_path: Path) -> None:
    for error in ranks.outcomes(2, save_unrelated, str(tmp_path)):
        assert isinstance(error, ReplicaMismatchError)
        assert "'layer.weight'" in str(error)


def save_other_shape(path: str) -> None:
    rankless.save_checkpoint(path, "s", {"same": torch.ones(3), "w": torch.zeros(2 + dist.get_rank())})


def save_other_dtype(path: str) -> None:
    dtype = torch.float64 if dist.get_rank() else torch.float32
    rankless.save_checkpoint(path, "s", {"same": torch.ones(3), "w": torch.zeros(2, dtype=dtype)})


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
        assert isinstance(error, RankMismatchError)
        assert "'w'" in str(error)
        assert all(side in str(error) for side in sides)


def save_buffers(path: str) -> dict[str, torch.Tensor]:
    run = train_run("ddp")
    run.model.module.running.fill_(dist.get_rank() + 1.0)
    rankless.save_checkpoint(path, "s", run.model)
    rankless.load_checkpoint(path, model=run.model)
    return {"running": run.model.module.running.clone()}


def test_buffers_may_differ_and_the_lowest_rank_speaks(ranks: Ranks, tmp_path: Path) -> None:
    for result in ranks(3, save_buffers, str(tmp_path)):
        assert torch.equal(result["running"], torch.ones(6))


def save_many(path: str, saves: int, budget: int) -> int:
    """The save, counted from 0, that notices a block that changed on one rank after the first save."""
    patch = pytest.MonkeyPatch()
    patch.setattr(sampling, "BUDGET", budget)
    patch.setattr(sampling, "SAMPLE", 16)
    model = {f"w{i}": torch.ones(64) for i in range(40)}
    rankless.save_checkpoint(path, "first", model)
    if dist.get_rank() == 1:
        model["w17"][5] = 2.0
    for number in range(saves):
        try:
            rankless.save_checkpoint(path, f"s{number}", model)
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
    assert ranks(2, save_many, str(tmp_path), 2, sampling.BUDGET) == [0, 0]


def tensor_parallel(seed: int) -> dict[str, torch.Tensor]:
    """Parameters that the ranks of a mesh hold whole, beside those that they divide."""
    torch.manual_seed(seed)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    placed = {"norm": Replicate(), "bias": Replicate(), "up": Shard(0)}
    return {name: distribute_tensor(torch.randn(64, 256), mesh, [where]) for name, where in placed.items()}


def hybrid_sharded(seed: int) -> dict[str, torch.Tensor]:
    """Parameters that half of the ranks divide, and the other half, too."""
    torch.manual_seed(seed)
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2))
    return {f"w{i}": distribute_tensor(torch.randn(64, 256), mesh, [Replicate(), Shard(0)]) for i in range(3)}


def whole(seed: int) -> dict[str, torch.Tensor]:
    """Parameters as DDP has them."""
    generator = torch.Generator().manual_seed(seed)
    return {f"w{i}": torch.randn(64, 256, generator=generator) for i in range(3)}


def save_drifted(path: str, layout: Callable[[int], dict[str, torch.Tensor]], drifting: Sequence[str]) -> str:
    """What the first save says after the last rank's own parts of some tensors have changed by a little."""
    patch = pytest.MonkeyPatch()
    patch.setattr(sampling, "BUDGET", 4096)
    model = layout(0)
    for number in range(3):
        rankless.save_checkpoint(path, f"sound{number}", model)
    if dist.get_rank() == dist.get_world_size() - 1:
        for name in drifting:
            tensor = model[name]
            (tensor.to_local() if isinstance(tensor, DTensor) else tensor).mul_(1 + 1e-6)
    with pytest.raises(ReplicaMismatchError) as raised:
        rankless.save_checkpoint(path, "torn", model)
    patch.undo()
    return str(raised.value)


LAYOUTS = [
    (whole, 2, ["w1"], "rank 0 and rank 1 differ"),
    (whole, 3, ["w0", "w1", "w2"], "rank 0 and rank 2 differ"),
    (tensor_parallel, 2, ["bias"], "rank 0 and rank 1 differ"),
    (tensor_parallel, 2, ["norm", "bias"], "rank 0 and rank 1 differ"),
    (hybrid_sharded, 4, ["w2"], "rank 1 and rank 3 differ"),
    (hybrid_sharded, 4, ["w0", "w1", "w2"], "rank 1 and rank 3 differ"),
]


@pytest.mark.parametrize(("layout", "size", "drifting", "who"), LAYOUTS)
def test_a_tensor_that_drifts_after_the_first_save_fails_the_next(
    ranks: Ranks, tmp_path: Path, layout: Any, size: int, drifting: list[str], who: str
) -> None:
    for message in ranks(size, save_drifted, str(tmp_path), layout, drifting):
        assert all(f"'{name}'" in message for name in drifting)
        assert who in message
    assert not (tmp_path / "torn").exists()


def save_changed_element(path: str, check: str) -> int:
    """The first of many saves that notices a single element beyond all that is sampled."""
    patch = pytest.MonkeyPatch()
    patch.setattr(sampling, "BUDGET", 4096)
    model = {"w": torch.zeros(64, 1024)}
    rankless.save_checkpoint(path, "first", model)
    model["w"][20, 30] += dist.get_rank()
    for number in range(70):
        try:
            rankless.save_checkpoint(path, f"s{number}", model, replica_check=check, overwrite=True)
        except ReplicaMismatchError as error:
            assert "'w'" in str(error)
            patch.undo()
            return number
    patch.undo()
    return -1


def test_a_full_check_finds_one_element_at_once_and_samples_find_it_in_time(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2, save_changed_element, str(tmp_path / "full"), "full") == [0, 0]
    first, second = ranks(2, save_changed_element, str(tmp_path / "sampled"), "sampled")
    assert first == second > 0


def save_timed(path: str, check: str) -> list[tuple[float, float]]:
    events: list[Any] = []
    model = {"w": torch.zeros(2**20)}
    for number in range(2):
        rankless.save_checkpoint(path, f"s{number}", model, replica_check=check, on_event=events.append)
    return [
        (event.replica_check_seconds, event.blocking_seconds) for event in events if isinstance(event, rankless.Saved)
    ]


@pytest.mark.parametrize("check", ["sampled", "full"])
def test_what_the_proof_costs_is_told(ranks: Ranks, tmp_path: Path, check: str) -> None:
    for saves in ranks(2, save_timed, str(tmp_path), check):
        assert len(saves) == 2
        assert all(0 < seconds < stall for seconds, stall in saves)


def test_what_nobody_else_holds_needs_no_proof(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    events: list[Any] = []
    with caplog.at_level("INFO", "rankless"):
        rankless.save_checkpoint(tmp_path, "s", {"w": torch.ones(3)}, replica_check="full", on_event=events.append)
    assert events[-1].replica_check_seconds == 0
    assert "replicas" not in caplog.text


def log_of_a_save(path: str) -> str:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("rankless")
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.DEBUG)
    rankless.save_checkpoint(path, "s", {"w": torch.ones(3)})
    log.removeHandler(handler)
    log.setLevel(level)
    return "\n".join(lines)


def test_the_log_tells_what_the_proof_costs(ranks: Ranks, tmp_path: Path) -> None:
    for text in ranks(2, log_of_a_save, str(tmp_path)):
        assert re.search(r"the caller waited [\d.]+ m?s \([\d.]+ m?s of that for comparing replicas\)$", text)


def save_with_check(path: str, checks: Sequence[str]) -> None:
    rankless.save_checkpoint(path, "s", {"w": torch.ones(3)}, replica_check=checks[dist.get_rank()])


@pytest.mark.parametrize(
    ("checks", "error", "match"),
    [
        (["full", "sampled"], RankMismatchError, "replica_check: rank 0 has 'full', rank 1 has 'sampled'"),
        (["some", "some"], InvalidArgumentError, "replica_check must be one of sampled, full; got 'some'"),
    ],
)
def test_all_ranks_ask_for_one_known_check(
    ranks: Ranks, tmp_path: Path, checks: list[str], error: type[Exception], match: str
) -> None:
    for outcome in ranks.outcomes(2, save_with_check, str(tmp_path), checks):
        assert isinstance(outcome, error)
        assert match in str(outcome)


def bytes_written() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("wchar")))


def save_counted(path: str) -> int:
    """The bytes that this rank wrote in a save of 16 MiB."""
    before = bytes_written()
    rankless.save_checkpoint(path, "s", {f"w{i}": torch.full((1 << 19,), float(i)) for i in range(8)})
    return bytes_written() - before


def test_replicated_state_is_written_once_and_the_work_is_shared(ranks: Ranks, tmp_path: Path) -> None:
    wrote = ranks(4, save_counted, str(tmp_path))
    assert sum(wrote) < 1.05 * 16 * 2**20
    assert max(wrote) < 1.25 * 4 * 2**20
