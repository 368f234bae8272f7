"""Tests that megatron-core itself loads what ``convert --to megatron`` writes: weights, optimizers, other layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("megatron.core", exc_type=ImportError)

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing import serialization
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import rankless
from tests.helpers.equality import equal_bits
from tests.helpers.megatron_configs import CONFIGS, build_model, fuse_tensors
from tests.helpers.megatron_models import VOCAB
from tests.helpers.pool import Ranks
from tests.interop.megatron.conftest import NAMES
from tests.peers.megatron import gpt_on_cpu

pytestmark = pytest.mark.filterwarnings("ignore")

TOKENS = torch.randint(VOCAB, (2, 11), generator=torch.Generator().manual_seed(3))
STATES = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("family", CONFIGS)
def test_weights_of_a_model_of_transformers(ranks: Ranks, tmp_path: Path, family: str, tp_size: int) -> None:
    """All weights are bit for bit those of a fusion by torch, and the model computes what transformers computes."""
    model = build_model(family)
    model.save_pretrained(tmp_path / "hf")  # type: ignore[operator]
    with torch.no_grad():
        logits = model(TOKENS).logits
    save_oracle(tmp_path / "oracle", {"weights": model.state_dict()}, logits)
    out = rankless.convert(tmp_path / "hf", tmp_path / "out", to="megatron")
    results = ranks(tp_size, load_weights, str(out), str(tmp_path / "oracle"), tp_size)
    assert all(count > 20 and not wrong for count, wrong in results), results


def load_weights(path: str, oracle: str, tp_size: int) -> tuple[int, list[str]]:
    expected = load_file(oracle)
    with gpt_on_cpu.megatron_ranks(tp_size):
        loaded = gpt_on_cpu.load_checkpoint(path, tp_size=tp_size, with_optimizer=False)
        computed = gpt_on_cpu.compute_logits(loaded.model, TOKENS)
        torch.testing.assert_close(computed[..., :VOCAB], expected.pop("logits"), atol=1e-5, rtol=1e-5)
        parameters = dict(loaded.model.named_parameters())
        if loaded.model.share_embeddings_and_output_weights:
            expected.pop("weights/output_layer.weight", None)
        assert {f"weights/{name}" for name in parameters} == set(expected)
        wrong = [
            name
            for name, parameter in parameters.items()
            if not equal_bits(parameter.data, own_part(name, parameter, expected[f"weights/{name}"]))
        ]
        return len(parameters), wrong


def own_part(name: str, parameter: Tensor, whole: Tensor) -> Tensor:
    is_gated = "linear_fc1" in name and len(whole) == 2 * 48
    return gpt_on_cpu.own_part(parameter, whole, is_gated=is_gated)


def save_oracle(
    path: Path, kinds: dict[str, dict[str, Tensor]], logits: Tensor | None = None, padded: int = VOCAB
) -> None:
    tensors = {} if logits is None else {"logits": logits.detach().clone()}
    for kind, state in kinds.items():
        fused = fuse_tensors(state, padded)
        tensors |= {f"{kind}/{name}": tensor.detach().clone().contiguous() for name, tensor in fused.items()}
    save_file(tensors, path)


def train(model: nn.Module, steps: int) -> torch.optim.AdamW:
    """AdamW after a few steps with random gradients."""
    decayed = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=0.01, betas=(0.9, 0.95)
    )
    for step in range(steps):
        set_gradients(model, step)
        optimizer.step()
    return optimizer


def set_gradients(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def states_of(model: nn.Module, optimizer: torch.optim.Optimizer, state: str) -> dict[str, Tensor]:
    return {name: optimizer.state[parameter][state] for name, parameter in model.named_parameters()}


#: Ranks, tensor-parallel size and dtype of the weights.
LAYOUTS = [(1, 1, None), (2, 2, None), (2, 1, "bfloat16"), (4, 2, "bfloat16")]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2", "qwen3_moe"])
def test_a_training_goes_on(ranks: Ranks, tmp_path: Path, family: str, layout: tuple[int, int, str | None]) -> None:
    """Masters, moments, steps and settings are those of the source, and the next step is that of torch's AdamW."""
    model = build_model(family)
    optimizer = train(model, 3)
    rankless.save_checkpoint(tmp_path / "run", "a", model, optimizer=optimizer, step=700)
    kinds = {"weights": {name: tensor.clone() for name, tensor in model.named_parameters()}}
    kinds |= {state: {k: v.clone() for k, v in states_of(model, optimizer, state).items()} for state in STATES}
    set_gradients(model, 3)
    kinds["grad"] = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    optimizer.step()
    kinds["next"] = dict(model.named_parameters())
    save_oracle(tmp_path / "oracle", kinds, padded=64)
    size, tp_size, dtype = layout
    out = rankless.convert(
        tmp_path / "run", tmp_path / "out", to="megatron", dtype=dtype, vocab_divisible_by=32, consumed_samples=2800
    )
    assert (out / "latest_checkpointed_iteration.txt").read_text() == "700"
    results = ranks(size, resume, str(out), str(tmp_path / "oracle"), tp_size)
    assert not any(wrong for _, wrong in results), results
    assert sum(count for count, _ in results) >= 20 * tp_size


