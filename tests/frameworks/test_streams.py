"""Tests of streams of real packages: what one loader leaves in the middle, the next one goes on with."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import rankless
from rankless.errors import StateError

#: The number of samples of each file.
LENGTHS = [5, 6, 7, 8, 9, 10] * 2


def check_each_is_used_once(make: Callable[[int, int], rankless.StreamLoader]) -> None:
    """Read an epoch by loaders with other batches and workers, which go on from each other."""
    used, state = Counter[int](), None
    for batch_size, workers, batches in ((2, 2, 6), (3, 0, 5), (1, 3, 4)):  # 12 + 15 + 4 = 31 of 90
        loader = make(batch_size, workers)
        if state is not None:
            loader.load_state_dict(state)
        for batch in itertools.islice(loader, batches):
            used.update(batch)
        state = loader.state_dict()
    assert (used.total(), set(used.values())) == (31, {1})
    last = make(1, 0)
    last.load_state_dict(state)
    for batch in last:
        if last.epoch:  # this sample is of the next epoch
            break
        used.update(batch)
    assert used == Counter(range(90))


def numbers_of(samples: Sequence[Any]) -> list[int]:
    return [sample["number"] for sample in samples]


@pytest.fixture
def json_files(tmp_path: Path) -> list[str]:
    numbers = itertools.count()
    for place, length in enumerate(LENGTHS):
        lines = [json.dumps({"number": next(numbers)}) for _ in range(length)]
        (tmp_path / f"{place}.jsonl").write_text("\n".join(lines) + "\n")
    return [str(tmp_path / f"{place}.jsonl") for place in range(len(LENGTHS))]


def test_hugging_face_datasets(json_files: list[str]) -> None:
    datasets = pytest.importorskip("datasets")
    dataset = datasets.load_dataset("json", data_files=json_files, split="train", streaming=True)

    def read(shard: int, start: int) -> Iterator[dict[str, int]]:
        for rows in dataset.shard(dataset.num_shards, shard).skip(start).iter(batch_size=4):
            yield from ({"number": number} for number in rows["number"])

    check_each_is_used_once(
        lambda size, workers: rankless.StreamLoader(
            range(dataset.num_shards), read, size, num_workers=workers, collate_fn=numbers_of
        )
    )


def test_a_reader_that_divides_its_samples_among_workers_is_an_error(json_files: list[str]) -> None:
    datasets = pytest.importorskip("datasets")
    dataset = datasets.load_dataset("json", data_files=json_files, split="train", streaming=True)

    def read(shard: int, start: int) -> Any:
        return dataset.shard(dataset.num_shards, shard).skip(start)

    loader = rankless.StreamLoader(range(dataset.num_shards), read, 2, num_workers=2, collate_fn=numbers_of)
    with pytest.raises(StateError, match="divides what it yields among workers"):
        list(itertools.islice(loader, 40))


def test_webdataset(tmp_path: Path) -> None:
    webdataset = pytest.importorskip("webdataset")
    numbers, urls = itertools.count(), [str(tmp_path / f"{place}.tar") for place in range(len(LENGTHS))]
    for url, length in zip(urls, LENGTHS, strict=True):
        with webdataset.TarWriter(url) as tar:
            for _ in range(length):
                number = next(numbers)
                tar.write({"__key__": str(number), "json": {"number": number}})

    def read(url: str, start: int) -> Iterator[dict[str, int]]:
        samples = webdataset.WebDataset(
            url, shardshuffle=False, nodesplitter=None, workersplitter=None, empty_check=False
        )
        return (sample["json"] for sample in itertools.islice(samples.decode(), start, None))

    check_each_is_used_once(
        lambda size, workers: rankless.StreamLoader(urls, read, size, num_workers=workers, collate_fn=numbers_of)
    )
