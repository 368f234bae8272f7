"""Tests epochs: of several processes each claims another one, and an abandoned branch is retired."""

import threading
from pathlib import Path

import pytest

from rankless.errors import CorruptCheckpointError
from rankless.ondisk.manifest import Manifest, Provenance
from rankless.tier.epochs import (
    begin_epoch,
    find_newest_epoch,
    is_retired,
    name_job,
    parse_job_epoch,
    read_epochs,
    reserve_epoch,
)
from rankless.tier.generation_catalog import HostOffer, OfferedGeneration, find_complete
from rankless.tier.part_names import GenerationKey
from tests.helpers.tier_runs import claim_epoch


def test_epochs_are_numbered_and_keep_their_starts(tmp_path: Path) -> None:
    assert [claim_epoch(tmp_path, start) for start in (0, 7, 5)] == [1, 2, 3]
    assert read_epochs(tmp_path) == {1: 0, 2: 7, 3: 5}
    assert [path.name for path in (tmp_path / ".epochs").iterdir() if path.name.startswith(".")] == []


def test_of_many_claims_at_a_time_each_gets_another_epoch(tmp_path: Path) -> None:
    claimed: list[int] = []
    threads = [threading.Thread(target=lambda: claimed.append(claim_epoch(tmp_path, 0))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(claimed) == list(range(1, 9))


def test_an_epoch_begins_only_if_no_later_one_was_reserved(tmp_path: Path) -> None:
    first, second = reserve_epoch(tmp_path), reserve_epoch(tmp_path)
    assert find_newest_epoch(tmp_path) == second == first + 1
    assert read_epochs(tmp_path) == {}
    assert not begin_epoch(tmp_path, first, 7)
    assert begin_epoch(tmp_path, second, 5)
    assert read_epochs(tmp_path) == {second: 5}
    assert reserve_epoch(tmp_path, above=9) == 10
    assert read_epochs(tmp_path) == {second: 5}


def test_the_text_of_a_job_has_its_epoch() -> None:
    assert parse_job_epoch(name_job(17, "0af3")) == 17
    assert [parse_job_epoch(text) for text in ("", "0af3", "17-0af3", "a job")] == [0, 0, 0, 0]


def test_a_file_that_is_no_epoch_is_named(tmp_path: Path) -> None:
    claim_epoch(tmp_path, 0)
    (tmp_path / ".epochs/000002.json").write_text("{")
    with pytest.raises(CorruptCheckpointError, match=r"000002\.json"):
        read_epochs(tmp_path)


def test_what_an_epoch_saved_after_the_start_of_a_later_one_is_retired() -> None:
    epochs = {1: 0, 2: 5, 3: 9}
    assert not is_retired(epochs, 1, 5)
    assert is_retired(epochs, 1, 6)
    assert not is_retired(epochs, 2, 9)
    assert is_retired(epochs, 2, 10)
    assert not is_retired(epochs, 3, 99)


def offer(host: str, epoch: int, sequence: int, ranks: list[int], size: int = 2, *, labelled: bool = True) -> HostOffer:
    manifest = Manifest(
        format="rankless",
        version=1,
        tag="t",
        id=f"{sequence:016x}",
        run="0" * 16,
        sequence=sequence,
        time=0.0,
        step=None,
        metrics={},
        provenance=Provenance("", "", "", size),
        files={},
    )
    key = GenerationKey(epoch, sequence, f"{sequence:016x}")
    return HostOffer(host, "", [OfferedGeneration(key, size, ranks, manifest if labelled else None)])


def test_parts_of_several_hosts_make_a_generation_complete() -> None:
    offers = [offer("a", 1, 1, [0]), offer("b", 1, 1, [1]), offer("a", 1, 2, [0])]
    assert [one.key.sequence for one in find_complete(offers, {1: 0})] == [1]


def test_a_generation_without_a_label_is_incomplete() -> None:
    assert find_complete([offer("a", 1, 1, [0, 1], labelled=False)], {1: 0}) == []


def test_a_retired_generation_does_not_count() -> None:
    assert find_complete([offer("a", 1, 6, [0, 1])], {1: 0, 2: 5}) == []
