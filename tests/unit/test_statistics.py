"""Tests of the statistics of tensors: they are those of NumPy in float64, and do not depend on how files are read."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

import rankless
from rankless import TensorStatistics
from rankless.errors import CorruptCheckpointError, NoCheckpointError
from rankless.inspection import measured_tensors, read_elements
from rankless.inspection.partial_statistics import PartialStatistics, Scratch, measure_part
from rankless.inspection.tensor_statistics import BUCKETS, ZERO_BUCKET, bucket_bounds
from rankless.ondisk.dtypes import WIDTHS
from rankless.state.tensor_views import DTYPES
from tests.helpers.corruption import flip_tensor_bit
from tests.helpers.pairwise import first_of

Floats = npt.NDArray[np.float64]

pytestmark = pytest.mark.filterwarnings("error")  # random bits are no reason for a warning

#: The names of dtypes in ml_dtypes.
ML_DTYPES = {
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
}

#: Numbers of elements around the borders of parts and slices, and those of what is counted by value.
SMALL_SIZES = (1, 2, 255, 256, 1000, 2**16 - 1, 2**16, 2**17 + 1)
LARGE_SIZES = (2**17 - 1, 2**19, 2**19 + 2**17 + 3)


def random_bytes(nbytes: int) -> bytes:
    return np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8).tobytes()


def convert(data: bytes, dtype: str) -> Floats:
    """Convert elements to float64 without torch: the real and the imaginary part of a complex one."""
    if dtype in ML_DTYPES:
        ml_dtypes = pytest.importorskip("ml_dtypes")
        with np.errstate(invalid="ignore"):  # NaNs that signal
            return np.frombuffer(data, getattr(ml_dtypes, ML_DTYPES[dtype])).astype(np.float64)
    if dtype == "BOOL":
        return (np.frombuffer(data, np.uint8) != 0).astype(np.float64)
    kind, width = dtype[0].lower(), WIDTHS[dtype]
    with np.errstate(invalid="ignore"):
        return np.frombuffer(data, f"f{width // 2}" if kind == "c" else f"{kind}{width}").astype(np.float64)


def bucket_of(value: float) -> int:
    """Return the bucket of a finite number by its definition."""
    if value == 0:
        return 80
    exponent = math.frexp(value)[1] - 1
    place = min(max(exponent, -64), 15) + 64
    return 81 + place if value > 0 else 79 - place


def check(actual: TensorStatistics, values: Floats, *, tolerance: float = 1e-12, has_moments: bool = True) -> None:
    finite = values[np.isfinite(values)]
    assert actual.elements == len(values)
    assert actual.nans == np.isnan(values).sum()
    assert (actual.positive_infinities, actual.negative_infinities) == (
        (values == np.inf).sum(),
        (values == -np.inf).sum(),
    )
    assert (actual.zeros, actual.finite) == ((values == 0).sum(), len(finite))
    assert len(actual.histogram) == BUCKETS
    different, counts = np.unique(finite, return_counts=True)
    expected = [0] * BUCKETS
    for value, count in zip(different.tolist(), counts.tolist(), strict=True):
        expected[bucket_of(value)] += count
    assert list(actual.histogram) == expected
    if not len(finite):
        assert (actual.minimum, actual.maximum, actual.mean, actual.std) == (None, None, None, None)
        assert actual.norm == (None if len(values) else 0.0)
        return
    assert (actual.minimum, actual.maximum) == (finite.min(), finite.max())
    if has_moments:
        scale = np.abs(finite).max()  # the sum may be nearly zero
        assert actual.mean == pytest.approx(finite.mean(), rel=tolerance, abs=tolerance * scale)
        assert actual.std == pytest.approx(finite.std(), rel=tolerance)
        assert actual.norm == pytest.approx(math.sqrt(np.square(finite).sum()), rel=tolerance)


@pytest.mark.parametrize("dtype", WIDTHS)
class TestEveryDtype:
    @first_of(1, "sizes", [SMALL_SIZES, LARGE_SIZES], ids=["small", "large"])
    def test_random_bits_of_any_number(self, tmp_path: Path, dtype: str, sizes: tuple[int, ...]) -> None:
        width = WIDTHS[dtype]
        data = {f"n{size}": random_bytes(size * width) for size in sizes}
        if dtype == "BOOL":
            data = {name: (np.frombuffer(raw, np.uint8) & 1).tobytes() for name, raw in data.items()}
        tensors = {
            name: torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(DTYPES[dtype]) for name, raw in data.items()
        }
        rankless.save_checkpoint(tmp_path, "a", {**tensors, "empty": torch.zeros(0, dtype=DTYPES[dtype])}, rng=False)
        statistics = rankless.compute_statistics(tmp_path)
        assert statistics.path == tmp_path / "a"
        assert statistics.tensors.keys() == {f"model/{name}" for name in [*tensors, "empty"]}
        for name, raw in data.items():
            values = convert(raw, dtype)
            check(statistics.tensors[f"model/{name}"], values, has_moments=dtype != "F64")  # sums of its bits overflow
        check(statistics.tensors["model/empty"], np.zeros(0))

    def test_zeros_of_both_signs(self, dtype: str) -> None:
        zeros = torch.zeros(7).to(DTYPES[dtype])
        if dtype[0] == "F" and dtype not in {"F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"}:
            zeros[3:] = -zeros[3:].double()
        values = zeros.double() if not zeros.is_complex() else torch.zeros(14, dtype=torch.float64)
        check(measure(zeros, dtype), values.numpy())

    def test_what_is_the_same_everywhere_has_no_deviation(self, dtype: str) -> None:
        constant = torch.full((2**17 + 5,), 1, dtype=torch.uint8).to(DTYPES[dtype])
        statistics = measure(constant, dtype)
        if dtype != "C64":
            assert (statistics.mean, statistics.std) == (1.0, 0.0)


def measure(tensor: torch.Tensor, dtype: str) -> TensorStatistics:
    bits = tensor.contiguous().view(torch.uint8).numpy().view(f"u{WIDTHS[dtype]}")
    return measure_part(bits, dtype, Scratch()).summarize()


class TestFloat64:
    def test_numbers_of_ordinary_size(self) -> None:
        values = np.random.default_rng(0).normal(1e6, 1e-3, 2**17 + 3)
        check(measure(torch.from_numpy(values), "F64"), values, tolerance=1e-9)

    def test_the_smallest_and_the_largest(self) -> None:
        values = np.array([5e-324, -5e-324, 0.0, -0.0, 2.0**-64, 2.0**-65, 2.0**15, 2.0**16, np.nan, -np.inf])
        check(measure(torch.from_numpy(values), "F64"), values)

    def test_an_overflow_is_infinite_as_in_numpy(self) -> None:
        statistics = measure(torch.tensor([1e308, 1e308], dtype=torch.float64), "F64")
        assert (statistics.mean, statistics.norm, statistics.maximum) == (math.inf, math.inf, 1e308)
        assert sum(statistics.histogram) == statistics.histogram[-1] == 2

    def test_a_deviation_that_is_small_beside_the_mean_is_not_cancelled(self) -> None:
        values = 1e9 + np.random.default_rng(1).normal(0, 1e-3, 3 * 2**19)
        parts = [
            measure_part(values[start : start + 2**19].view("u8"), "F64", Scratch())
            for start in range(0, len(values), 2**19)
        ]
        assert merge_all(parts).summarize().std == pytest.approx(values.std(), rel=1e-6)


def merge_all(parts: list[PartialStatistics]) -> PartialStatistics:
    merged = PartialStatistics()
    for part in parts:
        merged.merge(part)
    return merged


class TestOrderOfSummation:
    """The documentation says in which order numbers are added. So the results are known to the last bit."""

    @staticmethod
    def moments(values: Floats) -> tuple[int, float, float]:
        total = float(np.add.reduce(values))
        return len(values), total, float(np.add.reduce(np.square(values - total / len(values))))

    @staticmethod
    def combine(parts: list[tuple[int, float, float]]) -> tuple[int, float, float]:
        number, total, deviation = parts[0]
        for more, its_total, its_deviation in parts[1:]:
            distance = its_total / more - total / number
            deviation += its_deviation + distance * distance * (number / (number + more)) * more
            number, total = number + more, total + its_total
        return number, total, deviation

    def test_is_as_documented(self, tmp_path: Path) -> None:
        tensor = torch.randn(2 * 2**19 + 2**17 + 5, generator=torch.Generator().manual_seed(0))
        rankless.save_checkpoint(tmp_path, "a", {"w": tensor}, rng=False)
        values = tensor.double().numpy()
        slices = [values[start : start + 2**19] for start in range(0, len(values), 2**19)]
        parts = [[self.moments(of[start : start + 2**17]) for start in range(0, len(of), 2**17)] for of in slices]
        number, total, deviation = self.combine([self.combine(of) for of in parts])
        statistics = rankless.compute_statistics(tmp_path).tensors["model/w"]
        assert statistics.mean == total / number
        assert statistics.std == math.sqrt(deviation / number)
        assert statistics.norm == math.sqrt(deviation + number * statistics.mean**2)

    @pytest.mark.parametrize(("slices", "threads"), [(1, 1), (3, 2), (32, 7)])
    def test_does_not_depend_on_reads_and_threads(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slices: int, threads: int
    ) -> None:
        rankless.save_checkpoint(tmp_path, "a", mixed_tensors(), rng=False)
        expected = rankless.compute_statistics(tmp_path)
        monkeypatch.setattr(measured_tensors, "_SLICES", slices)
        monkeypatch.setattr(measured_tensors, "THREADS", threads)
        assert rankless.compute_statistics(tmp_path) == expected

    @pytest.mark.parametrize("to", ["safetensors", "torch", "dcp"])
    def test_does_not_depend_on_the_format(self, tmp_path: Path, to: str) -> None:
        rankless.save_checkpoint(tmp_path / "run", "a", mixed_tensors(), rng=False)
        suffix = {"safetensors": ".safetensors", "torch": ".pt"}.get(to, "")
        rankless.convert(tmp_path / "run", tmp_path / f"out{suffix}", to=to)
        converted = rankless.compute_statistics(tmp_path / f"out{suffix}").tensors
        expected = rankless.compute_statistics(tmp_path / "run").tensors
        assert {name.rpartition("/")[2]: of for name, of in converted.items()} == {
            name.rpartition("/")[2]: of for name, of in expected.items()
        }


def mixed_tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    small = {f"small{n}": torch.randn(n % 7, 11) for n in range(50)}
    return {**small, "large": torch.randn(1300, 1000), "half": torch.randn(700, 1001).bfloat16(), "n": torch.arange(9)}


def test_counts_of_parts_add_up_to_those_of_the_whole() -> None:
    values = np.random.default_rng(2).normal(size=3 * 2**17).astype("f4")
    values[::7], values[::11], values[::13] = 0, np.nan, -np.inf
    bits = values.view("u4")
    whole = measure_part(bits, "F32", Scratch()).summarize()
    parts = [measure_part(of, "F32", Scratch()) for of in np.split(bits, [1, 2**17, 2**17 + 9])]
    merged = merge_all(parts).summarize()
    for name in ("elements", "nans", "negative_infinities", "zeros", "minimum", "maximum", "histogram"):
        assert getattr(merged, name) == getattr(whole, name)
    assert merged.std == pytest.approx(whole.std, rel=1e-13)


def test_buckets_meet_and_cover_all_numbers() -> None:
    bounds = [bucket_bounds(bucket) for bucket in range(BUCKETS)]
    assert (bounds[0][0], bounds[-1][1], bounds[ZERO_BUCKET]) == (-math.inf, math.inf, (0.0, 0.0))
    assert all(left[1] == right[0] for left, right in pairwise(bounds))
    assert bounds[bucket_of(0.75)] == (0.5, 1.0)
    assert bounds[bucket_of(-0.75)] == (-1.0, -0.5)


def test_a_pattern_selects_tensors(tmp_path: Path) -> None:
    rankless.save_checkpoint(tmp_path, "a", {"a.w": torch.ones(2), "b.w": torch.ones(3)}, rng=False)
    assert list(rankless.compute_statistics(tmp_path, "a.*").tensors) == ["model/a.w"]


def test_tied_tensors_have_one_name_and_values_none(tmp_path: Path) -> None:
    tensor = torch.ones(4)
    content: Any = {"inside": torch.ones(5)}
    rankless.save_checkpoint(tmp_path, "a", {"a": tensor, "b": tensor}, user_content=content)
    assert list(rankless.compute_statistics(tmp_path).tensors) == ["model/a"]


def test_corruption_is_found(tmp_path: Path) -> None:
    rankless.save_checkpoint(tmp_path, "a", {"w": torch.ones(100), "v": torch.ones(100)}, rng=False)
    flip_tensor_bit(tmp_path / "a/model/model.safetensors", "v")
    with pytest.raises(CorruptCheckpointError, match="'v'"):
        rankless.compute_statistics(tmp_path)


def test_a_missing_checkpoint_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(NoCheckpointError):
        rankless.compute_statistics(tmp_path / "none")


def test_slices_begin_at_multiples_that_the_order_of_summation_needs() -> None:
    assert read_elements.SLICE == 2**19
