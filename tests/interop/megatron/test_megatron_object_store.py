"""Tests that Megatron's checkpoints are read from an object store as they are from a disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import rankless
from tests.helpers.equality import equal_bits
from tests.helpers.fake_http import BUCKET
from tests.helpers.fake_s3 import FakeS3
from tests.interop.megatron.conftest import Fixture

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize(
    "name", ["dp_tp1_dp2_bf16_mcore16", "gather_tp1_dp2_fp32_mcore15", "legacy_tp2_pp1_dp1_bf16_mcore16"]
)
def test_a_run_in_a_bucket(open_fixture: Callable[[str], Fixture], tmp_path: Path, name: str) -> None:
    fixture, fake = open_fixture(name), FakeS3()
    with fake.connected():
        run = fake.store_at("http://fake", retry_seconds=1.0).path(f"{BUCKET}/run")
        for file in fixture.path.rglob("*"):
            if file.is_file():
                run.store.replace_small(run / str(file.relative_to(fixture.path)), file.read_bytes())
        opened = rankless.open(run)
        assert opened.format == "megatron"
        for kind in ("exp_avg", "exp_avg_sq"):
            tensors = fixture.of_kind(kind)
            assert tensors
            assert all(equal_bits(opened[f"optimizer/{key}/{kind}"], tensor) for key, tensor in tensors.items())
        converted = rankless.convert(run, tmp_path / "converted", to="native")
    masters = fixture.of_kind("master")
    assert all(equal_bits(rankless.open(converted)[f"model/{key}"], tensor) for key, tensor in masters.items())
