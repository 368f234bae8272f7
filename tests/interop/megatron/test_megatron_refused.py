"""Tests that what cannot be read of Megatron's checkpoints is refused, by name, and that nothing is guessed or run."""

from __future__ import annotations

import io
import os
import pickle
import shutil
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import rankless
from rankless.errors import (
    CorruptCheckpointError,
    FormatError,
    InvalidArgumentError,
    NoCheckpointError,
    UnsafePickleError,
)
from tests.helpers.cost import limit_cost
from tests.helpers.equality import equal_bits
from tests.helpers.megatron_models import ARGS, GROUP_SETTINGS, build_tensors, save_entries, save_flat, save_torch_dist
from tests.helpers.unsafe_pickles import MARK_FILE, UNSAFE_OBJECTS
from tests.interop.megatron.conftest import Fixture

pytestmark = pytest.mark.filterwarnings("ignore")

OpenFixture = Callable[[str], Fixture]
LLAMA = ARGS["llama"]


def copy_fixture(fixture: Fixture, folder: Path) -> Path:
    shutil.copytree(fixture.path, folder)
    return folder / "iter_0000030"


def make_states(masters: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    return {"param": masters, "exp_avg": {name: tensor + 1 for name, tensor in masters.items()}}


def replace_bytes(path: Path, old: bytes, new: bytes) -> None:
    raw = path.read_bytes()
    assert raw.count(old) == 1
    path.write_bytes(raw.replace(old, new))


@pytest.mark.parametrize(
    "name", ["dp_tp1_dp2_bf16_mcore16", "gather_tp1_dp2_fp32_mcore15", "legacy_tp2_pp1_dp1_bf16_mcore16"]
)
def test_masters_that_are_not_the_weights(open_fixture: OpenFixture, tmp_path: Path, name: str) -> None:
    """The weights of one parameter are changed: its masters cannot be told by their content any more."""
    fixture = open_fixture(name)
    iteration = copy_fixture(fixture, tmp_path / "run")
    weight = fixture.of_kind("weights")["decoder.layers.1.mlp.linear_fc2.weight"]
    width = weight.element_size()
    row = weight.contiguous().view(torch.uint8).numpy().tobytes()[: 16 * width]
    changed = bytes(reversed(row))
    files = [file for file in iteration.rglob("*") if file.is_file() and row in file.read_bytes()]
    assert files
    master = fixture.of_kind("master")["decoder.layers.1.mlp.linear_fc2.weight"]
    kept = master.numpy().tobytes()[:64] if width == 4 else None  # the masters are the same bytes
    for file in files:
        raw = file.read_bytes()
        at = raw.index(row)
        assert kept is None or raw.count(row) >= 1
        file.write_bytes(raw[:at] + changed + raw[at + len(row) :])
        break
    with pytest.raises(FormatError, match=r"rounded.*optimizer=skip"):
        rankless.open(iteration)
    assert rankless.open(iteration, keys={"optimizer": "skip"}).keys()


def test_masters_that_differ_beyond_the_samples(tmp_path: Path) -> None:
    """Of large parameters samples are compared at first; ``verify`` and conversions compare all elements."""
    masters = {**build_tensors(LLAMA), "output_layer.weight": torch.randn(2048, 32)}
    weights = {**masters, "output_layer.weight": masters["output_layer.weight"].clone()}
    folder = save_flat(tmp_path / "right", weights, LLAMA, make_states(masters))
    assert all(check.problem is None for check in rankless.open(folder).verify())
    weights["output_layer.weight"][100, 3] = 7.0
    folder = save_flat(tmp_path / "wrong", weights, LLAMA, make_states(masters))
    message = "the master weights of 'output_layer.weight', rounded, are not its weights"
    with pytest.raises(CorruptCheckpointError, match=message):
        rankless.convert(folder, tmp_path / "converted", to="native")
    assert [message in str(check.problem) for check in rankless.open(folder).verify() if check.problem] == [True]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_equal_weights_are_told_apart_by_their_order(tmp_path: Path, dtype: torch.dtype) -> None:
    """Masters of norms that all round to one: only their order tells which is whose."""
    masters = build_tensors(LLAMA)
    for name in masters:
        if "norm" in name:
            masters[name] = 1.0 + 1e-5 * torch.rand(masters[name].shape)
    weights = {name: tensor.to(dtype) for name, tensor in masters.items()}
    assert sum(bool((tensor == 1).all()) for tensor in weights.values()) == 7
    states = make_states(masters)
    opened = rankless.open(save_flat(tmp_path / "c", weights, LLAMA, states))
    for name in masters:
        assert equal_bits(opened[f"model/{name}"], masters[name])
        assert equal_bits(opened[f"optimizer/{name}/exp_avg"], states["exp_avg"][name])


def test_equal_weights_without_a_known_order(tmp_path: Path) -> None:
    masters = build_tensors(ARGS["gpt_neox"])
    for name in masters:
        if name.endswith(("linear_proj.bias", "linear_fc2.bias")):
            masters[name] = torch.zeros(32)
    folder = save_flat(tmp_path / "c", masters, ARGS["gpt_neox"], make_states(masters))
    with pytest.raises(FormatError, match=r"have equal weights, and it is unknown which.*optimizer=skip"):
        rankless.open(folder)


def test_a_frozen_parameter(tmp_path: Path) -> None:
    """A parameter that is in no buffer may have been frozen, or changed by hand."""
    weights = build_tensors(LLAMA)
    trained = {name: tensor for name, tensor in weights.items() if name != "output_layer.weight"}
    folder = save_flat(tmp_path / "c", trained, LLAMA, make_states(trained))
    assert rankless.open(folder).keys()
    with pytest.raises(FormatError, match=r"'output_layer\.weight'"):
        rankless.open(_with_weight(tmp_path / "d", weights, trained))


def _with_weight(folder: Path, weights: dict[str, Tensor], trained: dict[str, Tensor]) -> Path:
    """A folder whose model has a parameter more than its optimizer."""
    states = make_states(trained)
    return save_flat(folder, trained, LLAMA, states, weights)


@pytest.mark.parametrize(
    ("entries", "optimizer", "message"),
    [
        ({}, {"param_state_sharding_type": "fully_sharded_bucket_space"}, "form 'fully_sharded_bucket_space'"),
        ({"optimizer.state.master_param.output_layer.weight": torch.ones(64, 32)}, {}, "state.master_param"),
        ({"optimizer.state.exp_avg.other.weight": torch.ones(2)}, {}, "exp_avg of 'other.weight'"),
        ({"optimizer.state.exp_avg.output_layer.weight": torch.ones(2)}, {}, "exp_avg of 'output_layer.weight'"),
    ],
)
def test_unknown_optimizer_states(tmp_path: Path, entries: dict[str, Any], optimizer: Any, message: str) -> None:
    tensors = {"output_layer.weight": torch.ones(64, 32), **entries}
    folder = save_entries(tmp_path / "c", tensors, LLAMA, optimizer)
    with pytest.raises((FormatError, CorruptCheckpointError), match=message):
        rankless.open(folder)
    assert rankless.open(folder, keys={"optimizer": "skip"}).keys() == ["model/output_layer.weight"]


def test_groups_that_the_rule_does_not_explain(tmp_path: Path) -> None:
    weight = {"output_layer.weight": torch.ones(64, 32)}
    entries = {**weight, "optimizer.state.exp_avg.output_layer.weight": torch.ones(64, 32)}
    groups = [GROUP_SETTINGS[0], {**GROUP_SETTINGS[0], "lr_mult": 0.1}]
    folder = save_entries(tmp_path / "c", entries, LLAMA, {"optimizer": {"param_groups": groups}})
    with pytest.raises(FormatError, match=r"2 of the 2 groups of the optimizer can have 'output_layer\.weight'"):
        rankless.open(folder)


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="has no tensors of a model"):
        rankless.open(save_entries(tmp_path / "c", {}, LLAMA))


