"""Tests that a load materializes a model built on the meta device, with each rank's own shards only."""

import resource
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

import rankless
from rankless.errors import MismatchError
from tests.helpers import layouts
from tests.helpers.pool import Ranks


class Rotary(nn.Module):
    """A buffer that is in no checkpoint, as rotary embeddings have."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("angles", torch.empty(6), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.angles.copy_(torch.arange(6) / 7)


class Net(layouts.Net):
    def __init__(self) -> None:
        super().__init__()
        self.rotary = Rotary()
        self.head.weight = self.embed.weight


def wrap(layout: str, model: Net) -> nn.Module:
    n = dist.get_world_size() if dist.is_initialized() else 1
    if layout == "fsdp":
        return layouts.shard_fsdp2(model)
    if layout == "offload":
        return layouts.shard_fsdp2(model, offload_policy=CPUOffloadPolicy(pin_memory=False))
    if layout == "fsdp_tp":
        both = init_device_mesh("cpu", (2, n // 2), mesh_dim_names=("dp", "tp"))
        for layer in model.layers:
            layouts.parallelize_module(
                layer, both["tp"], {"up": layouts.ColwiseParallel(), "down": layouts.RowwiseParallel()}
            )
        return layouts.shard_fsdp2(model, both["dp"])
    return model


def load(layout: str, path: str) -> bool:
    with torch.device("meta"):
        model = Net()
    model = wrap(layout, model)
    ids = [id(parameter) for parameter in model.parameters()]
    rankless.load_model(model, path)
    assert not [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.is_meta]
    assert ids == [id(parameter) for parameter in model.parameters()]
    assert model.head.weight is model.embed.weight
    assert torch.equal(model.rotary.angles, torch.arange(6) / 7)
    for name, tensor in model.state_dict().items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if name != "head.weight":
            assert torch.equal(whole, layouts.expected_tensor(f"model/{name}", whole.shape, whole.dtype)), name
    if layout != "fsdp_tp":
        expected = reference()
        tokens = torch.arange(8).reshape(2, 4)
        torch.testing.assert_close(model(tokens), expected(tokens))
    return True


def reference() -> Net:
    model = Net()
    layouts.fill_run(layouts.LayoutRun(model, None, [model], []))
    with torch.no_grad():
        model.rotary.reset_parameters()
        model.embed.weight.copy_(layouts.expected_tensor("model/embed.weight", model.embed.weight.shape, torch.float32))
    return model


@pytest.mark.parametrize(("layout", "n"), [("plain", 1), ("fsdp", 3), ("offload", 2), ("fsdp_tp", 4)])
def test_it_is_filled_in_any_layout_and_tied_weights_stay_tied(
    ranks: Ranks, tmp_path: Path, layout: str, n: int
) -> None:
    rankless.save_model(reference(), tmp_path / "m", shard=True, max_shard_size=1048)
    assert ranks(n, load, layout, str(tmp_path / "m")) == [True] * n


class Lost(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.register_buffer("table", torch.zeros(3), persistent=False)


def test_a_buffer_that_nothing_makes_is_an_error_before_anything_is_changed(tmp_path: Path) -> None:
    rankless.save_model(Lost(), tmp_path / "m.pt")
    with torch.device("meta"):
        model = Lost()
    with pytest.raises(MismatchError, match=r"table: on the meta device here.*Lost has no reset_parameters"):
        rankless.load_model(model, tmp_path / "m.pt")
    assert all(parameter.is_meta for parameter in (*model.parameters(), *model.buffers()))


def test_without_strict_what_is_missing_is_initialised_by_its_module(tmp_path: Path) -> None:
    rankless.save_model(nn.ModuleDict({"a": nn.Linear(2, 2)}), tmp_path / "m.pt")
    with torch.device("meta"):
        model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.LayerNorm(3)})
    rankless.load_model(model, tmp_path / "m.pt", strict=False)
    assert torch.equal(model["b"].weight, torch.ones(3))


class Positions(nn.Module):
    """A parameter that its initializer copies out of a computed table, as Marian's positions."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(5, 3))

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.weight.copy_(torch.arange(3.0))


def _load_positions(path: str) -> torch.Tensor:
    with torch.device("meta"):
        model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": Positions()})
    fully_shard(model["b"], mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    rankless.load_model(model, path, strict=False)
    return model["b"].weight.full_tensor().detach().clone()


def test_an_initializer_may_copy_a_whole_table_into_a_sharded_parameter(ranks: Ranks, tmp_path: Path) -> None:
    rankless.save_model(nn.ModuleDict({"a": nn.Linear(2, 2)}), tmp_path / "m.pt")
    for weight in ranks(2, _load_positions, tmp_path / "m.pt"):
        assert torch.equal(weight, torch.arange(3.0).expand(5, 3))


def llama(config: transformers.PretrainedConfig) -> nn.Module:
    return transformers.LlamaForCausalLM(config)


def load_llama(path: str, *, tied: bool) -> torch.Tensor:
    config = small(tied=tied)
    with torch.device("meta"):
        model = llama(config)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    rankless.load_model(model, path)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    return model(torch.arange(5)[None]).logits.detach()


def small(*, tied: bool) -> transformers.PretrainedConfig:
    return transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        tie_word_embeddings=tied,
    )


@pytest.mark.parametrize("tied", [False, True])
def test_a_pretrained_folder_goes_straight_into_shards_of_a_model_on_meta(
    ranks: Ranks, tmp_path: Path, tied: bool
) -> None:
    torch.manual_seed(1)
    model = llama(small(tied=tied))
    model.save_pretrained(tmp_path, max_shard_size="4KB")
    expected = model(torch.arange(5)[None]).logits
    for logits in ranks(2, _load_tied if tied else _load_untied, str(tmp_path)):
        torch.testing.assert_close(logits, expected)


def _load_tied(path: str) -> torch.Tensor:
    return load_llama(path, tied=True)


def _load_untied(path: str) -> torch.Tensor:
    return load_llama(path, tied=False)


def peak(path: str, layers: int, width: int) -> int:
    """How many bytes the most that was resident grew by a load."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    _reset_peak()
    before = _resident("VmHWM")
    rankless.load_model(model, path)
    return _resident("VmHWM") - before


def _resident(field: str) -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def _reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss > 0


def test_no_rank_needs_more_memory_than_its_shard_and_a_few_buffers(ranks: Ranks, tmp_path: Path) -> None:
    layers, width = 12, 1024
    torch.manual_seed(0)
    rankless.save_model(
        nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers))), tmp_path / "m", shard=True
    )
    whole = layers * width * width * 4
    for grown in ranks(4, peak, str(tmp_path / "m"), layers, width):
        assert grown < whole // 4 + 24 * 2**20, f"{grown / 2**20:.0f} MiB"