def resume(path: str, oracle: str, tp_size: int) -> tuple[int, list[str]]:
    expected = load_file(oracle)
    with gpt_on_cpu.megatron_ranks(tp_size):
        loaded = gpt_on_cpu.load_checkpoint(path, tp_size=tp_size)
        check_common(loaded)
        parameters = dict(loaded.model.named_parameters())
        wrong = []
        states = gpt_on_cpu.optimizer_states(loaded)
        for name, state in states.items():
            start, stop = state["range"].tolist()

            def flat(kind: str, name: str = name, start: int = start, stop: int = stop) -> Tensor:
                whole = own_part(name, parameters[name], expected[f"{kind}/{name}"])
                return whole.flatten()[start:stop]

            wrong += [f"{name} {kind}" for kind in STATES if not equal_bits(state[kind], flat(kind))]
            wrong += [f"{name} master"] if not equal_bits(state["param"].detach().flatten(), flat("weights")) else []
            wrong += [f"{name} step"] if state["step"] != 3.0 else []
        for name, parameter in parameters.items():
            whole = own_part(name, parameter, expected[f"weights/{name}"]).to(parameter.dtype)
            wrong += [name] if not equal_bits(parameter.data, whole) else []
            parameter.main_grad.copy_(own_part(name, parameter, expected[f"grad/{name}"]))
        loaded.optimizer.step()
        for name, parameter in parameters.items():
            stepped = own_part(name, parameter, expected[f"next/{name}"]).to(parameter.dtype)
            wrong += [f"{name} next"] if not equal_bits(parameter.data, stepped) else []
        return len(states), wrong


def check_common(loaded: gpt_on_cpu.Loaded) -> None:
    settings = [
        (group["wd_mult"], group["weight_decay"], group["lr"], group["betas"], group["eps"])
        for group in loaded.optimizer.param_groups
    ]
    expected = [(1.0, 0.1, 0.01, (0.9, 0.95), 1e-8), (0.0, 0.0, 0.01, (0.9, 0.95), 1e-8)]
    assert sorted(settings, reverse=True) == expected
    args: Any = loaded.state["args"]
    assert loaded.state["iteration"] == args.iteration == 700
    assert args.consumed_train_samples == loaded.state["opt_param_scheduler"]["num_steps"] == 2800
    assert args.padded_vocab_size == 64
    assert args.vocab_size == VOCAB


@pytest.mark.parametrize("name", NAMES)
def test_checkpoints_in_every_form_become_loadable(fixtures: Path, ranks: Ranks, tmp_path: Path, name: str) -> None:
    """megatron-core reads each tensor of what older and other forms were converted to, as the training had it."""
    out = rankless.convert(fixtures / name / "ckpt", tmp_path / "out", to="megatron")
    [(count, wrong)] = ranks(1, load_plain, str(out), str(fixtures / name / "oracle.safetensors"))
    assert count >= 40
    assert not wrong


def load_plain(path: str, oracle: str) -> tuple[int, list[str]]:
    prefixes = {f"optimizer.state.{own}.": kind for kind, own in {"master": "param", **STATES}.items()}
    expected = load_file(oracle)
    with gpt_on_cpu.megatron_ranks(1):
        folder, common = gpt_on_cpu.read_common(path)
        plain = dist_checkpointing.load_plain_tensors(folder)
        loaded = {key: value for key, value in plain.items() if isinstance(value, Tensor)}
        states = serialization.load_sharded_metadata(folder)
    assert common["iteration"] == 30
    assert any(key.startswith("rng_state/shard_0.0") for key in states)
    wrong = []
    for key, tensor in loaded.items():
        kind, prefix = next(((k, p) for p, k in prefixes.items() if key.startswith(p)), ("weights", ""))
        if not equal_bits(tensor, expected[f"{kind}/{key.removeprefix(prefix)}"]):
            wrong.append(key)
    missing = [name for name in expected if name.startswith("weights/") and name.removeprefix("weights/") not in loaded]
    return len(loaded), wrong + missing


def test_experts_over_ranks(ranks: Ranks, tmp_path: Path) -> None:
    """With expert parallelism the experts have an optimizer of their own, whose groups the checkpoint has."""
    model = build_model("mixtral")
    optimizer = train(model, 3)
    rankless.save_checkpoint(tmp_path / "run", "a", model, optimizer=optimizer, step=700)
    kinds = {"weights": dict(model.named_parameters())}
    kinds |= {state: states_of(model, optimizer, state) for state in STATES}
    save_oracle(tmp_path / "oracle", kinds)
    out = rankless.convert(tmp_path / "run", tmp_path / "out", to="megatron", expert_parallel=True)
    results = ranks(2, load_experts, str(out), str(tmp_path / "oracle"))
    assert not any(wrong for _, wrong in results), results
    assert sum(count for count, _ in results) >= 40


def load_experts(path: str, oracle: str) -> tuple[int, list[str]]:
    expected = load_file(oracle)
    wrong = []
    with gpt_on_cpu.megatron_ranks(1, ep_size=2):
        loaded = gpt_on_cpu.load_checkpoint(path, tp_size=1, ep_size=2)
        assert len(loaded.optimizer.chained_optimizers) == 2
        first = parallel_state.get_expert_model_parallel_rank() * 2
        states = gpt_on_cpu.optimizer_states(loaded)
        for name, state in states.items():
            before, experts, after = name.partition(".local_experts.")
            own = f"{before}{experts}{first + int(after[0])}{after[1:]}" if experts else name
            start, stop = state["range"].tolist()
            for kind in STATES:
                whole = expected[f"{kind}/{own}"].flatten()[start:stop]
                wrong += [] if equal_bits(state[kind], whole) else [f"{name} {kind}"]
            whole = expected[f"weights/{own}"].flatten()[start:stop]
            wrong += [] if equal_bits(state["param"].detach().flatten(), whole) else [name]
    return len(states), wrong