def test_unfinished_and_missing_iterations(open_fixture: OpenFixture, tmp_path: Path) -> None:
    run = tmp_path / "run"
    iteration = copy_fixture(open_fixture("full_tp2_dp1_fp32_mcore16"), run)
    (iteration / "metadata.json").rename(tmp_path / "metadata.json")
    with pytest.raises(
        FormatError, match=r"has no metadata\.json: either its save did not end, or it has the format torch_dcp"
    ):
        rankless.open(run)
    (tmp_path / "metadata.json").rename(iteration / "metadata.json")
    (run / "latest_checkpointed_iteration.txt").write_text("50")
    with pytest.raises(NoCheckpointError, match=r"names iter_0000050, which is not there.*has iter_0000030"):
        rankless.open(run)
    (run / "latest_checkpointed_iteration.txt").write_text("../../etc")
    with pytest.raises(CorruptCheckpointError, match="must hold the number of an iteration"):
        rankless.open(run)
    (iteration / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    with pytest.raises(FormatError, match="format 'zarr'"):
        rankless.open(iteration)


def test_missing_files(open_fixture: OpenFixture, tmp_path: Path) -> None:
    iteration = copy_fixture(open_fixture("dp_tp2_dp2_fp32_mcore16"), tmp_path / "run")
    (iteration / "common.pt").rename(tmp_path / "common.pt")
    with pytest.raises(CorruptCheckpointError, match=r"has no common\.pt"):
        rankless.open(iteration)
    (tmp_path / "common.pt").rename(iteration / "common.pt")
    (iteration / "__1_0.distcp").unlink()
    with pytest.raises(CorruptCheckpointError, match=r"__1_0\.distcp is missing"):
        rankless.open(iteration)
    legacy = copy_fixture(open_fixture("legacy_tp2_pp1_dp1_bf16_mcore16"), tmp_path / "legacy")
    (legacy / "mp_rank_01/distrib_optim.pt").unlink()
    with pytest.raises(FormatError, match=r"mp_rank_01 has an optimizer and no distrib_optim\.pt"):
        rankless.open(legacy)
    shutil.rmtree(legacy / "mp_rank_01")
    with pytest.raises(CorruptCheckpointError, match="the folders of 1 ranks, and by args it should have 2"):
        rankless.open(legacy)


def test_flipped_bits_are_detected(open_fixture: OpenFixture, tmp_path: Path) -> None:
    fixture = open_fixture("full_tp2_pp2_bf16_mcore19")
    iteration = copy_fixture(fixture, tmp_path / "run")
    moment = fixture.of_kind("exp_avg")["decoder.layers.3.mlp.linear_fc1.weight"].numpy().tobytes()[:512]
    (file,) = (file for file in iteration.glob("*.distcp") if moment in file.read_bytes())
    replace_bytes(file, moment, bytes([moment[0] ^ 1]) + moment[1:])
    problems = [check.problem for check in rankless.open(iteration).verify() if check.problem]
    assert len(problems) == 1
    with pytest.raises(CorruptCheckpointError):
        rankless.convert(iteration, tmp_path / "converted", to="native")


def test_copies_on_ranks_must_be_equal(open_fixture: OpenFixture, tmp_path: Path) -> None:
    iteration = copy_fixture(open_fixture("legacy_tp2_pp1_dp1_bf16_mcore16"), tmp_path / "run")
    path = iteration / "mp_rank_01/model_optim_rng.pt"
    bias = open_fixture("legacy_tp2_pp1_dp1_bf16_mcore16").of_kind("weights")["decoder.layers.0.mlp.linear_fc2.bias"]
    raw = bias.contiguous().view(torch.uint8).numpy().tobytes()
    replace_bytes(path, raw, bytes([raw[0] ^ 1]) + raw[1:])
    problems = [str(check.problem) for check in rankless.open(iteration, keys={"optimizer": "skip"}).verify()]
    assert sum("linear_fc2.bias' differs between tensor-parallel ranks" in problem for problem in problems) == 1


@pytest.mark.parametrize("kind", UNSAFE_OBJECTS)
def test_a_common_file_that_runs_code(
    open_fixture: OpenFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    iteration = copy_fixture(open_fixture("full_tp2_dp1_fp32_mcore16"), tmp_path / "run")
    torch.save({"args": UNSAFE_OBJECTS[kind], "iteration": 1}, iteration / "common.pt")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UnsafePickleError, match=r"common\.pt"):
        rankless.open(iteration)
    assert not (tmp_path / MARK_FILE).exists()


class _Reduced:
    """An object that pickles as a call of any global."""

    def __init__(self, *args: object) -> None:
        self.args = args

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, self.args


def test_objects_of_megatron_are_inert(open_fixture: OpenFixture, tmp_path: Path) -> None:
    """A name of Megatron is never imported or called: it is shown as text."""
    iteration = copy_fixture(open_fixture("full_tp2_dp1_fp32_mcore16"), tmp_path / "run")
    stream = io.BytesIO()
    torch.save({"args": Namespace(hook=_Reduced("touch here")), "iteration": 1}, stream, pickle_protocol=2)
    raw = stream.getvalue().replace(b"cposix\nsystem\n", b"cmegatron\nsyst\n")
    assert b"megatron\nsyst" in raw
    (iteration / "common.pt").write_bytes(raw)
    try:
        content = rankless.open(iteration).values["user_content"]
    except CorruptCheckpointError as error:  # the size of the pickle has changed
        assert "CRC" in str(error) or "corrupt" in str(error)
    else:
        assert content["args"].hook == "megatron.syst('touch here')"


def test_deep_objects_are_refused(tmp_path: Path) -> None:
    value: Any = 0
    for _ in range(100_000):
        value = [value]
    with pytest.raises(RecursionError):
        pickle.dumps(value)
    nested: Any = 0
    for _ in range(300):
        nested = {"a": nested}
    folder = save_entries(tmp_path / "c", {"w": torch.ones(1), "deep/shard_0_1": [nested]}, LLAMA)
    with pytest.raises(CorruptCheckpointError, match="nested deeper"):
        rankless.open(folder)


@pytest.mark.parametrize("inner", ["{", "{0.__class__}", "{0:>2000000000}"])
def test_braces_in_a_name_are_no_format(tmp_path: Path, inner: str) -> None:
    """Nothing is inserted into them, nor are they padded to two billion characters."""
    folder = save_entries(tmp_path / "c", {f"decoder.layers.{inner}": torch.ones(2, 3)}, LLAMA)
    with limit_cost(memory=True):
        names = list(rankless.open(folder))
    assert names == [f"model/decoder.layers.{layer}.{inner}" for layer in range(2)]


def test_the_cost_of_huge_stacks(tmp_path: Path) -> None:
    """A shape with very many layers costs no more than its files allow."""
    folder = save_torch_dist(tmp_path / "c", build_tensors(LLAMA), LLAMA)
    entries = {"decoder.layers.w": torch.zeros(2**22, 1, dtype=torch.uint8)}
    folder = save_entries(tmp_path / "d", entries, LLAMA)
    with limit_cost(memory=True), pytest.raises(CorruptCheckpointError):
        rankless.open(folder)


def test_invalid_keys(tmp_path: Path) -> None:
    folder = save_torch_dist(tmp_path / "c", build_tensors(LLAMA), LLAMA)
    for keys in ({"layout": "llama"}, {"weights": "best"}, {"model": "a"}, {"vocab_size": "many", "layout": "hf"}):
        with pytest.raises(InvalidArgumentError, match="keys: "):
            rankless.open(folder, keys=keys)
