"""Tests files that ranks write together: every tensor is whole, and the CRCs of all its blocks are known."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from rankless.ondisk import block_crcs
from rankless.storage.direct_io import SECTOR_BYTES, DirectWriter
from tests.helpers.examples import examples
from tests.helpers.simulated_io import (
    COLUMNS,
    SavedJob,
    assert_hashed,
    small_sizes,
)
from tests.helpers.simulated_jobs import Job, Key, jobs, make_job
from tests.helpers.tensors import random_tensor, tensor_bytes


@pytest.fixture(autouse=True)
def _small_sizes() -> Iterator[None]:
    with small_sizes():
        yield


@given(jobs(), st.booleans())
@settings(max_examples=examples(60))
def test_each_tensor_is_whole_and_each_block_is_hashed(tmp_path_factory, job: Job, in_place: bool) -> None:
    saved = SavedJob.of(tmp_path_factory.mktemp("save"), job, in_place)
    assert set(saved.plan.tensors) == job.tensors.keys()
    for key, tensor in job.tensors.items():
        assert saved.bytes_of(key) == tensor_bytes(tensor)
        assert_hashed(saved.fragments[key], tensor)


@given(jobs())
@settings(max_examples=20)
def test_the_safetensors_library_reads_the_files(tmp_path_factory, job: Job) -> None:
    saved = SavedJob.of(tmp_path_factory.mktemp("save"), job)
    keys = iter(saved.plan.tensors)
    loaded: dict[Key, torch.Tensor] = {}
    for path, file in zip(saved.paths, saved.plan.files, strict=True):
        own = list(itertools.islice(keys, len(file.entries)))
        crcs = [block_crcs.assemble_crcs(saved.fragments[key], file.entries[key[1]].nbytes) for key in own]
        path.write_bytes(file.build_header(itertools.chain(*crcs)) + path.read_bytes()[file.data_start :])
        actual = load_file(path)
        loaded |= {key: actual[key[1]] for key in own}
        assert len(actual) == len(own)
    assert loaded.keys() == job.tensors.keys()
    for key, tensor in job.tensors.items():
        assert loaded[key].dtype == tensor.dtype
        assert loaded[key].shape == tensor.shape
        assert tensor_bytes(loaded[key]) == tensor_bytes(tensor)


def test_a_stripe_has_the_same_offset_in_a_page_of_memory_and_of_its_file(tmp_path: Path) -> None:
    """Otherwise it could not be written past the page cache."""
    result = []

    def seen(_: DirectWriter, offset: int, data: memoryview) -> None:
        result.append((np.frombuffer(data, np.uint8).ctypes.data % SECTOR_BYTES, offset % SECTOR_BYTES))

    job = make_job(random_tensor((160, 8), torch.float32), 4, COLUMNS)
    with mock.patch.object(DirectWriter, "write", seen):
        SavedJob.of(tmp_path, job, limit=2**40)
    assert sorted(offset for _, offset in result) == sorted(64 * number % SECTOR_BYTES for number in range(80))
    assert all(address == offset for address, offset in result)
