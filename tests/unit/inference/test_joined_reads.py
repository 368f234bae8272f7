"""Tests which rank reads what several need."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import torch
from safetensors.torch import save_file

from rankless.engine.plan.stripe_owners import OwnedStripe, RemoteStripe
from rankless.formats.detect import open_reader
from rankless.inference.joined_reads import JoinedReads, PlannedReads, group_by_tensor
from rankless.inference.pending_copies import make_copy

RANKS, TENSORS = 4, 8


def plan(folder: Path, rank: int, *, exchange: bool) -> PlannedReads:
    """What a rank does if all ranks need columns of all tensors."""
    reader = open_reader(folder)
    copies = []
    for of_rank in range(RANKS):
        columns = torch.empty(10, 100, device="meta")[:, 25 * of_rank : 25 * of_rank + 25]
        made = [make_copy(number, columns, torch.zeros(10, 25)) for number in range(TENSORS)]
        copies.append(group_by_tensor(copy for copy in made if copy is not None))
    views = [{tensor: [copy.view for copy in group] for tensor, group in of_rank.items()} for of_rank in copies]
    names = sorted(reader.groups["model"])
    reads = JoinedReads(reader, names, 1000, rank, lambda _: None, hashed=True)
    return reads.plan_together(copies[rank], views, exchange=exchange)


def test_ranks_take_turns_to_read_what_all_need(tmp_path: Path) -> None:
    save_file({f"{number}": torch.zeros(10, 100) for number in range(TENSORS)}, tmp_path / "model.safetensors")
    owners: Counter[int] = Counter()
    for rank in range(RANKS):
        planned = plan(tmp_path, rank, exchange=True)
        assert not planned.exact
        assert not planned.host_shared
        owners[rank] += sum(isinstance(task, OwnedStripe) for task in planned.exchanged)
        assert [task.tensor for task in planned.exchanged if isinstance(task, RemoteStripe)] == [
            number for number in range(TENSORS) if number % RANKS != rank
        ]
    assert owners == dict.fromkeys(range(RANKS), TENSORS // RANKS)


def test_ranks_of_a_host_read_their_rows_from_its_page_cache(tmp_path: Path) -> None:
    save_file({f"{number}": torch.zeros(10, 100) for number in range(TENSORS)}, tmp_path / "model.safetensors")
    planned = plan(tmp_path, 1, exchange=False)
    assert not planned.exact
    assert not planned.exchanged
    assert [(part.tensor, part.start, part.stop) for part in planned.host_shared] == [
        (number, 100, 9 * 400 + 200) for number in range(TENSORS)
    ]
