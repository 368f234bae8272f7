"""Tests of the format ``torch`` with several pipeline stages and gated layers, in folders made by Megatron's rules."""

from __future__ import annotations

from pathlib import Path

import pytest

import rankless
from rankless.errors import FormatError
from tests.helpers.equality import equal_bits
from tests.helpers.megatron_models import ARGS, build_tensors
from tests.helpers.megatron_ranks import save_ranks


def test_stages_and_gated_layers(tmp_path: Path) -> None:
    masters, moments = build_tensors(ARGS["llama"]), build_tensors(ARGS["llama"], seed=1)
    folder = save_ranks(tmp_path / "iter_0000007", masters, moments)
    opened, weights = rankless.open(folder), rankless.open(folder, keys={"weights": "model"})
    assert all(check.problem is None for check in opened.verify())
    assert sum(name.startswith("model/") for name in opened) == len(masters)
    for name, master in masters.items():
        assert equal_bits(opened[f"model/{name}"], master)
        assert equal_bits(opened[f"optimizer/{name}/exp_avg"], moments[name])
        assert equal_bits(weights[f"model/{name}"], master.bfloat16())
    gate = rankless.open(folder, keys={"layout": "hf"})["model/model.layers.2.mlp.gate_proj.weight"]
    assert equal_bits(gate, masters["decoder.layers.2.mlp.linear_fc1.weight"].chunk(2)[0])


@pytest.mark.parametrize("changes", [{"expert_model_parallel_size": 2}, {"virtual_pipeline_model_parallel_size": 2}])
def test_other_kinds_of_parallelism_are_refused(tmp_path: Path, changes: dict[str, int]) -> None:
    masters = build_tensors(ARGS["llama"])
    folder = save_ranks(tmp_path / "iter_0000007", masters, masters, **changes)
    with pytest.raises(FormatError, match="expert parallelism or a virtual pipeline in the format torch"):
        rankless.open(folder)
